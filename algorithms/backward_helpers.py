"""The small kernels around a backward pass: rowsum(dO * O) with its zero fill, zero fills, conversions, group sums.

Each is memory bound and stands as a kernel of its own, so that its launch, its bytes and its tail are counted.
"""

from __future__ import annotations

import numpy as np

from algorithms.common import LOG2E, ceil_div, fill, grid_indices
from algorithms.kernels_common import ctas_per_sm
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Await,
    Buffer,
    Compute,
    Exchange,
    Index,
    Kernel,
    Load,
    Loop,
    Op,
    Role,
    Store,
    Tensor,
    Trip,
    tile,
    var,
)

#: Assumed for kernels that hold a few 16-byte vectors of two operands a thread (their real counts are not published).
HELPER_REGISTERS_PER_THREAD = 64


def gradient_tensors(problem: AttentionProblem, tile_m: int, tile_n: int) -> dict[str, Tensor]:
    """Q, K, V, O, LSE, dO and dQ, dK, dV of a backward pass; L2 blocks are the tiles of the main kernel."""
    p = problem
    q_heads, kv_heads = p.batch * p.heads, p.batch * p.kv_heads

    def queries(name: str, cols: int, dtype: str, kind: str) -> Tensor:
        return Tensor(name, q_heads, p.seqlen_q, cols, dtype, kind, tile_m)

    def keys(name: str, cols: int, kind: str) -> Tensor:
        return Tensor(name, kv_heads, p.seqlen_k, cols, p.dtype, kind, tile_n)

    return {
        "Q": queries("Q", p.head_dim, p.dtype, "input"),
        "K": keys("K", p.head_dim, "input"),
        "V": keys("V", p.head_dim_v, "input"),
        "O": queries("O", p.head_dim_v, p.dtype, "input"),
        "LSE": queries("LSE", 1, "fp32", "input"),
        "dO": queries("dO", p.head_dim_v, p.dtype, "input"),
        "dQ": queries("dQ", p.head_dim, p.dtype, "output"),
        "dK": keys("dK", p.head_dim, "output"),
        "dV": keys("dV", p.head_dim_v, "output"),
    }


def row_grid(rows: int, tile_rows: int, *outer: int) -> list[np.ndarray]:
    """Grid indices with the row block fastest, then ``outer`` in order."""
    return grid_indices(ceil_div(rows, tile_rows), *outer)


