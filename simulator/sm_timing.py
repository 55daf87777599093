"""How long a CTA takes on one SM as a function of the memory latency it is granted, from a few short simulations.

A CTA's loops are periodic, so its time is ``overhead + sum(trips * period)``: its main loop is simulated until its
iterations repeat and no further. The shortcut is tested against simulating every iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import fsum
from typing import Any

import numpy as np

from simulator.program import Kernel, Trip
from simulator.sm import SmRun, StuckError, run_sm, to_ticks
from simulator.sm_costs import CAUSES, SmSpec, TimedLoop, TimedRole, compile_kernel

#: Iterations simulated before and during the measurement of a nested loop's period.
BASE_TRIPS = 4
PERIOD_TRIPS = 4
#: Iterations of a plain loop in the first attempt to see it steady, and in the last.
FIRST_TRIPS = 8
LONGEST_TRIPS = 64
#: Share of a launch's iterations up to which a loop is not measured itself.
RARE = 0.01
#: Iterations of the main loop beside which the cost of one more iteration of another is measured.
BESIDE_TRIPS = 4
#: A loop length below FIRST_TRIPS that carries more of a launch's work than this is simulated itself.
SHARE_OF_WORK = 0.03


@dataclass(frozen=True)
class SmTiming:
    """A CTA's time against the memory latency it sees, for one number of resident CTAs.

    A CTA that does ``n`` iterations of trip ``i`` takes ``overhead + sum(n[i] * period[i])`` cycles at each point of
    ``latencies_cycles``. ``overhead_cycles[k]`` holds once the loop over ``trips[main]`` is steady;
    ``short_overhead_cycles[n][k]`` replaces it for CTAs with only ``n`` iterations of it. ``first_extra_cycles[k]``
    is what a persistent CTA's first tile costs more than later ones. ``waits`` gives, per trip and grid point,
    the share of each cause in the period.
    """

    latencies_cycles: tuple[float, ...]
    overhead_cycles: tuple[float, ...]
    first_extra_cycles: tuple[float, ...]
    period_cycles: tuple[tuple[float, ...], ...]
    waits: tuple[tuple[tuple[float, ...], ...], ...]
    overhead_waits: tuple[tuple[float, ...], ...]
    main: int | None = None
    short_overhead_cycles: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class TripProfile:
    """What the SM reading has to know about a launch's trip counts.

    ``typical`` count by trip, trips that vary over CTAs, the trip ``main`` with most iterations (None for nested
    loops and for none), its greatest count ``longest`` and the ``short`` counts that carry a share of the work.
    """

    typical: tuple[int, ...]
    varies: tuple[bool, ...]
    main: int | None
    longest: int
    short: tuple[int, ...] = ()

    @classmethod
    def of(cls, trips: tuple[Trip, ...], coords: Mapping[str, np.ndarray]) -> TripProfile:
        """The profile of the trip counts in ``coords`` (arrays over CTAs by coordinate)."""
        nested = any(t.outer for t in trips)
        counts = [coords[t.coord] for t in trips]
        typical, varies = [], []
        for trip, values in zip(trips, counts, strict=True):
            outer = any(o.outer == trip.coord for o in trips)
            common = 2 if outer else BASE_TRIPS
            if not nested and len(values):
                found, times = np.unique(values, return_counts=True)
                common = min(BASE_TRIPS, int(found[np.argmax(times)]))
            typical.append(common)
            # iterations of a loop that few make are taken to cost what the main loop's do
            rare = not (nested or common or trip.condition) and values.sum() <= RARE * sum(v.sum() for v in counts)
            varies.append(bool(nested or values.min() != values.max() or values.max() > BASE_TRIPS) and not rare)
        loops = [i for i, trip in enumerate(trips) if not trip.condition]
        if nested or not loops:
            return cls(tuple(typical), tuple(varies), None, 0)
        main = max(loops, key=lambda i: (int(counts[i].sum()), i))
        typical[main], varies[main] = 0, False
        found, times = np.unique(counts[main], return_counts=True)
        work = times * (found + 2)
        short = found[(work > SHARE_OF_WORK * work.sum()) & (found < FIRST_TRIPS)]
        longest = int(found[-1])
        # all launches with long loops share one reading
        longest = longest if longest < FIRST_TRIPS else LONGEST_TRIPS
        return cls(tuple(typical), tuple(varies), main, longest, tuple(int(n) for n in short))


def _steady(ends: tuple[float, ...]) -> tuple[float, bool]:
    """Cycles an iteration late in ``ends`` (one more entry than iterations), and whether they repeat with some pattern.

    The last two iterations do not count: other roles that are done already leave the pipes to the rest. Of a long
    loop more of them may not: a loader is done as many iterations earlier as it has buffers.
    """
    last = len(ends) - 1
    for n in (last - 2, last - max(2, last // 4) if last > 2 * FIRST_TRIPS else last - 2):
        steps = [b - a for a, b in pairwise(ends[: n + 1])]
        for pattern in range(1, 7):
            # patterns of several iterations may still drift: they have to be seen for longer
            if n < (2 if pattern == 1 else 7 * pattern):
                break
            late, early = steps[-pattern:], steps[-2 * pattern : -pattern]
            period = fsum(late) / pattern
            if all(abs(a - b) <= 1e-3 * period for a, b in zip(late, early, strict=True)) and (
                abs(fsum(late) - fsum(early)) <= 2e-4 * fsum(late)
            ):
                return period, True
    n = max(last - 2, 1)
    half = -(-n // 2)
    return (ends[n] - ends[n - half]) / half if len(ends) > 1 else 0.0, False


class SmReading:
    """A CTA's timing as far as launches ask for it: points of a latency grid, read one after another."""

    def __init__(
        self,
        roles: tuple[TimedRole, ...],
        semaphores: tuple[tuple[str, int], ...],
        trips: tuple[Trip, ...],
        latencies: tuple[float, ...],
        residents: int,
        persistent: bool,
        profile: TripProfile,
        gap_cycles: float,
    ) -> None:
        self._roles = tuple((name, warps, to_ticks(ops)) for name, warps, ops in roles)
        self._semaphores, self._trips, self._latencies = semaphores, trips, latencies
        self._residents, self._persistent, self._profile, self._gap_cycles = residents, persistent, profile, gap_cycles
        self._points: list[_Point] = []
        self._timings: dict[int, SmTiming] = {}

    @property
    def points(self) -> int:
        """Points of the grid that have been read."""
        return len(self._points)

    def timing(self, points: int) -> SmTiming:
        """:class:`SmTiming` at the first ``points`` of the grid. What it says of a point depends on no later one."""
        while len(self._points) < points:
            self._points.append(self._read(self._latencies[len(self._points)]))
        if points not in self._timings:
            self._timings[points] = self._joined(self._points[:points])
        return self._timings[points]

    def _read(self, latency: float) -> _Point:
        how = (latency, self._residents, self._persistent, self._profile)
        if self._profile.main is None:
            return _time_nested(self._roles, self._semaphores, self._trips, *how, self._gap_cycles)
        # what was long enough to be steady at one latency is where to begin at the next
        length = self._points[-1].length if self._points else FIRST_TRIPS
        return _time_marked(self._roles, self._semaphores, self._trips, *how, length)

    def _joined(self, rows: list[_Point]) -> SmTiming:
        # grid points become steady after different numbers of iterations
        most = max(len(row.short) for row in rows)
        rows = [replace(row, short=row.short + (row.overhead,) * (most - len(row.short))) for row in rows]
        each = range(len(self._trips))
        return SmTiming(
            self._latencies[: len(rows)],
            tuple(row.overhead for row in rows),
            tuple(row.first_extra for row in rows),
            tuple(tuple(row.periods[i] for row in rows) for i in each),
            tuple(tuple(row.waits[i] for row in rows) for i in each),
            tuple(row.overhead_waits for row in rows),
            self._profile.main,
            tuple(tuple(row.short[n] for row in rows) for n in range(most)),
        )


