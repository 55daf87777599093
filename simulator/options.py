"""Command-line options that several commands share: the attention problem, the conditions of a run, lists.

``@takes_problem()`` adds the options of :data:`PROBLEM_OPTIONS` and :data:`CONDITION_OPTIONS` to a command and
calls it with ``problem`` (an :class:`AttentionProblem`) and ``conditions`` (a :class:`RunOptions`) instead::

    @takes_problem()
    def roofline(problem: AttentionProblem, conditions: RunOptions, gpu: Annotated[str, typer.Option()] = "h100_sxm"):
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from simulator.errors import InputError, unknown
from simulator.problem import L2_STATES, TIMINGS, AttentionProblem

if TYPE_CHECKING:
    from simulator.profile import Profile

_SHAPE = "Problem"
_CONDITIONS = "RunOptions"


def _option(kind: Any, default: Any, names: str, about: str, panel: str = _SHAPE, **more: Any) -> tuple[Any, Any]:
    """An option; ``names`` has the flag and, behind commas, others for the same."""
    return Annotated[kind, typer.Option(*names.split(", "), help=about, rich_help_panel=panel, **more)], default


#: Parameter name -> (annotation, default). The defaults are 16k tokens of a 2048-wide model.
PROBLEM_OPTIONS: dict[str, tuple[Any, Any]] = {
    "batch": _option(int, 2, "--batch", "Sequences."),
    "heads": _option(int, 16, "--heads", "Query heads."),
    "kv_heads": _option(int | None, None, "--kv-heads", "Key/value heads (default: as many as query heads)."),
    "seqlen": _option(int, 8192, "--seqlen, --seqlen-q", "Queries of each sequence."),
    "seqlen_k": _option(int | None, None, "--seqlen-k", "Keys of each sequence (default: as many as queries)."),
    "seqlens": _option(
        str | None, None, "--seqlens", "Lengths by sequence, such as 256,1024,8192 (instead of --batch and --seqlen)."
    ),
    "head_dim": _option(int, 128, "--head-dim", "Width of one head."),
    "head_dim_v": _option(int | None, None, "--head-dim-v", "Width of V (default: --head-dim)."),
    "dtype": _option(str, "bf16", "--dtype", "fp16, bf16 or fp8."),
    "causal": _option(bool, True, "--causal/--no-causal", "Mask the future, aligned to the last key."),
    "pass_": _option(str, "fwd", "--pass", "fwd, bwd or fwd_bwd."),
    "window": _option(str | None, None, "--window", "Sliding window left,right in keys; -1: unbounded."),
    "mask": _option(str | None, None, "--mask", "A mask that the call reads: additive, bool or padding."),
    "dropout": _option(float, 0.0, "--dropout", "Dropout probability."),
    "softcap": _option(float, 0.0, "--softcap", "Soft cap of the scores (0: none)."),
    "num_splits": _option(int | None, None, "--num-splits", "Splits of the keys (default: the library's choice)."),
    "page_size": _option(int | None, None, "--page-size", "Keys of one page of a paged KV cache."),
    "kv_capacity": _option(int | None, None, "--kv-capacity", "Keys that the KV cache has room for."),
    "deterministic": _option(bool, False, "--deterministic", "Deterministic backward pass."),
}

CONDITION_OPTIONS: dict[str, tuple[Any, Any]] = {
    "l2_state": _option(str, "cold", "--l2-state", "cold or warm: L2 before the run.", _CONDITIONS),
    "timing": _option(str, "kernel", "--timing", "kernel, graph or eager: launch cost included.", _CONDITIONS),
    "clock_mhz": _option(
        float | None, None, "--clock-mhz", "SM clock that is set: an upper bound of the modelled one.", _CONDITIONS
    ),
    "tiles": _option(
        str | None,
        None,
        "--tiles",
        "kernel (shipped tiles), auto (searched), or rows x keys x stages x warpgroups: 128x64x2x2, fwd=...,bwd=...",
        _CONDITIONS,
    ),
    "overrides": _option(
        list[str] | None,
        None,
        "--set",
        "Change the GPU: l2_bytes=x2, hbm_bandwidth=8TB/s (repeatable).",
        _CONDITIONS,
        metavar="KEY=VALUE",
    ),
}


@dataclass(frozen=True)
class RunOptions:
    """How a problem runs: what ``simulate`` takes beside the problem, and what ``--set`` changes of the GPU."""

    l2_state: str = "cold"
    timing: str = "kernel"
    clock_mhz: float | None = None
    overrides: tuple[str, ...] = ()
    tiles: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("l2_state", L2_STATES), ("timing", TIMINGS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        if self.clock_mhz is not None and not 1 <= self.clock_mhz < 10_000:
            raise InputError(f"clock_mhz: {self.clock_mhz:g} is not a clock in MHz; write for example 1830")
        if self.tiles is not None:
            from simulator.tile_choice import check_tiles

            object.__setattr__(self, "tiles", check_tiles(self.tiles))

    def profile(self, gpu: str) -> Profile:
        """The profile ``gpu`` (a name or a file) with the ``--set`` changes."""
        from pathlib import Path

        from simulator.profile import load_profile

        if "," in gpu and not Path(gpu).exists():
            raise InputError(f"--gpu: {gpu!r} is a list; this command takes one GPU")
        profile = load_profile(gpu)
        if self.overrides:
            from simulator.overrides import parse_overrides

            profile = parse_overrides(self.overrides, profile)
        return profile

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``simulate``."""
        tiles = {"tiles": self.tiles} if self.tiles is not None else {}
        return {"l2_state": self.l2_state, "timing": self.timing, "clock_mhz": self.clock_mhz, **tiles}


