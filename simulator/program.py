"""Tile programs: the schedule of a kernel, written once and read three ways.

A :class:`Program` is a list of kernels. A :class:`Kernel` is a grid of CTAs, each running the same
*roles* (a loader, one or more compute warpgroups). A role is a short list of tile operations on named
buffers. Positions in HBM are affine expressions (:class:`Index`) of the CTA's coordinates and of loop
variables, so one program text stands for every CTA of the grid.

The three readings are :mod:`simulator.numbers` (NumPy executes the tiles), :mod:`simulator.traffic`
(every load and store is counted, through the L2 model) and :mod:`simulator.sm` (discrete events).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import numpy as np

from simulator.operands import Buffer, Index, Pipe, Tensor, Tile, View, as_index, tile, var, view
from simulator.problem import AttentionProblem

__all__ = [
    "Acquire",
    "Await",
    "Barrier",
    "Buffer",
    "Compute",
    "Consume",
    "Exchange",
    "Index",
    "Instructions",
    "Kernel",
    "Load",
    "Loop",
    "Matmul",
    "Op",
    "Pipe",
    "Program",
    "Release",
    "Role",
    "Signal",
    "Store",
    "Tensor",
    "Tile",
    "Trip",
    "View",
    "Wait",
    "as_index",
    "map_ops",
    "tile",
    "var",
    "view",
    "walk_ops",
]


@dataclass(frozen=True)
class Load:
    """Copy a tile from HBM (through L2) on chip. Into a pipe it is asynchronous; into a buffer it blocks,
    unless ``token`` names it for a later :class:`Await`. With ``multicast`` > 1 the CTAs of a cluster (coordinate
    ``cluster_rank``) each fetch that share of the tile's rows and hand it to the others: L2 sees the tile once.
    ``overfetch``: bytes that L2 sends for one of the tile, where threads read parts of 32-byte sectors. ``from_l1``:
    the share of the tile that L1 still holds from an earlier load of it."""

    source: Tile
    into: Buffer | Pipe | View
    token: str | None = None
    via: str = "cp_async"
    multicast: int = 1
    overfetch: float = 1.0
    from_l1: float = 0.0


@dataclass(frozen=True)
class Store:
    """Copy a buffer to a tile in HBM; ``accumulate`` adds to what is there (an atomic in L2)."""

    source: Buffer | View
    into: Tile
    accumulate: bool = False
    via: str = "st"


@dataclass(frozen=True)
class Acquire:
    """The loader waits until the next slot of ``pipe`` is free."""

    pipe: Pipe


@dataclass(frozen=True)
class Consume:
    """A compute role waits until the next slot of ``pipe`` is full; later reads see that slot."""

    pipe: Pipe


@dataclass(frozen=True)
class Release:
    """A compute role gives its current slot of ``pipe`` back."""

    pipe: Pipe


@dataclass(frozen=True)
class Matmul:
    """``out (+)= a @ b`` (or ``a @ b.T``) on the tensor cores, fp32 accumulation.

    ``token`` makes it asynchronous (wgmma): its result exists after ``Await(token)``, and results arrive in
    the order of issue. ``split`` says how the role's warps share the tile, which decides what each reads from
    SMEM: ``rows`` (each warp its rows of ``a``, all of ``b``) or ``cols``/``inner`` (FlashAttention-1's slices).
    ``instructions`` are lane-operations by unit that the compiled loop executes around the tensor instructions
    (fragment loads, addresses, predicates), interleaved with them.
    """

    out: Buffer | View
    a: Buffer | Pipe | View
    b: Buffer | Pipe | View
    transpose_b: bool = False
    transpose_a: bool = False
    accumulate: bool = False
    token: str | None = None
    split: str = "rows"
    scale: float = 1.0
    instructions: tuple[tuple[str, float], ...] = ()

    @property
    def mnk(self) -> tuple[int, int, int]:
        """GEMM dimensions M, N, K."""
        a, b = view(self.a).shape, view(self.b).shape
        m, k = (a[1], a[0]) if self.transpose_a else a
        n = b[0] if self.transpose_b else b[1]
        return m, n, k


@dataclass(frozen=True)
class Await:
    """Wait for the asynchronous operation ``token`` of this role (and all it issued before)."""

    token: str


@dataclass(frozen=True)
class Compute:
    """An elementwise or row-wise operation ``fn`` (see :mod:`simulator.tile_ops`) on registers.

    ``rows`` x ``cols`` is the shape that its work is counted on; ``params`` are numbers or indices.
    """

    fn: str
    out: Buffer | View
    args: tuple[Buffer | Pipe | View, ...]
    rows: int
    cols: int
    params: tuple[tuple[str, Index | float], ...] = ()


@dataclass(frozen=True)
class Instructions:
    """Lane-operations by unit that a compiled kernel executes beyond its tile operations (no numerical effect)."""

    name: str
    work: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Exchange:
    """Warps of a role exchange ``bytes_written``/``bytes_read`` through SMEM (no numerical effect)."""

    name: str
    bytes_written: int
    bytes_read: int


@dataclass(frozen=True)
class Fetch:
    """A wait for instructions that no cache near the schedulers holds (no numerical effect).

    ``code_bytes`` of a kernel that a CTA runs once: what the instruction cache cannot hold of them has been displaced;
    ``times``: the part that is waited for is one of so many. ``again``: a key block's code of this size, that warps
    which are not quite in step fetch again where the level nearest to the schedulers cannot hold all of it.
    """

    code_bytes: int
    times: float = 1.0
    again: bool = False


@dataclass(frozen=True)
class Barrier:
    """All ``parties`` roles meet (``__syncthreads`` or a named barrier)."""

    name: str
    parties: int = 1


@dataclass(frozen=True)
class Wait:
    """Take one unit of the semaphore ``name``, waiting for it."""

    name: str


@dataclass(frozen=True)
class Signal:
    """Give one unit to the semaphore ``name``."""

    name: str


@dataclass(frozen=True)
class Loop:
    """Repeat ``body`` ``count`` times with the loop variable ``var`` = 0, 1, ..."""

    var: str
    count: Index
    body: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", as_index(self.count))
        object.__setattr__(self, "body", tuple(self.body))


Op = (
    Load
    | Store
    | Acquire
    | Consume
    | Release
    | Matmul
    | Await
    | Compute
    | Instructions
    | Exchange
    | Fetch
    | Barrier
    | Wait
    | Signal
    | Loop
)


@dataclass(frozen=True)
class Role:
    """One instruction stream of a CTA: a loader, or ``warps`` warps that compute in step.

    ``issue_interval_cycles`` is what one warp alone takes from an instruction to the next, loads aside, where it was
    counted (0: as the GPU's parameters say). ``paced``: its instructions advance as one stream that cannot catch up
    what it lost to others, and the interval is that beside exponentials (:mod:`simulator.warp_streams`).
    """

    name: str
    ops: Sequence[Any]
    warps: int = 4
    issue_interval_cycles: float = 0.0
    paced: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))


@dataclass(frozen=True)
class Trip:
    """A coordinate that counts loop iterations. ``outer`` names the trip inside which it is repeated, if any;
    ``outer_step`` changes the count by that much per outer iteration (causal FlashAttention-1). A ``condition`` is 0 or
    1: it says whether parts of the program run at all, and may stand at several places of it."""

    coord: str
    outer: str | None = None
    outer_step: int = 0
    condition: bool = False


@dataclass(frozen=True)
class Kernel:
    """A grid of CTAs that run ``roles``.

    ``coords`` maps each coordinate to an integer array over the CTAs in launch order. ``trips`` lists the
    coordinates that count iterations. ``schedule`` is ``grid`` (hardware order), ``static`` (persistent, CTA i
    on slot i modulo slots) or ``dynamic`` (persistent, next tile to the first free slot).
    ``path`` is the tensor instruction path, ``compute_dtype`` the type its operands have. ``in_step_iterations`` is
    the loop length over which half the reads that neighbouring CTAs have in common are in step (0: none ever are).
    ``ctas_each`` > 1: each CTA of the list stands for that many of the hardware, which share its operations and follow
    each other on a slot. ``launch_gap_cycles`` passes from a CTA's end to the next one's start on its slot, where it
    was seen (``None``: as the GPU's parameters say). ``short_code``: a few hundred instructions, which do not keep the
    first warps waiting. ``early_start``: launched ahead of the end of the kernel before it (programmatic dependent
    launch), so no gap lies between them. ``times`` > 1: the CTAs that ``repeated`` marks stand for that many each,
    which follow each other on its slot and differ from it as little on one side as on the other (long launches).
    """

    name: str
    roles: tuple[Role, ...]
    coords: Mapping[str, np.ndarray]
    trips: tuple[Trip, ...]
    threads: int
    smem_bytes: int = 0
    registers_per_thread: int = 128
    ctas_per_sm: int | None = None
    schedule: str = "grid"
    path: str = "mma_sync"
    compute_dtype: str = "bf16"
    semaphores: tuple[tuple[str, int], ...] = ()
    coord_order: str = ""
    in_step_iterations: float = 0.0
    ctas_each: int = 1
    launch_gap_cycles: float | None = None
    short_code: bool = False
    early_start: bool = False
    times: int = 1
    repeated: np.ndarray | None = None

    @property
    def launched(self) -> int:
        """Number of CTAs that the list stands for, those that it merges (``ctas_each``) counted once."""
        return self.ctas if self.repeated is None else self.ctas + (self.times - 1) * int(self.repeated.sum())

    def multiplicity(self) -> np.ndarray | int:
        """How many CTAs each of the list stands for: 1, or an int64 array over the list."""
        return 1 if self.repeated is None else np.where(self.repeated, self.times, 1)

    @property
    def ctas(self) -> int:
        """Number of CTAs (work tiles, for a persistent kernel)."""
        return len(next(iter(self.coords.values())))

    def walk(self) -> Iterator[tuple[Role, tuple[Loop, ...], Op]]:
        """Every operation with its role and the loops around it, outermost first."""
        for role in self.roles:
            yield from ((role, loops, op) for loops, op in walk_ops(role.ops))


def once_a_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(kernel, *arguments)`` whose answers are kept with the kernel, which never changes: by its (hashable)
    arguments. Nothing may change an answer."""

    @wraps(function)
    def kept(kernel: Kernel, *arguments: Any) -> Any:
        answers = vars(kernel).setdefault("_answers", {})
        key = (function.__module__, function.__name__, *arguments)
        if key not in answers:
            answers[key] = function(kernel, *arguments)
        return answers[key]

    return kept


def walk_ops(ops: Iterable[Op], loops: tuple[Loop, ...] = ()) -> Iterator[tuple[tuple[Loop, ...], Op]]:
    """Every operation below ``ops`` with the loops around it."""
    for op in ops:
        if isinstance(op, Loop):
            yield from walk_ops(op.body, (*loops, op))
        else:
            yield loops, op


def map_ops(ops: Iterable[Op], change: Callable[[Any], Any]) -> tuple[Op, ...]:
    """``ops`` with ``change(op)`` in place of each operation; ``None`` drops it (used by mutation tests)."""
    out = []
    for op in ops:
        new = change(op)
        if isinstance(new, Loop):
            new = replace(new, body=map_ops(new.body, change))
        if new is not None:
            out.append(new)
    return tuple(out)


@dataclass(frozen=True)
class Program:
    """All kernels of one attention call, in order, and what they leave in memory.

    ``inputs``/``outputs`` map the roles ``Q K V O LSE dO dQ ...`` to the tensors that hold them.
    ``live_bytes`` is the peak of device memory that the call holds, inputs and outputs included. ``warnings`` say
    where the program is not quite what was asked.
    """

    algorithm: str
    implementation: str
    problem: AttentionProblem
    kernels: tuple[Kernel, ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    live_bytes: int
    notes: tuple[str, ...] = ()
    substitutions: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that some kernel loads or stores, by name."""
        found: dict[str, Tensor] = {}
        for kernel in self.kernels:
            for _, _, op in kernel.walk():
                place = op.source if isinstance(op, Load) else op.into if isinstance(op, Store) else None
                if place is not None:
                    found[place.tensor.name] = place.tensor
        return found