#: Equal schedules are simulated once.
_reading = lru_cache(maxsize=4096)(SmReading)


@dataclass(frozen=True)
class _Point:
    """What :class:`SmTiming` has at one latency."""

    overhead: float
    first_extra: float
    periods: tuple[float, ...]
    waits: tuple[tuple[float, ...], ...]
    overhead_waits: tuple[float, ...]
    short: tuple[float, ...] = ()
    length: int = 0


def _time_marked(
    roles: Sequence[TimedRole],
    semaphores: Sequence[tuple[str, int]],
    trips: tuple[Trip, ...],
    latency: float,
    residents: int,
    persistent: bool,
    profile: TripProfile,
    length: int,
) -> _Point:
    """One run, lengthened until its main loop is steady. Loop lengths that matter and are shorter than that are run
    themselves; trips beside the main one are measured by a longer run if they vary."""
    main = profile.main
    assert main is not None
    loop = trips[main].coord
    items = 2 if persistent else 1
    base = {t.coord: n for t, n in zip(trips, profile.typical, strict=True)}

    def run_with(**changed: int) -> SmRun:
        now = base | changed
        # a first tile of a few iterations leaves its CTA as a long one would
        first = now | {loop: min(now[loop], FIRST_TRIPS)}
        return run_sm(roles, semaphores, now, latency, residents, items, marked=loop, first=first)

    def last_tile(run: SmRun) -> float:
        return run.tile_ends_cycles[-1][-1] - (run.tile_ends_cycles[0][-1] if persistent else 0.0)

    length = min(profile.longest, length)
    while True:
        base[loop] = length
        run = run_with()
        ends = run.tile_ends_cycles[-1]
        period, steady = _steady(ends)
        if steady or length >= profile.longest:
            break
        length = min(profile.longest, 2 * length)
    periods, waits = [period] * len(trips), [run.iteration_waits] * len(trips)
    inside = max(0, length - 2)
    # the way into the steady state as this run shows it, the way out of it that is the same for every length
    way_out = ends[-1] - ends[inside] - (length - inside) * period
    tiles = [ends[n] + way_out - (ends[-1] - last_tile(run)) for n in range(inside)] + [last_tile(run)] * 2
    beside_main = [i for i in range(len(trips)) if i != main and profile.varies[i]]
    few = min(length, BESIDE_TRIPS)
    # a long run may have fallen into another step than short ones
    usual = last_tile(run_with(**{loop: few}) if beside_main and few < length else run)
    for i, trip in enumerate(trips):
        if i in beside_main:
            step, count = 1, base[trip.coord]
            try:
                other = run_with(**{trip.coord: count + 1, loop: few})
            except StuckError:
                # a condition, which cannot hold twice: it costs what its absence saves
                step, other = -1, run_with(**{trip.coord: count - 1, loop: few})
            periods[i] = max(0.0, step * (last_tile(other) - usual))
    beside = fsum(base[t.coord] * periods[i] for i, t in enumerate(trips) if i != main)
    overhead = last_tile(run) - length * period - beside
    short = [tiles[n] - n * period - beside for n in range(inside)]
    for n in profile.short:
        if n < length:
            short += [overhead] * (n + 1 - len(short))
            short[n] = last_tile(run_with(**{loop: n})) - n * period - beside
    first = min(length, FIRST_TRIPS)
    later = tiles[first] if persistent and first < inside else last_tile(run)
    counts = [(items - 1) * (first if i == main else base[t.coord]) + base[t.coord] for i, t in enumerate(trips)]
    done = [fsum(n * w[c] for n, w in zip(counts, waits, strict=True)) for c in range(len(CAUSES))]
    return _Point(
        overhead,
        max(0.0, run.tile_ends_cycles[0][-1] - later),
        tuple(periods),
        tuple(waits),
        tuple(max(0.0, w - d) / items for w, d in zip(run.waits_cycles, done, strict=True)),
        tuple(short),
        length,
    )