def takes_problem(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the command gets the shared options; ``defaults`` replaces defaults (``seqlen=1``).

    The command's own parameters come first in its help and must have annotations that Typer understands.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        shared = PROBLEM_OPTIONS | CONDITION_OPTIONS

        @functools.wraps(command)
        def with_options(**given: Any) -> Any:
            taken = {name: given.pop(name) for name in shared}
            conditions = RunOptions(
                taken["l2_state"], taken["timing"], taken["clock_mhz"], tuple(taken["overrides"] or ()), taken["tiles"]
            )
            problem = problem_of({name: taken[name] for name in PROBLEM_OPTIONS})
            return command(problem=problem, conditions=conditions, **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in ("problem", "conditions")]
        for name, (annotation, default) in shared.items():
            value = defaults.get(name, default)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)
            )
        cast(Any, with_options).__signature__ = inspect.Signature(parameters)
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        del with_options.__wrapped__  # Typer would follow it to the signature without the shared options
        return with_options

    return decorate


def problem_of(options: dict[str, Any]) -> AttentionProblem:
    """The problem of the values of :data:`PROBLEM_OPTIONS`; :class:`InputError` when they make none."""
    values = dict(options)
    values["seqlen_q"] = values.pop("seqlen")
    lengths = values.pop("seqlens")
    if lengths:
        if values["seqlen_k"] is not None:
            raise InputError("--seqlens: gives queries and keys of each sequence; leave --seqlen-k out")
        lengths = parse_lengths(lengths)
        values |= {"seqlens_q": lengths, "seqlens_k": lengths, "batch": len(lengths), "seqlen_q": max(lengths)}
    values["window"] = parse_window(values["window"]) if values["window"] else None
    return AttentionProblem(**values)


def parse_window(text: str) -> tuple[int, int] | None:
    """A window in keys around the diagonal: ``left,right`` (or with ``:`` or ``;``), or ``left`` (right unbounded).

    ``-1`` is unbounded; a window without any bound is ``None``. :class:`InputError` on anything else.
    """
    parts = text.strip().strip("()[]").replace(":", ",").replace(";", ",").split(",")
    try:
        sides = [whole_number(part) for part in parts]
    except ValueError:
        sides = []
    if not 1 <= len(sides) <= 2 or min(sides) < -1:
        raise InputError(f"window: {text!r} is not a window; write left,right in keys such as 1024,0 (-1: unbounded)")
    left, right = (*sides, -1)[:2]
    return None if (left, right) == (-1, -1) else (left, right)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths of sequences: ``256,1024,8192``, also with ``;``. :class:`InputError` on anything else."""
    try:
        lengths = tuple(whole_number(part) for part in text.strip().strip("[]()").replace(";", ",").split(","))
    except ValueError:
        lengths = (0,)
    if min(lengths) < 1:
        raise InputError(f"seqlens: {text!r} is no list of lengths; write for example 256,1024,8192")
    return lengths


def whole_number(text: str) -> int:
    """The integer in ``text``; ``8192.0`` and ``8e3`` count as one. ValueError otherwise."""
    text = text.strip()
    if "_" in text:
        raise ValueError(text)
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(number)


def comma_list(text: str, option: str) -> list[str]:
    """The names in ``a,b,c``; :class:`InputError` when there is none or one comes twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option}: nothing given; write names with commas between them")
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{option}: {name!r} is given twice; keep one of them")
    return names
