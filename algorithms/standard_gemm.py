"""Batched matrix products as cuBLAS runs them: a grid of C tiles, a ring of k-slices, an epilogue through SMEM."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from algorithms.common import ceil_div, fill, grid_indices
from algorithms.in_step import CUBLAS_SCORES
from algorithms.kernel_tables import GemmKernel
from simulator.program import (
    Acquire,
    Await,
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
    Matmul,
    Op,
    Pipe,
    Release,
    Role,
    Store,
    Tensor,
    Trip,
    View,
    tile,
    var,
)

#: C tiles beyond which a CTA takes a whole column of them in turn, so that the grid stays a list one can hold.
MOST_TILES = 262_144


@dataclass(frozen=True)
class Product:
    """``C = scale * A @ B`` for every head. A transposed operand is stored with its k dimension along the rows
    (A) or along the columns (B). B may have fewer heads than C: a group of C's then shares one."""

    a: Tensor
    b: Tensor
    c: Tensor
    inner: int
    transpose_a: bool = False
    transpose_b: bool = False
    scale: float = 1.0


def _loader(p: Product, g: GemmKernel, a_pipe: Pipe, b_pipe: Pipe, row: Index, col: Index) -> tuple[Op, ...]:
    head, k = var("q_head"), (var("k0") + var("k")) * g.tile_k if g.splits > 1 else var("k") * g.tile_k
    b_head = head if p.b.heads == p.c.heads or g.splits > 1 else var("kv_head")
    via = "cp_async" if g.consumer_warpgroups == 0 else "tma"
    a_tile = (
        tile(p.a, head, k, g.tile_k, row, g.tile_rows)
        if p.transpose_a
        else tile(p.a, head, row, g.tile_rows, k, g.tile_k)
    )
    b_tile = (
        tile(p.b, b_head, col, g.tile_columns, k, g.tile_k)
        if p.transpose_b
        else tile(p.b, b_head, k, g.tile_k, col, g.tile_columns)
    )
    return (
        Loop(
            "k",
            var("n_k"),
            [
                Acquire(a_pipe),
                Load(a_tile, a_pipe, via=via, multicast=g.cluster_columns),
                Acquire(b_pipe),
                Load(b_tile, b_pipe, via=via, multicast=g.cluster_rows),
            ],
        ),
    )


