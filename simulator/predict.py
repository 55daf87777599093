"""The batch interface: a table of cases in, the same table with predictions out.

Columns that are read are those of :data:`INPUT_COLUMNS`; a blank cell or a missing column means its default, and
every other column passes through untouched. A row that cannot be predicted says so in ``error``, its numbers stay
empty, and the other rows are predicted all the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from simulator.errors import InputError
from simulator.options import RunOptions, parse_window, whole_number
from simulator.problem import DTYPE_BYTES, PASSES, AttentionProblem

if TYPE_CHECKING:
    import pandas

    from simulator.dispatch.timing import FrameworkCall
    from simulator.profile import Profile

#: Columns that a case must have; blank cells in them make the row an error.
REQUIRED_COLUMNS = ("algorithm", "batch", "heads", "seqlen_q", "head_dim")
#: Every column that is read. ``seqlens_q``/``seqlens_k``/``seqlens`` are lists like ``256;1024;8192``.
INPUT_COLUMNS = (
    "algorithm",
    "implementation",
    "pass",
    "dtype",
    "causal",
    "batch",
    "heads",
    "kv_heads",
    "seqlen_q",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "window",
    "mask",
    "dropout",
    "softcap",
    "num_splits",
    "page_size",
    "kv_capacity",
    "deterministic",
    "seqlens",
    "seqlens_q",
    "seqlens_k",
    "l2_state",
    "timing",
    "gpu",
    "clock_mhz",
    "dispatch_framework",
    "dispatch_version",
)
#: Columns that are added, in order: those of ``Result.row()``.
OUTPUT_COLUMNS = (
    "time_us",
    "cycles",
    "sm_clock_mhz",
    "hbm_read_bytes",
    "hbm_write_bytes",
    "dirty_bytes_at_end",
    "l2_read_bytes",
    "l2_write_bytes",
    "flops",
    "executed_flops",
    "peak_memory_bytes",
    "limiter",
    "warnings",
    "error",
    "time_low_us",
    "time_high_us",
)

_TRUE = {"1", "true", "yes", "1.0"}
_FALSE = {"0", "false", "no", "0.0"}


@dataclass(frozen=True)
class Case:
    """One row of a table of cases, understood. ``framework`` is who chooses the kernel of the algorithm ``auto``."""

    algorithm: str
    implementation: str | None
    problem: AttentionProblem
    gpu: str
    conditions: RunOptions
    framework: FrameworkCall | None = None


def predict_frame(
    frame: pandas.DataFrame,
    default_gpu: str | None = None,
    *,
    overrides: Iterable[str] = (),
    hypothetical: bool = False,
    framework: str | None = None,
    tiles: str | None = None,
    jobs: int = 1,
    on_row: Callable[[], object] | None = None,
) -> pandas.DataFrame:
    """``frame`` with the columns of :data:`OUTPUT_COLUMNS` added; rows, their order and index stay.

    ``default_gpu`` (a profile's name or file) serves rows whose ``gpu`` is blank; ``overrides`` are ``--set`` texts
    applied to every GPU. ``framework`` serves rows whose ``dispatch_framework`` is blank. ``tiles`` is that of
    :func:`~simulator.simulate` for every row. ``jobs`` > 1 spreads the rows
    over that many processes, with the same result. ``on_row`` is called after each row. Raises :class:`InputError`
    when a required column is missing or a column already has an output's name.
    """
    import pandas

    check_columns([str(name) for name in frame.columns])
    known = [name for name in INPUT_COLUMNS if name in frame.columns]
    cells = {name: [cell_text(value) for value in frame[name]] for name in known}
    rows = [dict(zip(known, values, strict=True)) for values in zip(*cells.values(), strict=True)]
    outputs = []
    if framework:
        rows = [row | {"dispatch_framework": row.get("dispatch_framework") or framework} for row in rows]
    for output in _predicted(rows, (default_gpu, tuple(overrides), hypothetical, tiles), jobs):
        outputs.append(output)
        if on_row is not None:
            on_row()
    # object columns keep integers integers beside the empty cells of errored rows
    columns = {name: pandas.Series([o[name] for o in outputs], frame.index, object) for name in OUTPUT_COLUMNS}
    return pandas.concat([frame, pandas.DataFrame(columns, index=frame.index)], axis=1)


def check_columns(names: list[str]) -> None:
    """:class:`InputError` when a column is missing, comes twice, or has an output's name."""
    for name in dict.fromkeys(names):
        if name in OUTPUT_COLUMNS:
            raise InputError(f"column '{name}': predict writes a column of this name; rename it (measured_{name})")
        if name in INPUT_COLUMNS and names.count(name) > 1:
            raise InputError(f"column '{name}': comes {names.count(name)} times; keep one of them")
    varlen = {"seqlens", "seqlens_q"} & set(names)
    derived = {"batch", "seqlen_q"} if varlen else set()
    missing = [name for name in REQUIRED_COLUMNS if name not in names and name not in derived]
    if missing:
        near = difflib.get_close_matches(missing[0], [n for n in names if n not in INPUT_COLUMNS], n=1, cutoff=0.6)
        hint = f"is it '{near[0]}'? " if near else ""
        raise InputError(f"column '{missing[0]}': missing; {hint}a case needs {', '.join(REQUIRED_COLUMNS)}")


#: What the rows of a file share, in the order of :func:`predict_row`'s arguments.
_Shared = tuple[str | None, tuple[str, ...], bool, str | None]


def _predicted(rows: list[dict[str, str]], shared: _Shared, jobs: int) -> Iterable[dict[str, Any]]:
    tasks = [(row, *shared) for row in rows]
    if jobs <= 1 or len(rows) < 2:
        yield from map(_predict_task, tasks)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # spawned workers: a fork would copy the locks of NumPy's and Numba's threads in whatever state they are
    with ProcessPoolExecutor(min(jobs, len(rows)), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_predict_task, tasks, chunksize=max(1, min(16, len(rows) // (4 * jobs))))


def _predict_task(task: tuple[dict[str, str], str | None, tuple[str, ...], bool, str | None]) -> dict[str, Any]:
    return predict_row(*task)


def predict_row(
    row: Mapping[str, str],
    default_gpu: str | None = None,
    overrides: tuple[str, ...] = (),
    hypothetical: bool = False,
    tiles: str | None = None,
) -> dict[str, Any]:
    """The output columns of one row of cell texts; numbers are ``None`` where ``error`` says why."""
    from simulator import simulate
    from simulator.dispatch.automatic import AUTO, not_what_runs, pick

    try:
        case = parse_case(row, default_gpu)
        profile, notes = _profile(case.gpu, overrides), []
        algorithm, implementation, problem = case.algorithm, case.implementation, case.problem
        if algorithm == AUTO:
            assert case.framework is not None
            picked = pick(case.framework, problem, profile)
            algorithm, implementation, problem = picked.algorithm, picked.implementation, picked.problem
            notes.append(picked.note)
        elif case.framework is not None:
            notes.append(not_what_runs(case.framework, algorithm, implementation, problem, profile))
        result = simulate(
            algorithm,
            problem,
            profile,
            implementation=implementation,
            hypothetical=hypothetical,
            tiles=tiles,
            **case.conditions.arguments(),
        )
        output = result.row()
        notes += [f"hypothetical: {line}" for line in result.substitutions]
        output["warnings"] = "; ".join(filter(None, [output["warnings"], *notes]))
        return {name: output[name] for name in OUTPUT_COLUMNS}
    except InputError as error:
        message = str(error)
    except MemoryError:
        message = "too large for the memory of this machine; take fewer sequences, heads or queries"
    except Exception as error:
        # a defect of iosim in one row must not cost a user the other thousand
        message = f"internal error, please report it: {type(error).__name__}: {error}"
    return dict.fromkeys(OUTPUT_COLUMNS) | {"warnings": "", "error": " ".join(message.split()), "limiter": ""}


@lru_cache(maxsize=64)
def _profile(gpu: str, overrides: tuple[str, ...]) -> Profile:
    return RunOptions(overrides=overrides).profile(gpu)


def cell_text(value: Any) -> str:
    """A cell as stripped text; what pandas takes for missing is blank."""
    import pandas

    return "" if value is None or (not isinstance(value, str) and pandas.isna(value)) else str(value).strip()


def parse_case(row: Mapping[str, str], default_gpu: str | None = None) -> Case:
    """The case of a row of cell texts; :class:`InputError` names the column and the value that cannot be read."""
    sizes = {
        name: _parsed(row, name, _positive, None, "a positive whole number, such as 128")
        for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
    }
    limits = {
        name: _parsed(row, name, _positive, None, "a positive whole number, or leave it blank")
        for name in ("num_splits", "page_size", "kv_capacity")
    }
    both = _parsed(row, "seqlens", _lengths, None, "a list of lengths, such as 256;1024;8192")
    lengths = {
        name: _parsed(row, name, _lengths, both, "a list of lengths, such as 256;1024;8192")
        for name in ("seqlens_q", "seqlens_k")
    }
    _from_lengths(sizes, lengths)
    algorithm = row.get("algorithm", "")
    for name in REQUIRED_COLUMNS:
        if not sizes.get(name, algorithm):
            raise InputError(f"{name}: blank; a case needs {', '.join(REQUIRED_COLUMNS)}")
    problem = AttentionProblem(
        **sizes,
        **limits,
        **lengths,
        dtype=_parsed(row, "dtype", _one_of(DTYPE_BYTES), AttentionProblem.dtype, "fp16, bf16 or fp8"),
        pass_=_parsed(row, "pass", _one_of(PASSES), AttentionProblem.pass_, "fwd, bwd or fwd_bwd"),
        causal=_parsed(row, "causal", _boolean, False, "0 or 1"),
        deterministic=_parsed(row, "deterministic", _boolean, False, "0 or 1"),
        window=_parsed(row, "window", parse_window, None, "left,right in keys, such as 1024,0 (-1: unbounded)"),
        mask=row.get("mask") or None,
        dropout=_parsed(row, "dropout", float, 0.0, "a probability, such as 0.1"),
        softcap=_parsed(row, "softcap", float, 0.0, "a number, such as 50"),
    )
    gpu = row.get("gpu") or default_gpu
    if not gpu:
        raise InputError("gpu: blank, and no --gpu was given; name one of 'iosim gpus'")
    conditions = RunOptions(
        l2_state=row.get("l2_state") or RunOptions.l2_state,
        timing=row.get("timing") or RunOptions.timing,
        clock_mhz=_parsed(row, "clock_mhz", float, None, "a clock in MHz, such as 1830"),
    )
    implementation = row.get("implementation") or None
    return Case(algorithm, implementation, problem, gpu, conditions, _framework(row, algorithm, implementation))


def _framework(row: Mapping[str, str], algorithm: str, implementation: str | None) -> FrameworkCall | None:
    from simulator.dispatch.automatic import AUTO, DEFAULT_FRAMEWORK, framework_call

    if algorithm == AUTO and implementation:
        raise InputError(f"implementation: {implementation!r} with algorithm auto, which chooses it; leave one out")
    default = DEFAULT_FRAMEWORK if algorithm == AUTO else None
    return framework_call(row.get("dispatch_framework") or default, row.get("dispatch_version"))


def _parsed(row: Mapping[str, str], name: str, parse: Callable[[str], Any], default: Any, right: str) -> Any:
    """The parsed cell ``name``, or ``default`` where it is blank."""
    text = row.get(name, "")
    if not text:
        return default
    try:
        return parse(text)
    except (ValueError, OverflowError):
        raise InputError(f"{name}: {text!r} cannot be read; write {right}") from None


def _positive(text: str) -> int:
    number = whole_number(text)
    if number < 1:
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError(text)
    return lowered in _TRUE


def _one_of(known: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError(text)
        return text

    return parse


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.strip("[]()").split(";"))


def _from_lengths(sizes: dict[str, int | None], lengths: dict[str, tuple[int, ...] | None]) -> None:
    """Fill blank sizes from the lists of lengths, and refuse sizes that contradict them."""
    for size, name in (("seqlen_q", "seqlens_q"), ("seqlen_k", "seqlens_k")):
        values = lengths[name]
        if values is None:
            continue
        for column, derived in (("batch", len(values)), (size, max(values))):
            if sizes[column] is None:
                sizes[column] = derived
        if sizes["batch"] != len(values):
            raise InputError(f"{name}: {len(values)} lengths for batch {sizes['batch']}; give one for each sequence")
        longest = sizes[size]
        if longest is not None and longest < max(values):
            raise InputError(f"{name}: {max(values)} is longer than {size} {longest}; make {size} the maximum")
