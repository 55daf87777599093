"""Which matrix-product kernel a linear layer gets: tile, stages and splits of the inner dimension.

cuBLAS chooses by heuristics that are not public. Here the candidates are kernel classes whose names are public, and
the choice is the one with the fewest tensor-core cycles once its tiles are laid out in whole waves on the GPU, plus
what summing its splits moves. Nothing is fitted to a measured product.
"""

from __future__ import annotations

from dataclasses import replace
from math import fsum

from algorithms.common import ceil_div, fastest_path
from algorithms.kernels_gemm import GemmKernel, gemm_kernel
from simulator.errors import UnsupportedError
from simulator.profile import Profile

_MMA = "class: kernel names in public A100 traces (ampere_*_s16816gemm_*_ldg8_f2f_stages_*, cutlass_80_tensorop_*)"
_WGMMA = "class: kernel names seen on an H200 (nvjet_sm90_tst_*); sizes by the shared memory that they fill"
_TCGEN05 = "class: kernel names in public B200 traces (nvjet_sm100_tst_*_2cta)"

#: Splits of the inner dimension that are tried, and the least inner length of one split.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEAST_INNER_PER_SPLIT = 256
#: Share of what overlaps with the longest of a kernel's parts that is not hidden behind it.
SHOWN = 0.1
#: What a second launch, which sums the splits, costs in any case (about 3 us).
SUM_LAUNCH_CYCLES = 4000.0


def _mma_sync(rows: int, columns: int, k: int, stages: int, threads: int, registers: int, ctas: int) -> GemmKernel:
    return GemmKernel(
        f"ampere_s16816gemm_{rows}x{columns}_stages_{k}x{stages}", rows, columns, k, stages, threads, 0, registers,
        2 * stages * k * (rows + columns), ctas, 1, 1, False, False, "mma.sync", "assumed", _MMA,
    )  # fmt: skip


def _wgmma(rows: int, columns: int, stages: int, cluster: tuple[int, int] = (1, 1)) -> GemmKernel:
    groups = 2 if rows >= 128 or columns >= 128 else 1
    return GemmKernel(
        f"nvjet_sm90_tst_{columns}x{rows}_64x{stages}", rows, columns, 64, stages, 128 * (groups + 1), groups, 168,
        2 * stages * 64 * (rows + columns) + 16 * 1024, 1, *cluster, True, True, "wgmma", "assumed", _WGMMA,
    )  # fmt: skip


def _tcgen05(rows: int, columns: int, stages: int) -> GemmKernel:
    return GemmKernel(
        f"nvjet_sm100_tst_{columns}x{rows}_64x{stages}_2cta", rows, columns, 64, stages, 256, 1, 168,
        2 * stages * 64 * (rows + columns), 1, 2, 1, True, True, "tcgen05", "assumed", _TCGEN05,
    )  # fmt: skip


#: Candidates by instruction path: larger tiles (less traffic) first, which win ties.
CANDIDATES: dict[str, tuple[GemmKernel, ...]] = {
    "mma_sync": (
        _mma_sync(256, 128, 64, 3, 256, 230, 1),
        _mma_sync(128, 128, 32, 4, 256, 128, 2),
        _mma_sync(128, 64, 32, 6, 128, 128, 2),
        _mma_sync(64, 64, 64, 5, 128, 96, 2),
        _mma_sync(16, 64, 64, 6, 128, 96, 2),
    ),
    "wgmma": (
        _wgmma(128, 256, 4, (2, 1)),
        _wgmma(128, 128, 6),
        _wgmma(64, 256, 4),
        _wgmma(64, 128, 8),
        _wgmma(16, 256, 6),
        _wgmma(32, 128, 10),
        _wgmma(16, 128, 11),
        _wgmma(8, 128, 12),
    ),
    "tcgen05": (_tcgen05(128, 256, 4), _tcgen05(128, 128, 6), _tcgen05(128, 64, 8)),
}


