"""PyTorch's row-wise and element-wise kernels as tile programs: softmax, mask addition, copies, products.

A row kernel's CTA owns whole rows and re-reads them as often as the real one does. An element-wise kernel's CTAs are
so many (512 elements each) that those of a few rows are taken together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from algorithms.common import ceil_div, fill, grid_indices
from algorithms.instruction_counts import InstructionMix, elementwise_mix, softmax_mix
from algorithms.kernel_tables import ElementwiseKernel, RowKernel, ctas_per_sm
from algorithms.standard_ops import beyond
from simulator.problem import DTYPE_BYTES, MOST_CTAS
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
    Op,
    Role,
    Store,
    Tensor,
    Tile,
    Trip,
    View,
    tile,
    var,
)

#: CTAs of an element-wise kernel beyond which several neighbours are one of the program.
ELEMENTWISE_CTAS = 49_152
#: From the end of a CTA of these kernels to the start of the next on its slot. By ncu on an H200, mask additions keep
#: 59.2 of 64 warps busy with CTAs of 5160 cycles, softmax in registers 60.4 of 64 with CTAs of 6650.
CTA_LAUNCH_CYCLES = 400.0

MOST_LAUNCHES = 8
#: Rows that an SM's CTAs pass over again are found in L1 while they take this share of it, the less of them the more
#: they take beyond. By ncu on an H200 (launches_run1.csv, launches_random_run1.csv), two CTAs an SM in three passes:
#: rows of 9643 16-bit scores (0.15 of L1) were asked of L2 1.01 times, rows of 32768 (0.5) 1.84 times.
HELD_IN_L1 = 0.15
#: Chunks of a row by pass, where a row is too long to be kept: maximum, sum, output.
PASSES = ("n_max", "n_sum", "n_output")


def row_coordinates(heads: int, rows: int, rows_per_cta: int) -> dict[str, np.ndarray]:
    """CTAs in row order, head after head."""
    block, head = grid_indices(ceil_div(rows, rows_per_cta), heads)
    return {"q_head": head, "row0": block * rows_per_cta}


def _row_kernel(
    name: str,
    k: RowKernel,
    ops: Sequence[Op],
    heads: int,
    rows: int,
    gpu: Profile,
    dtype: str,
    chunks: int,
    mix: InstructionMix,
) -> Kernel:
    coords = row_coordinates(heads, rows, k.rows_per_cta)
    passes = PASSES if chunks else ()
    coords |= {name: np.full(len(coords["row0"]), chunks, np.int64) for name in passes}
    return Kernel(
        name,
        (Role("warps0", ops, max(1, k.threads // 32), mix.issue_interval_cycles),),
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
        launch_gap_cycles=CTA_LAUNCH_CYCLES,
        short_code=True,
    )


def _at_most_ctas(k: RowKernel, rows: int) -> RowKernel:
    """``k``, or beyond :data:`MOST_CTAS` with several real CTAs' rows in one, so that the grid stays a list one can
    hold (scores of terabytes, which no GPU stores)."""
    return replace(k, rows_per_cta=k.rows_per_cta * ceil_div(rows, k.rows_per_cta * MOST_CTAS))


def _from_l1(k: RowKernel, matrix: Tensor, gpu: Profile) -> float:
    """The share of a row's second reading that L1 answers: it holds the rows of all the CTAs on an SM."""
    held = gpu.max_threads_per_sm // k.threads * k.rows_per_cta * matrix.cols * DTYPE_BYTES[matrix.dtype]
    return min(1.0, max(0.0, (1.0 - held / gpu.l1_smem_bytes_per_sm) / (1.0 - HELD_IN_L1)))