def _consumer(
    p: Product, g: GemmKernel, index: int, sets: int, by_rows: bool, a_pipe: Pipe, b_pipe: Pipe, row: Index, col: Index
) -> tuple[Op, ...]:
    """One warpgroup (or four warps): its rows, or columns, of the C tile."""
    rows = g.tile_rows // sets if by_rows else g.tile_rows
    cols = g.tile_columns if by_rows else g.tile_columns // sets
    row_off, col_off = (index * rows, 0) if by_rows else (0, index * cols)
    acc, out = Buffer("C", rows, cols), Buffer("C_out", rows, cols, p.c.dtype)
    a = View(a_pipe, 0, None, row_off, rows) if p.transpose_a else View(a_pipe, row_off, rows)
    b = View(b_pipe, col_off, cols) if p.transpose_b else View(b_pipe, 0, None, col_off, cols)
    asynchronous = g.consumer_warpgroups > 0
    # four warps as a 2x2 or 1x4 grid of warp tiles: they share the operand along the longer side
    split = "rows" if rows >= 2 * cols else "cols"
    product = Matmul(
        acc, a, b, p.transpose_b, p.transpose_a, accumulate=True, token="C" if asynchronous else None, split=split
    )
    scale = [Compute("scale", acc, (acc,), rows, cols, (("factor", float(p.scale)),))] if p.scale != 1.0 else []
    loads, stores = _narrow_access(g, g.tile_k * (g.tile_rows + g.tile_columns) // sets, rows * cols)
    size = rows * cols * 2
    return (
        fill(acc, 0.0),
        Loop(
            "k",
            var("n_k"),
            [
                Consume(a_pipe),
                Consume(b_pipe),
                *([] if asynchronous else [Barrier("slice", sets)]),
                *loads,
                product,
                *([Await("C")] if asynchronous else []),
                Release(a_pipe),
                Release(b_pipe),
            ],
        ),
        *scale,
        *([] if g.splits > 1 else [Compute("convert", out, (acc,), rows, cols)]),
        Exchange("C", size, size),
        *stores,
        Barrier(f"epilogue{index}"),
        Store(
            View(acc if g.splits > 1 else out),
            tile(p.c, var("split" if g.splits > 1 else "q_head"), row + row_off, rows, col + col_off, cols),
        ),
    )


def _narrow_access(g: GemmKernel, loaded: int, written: int) -> tuple[list[Op], list[Op]]:
    """What ``loaded`` elements of A and B and ``written`` ones of C cost a kernel that moves them by 2 or 4 bytes."""
    if g.narrow is None:
        return [], []
    n = g.narrow
    loads = (("issue", n.load_lanes * loaded), ("wavefronts", n.load_wavefronts * loaded))
    stores = (("issue", n.store_lanes * written), ("wavefronts", n.store_wavefronts * written))
    return [Instructions("element_loads", loads)], [Instructions("element_stores", stores)]


#: Outputs of a CTA of splitKreduce_kernel (32 x 16 threads), and partial results that it asks for at once.
_REDUCED, _REDUCED_AT_ONCE = 512, 16


def batched_gemm(name: str, p: Product, g: GemmKernel, path: str) -> tuple[Kernel, ...]:
    """The kernel that computes ``p``; with ``g.splits`` CTAs share the C tiles of one matrix, and a second kernel adds
    their parts (``cublasLt::splitKreduce_kernel``)."""
    slices = ceil_div(p.inner, g.tile_k)
    g = replace(g, splits=ceil_div(slices, ceil_div(slices, g.splits)))
    if g.splits == 1:
        return (_tiled_gemm(name, p, g, path),)
    partial = Tensor(f"{p.c.name}_parts", g.splits, p.c.rows, p.c.cols, "fp32", "scratch", p.c.block_rows)
    rows, cols = max(1, _REDUCED // p.c.cols), p.c.cols
    block, _ = grid_indices(ceil_div(p.c.rows, rows), 1)
    total, out = Buffer("total", rows, cols), Buffer("out", rows, cols, p.c.dtype)
    ops: list[Op] = [fill(total, 0.0)]
    for first in range(0, g.splits, _REDUCED_AT_ONCE):
        these = range(first, min(first + _REDUCED_AT_ONCE, g.splits))
        parts = [Buffer(f"part{n % _REDUCED_AT_ONCE}", rows, cols) for n in these]
        ops += [
            Load(tile(partial, n, var("row0"), rows), part, token="parts") for n, part in zip(these, parts, strict=True)
        ]
        ops += [Await("parts"), *(Compute("add", total, (total, part), rows, cols) for part in parts)]
    ops += [Compute("convert", out, (total,), rows, cols), Store(View(out), tile(p.c, 0, var("row0"), rows))]
    add = Kernel(
        f"{name}_sum",
        (Role("warps0", ops, warps=_REDUCED // 32),),
        {"row0": block * rows},
        (),
        threads=_REDUCED,
        registers_per_thread=40,
        ctas_per_sm=2,
        compute_dtype=p.c.dtype,
        coord_order="rows of C",
        short_code=True,
    )
    return _tiled_gemm(name, replace(p, c=partial), g, path), add


def _tiled_gemm(name: str, p: Product, g: GemmKernel, path: str) -> Kernel:
    """A CTA for each C tile. With ``g.splits``, C's heads are the parts of one matrix.

    CTA order: rows of C fastest, then columns, batch and head slowest (cuBLAS numbers C tiles along its columns,
    which are our rows). Beyond :data:`MOST_TILES` tiles a CTA takes a column of tiles in turn, without multicast.
    """
    heads, rows, cols = p.c.heads, p.c.rows, p.c.cols
    slices = ceil_div(p.inner, g.tile_k)
    # a grid holds whole clusters: CTAs beyond C's edge fetch their share for the others and store nothing
    row_tiles = ceil_div(rows, g.tile_rows * g.cluster_rows) * g.cluster_rows
    col_tiles = ceil_div(cols, g.tile_columns * g.cluster_columns) * g.cluster_columns
    sets = g.consumer_warpgroups or max(1, g.threads // 128)
    by_rows = g.tile_rows // sets >= 16
    a_shape = (g.tile_k, g.tile_rows) if p.transpose_a else (g.tile_rows, g.tile_k)
    b_shape = (g.tile_columns, g.tile_k) if p.transpose_b else (g.tile_k, g.tile_columns)
    a_pipe, b_pipe = (
        Pipe(which, *shape, tensor.dtype, g.stages, sets)
        for which, shape, tensor in (("a", a_shape, p.a), ("b", b_shape, p.b))
    )
    whole_columns = heads * row_tiles * col_tiles > MOST_TILES
    if whole_columns:
        g = replace(g, cluster_rows=1, cluster_columns=1)
    row = var("row0") + (var("t") * g.tile_rows if whole_columns else 0)
    col = var("col0")
    loader = _loader(p, g, a_pipe, b_pipe, row, col)
    consumers = [_consumer(p, g, i, sets, by_rows, a_pipe, b_pipe, row, col) for i in range(sets)]
    if whole_columns:
        loader = (Loop("t", var("n_tiles"), loader),)
        consumers = [(Loop("t", var("n_tiles"), ops),) for ops in consumers]
        column, head = grid_indices(col_tiles, heads)
        block = np.zeros_like(column)
        trips: tuple[Trip, ...] = (Trip("n_tiles"), Trip("n_k", outer="n_tiles"))
    else:
        block, column, head = grid_indices(row_tiles, col_tiles, heads)
        trips = (Trip("n_k"),)
    coords = {
        "q_head": head,
        "row0": block * g.tile_rows,
        "col0": column * g.tile_columns,
        "n_k": np.full(len(head), slices, np.int64),
    }
    if g.splits > 1:
        each = ceil_div(slices, g.splits)
        coords |= {"q_head": np.zeros_like(head), "split": head, "k0": head * each}
        coords["n_k"] = np.minimum(each, slices - head * each)
    elif p.b.heads != heads:
        coords["kv_head"] = head // (heads // p.b.heads)
    if g.cluster_rows > 1 or g.cluster_columns > 1:
        # CTAs along C's rows share a tile of B, along its columns a tile of A
        along = block if g.cluster_rows > 1 else column
        coords["cluster_rank"] = along % max(g.cluster_rows, g.cluster_columns)
    if whole_columns:
        coords["n_tiles"] = np.full(len(head), row_tiles, np.int64)
    interval = g.narrow.issue_interval_cycles if g.narrow else 0.0
    return Kernel(
        name,
        (
            Role("loader", loader, warps=0),
            *(Role(f"warps{i}", ops, 4, interval) for i, ops in enumerate(consumers)),
        ),
        coords,
        trips,
        threads=g.threads,
        smem_bytes=g.smem_bytes,
        registers_per_thread=g.registers_per_thread,
        ctas_per_sm=g.ctas_per_sm,
        schedule="dynamic" if g.persistent else "grid",
        path=path,
        compute_dtype=p.a.dtype,
        in_step_iterations=CUBLAS_SCORES if p.transpose_b and not whole_columns else 0.0,
        coord_order="rows of C, columns of C, head, batch",
        # 2.2 to 3.0 us from start to end where their work takes 0.6 to 0.9 (spans_more_run1.csv, host_call)
        short_code=g.narrow is None,
    )


def memset(name: str) -> Kernel:
    """A 4-byte memset: cuBLAS's persistent kernels take tiles from a counter that it clears."""
    counter = Tensor(name, 1, 1, 1, "int32", "scratch", 1)
    zero = Buffer("zero", 1, 1, "int32")
    return Kernel(
        f"memset_{name}",
        (Role("warps0", [fill(zero, 0.0), Store(View(zero), tile(counter, 0, 0, 1))], warps=1),),
        {"q_head": np.zeros(1, np.int64)},
        (),
        threads=32,
        registers_per_thread=16,
        short_code=True,
    )
