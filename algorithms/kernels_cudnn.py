"""cuDNN's Hopper attention kernels as data: closed source, so what was read off its launches on one H200.

cuDNN 9.19 (2026-11-29): kernel names (``..._flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1``,
``..._flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1``), 132 CTAs of 384 threads with 168 registers, SMEM, and counted
instructions. What they do not show (buffers, order of tiles, overlap) is taken to be FlashAttention-3's.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms.instruction_counts import InstructionMix
from algorithms.kernels_backward import BackwardTile, fa3_backward_tile
from algorithms.kernels_fa3 import Fa3Tile, fa3_forward_tile

NAME = "cudnn_sm90"
ASSUMPTION = (
    "cudnn_sm90: closed source; tiles, threads, SMEM and instructions as its launches on an H200 show them; assumed to "
    "follow FlashAttention-3's schedule, backward flash_attn_4_sm90's, with the same helper kernels"
)
_COUNTED_ON = "ncu, one H200, cuDNN 9.19, 2026-11-29"
_SMEM_FORWARD = {64: 134_144, 128: 232_448}
_SMEM_BACKWARD = {64: 152_576, 128: 216_064}
#: From one instruction of a warp to the next beside exponentials: not counted, as in FA3's 16-bit loops (1.67 to 1.79).
_INTERVAL = 1.7


def _forward(issue: float, fma: float, alu: float, xu: float, lsu: float) -> InstructionMix:
    return InstructionMix(issue, fma, alu, xu, lsu, source=_COUNTED_ON, issue_interval_cycles=_INTERVAL)


# (head dim, causal): instructions of one lane per score element of the padded tiles
_FORWARD = {
    (64, False): _forward(8.34, 3.78, 2.24, 1.03, 0.08),
    (64, True): _forward(8.58, 3.90, 2.21, 1.04, 0.09),
    (128, False): _forward(9.41, 4.34, 2.47, 1.03, 0.08),
    (128, True): _forward(9.84, 4.59, 2.48, 1.04, 0.09),
}
_BACKWARD = {
    (64, False): InstructionMix(18.44, 8.45, 5.49, 1.00, 0.92, source=_COUNTED_ON),
    (64, True): InstructionMix(18.46, 6.87, 5.73, 1.00, 1.01, source=_COUNTED_ON),
    (128, False): InstructionMix(22.43, 10.30, 7.02, 1.00, 1.15, source=_COUNTED_ON),
    (128, True): InstructionMix(21.43, 8.31, 6.45, 1.00, 1.17, source=_COUNTED_ON),
}


def _counted_head_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


def cudnn_forward_tile(head_dim: int, dtype: str = "bf16", causal: bool = False) -> Fa3Tile:
    """128 queries (two warpgroups of 64) against 128 keys in three buffers, which its SMEM holds beside Q; no cluster.
    Head dims up to 128."""
    d = _counted_head_dim(head_dim)
    tile = fa3_forward_tile(d, dtype=dtype, causal=causal)
    # FA3's kernel for head dim 128 and a mask has this tile and these threads
    like = fa3_forward_tile(128, dtype=dtype, causal=True)
    return replace(
        like,
        padded_head_dim=tile.padded_head_dim,
        padded_head_dim_v=tile.padded_head_dim_v,
        kv_stages=3,
        exponentials_before_pv=tile.exponentials_before_pv,
        smem_bytes=_SMEM_FORWARD[d],
        source=_COUNTED_ON,
    )


def cudnn_forward_mix(head_dim: int, causal: bool) -> InstructionMix:
    """Counted at head dims 64 and 128."""
    return _FORWARD[_counted_head_dim(head_dim), causal]


def cudnn_backward_tile(head_dim: int, dtype: str = "bf16", gqa: bool = False) -> BackwardTile:
    """64 queries against 128 keys at both head dims: the CuTe kernel's tile for 128 and a mask. Head dims up to 128."""
    d = _counted_head_dim(head_dim)
    like = fa3_backward_tile(128, dtype, True, gqa=gqa)
    return replace(like, padded_head_dim=d, smem_bytes=_SMEM_BACKWARD[d], source=_COUNTED_ON)


def cudnn_backward_mix(head_dim: int, causal: bool) -> InstructionMix:
    """Counted at head dims 64 and 128."""
    return _BACKWARD[_counted_head_dim(head_dim), causal]
