"""The time reading inside one SM: simpy processes that contend for the SM's pipes.

One process per role of every resident CTA. Execution pipes serve the roles in order of arrival, the SMEM port and
the issue slots equally (:mod:`simulator.shared_pipe`); transfers over the SM's ports are served in order of arrival
too, so their completion is known when they are made. Time is integer ticks.

:mod:`simulator.sm_timing` turns runs of it into a CTA's time as a function of the memory latency it is granted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpy.events import Event, Process

from simulator.event_loop import EventLoop
from simulator.sm_costs import CAUSES, PIPE_INDEX, PIPES, TimedLoop, TimedOp, TimedRole
from simulator.sm_pipes import STREAM_UNITS, TENSOR_KINDS, Observer, Sm
from simulator.sm_waiting import Counter, Pending, Semaphore
from simulator.warp_streams import TENSOR, Job

#: A process: the events that it waits for.
_Steps = Generator[Event, Any, None]
TICKS_PER_CYCLE = 64
_PORT_OUT = PIPE_INDEX["port_out"]
#: What a stream waits for that a unit is short for.
_SHORT_OF = {unit: "exp" if PIPES[unit] == "exp" else "fp32" for unit in STREAM_UNITS} | {TENSOR: "tensor"}


class _CtaState:
    def __init__(self, env: EventLoop, semaphores: Iterable[tuple[str, int]]) -> None:
        self.env = env
        self.filled: dict[str, Counter] = {}
        self.acquired: dict[str, int] = {}
        self.released: dict[str, dict[str, int]] = {}
        self.free_slots: dict[str, Counter] = {}
        self.barriers: dict[str, Counter] = {}
        self.semaphores = {name: Semaphore(env, units) for name, units in semaphores}

    def semaphore(self, key: str) -> Semaphore:
        if key not in self.semaphores:
            self.semaphores[key] = Semaphore(self.env, 0)
        return self.semaphores[key]

    def counter(self, table: dict[str, Counter], key: str) -> Counter:
        if key not in table:
            table[key] = Counter(self.env)
        return table[key]


class _RoleProcess:
    """Runs one role's operations and books what it waited for."""

    def __init__(
        self,
        sm: Sm,
        cta: _CtaState,
        name: str,
        ops: Sequence[TimedOp],
        tiles: Sequence[Mapping[str, int]],
        label: str,
        main: str | None,
    ) -> None:
        self.sm, self.cta, self.name, self.ops, self.label = sm, cta, name, ops, label
        self.tiles, self.main_trip = tiles, main
        self.trips: dict[str, int] = {}
        #: Ticks at which the loop over ``main`` was entered and each of its iterations ended, by work tile.
        self.marks: list[list[int]] = []
        self.mark_waits: list[tuple[int, ...]] = []
        self.item_ends: list[int] = []
        self.tokens: dict[str, Pending] = {}
        self.consumed: dict[str, int] = {}
        self.waited = dict.fromkeys(CAUSES, 0)

    def main(self) -> _Steps:
        for trips in self.tiles:
            self.trips = dict(trips)
            yield from self._block(self.ops)
            self.item_ends.append(self.sm.env.now)

    def _mark(self, first: bool) -> None:
        if first:
            self.marks.append([])
        self.marks[-1].append(self.sm.env.now)
        self.mark_waits.append(tuple(self.waited.values()))

    def _block(self, ops: Sequence[Any]) -> _Steps:
        env, sm, cta = self.sm.env, self.sm, self.cta
        pending: Pending | None
        for op in ops:
            if isinstance(op, TimedLoop):
                marked = self.main_trip is not None and any(name == self.main_trip for name, _ in op.count.terms)
                if marked:
                    self._mark(True)
                for i in range(max(0, op.count.at(self.trips))):
                    self.trips[op.var] = i
                    yield from self._block(op.body)
                    if marked:
                        self._mark(False)
                continue
            kind, start = op.kind, env.now
            if kind == "work" or kind == "matmul":
                pending = sm.execute(self.label, op)
                if pending.done_at is None:
                    pending.event = env.signal()
                    yield pending.event
                rest = max(pending.done_at, start + op.minimum) + op.latency - env.now
                if rest > 0:
                    yield env.delay(rest)
            elif kind == "consume":
                want = self.consumed.get(op.key, 0) + 1
                self.consumed[op.key] = want
                event = cta.counter(cta.filled, op.key).reach(want)
                if event is not None:
                    yield event
                    yield env.delay(op.latency)
            elif kind == "release":
                self._release(op.key)
            elif kind == "matmul_async":
                self.tokens[op.key] = sm.execute(self.label, op)
            elif kind == "await":
                pending = self.tokens.get(op.key)
                if pending is not None and pending.done_at is None:
                    pending.event = env.signal()
                    yield pending.event
                rest = pending.done_at + pending.latency - env.now if pending is not None else 0
                if rest > 0:
                    yield env.delay(rest)
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
                done = sm.transfer(op.work, self.label) + sm.latency
                counter = cta.counter(cta.filled, op.key)
                env.alarm(done - start, counter.fill)
            elif kind == "load_async":
                done = sm.transfer(op.work, self.label)
                self.tokens[op.key] = Pending(env, 0, sm.latency, done, op.cause)
            elif kind == "load":
                done = sm.transfer(op.work, self.label) + sm.latency
                yield env.delay(done - start)
            elif kind == "reduce":
                queued = sm.free[_PORT_OUT] - start
                if queued > 0:
                    yield env.delay(queued)
                sm.transfer(op.work, self.label)
            elif kind == "store":
                # posted, but the role is held while its data leaves the SM
                yield env.delay(sm.transfer(op.work, self.label) - start)
            elif kind == "barrier":
                counter = cta.counter(cta.barriers, op.key)
                target = (counter.value // op.number + 1) * op.number
                counter.add()
                event = counter.reach(target)
                if event is not None:
                    yield event
                yield env.delay(op.latency)
            elif kind == "wait":
                event = cta.semaphore(op.key).take()
                if event is not None:
                    yield event
                    yield env.delay(op.latency)
            elif kind == "signal":
                cta.semaphore(op.key).give()
            if env.now > start:
                cause = pending.cause if kind == "await" and pending is not None else op.cause
                stream = pending.stream if op.paced and pending is not None else None
                booked = self._book(op.paced, stream) if stream is not None else 0
                self.waited[cause] += env.now - start - booked
                if sm.observer is not None:
                    sm.observer("role:" + self.label, start, env.now, cause if kind in ("work", "matmul") else kind)

    def _book(self, own: Iterable[tuple[str, int]], job: Job) -> int:
        """Book a stream's own ``own`` (cause, ticks) and what it lost to others; returns their sum."""
        total = 0
        for cause, ticks in own:
            self.waited[cause] += ticks
            total += ticks
        for unit, behind in job.lost.items():
            ticks = round(behind)
            self.waited[_SHORT_OF[unit]] += ticks
            total += ticks
        return total

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


def _multiplies(ops: Iterable[Any]) -> bool:
    return any(_multiplies(op.body) if isinstance(op, TimedLoop) else op.kind in TENSOR_KINDS for op in ops)


def _paced(ops: Iterable[Any]) -> bool:
    return any(_paced(op.body) if isinstance(op, TimedLoop) else bool(op.paced) for op in ops)


def to_ticks(ops: Iterable[Any]) -> tuple[Any, ...]:
    """Cycles to integer ticks, once per compiled program."""
    out = []
    for op in ops:
        if isinstance(op, TimedLoop):
            out.append(TimedLoop(op.count, op.var, to_ticks(op.body)))
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
                    tuple((cause, round(cycles * TICKS_PER_CYCLE)) for cause, cycles in op.paced),
                )
            )
    return tuple(out)


