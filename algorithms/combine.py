"""What split-KV attention adds to an ordinary forward kernel: fp32 partial results, and the kernel that combines them.

A split writes its own normalised O and its LSE (:class:`Partials`); the combine kernel weighs them with
``exp(LSE_s - LSE)``, where ``LSE = logsumexp_s LSE_s`` (Flash-Decoding, step 3), and writes the final O and LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from algorithms.common import ceil_div, fill
from algorithms.kernel_tables import CombineKernel
from simulator.program import (
    Acquire,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Index,
    Instructions,
    Kernel,
    Load,
    Loop,
    Op,
    Pipe,
    Release,
    Role,
    Store,
    Tensor,
    Tile,
    Trip,
    View,
    tile,
    var,
)
from simulator.tile_ops import TILE_OPS, TileOp, work_of

# O += w[:, split] * O_split: one FMA an element; the column of the weights is picked by the loop variable
TILE_OPS["weighted_add"] = TileOp(lambda a, p: a[0] + a[1] * a[2][:, [p["col"]]], {"fma": 1.0})


@dataclass(frozen=True)
class Partials:
    """The fp32 partial results of the splits: ``stacks`` x ``matrices`` matrices of ``rows`` x ``head_dim`` each.

    The rows of the matrices of one stack lie one after another, as the combine kernel walks them: it cuts a stack
    into runs of rows without regard to where a matrix ends. LSE columns count down from the last split, so that a
    sequence with ``n`` splits occupies the last ``n`` columns and a combine CTA loads exactly those.
    """

    stacks: int
    matrices: int
    rows: int
    splits: int
    head_dim: int
    o: Tensor
    lse: Tensor

    @classmethod
    def of(
        cls,
        stacks: int,
        matrices: int,
        rows: int,
        splits: int,
        head_dim: int,
        allocated_cols: int,
        tile_m: int,
        lengths: tuple[int, ...] = (),
    ) -> Partials:
        """Partials of ``stacks`` x ``matrices`` matrices; with several row blocks, or where sequences have ``lengths``
        rows of their own (at the matrices' end), a matrix is a stack of its own."""
        if rows > tile_m or lengths:
            stacks, matrices = stacks * matrices, 1
        block = rows if rows <= tile_m else tile_m
        shape = (matrices * rows, allocated_cols, "fp32", "scratch", block)
        o = Tensor("O_partial", stacks * splits, *shape, lengths=lengths)
        lse = Tensor("LSE_partial", stacks, matrices * rows, splits, "fp32", "scratch", block, 1, lengths=lengths)
        return cls(stacks, matrices, rows, splits, head_dim, o, lse)

    def coordinates(
        self,
        matrix: np.ndarray,
        split: np.ndarray,
        writes_o: bool | np.ndarray = True,
        writes_lse: bool | np.ndarray = True,
    ) -> dict[str, np.ndarray]:
        """CTA coordinates of what split ``split`` of matrix ``matrix`` stores (where the masks say that it stores)."""
        stack, inside = matrix // self.matrices, matrix % self.matrices
        return {
            "po_head": np.where(writes_o, stack * self.splits + split, -1),
            "pl_head": np.where(writes_lse, stack, -1),
            "p_row": inside * self.rows,
            "pl_col": self.splits - 1 - split,
        }

    def _rows_here(self, row: Index, rows: int) -> int:
        # a matrix that fits one tile ends inside it: the rows behind its end belong to the next matrix
        return rows if self.matrices == 1 else max(0, min(rows, self.rows - row.const))

    def o_tile(self, row: Index, rows: int) -> Tile:
        """Where rows ``row ..`` of a main-kernel CTA's O go."""
        return tile(self.o, var("po_head"), row + var("p_row"), self._rows_here(row, rows), 0, self.head_dim)

    def lse_tile(self, row: Index, rows: int) -> Tile:
        """Where the LSE of rows ``row ..`` goes."""
        return tile(self.lse, var("pl_head"), row + var("p_row"), self._rows_here(row, rows), var("pl_col"), 1)


def _combine_coordinates(
    partials: Partials,
    t: CombineKernel,
    splits_of_stack: np.ndarray,
    splits_to_read: Callable[[int, int], int],
    column_slices: int,
) -> tuple[dict[str, np.ndarray], int]:
    """CTA coordinates, row blocks fastest, then column slices, then stacks; and the matrices that a CTA can touch."""
    p = partials
    blocks = ceil_div(p.matrices * p.rows, t.rows_per_cta)
    working = np.flatnonzero(splits_of_stack > 1)
    stack = np.repeat(working, column_slices * blocks)
    block = np.tile(np.arange(blocks), len(working) * column_slices)
    column = np.tile(np.repeat(np.arange(column_slices), blocks), len(working))
    row = block * t.rows_per_cta
    if p.o.lengths:
        # CTAs behind the end of their sequence return at once
        row = row + p.rows - np.repeat(p.o.lengths, p.stacks // len(p.o.lengths))[stack]
        stack, block, column, row = (x[row < p.rows] for x in (stack, block, column, row))
    first = row // p.rows
    last = np.minimum(row + t.rows_per_cta - 1, p.matrices * p.rows - 1) // p.rows
    touched = int((last - first).max()) + 1
    splits = splits_of_stack[stack]
    coords = {
        "stack": stack,
        "o_partial_head": stack * p.splits,
        "partial_row": row,
        "column": column * t.columns_per_cta,
        "n_splits": np.array([splits_to_read(int(s), int(r)) for s, r in zip(stack, row, strict=True)], np.int64),
        "lse_column": p.splits - splits,
        "last_split": splits - 1,
        "lse_count": splits,
        "o_row": row - first * p.rows,
    }
    for i in range(touched):
        inside = first + i < p.matrices
        coords[f"o_head{i}"] = np.where(inside, stack * p.matrices + first + i, -1)
        coords[f"lse_head{i}"] = np.where(column == 0, coords[f"o_head{i}"], -1)
    return coords, touched


def combine_kernel(
    name: str,
    t: CombineKernel,
    partials: Partials,
    o: Tensor,
    lse: Tensor,
    splits_of_stack: np.ndarray,
    splits_to_read: Callable[[int, int], int] | None = None,
) -> Kernel:
    """The combine kernel: ``rows_per_cta`` rows and ``columns_per_cta`` columns of the output a CTA.

    ``splits_of_stack`` [stacks]: splits of each stack's sequence; CTAs of unsplit ones leave at once and are left
    out. ``splits_to_read(stack, row)``: leading splits whose O is read there (default all); the rest hold no key.
    """
    p, rows, table = partials, t.rows_per_cta, t.lse_rows_padded
    cols = min(t.columns_per_cta, p.head_dim)
    slices = ceil_div(p.head_dim, t.columns_per_cta)
    if splits_to_read is None:

        def splits_to_read(stack: int, _row: int) -> int:
            return int(splits_of_stack[stack])

    coords, touched = _combine_coordinates(p, t, splits_of_stack, splits_to_read, slices)

    weights = Buffer("w", rows, p.splits)
    m, total, final = Buffer("m", rows), Buffer("l", rows), Buffer("lse", rows)
    acc, out = Buffer("O", rows, cols), Buffer("O_out", rows, cols, o.dtype)
    lse_source = tile(p.lse, var("stack"), var("partial_row"), rows, var("lse_column"), p.splits)
    s = var("s")
    o_source = tile(p.o, var("o_partial_head") + s, var("partial_row"), rows, var("column"), cols)
    unequal = len(np.unique(splits_of_stack)) > 1
    beyond = (("row", 0), ("col", 0), ("seqlen_k", var("lse_count")), ("shift", 0), ("left", -1), ("right", -1))

    def reduce(lses: Buffer | Pipe) -> list[Op]:
        """LSE over the splits, and each split's weight exp(LSE_s - LSE)."""
        return [
            Exchange("lse", rows * table * 4, rows * table * 4),
            Compute("copy", weights, (lses,), rows, table),
            *([Compute("mask", weights, (weights,), rows, p.splits, beyond)] if unequal else []),
            fill(m, float("-inf")),
            Compute("row_max", m, (weights, m), rows, table),
            Compute("exp", weights, (weights, m), rows, table, (("scale", 1.0),)),
            Compute("row_sum", total, (weights,), rows, table),
            Compute("lse", final, (m, total), rows, 1, (("scale", 1.0),)),
            Compute("normalise", weights, (weights, total), rows, table),
            Exchange("w", rows * table * 4, rows * 4),
            Barrier("weights"),
            fill(acc, 0.0),
        ]

    def add(part: Buffer | Pipe) -> Compute:
        return Compute("weighted_add", acc, (acc, part, weights), rows, cols, (("col", var("last_split") - s),))

    def stores() -> list[Op]:
        row = var("o_row")
        return [
            Compute("convert", out, (acc,), rows, cols),
            *(
                Store(View(out), tile(o, var(f"o_head{i}"), row - i * p.rows, rows, var("column"), cols))
                for i in range(touched)
            ),
            *(Store(View(final), tile(lse, var(f"lse_head{i}"), row - i * p.rows, rows)) for i in range(touched)),
        ]

    warps = t.threads // 32
    # addresses of every row by division, bounds, and what the reduction takes beyond its arithmetic: half of it is
    # issued while the partial results are under way
    beyond = max(0.0, t.instructions * t.threads - _lanes([*reduce(weights), *stores()]))
    half = [Instructions("around", (("issue", beyond / 2),))] if beyond else []
    if t.splits_in_flight == 1:
        part, lses = Buffer("O_part", rows, cols), Buffer("lse_smem", rows, p.splits, space="smem")
        each = max(0.0, t.instructions_per_split * t.threads - _lanes([add(part)]))
        body: list[Op] = [Load(o_source, part, via="ld"), Instructions("split", (("issue", each),)), add(part)]
        load_lse = [Load(lse_source, lses, via="ld"), Barrier("lse")]
        loop = Loop("s", var("n_splits"), body)
        roles: tuple[Role, ...] = (Role("warps", [*load_lse, *reduce(lses), loop, *half, *stores()], warps),)
        roles += (Role("addresses", half, warps),) if half else ()
    else:
        lse_pipe = Pipe("lse", rows, p.splits, "fp32")
        o_pipe = Pipe("o_partial", rows, cols, "fp32", t.splits_in_flight)
        loader = Role(
            "loader",
            [
                Acquire(lse_pipe),
                Load(lse_source, lse_pipe),
                Loop("s", var("n_splits"), [Acquire(o_pipe), Load(o_source, o_pipe)]),
            ],
            warps=0,
        )
        body = [Consume(o_pipe), add(o_pipe), Release(o_pipe)]
        loop = Loop("s", var("n_splits"), body)
        roles = (loader, Role("warps", [Consume(lse_pipe), *reduce(lse_pipe), loop, *stores()], warps))
    return Kernel(
        name,
        roles,
        coords,
        (Trip("n_splits"),),
        threads=t.threads,
        smem_bytes=t.smem_bytes,
        registers_per_thread=64,
        compute_dtype=o.dtype,
    )


def _lanes(ops: list[Op]) -> float:
    """Lane-operations of the :class:`Compute` operations among ``ops``."""
    return sum(sum(work_of(op.fn, op.rows, op.cols).values()) for op in ops if isinstance(op, Compute))


def helper_kernel(
    name: str, reads: Tensor | None, writes: Tensor | None, ctas: int, threads: int, dtype: str
) -> Kernel:
    """A tiny kernel of integers: fill a counter, or turn sequence lengths into scheduler metadata.

    Each CTA reads its share of ``reads`` and writes its share of ``writes`` (either may be missing); no numbers
    that attention uses come from it, so its value is a copy.
    """
    ops: list[Op] = []
    share_in = ceil_div(reads.rows, ctas) if reads is not None else 0
    share_out = ceil_div(writes.rows, ctas) if writes is not None else 0
    values = Buffer("values", max(share_in, 1), dtype="int32")
    result = Buffer("result", max(share_out, 1), dtype="int32")
    if reads is not None:
        ops.append(Load(tile(reads, 0, var("cta") * share_in, share_in), values, via="ld"))
        # one reduction over the CTA: total blocks, then each sequence's share
        ops.append(Exchange("total", 4 * share_in, 4 * share_in))
        ops.append(Barrier("total"))
    if writes is not None:
        ops.append(fill(result, 0.0))
        ops.append(Store(View(result), tile(writes, 0, var("cta") * share_out, share_out)))
    return Kernel(
        name,
        (Role("warps", ops, max(1, threads // 32)),),
        {"cta": np.arange(ctas, dtype=np.int64)},
        (),
        threads=threads,
        registers_per_thread=32,
        compute_dtype=dtype,
        short_code=reads is None,
    )


def counter_fill(name: str) -> Kernel:
    """A fill (or memset) of one integer: the counter from which a dynamic scheduler's CTAs take their tiles."""
    return helper_kernel(name, None, Tensor("scheduler_metadata", 1, 1, 1, "int32", "scratch", 1), 1, 128, "bf16")
