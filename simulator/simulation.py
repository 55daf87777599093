"""The one way in: ``simulate(algorithm, problem, profile) -> Result``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from simulator.accesses import kernel_accesses, tensor_table
from simulator.clock import Activity, loaded_clock_hz, loaded_share
from simulator.confidence import with_confidence
from simulator.device import KernelRun, bundle_size, occupancy, run_kernel, wide_block_rows
from simulator.errors import InputError, UnsupportedError, unknown
from simulator.memory import L2, WAYS
from simulator.physics import Physics
from simulator.plan import EVENT_BUDGET, iterations_of, least_events, plan_replay
from simulator.problem import L2_STATES, MOST_CTAS, TIMINGS, AttentionProblem
from simulator.profile import Profile, tensor_dtype
from simulator.program import Kernel, Load, Program, Tensor
from simulator.result import KernelResult, Result, TensorTraffic
from simulator.tile_ops import UNITS
from simulator.traffic import executed_work

#: Calls on the same buffers that a benchmark makes in a row, which is what a warm L2 stands for: the power limit sees
#: them all (flash-attention's benchmarks: 30).
WARM_CALLS = 30
#: Share of the event budget that the search for a launch's clock may use when the launch is too long to replay often.
CLOCK_BUDGET_SHARE = 0.1
#: Iterations of a CTA from which two waves are enough for that search instead of four.
LONG_CTA = 500
#: Replays in search of a launch's clock, after which the last one's holds.
MOST_CLOCK_TRIES = 3


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
    l2 = new_cache(program, profile, physics, conditions.l2_state, event_budget or EVENT_BUDGET)
    start_us, kernels = 0.0, []
    host_us = host_call_us(program.implementation, program.problem.pass_, len(program.kernels), physics.host_launch_us)
    for index, kernel in enumerate(program.kernels):
        if index and not kernel.early_start:
            start_us += physics.graph_gap_us
        if conditions.timing == "eager":
            # an idle GPU waits for the host to launch each kernel
            start_us = max(start_us, (index + 1) / len(program.kernels) * host_us)
        run, clock_hz = _run_at_its_clock(kernel, l2, profile, physics, conditions, event_budget or EVENT_BUDGET)
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
    l2 = _empty_cache(program.kernels, program.tensors(), profile, physics, budget)
    if l2_state == "warm":
        l2.warm_up([t.name for t in program.inputs.values() if t.name in l2.names])
    return l2


def _empty_cache(
    kernels: Sequence[Kernel], tensors: dict[str, Tensor], profile: Profile, physics: Physics, budget: int
) -> L2:
    """An empty L2 in blocks as large as the tiles or chunks of ``kernels``, which touch ``tensors``."""
    capacity, partitions = int(profile.l2_bytes * physics.l2_capacity_fraction), profile.l2_partitions
    wide_rows = wide_block_rows(kernels, lambda k: profile.num_sms * occupancy(k, profile))
    coarsen: dict[str, int] = {}
    for kernel in kernels:
        slots = profile.num_sms * occupancy(kernel, profile)
        chunk = plan_replay(kernel, slots, capacity // partitions, budget, bundle_size(kernel, slots)).chunk
        for access in kernel_accesses(kernel):
            if access.loops and not access.is_write:
                name = access.tile.tensor.name
                coarsen[name] = min(coarsen.get(name, chunk), chunk)
    return L2.of(tensors, capacity, coarsen, wide_rows, WAYS, partitions)


def _run_at_its_clock(
    kernel: Kernel, l2: L2, profile: Profile, physics: Physics, conditions: Conditions, budget: int
) -> tuple[KernelRun, float]:
    """Replay at the clock that the launch itself causes: guess, run, and run again only if memory time matters."""
    most_hz = min(profile.max_clock_hz, conditions.clock_hz or profile.max_clock_hz)
    clock_hz = min(most_hz, profile.max_clock_hz * 0.9)
    slots = profile.num_sms * occupancy(kernel, profile)
    quick = budget if int(iterations_of(kernel).sum()) <= budget else int(budget * CLOCK_BUDGET_SHARE)
    # a launch too long to replay often is first tried on an L2 of its own, coarse as its events; one of more CTAs than
    # that, by some of its waves
    tried, times = _some_waves(kernel, slots, quick) if quick < budget else (kernel, 1.0)
    before = l2.clone() if quick == budget else ()
    work = executed_work(tried)
    tensors = tensor_table([kernel])
    tries = 0
    while True:
        tries += 1
        cache = l2 if quick == budget else _empty_cache([tried], tensors, profile, physics, quick)
        run = run_kernel(tried, cache, profile, physics, clock_hz, budget=quick)
        activity = _activity(
            profile,
            tensor_dtype(kernel.compute_dtype),
            work,
            run.cycles,
            times * run.cycles / clock_hz,
            times * float(run.traffic[2].sum() + run.traffic[3].sum()),
            loaded_share(1.0 - run.empty, launched_ctas(kernel, slots), slots, profile.num_sms),
            conditions.calls,
        )
        wanted = min(most_hz, loaded_clock_hz(profile, physics, activity))
        # cycles do not depend on the clock when neither HBM nor L2, whose rates are in bytes a second, bind
        bound = run.hbm_busy_share >= 0.3 or run.l2_busy_share >= 0.8
        settled = not bound or abs(wanted - clock_hz) < 0.015 * clock_hz or tries == MOST_CLOCK_TRIES
        if settled and quick == budget:
            return run, clock_hz if bound else wanted
        clock_hz = wanted
        if settled:
            return run_kernel(kernel, l2, profile, physics, clock_hz, budget=budget), clock_hz
        if cache is l2:
            l2.restore(before)


def _some_waves(kernel: Kernel, slots: int, budget: int) -> tuple[Kernel, float]:
    """``kernel`` with every n-th wave of its CTAs only, where the least events of all exceed ``budget`` (at least two
    or four waves), and how many times their number it has."""
    # a wave of long CTAs says as much as several of short ones
    waves = 2 if int(iterations_of(kernel).sum()) > LONG_CTA * kernel.ctas else 4
    every = min(least_events(kernel) // (2 * budget), kernel.ctas // (waves * slots))
    if every < 2 or kernel.times > 1:
        return kernel, 1.0
    kept = np.arange(kernel.ctas) // slots % every == 0
    coords = {name: values[kept] for name, values in kernel.coords.items()}
    return replace(kernel, coords=coords), kernel.ctas / int(kept.sum())


def launched_ctas(kernel: Kernel, slots: int) -> int:
    """CTAs that share a launch's work: the slots that a static schedule uses, where it does not use all of them."""
    if kernel.schedule != "static":
        return kernel.launched
    used = np.unique(np.flatnonzero(iterations_of(kernel)) % slots).size
    return kernel.launched if used == slots else max(1, used)


