"""Backward kernels as data: FlashAttention-2's (mma.sync) and the CuTe DSL Hopper one (``flash_attn_4_sm90``).

Both give one K/V block to a CTA, walk the query blocks and add dQ in fp32 to global memory; S and P are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.kernels_common import require_16_bit, round_head_dim
from algorithms.kernels_fa2 import FA2_HEAD_DIMS
from simulator.errors import InputError


@dataclass(frozen=True)
class HelperKernel:
    """A memory-bound kernel beside the main one. ``reads``/``writes``: (tensor, dtype) each touched once, whole.

    ``rows_per_cta`` rows of one head a CTA; ``per``: whose rows ("queries" or "keys"), for ``heads`` ("query"/"kv").
    """

    name: str
    rows_per_cta: int
    threads: int
    per: str
    heads: str
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]
    before_main: bool
    source: str


@dataclass(frozen=True)
class BackwardTile:
    """One backward kernel: a CTA owns ``tile_n`` keys and walks blocks of ``tile_m`` queries.

    ``walk``: "descending" or "ascending" query blocks. ``dq_by``: "atomic_add" (each thread its fp32 elements,
    128-byte coalesced) or "bulk_reduce" (a warp reduces the tile from SMEM by TMA). ``dkv_accumulate_fp32``: dK and
    dV are added in fp32 too (GQA). ``expand_kv_gradients``: GQA writes dK/dV of every query head, reduced afterwards.
    ``q_stages``/``do_stages``/``pds_stages``: SMEM buffers. ``p_in_registers``: P and dS feed dV and dK from
    registers; ``v_in_registers``: V stays in registers for dP. ``dq_warpgroups``: how many make dQ.
    """

    tile_m: int
    tile_n: int
    padded_head_dim: int
    threads: int
    num_mma_warpgroups: int
    registers_per_thread: int
    producer_registers: int
    smem_bytes: int
    ctas_per_sm: int
    q_stages: int
    do_stages: int
    pds_stages: int
    p_in_registers: bool
    v_in_registers: bool
    dq_warpgroups: int
    dq_by: str
    dkv_accumulate_fp32: bool
    expand_kv_gradients: bool
    walk: str
    grid_order: tuple[str, ...]
    instruction_path: str
    helpers: tuple[HelperKernel, ...]
    source: str


_FA2_BWD = "flash-attention:csrc/flash_attn/src/flash_bwd_launch_template.h"

# head dim -> rows of (smem per CTA at least, tile_m, tile_n, V in registers, double-buffered Q), first match wins
_FA2_BACKWARD = {
    32: ((2 * (5 * 128 * 32 + 2 * 128 * 128), 128, 128, True, True), (0, 128, 128, True, True)),
    64: ((144 * 1024, 128, 128, False, True), (0, 64, 128, True, True)),
    96: ((0, 64, 128, True, True),),
    128: ((144 * 1024, 64, 128, False, True), (0, 64, 64, True, True)),
    192: ((136 * 1024, 64, 64, False, True), (0, 64, 64, True, False)),
    256: ((176 * 1024, 64, 64, False, True), (144 * 1024, 64, 64, False, False), (0, 64, 32, True, False)),
}


def _fa2_helpers(tile_m: int, threads: int, gqa: bool, head_dim: int) -> tuple[HelperKernel, ...]:
    pre = HelperKernel(
        "flash_bwd_dot_do_o", tile_m, threads, "queries", "query", (("dO", "io"), ("O", "io")),
        (("dPsum", "fp32"), ("dQaccum", "fp32")), True, f"{_FA2_BWD}; flash_bwd_preprocess_kernel.h",
    )  # fmt: skip
    post = HelperKernel(
        "flash_bwd_convert_dq", tile_m, threads, "queries", "query", (("dQaccum", "fp32"),), (("dQ", "io"),), False,
        f"{_FA2_BWD}; flash_bwd_preprocess_kernel.h",
    )  # fmt: skip
    if not gqa:
        return pre, post
    seen = (
        "pytorch flash_api.cpp mha_bwd: dk, dv of every query head, summed; seen as two reduce_kernel launches of 512 "
        "outputs a CTA (launches_random_run1.csv, head dims 64, 128 and 256)"
    )
    rows = max(1, round(512 / head_dim))
    reduce = tuple(
        HelperKernel(f"sum_{g}", rows, 128, "keys", "kv", ((f"{g}_expanded", "io"),), ((g, "io"),), False, seen)
        for g in ("dK", "dV")
    )
    return (pre, post, *reduce)


def fa2_backward_tile(
    head_dim: int, dtype: str = "bf16", dropout: bool = False, smem_bytes_per_cta_max: int = 166_912, gqa: bool = False
) -> BackwardTile:
    """FA2's ``flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel``: one CTA for each key block, batch and query head.

    8 warps; dQ is added with fp32 atomics to a buffer that the first helper zeroes while it computes rowsum(dO*O).
    Non-deterministic form. InputError: head dim 256 with dropout on a GPU with under 144 KiB (no kernel exists).
    """
    require_16_bit(dtype, "FlashAttention-2 backward")
    d = round_head_dim(head_dim, FA2_HEAD_DIMS, "FlashAttention-2 backward")
    need, tile_m, tile_n, v_regs, double = next(row for row in _FA2_BACKWARD[d] if smem_bytes_per_cta_max >= row[0])
    if d == 256 and dropout and need == 0:
        raise InputError(f"head_dim {head_dim} with dropout: FlashAttention-2 has no backward for this little SMEM")
    if dropout and ((d == 32 and need > 0) or (d == 96 and smem_bytes_per_cta_max >= 116 * 1024)):
        v_regs = False
    q_do = tile_m * d * 2 * (3 if double else 2)
    kv, pds = 2 * tile_n * d * 2, tile_m * tile_n * 2
    smem = q_do + (max(kv, kv // 2 + 2 * pds) if v_regs else kv + 2 * pds)
    return BackwardTile(
        tile_m=tile_m,
        tile_n=tile_n,
        padded_head_dim=d,
        threads=256,
        num_mma_warpgroups=0,
        registers_per_thread=255,
        producer_registers=0,
        smem_bytes=smem,
        ctas_per_sm=1,
        q_stages=2 if double else 1,
        do_stages=1,
        pds_stages=1,
        p_in_registers=False,
        v_in_registers=v_regs,
        dq_warpgroups=0,
        dq_by="atomic_add",
        dkv_accumulate_fp32=False,
        expand_kv_gradients=gqa,
        walk="descending",
        grid_order=("key_block_ascending", "batch", "query_head"),
        instruction_path="mma.sync",
        helpers=_fa2_helpers(tile_m, 256, gqa, head_dim),
        source=f"{_FA2_BWD} run_mha_bwd_hdim{d}; kernel_traits.h; flash_bwd_kernel.h",
    )


_CUTE = "flash-attn-4 4.0.0b36: flash_attn/cute/interface.py _tile_size_bwd_sm90; flash_bwd_sm90.py"


def _cute_helpers(tile_m: int, tile_n: int, dq_threads: int, gqa: bool) -> tuple[HelperKernel, ...]:
    pre = HelperKernel(
        "bwd_preprocess", tile_m, 256, "queries", "query", (("O", "io"), ("dO", "io"), ("LSE", "fp32")),
        (("dPsum", "fp32"), ("LSE_log2", "fp32"), ("dQaccum", "fp32")), True,
        "flash-attention:flash_attn/cute/flash_bwd_preprocess.py",
    )  # fmt: skip
    post_source = "flash-attention:flash_attn/cute/flash_bwd_postprocess.py"
    post = HelperKernel(
        "bwd_postprocess_dq", tile_m, dq_threads, "queries", "query", (("dQaccum", "fp32"),), (("dQ", "io"),), False,
        post_source,
    )  # fmt: skip
    if not gqa:
        return pre, post
    fills = tuple(
        HelperKernel(f"fill_{g}accum", tile_n, 128, "keys", "kv", (), ((f"{g}accum", "fp32"),), True, "torch.zeros")
        for g in ("dK", "dV")
    )
    posts = tuple(
        HelperKernel(
            f"bwd_postprocess_{g}",
            tile_n,
            256,
            "keys",
            "kv",
            ((f"{g}accum", "fp32"),),
            ((g, "io"),),
            False,
            post_source,
        )
        for g in ("dK", "dV")
    )
    return (*fills, pre, post, *posts)


def fa3_backward_smem_bytes(
    tile_m: int, tile_n: int, padded_head_dim: int, q_stages: int, do_stages: int, pds_stages: int, p_in_registers: bool
) -> int:
    """SMEM of one CTA: Q and dO, K and V, dS (and P), dQ in fp32, LSE and D, barriers (flash_bwd_sm90.py)."""
    buffers = q_stages + do_stages
    pds_bytes = tile_m * tile_n * 2 * pds_stages
    stats = 4 * -(-tile_m // 64) * 64 * buffers
    rows = 2 * padded_head_dim * (tile_m * buffers + 2 * tile_n)
    return rows + pds_bytes * (1 if p_in_registers else 2) + 4 * tile_m * padded_head_dim + stats + 16 * buffers


def fa3_backward_tile(
    head_dim: int, dtype: str = "bf16", causal: bool = False, local: bool = False, gqa: bool = False
) -> BackwardTile:
    """The CuTe DSL Hopper backward (``flash_attn_4_sm90``), equal head dims of Q and V: a producer warpgroup (a TMA
    load warp, a warp that reduces dQ from SMEM into global fp32) and two MMA warpgroups. One tile a CTA."""
    require_16_bit(dtype, "the CuTe Hopper backward")
    if not 8 <= head_dim <= 256 or head_dim % 8:
        raise InputError(f"head_dim {head_dim}: the CuTe Hopper backward takes multiples of 8 up to 256")
    # dK and dV held transposed put the head dim on wgmma's 64 rows
    multiple = 16 if head_dim <= 128 else 64
    d = -(-head_dim // multiple) * multiple
    if d <= 64:
        m, n, q, do, pds, rs, dq_wgs = 128, 128, 2, 2, 2, True, 2
    elif d <= 96:
        m, n, q, do, pds, rs, dq_wgs = 64, 128, 2, 2, 2, True, 1
    elif d <= 128:
        m, n, q, do, pds, rs, dq_wgs = 64 if causal or local else 80, 128, 2, 2, 2, True, 2
    elif d <= 192:
        m, n, q, do, pds, rs, dq_wgs = 64, 96, 2, 1, 1, False, 2
    else:
        m, n, q, do, pds, rs, dq_wgs = 64, 48, 2, 1, 1, False, 2
    smem = fa3_backward_smem_bytes(m, n, d, q, do, pds, rs)
    return BackwardTile(
        tile_m=m,
        tile_n=n,
        padded_head_dim=d,
        threads=384,
        num_mma_warpgroups=2,
        registers_per_thread=240,
        producer_registers=24,
        smem_bytes=smem,
        ctas_per_sm=1,
        q_stages=q,
        do_stages=do,
        pds_stages=pds,
        p_in_registers=rs,
        v_in_registers=False,
        dq_warpgroups=dq_wgs,
        dq_by="bulk_reduce",
        dkv_accumulate_fp32=gqa,
        expand_kv_gradients=False,
        walk="ascending",
        grid_order=("key_block_ascending", "query_head", "batch"),
        instruction_path="wgmma",
        helpers=_cute_helpers(m, n, 128 if dq_wgs == 1 else 256, gqa),
        source=_CUTE,
    )


def backward_row_blocks(
    *,
    key_block: int,
    tile_m: int,
    tile_n: int,
    seqlen_q: int,
    seqlen_k: int,
    sides: tuple[int, int] = (-1, -1),
) -> range:
    """The query blocks that a key block's CTA visits (bottom-right diagonal); walk it in the tile's ``walk`` order.

    ``sides``: keys that a query sees left and right of its diagonal, -1 for all (causal: ``(-1, 0)``).
    Source: flash_bwd_kernel.h m_block_min, m_block_max; flash_attn/cute/block_info.py get_m_block_min_max.
    """
    left, right = sides
    stop, shift = -(-seqlen_q // tile_m), seqlen_q - seqlen_k
    start = max(0, (key_block * tile_n + shift - right) // tile_m) if right >= 0 else 0
    if left >= 0:
        stop = max(0, min(stop, -(-((key_block + 1) * tile_n + shift + left) // tile_m)))
    return range(min(start, stop), stop)
