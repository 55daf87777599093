"""FlashAttention-3's forward kernels on sm90 (flash-attention's ``hopper/``) as data, and their combine kernel."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.kernels_common import CombineKernel, element_bytes, power_of_two_at_least, round_head_dim
from simulator.errors import InputError


@dataclass(frozen=True)
class Fa3Tile:
    """One FA3 forward kernel on sm90: a producer warpgroup and ``num_mma_warpgroups`` consumers of 64 rows each.

    ``mma_pv_is_rs``: P stays in registers for PV (else it goes through SMEM). ``intra_wg_overlap``: QK of block j is
    issued before PV of block j-1, and softmax of j runs while PV of j-1 does. ``scheduler_barrier``: warpgroups take
    turns to issue their GEMM pair (ping-pong). ``rescale_o_before_gemm``: O is rescaled between QK's and PV's issue
    rather than after softmax. ``exponentials_before_pv``: the compiler put the wait for PV behind a third of softmax's
    instructions, else behind the row maximum alone (sass_fa3_loops.csv). ``producer_threads``: of the producer
    warpgroup's 128, how many do work.
    ``v_transposed_in_kernel``: fp8 only; the producer warpgroup rewrites V through LDSM.T/STSM.
    """

    tile_m: int
    tile_n: int
    padded_head_dim: int
    padded_head_dim_v: int
    mma_pv_is_rs: bool
    intra_wg_overlap: bool
    scheduler_barrier: bool
    rescale_o_before_gemm: bool
    exponentials_before_pv: bool
    kv_stages: int
    num_mma_warpgroups: int
    threads: int
    producer_threads: int
    producer_registers: int
    consumer_registers: int
    ctas_per_sm: int
    smem_bytes: int
    cluster_m: int
    kv_by_tma: bool
    q_by_tma: bool
    o_by_tma: bool
    v_transposed_in_kernel: bool
    instruction_path: str
    source: str


FA3_HEAD_DIMS = (64, 96, 128, 192, 256)
_FA3_TILES = "flash-attention:hopper/tile_size.h tile_size_fwd_sm90"
#: Barriers, the scheduler's word and alignment, as launched (ncu, H200): 3 KiB, and 1 KiB more with P in SMEM.
_FA3_OVERHEAD_BYTES = 3072
_FA3_P_OVERHEAD_BYTES = 1024


def _fa3_tile_16_bit(d: int, dv: int, causal: bool, local: bool, gather: bool) -> tuple[int, int, bool, bool]:
    """(tile_m, tile_n, P in registers, intra-warpgroup overlap) for fp16 and bf16."""
    if d <= 64:
        if dv == 512:
            return 64, 64, False, False
        if dv == 256:
            return 128, 96, True, False
        narrow = causal or local or gather
        return 192, 128 if narrow else 192, narrow, True
    if d <= 96:
        return 192, 128 if local or gather else 144, False, True
    if d <= 128:
        return 128, 128 if causal or local or gather else 176, True, True
    if d <= 192:
        return 128, 96 if local or gather else 128 if dv <= 128 else 112, True, True
    return 128, 64 if local else 80, True, True


def _fa3_tile_8_bit(d: int, local: bool, gather: bool, softcap: bool, v_colmajor: bool) -> tuple[int, int, bool, bool]:
    """As ``_fa3_tile_16_bit``, for e4m3."""
    if d <= 64:
        return 192, 160, True, True
    if d <= 96:
        return 192, 128, True, True
    if d <= 128:
        return 128, 160 if gather else 192 if v_colmajor or (softcap and local) else 224, True, True
    if d <= 192:
        return 128, 128 if (gather or softcap) and local else 160, True, True
    return 128, 64 if local else 128, True, not gather


def fa3_padded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The compiled (head dim, V head dim). V may differ for D in (128, 192] with Dv in (96, 128], and D <= 64 with
    Dv <= 512 (flash_api.cpp). InputError otherwise."""
    d = round_head_dim(head_dim, FA3_HEAD_DIMS, "FlashAttention-3")
    if head_dim_v <= d and round_head_dim(head_dim_v, FA3_HEAD_DIMS, "FlashAttention-3") == d:
        return d, d
    if d == 192 and 96 < head_dim_v <= 128:
        return d, 128
    if d == 64 and 64 < head_dim_v <= 512:
        return d, 256 if head_dim_v <= 256 else 512
    raise InputError(
        f"head_dim_v {head_dim_v} with head_dim {head_dim}: FlashAttention-3 takes equal ones, "
        "192 with 128, or up to 64 with up to 512"
    )


def fa3_smem_bytes(
    tile_m: int,
    tile_n: int,
    padded_head_dim: int,
    padded_head_dim_v: int,
    bytes_each: int,
    stages: int,
    *,
    pv_in_registers: bool,
    transpose_v: bool = False,
    o_in_smem: bool = True,
) -> int:
    """SMEM of one CTA: Q, rings of K and V (O reuses V's), V transposed, P, barriers (flash_fwd_kernel_sm90.h)."""
    v_bytes = stages * tile_n * padded_head_dim_v * bytes_each
    o_bytes = 2 * tile_m * padded_head_dim_v if o_in_smem else 0
    return (
        max(v_bytes, o_bytes)
        + (v_bytes if transpose_v else 0)
        + tile_m * padded_head_dim * bytes_each
        + stages * tile_n * padded_head_dim * bytes_each
        + (0 if pv_in_registers else tile_m * tile_n * bytes_each + _FA3_P_OVERHEAD_BYTES)
        + (4 * tile_m * stages if padded_head_dim_v > 256 else 0)
        + _FA3_OVERHEAD_BYTES
    )


