"""What the roles of one SM contend for: its execution pipes and its transfer ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simulator.event_loop import EventLoop
from simulator.shared_pipe import SharedPipe
from simulator.sm_costs import PIPE_INDEX, PIPES, TRANSFER_PIPES
from simulator.sm_waiting import Pending
from simulator.warp_streams import Demand, WarpStreams

#: Is told of every piece of work: pipe, first and last tick, whose it is.
Observer = Callable[[str, int, int, Any], None]
#: Ticks by pipe.
_Work = tuple[tuple[int, int], ...]
#: See :meth:`Sm._parts_of`.
_Parts = tuple[_Work, tuple[tuple[int, int, str | None], ...], Demand | None, int]
#: Pipes that serve roles in order of arrival: schedulers go on with the warps that they have, so that roles with equal
#: work fall out of step. The SMEM port and, but for tensor instructions, the issue slots are shared equally.
_IN_ORDER = ("tensor", "exp", "fp32", "alu")
_ISSUE = PIPE_INDEX["issue"]
#: Operations that are batches of tensor instructions.
TENSOR_KINDS = ("matmul", "matmul_async")
#: Units that the instructions of warps share, where they advance as streams with a pace of their own.
STREAM_UNITS = tuple(PIPE_INDEX[name] for name in ("exp", "fp32", "alu", "issue"))


class Sm:
    """The shared state of one SM: its execution pipes, and when each transfer port is free."""

    def __init__(
        self, env: EventLoop, latency_ticks: int, observer: Observer | None = None, paced: bool = False
    ) -> None:
        self.env, self.latency, self.observer = env, latency_ticks, observer
        self.streams = WarpStreams(env, STREAM_UNITS, self._watch_streams()) if paced else None
        in_streams = STREAM_UNITS if paced else ()
        in_order = [
            i for name, i in PIPE_INDEX.items() if name in (*TRANSFER_PIPES, *_IN_ORDER) and i not in in_streams
        ]
        #: When each pipe that serves in order of arrival is free: when a piece of work ends is known as it arrives.
        self.free = dict.fromkeys(in_order, 0)
        self.served = dict.fromkeys(in_order, 0)
        self._parts: dict[tuple[_Work, bool, int], _Parts] = {}
        apart = (*in_order, *in_streams)
        self.pipes = {i: SharedPipe(env, self._watch(name)) for name, i in PIPE_INDEX.items() if i not in apart}

    def _watch_streams(self) -> Callable[[int, int, int, object], None] | None:
        observer = self.observer
        if observer is None:
            return None
        return lambda unit, start, end, stream: observer(PIPES[unit], start, end, stream)

    def _watch(self, name: str) -> Callable[[int, int, object], None] | None:
        observer = self.observer
        if observer is None:
            return None
        return lambda start, end, stream: observer(name, start, end, stream)

    def execute(self, stream: str, op: Any) -> Pending:
        """Start the work of ``op`` (timed, in ticks) of ``stream``; its parts run at the same time, each on its pipe.

        Batches of tensor instructions take their issue slots in order too. A stream with a pace of its own needs
        ``op.minimum`` at least.
        """
        now = known = self.env.now
        tensor = op.kind in TENSOR_KINDS
        key = (op.work, tensor, op.minimum)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = self._parts_of(*key)
        in_order, shared, demand, count = parts
        for pipe, ticks in in_order:
            done = self._serve(pipe, ticks, now, stream)
            if done > known:
                known = done
        pending = Pending(self.env, count, op.latency, known, op.cause)
        if demand is not None:
            assert self.streams is not None
            pending.stream = self.streams.submit(stream, demand, pending.part_done, tensor)
        for pipe, ticks, queue in shared:
            self.pipes[pipe].submit(queue or stream, ticks, pending.part_done, stream)
        return pending

    def _parts_of(self, work: _Work, tensor: bool, least: int) -> _Parts:
        """``work`` by who serves it: pipes in order of arrival, pipes that are shared (with the queue of all, if they
        have one), streams; and how many parts end at a time that is not known beforehand."""
        in_order = tuple(part for part in work if part[0] in self.free)
        queues = {_ISSUE: "batches"} if tensor else {}
        shared = tuple((pipe, ticks, queues.get(pipe)) for pipe, ticks in work if pipe in self.pipes)
        together = {pipe: ticks for pipe, ticks in work if pipe not in self.free and pipe not in self.pipes}
        if self.streams is None or not together:
            return in_order, shared, None, len(shared)
        least = max(ticks for _, ticks in work) if tensor else least
        return in_order, shared, self.streams.demand(together, least), len(shared) + 1

    def _serve(self, pipe: int, ticks: int, now: int, label: str) -> int:
        """Queue ``ticks`` on a pipe that serves in order of arrival; returns when they are done."""
        start = self.free[pipe]
        if start < now:
            start = now
        done = self.free[pipe] = start + ticks
        self.served[pipe] += ticks
        if self.observer is not None:
            self.observer(PIPES[pipe], start, done, label)
        return done

    def transfer(self, work: Iterable[tuple[int, int]], label: str = "") -> int:
        """Queue a load or store: its port time in order of arrival, its SMEM time beside other work. Returns the
        tick at which the port is done with it."""
        now, done = self.env.now, self.env.now
        for pipe, ticks in work:
            if pipe not in self.free:
                self.pipes[pipe].submit("transfer " + label, ticks, _ignore, label)
                continue
            done = self._serve(pipe, ticks, now, label)
        return done

    def busy(self) -> list[int]:
        """Ticks of work that each pipe was given, in the order of :data:`PIPES`."""
        streams = {} if self.streams is None else self.streams.busy
        apart = {**self.served, **streams}
        return [apart[i] if i in apart else self.pipes[i].busy for i in range(len(PIPES))]


def _ignore() -> None:
    return None