def cycles_out_of_step(alone: float, service: float, residents: int, away: float) -> float:
    """Cycles of a CTA among ``residents`` that run one CTA after another and have drifted out of step.

    ``alone`` is a CTA's time by itself, ``service`` the work that it has for the pipe that they share most, ``away``
    passes between a CTA's end and the next one's start. By mean-value analysis of a closed queue (Reiser and
    Lavenberg, 1980): a CTA that comes to the pipe finds there what would be there on average with one CTA fewer.
    """
    elsewhere = max(0.0, alone - service)
    waiting, response = 0.0, service
    for others in range(residents):
        response = service * (1.0 + waiting)
        waiting = (others + 1) * response / (response + elsewhere + away) if response > 0 else 0.0
    return response + elsewhere


def _with_equal_counts(ops: Iterable[Any], around: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """``ops`` with loops that run equally often in every iteration of the loops ``around`` them: the few iterations of
    a reading would leave counts that fall from one to the next at none."""
    out = []
    for op in ops:
        if isinstance(op, TimedLoop):
            terms = tuple(term for term in op.count.terms if term[0] not in around)
            op = replace(op, count=replace(op.count, terms=terms), body=_with_equal_counts(op.body, (*around, op.var)))
        out.append(op)
    return tuple(out)


def _time_nested(
    roles: Sequence[TimedRole],
    semaphores: Sequence[tuple[str, int]],
    trips: tuple[Trip, ...],
    latency: float,
    residents: int,
    persistent: bool,
    profile: TripProfile,
    gap_cycles: float,
) -> _Point:
    """Periods of nested loops as differences between runs; also kernels without loops."""
    base = {t.coord: n for t, n in zip(trips, profile.typical, strict=True)}
    roles = tuple((name, warps, _with_equal_counts(ops)) for name, warps, ops in roles)
    start = run_sm(roles, semaphores, base, latency, residents)
    periods, waits = [], []
    for trip in trips:
        step = 2 if any(o.outer == trip.coord for o in trips) else PERIOD_TRIPS
        longer = run_sm(roles, semaphores, base | {trip.coord: base[trip.coord] + step}, latency, residents)
        repeat = step * (base[trip.outer] if trip.outer else 1)
        periods.append(max(0.0, (longer.end_cycles - start.end_cycles) / repeat))
        waits.append(tuple((b - a) / repeat for a, b in zip(start.waits_cycles, longer.waits_cycles, strict=True)))
    # an outer loop's own cost is what is left of its period without the inner loops
    for i, trip in enumerate(trips):
        for j, inner in enumerate(trips):
            if inner.outer == trip.coord:
                count = base[inner.coord]
                periods[i] -= count * periods[j]
                waits[i] = tuple(a - count * b for a, b in zip(waits[i], waits[j], strict=True))
        periods[i] = max(0.0, periods[i])
    counts = [base[t.coord] * (base[t.outer] if t.outer else 1) for t in trips]
    loops = fsum(n * p for n, p in zip(counts, periods, strict=True))
    done = [fsum(n * w[c] for n, w in zip(counts, waits, strict=True)) for c in range(len(CAUSES))]
    first = marginal = start.end_cycles - loops
    if persistent:
        thrice = run_sm(roles, semaphores, base, latency, residents, items=3)
        marginal = (thrice.end_cycles - start.end_cycles) / 2 - loops
    elif residents > 1 and not trips:
        alone = run_sm(roles, semaphores, base, latency, 1)
        marginal = cycles_out_of_step(alone.end_cycles, max(alone.busy_cycles), residents, gap_cycles)
    return _Point(
        max(0.0, marginal),
        max(0.0, first - marginal),
        tuple(periods),
        tuple(waits),
        tuple(max(0.0, a - b) for a, b in zip(start.waits_cycles, done, strict=True)),
    )


def reading_of(
    kernel: Kernel,
    spec: SmSpec,
    latencies: Iterable[float],
    residents: int,
    persistent: bool | None = None,
    gap_cycles: float = 0.0,
) -> SmReading:
    """The reading of ``kernel`` on an SM described by ``spec``; ``persistent`` says that CTAs do several work tiles in
    a row (default: what the kernel's schedule says), ``gap_cycles`` what passes from a CTA to the next."""
    return _reading(
        compile_kernel(kernel, spec),
        kernel.semaphores,
        kernel.trips,
        tuple(float(x) for x in latencies),
        residents,
        kernel.schedule != "grid" if persistent is None else persistent,
        TripProfile.of(kernel.trips, kernel.coords),
        0.0 if kernel.trips else gap_cycles,
    )


def timing_of(
    kernel: Kernel, spec: SmSpec, latencies: Sequence[float], residents: int, persistent: bool | None = None
) -> SmTiming:
    """:class:`SmTiming` of ``kernel`` at all of ``latencies`` (see :func:`reading_of`)."""
    return reading_of(kernel, spec, latencies, residents, persistent).timing(len(latencies))
