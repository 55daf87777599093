"""The L2 as a cache over tiles: state that lives across the kernels of one attention call.

A tensor is tracked in blocks. Narrow tensors (Q, K, V, O ...) have blocks of some rows and their full width; wide
ones (S, P: one row is long) have blocks of few rows, whose 64 parts are column ranges. Replacement is least
recently used over blocks; capacity is counted in bytes actually held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.problem import DTYPE_BYTES
from simulator.program import Tensor

#: Tensors with rows longer than this many elements are tracked by columns.
WIDE_COLS = 512


@dataclass
class L2:
    """The cache and its counters; arrays are what :mod:`simulator.replay` works on."""

    names: list[str]
    shape: np.ndarray
    cache: tuple
    counters: np.ndarray
    capacity: int

    @classmethod
    def of(cls, tensors: dict[str, Tensor], capacity_bytes: int, coarsen: dict[str, int] | None = None, wide_rows: int = 16) -> L2:
        """An empty cache for ``tensors``. ``coarsen`` multiplies the rows of a narrow tensor's blocks, by name; ``wide_rows``
        are the rows of a wide tensor's block."""
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
        blocks = np.zeros((n, 6), np.int64)
        blocks[:, :2] = -1
        cache = (blocks, np.array([0, -1, -1, 0], np.int64))
        counters = np.zeros((4, len(tensors)), np.int64)
        shape = np.array(rows, np.int64).reshape(-1, 9)
        return cls(list(tensors), shape, cache, counters, int(capacity_bytes))

    def snapshot(self) -> np.ndarray:
        """``[4, tensors]``: SM reads, SM writes, HBM reads, HBM writes so far."""
        return self.counters.copy()

    @property
    def dirty_bytes(self) -> int:
        """Bytes modified in the cache and not yet written to HBM."""
        return int(self.cache[0][:, 4].sum())

    def warm_up(self, names) -> None:
        """Read the named tensors once from end to end, as a previous run would have left them; counters stay zero."""
        from simulator.replay import READ, access_tile

        for name in names:
            t = self.names.index(name)
            heads, rows, cols = (int(x) for x in self.shape[t, :3])
            for head in range(heads):
                access_tile(t, head, 0, rows, 0, cols, READ, self.shape, self.capacity, self.cache, self.counters)
        self.counters[...] = 0

    def clone(self) -> tuple:
        """A copy of the cache and counters, for :meth:`restore`."""
        return tuple(a.copy() for a in (*self.cache, self.counters))

    def restore(self, saved: tuple) -> None:
        """Go back to a state that :meth:`clone` returned."""
        for own, other in zip((*self.cache, self.counters), saved, strict=True):
            own[...] = other
