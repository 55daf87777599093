"""simpy's environment with a shorter way from one event to the next.

An SM reading is some ten thousand events, and a sweep some million readings; half of the time went into simpy's own
bookkeeping. The order of events, their times and everything a process sees are simpy's; what is left out is what no
process here uses: failures that another process handles, and a time to stop at.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL


class Alarm:
    """Something that happens at a time: a function to call, or a process that goes on."""

    __slots__ = ("callbacks",)
    # what a process asks of an event that it has waited for
    _ok = True
    _value = None

    def __init__(self, *calls: Callable[[Any], None]) -> None:
        self.callbacks = list(calls)


class Signal(Alarm):
    """Something that happens when :meth:`succeed` is called, in its turn among the events of that tick."""

    __slots__ = ("_loop",)

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self.callbacks = []

    def succeed(self) -> None:
        """Let it happen: once."""
        self._loop.put(0, self)


class EventLoop(simpy.Environment):
    """A simpy environment whose processes do not handle each other's failures. ``now`` is a plain attribute."""

    now = 0

    def put(self, delay: int, event: Alarm) -> None:
        """Let ``event`` happen after ``delay`` ticks."""
        # an Alarm is what the loop below and simpy's processes need of an event, and no more
        queue: list[Any] = self._queue
        heappush(queue, (self.now + delay, NORMAL, next(self._eid), event))

    def alarm(self, delay: int, call: Callable[[Alarm], None]) -> Alarm:
        """Call ``call(alarm)`` after ``delay`` ticks, in its turn among the events of that tick."""
        alarm = Alarm(call)
        queue: list[Any] = self._queue
        heappush(queue, (self.now + delay, NORMAL, next(self._eid), alarm))
        return alarm

    def delay(self, ticks: int) -> Any:
        """What a process yields to go on ``ticks`` later."""
        alarm = Alarm()
        queue: list[Any] = self._queue
        heappush(queue, (self.now + ticks, NORMAL, next(self._eid), alarm))
        return alarm

    def signal(self) -> Any:
        """What a process yields to go on when its ``succeed`` is called."""
        return Signal(self)

    def run(self, until: object = None) -> None:
        """Until nothing is left to happen (``until`` is simpy's, and not for this loop)."""
        assert until is None
        queue: list[Any] = self._queue
        while queue:
            now, _, _, event = heappop(queue)
            self._now = self.now = now
            callbacks, event.callbacks = event.callbacks, None
            for call in callbacks:
                call(event)
            # a process that failed with nobody waiting for it: an error of this code, not of a schedule
            if not event._ok:
                raise event._value
