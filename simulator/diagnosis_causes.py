"""The known causes of a time that the model does not expect, as other runs to simulate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from simulator.clock import loaded_clock_hz
from simulator.options import RunOptions
from simulator.physics import Physics
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.result import Result

#: Head dims that fused kernels are compiled for.
COMPILED_HEAD_DIMS = (64, 96, 128, 192, 256)
#: A page this small is gathered row by row.
SMALL_PAGE = 16
#: Long enough for the board's power limit to have settled.
_SETTLED_S = 10.0


@dataclass(frozen=True)
class Candidate:
    """One cause: a name, what it means, and the run whose time it gives."""

    name: str
    about: str
    algorithm: str
    implementation: str | None
    problem: AttentionProblem
    conditions: RunOptions


def candidates(
    expected: Result, problem: AttentionProblem, profile: Profile, conditions: RunOptions
) -> Iterator[Candidate]:
    """Every cause that has a meaning for the call, with all its values; some kernels may not take it."""
    own = (expected.algorithm, expected.implementation)

    def same(name: str, about: str, p: AttentionProblem = problem, c: RunOptions = conditions) -> Candidate:
        return Candidate(name, about, *own, p, c)

    yield from _other_kernels(expected, problem, profile, conditions)
    yield from _other_problems(expected, problem, same)
    if conditions.timing != "eager":
        about = "the time includes launches by the host onto an idle GPU, kernel after kernel"
        yield same("launch floor", about, c=replace(conditions, timing="eager"))
    other = "warm" if conditions.l2_state == "cold" else "cold"
    about = "repeated calls find their inputs in L2" if other == "warm" else "the call starts with an empty L2"
    yield same(f"{other} L2", about, c=replace(conditions, l2_state=other))
    if conditions.clock_mhz is None:
        clock_mhz = _power_capped_mhz(expected, profile)
        about = f"calls run back to back until the board's power limit holds the SM clock at {clock_mhz:.0f} MHz"
        yield same("power cap", about, c=replace(conditions, clock_mhz=clock_mhz))


def _other_kernels(
    expected: Result, problem: AttentionProblem, profile: Profile, conditions: RunOptions
) -> Iterator[Candidate]:
    if expected.algorithm != "standard":
        about = "the framework fell back to unfused attention: S and P go through HBM"
        plain = problem.with_(page_size=None, num_splits=None, kv_capacity=None, softcap=0.0)
        plain = plain.with_(dtype="bf16") if plain.dtype in ("fp8", "fp32") else plain
        yield Candidate("fallback", about, "standard", None, plain, conditions)
    newer = "wgmma" in profile.capabilities
    decoding = expected.algorithm == "flash_decoding"
    older: tuple[str, str | None]
    better: tuple[str, str | None]
    older = ("flash_decoding", "torch_flash_splitkv") if decoding else ("fa2", "torch_flash")
    better = ("flash_decoding", "flash_attn_3_kvcache") if decoding else ("fa3", None)
    if expected.kernels and (expected.algorithm, expected.implementation) != older and expected.algorithm != "standard":
        about = "FlashAttention-2 ran, with mma.sync instructions"
        yield Candidate("mma.sync path", about, *older, problem, conditions)
    if newer and expected.implementation in ("torch_flash", "torch_flash_splitkv"):
        about = "FlashAttention-3 ran, with wgmma instructions and TMA"
        yield Candidate("wgmma path", about, better[0], better[1], problem, conditions)


def _other_problems(expected: Result, problem: AttentionProblem, same: Callable[..., Candidate]) -> Iterator[Candidate]:
    p = problem
    if p.head_dim == p.head_dim_v:
        for wider in COMPILED_HEAD_DIMS:
            if wider > p.head_dim:
                about = f"Q, K, V and O are padded from head dim {p.head_dim} to {wider}"
                yield same("padded head dim", about, p.with_(head_dim=wider, head_dim_v=wider))
    if p.causal and p.seqlen_q > 1:
        yield same("masked half not skipped", "the kernel computes what the causal mask hides", p.with_(causal=False))
    elif not p.causal and p.window is None and p.seqlen_q > 1:
        yield same("causal after all", "the call was causal: half of the work", p.with_(causal=True))
    if p.group > 1:
        about = f"K and V are repeated to all {p.heads} query heads before the call"
        yield same("expanded KV heads", about, p.with_(kv_heads=p.heads))
    if expected.algorithm == "flash_decoding":
        if p.page_size is None:
            about = f"the KV cache has pages of {SMALL_PAGE} keys, gathered row by row"
            yield same("paged gather", about, p.with_(page_size=SMALL_PAGE))
        for splits in (1, 2, 4, 8, 16, 32, 64, 128):
            if splits != p.num_splits:
                about = f"the keys are cut into {splits} splits" if splits > 1 else "the keys are not split"
                yield same("splits", about, p.with_(num_splits=splits))


def _power_capped_mhz(expected: Result, profile: Profile) -> float:
    """The SM clock of the longest kernel repeated until the power limit has settled."""
    from simulator.clock_search import kernel_activity

    longest = max(expected.kernels, key=lambda kernel: kernel.time_us)
    physics = Physics.from_calibration(profile.calibration_parameters)
    activity = replace(kernel_activity(longest, profile), run_seconds=_SETTLED_S)
    return loaded_clock_hz(profile, physics, activity) / 1e6
