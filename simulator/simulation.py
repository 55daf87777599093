"""The one way in: ``simulate(algorithm, problem, profile) -> Result``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import fsum

from simulator.clock_search import run_at_its_clock
from simulator.confidence import with_confidence
from simulator.device import KernelRun
from simulator.errors import InputError, UnsupportedError, unknown
from simulator.launch import empty_cache, launched_ctas
from simulator.memory import L2
from simulator.physics import Physics
from simulator.plan import EVENT_BUDGET
from simulator.problem import L2_STATES, MOST_CTAS, TIMINGS, AttentionProblem
from simulator.profile import Profile, tensor_dtype
from simulator.program import Kernel, Load, Program
from simulator.result import KernelResult, Result, TensorTraffic
from simulator.tile_ops import UNITS
from simulator.traffic import executed_work

#: Calls on the same buffers that a benchmark makes in a row, which is what a warm L2 stands for: the power limit sees
#: them all (flash-attention's benchmarks: 30).
WARM_CALLS = 30


@dataclass(frozen=True)
class Conditions:
    """How the call runs: L2 before it, how it is launched, and the SM clock that is set, if one is.

    A set clock is an upper bound: tensor activity and the power limit lower it all the same.
    """

    l2_state: str = "cold"
    timing: str = "kernel"
    clock_hz: float | None = None

    def __post_init__(self) -> None:
        if self.l2_state not in L2_STATES:
            raise unknown("l2_state", self.l2_state, L2_STATES)
        if self.timing not in TIMINGS:
            raise unknown("timing", self.timing, TIMINGS)
        if self.clock_hz is not None and not self.clock_hz > 0:
            raise InputError("clock_mhz: must be positive")

    @classmethod
    def of(cls, l2_state: str, timing: str, clock_mhz: float | None) -> Conditions:
        """The conditions in the units that users give them."""
        return cls(l2_state, timing, clock_mhz * 1e6 if clock_mhz is not None else None)

    @property
    def calls(self) -> int:
        """Calls in a row, of which this is one."""
        return WARM_CALLS if self.l2_state == "warm" else 1


def simulate(
    algorithm: str,
    problem: AttentionProblem,
    profile: Profile,
    *,
    implementation: str | None = None,
    l2_state: str = "cold",
    timing: str = "kernel",
    clock_mhz: float | None = None,
    hypothetical: bool = False,
    physics: Physics | None = None,
    tiles: str | None = None,
    event_budget: int | None = None,
) -> Result:
    """Predict one attention call on one GPU.

    ``implementation`` ``None`` takes the algorithm's default on that GPU; ``hypothetical`` also runs kernels whose
    instructions the GPU lacks, on its fastest path. ``physics`` overrides the profile's calibrated parameters.
    ``tiles`` is a kernel's tile (``128x64x2x2``: rows, keys, stages, warpgroups), one by part of the call
    (``fwd=128x64x2x2,bwd=64x128x2x2``), or ``auto``, which searches them; ``None`` the shipped kernels'.
    ``event_budget`` bounds the events of a replay (fewer: faster and coarser).
    Raises :class:`~simulator.errors.InputError` for bad input and
    :class:`~simulator.errors.UnsupportedError` for what the model does not cover.
    """
    conditions = Conditions.of(l2_state, timing, clock_mhz)
    program, lines = chosen_program(
        algorithm, problem, profile, implementation, hypothetical, tiles, conditions, physics, event_budget
    )
    result = run_program(program, profile, conditions, physics, event_budget)
    return with_confidence(replace(result, warnings=(*result.warnings, *lines)), profile)


def chosen_program(
    algorithm: str,
    problem: AttentionProblem,
    profile: Profile,
    implementation: str | None,
    hypothetical: bool,
    tiles: str | None,
    conditions: Conditions,
    physics: Physics | None = None,
    event_budget: int | None = None,
) -> tuple[Program, tuple[str, ...]]:
    """The program that :func:`simulate` runs with these arguments, and what there is to say about its tiles."""
    from algorithms import build_program, tile_spaces
    from algorithms.tile_search import TileSpace

    if tiles is None:
        try:
            return build_program(algorithm, problem, profile, implementation, hypothetical), ()
        except UnsupportedError as error:
            if "bytes of SMEM" not in str(error):
                raise
            spaces = tile_spaces(algorithm, problem, profile, implementation)
            if any(isinstance(space, TileSpace) for space in spaces.values()):
                raise UnsupportedError(f"{error}; '--tiles auto' looks for a tile that fits") from None
            raise
    from simulator.tile_choice import program_with_tiles

    def time_us(tried: Program, events: int | None) -> float:
        return run_program(tried, profile, conditions, physics, events or event_budget).time_us

    return program_with_tiles(tiles, algorithm, problem, profile, implementation, hypothetical, time_us)


def run_program(
    program: Program,
    profile: Profile,
    conditions: Conditions | None = None,
    physics: Physics | None = None,
    event_budget: int | None = None,
) -> Result:
    """Simulate a tile program that is already built."""
    from algorithms.host_calls import host_call_us

    for kernel in program.kernels:
        if kernel.ctas > MOST_CTAS:
            wrong = f"{kernel.name}: {kernel.ctas:,} CTAs in one launch; up to {MOST_CTAS:,} are simulated"
            raise UnsupportedError(f"{wrong}: take fewer sequences, heads or queries (time grows in proportion)")
    conditions = conditions or Conditions()
    physics = physics or Physics.from_calibration(profile.calibration_parameters)
    budget = event_budget or EVENT_BUDGET
    l2 = new_cache(program, profile, physics, conditions.l2_state, budget)
    start_us, kernels = 0.0, []
    host_us = host_call_us(program.implementation, program.problem.pass_, len(program.kernels), physics.host_launch_us)
    most_hz = min(profile.max_clock_hz, conditions.clock_hz or profile.max_clock_hz)
    for index, kernel in enumerate(program.kernels):
        if index and not kernel.early_start:
            start_us += physics.graph_gap_us
        if conditions.timing == "eager":
            # an idle GPU waits for the host to launch each kernel
            start_us = max(start_us, (index + 1) / len(program.kernels) * host_us)
        run, clock_hz = run_at_its_clock(kernel, l2, profile, physics, most_hz, conditions.calls, budget)
        ramp_us = physics.kernel_ramp_us
        if not kernel.short_code:
            ramp_us += physics.cold_code_us
        if uses_tma(kernel):
            ramp_us += physics.tma_setup_us
        time_us = run.cycles / clock_hz * 1e6 + ramp_us
        kernels.append(_kernel_result(kernel, run, l2, profile, clock_hz, start_us, time_us))
        start_us += time_us
    time_us = start_us + (physics.graph_launch_us if conditions.timing == "graph" else 0.0)
    waits = _combine_waits(kernels, time_us)
    problem = program.problem
    work = {unit: fsum(k.work[unit] for k in kernels) for unit in ("matmul", *UNITS)}
    path = max(kernels, key=lambda k: k.work["matmul"]).path
    dtype = tensor_dtype(problem.dtype)
    busy_us = fsum(k.time_us for k in kernels) or 1.0
    clock_mhz = fsum(k.cycles for k in kernels) / busy_us
    return Result(
        algorithm=program.algorithm,
        implementation=program.implementation,
        gpu=profile.name,
        problem=problem,
        time_us=time_us,
        cycles=time_us * clock_mhz,
        sm_clock_mhz=clock_mhz,
        dirty_bytes_at_end=l2.dirty_bytes,
        flops=problem.flops(),
        executed_flops=int(work["matmul"]),
        work=work,
        peak_memory_bytes=program.live_bytes,
        limiter=max(waits, key=lambda c: waits[c]),
        waits=waits,
        kernels=tuple(kernels),
        unique_bytes=sum(t.bytes for t in (*program.inputs.values(), *program.outputs.values())),
        warnings=program.warnings,
        notes=program.notes,
        substitutions=program.substitutions,
        spec_tensor_flops=profile.spec_flops(dtype) if dtype in profile.spec_tensor_flops else 0.0,
        path_peak_flops=profile.tensor_rate(path, dtype) * profile.num_sms * profile.spec_clock_hz,
        ridge_flop_per_byte=profile.ridge_flop_per_byte(dtype) if dtype in profile.spec_tensor_flops else 0.0,
        l2_state=conditions.l2_state,
        timing=conditions.timing,
        attributes=program.attributes,
    )


def uses_tma(kernel: Kernel) -> bool:
    """Whether some load of ``kernel`` goes through the tensor memory accelerator."""
    return any(isinstance(op, Load) and op.via == "tma" for _, _, op in kernel.walk())


def new_cache(program: Program, profile: Profile, physics: Physics, l2_state: str, budget: int = EVENT_BUDGET) -> L2:
    """The L2 before the call, in blocks as large as the tiles or chunks that touch them: empty, or ``warm`` with the
    program's inputs as far as they fit."""
    l2 = empty_cache(program.kernels, program.tensors(), profile, physics, budget)
    if l2_state == "warm":
        l2.warm_up([t.name for t in program.inputs.values() if t.name in l2.names])
    return l2


