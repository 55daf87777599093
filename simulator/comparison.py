"""Several algorithms side by side on several GPUs: plain data for tables, files and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import fsum

from algorithms import MODULES, algorithm_module, default_implementation
from algorithms.varlen import is_varlen, padded
from simulator.dispatch.automatic import AUTO, DEFAULT_FRAMEWORK, Pick, framework_call, not_what_runs, pick
from simulator.dispatch.timing import FrameworkCall
from simulator.errors import InputError, UnsupportedError, did_you_mean
from simulator.options import RunOptions
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.result import Result

#: What tells one simulation from another (GPU, algorithm, implementation, problem), and :func:`_entry`'s arguments.
_Key = tuple[str, str, str, AttentionProblem]
_Run = tuple[str, str, Profile, AttentionProblem, RunOptions, bool]

BASELINE = "standard"
#: Up to this many queries a problem is a decode step (one token, or a few speculative ones).
DECODE_QUERIES = 8


@dataclass(frozen=True)
class Entry:
    """One algorithm on one GPU: its result, or why there is none.

    ``lacking`` are the capabilities that the GPU lacks. ``speedup`` is over ``standard`` on the same problem
    (``None`` where either could not run); ``decode`` marks an algorithm that ran the decode problem of the comparison,
    ``padded`` one that ran every sequence as long as the longest, where the problem gives each its own length;
    ``automatic`` what a framework chose, ``several`` one of several implementations of an algorithm.
    """

    algorithm: str
    implementation: str
    profile: Profile
    problem: AttentionProblem
    result: Result | None = None
    error: str = ""
    lacking: tuple[str, ...] = ()
    speedup: float | None = None
    decode: bool = False
    padded: bool = False
    automatic: bool = False
    several: bool = False

    @property
    def label(self) -> str:
        """What tables and pictures call it."""
        if self.automatic and self.algorithm != AUTO:
            return f"{AUTO}: {self.algorithm}" + (" padded" if self.padded else "")
        name = f"{self.algorithm}:{self.implementation}" if self.several else self.algorithm
        return name + ("*" if self.decode else "") + (" padded" if self.padded else "")

    @property
    def peak_path(self) -> str:
        """Tensor instruction path of the entry's matrix work; "" when there is none."""
        return matmul_path(self.result) if self.result else ""

    @property
    def peak_flops(self) -> float:
        """Spec FLOP/s of that path for the problem's dtype: rate per SM, times SMs, at the datasheet's clock."""
        return self.result.path_peak_flops if self.result else 0.0

    @property
    def percent_of_peak(self) -> float | None:
        """Nominal FLOP/s in per cent of :attr:`peak_flops`."""
        if self.result is None or not self.peak_flops:
            return None
        return 100 * self.result.tflops * 1e12 / self.peak_flops

    def row(self) -> dict[str, object]:
        """Flat data: what was asked, predict's columns, and what a comparison adds."""
        p, r = self.problem, self.result
        asked = {
            "gpu": self.profile.name,
            "algorithm": self.algorithm,
            "implementation": self.implementation,
            "pass": p.pass_,
            "dtype": p.dtype,
            "causal": int(p.causal),
            **{name: getattr(p, name) for name in _SIZES},
            "padded": int(self.padded),
            "automatic": int(self.automatic),
        }
        if r is None:
            return asked | dict.fromkeys(_NUMBERS) | {"warnings": "", "error": self.error}
        work = dict(r.work)
        numbers = r.row() | {
            "tflops": r.tflops,
            "peak_path": self.peak_path,
            "peak_tflops": self.peak_flops / 1e12,
            "percent_of_peak": self.percent_of_peak,
            "matmul_flop": work.pop("matmul", 0),
            "exp_ops": work.pop("exp", 0),
            "other_ops": fsum(work.values()),
            "flop_per_hbm_byte": r.arithmetic_intensity,
            "ridge_flop_per_byte": r.ridge_flop_per_byte,
            "speedup_over_standard": self.speedup,
            "substitutions": "; ".join(r.substitutions),
        }
        return asked | {name: numbers[name] for name in _NUMBERS} | {"warnings": numbers["warnings"], "error": ""}


_SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
_NUMBERS = (
    "time_us",
    "tflops",
    "percent_of_peak",
    "peak_tflops",
    "peak_path",
    "speedup_over_standard",
    "limiter",
    "cycles",
    "sm_clock_mhz",
    "flops",
    "executed_flops",
    "matmul_flop",
    "exp_ops",
    "other_ops",
    "hbm_read_bytes",
    "hbm_write_bytes",
    "dirty_bytes_at_end",
    "l2_read_bytes",
    "l2_write_bytes",
    "flop_per_hbm_byte",
    "ridge_flop_per_byte",
    "peak_memory_bytes",
    "substitutions",
)


@dataclass(frozen=True)
class Comparison:
    """All entries, GPU by GPU in the order asked. ``decode_problem`` is set when some algorithm ran that instead."""

    problem: AttentionProblem
    entries: tuple[Entry, ...]
    decode_problem: AttentionProblem | None = None

    def by_gpu(self) -> list[tuple[Profile, list[Entry]]]:
        """The entries of each GPU."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.profile.name, []).append(entry)
        return [(group[0].profile, group) for group in groups.values()]


def matmul_path(result: Result) -> str:
    """Tensor instruction path of the kernel that does most of the matrix work; "" when there is none."""
    busiest = max(result.kernels, key=lambda kernel: kernel.work.get("matmul", 0.0), default=None)
    return busiest.path if busiest is not None and busiest.work.get("matmul") else ""


def decode_problem(problem: AttentionProblem) -> AttentionProblem:
    """The decode step of ``problem``: one query token on the same keys; itself when it is one already, or trains."""
    keep = problem.seqlen_q <= DECODE_QUERIES or problem.pass_ != "fwd"
    return problem if keep else problem.with_(seqlen_q=1, seqlens_q=None)


def asked_of(algorithm: str, problem: AttentionProblem) -> AttentionProblem:
    """What ``algorithm`` runs of ``problem``: flash_decoding its decode step, all others the problem."""
    return decode_problem(problem) if algorithm == "flash_decoding" else problem


def parse_algorithm(name: str) -> tuple[str, str | None]:
    """``fa1:flash_attn_1_paper`` as (algorithm, implementation or None); :class:`InputError` names the known ones."""
    algorithm, _, implementation = name.partition(":")
    module = algorithm_module(algorithm)
    if implementation and implementation not in module.IMPLEMENTATIONS:
        known = ", ".join(module.IMPLEMENTATIONS)
        hint = did_you_mean(implementation, module.IMPLEMENTATIONS)
        raise InputError(f"implementation: {implementation!r} is not one of {algorithm}'s; {hint}known: {known}")
    return algorithm, implementation or None


def all_algorithms() -> list[str]:
    """Every algorithm that there is."""
    return list(MODULES)


def compare(
    problem: AttentionProblem,
    profiles: Iterable[Profile],
    algorithms: Iterable[str],
    conditions: RunOptions | None = None,
    *,
    hypothetical: bool = False,
    framework: FrameworkCall | None = None,
    jobs: int = 1,
) -> Comparison:
    """Simulate ``algorithms`` (``name`` or ``name:implementation``) on every profile, in ``jobs`` processes.

    ``flash_decoding`` runs its decode problem (:func:`decode_problem`), everything else ``problem``; speed-ups are
    over ``standard`` on the same problem. With lengths by sequence, what takes them runs with them and padded to the
    longest, the others padded only, and ``standard`` is padded. ``auto`` is what ``framework`` (PyTorch unless given)
    would run; with a ``framework``, what it would not run gets a warning. What cannot run is an entry with its error.
    Raises :class:`InputError` for unknown names, and when nothing could run for another reason than a capability that
    a GPU lacks.
    """
    conditions = conditions or RunOptions()
    wanted = [(AUTO, None) if name == AUTO else parse_algorithm(name) for name in algorithms]
    decode = decode_problem(problem)
    runs: dict[_Key, _Run] = {}
    order: list[Entry | tuple[_Key, _Key, str, bool]] = []
    for profile in profiles:
        for algorithm, implementation in wanted:
            asked = decode if algorithm == "flash_decoding" else problem
            note, automatic = "", algorithm == AUTO
            if automatic:
                chosen = _picked(framework, problem, profile)
                if isinstance(chosen, Entry):
                    order.append(chosen)
                    continue
                algorithm, implementation, asked = chosen.algorithm, chosen.implementation, chosen.problem
                note = chosen.note
            elif framework is not None:
                note = not_what_runs(framework, algorithm, implementation, asked, profile)
            implementation = implementation or default_implementation(algorithm, profile, asked)
            base = (profile.name, BASELINE, default_implementation(BASELINE, profile, asked), padded(asked))
            for variant in _variants(algorithm, implementation, asked):
                own = (profile.name, algorithm, implementation, variant)
                for key in (base, own):
                    runs.setdefault(key, (key[1], key[2], profile, key[3], conditions, hypothetical))
                order.append((base, own, note, automatic))
    done = dict(zip(runs, _all_entries(list(runs.values()), jobs), strict=True))

    def finished(base: _Key, own: _Key, note: str, automatic: bool) -> Entry:
        return _noted(_against(done[own], done[base]), note, automatic)

    entries = [item if isinstance(item, Entry) else finished(*item) for item in order]
    kernels: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        if not entry.automatic:
            kernels.setdefault((entry.profile.name, entry.algorithm), set()).add(entry.implementation)
    entries = [
        replace(
            entry,
            decode=not entry.automatic and entry.problem not in (problem, padded(problem)),
            padded=is_varlen(problem) and not is_varlen(entry.problem),
            several=len(kernels.get((entry.profile.name, entry.algorithm), ())) > 1,
        )
        for entry in entries
    ]
    if not any(entry.result for entry in entries) and not all(entry.lacking for entry in entries):
        raise InputError(next(entry.error for entry in entries if not entry.lacking))
    used_decode = decode if any(entry.decode for entry in entries) else None
    return Comparison(problem, tuple(entries), used_decode)


def _picked(framework: FrameworkCall | None, problem: AttentionProblem, profile: Profile) -> Pick | Entry:
    """What ``auto`` means on ``profile``, or an entry that says why it means nothing."""
    try:
        call = framework or framework_call(DEFAULT_FRAMEWORK)
        assert call is not None
        return pick(call, problem, profile)
    except UnsupportedError as error:
        return Entry(AUTO, "", profile, problem, error=str(error), automatic=True)


def _noted(entry: Entry, note: str, automatic: bool) -> Entry:
    """``entry`` with ``note`` among its result's warnings."""
    result = entry.result
    if note and result is not None:
        result = replace(result, warnings=(note, *result.warnings))
    return replace(entry, result=result, automatic=automatic)


