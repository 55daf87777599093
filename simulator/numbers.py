"""The first reading: NumPy executes the tile program, CTA by CTA and role by role.

Roles of one CTA run as coroutines that meet at the same pipes, barriers and semaphores which the time
reading uses, so a schedule that reads a tile before it is loaded, or never rescales, gives wrong numbers
here; one whose roles wait for each other forever raises :class:`DeadlockError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from simulator.errors import InputError
from simulator.program import (
    Acquire,
    Await,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Fetch,
    Instructions,
    Kernel,
    Load,
    Loop,
    Matmul,
    Op,
    Pipe,
    Program,
    Release,
    Role,
    Signal,
    Store,
    Tile,
    View,
    Wait,
    as_index,
    view,
)
from simulator.tile_ops import TILE_OPS, round_to


class DeadlockError(RuntimeError):
    """Every role of a CTA waits for another one: the schedule has a wrong barrier or pipe."""


class _Cta:
    """What the roles of one CTA share: SMEM, pipe slots, barriers, semaphores."""

    def __init__(self, kernel: Kernel, memory: Mapping[str, np.ndarray], env: dict[str, int]) -> None:
        self.kernel, self.memory, self.env = kernel, memory, env
        self.smem: dict[str, np.ndarray] = {}
        self.slots: dict[str, list[np.ndarray | None]] = {}
        self.filled: dict[str, int] = {}
        self.acquired: dict[str, int] = {}
        self.released: dict[str, dict[str, int]] = {}
        self.semaphores = dict(kernel.semaphores)
        self.arrivals: dict[str, int] = {}

    def freed(self, pipe: Pipe) -> int:
        """Slots of ``pipe`` that every consumer has given back so far: the slowest one decides."""
        counts = self.released.get(pipe.name, {})
        return min(counts.values()) if len(counts) >= pipe.consumers else 0


class _RoleRun:
    """The private state of one role: registers, read positions, outstanding asynchronous operations."""

    def __init__(self, cta: _Cta, role: Role) -> None:
        self.cta, self.role = cta, role
        self.env = dict(cta.env)
        self.registers: dict[str, np.ndarray] = {}
        self.consumed: dict[str, int] = {}
        self.pending: list[tuple[str, Matmul]] = []

    # operands -------------------------------------------------------------------------------------
    def _base(self, source: Buffer | Pipe) -> np.ndarray:
        if isinstance(source, Pipe):
            count = self.consumed.get(source.name, 0)
            slots = self.cta.slots.setdefault(source.name, [None] * source.stages)
            slot = slots[(count - 1) % source.stages] if count else None
            if slot is None:
                return np.full((source.rows, source.cols), np.nan, np.float32)
            return slot
        store = self.cta.smem if source.space == "smem" else self.registers
        if source.name not in store:
            store[source.name] = np.full((source.rows, source.cols), np.nan, np.float32)
        return store[source.name]

    def read(self, operand: Buffer | Pipe | View) -> np.ndarray:
        v = view(operand)
        rows, cols = v.shape
        return self._base(v.source)[v.row : v.row + rows, v.col : v.col + cols]

    def write(self, operand: Buffer | Pipe | View, value: np.ndarray) -> None:
        v = view(operand)
        rows, cols = v.shape
        target = self._base(v.source)
        target[v.row : v.row + rows, v.col : v.col + cols] = round_to(value, v.dtype)

    def _window(self, place: Tile) -> tuple[np.ndarray, Any, Any]:
        """The tensor, its part that is there and the part of the tile that this is (``None``: nothing is there)."""
        tensor = self.cta.memory[place.tensor.name]
        head, row, col = place.head.at(self.env), place.row.at(self.env), place.col.at(self.env)
        r0, r1 = max(row, 0), min(row + place.rows, tensor.shape[1])
        c0, c1 = max(col, 0), min(col + place.cols, tensor.shape[2])
        if r1 <= r0 or c1 <= c0 or not 0 <= head < tensor.shape[0]:
            return tensor, None, None
        inside = (slice(r0 - row, r1 - row), slice(c0 - col, c1 - col))
        return tensor, (head, slice(r0, r1), slice(c0, c1)), inside

    def fetch(self, place: Tile) -> np.ndarray:
        out = np.zeros((place.rows, place.cols), np.float32)
        tensor, where, inside = self._window(place)
        if where is not None:
            out[inside] = tensor[where]
        return out

    def put(self, place: Tile, value: np.ndarray, accumulate: bool) -> None:
        tensor, where, inside = self._window(place)
        if where is not None:
            block = round_to(value, place.tensor.dtype)[inside]
            tensor[where] = tensor[where] + block if accumulate else block

    # operations -----------------------------------------------------------------------------------
    def run(self, ops: Iterable[Op]) -> Iterator[None]:
        """Execute ``ops``; yields whenever the role has to wait."""
        for op in ops:
            if isinstance(op, Loop):
                for i in range(max(0, int(op.count.at(self.env)))):
                    self.env[op.var] = i
                    yield from self.run(op.body)
            else:
                yield from self._step(op)

    def _step(self, op: Op) -> Iterator[None]:
        cta = self.cta
        if isinstance(op, Acquire):
            pipe = op.pipe
            while cta.acquired.get(pipe.name, 0) - cta.freed(pipe) >= pipe.stages:
                yield
            cta.acquired[pipe.name] = cta.acquired.get(pipe.name, 0) + 1
        elif isinstance(op, Load):
            self._load(op)
        elif isinstance(op, Consume):
            want = self.consumed.get(op.pipe.name, 0) + 1
            while cta.filled.get(op.pipe.name, 0) < want:
                yield
            self.consumed[op.pipe.name] = want
        elif isinstance(op, Release):
            counts = cta.released.setdefault(op.pipe.name, {})
            counts[self.role.name] = counts.get(self.role.name, 0) + 1
        elif isinstance(op, Matmul):
            if op.token is None:
                self._matmul(op)
            else:
                self.pending.append((op.token, op))
        elif isinstance(op, Await):
            self._complete(op.token)
        elif isinstance(op, Compute):
            self._compute(op)
        elif isinstance(op, Store):
            self.put(op.into, self.read(op.source), op.accumulate)
        elif isinstance(op, Barrier):
            mine = cta.arrivals.get(op.name, 0)
            cta.arrivals[op.name] = mine + 1
            target = (mine // op.parties + 1) * op.parties
            while cta.arrivals[op.name] < target:
                yield
        elif isinstance(op, Signal):
            cta.semaphores[op.name] = cta.semaphores.get(op.name, 0) + 1
        elif isinstance(op, Wait):
            while cta.semaphores.get(op.name, 0) < 1:
                yield
            cta.semaphores[op.name] -= 1
        elif not isinstance(op, Exchange | Fetch | Instructions):
            raise TypeError(f"unknown operation {op!r}")

    def _load(self, op: Load) -> None:
        value = self.fetch(op.source)
        target = op.into
        if isinstance(target, Pipe) or (isinstance(target, View) and isinstance(target.source, Pipe)):
            v = view(target)
            pipe = v.source
            assert isinstance(pipe, Pipe)
            slots = self.cta.slots.setdefault(pipe.name, [None] * pipe.stages)
            index = self.cta.filled.get(pipe.name, 0) % pipe.stages
            slots[index] = round_to(value, pipe.dtype)
            self.cta.filled[pipe.name] = self.cta.filled.get(pipe.name, 0) + 1
        else:
            self.write(target, value)

    def _complete(self, token: str) -> None:
        tokens = [t for t, _ in self.pending]
        if token not in tokens:
            return
        upto = len(tokens) - 1 - tokens[::-1].index(token)
        for _, op in self.pending[: upto + 1]:
            self._matmul(op)
        del self.pending[: upto + 1]

    def _matmul(self, op: Matmul) -> None:
        a, b = self.read(op.a), self.read(op.b)
        product = (a.T if op.transpose_a else a) @ (b.T if op.transpose_b else b)
        if op.scale != 1.0:
            product = product * np.float32(op.scale)
        self.write(op.out, self.read(op.out) + product if op.accumulate else product)

    def _compute(self, op: Compute) -> None:
        params = {k: v if isinstance(v, float) else as_index(v).at(self.env) for k, v in op.params}
        if op.fn == "fill":
            v = view(op.out)
            self.write(op.out, np.full(v.shape, params["value"], np.float32))
            return
        value = TILE_OPS[op.fn].compute(tuple(self.read(a) for a in op.args), params)
        self.write(op.out, value)


def run_kernel(kernel: Kernel, memory: dict[str, np.ndarray], ctas: Sequence[int] | None = None) -> None:
    """Execute all (or the given) CTAs of ``kernel`` on ``memory`` (float32 ``[heads, rows, cols]`` by tensor)."""
    if kernel.times > 1:
        raise InputError(f"{kernel.name}: a launch this long is listed in part; numbers need a shorter sequence")
    for index in range(kernel.ctas) if ctas is None else ctas:
        env = {name: int(values[index]) for name, values in kernel.coords.items()}
        cta = _Cta(kernel, memory, env)
        runs = [_RoleRun(cta, role) for role in kernel.roles]
        active = {i: run.run(run.role.ops) for i, run in enumerate(runs)}
        while active:
            before: tuple[object, ...] | None = _progress(cta, runs)
            for i in list(active):
                try:
                    next(active[i])
                except StopIteration:
                    del active[i]
                    before = None
            if active and before is not None and before == _progress(cta, runs):
                waiting = ", ".join(runs[i].role.name for i in active)
                raise DeadlockError(f"kernel {kernel.name}, CTA {index}: {waiting} wait for each other")


def _progress(cta: _Cta, runs: Sequence[_RoleRun]) -> tuple[object, ...]:
    return (
        tuple(sorted(cta.filled.items())),
        tuple(sorted(cta.acquired.items())),
        tuple(sorted((k, tuple(sorted(v.items()))) for k, v in cta.released.items())),
        tuple(sorted(cta.semaphores.items())),
        tuple(sorted(cta.arrivals.items())),
        tuple(tuple(sorted(r.consumed.items())) for r in runs),
    )


def run_program(program: Program, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Execute ``program`` on ``inputs`` (arrays ``[heads, rows, cols]`` by role: ``Q``, ``K``, ``V`` ...).

    Returns the outputs by role (``O``, ``LSE`` ...). Scratch tensors start as NaN, so that what a kernel reads
    before it was written shows.
    """
    memory: dict[str, np.ndarray] = {}
    for name, tensor in program.tensors().items():
        memory[name] = np.full((tensor.heads, tensor.rows, tensor.cols), np.nan, np.float32)
    for role, tensor in program.inputs.items():
        if tensor.name in memory:
            memory[tensor.name][...] = round_to(np.asarray(inputs[role], np.float32), tensor.dtype)
    for tensor_name in program.attributes.get("zero_filled", ()):
        memory[tensor_name][...] = 0.0
    for kernel in program.kernels:
        run_kernel(kernel, memory)
    return {role: memory[tensor.name] for role, tensor in program.outputs.items()}