def _reduction(k: RowKernel) -> list[Op]:
    """A block-wide reduction: warps meet twice around a table of one value each."""
    if not k.block_reductions:
        return []
    return [Barrier("reduce"), Exchange("reduce", k.threads // 8, k.threads // 8), Barrier("reduce")]


def _threads(k: RowKernel) -> int:
    """Threads that work on one row."""
    return 32 if k.kind == "warp" else k.threads


def _widths(cols: int, each: int) -> list[int]:
    """``cols`` columns, ``each`` at once and the rest last."""
    return [min(each, cols - col) for col in range(0, cols, each)]


def _shifted_widths(k: RowKernel, cols: int) -> list[int]:
    """Columns of each load of a row that begins between vectors: a scalar for every thread up to the next vector,
    whole vectors, then scalars again, which a thread waits for one by one (SoftMax.cu, ilpReduce with a shift). By ncu
    on an H200 a step takes 900 to 1300 cycles: rows of 1111 (17 scalars) longer than rows of 1540."""
    vectors, scalars = divmod(cols - k.threads, k.columns_in_flight)
    return [k.threads] + [k.columns_in_flight] * vectors + _widths(scalars, k.threads)


def _batches(widths: Sequence[int], loads: Callable[[int, int], list[Op]]) -> list[Op]:
    """``loads(col, width)`` over a row: the columns in flight at once, and when they have come the next ones."""
    ends = accumulate(widths)
    return [op for end, width in zip(ends, widths, strict=True) for op in loads(end - width, width)]


def softmax_forward(s_in: Tensor, p_out: Tensor, k: RowKernel, gpu: Profile, masked_share: float = 0.0) -> Kernel:
    """P = softmax(S) row by row. ``masked_share`` is the share of S that is -inf: those elements' divisions are slow.

    A row without any visible key gives zeros (PyTorch gives NaN there).
    """
    again = _from_l1(k, s_in, gpu)
    k = _at_most_ctas(k, s_in.heads * s_in.rows)
    rows, cols, dtype = k.rows_per_cta, s_in.cols, s_in.dtype
    head, row = var("q_head"), var("row0")
    m, m_old, total, one = (Buffer(name, rows) for name in ("m", "m_old", "l", "one"))
    mix = softmax_mix(k.kind).at_masked_fraction(masked_share)

    def at(tensor: Tensor, col: Index | int, width: int) -> Tile:
        return tile(tensor, head, row, rows, col, width)

    def output(s: Buffer, col: Index | int, width: int, exponential: bool) -> list[Op]:
        p = Buffer(f"P{width}", rows, width, dtype)
        return [
            *([Compute("exp", s, (s, m), rows, width)] if exponential else []),
            Compute("normalise", s, (s, total), rows, width),
            Compute("convert", p, (s,), rows, width),
            Store(View(p), at(p_out, col, width)),
        ]

    start = [fill(m_old, float("-inf")), fill(total, 0.0), fill(one, 1.0)]
    if k.kind != "global":
        # the kernels of whole CTAs compute their exponentials twice, the warp kernel keeps them
        twice = k.block_reductions > 0
        s, e = Buffer("S", rows, cols), Buffer("E", rows, cols)
        in_smem = [Exchange("row", rows * cols * 2, 2 * rows * cols * 2)] if k.kind == "smem" else []
        maximum = [Compute("row_max", m, (s, m_old), rows, cols)]
        sums = [Compute("exp", e, (s, m), rows, cols), Compute("row_sum", total, (e,), rows, cols)]
        end = output(s, 0, cols, True) if twice else output(e, 0, cols, False)
        extra = beyond("softmax", [*maximum, *sums, *end], mix, rows * k.padded_columns, 3, _threads(k) * rows)
        widths = _widths(cols, k.columns_in_flight)
        loads = _batches(widths, lambda col, width: [Load(at(s_in, col, width), View(s, 0, None, col, width))])
        ops = [
            *start, *loads, *in_smem, extra[0], *maximum, *_reduction(k), extra[1], *sums, *_reduction(k), extra[2],
            *end,
        ]  # fmt: skip
        return _row_kernel("softmax", k, ops, s_in.heads, s_in.rows, gpu, dtype, 0, mix)

    # three passes over global memory in steps of one vector a thread; the last step of each may be short
    chunk = k.columns_in_flight
    whole, rest = divmod(cols, chunk)

    def passes(s: Buffer, col: Index | int, width: int) -> list[list[Op]]:
        """The body of each pass for columns ``col .. col + width``."""
        bodies: list[list[Op]] = [
            [Compute("row_max", m, (s, m), rows, width)],
            [Compute("exp", s, (s, m), rows, width), Compute("accumulate_sum", total, (total, one, s), rows, width)],
            output(s, col, width, True),
        ]
        share = _threads(k) * rows * width / cols
        extra = beyond("softmax", [op for body in bodies for op in body], mix, rows * width, 3, share)
        held = (0.0, again, again)
        loads = [Load(at(s_in, col, width), s, from_l1=share) for share in held]
        return [[load, extra[0], *body] for load, body in zip(loads, bodies, strict=True)]

    loops = passes(Buffer("S_chunk", rows, chunk), var("c") * chunk, chunk) if whole else []
    rests = passes(Buffer("S_rest", rows, rest), whole * chunk, rest) if rest else []
    ops = [*start, fill(m, float("-inf"))]
    for index, trip in enumerate(PASSES):
        ops += [Loop("c", var(trip), loops[index])] if whole else []
        ops += rests[index] if rest else []
        ops += _reduction(k) if index < 2 else []
    return _row_kernel("softmax", k, ops, s_in.heads, s_in.rows, gpu, dtype, whole, mix)


def softmax_backward(dpp: Tensor, p_in: Tensor, ds_out: Tensor, k: RowKernel, gpu: Profile) -> Kernel:
    """dS = dP*P - P * rowsum(dP*P), row by row; ``dpp`` holds the product dP*P."""
    k = _at_most_ctas(k, p_in.heads * p_in.rows)
    rows, cols, dtype = k.rows_per_cta, p_in.cols, p_in.dtype
    head, row = var("q_head"), var("row0")
    total = Buffer("total", rows)
    read_twice = dict(k.global_reads).get("dP*P", 1) > 1
    g, p, ds = Buffer("dPP", rows, cols), Buffer("P", rows, cols), Buffer("dS", rows, cols, dtype)

    again = _from_l1(k, p_in, gpu)

    def load(tensor: Tensor, buffer: Buffer, col: int, width: int, token: str | None = None, held: float = 0.0) -> Load:
        return Load(tile(tensor, head, row, rows, col, width), View(buffer, 0, None, col, width), token, from_l1=held)

    def load_both(col: int, width: int) -> list[Op]:
        return [load(p_in, p, col, width, "P"), load(dpp, g, col, width)]

    def load_product(col: int, width: int) -> list[Op]:
        return [load(dpp, g, col, width)]

    def load_again(col: int, width: int) -> list[Op]:
        return [load(dpp, g, col, width, "dPP", again), load(p_in, p, col, width), Await("dPP")]

    shifted = read_twice and cols * k.threads % k.columns_in_flight > 0
    widths = _shifted_widths(k, cols) if shifted else _widths(cols, k.columns_in_flight)
    first = _batches(widths, load_product if read_twice else load_both)
    if shifted:
        second = _batches(widths, load_again)
    else:
        second = [*(_batches(widths, load_both) if read_twice else []), Await("P")]
    in_smem = [Exchange("row", rows * cols * 2, rows * cols * 2)] if k.kind == "smem" else []
    sums = [Compute("row_sum", total, (g,), rows, cols)]
    end = [Compute("softmax_backward", g, (g, p, total), rows, cols), Compute("convert", ds, (g,), rows, cols)]
    mix = softmax_mix("shifted" if shifted else k.kind, backward=True)
    extra = beyond("softmax_backward", [*sums, *end], mix, rows * k.padded_columns, 2, _threads(k) * rows)
    ops = [
        *first, *in_smem, extra[0], *sums, *_reduction(k), *second, extra[1], *end,
        Store(View(ds), tile(ds_out, head, row, rows)),
    ]  # fmt: skip
    return _row_kernel("softmax_backward", k, ops, p_in.heads, p_in.rows, gpu, dtype, 0, mix)


def _elementwise_tile(heads: int, rows: int, cols: int, real_elements: int) -> tuple[int, int, int]:
    """(rows, columns, hardware CTAs) of a CTA of the program: one of the hardware, or beyond
    :data:`ELEMENTWISE_CTAS` of them several that follow each other."""
    elements = real_elements * ceil_div(heads * rows * cols, real_elements * ELEMENTWISE_CTAS)
    if elements < cols:
        width, tall = ceil_div(cols, ceil_div(cols, elements)), 1
    else:
        width, tall = cols, min(rows, max(1, elements // cols))
        # a replay leaves most of such CTAs out where all are alike: where their rows divide the tensor's
        whole = next((n for n in range(tall, tall // 2, -1) if rows % n == 0 and n * cols % real_elements == 0), 0)
        tall = whole or ceil_div(rows, ceil_div(rows, tall))
    return tall, width, max(1, round(tall * width / real_elements))


def elementwise(
    name: str,
    op: str,
    reads: tuple[tuple[Tensor, str], ...],
    out: Tensor,
    k: ElementwiseKernel,
    heads: int | None = None,
    params: Callable[[Index | int, Index | int], tuple[tuple[str, Any], ...]] | None = None,
    counted: str | None = None,
    overfetch: float = 1.0,
) -> list[Kernel]:
    """``out = op(reads)`` element by element. ``reads`` pairs each tensor with the coordinate of its head
    (``""``: one matrix for all heads); a tensor of one row gives it to every row. ``params(row, col)`` are the
    operation's parameters. ``counted`` names the counted instructions where the kind of kernel does not, ``overfetch``
    is that of the last operand's loads (:class:`~simulator.program.Load`).

    PyTorch cuts what exceeds 32-bit offsets into ``k.launches`` launches: one kernel each, over equal shares; beyond
    :data:`MOST_LAUNCHES` of them, each over more than 2 GiB, several are taken together.
    """
    heads = out.heads if heads is None else heads
    real = k.threads * k.elements_per_thread
    rows, width, ctas_each = _elementwise_tile(heads // k.launches or 1, out.rows, out.cols, real)
    row, first_col = var("row0"), var("col0")
    one_row = [tensor.rows == 1 and out.rows > 1 for tensor, _ in reads]
    mix = elementwise_mix(
        counted or ("vectorised" if k.vectorised else "broadcast_add" if len(reads) > 1 else "strided_copy")
    )
    # what is not vectorised walks its elements one after another, a load and a store each
    step = width if k.vectorised else ceil_div(width, k.elements_per_thread)
    body: list[Op] = []
    for at in range(0, width, step):
        part, col = min(step, width - at), first_col + at
        buffers = [Buffer(f"in{n}_{part}", 1 if single else rows, part) for n, single in enumerate(one_row)]
        result = Buffer(f"out_{part}", rows, part, out.dtype)
        sources = [
            tile(tensor, var(head) if head else 0, 0 if single else row, 1 if single else rows, col, part)
            for (tensor, head), single in zip(reads, one_row, strict=True)
        ]
        # all operands of an element are in flight together: the last load waits for the earlier ones too
        loads = [Load(source, buffer, token="in") for source, buffer in zip(sources[:-1], buffers[:-1], strict=True)]
        compute = Compute(op, result, tuple(buffers), rows, part, params(row, col) if params else ())
        body += [
            *loads,
            Load(sources[-1], buffers[-1], overfetch=overfetch),
            *([Await("in")] if loads else []),
            *beyond(name, [compute], mix, rows * part),
            compute,
            Store(View(result), tile(out, var("q_head"), row, rows, col, part)),
        ]
    column, block, head = grid_indices(ceil_div(out.cols, width), ceil_div(out.rows, rows), heads)
    coords = {"q_head": head, "row0": block * rows, "col0": column * width}
    launches = min(k.launches, MOST_LAUNCHES)
    edges = np.linspace(0, len(head), launches + 1).astype(np.int64)
    return [
        Kernel(
            name if launches == 1 else f"{name}_{part}",
            (Role("warps0", body, k.threads // 32, mix.issue_interval_cycles),),
            {coord: values[low:high] for coord, values in coords.items()},
            (),
            threads=k.threads,
            registers_per_thread=k.registers_per_thread,
            compute_dtype=out.dtype if out.dtype != "fp32" else "bf16",
            coord_order="rows, head after head",
            ctas_each=ctas_each,
            launch_gap_cycles=CTA_LAUNCH_CYCLES,
            short_code=True,
        )
        for part, (low, high) in enumerate(pairwise(edges))
        if high > low
    ]
