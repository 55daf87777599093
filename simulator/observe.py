"""A run looked at closely: when each CTA ran on which SM, bytes over time, and what one SM's pipes did.

The observation replays what :func:`simulator.simulate` predicts, at the clock that it found, with recording on.
It is for pictures and traces; no prediction comes from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.confidence import with_confidence
from simulator.device import KernelRun, run_kernel
from simulator.errors import InputError
from simulator.physics import Physics
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Kernel
from simulator.result import Result
from simulator.simulation import Conditions, chosen_program, new_cache, run_program
from simulator.sm import TICKS_PER_CYCLE, run_sm, to_ticks
from simulator.sm_costs import SmSpec, compile_kernel

if TYPE_CHECKING:
    from simulator.sm_timing import SmTiming

#: Replay events (CTA iterations) up to which a launch is recorded CTA by CTA.
MOST_EVENTS = 4_000_000
#: Coordinates that say nothing of where a tile lies: spill buffers' slots, ranks within a cluster.
_NO_PLACE = ("slot", "cluster_rank")
#: Bins of a launch's time in which bytes are counted.
FLOW_BINS = 240


@dataclass(frozen=True)
class KernelObservation:
    """One launch. ``ctas`` is ``[cta, 3]``: slot, start and end in µs from the start of the call; ``flow`` is
    ``[bin, 3]``: bytes between SMs and L2, read from HBM, written to HBM in each ``bin_us``. ``busy_us`` is
    ``time_us`` without what the launch itself costs."""

    name: str
    index: int
    start_us: float
    time_us: float
    busy_us: float
    num_sms: int
    ctas_per_sm: int
    ctas: np.ndarray
    labels: tuple[str, ...]
    flow: np.ndarray
    bin_us: float


@dataclass(frozen=True)
class Span:
    """One thing that a pipe did or a role waited for: cycles from the SM's start.

    ``track`` is a pipe (``tensor``) or ``role``; ``role`` the instruction stream (``cta0/warpgroup1``);
    ``what`` the work's kind or what was waited for.
    """

    track: str
    role: str
    start_cycles: float
    end_cycles: float
    what: str


@dataclass(frozen=True)
class SmObservation:
    """One SM during one CTA (all its resident ones alike): spans, and the loop period that a window can be cut by."""

    kernel: str
    cta: int
    label: str
    start_us: float
    clock_hz: float
    residents: int
    roles: tuple[str, ...]
    spans: tuple[Span, ...]
    end_cycles: float
    period_cycles: float
    latency_cycles: float
    cut: bool


@dataclass(frozen=True)
class Observation:
    """A result with what was seen of its launches and of one SM."""

    result: Result
    kernels: tuple[KernelObservation, ...]
    sm: SmObservation


@dataclass(frozen=True)
class Call:
    """What to observe: one problem on one GPU with one algorithm (``None``: its default implementation there)."""

    algorithm: str
    implementation: str | None
    problem: AttentionProblem
    profile: Profile


def observe_each(
    calls: Iterable[Call], conditions: Mapping[str, Any], hypothetical: bool = False, kernel: str | None = None
) -> tuple[list[Observation], list[tuple[Call, str]]]:
    """:func:`observe` of each call under the keyword arguments ``conditions``; those that cannot run, with why."""
    seen, errors = [], []
    for call in calls:
        try:
            one = observe(
                call.algorithm,
                call.problem,
                call.profile,
                implementation=call.implementation,
                hypothetical=hypothetical,
                kernel=kernel,
                **conditions,
            )
        except InputError as error:
            errors.append((call, str(error)))
        else:
            seen.append(one)
    return seen, errors


def observe(
    algorithm: str,
    problem: AttentionProblem,
    profile: Profile,
    *,
    implementation: str | None = None,
    l2_state: str = "cold",
    timing: str = "kernel",
    clock_mhz: float | None = None,
    hypothetical: bool = False,
    tiles: str | None = None,
    kernel: str | None = None,
    iterations: int = 24,
) -> Observation:
    """Simulate with recording on; the arguments are those of :func:`simulator.simulate`.

    ``kernel`` (a name, or its number from 0) is the launch whose SM is looked into, by default the longest;
    ``iterations`` the most loop iterations of a CTA that are followed there. Raises :class:`InputError` for bad
    input and for launches too large to record.
    """
    conditions = Conditions.of(l2_state, timing, clock_mhz)
    physics = Physics.from_calibration(profile.calibration_parameters)
    program, lines = chosen_program(
        algorithm, problem, profile, implementation, hypothetical, tiles, conditions, physics
    )
    for launch in program.kernels:
        _check_size(launch)
    result = run_program(program, profile, conditions, physics)
    result = with_confidence(replace(result, warnings=(*result.warnings, *lines)), profile)
    chosen = _chosen(result, kernel)
    l2 = new_cache(program, profile, physics, l2_state)
    seen: list[KernelObservation] = []
    sm: SmObservation | None = None
    for index, (launch, told) in enumerate(zip(program.kernels, result.kernels, strict=True)):
        clock_hz = told.cycles / told.time_us * 1e6
        flow = np.zeros((FLOW_BINS, 3), np.int64)
        bin_ticks = max(1, int(told.cycles * TICKS_PER_CYCLE / FLOW_BINS))
        run = run_kernel(launch, l2, profile, physics, clock_hz, log=True, flow=flow, flow_ticks=bin_ticks)
        us_per_tick = 1e6 / (clock_hz * TICKS_PER_CYCLE)
        ctas = run.cta_log.astype(float)
        ctas[:, 1:] = told.start_us + ctas[:, 1:] * us_per_tick
        labels = tuple(cta_label(launch, cta) for cta in range(launch.ctas))
        seen.append(
            KernelObservation(
                name=launch.name,
                index=index,
                start_us=told.start_us,
                time_us=told.time_us,
                busy_us=told.time_us * (1.0 - told.waits.get("launch", 0.0)),
                num_sms=profile.num_sms,
                ctas_per_sm=run.ctas_per_sm,
                ctas=ctas,
                labels=labels,
                flow=flow,
                bin_us=bin_ticks * us_per_tick,
            )
        )
        if index == chosen:
            spec = SmSpec.of(profile, physics, launch.path, launch.compute_dtype)
            sm = _observe_sm(launch, run, ctas, labels, spec, profile.num_sms, clock_hz, iterations)
    assert sm is not None, "the launch that was chosen is one of the program's"
    return Observation(result, tuple(seen), sm)


def _check_size(kernel: Kernel) -> None:
    events = kernel.ctas
    if kernel.trips:
        events += int(sum(int(kernel.coords[t.coord].sum()) for t in kernel.trips))
    if kernel.times > 1:
        raise InputError(
            f"timeline: {kernel.name} is too long to record: of {kernel.launched:,} work tiles only {kernel.ctas:,} "
            "are simulated, for the others too; choose fewer heads, a smaller batch or a shorter sequence"
        )
    if events > MOST_EVENTS:
        raise InputError(
            f"timeline: {kernel.name} has {events:,} loop iterations to record, more than {MOST_EVENTS:,}; "
            "choose fewer heads, a smaller batch or a shorter sequence"
        )


def _chosen(result: Result, kernel: str | None) -> int:
    if kernel is None:
        return max(range(len(result.kernels)), key=lambda i: result.kernels[i].time_us)
    names = [k.name for k in result.kernels]
    if kernel in names:
        return names.index(kernel)
    if kernel.isdigit() and int(kernel) < len(names):
        return int(kernel)
    known = ", ".join(f"{i} {name}" for i, name in enumerate(names))
    raise InputError(f"kernel: {kernel!r} is not one of {result.algorithm}'s: {known}")


def cta_label(kernel: Kernel, cta: int) -> str:
    """``CTA 17: q_head 3, rows 384..511``: which tile a CTA works on."""
    trips = {trip.coord for trip in kernel.trips}
    parts = []
    for name, values in kernel.coords.items():
        if name in trips or name.endswith("_row") or name in _NO_PLACE:
            continue
        parts.append(f"{name.removesuffix('0') if name == 'row0' else name} {int(values[cta])}")
    return f"CTA {cta}: {', '.join(parts)}" if parts else f"CTA {cta}"


def _observe_sm(
    kernel: Kernel,
    run: KernelRun,
    ctas: np.ndarray,
    labels: tuple[str, ...],
    spec: SmSpec,
    num_sms: int,
    clock_hz: float,
    iterations: int,
) -> SmObservation:
    """Follow one CTA: of those that have something to walk, the one with the median duration."""
    durations = ctas[:, 2] - ctas[:, 1]
    by_duration = np.argsort(durations, kind="stable")
    if kernel.trips:
        walked = np.sum([kernel.coords[trip.coord] for trip in kernel.trips], axis=0) > 0
        by_duration = by_duration[walked[by_duration]] if walked.any() else by_duration
    cta = int(by_duration[len(by_duration) // 2])
    trips = {trip.coord: int(kernel.coords[trip.coord][cta]) for trip in kernel.trips}
    timing = run.timings[-1]
    latency = _latency_for(durations[cta] * clock_hz / 1e6, kernel, timing, trips)
    followed, cut = dict(trips), False
    room = iterations
    for name in sorted(trips, key=lambda n: trips[n]):
        followed[name] = min(trips[name], max(1, room)) if trips[name] else 0
        cut = cut or followed[name] < trips[name]
        room -= followed[name]
    ticked = tuple((name, warps, to_ticks(ops)) for name, warps, ops in compile_kernel(kernel, spec))
    residents = min(run.ctas_per_sm, -(-kernel.ctas // num_sms))
    raw: list[tuple[str, int, int, str]] = []
    seen = run_sm(
        ticked,
        kernel.semaphores,
        followed,
        latency,
        residents,
        observer=lambda pipe, start, end, label: raw.append((pipe, start, end, label)),
    )
    spans, roles = [], []
    for pipe, start, end, label in raw:
        is_role = pipe.startswith("role:")
        role = pipe.removeprefix("role:") if is_role else label
        if role not in roles:
            roles.append(role)
        if end > start:
            cycles = (start / TICKS_PER_CYCLE, end / TICKS_PER_CYCLE)
            spans.append(Span("role" if is_role else pipe, role, *cycles, label if is_role else pipe))
    main = max(range(len(kernel.trips)), key=lambda i: trips[kernel.trips[i].coord], default=None)
    period = _at(timing, timing.period_cycles[main], latency) if main is not None else seen.end_cycles
    return SmObservation(
        kernel.name, cta, labels[cta], float(ctas[cta, 1]), clock_hz, residents, tuple(sorted(roles)), tuple(spans),
        seen.end_cycles, period, latency, cut,
    )  # fmt: skip


def _at(timing: SmTiming, values: Sequence[float], latency: float) -> float:
    return float(np.interp(latency, timing.latencies_cycles, values))


def _latency_for(cycles: float, kernel: Kernel, timing: SmTiming, trips: dict[str, int]) -> float:
    """The memory latency (cycles) at which this CTA takes ``cycles``: what it saw of L2, HBM and their queues."""
    grid = np.array(timing.latencies_cycles)
    total = np.array(timing.overhead_cycles)
    for trip, periods in zip(kernel.trips, timing.period_cycles, strict=True):
        count = trips[trip.coord]
        if trip.outer:
            outer = trips[trip.outer]
            count = sum(max(0, count + trip.outer_step * i) for i in range(outer))
        total = total + count * np.array(periods)
    if cycles <= total[0]:
        return float(grid[0])
    return float(np.interp(cycles, total, grid))
