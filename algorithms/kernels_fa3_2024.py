"""FlashAttention-3's forward kernels of July 2024 as data: those that the paper's figures timed.

Tiles and schedulers from flash-attention's ``hopper/`` at 74b0761f (2024-07-14; fp16, bf16) and 5018ac6a (2024-07-30;
e4m3): flash_fwd_launch_template.h, tile_scheduler.hpp, mainloop_fwd_sm90_tma_gmma_ws.hpp. Instructions are counted and
loops read in a build of ours (``simulator/measure/cuda/fa3_driver.cu``; mix_launches_fa3_2024_run1.csv).
"""

from __future__ import annotations

from dataclasses import replace

from algorithms.instruction_counts import InstructionMix
from algorithms.kernels_common import round_head_dim
from algorithms.kernels_fa3 import Fa3Tile, fa3_forward_tile, fa3_smem_bytes

NAME = "flash_attn_3_2024"
#: The e4m3 kernel as the paper timed it: "without persistent" scheduling, so a CTA for each tile.
GRID_NAME = "flash_attn_3_2024_grid"
NAMES = (NAME, GRID_NAME)
SOURCE = "flash-attention hopper/ of July 2024 (74b0761f; e4m3: 5018ac6a)"
GRID_SOURCE = "flash-attention hopper/ at 5018ac6a with its SingleTileScheduler (arXiv:2407.08608: e4m3 not persistent)"
HEAD_DIMS = (64, 128, 256)
_COUNTED_ON = "ncu, one H200, hopper/ of July 2024 built with ptxas 12.3, 2026-11-30 (mix_launches_fa3_2024_run1.csv)"


def _counted(issue: float, fma: float, alu: float, lsu: float, tensor: float, interval: float) -> InstructionMix:
    return InstructionMix(issue, fma, alu, 1.03, lsu, tensor, source=_COUNTED_ON, issue_interval_cycles=interval)


# (head dim, causal) at 4096 keys. The intervals as for the later builds: (stall counts of the loop without a mask + 30
# cycles until an exponential's result, of which the later build's loop of as many exponentials hides its share - 8 a
# exponential) / instructions.
_16_BIT = {
    (64, False): _counted(7.42, 2.88, 1.93, 0.15, 0.19, 1.88),
    (64, True): _counted(7.90, 2.93, 2.26, 0.25, 0.19, 1.97),
    (128, False): _counted(7.58, 3.06, 2.03, 0.08, 0.22, 1.66),
    (128, True): _counted(8.48, 3.35, 2.32, 0.15, 0.25, 1.80),
    (256, False): _counted(13.36, 5.92, 3.12, 0.12, 0.53, 1.77),
    (256, True): _counted(12.96, 5.69, 3.05, 0.17, 0.53, 1.88),
}
_E4M3 = {
    (128, False): _counted(7.24, 2.75, 2.47, 0.23, 0.09, 1.60),
    (128, True): _counted(8.43, 2.84, 3.48, 0.30, 0.09, 1.60),
    (256, False): _counted(10.59, 4.49, 3.20, 0.41, 0.19, 1.60),
    (256, True): _counted(11.49, 4.52, 3.91, 0.49, 0.19, 1.60),
}
#: (head dim, causal) of the 16-bit loops in which a third of softmax's instructions stands before the wait for PV; in
#: the others the row maximum alone does.
_EXPONENTIALS_BEFORE_PV = {(128, True), (256, False)}


def forward_tile(head_dim: int, dtype: str, causal: bool, row_blocks: int | None) -> Fa3Tile:
    """The kernel for ``head_dim`` (up to 256); a cluster of 2 CTAs shares K and V without a mask where ``row_blocks``
    is even."""
    d = round_head_dim(head_dim, HEAD_DIMS, NAME)
    eight_bit = dtype == "e4m3"
    like = fa3_forward_tile(d, dtype=dtype, causal=causal)
    if eight_bit:
        tile_m, tile_n, stages = {64: (192, 128, 4), 128: (128, 256, 2), 256: (128, 128, 2)}[d]
    else:
        tile_m, tile_n, stages = {64: (192, 128, 2), 128: (128, 128 if causal else 176, 2), 256: (128, 80, 2)}[d]
    shared = (eight_bit or d > 64) and not causal and row_blocks is not None and row_blocks % 2 == 0
    return replace(
        like,
        tile_m=tile_m,
        tile_n=tile_n,
        kv_stages=stages,
        mma_pv_is_rs=True,
        intra_wg_overlap=not eight_bit,
        exponentials_before_pv=(d, causal) in _EXPONENTIALS_BEFORE_PV,
        rescale_o_before_gemm=not eight_bit,
        scheduler_barrier=d <= 128 or eight_bit,
        cluster_m=2 if shared else 1,
        smem_bytes=fa3_smem_bytes(
            tile_m, tile_n, d, d, 1 if eight_bit else 2, stages, pv_in_registers=True, transpose_v=eight_bit
        ),
        source=SOURCE,
    )


def forward_mix(head_dim: int, dtype: str, causal: bool) -> InstructionMix:
    """Counted at head dims 64, 128 and 256; e4m3 at 128 and 256, whose 128 stands for 64."""
    d = round_head_dim(head_dim, HEAD_DIMS, NAME)
    return _E4M3[max(d, 128), causal] if dtype == "e4m3" else _16_BIT[d, causal]
