"""The L2 as a cache over tiles: state that lives across the kernels of one attention call.

A tensor is tracked in blocks. Narrow tensors (Q, K, V, O ...) have blocks of some rows and their full width; wide
ones (S, P: one row is long) have blocks of few rows, whose 64 parts are column ranges.

GPUs since the A100 have their L2 in partitions. Each is the home of a part of memory, lines from all over a block, and
keeps copies of what its SMs read of the others' parts; without its home's line a copy is void. So on an H200, which has
two, half the capacity fits of what all SMs read and two thirds of what one SM each reads (``micro_l2_partitions.csv``),
and a read that finds a copy is not seen by the line's home, which may so forget a line in use. A write goes to the home
and, if there is one, to the copy of the writer's partition; others' copies are void. Partitions do the same to each
other's parts of a block, so one of them stands for all: what it lacks, the others lack of theirs.

Replacement is least recently used, in sets: lines are hashed to sets of ``ways`` lines, so of a block whose reuse
distance is x times the capacity the share P(Poisson(ways * x) < ways) is still there (Hill and Smith, "Evaluating
associativity in CPU caches", 1989). Misses set in gradually where a fully associative cache would have a cliff.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp

import numpy as np

from simulator.l2_blocks import (
    BANDS,
    DIRTY,
    FIRST,
    HITS,
    HOME,
    LAST_INSIDE,
    LIMITS,
    PARTITIONS,
    QUANTUM,
    READ,
    READ_BY,
    STATE_SIZE,
    access_tile,
)
from simulator.problem import DTYPE_BYTES
from simulator.program import Tensor

#: Lines in a set of the L2, assumed for every GPU.
WAYS = 16
#: Tensors with rows longer than this many elements are tracked by columns.
WIDE_COLS = 512
#: Rows of a wide tensor's blocks, unless a kernel's CTAs take fewer rows each.
WIDE_BLOCK_ROWS = 32
#: Part of the capacity that may be touched before the bands' ends are moved again; at every touch in small caches.
GROWTH_PART, SMALL_BYTES = 256, 8 << 20
#: Entries of the list of blocks in order of use: for each block, and at least.
ORDER_FACTOR, ORDER_LEAST = 2, 1024


def hit_shares(ways: int | None) -> list[float]:
    """Share of a block still cached, by band of its reuse distance (bands as in :mod:`simulator.l2_blocks`)."""
    if ways is None:
        return [1.0] * (LAST_INSIDE + 1) + [0.0] * (BANDS - LAST_INSIDE - 1)
    shares = [1.0]
    for band in range(1, BANDS):
        mean = ways * (0.35 + 0.1 * band)
        term, total = exp(-mean), 0.0
        for lines in range(ways):
            total += term
            term *= mean / (lines + 1)
        shares.append(total)
    return shares


@dataclass
class L2:
    """The cache and its counters; arrays are what :mod:`simulator.l2_blocks` works on."""

    names: list[str]
    shape: np.ndarray
    cache: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    counters: np.ndarray
    capacity: int

    @classmethod
    def of(
        cls,
        tensors: dict[str, Tensor],
        capacity_bytes: int,
        coarsen: dict[str, int] | None = None,
        wide_rows: int = 16,
        ways: int | None = None,
        partitions: int = 1,
    ) -> L2:
        """An empty cache for ``tensors``. ``coarsen`` multiplies the rows of a narrow tensor's blocks, by name;
        ``wide_rows`` are the rows of a wide tensor's block; ``ways`` ``None`` makes it fully associative;
        ``partitions`` share ``capacity_bytes`` evenly."""
        rows, base = [], 0
        for tensor in tensors.values():
            if tensor.cols > WIDE_COLS:
                br, bc = min(wide_rows, tensor.rows), tensor.cols
            else:
                factor = (coarsen or {}).get(tensor.name, 1)
                br, bc = min(tensor.rows, max(1, tensor.block_rows) * factor), tensor.tracked_cols
            per_row, per_col = -(-tensor.cols // bc), -(-tensor.rows // br)
            size = DTYPE_BYTES[tensor.dtype]
            rows.append((tensor.heads, tensor.rows, tensor.cols, br, bc, per_row, per_col * per_row, base, size))
            base += tensor.heads * per_col * per_row
        n = base + 1
        # a row is a cache line of the machine that simulates
        blocks = np.zeros((n, -(-(READ_BY + partitions - 1) // 8) * 8), np.int64)
        state = np.zeros(STATE_SIZE, np.int64)
        # how much bands may grow before their ends move: half of it beyond their limits, half of it below
        part = int(capacity_bytes) // partitions
        growth = int(capacity_bytes) // GROWTH_PART if capacity_bytes > SMALL_BYTES else 0
        limits = [part * (4 + band) // 10 - growth // 2 for band in range(BANDS)]
        state[LIMITS : LIMITS + BANDS], state[QUANTUM], state[PARTITIONS] = limits, growth, partitions
        state[HITS : HITS + BANDS] = [round(1e6 * share) for share in hit_shares(ways)]
        # the list of blocks in order of use, with room for as many uses again before it is closed up
        order = np.zeros(ORDER_FACTOR * n + ORDER_LEAST, np.int64)
        counts = np.diff([row[7] for row in rows] + [n])
        owners = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        cache = (blocks, state, order, owners, np.zeros(len(order), np.int32))
        counters = np.zeros((4, len(tensors)), np.int64)
        shape = np.array(rows, np.int64).reshape(-1, 9)
        return cls(list(tensors), shape, cache, counters, int(capacity_bytes))

    def snapshot(self) -> np.ndarray:
        """``[4, tensors]``: SM reads, SM writes, HBM reads, HBM writes so far."""
        return self.counters.copy()

    @property
    def shared_capacity(self) -> int:
        """Bytes that fit of what SMs of every partition read."""
        return self.capacity // int(self.cache[1][PARTITIONS])

    @property
    def dirty_bytes(self) -> int:
        """Bytes modified in the cache and not yet written to HBM."""
        return int(self.cache[0][:, DIRTY].sum())

    def bands(self) -> np.ndarray:
        """Band of reuse distance of every block (of those that hold bytes)."""
        blocks, state, *_ = self.cache
        ends = state[FIRST : FIRST + BANDS]
        band: np.ndarray = (blocks[:, HOME, None] - 1 < ends).sum(axis=1)
        return band

    def warm_up(self, names: Iterable[str]) -> None:
        """Read the named tensors once from end to end, as a previous run would have left them; counters stay zero."""
        for name in names:
            t = self.names.index(name)
            heads, rows, cols = (int(x) for x in self.shape[t, :3])
            for head in range(heads):
                for partition in range(int(self.cache[1][PARTITIONS])):
                    access_tile(t, head, 0, rows, 0, cols, READ, partition, self.shape, self.cache, self.counters)
        self.counters[...] = 0

    def clone(self) -> tuple[np.ndarray, ...]:
        """A copy of the cache and counters, for :meth:`restore`."""
        return tuple(a.copy() for a in (*self.cache, self.counters))

    def restore(self, saved: tuple[np.ndarray, ...]) -> None:
        """Go back to a state that :meth:`clone` returned."""
        for own, other in zip((*self.cache, self.counters), saved, strict=True):
            own[...] = other
