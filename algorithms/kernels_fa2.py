"""FlashAttention-2's forward kernels as data: the ordinary one, the split-KV one and its combine kernel.

``torch_flash`` and ``torch_flash_splitkv`` run PyTorch's vendored copy of them: the same tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.kernels_common import CombineKernel, ctas_per_sm, power_of_two_at_least, require_16_bit, round_head_dim
from simulator.errors import InputError


@dataclass(frozen=True)
class Fa2Tile:
    """One FA2 forward kernel. Warps split the query rows (``tile_m / num_warps`` each, in slices of 16).

    ``registers_per_thread``: PyTorch 2.11's build for sm90 uses 252 to 255, at the limit, and spills; 228 at 192.
    ``kv_stages`` 1 means: one K and one V buffer; V of a block is fetched behind its QK product, K of the next block
    behind softmax and PV.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    padded_head_dim: int
    smem_bytes: int
    registers_per_thread: int
    ctas_per_sm: int
    q_in_registers: bool
    share_qk_smem: bool
    instruction_path: str
    kv_stages: int
    grid_order: tuple[str, ...]
    source: str

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


#: flash-attention rounds up to these; 32-multiples between (160, 224) share the next kernel.
FA2_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
#: blockIdx.x is the fastest: row blocks ascending, then batch, then head.
FA2_FORWARD_GRID = ("row_block_ascending", "batch", "head")
#: With splits the batch axis makes room: row block, split, then batch-major heads.
FA2_SPLIT_GRID = ("row_block_ascending", "split", "head", "batch")

_FA2_LAUNCH = "flash-attention:csrc/flash_attn/src/flash_fwd_launch_template.h"

# (head dim, variant) -> tile_m, tile_n, warps
_FA2_FORWARD = {
    (32, "plain"): (128, 128, 4),
    (32, "dropout"): (128, 128, 4),
    (64, "plain"): (128, 128, 4),
    (64, "dropout"): (128, 64, 4),
    (96, "plain"): (128, 64, 4),
    (96, "dropout"): (128, 64, 4),
    (96, "sm8x_causal"): (64, 64, 4),
    (128, "plain"): (128, 64, 4),
    (128, "dropout"): (128, 32, 4),
    (128, "sm8x_full"): (128, 32, 4),
    (128, "sm8x_causal"): (64, 64, 4),
    (192, "plain"): (128, 64, 8),
    (192, "dropout"): (64, 64, 4),
    (256, "plain"): (64, 64, 4),
    (256, "large_tile"): (128, 64, 8),
}


def _fa2_tile(
    tile_m: int,
    tile_n: int,
    num_warps: int,
    head_dim: int,
    smem_bytes_per_sm: int,
    grid_order: tuple[str, ...],
    source: str,
) -> Fa2Tile:
    smem_bytes = 2 * head_dim * (tile_m + 2 * tile_n)
    registers = 228 if num_warps == 8 and head_dim == 192 else 255
    return Fa2Tile(
        tile_m=tile_m,
        tile_n=tile_n,
        num_warps=num_warps,
        padded_head_dim=head_dim,
        smem_bytes=smem_bytes,
        registers_per_thread=registers,
        ctas_per_sm=ctas_per_sm(
            threads=32 * num_warps,
            registers_per_thread=registers,
            smem_bytes=smem_bytes,
            smem_bytes_per_sm=smem_bytes_per_sm,
        ),
        q_in_registers=False,
        share_qk_smem=False,
        instruction_path="mma.sync",
        kv_stages=1,
        grid_order=grid_order,
        source=source,
    )


