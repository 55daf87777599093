"""PyTorch's row-wise and element-wise kernels as tile programs: softmax, mask addition, copies, products.

A row kernel's CTA owns whole rows and re-reads them as often as the real one does. An element-wise kernel's CTAs are
so many (512 elements each) that those which share an SM are taken together: four roles walk a block of rows side by
side, each with its share of the columns.
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

#: Row steps that one element-wise CTA of the program takes in turn.
STEPS = 8
ROLES = 4
#: Elements of all CTAs of an SM together: 2048 threads, four elements each.
RESIDENT_ELEMENTS = 8192

assert "divide" in TILE_OPS  # the operations used here exist once standard_ops is imported


def row_coordinates(heads: int, rows: int, rows_per_cta: int) -> dict[str, np.ndarray]:
    """CTAs in row order, head after head."""
    block, head = grid_indices(ceil_div(rows, rows_per_cta), heads)
    return {"q_head": head, "row0": block * rows_per_cta}


def _row_kernel(name: str, k: RowKernel, ops, heads: int, rows: int, gpu: Profile, dtype: str, chunks: int) -> Kernel:
    coords = row_coordinates(heads, rows, k.rows_per_cta)
    if chunks:
        coords["n_chunks"] = np.full(len(coords["row0"]), chunks, np.int64)
    return Kernel(
        name,
        (Role("warps0", ops, warps=max(1, k.threads // 32)),),
        coords,
        (Trip("n_chunks"),) if chunks else (),
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

    def sweep(body: Callable[[Buffer, Index | int, int], list]) -> list:
        parts = []
        if whole:
            s = Buffer("S_chunk", rows, chunk)
            parts.append(Loop("c", var("n_chunks"), body(s, var("c") * chunk, chunk)))
        if rest:
            parts += body(Buffer("S_rest", rows, rest), whole * chunk, rest)
        return parts

    def read(s: Buffer, col, width: int) -> list:
        return [Load(at(s_in, col, width), s), Compute(access, s, (s,), rows, width)]

    ops = [
        *start,
        fill(m, float("-inf")),
        *sweep(lambda s, col, width: [*read(s, col, width), Compute("row_max", m, (s, m), rows, width)]),
        *_reduction(k),
        *sweep(
            lambda s, col, width: [
                *read(s, col, width),
                Compute("expf", s, (s, m), rows, width),
                Compute("accumulate_sum", total, (total, one, s), rows, width),
            ]
        ),
        *_reduction(k),
        *sweep(lambda s, col, width: [*read(s, col, width), *output(s, col, width, True)]),
    ]
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
    width = ceil_div(cols, ROLES)
    rows = max(1, RESIDENT_ELEMENTS // cols)

    def role(index: int) -> Role:
        row, col = var("row0") + var("i") * rows, Index(index * width)
        buffers = [Buffer(f"in{n}", rows, width) for n in range(len(reads))]
        result = Buffer("out", rows, width, out.dtype)
        loads = [
            Load(tile(tensor, var(head) if head else 0, row, rows, col, width), buffer, token="in")
            for (tensor, head), buffer in zip(reads, buffers, strict=True)
        ]
        compute = Compute(op, result, tuple(buffers), rows, width, params(row, col) if params else ())
        store = Store(View(result), tile(out, var("q_head"), row, rows, col, width))
        return Role(f"warps{index}", [Loop("i", var("n_steps"), [*loads, Await("in"), compute, store])], warps=16)

    block, head = grid_indices(ceil_div(out.rows, rows * STEPS), heads)
    row0 = block * rows * STEPS
    coords = {
        "q_head": head,
        "row0": row0,
        "n_steps": np.minimum(STEPS, -(-(out.rows - row0) // rows)),
    }
    roles = tuple(role(i) for i in range(ROLES) if i * width < cols)
    edges = np.linspace(0, len(head), k.launches + 1).astype(np.int64)
    return [
        Kernel(
            name if k.launches == 1 else f"{name}_{part}",
            roles,
            {coord: values[low:high] for coord, values in coords.items()},
            (Trip("n_steps"),),
            threads=2048,
            registers_per_thread=32,
            ctas_per_sm=1,
            compute_dtype=out.dtype,
            coord_order="rows, head after head",
        )
        for part, (low, high) in enumerate(pairwise(edges))
        if high > low
    ]
