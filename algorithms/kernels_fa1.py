"""FlashAttention-1 as data: the paper's block sizes and the 1.x package's forward kernel (tag v1.0.9).

Both walk K/V blocks in the outer loop and query rows in the inner one, so O and its statistics go to HBM and back
once for every K/V block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from algorithms.kernels_common import require_16_bit, round_head_dim
from simulator.errors import InputError


@dataclass(frozen=True)
class Fa1PaperBlocks:
    """Algorithm 1, line 1: ``rows`` = Br, ``columns`` = Bc; one CTA for each (batch, head), blocks in sequence."""

    rows: int
    columns: int
    grid_order: tuple[str, ...] = ("batch", "head")
    source: str = "Dao et al. 2022 (arXiv:2205.14135), Algorithm 1"


def fa1_paper_blocks(sram_elements: int, head_dim: int) -> Fa1PaperBlocks:
    """Bc = ceil(M / 4d), Br = min(Bc, d), for an SRAM of M *elements* (as the paper counts). InputError if M < 4d."""
    if sram_elements < 4 * head_dim:
        raise InputError(f"sram_elements {sram_elements} holds no block of head_dim {head_dim}: needs {4 * head_dim}")
    columns = math.ceil(sram_elements / (4 * head_dim))
    return Fa1PaperBlocks(rows=min(columns, head_dim), columns=columns)


@dataclass(frozen=True)
class Fa1Tile:
    """The package's forward kernel: ``tile_m`` (16) query rows against ``tile_n`` keys held in registers.

    The 4 warps split the *keys*: each makes S and a partial O of all 16 rows for its quarter, and the partial O are
    summed through SMEM (``o_exchange_bytes`` written and read for each row step). K and V of a block are loaded once
    per CTA and kept in registers while the CTA walks its query rows; Q is double-buffered in SMEM.
    O accumulates in HBM as fp32 (``o_tmp``): written by every K/V block but a row's last, read by every one but the
    first; the last writes 16-bit O. The LSE goes the same way. With one K/V block nothing is re-read.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    padded_head_dim: int
    smem_bytes: int
    o_exchange_bytes: int
    registers_per_thread: int
    ctas_per_sm: int
    instruction_path: str
    o_accumulator_dtype: str
    grid_order: tuple[str, ...]
    source: str

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


FA1_HEAD_DIMS = (32, 64, 128)
#: blockIdx.x is the batch, then the head, then the slice of query rows: CTA z takes row steps z, z + splits, ...
FA1_GRID = ("batch", "head", "row_slice")


def fa1_smem_bytes(rows: int, keys: int, padded_head_dim: int, warps: int, *, looping: bool) -> int:
    """SMEM of one CTA: two buffers of Q, and K or (later) the warps' partial O with their reductions; ``looping`` over
    key blocks keeps statistics too."""
    exchange, reductions = rows * padded_head_dim * 4 * warps, rows * warps * 4 * 2
    kept = 4 * rows * 2 if looping else 0
    return 2 * rows * padded_head_dim * 2 + max(keys * padded_head_dim * 2, exchange + reductions) + kept


def fa1_forward_tile(head_dim: int, seqlen_k: int, dtype: str = "fp16") -> Fa1Tile:
    """The kernel that flash-attention 1.x launches. Keys are padded to a multiple of ``tile_n``.

    InputError beyond head dim 128 or for other than 16-bit dtypes. Two CTAs an SM: 128 threads at up to 255
    registers (K and V alone take 128), with little SMEM.
    """
    require_16_bit(dtype, "FlashAttention-1")
    d = round_head_dim(head_dim, FA1_HEAD_DIMS, "FlashAttention-1")
    tile_n = 128 if d == 128 or seqlen_k <= 128 else 256
    warps, rows = 4, 16
    smem = fa1_smem_bytes(rows, tile_n, d, warps, looping=seqlen_k > tile_n)
    return Fa1Tile(
        tile_m=rows,
        tile_n=tile_n,
        num_warps=warps,
        padded_head_dim=d,
        smem_bytes=smem,
        o_exchange_bytes=rows * d * 4 * warps,
        registers_per_thread=255,
        ctas_per_sm=2,
        instruction_path="mma.sync",
        o_accumulator_dtype="fp32",
        grid_order=FA1_GRID,
        source=f"flash-attention@v1.0.9:csrc/flash_attn/src/fmha_fwd_hdim{d}.cu, fmha_fprop_kernel_1xN.h, "
        "fmha/kernel_traits.h; registers and ctas_per_sm derived, not read",
    )


def fa1_num_splits(*, batch_heads: int, num_sms: int, ctas_per_sm: int, seqlen_q: int) -> int:
    """Slices of query rows (grid z): the fewest with over 95 % of the best wave efficiency, up to 30.

    The source means to cap them at the row steps, ceil(seqlen_q / 16), but its expression yields seqlen_q + 16: the
    cap is 30 for any seqlen_q >= 14. Source: fmha_fwd_launch_template.h num_splits_heuristic_fwd.
    """
    slots = np.float32(num_sms * ctas_per_sm)
    efficiency = []
    for splits in range(1, min(30, seqlen_q + 16) + 1):
        waves = np.float32(batch_heads * splits) / slots
        efficiency.append(float(waves / np.float32(math.ceil(waves))))
    best = max(efficiency)
    return next((i for i, value in enumerate(efficiency, start=1) if value > 0.95 * best), 1)


def fa1_first_row_step(*, key_block: int, tile: Fa1Tile, num_splits: int, row_slice: int, causal: bool) -> int:
    """The first row step that CTA ``row_slice`` takes against ``key_block``; it goes on in steps of ``num_splits``.

    Causal launches skip the row steps above the block's diagonal (top-left aligned), rounded so that a CTA keeps its
    rows across key blocks.
    """
    begin = key_block * tile.tile_n // tile.tile_m if causal else 0
    over = begin % num_splits
    base = begin - over if over <= row_slice else begin + num_splits - over
    return base + row_slice
