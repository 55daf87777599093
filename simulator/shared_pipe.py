"""An execution pipe that the instruction streams of one SM share equally.

Warp schedulers and tensor cores interleave the instructions of all ready warps, so two streams with work for the
same pipe both advance at half its rate (processor sharing). Within a stream, requests are served in order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import ceil

import simpy

#: Tolerance (ticks) within which a job counts as finished: completions are rounded up to whole ticks.
_EPSILON = 1e-6


class SharedPipe:
    """Processor sharing by virtual time: a job that needs ``work`` ends when the pipe's virtual clock, which runs at
    the rate of one stream's share, has advanced by ``work``."""

    __slots__ = ("_heap", "_last", "_observer", "_queues", "_sequence", "_version", "_virtual", "busy", "env")

    def __init__(self, env: simpy.Environment, observer: Callable[[int, int, object], None] | None = None):
        self.env = env
        self.busy = 0
        self._observer = observer
        self._heap: list[tuple[float, int, object, int]] = []
        self._queues: dict[object, deque] = {}
        self._virtual, self._last, self._sequence, self._version = 0.0, 0, 0, 0

    def submit(self, stream, work: int, done: Callable[[], None], label: object = None) -> None:
        """Queue ``work`` ticks for ``stream``; ``done`` is called when it is finished. ``label`` is what an observer
        is told of it (``None``: the stream)."""
        self.busy += work
        queue = self._queues.get(stream)
        if queue is not None:
            queue.append((work, done, label))
            return
        self._queues[stream] = deque(((work, done, label),))
        self._advance()
        self._start(stream, work)
        self._schedule()

    def _start(self, stream, work: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self._virtual + work, self._sequence, stream, self.env.now))

    def _advance(self) -> None:
        now = self.env.now
        if self._heap:
            self._virtual += (now - self._last) / len(self._heap)
        self._last = now

    def _schedule(self) -> None:
        self._version += 1
        if self._heap:
            wait = ceil((self._heap[0][0] - self._virtual) * len(self._heap) - _EPSILON)
            version = self._version
            self.env.timeout(max(0, wait)).callbacks.append(lambda _event: self._fire(version))

    def _fire(self, version: int) -> None:
        if version != self._version:
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
