"""PyTorch's row-wise and element-wise kernels as tile programs: softmax, mask addition, copies, products.

A row kernel's CTA owns whole rows and re-reads them as often as the real one does. An element-wise kernel's CTAs are
so many (512 elements each) that
those of a few rows are taken together.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from algorithms.common import ceil_div, fill, grid_indices
from algorithms.kernel_tables import ElementwiseKernel, RowKernel, ctas_per_sm
from algorithms.standard_ops import TILE_OPS
from simulator.profile import Profile
from simulator.program import (
    Await,
    Barrier,
    Buffer,
    Compute,
    Exchange,
    Index,
    Kernel,
    Load,
    Loop,
    Role,
    Store,
    Tensor,
    Tile,
    Trip,
    View,
    tile,
    var,
)

#: An element-wise CTA of the program stands for eight real ones side by side (128 threads, 4 elements each), again and
#: again over this many whole rows, so that what is in flight at once stays a narrow band of the matrix.
CTA_ROWS = 16
CTA_THREADS = 1024
CTA_ELEMENTS = 8192

#: Chunks of a row by pass, where a row is too long to be kept: maximum, sum, output.
PASSES = ("n_max", "n_sum", "n_output")

assert "divide" in TILE_OPS  # the operations used here exist once standard_ops is imported


def row_coordinates(heads: int, rows: int, rows_per_cta: int) -> dict[str, np.ndarray]:
    """CTAs in row order, head after head."""
    block, head = grid_indices(ceil_div(rows, rows_per_cta), heads)
    return {"q_head": head, "row0": block * rows_per_cta}


def _row_kernel(name: str, k: RowKernel, ops, heads: int, rows: int, gpu: Profile, dtype: str, chunks: int) -> Kernel:
    coords = row_coordinates(heads, rows, k.rows_per_cta)
    passes = PASSES if chunks else ()
    coords |= {name: np.full(len(coords["row0"]), chunks, np.int64) for name in passes}
    return Kernel(
        name,
        (Role("warps0", ops, warps=max(1, k.threads // 32)),),
        coords,
        tuple(Trip(name) for name in passes),
        threads=k.threads,
        smem_bytes=k.smem_bytes,
        registers_per_thread=k.registers_per_thread,
        ctas_per_sm=ctas_per_sm(
            threads=k.threads,
            registers_per_thread=k.registers_per_thread,
            smem_bytes=k.smem_bytes,
            smem_bytes_per_sm=gpu.smem_bytes_per_sm,
            threads_per_sm_max=gpu.max_threads_per_sm,
        ),
        compute_dtype=dtype,
        coord_order="rows, head after head",
    )


def _reduction(k: RowKernel) -> list:
    """A block-wide reduction: warps meet twice around a table of one value each."""
    if not k.block_reductions:
        return []
    return [Barrier("reduce"), Exchange("reduce", k.threads // 8, k.threads // 8), Barrier("reduce")]


def _access(k: RowKernel) -> str:
    return "vector_access" if k.access_bytes == 16 else "scalar_access"


def softmax_forward(s_in: Tensor, p_out: Tensor, k: RowKernel, gpu: Profile, masked_share: float = 0.0) -> Kernel:
    """P = softmax(S) row by row. ``masked_share`` is the share of S that is -inf: those elements' divisions are slow.

    A row without any visible key gives zeros (PyTorch gives NaN there).
    """
    rows, cols, dtype = k.rows_per_cta, s_in.cols, s_in.dtype
    head, row = var("q_head"), var("row0")
    m, m_old, total, one = (Buffer(name, rows) for name in ("m", "m_old", "l", "one"))
    access = _access(k)

    def at(tensor: Tensor, col: Index | int, width: int) -> Tile:
        return tile(tensor, head, row, rows, col, width)

    def output(s: Buffer, col, width: int, exponential: bool) -> list:
        p = Buffer(f"P{width}", rows, width, dtype)
        slow = int(width * masked_share)
        return [
            *([Compute("expf", s, (s, m), rows, width)] if exponential else []),
            *([Compute("slow_division", s, (s,), rows, slow)] if slow else []),
            Compute("divide", p, (s, total), rows, width),
            Compute(access, p, (p,), rows, width),
            Store(View(p), at(p_out, col, width)),
        ]

    start = [fill(m_old, float("-inf")), fill(total, 0.0), fill(one, 1.0)]
    if k.kind != "global":
        s = Buffer("S", rows, cols)
        # the two block reductions of a CTA's row; a warp keeps its exponentials, a CTA computes them twice
        twice = k.block_reductions > 0
        e = Buffer("E", rows, cols)
        in_smem = [Exchange("row", rows * cols * 2, 2 * rows * cols * 2)] if k.kind == "smem" else []
        ops = [
            *start,
            Load(at(s_in, 0, cols), s),
            Compute(access, s, (s,), rows, cols),
            *in_smem,
            Compute("row_max", m, (s, m_old), rows, cols),
            *_reduction(k),
            Compute("expf", e, (s, m), rows, cols),
            Compute("row_sum", total, (e,), rows, cols),
            *_reduction(k),
            *(output(s, 0, cols, True) if twice else output(e, 0, cols, False)),
        ]
        return _row_kernel("softmax", k, ops, s_in.heads, s_in.rows, gpu, dtype, 0)

    # three passes over global memory in steps of one vector a thread; the last step of each may be short
    chunk = k.threads * max(1, k.access_bytes // 2)
    whole, rest = divmod(cols, chunk)

    def sweep(trip: str, body: Callable[[Buffer, Index | int, int], list]) -> list:
        parts = []
        if whole:
            s = Buffer("S_chunk", rows, chunk)
            parts.append(Loop("c", var(trip), body(s, var("c") * chunk, chunk)))
        if rest:
            parts += body(Buffer("S_rest", rows, rest), whole * chunk, rest)
        return parts

    def read(s: Buffer, col, width: int) -> list:
        return [Load(at(s_in, col, width), s), Compute(access, s, (s,), rows, width)]

    def find_max(s: Buffer, col, width: int) -> list:
        return [*read(s, col, width), Compute("row_max", m, (s, m), rows, width)]

    def add_up(s: Buffer, col, width: int) -> list:
        return [
            *read(s, col, width),
            Compute("expf", s, (s, m), rows, width),
            Compute("accumulate_sum", total, (total, one, s), rows, width),
        ]

    def write(s: Buffer, col, width: int) -> list:
        return [*read(s, col, width), *output(s, col, width, True)]

    parts = [sweep(trip, body) for trip, body in zip(PASSES, (find_max, add_up, write), strict=True)]
    ops = [*start, fill(m, float("-inf")), *parts[0], *_reduction(k), *parts[1], *_reduction(k), *parts[2]]
    return _row_kernel("softmax", k, ops, s_in.heads, s_in.rows, gpu, dtype, whole)


def softmax_backward(dpp: Tensor, p_in: Tensor, ds_out: Tensor, k: RowKernel, gpu: Profile) -> Kernel:
    """dS = dP*P - P * rowsum(dP*P), row by row; ``dpp`` holds the product dP*P."""
    rows, cols, dtype = k.rows_per_cta, p_in.cols, p_in.dtype
    head, row = var("q_head"), var("row0")
    total, one = Buffer("total", rows), Buffer("one", rows)
    access = _access(k)
    read_twice = dict(k.global_reads).get("dP*P", 1) > 1

    def at(tensor: Tensor) -> Tile:
        return tile(tensor, head, row, rows, 0, cols)

    g, p, ds = Buffer("dPP", rows, cols), Buffer("P", rows, cols), Buffer("dS", rows, cols, dtype)
    again = [Load(at(dpp), g), Compute(access, g, (g,), rows, cols)]
    in_smem = [Exchange("row", rows * cols * 2, rows * cols * 2)] if k.kind == "smem" else []
    ops = [
        fill(one, 1.0),
        *again,
        *in_smem,
        Compute("row_sum", total, (g,), rows, cols),
        *_reduction(k),
        *(again if read_twice else []),
        Load(at(p_in), p),
        Compute(access, p, (p,), rows, cols),
        Compute("softmax_backward", ds, (g, p, total), rows, cols),
        Compute(access, ds, (ds,), rows, cols),
        Store(View(ds), at(ds_out)),
    ]
    return _row_kernel("softmax_backward", k, ops, p_in.heads, p_in.rows, gpu, dtype, 0)


def elementwise(
    name: str,
    op: str,
    reads: tuple[tuple[Tensor, str], ...],
    out: Tensor,
    k: ElementwiseKernel,
    heads: int | None = None,
    params: Callable[[Index, Index], tuple] | None = None,
) -> list[Kernel]:
    """``out = op(reads)`` element by element. ``reads`` pairs each tensor with the coordinate of its head
    (``""``: one matrix for all heads); ``params(row, col)`` gives the operation's parameters.

    PyTorch cuts what exceeds 32-bit offsets into ``k.launches`` launches: one kernel each, over equal shares.
    """
    heads = out.heads if heads is None else heads
    cols = out.cols
    rows = max(CTA_ROWS, CTA_ELEMENTS // cols)
    row = var("row0")
    buffers = [Buffer(f"in{n}", rows, cols) for n in range(len(reads))]
    result = Buffer("out", rows, cols, out.dtype)
    sources = [tile(tensor, var(head) if head else 0, row, rows) for tensor, head in reads]
    # all operands of an element are in flight together: the last load waits for the earlier ones too
    loads = [Load(source, buffer, token="in") for source, buffer in zip(sources[:-1], buffers[:-1], strict=True)]
    body = [
        *loads,
        Load(sources[-1], buffers[-1]),
        *([Await("in")] if loads else []),
        Compute(op, result, tuple(buffers), rows, cols, params(row, Index()) if params else ()),
        Store(View(result), tile(out, var("q_head"), row, rows)),
    ]
    coords = row_coordinates(heads, out.rows, rows)
    edges = np.linspace(0, len(coords["row0"]), k.launches + 1).astype(np.int64)
    return [
        Kernel(
            name if k.launches == 1 else f"{name}_{part}",
            (Role("warps0", body, warps=CTA_THREADS // 32),),
            {coord: values[low:high] for coord, values in coords.items()},
            (),
            threads=CTA_THREADS,
            registers_per_thread=32,
            compute_dtype=out.dtype,
            coord_order="rows, head after head",
        )
        for part, (low, high) in enumerate(pairwise(edges))
        if high > low
    ]
