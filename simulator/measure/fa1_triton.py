"""FlashAttention-1's forward schedule, as its paper states it (Dao et al., 2205.14135, algorithm 1), as a Triton
kernel.

One program per (batch, head). The outer loop takes a block of K and V; the inner loop takes every block of Q and, with
it, reads O, l and m from HBM, updates them and writes them back. O is kept in float32 between outer iterations, as the
1.x package keeps it, and is written once in the input's dtype by the last one. Tiles are those of the 1.x package: 16
query rows, 256 keys (head dim 64) or 128 keys (head dim 128), 4 warps.
"""

from __future__ import annotations

import math
from typing import Any

BLOCK_ROWS = 16
BLOCK_COLUMNS = {64: 256, 128: 128}
WARPS = 4

_compiled = None


def _kernel() -> Any:
    global _compiled
    if _compiled is None:
        from simulator.measure.fa1_kernel import fa1_forward

        _compiled = fa1_forward
    return _compiled


def allocate(q: Any) -> Any:
    """Output and the float32 accumulator and statistics that travel through HBM, for q of (heads, seqlen, d)."""
    import torch

    heads, seqlen, dim = q.shape
    return (
        torch.empty_like(q),
        torch.empty(heads, seqlen, dim, device=q.device, dtype=torch.float32),
        torch.empty(2, heads, seqlen, device=q.device, dtype=torch.float32),
    )


def forward(q: Any, k: Any, v: Any, causal: bool, scale: float, workspace: Any) -> Any:
    """Attention of (heads, seqlen, d) tensors; ``workspace`` from :func:`allocate`. Returns the output."""
    out, accumulator, statistics = workspace
    heads, seqlen_q, dim = q.shape
    _kernel()[(heads,)](
        q,
        k,
        v,
        out,
        accumulator,
        statistics[0],
        statistics[1],
        seqlen_q,
        k.shape[1],
        scale * math.log2(math.e),
        CAUSAL=causal,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS[dim],
        DIM=dim,
        num_warps=WARPS,
        num_stages=2,
    )
    return out


def schedule_in_numpy(q: Any, k: Any, v: Any, causal: bool, scale: float, rows: int, columns: int) -> Any:
    """The same loops in NumPy for one head: q (n, d), k and v (m, d). Returns (output, bytes moved between HBM and the
    SM).

    The bytes count 16-bit Q, K, V and final O, and 32-bit O, l and m in between: what the kernel asks for.
    """
    import numpy as np

    seqlen_q, dim = q.shape
    seqlen_k = k.shape[0]
    out = np.zeros((seqlen_q, dim))
    row_sum, row_max = np.zeros(seqlen_q), np.full(seqlen_q, -np.inf)
    offset = seqlen_k - seqlen_q
    moved = 0
    for start_k in range(0, seqlen_k, columns):
        keys, values = k[start_k : start_k + columns], v[start_k : start_k + columns]
        moved += 2 * 2 * keys.size
        first_row = max(0, start_k - offset) // rows * rows if causal else 0
        finished_row = max(0, start_k + columns - offset) // rows * rows if causal else 0
        if start_k + columns >= seqlen_k:
            finished_row = seqlen_q
        for start_q in range(first_row, seqlen_q, rows):
            block = slice(start_q, min(start_q + rows, seqlen_q))
            count = block.stop - block.start
            moved += 2 * count * dim + (0 if start_k == 0 else count * (4 * dim + 8))
            scores = q[block] @ keys.T * scale
            if causal:
                row = np.arange(block.start, block.stop)[:, None] + offset
                scores = np.where(np.arange(start_k, start_k + len(keys))[None] <= row, scores, -np.inf)
            new_max = np.maximum(row_max[block], scores.max(1))
            safe = np.where(np.isinf(new_max), 0.0, new_max)
            weights = np.exp(scores - safe[:, None])
            old = np.exp(row_max[block] - safe)
            total = old * row_sum[block] + weights.sum(1)
            kept = old * row_sum[block]
            out[block] = (kept[:, None] * out[block] + weights @ values) / np.where(total == 0, 1, total)[:, None]
            row_sum[block], row_max[block] = total, new_max
            moved += count * (2 * dim if start_q < finished_row else 4 * dim + 8)
    return out, moved