def choose_gemm(rows: int, columns: int, inner: int, batch: int, gpu: Profile) -> tuple[GemmKernel, int]:
    """The kernel for ``batch`` products ``[rows, inner] x [inner, columns]`` on ``gpu`` and its splits of ``inner``.

    Rows whose bytes are no multiple of 16 (a vocabulary of 50257) get the unaligned kernel class of PyTorch's own
    table. UnsupportedError when no candidate fits the GPU's shared memory.
    """
    if columns % 8 or inner % 8:
        return gemm_kernel("scores", head_dim=64, queries=128, keys=7, instruction_path="mma.sync"), 1
    path = fastest_path(gpu)
    best: tuple[float, GemmKernel, int] | None = None
    for kernel in CANDIDATES[path]:
        # flat tiles read each operand too often; they are for batches of few tokens
        if kernel.smem_bytes > gpu.smem_bytes_per_cta_max or kernel.tile_rows < min(128, rows // 2):
            continue
        for splits in SPLITS:
            if splits > 1 and inner // splits < LEAST_INNER_PER_SPLIT:
                break
            cost = _cost_cycles(kernel, splits, rows, columns, inner, batch, gpu)
            if best is None or cost < best[0]:
                best = (cost, kernel, splits)
    if best is None:
        raise UnsupportedError(f"{gpu.name}: no matrix-product kernel fits its {gpu.smem_bytes_per_cta_max} B of SMEM")
    _, kernel, splits = best
    if ceil_div(rows, kernel.tile_rows) % kernel.cluster_rows:
        # a cluster's last row would have no partner to share its loads with
        kernel = replace(kernel, cluster_rows=1)
    return kernel, splits


def _cost_cycles(
    kernel: GemmKernel, splits: int, rows: int, columns: int, inner: int, batch: int, gpu: Profile
) -> float:
    """Estimated cycles of a kernel, by which the choice is made (the engine gives the time)."""
    flop_per_cycle = max(gpu.tensor_flop_per_cycle_per_sm[kernel.instruction_path.replace(".", "_")].values())
    hbm_bytes_per_cycle = gpu.hbm_bandwidth_bytes_per_s / gpu.spec_clock_hz
    ctas = batch * ceil_div(rows, kernel.tile_rows) * ceil_div(columns, kernel.tile_columns) * splits
    slots = gpu.num_sms * kernel.ctas_per_sm
    depth = ceil_div(inner, splits)
    tensor = 2 * max(kernel.tile_rows, 16) * kernel.tile_columns * depth / flop_per_cycle
    smem = 2 * (kernel.tile_rows + kernel.tile_columns) * depth * _reuse(kernel) / 128
    # rows beyond the matrix are not loaded
    loaded = 2 * (min(kernel.tile_rows, rows) + min(kernel.tile_columns, columns)) * depth
    from_l2 = loaded / gpu.l2_to_sm_bandwidth_bytes_per_cycle_per_sm
    # a quarter of the fragment loads shows between products
    one = _overlapped(tensor + 0.25 * smem, smem, from_l2)
    compute = ceil_div(ctas, slots) * min(kernel.ctas_per_sm, ceil_div(ctas, gpu.num_sms)) * one
    # few CTAs do not fill the memory system: each has its ring of stages in flight
    in_flight = min(ctas, slots) * kernel.smem_bytes / (gpu.hbm_latency_s * gpu.spec_clock_hz)
    stream = batch * 2 * inner * (rows + columns) / min(hbm_bytes_per_cycle, in_flight)
    sums = batch * rows * columns * 8 * splits / hbm_bytes_per_cycle + SUM_LAUNCH_CYCLES if splits > 1 else 0.0
    return _overlapped(compute, stream) + sums


def _overlapped(*cycles: float) -> float:
    """The longest, and :data:`SHOWN` of the others: of two kernels bound alike, less work beside the bound wins."""
    longest = max(cycles)
    return longest + SHOWN * (fsum(cycles) - longest)


def _reuse(kernel: GemmKernel) -> float:
    """Times that an element of A or B is read from SMEM: by each warp across it (mma.sync), or once."""
    if kernel.instruction_path != "mma.sync":
        return 1.0
    warps = kernel.threads // 32
    across: float = warps**0.5
    return max(1.0, across)