class StuckError(RuntimeError):
    """A schedule that waits for what never comes."""


@dataclass(frozen=True)
class SmRun:
    """One simulation: mean CTA end (cycles), mean compute-role waits by cause (cycles), busy cycles by pipe.

    ``tile_ends_cycles[item][n]`` is when work tile ``item`` of a CTA would have ended had its marked loop stopped
    after ``n`` iterations (mean over CTAs), ``iteration_waits`` the waits by cause of one late iteration.
    """

    end_cycles: float
    waits_cycles: tuple[float, ...]
    busy_cycles: tuple[float, ...]
    tile_ends_cycles: tuple[tuple[float, ...], ...] = ()
    iteration_waits: tuple[float, ...] = (0.0,) * len(CAUSES)


def run_sm(
    roles: Sequence[TimedRole],
    semaphores: Sequence[tuple[str, int]],
    trips: Mapping[str, int],
    latency_cycles: float,
    residents: int = 1,
    items: int = 1,
    observer: Observer | None = None,
    marked: str | None = None,
    first: Mapping[str, int] | None = None,
) -> SmRun:
    """Simulate ``residents`` CTAs of the compiled ``roles`` on one SM until they end.

    ``trips`` gives the trip coordinates, ``latency_cycles`` the time from a load's transfer over the SM's
    port to its data being there, ``items`` how many work tiles each (persistent) CTA does in a row, ``marked``
    the trip coordinate whose iterations are recorded, ``first`` the trip coordinates of all work tiles but the last
    (``None``: the same).
    """
    env = EventLoop()
    sm = Sm(env, round(latency_cycles * TICKS_PER_CYCLE), observer, any(_paced(ops) for _, _, ops in roles))
    by_cta, ends = [], []
    tiles = [*[trips if first is None else first] * (items - 1), trips]
    # what the CTA waits for is what its computing roles wait for, not its loaders and writers
    least_warps = min(4, max(warps for _, warps, _ in roles))
    computing = [_multiplies(ops) for _, _, ops in roles]
    if not any(computing):
        computing = [warps >= least_warps for _, warps, _ in roles]
    for resident in range(residents):
        cta = _CtaState(env, semaphores)
        runs = [_RoleProcess(sm, cta, name, ops, tiles, f"cta{resident}/{name}", marked) for name, _warps, ops in roles]
        processes = [env.process(run.main()) for run in runs]
        by_cta.append([run for run, computes in zip(runs, computing, strict=True) if computes])

        def finish(group: list[Process]) -> _Steps:
            yield env.all_of(group)
            ends.append(env.now)

        env.process(finish(processes))
    env.run()
    if len(ends) < residents:
        raise StuckError("the schedule stops before its end: a barrier or pipe is never satisfied")
    compute = [run for runs in by_cta for run in runs]
    waits = tuple(sum(r.waited[c] for r in compute) / len(compute) / TICKS_PER_CYCLE for c in CAUSES)
    return SmRun(
        sum(ends) / residents / TICKS_PER_CYCLE,
        waits,
        tuple(b / TICKS_PER_CYCLE / residents for b in sm.busy()),
        _tile_ends(by_cta, items),
        _late_waits(compute),
    )


