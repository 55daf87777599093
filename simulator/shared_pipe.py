"""An execution pipe that the instruction streams of one SM share equally.

Warp schedulers and tensor cores interleave the instructions of all ready warps, so two streams with work for the
same pipe both advance at half its rate (processor sharing). Within a stream, requests are served in order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import ceil

from simulator.event_loop import Alarm, EventLoop

#: Tolerance (ticks) within which a job counts as finished: completions are rounded up to whole ticks.
_EPSILON = 1e-6


class SharedPipe:
    """Processor sharing by virtual time: a job that needs ``work`` ends when the pipe's virtual clock, which runs at
    the rate of one stream's share, has advanced by ``work``.

    A job that has the pipe to itself, which most have, is kept apart in ``_only`` and costs one event and no heap.
    """

    __slots__ = ("_alarm", "_heap", "_last", "_observer", "_only", "_queues", "_sequence", "_virtual", "busy", "env")

    def __init__(self, env: EventLoop, observer: Callable[[int, int, object], None] | None = None) -> None:
        self.env = env
        self.busy = 0
        self._observer = observer
        #: (stream, work, done, label) of a job that is alone since ``_last``.
        self._only: tuple[object, int, Callable[[], None], object] | None = None
        self._heap: list[tuple[float, int, object, int]] = []
        self._queues: dict[object, deque[tuple[int, Callable[[], None], object]]] = {}
        self._virtual, self._last, self._sequence = 0.0, 0, 0
        #: The event at which the pipe looks next; any earlier one that still fires is stale.
        self._alarm: Alarm | None = None

    def submit(self, stream: object, work: int, done: Callable[[], None], label: object = None) -> None:
        """Queue ``work`` ticks for ``stream``; ``done`` is called when it is finished. ``label`` is what an observer
        is told of it (``None``: the stream)."""
        self.busy += work
        queues = self._queues
        if not queues:
            if self._only is None:
                self._only, self._last = (stream, work, done, label), self.env.now
                self._alarm = self.env.alarm(work, self._only_is_done)
                return
            self._share()
        queue = queues.get(stream)
        if queue is not None:
            queue.append((work, done, label))
            return
        queues[stream] = deque(((work, done, label),))
        self._advance()
        self._start(stream, work)
        self._schedule()

    def _only_is_done(self, event: Alarm) -> None:
        if event is not self._alarm:
            return
        assert self._only is not None
        stream, _, done, label = self._only
        self._only = None
        if self._observer is not None:
            self._observer(self._last, self.env.now, stream if label is None else label)
        done()

    def _share(self) -> None:
        """Put the job that was alone among those that share."""
        assert self._only is not None and self._alarm is not None
        stream, work, done, label = self._only
        self._only = None
        self._queues[stream] = deque(((work, done, label),))
        self._sequence += 1
        self._virtual = float(self.env.now - self._last)
        self._heap.append((float(work), self._sequence, stream, self._last))
        self._last = self.env.now
        # its own alarm still holds until the next job that counts comes
        self._alarm.callbacks[:] = [self._fire]

    def _start(self, stream: object, work: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self._virtual + work, self._sequence, stream, self.env.now))

    def _advance(self) -> None:
        now = self.env.now
        if self._heap:
            self._virtual += (now - self._last) / len(self._heap)
        self._last = now

    def _schedule(self) -> None:
        if not self._heap:
            self._alarm = None
            return
        wait = ceil((self._heap[0][0] - self._virtual) * len(self._heap) - _EPSILON)
        self._alarm = self.env.alarm(wait if wait > 0 else 0, self._fire)

    def _fire(self, event: Alarm) -> None:
        if event is not self._alarm:
            return
        self._advance()
        finished = []
        while self._heap and self._heap[0][0] <= self._virtual + _EPSILON:
            _, _, stream, started = heapq.heappop(self._heap)
            queue = self._queues[stream]
            _, done, label = queue.popleft()
            if self._observer is not None:
                self._observer(started, self.env.now, stream if label is None else label)
            finished.append(done)
            if queue:
                self._start(stream, queue[0][0])
            else:
                del self._queues[stream]
        self._schedule()
        for done in finished:
            done()