def fa2_forward_tile(
    head_dim: int,
    dtype: str = "bf16",
    causal: bool = False,
    dropout: bool = False,
    smem_bytes_per_cta_max: int = 166_912,
    smem_bytes_per_sm: int = 167_936,
    compute_capability: tuple[int, int] = (8, 0),
) -> Fa2Tile:
    """The kernel that ``flash_fwd_kernel`` (flash-attention 2, and PyTorch's vendored copy) launches.

    The two SMEM sizes (default: A100's 163 and 164 KiB) decide at head dim 256 only: the 128-row tile where it fits
    but two CTAs of the 64-row tile would not. sm86 and sm89 have tiles of their own at 96 and 128.
    InputError for fp8/fp32 or head_dim > 256. Source: flash_fwd_launch_template.h, kernel_traits.h.
    """
    require_16_bit(dtype, "FlashAttention-2")
    padded = round_head_dim(head_dim, FA2_HEAD_DIMS, "FlashAttention-2")
    small_sm8x = compute_capability[0] == 8 and compute_capability[1] > 0
    variant = "dropout" if dropout else "plain"
    if small_sm8x and padded == 96:
        variant = "sm8x_causal" if causal else "plain"
    elif small_sm8x and padded == 128 and not dropout:
        variant = "sm8x_causal" if causal else "sm8x_full"
    elif padded == 256:
        large_fits = smem_bytes_per_cta_max >= 2 * 256 * (128 + 2 * 64)
        two_small_fit = smem_bytes_per_sm >= 4 * 256 * (64 + 2 * 64)
        variant = "large_tile" if large_fits and not two_small_fit else "plain"
    tile_m, tile_n, warps = _FA2_FORWARD[padded, variant]
    source = f"{_FA2_LAUNCH} run_mha_fwd_hdim{padded}"
    return _fa2_tile(tile_m, tile_n, warps, padded, smem_bytes_per_sm, FA2_FORWARD_GRID, source)


def fa2_splitkv_tile(
    head_dim: int, dtype: str = "bf16", num_splits: int = 2, smem_bytes_per_sm: int = 167_936
) -> Fa2Tile:
    """``flash_fwd_splitkv_kernel``: 64 query rows, wide K/V blocks, 4 warps.

    With one split (forced: paged or appended KV) the newest package narrows ``tile_n`` to the unsplit kernel's.
    PyTorch and the package launch it only when ``num_splits > 1``: otherwise the ordinary forward kernel runs.
    """
    require_16_bit(dtype, "FlashAttention-2 split-KV")
    padded = round_head_dim(head_dim, FA2_HEAD_DIMS, "FlashAttention-2 split-KV")
    if num_splits > 1:
        tile_n = 256 if padded <= 64 else 128 if padded <= 128 else 64
        grid_order: tuple[str, ...] = FA2_SPLIT_GRID
    else:
        tile_n = 128 if padded <= 64 else 64
        grid_order = FA2_FORWARD_GRID
    source = f"{_FA2_LAUNCH} run_mha_fwd_splitkv_dispatch"
    return _fa2_tile(64, tile_n, 4, padded, smem_bytes_per_sm, grid_order, source)


def fa2_combine_kernel(head_dim: int, num_splits: int) -> CombineKernel:
    """``flash_fwd_splitkv_combine_kernel``. ``num_splits`` 2..128. The partial O has the padded head dim, in fp32."""
    if not 2 <= num_splits <= 128:
        raise InputError(f"num_splits {num_splits}: the FlashAttention-2 combine kernel takes 2 to 128")
    padded = round_head_dim(head_dim, FA2_HEAD_DIMS, "FlashAttention-2 combine")
    rows = 4 if padded % 128 == 0 else 8 if padded % 64 == 0 else 16
    lse_rows = max(2, power_of_two_at_least(num_splits))
    return CombineKernel(
        rows_per_cta=rows,
        columns_per_cta=padded,
        threads=128,
        bytes_per_load=16,
        splits_in_flight=1,
        lse_rows_padded=lse_rows,
        smem_bytes=4 * lse_rows * (rows + 1),
        partial_dtype="fp32",
        source=f"{_FA2_LAUNCH} run_flash_splitkv_fwd; flash_fwd_kernel.h combine_attn_seqk_parallel",
        # H200, mix_launches_random_run1.csv: 588 to 627 a warp with 2 splits, 644 with 5, 718 with 10, 832 with 18
        instructions=575,
        instructions_per_split=14,
    )