def kernel_activity(kernel: KernelResult, profile: Profile, calls: int = 1) -> Activity:
    """What a simulated launch does to the clock, read off its result; ``calls`` of it follow each other."""
    running = 1.0 - kernel.waits["launch"]
    return _activity(
        profile,
        kernel.compute_dtype,
        kernel.work,
        kernel.cycles * running,
        kernel.time_us * 1e-6 * running,
        kernel.hbm_read_bytes + kernel.hbm_write_bytes,
        loaded_share(
            1.0 - kernel.empty,
            kernel.launched_ctas or kernel.ctas,
            profile.num_sms * kernel.ctas_per_sm,
            profile.num_sms,
        ),
        calls,
    )


def _activity(
    profile: Profile,
    dtype: str,
    work: Mapping[str, float],
    cycles: float,
    seconds: float,
    hbm_bytes: float,
    loaded: float,
    calls: int,
) -> Activity:
    """What a launch of ``work`` that runs ``seconds`` does to the clock; ``calls`` of it follow each other."""
    peak = max((rates.get(dtype, 0.0) for rates in profile.tensor_flop_per_cycle_per_sm.values()), default=0.0)
    return Activity(
        tensor_share=work["matmul"] / (cycles * profile.num_sms * peak) if cycles and peak else 0.0,
        exp_share=work["exp"] / (cycles * profile.num_sms * profile.exp_per_cycle_per_sm) if cycles else 0.0,
        hbm_share=hbm_bytes / seconds / profile.hbm_bandwidth_bytes_per_s if seconds else 0.0,
        loaded_share=loaded,
        seconds=seconds,
        run_seconds=seconds * calls,
    )


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