def _kernel(
    name: str,
    ops: list[Op],
    coords: dict[str, np.ndarray],
    threads: int,
    gpu: Profile,
    trips: tuple[Trip, ...] = (),
    smem_bytes: int = 0,
) -> Kernel:
    resident = ctas_per_sm(
        threads=threads,
        registers_per_thread=HELPER_REGISTERS_PER_THREAD,
        smem_bytes=smem_bytes,
        smem_bytes_per_sm=gpu.smem_bytes_per_sm,
    )
    return Kernel(
        name,
        (Role("warps", ops, warps=threads // 32),),
        coords,
        trips,
        threads=threads,
        smem_bytes=smem_bytes,
        registers_per_thread=HELPER_REGISTERS_PER_THREAD,
        ctas_per_sm=min(resident, 32),
        path="mma_sync",
        compute_dtype="bf16",
    )


def dot_do_o(
    name: str,
    tensors: dict[str, Tensor],
    coords: dict[str, np.ndarray],
    tile_m: int,
    threads: int,
    cols: int,
    gpu: Profile,
    accumulator: Tensor | None,
    lse_log2: Tensor | None = None,
    keep: float = 1.0,
    shift: Index | int = 0,
) -> Kernel:
    """D = rowsum(dO * O) for ``tile_m`` rows a CTA (``coords``: ``q_head``, ``row0``).

    ``shift``: rows from a row of O to its place in what this kernel writes (lengths by sequence).

    ``accumulator``: the fp32 dQ buffer that it zeroes on the way. ``lse_log2``: where it leaves LSE * log2(e), so
    that the main kernel's exponential needs no multiplication. ``keep``: with dropout, dP stays unscaled until the
    end, so D is scaled down by the probability to keep.
    """
    dtype = tensors["dO"].dtype
    do, o = Buffer("dO", tile_m, cols, dtype), Buffer("O", tile_m, cols, dtype)
    d = Buffer("D", tile_m)
    head, row = var("q_head"), var("row0")
    ops: list[Op] = [
        Load(tile(tensors["dO"], head, row, tile_m, 0, cols), do, token="dO"),
        Load(tile(tensors["O"], head, row, tile_m, 0, cols), o, token="O"),
    ]
    if lse_log2 is not None:
        lse = Buffer("LSE", tile_m)
        ops.append(Load(tile(tensors["LSE"], head, row, tile_m), lse, token="LSE"))
    ops += [Await("dO"), Await("O"), Compute("row_dot", d, (do, o), tile_m, cols)]
    if keep != 1.0:
        ops.append(Compute("scale", d, (d,), tile_m, 1, (("factor", float(keep)),)))
    ops.append(Store(d, tile(tensors["D"], head, row + shift, tile_m)))
    if lse_log2 is not None:
        ops += [
            Await("LSE"),
            Compute("scale", lse, (lse,), tile_m, 1, (("factor", LOG2E),)),
            Store(lse, tile(lse_log2, head, row + shift, tile_m)),
        ]
    if accumulator is not None:
        zero = Buffer("zero", tile_m, accumulator.cols)
        ops += [fill(zero, 0.0), Store(zero, tile(accumulator, head, row + shift, tile_m))]
    return _kernel(name, ops, coords, threads, gpu)


def _all_rows(tensor: Tensor, tile_rows: int) -> dict[str, np.ndarray]:
    block, head = row_grid(tensor.rows, tile_rows, tensor.heads)
    return {"head": head, "row0": block * tile_rows}


def zero_fill(
    name: str,
    tensor: Tensor,
    tile_rows: int,
    threads: int,
    gpu: Profile,
    coords: dict[str, np.ndarray] | None = None,
) -> Kernel:
    """Write zeros to ``tensor`` (``torch.zeros``), ``tile_rows`` rows a CTA (``coords``: ``head``, ``row0``; all)."""
    zero = Buffer("zero", tile_rows, tensor.cols)
    coords = _all_rows(tensor, tile_rows) if coords is None else coords
    shift = var("acc_shift") if "acc_shift" in coords else 0
    ops: list[Op] = [fill(zero, 0.0), Store(zero, tile(tensor, var("head"), var("row0") + shift, tile_rows))]
    return _kernel(name, ops, coords, threads, gpu)


def convert(
    name: str,
    source: Tensor,
    target: Tensor,
    coords: dict[str, np.ndarray],
    tile_rows: int,
    threads: int,
    scale: float,
    gpu: Profile,
    splits: int = 1,
    smem_bytes: int = 0,
    shift: Index | int = 0,
) -> Kernel:
    """``target = scale * source`` from fp32, ``tile_rows`` rows a CTA (``coords``: ``head``, ``row0``).

    ``shift``: rows from a row of ``target`` to its place in ``source`` (lengths by sequence).

    ``splits`` > 1: ``source`` holds that many partial sums, one after another along its heads; they are added first.
    """
    cols = source.cols
    total, out = Buffer("total", tile_rows, cols), Buffer("out", tile_rows, cols, target.dtype)
    head, row = var("head"), var("row0")
    trips: tuple[Trip, ...] = ()
    if splits == 1:
        ops: list[Op] = [Load(tile(source, head, row + shift, tile_rows), total, token="part"), Await("part")]
    else:
        part = Buffer("part", tile_rows, cols)
        coords = {**coords, "n_splits": np.full_like(coords["row0"], splits)}
        trips = (Trip("n_splits"),)
        body: list[Op] = [
            Load(tile(source, head + var("s") * target.heads, row, tile_rows), part, token="part"),
            Await("part"),
            Compute("add", total, (total, part), tile_rows, cols),
        ]
        ops = [fill(total, 0.0), Loop("s", var("n_splits"), body)]
    bytes_out = tile_rows * cols * 2
    ops += [
        Compute("scale", total, (total,), tile_rows, cols, (("factor", float(scale)),)),
        Compute("convert", out, (total,), tile_rows, cols),
        # through SMEM, so that the 16-bit rows are stored in whole 16-byte vectors
        Exchange("out", bytes_out, bytes_out),
        Store(out, tile(target, head, row, tile_rows, 0, cols)),
    ]
    return _kernel(name, ops, coords, threads, gpu, trips, smem_bytes)


def group_sum(
    name: str,
    expanded: Tensor,
    target: Tensor,
    group: int,
    tile_rows: int,
    threads: int,
    gpu: Profile,
    coords: dict[str, np.ndarray] | None = None,
) -> Kernel:
    """``target[kv head] = sum over its query heads of expanded`` (``at::sum_out`` over the group), fp32 inside.

    ``coords``: ``head`` (of the target) and ``row0`` of each CTA's ``tile_rows`` rows (default: all).
    """
    coords = _all_rows(target, tile_rows) if coords is None else coords
    cols = target.cols
    part = Buffer("part", tile_rows, cols, expanded.dtype)
    total, out = Buffer("total", tile_rows, cols), Buffer("out", tile_rows, cols, target.dtype)
    row = var("row0")
    source_head: Index = var("head") * group + var("g")
    body: list[Op] = [
        Load(tile(expanded, source_head, row, tile_rows), part, token="part"),
        Await("part"),
        Compute("add", total, (total, part), tile_rows, cols),
    ]
    ops: list[Op] = [
        fill(total, 0.0),
        Loop("g", var("n_group"), body),
        Compute("convert", out, (total,), tile_rows, cols),
        Store(out, tile(target, var("head"), row, tile_rows)),
    ]
    coords = {**coords, "n_group": np.full_like(coords["row0"], group)}
    return _kernel(name, ops, coords, threads, gpu, (Trip("n_group"),))