def fa3_forward_tile(
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    causal: bool = False,
    local: bool = False,
    softcap: bool = False,
    paged_gather: bool = False,
    varlen: bool = False,
    split: bool = False,
    pack_gqa: bool = False,
    row_blocks: int | None = None,
    v_colmajor: bool = False,
) -> Fa3Tile:
    """The kernel that ``flash_attn_3`` (hopper/) launches on sm90.

    ``paged_gather``: paged KV fetched row by row with cp.async instead of TMA (see ``heuristics.fa3_paged_by_tma``).
    ``varlen``: any per-sequence lengths are given; ``flash_attn_with_kvcache`` with ``cache_seqlens`` counts.
    ``row_blocks``: query blocks of one head, ``ceil(seqlen_q [x group if packed] / tile_m)``; a cluster of 2 CTAs
    shares K/V by multicast only where it is even (None: no cluster). Splits and gathers imply ``pack_gqa``.
    InputError: causal together with local, unsupported dtype or head dims.
    """
    if causal and local:
        raise InputError("causal and local: a causal window is local only; choose one")
    bytes_each = element_bytes(dtype)
    if bytes_each > 2:
        raise InputError(f"dtype {dtype!r}: FlashAttention-3 takes fp16, bf16 or e4m3")
    d, dv = fa3_padded_head_dims(head_dim, head_dim if head_dim_v is None else head_dim_v)
    if bytes_each == 2:
        tile_m, tile_n, pv_rs, overlap = _fa3_tile_16_bit(d, dv, causal, local, paged_gather)
    else:
        tile_m, tile_n, pv_rs, overlap = _fa3_tile_8_bit(d, local, paged_gather, softcap, v_colmajor)
    packed = pack_gqa or split or paged_gather
    large_v = dv > 256
    warpgroups = dv // 256 if large_v else tile_m // 64
    transpose_v = bytes_each == 1 and not v_colmajor
    by_tma = not paged_gather
    cluster_allowed = (d >= 128 if bytes_each == 2 else d == 192) and not (
        causal or local or split or paged_gather or varlen
    )
    cluster_m = 2 if cluster_allowed and row_blocks is not None and row_blocks % 2 == 0 else 1
    stages = 2
    smem = fa3_smem_bytes(
        tile_m,
        tile_n,
        d,
        dv,
        bytes_each,
        stages,
        pv_in_registers=pv_rs,
        transpose_v=transpose_v,
        o_in_smem=not split or varlen,
    )
    overlap_turns = warpgroups >= 2 and (d <= 128 if bytes_each == 2 else d >= 128)
    turns = overlap_turns if overlap else warpgroups == 2
    return Fa3Tile(
        tile_m=tile_m,
        tile_n=tile_n,
        padded_head_dim=d,
        padded_head_dim_v=dv,
        mma_pv_is_rs=pv_rs,
        intra_wg_overlap=overlap,
        scheduler_barrier=turns and not large_v,
        exponentials_before_pv=d > 64,
        rescale_o_before_gemm=d > 128 and (bytes_each == 2 or v_colmajor) and overlap,
        kv_stages=stages,
        num_mma_warpgroups=warpgroups,
        threads=128 * (1 + warpgroups),
        producer_threads=32 if by_tma and not packed and not transpose_v else 128,
        producer_registers=56 if warpgroups == 1 else (24 if by_tma else 40) if warpgroups == 2 else 32,
        consumer_registers=256 if warpgroups == 1 else (240 if by_tma else 232) if warpgroups == 2 else 160,
        ctas_per_sm=1,
        smem_bytes=smem,
        cluster_m=cluster_m,
        kv_by_tma=by_tma,
        q_by_tma=not packed,
        o_by_tma=not (varlen or split or packed),
        v_transposed_in_kernel=transpose_v,
        instruction_path="wgmma",
        source=f"{_FA3_TILES}; flash_fwd_launch_template.h; flash_fwd_kernel_sm90.h; mainloop_fwd_sm90_tma_gmma_ws.hpp",
    )


def fa3_combine_kernel(head_dim_v: int, num_splits: int) -> CombineKernel:
    """FA3's combine kernel: 256 threads, 4-stage cp.async ring over the splits. ``num_splits`` 2..256.

    Head dims above 64 are cut into slices of 128 columns, one CTA each (192 pays for two).
    """
    if not 2 <= num_splits <= 256:
        raise InputError(f"num_splits {num_splits}: the FlashAttention-3 combine kernel takes 2 to 256")
    columns = 64 if head_dim_v <= 64 else 128
    rows = 16 if columns == 64 else 8
    lse_rows = max(power_of_two_at_least(num_splits), 16 if rows == 16 else 32)
    stages = 4
    return CombineKernel(
        rows_per_cta=rows,
        columns_per_cta=columns,
        threads=256,
        bytes_per_load=16,
        splits_in_flight=stages,
        lse_rows_padded=lse_rows,
        smem_bytes=sum(-(-part // 128) * 128 for part in (4 * lse_rows * rows, 4 * rows, 4 * stages * rows * columns)),
        partial_dtype="fp32",
        source="flash-attention:hopper/flash_fwd_combine_launch_template.h, flash_fwd_combine_kernel.h",
    )
