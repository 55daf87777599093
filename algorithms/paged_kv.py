"""Paged KV caches: K and V rows lie in pages of ``page_size`` rows that an int32 table maps.

Two ways to read them. *Whole tiles*: a tile lies inside one page, so the loader reads one table entry and then copies
the tile as if it were dense (TMA, or FA2's pointer arithmetic). *Gather*: each row's address is computed from its
page's entry and the row is copied in 16-byte pieces by cp.async of the loader's warps.

The numbers reading sees logical rows: the table changes where bytes lie, not which are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from algorithms.common import ceil_div
from simulator.problem import DTYPE_BYTES, AttentionProblem
from simulator.program import Acquire, Await, Buffer, Compute, Index, Load, Loop, Op, Role, Tensor, tile, var
from simulator.tile_ops import TILE_OPS, TileOp

#: Entries of one cache line of the table.
_ENTRIES_PER_LINE = 32
_COPY_BYTES = 16

# Address work of a gather, by 16-byte copy: a 64-bit add and the copy's own issue. By row: the threads of a row (8)
# fetch its 64-bit pointer from the one that computed it and test the row against the length.
TILE_OPS["gather_address"] = TileOp(lambda a, p: a[0], {"alu": 3.0}, {"alu": 8 * 4.0})


@dataclass(frozen=True)
class PagedCache:
    """The page table of one problem and how a kernel reads through it."""

    table: Tensor
    page_size: int
    tile_n: int
    gather: bool

    @classmethod
    def of(cls, problem: AttentionProblem, tile_n: int, gather: bool) -> PagedCache:
        """The table of ``problem`` (one row of entries a sequence) read by a kernel of ``tile_n`` keys a block."""
        assert problem.page_size is not None
        pages = ceil_div(problem.seqlen_k, problem.page_size)
        table = Tensor("page_table", problem.batch, pages, 1, "int32", "input", _ENTRIES_PER_LINE)
        return cls(table, problem.page_size, tile_n, gather)

    def tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` with K and V marked as paged."""
        return {n: replace(t, page_rows=self.page_size) if n in ("K", "V") else t for n, t in tensors.items()}

    def coordinates(self, loops: dict[str, np.ndarray], batch: np.ndarray) -> dict[str, np.ndarray]:
        """CTA coordinates of the table reads: the sequence, and the page of each loop's first row."""
        rows = ("masked_row", "full_row", "left_row", "last_row")
        return {"batch": batch, **{f"{n}_page": np.maximum(loops[n], 0) // self.page_size for n in rows if n in loops}}

    def _entry(self, row: Index) -> Index:
        # affine in pages; exact where one of page_size and tile_n divides the other, else within a page or two
        pages = Index(int(row.const / self.page_size))
        for name, coefficient in row.terms:
            step = int(coefficient / self.page_size) if name == "j" else coefficient
            pages = pages + var(name if name == "j" else f"{name}_page") * step
        return pages

    def _load_entries(self, row: Index, entries: Buffer) -> Load:
        source = tile(self.table, var("batch"), self._entry(row), entries.rows)
        return Load(source, entries, token="pages", via="ld")

    def _addresses(self, load: Load, entries: Buffer) -> list[Op]:
        if not self.gather:
            return []
        pieces = load.source.cols * DTYPE_BYTES[load.source.tensor.dtype] // _COPY_BYTES
        return [Compute("gather_address", entries, (entries,), self.tile_n, pieces)]

    def _read_through(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """K's table entries are requested before its slot is awaited and used after; V reuses them."""
        entries = Buffer("pages", max(1, ceil_div(self.tile_n, self.page_size)), dtype="int32")
        out: list[Op] = []
        for i, op in enumerate(ops):
            if isinstance(op, Loop):
                out.append(replace(op, body=self._read_through(op.body)))
            elif isinstance(op, Acquire) and op.pipe.name == "k":
                copy = ops[i + 1]
                assert isinstance(copy, Load), "a slot is acquired for the copy that follows"
                out += [self._load_entries(copy.source.row, entries), op, Await("pages")]
            elif isinstance(op, Load) and op.source.tensor.name in ("K", "V"):
                out += [*self._addresses(op, entries), replace(op, via="cp_async") if self.gather else op]
            else:
                out.append(op)
        return tuple(out)

    def roles(self, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        """``roles`` with the loader reading K and V through the table."""
        loader, *compute = roles
        warps = 4 if self.gather else loader.warps
        return (replace(loader, ops=self._read_through(loader.ops), warps=warps), *compute)


def paged_capacity(problem: AttentionProblem, capacity: int) -> int:
    """``capacity`` in whole pages, as the library sees a paged cache (unchanged without pages)."""
    if problem.page_size is None:
        return capacity
    return ceil_div(capacity, problem.page_size) * problem.page_size