def _variants(algorithm: str, implementation: str, problem: AttentionProblem) -> list[AttentionProblem]:
    """``problem``; with lengths by sequence also padded, or only so if the kernels do not take them."""
    if not is_varlen(problem):
        return [problem]
    kernels = algorithm_module(algorithm).IMPLEMENTATIONS[implementation]
    takes_lengths = "varlen" in kernels.features_of(problem.pass_)
    return [problem, padded(problem)] if takes_lengths else [padded(problem)]


def _against(entry: Entry, base: Entry) -> Entry:
    if entry.result is None or base.result is None:
        return replace(entry, speedup=None)
    return replace(entry, speedup=base.result.time_us / entry.result.time_us)


def _all_entries(runs: list[_Run], jobs: int) -> list[Entry]:
    if jobs <= 1 or len(runs) < 2:
        return [_entry(*run) for run in runs]
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # spawned workers: a fork would copy the locks of NumPy's and Numba's threads in whatever state they are
    with ProcessPoolExecutor(min(jobs, len(runs)), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(_entry, *zip(*runs, strict=True)))


def _entry(
    algorithm: str,
    implementation: str,
    profile: Profile,
    problem: AttentionProblem,
    conditions: RunOptions,
    hypothetical: bool,
) -> Entry:
    from simulator import simulate

    lacking = missing_capabilities(algorithm, implementation, profile)
    try:
        result = simulate(
            algorithm,
            problem,
            profile,
            implementation=implementation,
            hypothetical=hypothetical,
            **conditions.arguments(),
        )
    except InputError as error:
        return Entry(algorithm, implementation, profile, problem, error=str(error), lacking=lacking)
    return Entry(algorithm, result.implementation, profile, problem, result)


def missing_capabilities(algorithm: str, implementation: str, profile: Profile) -> tuple[str, ...]:
    """Capabilities that the kernels of ``implementation`` need and ``profile`` lacks, sorted."""
    needs = algorithm_module(algorithm).IMPLEMENTATIONS[implementation].requires
    return tuple(sorted(needs - profile.capabilities))