def _tile_ends(by_cta: Sequence[Sequence[_RoleProcess]], items: int) -> tuple[tuple[float, ...], ...]:
    """See :class:`SmRun`: a role that stops after iteration n still has its last iteration's way to its end to go."""
    rows = []
    for item in range(items):
        ends = []
        for runs in by_cta:
            marked = [run for run in runs if len(run.marks) == items]
            if not marked:
                return ()
            # a loader that peels an iteration off its loop is waited for by those that do not
            most = max(len(run.marks[item]) for run in marked)
            marked = [run for run in marked if len(run.marks[item]) == most]
            tails = [[m + run.item_ends[item] - run.marks[item][-1] for m in run.marks[item]] for run in marked]
            ends.append([max(column) for column in zip(*tails, strict=True)])
        rows.append(tuple(sum(column) / len(ends) / TICKS_PER_CYCLE for column in zip(*ends, strict=True)))
    return tuple(rows)


def _late_waits(compute: Sequence[_RoleProcess]) -> tuple[float, ...]:
    """Mean waits by cause (cycles) of one iteration in the second half of the last marked loop."""
    total = [0.0] * len(CAUSES)
    marked = [run for run in compute if run.marks and len(run.marks[-1]) > 1]
    for run in marked:
        n = len(run.marks[-1]) // 2
        late, early = run.mark_waits[-1], run.mark_waits[-1 - n]
        total = [t + (b - a) / n / len(marked) for t, a, b in zip(total, early, late, strict=True)]
    return tuple(t / TICKS_PER_CYCLE for t in total)
