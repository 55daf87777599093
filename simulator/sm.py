"""The time reading inside one SM: simpy processes that contend for the SM's pipes.

One process per role of every resident CTA. A pipe serves requests in order of arrival at its rate, so a
request's completion is known when it is made and costs one event. Time is integer ticks.

The product is :class:`SmTiming`: how long a CTA takes as a function of the memory latency it is granted.
A CTA's loops are periodic, so its time is ``overhead + sum(trips * period)``; both are measured by
simulating short loops and slightly longer ones (the shortcut is tested against simulating every iteration).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import simpy

from simulator.program import Trip
from simulator.sm_costs import CAUSES, PIPES, SmSpec, TimedLoop

TICKS_PER_CYCLE = 64
#: Iterations simulated before and during the measurement of a loop's period.
BASE_TRIPS = 4
PERIOD_TRIPS = 4


class _Counter:
    """A monotonically growing count that processes can wait on."""

    __slots__ = ("env", "value", "waiters")

    def __init__(self, env: simpy.Environment, value: int = 0):
        self.env, self.value, self.waiters = env, value, []

    def add(self, amount: int = 1) -> None:
        self.value += amount
        if self.waiters:
            ready = [event for target, event in self.waiters if target <= self.value]
            self.waiters = [(t, e) for t, e in self.waiters if t > self.value]
            for event in ready:
                event.succeed()

    def reach(self, target: int):
        """An event to wait for, or ``None`` when ``target`` is reached already."""
        if self.value >= target:
            return None
        event = self.env.event()
        self.waiters.append((target, event))
        return event


class _Semaphore:
    __slots__ = ("env", "units", "waiters")

    def __init__(self, env: simpy.Environment, units: int):
        self.env, self.units, self.waiters = env, units, []

    def take(self):
        if self.units > 0:
            self.units -= 1
            return None
        event = self.env.event()
        self.waiters.append(event)
        return event

    def give(self) -> None:
        if self.waiters:
            self.waiters.pop(0).succeed()
        else:
            self.units += 1


class Sm:
    """The shared state of one SM: when each pipe is free, and how long it was busy."""

    def __init__(self, env: simpy.Environment, latency_ticks: int, observer=None):
        self.env, self.latency, self.observer = env, latency_ticks, observer
        self.free = [0] * len(PIPES)
        self.busy = [0] * len(PIPES)

    def request(self, work, label: str = "") -> int:
        """Queue ``work`` (pipe, ticks); returns the tick at which all of it is done."""
        now, done = self.env.now, self.env.now
        for pipe, ticks in work:
            start = self.free[pipe] if self.free[pipe] > now else now
            end = start + ticks
            self.free[pipe] = end
            self.busy[pipe] += ticks
            if end > done:
                done = end
            if self.observer is not None:
                self.observer(PIPES[pipe], start, end, label)
        return done


class _CtaState:
    def __init__(self, env: simpy.Environment, semaphores):
        self.env = env
        self.filled: dict[str, _Counter] = {}
        self.acquired: dict[str, int] = {}
        self.released: dict[str, dict[str, int]] = {}
        self.free_slots: dict[str, _Counter] = {}
        self.barriers: dict[str, _Counter] = {}
        self.semaphores = {name: _Semaphore(env, units) for name, units in semaphores}

    def semaphore(self, key: str) -> _Semaphore:
        if key not in self.semaphores:
            self.semaphores[key] = _Semaphore(self.env, 0)
        return self.semaphores[key]

    def counter(self, table: dict, key: str) -> _Counter:
        if key not in table:
            table[key] = _Counter(self.env)
        return table[key]


class _RoleProcess:
    """Runs one role's operations and books what it waited for."""

    def __init__(self, sm: Sm, cta: _CtaState, name: str, ops, trips, items: int, label: str):
        self.sm, self.cta, self.name, self.ops, self.items, self.label = sm, cta, name, ops, items, label
        self.trips = dict(trips)
        self.tokens: dict[str, int] = {}
        self.last_token_done = 0
        self.consumed: dict[str, int] = {}
        self.waited = dict.fromkeys(CAUSES, 0)

    def main(self):
        for _ in range(self.items):
            yield from self._block(self.ops)

    def _block(self, ops):
        env, sm, cta = self.sm.env, self.sm, self.cta
        for op in ops:
            if isinstance(op, TimedLoop):
                for i in range(max(0, op.count.at(self.trips))):
                    self.trips[op.var] = i
                    yield from self._block(op.body)
                continue
            kind, start = op.kind, env.now
            if kind == "work":
                done = max(sm.request(op.work, self.label), start + op.minimum) + op.latency
                yield env.timeout(done - start)
            elif kind == "consume":
                want = self.consumed.get(op.key, 0) + 1
                self.consumed[op.key] = want
                event = cta.counter(cta.filled, op.key).reach(want)
                if event is not None:
                    yield event
                    yield env.timeout(op.latency)
            elif kind == "release":
                self._release(op.key)
            elif kind == "matmul_async":
                done = sm.request(op.work, self.label) + op.latency
                self.last_token_done = max(self.last_token_done, done)
                self.tokens[op.key] = self.last_token_done
            elif kind == "await":
                done = self.tokens.get(op.key, start)
                if done > start:
                    yield env.timeout(done - start)
            elif kind == "acquire":
                taken = cta.acquired.get(op.key, 0) + 1
                cta.acquired[op.key] = taken
                if op.key not in cta.released:
                    cta.released[op.key] = {}
                    cta.counter(cta.filled, op.key + ".consumers").value = op.consumers
                event = cta.counter(cta.free_slots, op.key).reach(taken - op.number)
                if event is not None:
                    yield event
            elif kind == "load_pipe":
                done = sm.request(op.work, self.label) + sm.latency
                counter = cta.counter(cta.filled, op.key)
                env.timeout(done - start).callbacks.append(lambda _event, c=counter: c.add())
            elif kind == "load_async":
                self.tokens[op.key] = sm.request(op.work, self.label) + sm.latency
            elif kind == "load":
                done = sm.request(op.work, self.label) + sm.latency
                yield env.timeout(done - start)
            elif kind == "store":
                sm.request(op.work, self.label)
            elif kind == "barrier":
                counter = cta.counter(cta.barriers, op.key)
                target = (counter.value // op.number + 1) * op.number
                counter.add()
                event = counter.reach(target)
                if event is not None:
                    yield event
                yield env.timeout(op.latency)
            elif kind == "wait":
                event = cta.semaphore(op.key).take()
                if event is not None:
                    yield event
                    yield env.timeout(op.latency)
            elif kind == "signal":
                cta.semaphore(op.key).give()
            if env.now > start:
                self.waited[op.cause] += env.now - start
                if sm.observer is not None:
                    sm.observer("role:" + self.label, start, env.now, kind if kind != "work" else op.cause)

    def _release(self, key: str) -> None:
        cta = self.cta
        counts = cta.released.setdefault(key, {})
        counts[self.name] = counts.get(self.name, 0) + 1
        consumers = cta.counter(cta.filled, key + ".consumers").value
        if len(counts) >= max(1, consumers):
            slots = cta.counter(cta.free_slots, key)
            freed = min(counts.values()) - slots.value
            if freed > 0:
                slots.add(freed)


def _to_ticks(ops) -> tuple:
    """Cycles to integer ticks, once per compiled program."""
    out = []
    for op in ops:
        if isinstance(op, TimedLoop):
            out.append(TimedLoop(op.count, op.var, _to_ticks(op.body)))
        else:
            ticks = tuple((pipe, round(cycles * TICKS_PER_CYCLE)) for pipe, cycles in op.work)
            out.append(
                type(op)(
                    op.kind,
                    ticks,
                    round(op.latency * TICKS_PER_CYCLE),
                    round(op.minimum * TICKS_PER_CYCLE),
                    op.cause,
                    op.key,
                    op.number,
                    op.consumers,
                )
            )
    return tuple(out)


@dataclass(frozen=True)
class SmRun:
    """One simulation: mean CTA end (cycles), mean compute-role waits by cause (cycles), busy cycles by pipe."""

    end_cycles: float
    waits_cycles: tuple[float, ...]
    busy_cycles: tuple[float, ...]


def run_sm(roles, semaphores, trips, latency_cycles: float, residents: int = 1, items: int = 1, observer=None) -> SmRun:
    """Simulate ``residents`` CTAs of the compiled ``roles`` on one SM until they end.

    ``trips`` gives the trip coordinates, ``latency_cycles`` the time from a load's transfer over the SM's
    port to its data being there, ``items`` how many work tiles each (persistent) CTA does in a row.
    """
    env = simpy.Environment()
    sm = Sm(env, round(latency_cycles * TICKS_PER_CYCLE), observer)
    compute, ends = [], []
    for resident in range(residents):
        cta = _CtaState(env, semaphores)
        processes = []
        for name, _warps, ops in roles:
            run = _RoleProcess(sm, cta, name, ops, trips, items, f"cta{resident}/{name}")
            processes.append(env.process(run.main()))
            if name != "loader":
                compute.append(run)

        def finish(group):
            yield env.all_of(group)
            ends.append(env.now)

        env.process(finish(processes))
    env.run()
    if len(ends) < residents:
        raise RuntimeError("the schedule stops before its end: a barrier or pipe is never satisfied")
    waits = tuple(sum(r.waited[c] for r in compute) / len(compute) / TICKS_PER_CYCLE for c in CAUSES)
    return SmRun(
        sum(ends) / residents / TICKS_PER_CYCLE, waits, tuple(b / TICKS_PER_CYCLE / residents for b in sm.busy)
    )


@dataclass(frozen=True)
class SmTiming:
    """A CTA's time against the memory latency it sees, for one number of resident CTAs.

    ``latencies_cycles`` is the grid; ``overhead_cycles[k]`` and ``period_cycles[trip][k]`` the two parts of a
    CTA's time; ``first_extra_cycles[k]`` what a persistent CTA's first tile costs more than later ones.
    ``waits`` gives, per trip and grid point, the share of each cause in the period.
    """

    latencies_cycles: tuple[float, ...]
    overhead_cycles: tuple[float, ...]
    first_extra_cycles: tuple[float, ...]
    period_cycles: tuple[tuple[float, ...], ...]
    waits: tuple[tuple[tuple[float, ...], ...], ...]
    overhead_waits: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=4096)
