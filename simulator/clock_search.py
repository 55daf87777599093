"""The SM clock that a launch itself causes: replay it at a guess, ask what clock that run would have, and settle.

A run at one clock says what it would take at another one near it: what its CTAs compute takes the same cycles, what
they wait for memory takes the same seconds (:func:`simulator.clock_share.clock_share`). A launch too long to replay
often is guessed from some of its waves first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from simulator.accesses import tensor_table
from simulator.clock import Activity, loaded_clock_hz, loaded_share
from simulator.clock_share import NO_IDLE_TIME
from simulator.device import KernelRun, run_kernel
from simulator.launch import empty_cache, launched_ctas, occupancy
from simulator.memory import L2
from simulator.physics import Physics
from simulator.plan import iterations_of, least_events
from simulator.profile import Profile, tensor_dtype
from simulator.program import Kernel
from simulator.result import KernelResult
from simulator.traffic import executed_work

#: Share of the event budget that the first guess of a long launch's clock may use.
GUESS_BUDGET_SHARE = 0.1
#: Iterations of a CTA from which two waves are enough for that guess instead of four.
LONG_CTA = 500
#: Busy shares of HBM and of L2 below which cycles do not depend on the clock: their rates, in bytes a second, do not
#: bind.
HBM_BINDS, L2_BINDS = 0.3, 0.8
#: How wrong a run's ``clock_share`` may be (found: 0.08), and where a memory may be busy all the time in one part of
#: the launch and idle in another (found: 0.56): busy for more than a share of the time, or a launch of few waves.
UNSURE, UNSURE_IN_PARTS, PARTLY_BUSY, FEW_WAVES = 0.1, 0.6, 0.6, 4
#: Error of the cycles up to which a run at one clock stands for another one instead of a second replay.
DOUBT = 0.005
#: Replays in search of a launch's clock, after which the last one stands for the rest, and steps of its fixed point.
MOST_REPLAYS, MOST_STEPS = 3, 8


def run_at_its_clock(
    kernel: Kernel, l2: L2, profile: Profile, physics: Physics, most_hz: float, calls: int, budget: int
) -> tuple[KernelRun, float]:
    """Replay ``kernel`` at the clock that it causes, at most ``most_hz``, as one of ``calls`` in a row."""
    clock_hz = min(most_hz, profile.max_clock_hz * 0.9)
    slots = profile.num_sms * occupancy(kernel, profile)

    def settled(run: KernelRun, tried: Kernel, clock_hz: float) -> tuple[KernelRun, float]:
        times = kernel.launched / tried.launched
        hbm_bytes = times * float(run.traffic[2:].sum())
        loaded = loaded_share(1.0 - run.empty, launched_ctas(kernel, slots), slots, profile.num_sms)

        def wanted(cycles: float, hz: float) -> float:
            dtype, work = tensor_dtype(kernel.compute_dtype), executed_work(tried)
            caused = activity(profile, dtype, work, cycles, times * cycles / hz, hbm_bytes, loaded, calls)
            return min(most_hz, loaded_clock_hz(profile, physics, caused))

        return _settled(run, clock_hz, wanted)

    long = int(iterations_of(kernel).sum()) > budget
    if long:
        quick = int(budget * GUESS_BUDGET_SHARE)
        tried = _some_waves(kernel, slots, quick)
        cache = empty_cache([tried], tensor_table([kernel]), profile, physics, quick)
        guess = run_kernel(tried, cache, profile, physics, clock_hz, budget=quick)
        clock_hz = settled(guess, tried, clock_hz)[1]
        del cache, guess  # a hundred MB at a million tokens
    before = () if long else l2.clone()
    for left in reversed(range(1 if long else MOST_REPLAYS)):
        run = run_kernel(kernel, l2, profile, physics, clock_hz, budget=budget)
        own, own_hz = settled(run, kernel, clock_hz)
        if not left or abs(own_hz / clock_hz - 1.0) * _unsure(run) <= DOUBT:
            break
        clock_hz = own_hz
        l2.restore(before)
    return own, own_hz


def _some_waves(kernel: Kernel, slots: int, budget: int) -> Kernel:
    """``kernel`` with one, two or four waves of its CTAs only, spread over all of it."""
    # a wave of long CTAs says as much as several of short ones
    waves = 2 if int(iterations_of(kernel).sum()) > LONG_CTA * kernel.ctas else 4
    if least_events(kernel) * slots > budget * kernel.ctas:
        waves = 1
    every = kernel.ctas // (waves * slots)
    if every < 2:
        return kernel
    kept = np.arange(kernel.ctas) // slots % every == every // 2
    coords = {name: values[kept] for name, values in kernel.coords.items()}
    repeated = None if kernel.repeated is None else kernel.repeated[kept]
    return replace(kernel, coords=coords, repeated=repeated)


def _binds(run: KernelRun) -> bool:
    return run.hbm_busy_share >= HBM_BINDS or run.l2_busy_share >= L2_BINDS


def _unsure(run: KernelRun) -> float:
    """How far the share of ``run``'s cycles that grows with the clock may be off."""
    if not _binds(run):
        return 0.0
    busy = max(run.hbm_busy_share, run.l2_busy_share)
    if busy >= NO_IDLE_TIME[1] or (busy <= PARTLY_BUSY and run.waves >= FEW_WAVES):
        return UNSURE
    return UNSURE_IN_PARTS


def _settled(run: KernelRun, clock_hz: float, wanted: Callable[[float, float], float]) -> tuple[KernelRun, float]:
    """``run``, which was replayed at ``clock_hz``, as it is at the clock that it causes, and that clock; ``wanted``
    gives the clock for its cycles at another one."""
    if not _binds(run) or not run.cycles:
        return run, wanted(run.cycles, clock_hz)
    cycles, hz = run.cycles, clock_hz
    for _ in range(MOST_STEPS):
        before, hz = hz, wanted(cycles, hz)
        cycles = run.cycles * (1.0 + run.clock_share * (hz / clock_hz - 1.0))
        if abs(hz - before) < 1e-6 * hz:
            break
    # memories are busy for the same seconds
    faster = run.cycles / clock_hz / (cycles / hz)
    busy = (min(1.0, share * faster) for share in (run.l2_busy_share, run.hbm_busy_share))
    return replace(run, cycles=cycles, l2_busy_share=next(busy), hbm_busy_share=next(busy)), hz


def kernel_activity(kernel: KernelResult, profile: Profile, calls: int = 1) -> Activity:
    """What a simulated launch does to the clock, read off its result; ``calls`` of it follow each other."""
    running = 1.0 - kernel.waits["launch"]
    return activity(
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


def activity(
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
