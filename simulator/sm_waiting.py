"""What the processes of an SM wait for: counts, semaphores and operations under way."""

from __future__ import annotations

from typing import Any

from simpy.events import Event

from simulator.event_loop import Alarm, EventLoop
from simulator.warp_streams import Job


class Counter:
    """A monotonically growing count that processes can wait on."""

    __slots__ = ("env", "value", "waiters")

    def __init__(self, env: EventLoop, value: int = 0) -> None:
        self.env, self.value = env, value
        self.waiters: list[tuple[int, Event]] = []

    def add(self, amount: int = 1) -> None:
        """Count on; who waits for no more than that goes on."""
        self.value += amount
        if self.waiters:
            ready = [event for target, event in self.waiters if target <= self.value]
            self.waiters = [(t, e) for t, e in self.waiters if t > self.value]
            for event in ready:
                event.succeed()

    def fill(self, alarm: Alarm) -> None:
        """:meth:`add` as what an alarm calls."""
        self.add()

    def reach(self, target: int) -> Event | None:
        """An event to wait for, or ``None`` when ``target`` is reached already."""
        if self.value >= target:
            return None
        event: Event = self.env.signal()
        self.waiters.append((target, event))
        return event


class Semaphore:
    """Units that processes take and give back, in order of asking."""

    __slots__ = ("env", "units", "waiters")

    def __init__(self, env: EventLoop, units: int) -> None:
        self.env, self.units = env, units
        self.waiters: list[Event] = []

    def take(self) -> Event | None:
        """An event to wait for, or ``None`` when a unit is free."""
        if self.units > 0:
            self.units -= 1
            return None
        event: Event = self.env.signal()
        self.waiters.append(event)
        return event

    def give(self) -> None:
        """A unit for the first that waits, or for later."""
        if self.waiters:
            self.waiters.pop(0).succeed()
        else:
            self.units += 1


class Pending:
    """An operation under way on several pipes: over when its last part is, and some latency later usable.

    ``parts`` are those whose end is not known yet; of the others the last ends at tick ``known``.
    """

    __slots__ = ("cause", "done_at", "env", "event", "known", "latency", "parts", "stream")

    def __init__(self, env: EventLoop, parts: int, latency: int, known: int, cause: str) -> None:
        self.env, self.parts, self.latency, self.known = env, parts, latency, known
        self.event: Event | None = None
        #: A tick, which may be yet to come, or ``None`` while parts are running.
        self.done_at: Any = None if parts else known
        #: What its waiter waits for.
        self.cause = cause
        self.stream: Job | None = None

    def part_done(self) -> None:
        """One part less to come."""
        self.parts -= 1
        if self.parts == 0:
            self.done_at = max(self.env.now, self.known)
            if self.event is not None:
                self.event.succeed()
