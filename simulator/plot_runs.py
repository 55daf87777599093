"""The simulations behind the pictures: several algorithms on several GPUs, and sweeps of one quantity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.comparison import asked_of, parse_algorithm
from simulator.errors import InputError
from simulator.options import RunOptions
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.result import Result

#: The KiB of shared memory and the MB of L2 that sweeps take when none are given.
SRAM_KIB = (32, 64, 128, 228, 456, 912, 1824)
L2_FACTORS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Run:
    """One simulation: ``result``, or ``error`` saying why there is none."""

    algorithm: str
    profile: Profile
    problem: AttentionProblem
    result: Result | None
    error: str = ""


def run(
    algorithm: str, problem: AttentionProblem, profile: Profile, conditions: RunOptions, hypothetical: bool = False
) -> Run:
    """Simulate ``name`` or ``name:implementation``; flash_decoding runs the problem's decode step (one query)."""
    from simulator import simulate

    name, implementation = parse_algorithm(algorithm)
    asked = asked_of(name, problem)
    try:
        result = simulate(
            name,
            asked,
            profile,
            implementation=implementation,
            hypothetical=hypothetical,
            **conditions.arguments(),
        )
    except InputError as error:
        return Run(algorithm, profile, asked, None, str(error))
    return Run(algorithm, profile, asked, result)


def runs(
    problem: AttentionProblem,
    profiles: Iterable[Profile],
    algorithms: Sequence[str],
    conditions: RunOptions,
    hypothetical: bool = False,
) -> list[Run]:
    """Every algorithm on every GPU; :class:`InputError` when none could run."""
    found = [run(a, problem, profile, conditions, hypothetical) for profile in profiles for a in algorithms]
    return some_ran(found)


def some_ran(found: list[Run]) -> list[Run]:
    """``found``, or the first error when nothing in it ran."""
    if found and not any(one.result for one in found):
        raise InputError(found[0].error)
    return found


def seqlen_runs(
    problem: AttentionProblem,
    profiles: Iterable[Profile],
    algorithms: Sequence[str],
    conditions: RunOptions,
    seqlens: Sequence[int] = SEQLENS,
    tokens: int | None = None,
    hypothetical: bool = False,
) -> list[Run]:
    """``problem`` at each sequence length (queries and keys); ``tokens`` keeps batch times length constant."""
    found = []
    for profile in profiles:
        for n in seqlens:
            batch = problem.batch if tokens is None else max(1, tokens // n)
            asked = problem.with_(batch=batch, seqlen_q=n, seqlen_k=n)
            found += [run(a, asked, profile, conditions, hypothetical) for a in algorithms]
    return some_ran(found)


def changed_runs(
    key: str,
    values: Sequence[float],
    problem: AttentionProblem,
    profile: Profile,
    algorithms: Sequence[str],
    conditions: RunOptions,
) -> list[tuple[float, Run]]:
    """``problem`` with one number of the GPU changed to each of ``values`` (base units); the kernels stay the same.

    Algorithms that a value does not let run are errors in their :class:`Run`.
    """
    from simulator.overrides import with_values

    found = []
    for value in values:
        numbers = {key: value}
        if key == "smem_bytes_per_sm":
            # a CTA's limit follows as it does on every GPU so far: 1 KiB of the SM's stays the system's
            numbers["smem_bytes_per_cta_max"] = value - 1024
        try:
            changed = with_values(profile, numbers)
        except InputError as error:
            found += [(value, Run(a, profile, problem, None, str(error))) for a in algorithms]
            continue
        # a smaller shared memory needs smaller tiles than the kernels have: only a hypothetical run has those
        found += [(value, run(a, problem, changed, conditions, True)) for a in algorithms]
    some_ran([one for _, one in found])
    return found


def guide_bytes(problem: AttentionProblem, sram_bytes: float) -> float:
    """FlashAttention-1's HBM traffic up to a constant: N² d² / M elements a head, in bytes (Theorem 2)."""
    elements = problem.seqlen_q * problem.seqlen_k * problem.head_dim**2 / (sram_bytes / problem.element_bytes)
    return problem.batch * problem.heads * elements * problem.element_bytes
