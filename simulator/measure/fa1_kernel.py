"""The Triton kernel of :mod:`simulator.measure.fa1_triton` (a module of its own: importing it needs Triton)."""

import triton
import triton.language as tl


@triton.jit
def fa1_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, acc_ptr, sum_ptr, max_ptr, seqlen_q, seqlen_k, scale_log2,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    q_ptr += head * seqlen_q * DIM
    out_ptr += head * seqlen_q * DIM
    acc_ptr += head * seqlen_q * DIM
    sum_ptr += head * seqlen_q
    max_ptr += head * seqlen_q
    k_ptr += head * seqlen_k * DIM
    v_ptr += head * seqlen_k * DIM
    dims = tl.arange(0, DIM)
    offset = seqlen_k - seqlen_q
    for start_k in range(0, seqlen_k, COLUMNS):  # algorithm 1, line 5: load K_j, V_j
        columns = start_k + tl.arange(0, COLUMNS)
        inside = columns < seqlen_k
        keys = tl.load(k_ptr + columns[None, :] * DIM + dims[:, None], mask=inside[None, :], other=0.0)
        values = tl.load(v_ptr + columns[:, None] * DIM + dims[None, :], mask=inside[:, None], other=0.0)
        first_row = 0
        finished_row = 0  # row blocks before this one meet no later K block: their output is final now
        if CAUSAL:
            first_row = tl.maximum(0, start_k - offset) // ROWS * ROWS
            finished_row = tl.maximum(0, start_k + COLUMNS - offset) // ROWS * ROWS
        if start_k + COLUMNS >= seqlen_k:
            finished_row = seqlen_q
        for start_q in range(first_row, seqlen_q, ROWS):  # line 7: load Q_i, O_i, l_i, m_i
            rows = start_q + tl.arange(0, ROWS)
            valid = rows < seqlen_q
            tile = rows[:, None] * DIM + dims[None, :]
            q = tl.load(q_ptr + tile, mask=valid[:, None], other=0.0)
            scores = tl.dot(q, keys) * scale_log2  # line 9
            hidden = ~inside[None, :]
            if CAUSAL:
                hidden = hidden | (columns[None, :] > rows[:, None] + offset)
            scores = tl.where(hidden, -float("inf"), scores)
            if start_k == 0:
                old_max = tl.full((ROWS,), -float("inf"), tl.float32)
                old_sum = tl.zeros((ROWS,), tl.float32)
                acc = tl.zeros((ROWS, DIM), tl.float32)
            else:
                old_max = tl.load(max_ptr + rows, mask=valid, other=-float("inf"))
                old_sum = tl.load(sum_ptr + rows, mask=valid, other=0.0)
                acc = tl.load(acc_ptr + tile, mask=valid[:, None], other=0.0)
            new_max = tl.maximum(old_max, tl.max(scores, 1))  # lines 10 and 11
            safe = tl.where(new_max == -float("inf"), 0.0, new_max)
            weights = tl.exp2(scores - safe[:, None])
            kept = old_sum * tl.exp2(old_max - safe)
            total = kept + tl.sum(weights, 1)
            divisor = tl.where(total == 0.0, 1.0, total)
            product = tl.dot(weights.to(values.dtype), values)
            acc = (acc * kept[:, None] + product) / divisor[:, None]  # line 12: O_i is normalised every time
            if start_q < finished_row:
                tl.store(out_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])
            else:
                tl.store(acc_ptr + tile, acc, mask=valid[:, None])
                tl.store(sum_ptr + rows, total, mask=valid)  # line 13
                tl.store(max_ptr + rows, new_max, mask=valid)
        tl.debug_barrier()  # the next K/V block reads what other threads of this block wrote