def _kernel_result(
    kernel: Kernel, run: KernelRun, l2: L2, profile: Profile, clock_hz: float, start_us: float, time_us: float
) -> KernelResult:
    active_us = run.cycles / clock_hz * 1e6
    waits = {cause: share * active_us / time_us for cause, share in run.waits.items()}
    waits["launch"] = 1.0 - active_us / time_us
    traffic = tuple(
        TensorTraffic(name, *(int(x) for x in run.traffic[:, i]))
        for i, name in enumerate(l2.names)
        if run.traffic[:, i].any()
    )
    return KernelResult(
        kernel.name,
        start_us,
        time_us,
        time_us * clock_hz / 1e6,
        kernel.launched,
        run.ctas_per_sm,
        run.waves,
        traffic,
        executed_work(kernel),
        waits,
        max(waits, key=lambda c: waits[c]),
        kernel.path,
        {"l2": run.l2_busy_share, "hbm": run.hbm_busy_share},
        tensor_dtype(kernel.compute_dtype),
        run.empty,
        launched_ctas(kernel, profile.num_sms * run.ctas_per_sm),
    )


def _combine_waits(kernels: list[KernelResult], time_us: float) -> dict[str, float]:
    total: dict[str, float] = {}
    for kernel in kernels:
        for cause, share in kernel.waits.items():
            total[cause] = total.get(cause, 0.0) + share * kernel.time_us / time_us
    total["launch"] = total.get("launch", 0.0) + 1.0 - fsum(k.time_us for k in kernels) / time_us
    return total