def time_cta(
    roles, semaphores, trips: tuple[Trip, ...], latencies: tuple[float, ...], residents: int, persistent: bool
) -> SmTiming:
    """Measure :class:`SmTiming` of compiled ``roles`` (cached: equal schedules are simulated once)."""
    ticked = tuple((name, warps, _to_ticks(ops)) for name, warps, ops in roles)
    base = {t.coord: (2 if any(o.outer == t.coord for o in trips) else BASE_TRIPS) for t in trips}

    overheads, firsts, periods, waits, overhead_waits = [], [], [[] for _ in trips], [[] for _ in trips], []
    for latency in latencies:
        start = run_sm(ticked, semaphores, base, latency, residents)
        inner_total, inner_waits = 0.0, [0.0] * len(CAUSES)
        for i, trip in enumerate(trips):
            step = 2 if any(o.outer == trip.coord for o in trips) else PERIOD_TRIPS
            longer = run_sm(ticked, semaphores, base | {trip.coord: base[trip.coord] + step}, latency, residents)
            repeat = base[trip.outer] if trip.outer else 1
            period = max(0.0, (longer.end_cycles - start.end_cycles) / step / repeat)
            shares = [
                (b - a) / step / repeat for a, b in zip(start.waits_cycles, longer.waits_cycles, strict=True)
            ]
            periods[i].append(period)
            waits[i].append(tuple(shares))
        # an outer loop's own cost is what is left of its period without the inner loops
        for i, trip in enumerate(trips):
            inner = [j for j, o in enumerate(trips) if o.outer == trip.coord]
            for j in inner:
                periods[i][-1] -= base[trips[j].coord] * periods[j][-1]
                waits[i][-1] = tuple(
                    a - base[trips[j].coord] * b for a, b in zip(waits[i][-1], waits[j][-1], strict=True)
                )
            periods[i][-1] = max(0.0, periods[i][-1])
        for i, trip in enumerate(trips):
            count = base[trip.coord] * (base[trip.outer] if trip.outer else 1)
            inner_total += count * periods[i][-1]
            inner_waits = [w + count * s for w, s in zip(inner_waits, waits[i][-1], strict=True)]
        first = start.end_cycles - inner_total
        marginal = first
        if persistent:
            twice = run_sm(ticked, semaphores, base, latency, residents, items=3)
            marginal = (twice.end_cycles - start.end_cycles) / 2 - inner_total
        overheads.append(max(0.0, marginal))
        firsts.append(max(0.0, first - marginal))
        overhead_waits.append(
            tuple(max(0.0, a - b) for a, b in zip(start.waits_cycles, inner_waits, strict=True))
        )
    return SmTiming(
        tuple(latencies),
        tuple(overheads),
        tuple(firsts),
        tuple(tuple(p) for p in periods),
        tuple(tuple(w) for w in waits),
        tuple(overhead_waits),
    )


def timing_of(kernel, spec: SmSpec, latencies, residents: int) -> SmTiming:
    """:class:`SmTiming` of ``kernel`` on an SM described by ``spec``."""
    from simulator.sm_costs import compile_kernel

    return time_cta(
        compile_kernel(kernel, spec),
        kernel.semaphores,
        kernel.trips,
        tuple(float(x) for x in latencies),
        residents,
        kernel.schedule != "grid",
    )
