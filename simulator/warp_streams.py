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


class Job:
    """Work of one stream: ticks by unit, and the rate (shares of it a tick) that it has and could have at most.

    ``lost``: ticks that it fell behind its own pace, by the unit that was short (:data:`TENSOR`: the issue slots, of
    which tensor instructions had theirs)."""

    __slots__ = ("demand", "done", "kind", "label", "left", "lost", "most", "rate", "short", "started")

    def __init__(
        self, demand: Mapping[int, int], least: float, done: Callable[[], None], label: object, kind: int
    ) -> None:
        self.demand, self.done, self.label, self.kind = demand, done, label, kind
        self.left, self.rate, self.started = 1.0, 0.0, 0
        self.most = 1.0 / max(least, *demand.values(), 1.0)
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
        # a loop gives the same few operations again and again: numbers of those seen, and what they had beside others
        self._kinds: dict[tuple[object, float], int] = {}
        self._known: dict[tuple[int, ...], list[tuple[float, int | None]]] = {}

    def submit(
        self, stream: object, demand: Mapping[int, int], least: float, done: Callable[[], None], first: bool = False
    ) -> Job:
        """Queue ``demand`` (ticks by unit) behind what ``stream`` has; it takes ``least`` ticks or more, and ``done``
        is called at its end. ``first``: tensor instructions, which queue in one line and are served before others."""
        for unit, ticks in demand.items():
            self.busy[unit] += ticks
        kind = self._kinds.setdefault((tuple(demand.items()), least), len(self._kinds))
        job = Job(demand, least, done, stream, kind)
        queue = self._first if first else self._queues.setdefault(stream, deque())
        queue.append(job)
        if len(queue) == 1:
            self._advance()
            job.started = self.env.now
            self._share()
        return job

    def _advance(self) -> None:
        passed = self.env.now - self._last
        if passed:
            for job in self._running:
                job.left -= passed * job.rate
                if job.short is not None:
                    job.lost[job.short] = job.lost.get(job.short, 0.0) + passed * (1.0 - job.rate / job.most)
            self._last = self.env.now

    def _share(self) -> None:
        """Give every job its rate, and look again when the first of them ends."""
        running = self._running = [queue[0] for queue in (self._first, *self._queues.values()) if queue]
        key = (1 if self._first else 0, *[job.kind for job in running])
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
            rates[0], taken = job.most, set(job.demand)
            for unit, ticks in job.demand.items():
                free[unit] = max(0.0, free[unit] - ticks * job.most)
        level = 0.0
        while growing:
            # how much further, in shares of what each could do alone, until all are at their pace or a unit is full
            further, full = 1.0 - level, None
            for unit, left in free.items():
                asked = sum(job.demand.get(unit, 0) * job.most for _, job in growing)
                if asked * further > left:
                    further, full = left / asked, unit
            level += further
            for i, job in growing:
                rates[i] = level * job.most
                for unit, ticks in job.demand.items():
                    free[unit] = max(0.0, free[unit] - further * ticks * job.most)
                if full is not None and job.demand.get(full):
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
                for unit, ticks in job.demand.items():
                    self._observer(unit, job.started, min(self.env.now, job.started + ticks), job.label)
            job.done()
