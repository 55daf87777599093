"""Instruction streams of one SM that know their own pace: element-wise work beside tensor instructions.

The instructions of one warp wait for each other as its compiler has laid them out, so a stream of one warp a scheduler
takes an issue slot only every few cycles (its *pace*), however idle the schedulers are, and time that it lost to others
it cannot catch up. Its instructions advance together: what follows an exponential waits for it, so a stream that is
short of one unit leaves the others free. Tensor instructions take their slots first: operands and accumulators pass
through the register ports whatever else is issued.

Where no pace is known the units of :mod:`simulator.shared_pipe` serve the parts of an operation apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf

from simulator.event_loop import Alarm, EventLoop

#: In place of a unit: tensor instructions, which are served first.
TENSOR = -1
#: Ticks within which a job counts as finished: completions are rounded up to whole ticks.
_EPSILON = 1e-6


class Demand:
    """What an operation asks of the units: ticks by unit, and the share of it that its stream alone does a tick."""

    __slots__ = ("kind", "most", "ticks")

    def __init__(self, kind: int, ticks: Mapping[int, int], least: float) -> None:
        self.kind, self.ticks = kind, ticks
        self.most = 1.0 / max(least, *ticks.values(), 1.0)


class Job:
    """An operation of one stream, and the rate (shares of it a tick) that it has.

    ``lost``: ticks that it fell behind its own pace, by the unit that was short (:data:`TENSOR`: the issue slots, of
    which tensor instructions had theirs)."""

    __slots__ = ("demand", "done", "label", "left", "lost", "rate", "short", "started")

    def __init__(self, demand: Demand, done: Callable[[], None], label: object) -> None:
        self.demand, self.done, self.label = demand, done, label
        self.left, self.rate, self.started = 1.0, 0.0, 0
        self.short: int | None = None
        self.lost: dict[int, float] = {}


class WarpStreams:
    """Progress of jobs that need several units at once: equal shares of what each could do alone, until a unit is
    short; those that do not need that unit go on filling the others."""

    def __init__(
        self, env: EventLoop, units: Iterable[int], observer: Callable[[int, int, int, object], None] | None = None
    ) -> None:
        self.env, self.units, self._observer = env, tuple(units), observer
        #: Ticks of work given to each unit.
        self.busy = dict.fromkeys(self.units, 0)
        self._first: deque[Job] = deque()
        #: The heads of all queues: a tensor job first, if there is one.
        self._running: list[Job] = []
        self._queues: dict[object, deque[Job]] = {}
        self._last = 0
        self._alarm: Alarm | None = None
        # a loop gives the same few operations again and again: those seen, and what they had beside others
        self._demands: dict[tuple[object, float], Demand] = {}
        self._known: dict[tuple[int, ...], list[tuple[float, int | None]]] = {}

    def demand(self, ticks: Mapping[int, int], least: float) -> Demand:
        """``ticks`` by unit, which take ``least`` ticks or more."""
        key = (tuple(ticks.items()), least)
        if key not in self._demands:
            self._demands[key] = Demand(len(self._demands), ticks, least)
        return self._demands[key]

    def submit(self, stream: object, demand: Demand, done: Callable[[], None], first: bool = False) -> Job:
        """Queue ``demand`` behind what ``stream`` has; ``done`` is called at its end. ``first``: tensor instructions,
        which queue in one line and are served before others."""
        for unit, ticks in demand.ticks.items():
            self.busy[unit] += ticks
        job = Job(demand, done, stream)
        if first:
            queue = self._first
        else:
            found = self._queues.get(stream)
            queue = self._queues[stream] = deque() if found is None else found
        queue.append(job)
        if len(queue) == 1:
            self._advance()
            job.started = self.env.now
            self._share()
        return job

    def _advance(self) -> None:
        now = self.env.now
        passed = now - self._last
        if passed:
            for job in self._running:
                job.left -= passed * job.rate
                if job.short is not None:
                    behind = passed * (1.0 - job.rate / job.demand.most)
                    job.lost[job.short] = job.lost.get(job.short, 0.0) + behind
            self._last = now

    def _share(self) -> None:
        """Give every job its rate, and look again when the first of them ends."""
        running = self._running = [queue[0] for queue in (self._first, *self._queues.values()) if queue]
        key = (1 if self._first else 0, *[job.demand.kind for job in running])
        shares = self._known.get(key)
        if shares is None:
            shares = self._known[key] = self._shares(running)
        soonest = inf
        for job, (rate, short) in zip(running, shares, strict=True):
            job.rate, job.short = rate, short
            if rate > 0.0 and (end := job.left / rate) < soonest:
                soonest = end
        self._alarm = None if soonest == inf else self.env.alarm(max(0, ceil(soonest - _EPSILON)), self._fire)

    def _shares(self, running: list[Job]) -> list[tuple[float, int | None]]:
        """The rate of each of ``running``, and which unit it is short of; a tensor job comes first."""
        free = dict.fromkeys(self.units, 1.0)
        rates, short = [0.0] * len(running), dict[int, int]()
        growing = list(enumerate(running))
        taken: set[int] = set()
        if self._first:
            _, job = growing.pop(0)
            rates[0], taken = job.demand.most, set(job.demand.ticks)
            for unit, ticks in job.demand.ticks.items():
                free[unit] = max(0.0, free[unit] - ticks * job.demand.most)
        level = 0.0
        while growing:
            # how much further, in shares of what each could do alone, until all are at their pace or a unit is full
            further, full = 1.0 - level, None
            for unit, left in free.items():
                asked = sum(job.demand.ticks.get(unit, 0) * job.demand.most for _, job in growing)
                if asked * further > left:
                    further, full = left / asked, unit
            level += further
            for i, job in growing:
                rates[i] = level * job.demand.most
                for unit, ticks in job.demand.ticks.items():
                    free[unit] = max(0.0, free[unit] - further * ticks * job.demand.most)
                if full is not None and job.demand.ticks.get(full):
                    short[i] = TENSOR if full in taken else full
            growing = [(i, job) for i, job in growing if full is not None and i not in short]
        return [(rate, short.get(i)) for i, rate in enumerate(rates)]

    def _fire(self, event: Alarm) -> None:
        if event is not self._alarm:
            return
        self._advance()
        ended = []
        for queue in (self._first, *self._queues.values()):
            if queue and queue[0].left <= _EPSILON * queue[0].rate:
                ended.append(queue.popleft())
                if queue:
                    queue[0].started = self.env.now
        self._share()
        for job in ended:
            if self._observer is not None:
                # what the unit works for the job, drawn from the job's beginning: it is spread over the job's time
                for unit, ticks in job.demand.ticks.items():
                    self._observer(unit, job.started, min(self.env.now, job.started + ticks), job.label)
            job.done()
