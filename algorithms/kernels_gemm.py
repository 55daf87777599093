"""The batched matrix products of ``torch_eager`` as data: which cuBLAS kernel class, and how it tiles.

cuBLAS chooses by heuristics that are not public. On Hopper the table holds what it chose on an H200 (PyTorch 2.11,
CUDA 13.0, torch.profiler, 2026-11-29) for square problems of 1k to 16k at head dims 64, 128 and 256; elsewhere the
kernel class is public (its name) and the choice assumed, and ``kind`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.errors import InputError


@dataclass(frozen=True)
class GemmKernel:
    """C (rows x columns, row-major) = A B with ``tile_rows`` x ``tile_columns`` of C a CTA, walking K by ``tile_k``.

    ``consumer_warpgroups`` 0: no warp specialisation, all ``threads`` load with cp.async and compute.
    ``persistent``: one CTA an SM takes tiles in turn; a memset of the tile counter then precedes the kernel
    (``helper_memset``) where there are more tiles than CTAs. ``cluster_rows``/``cluster_columns``: CTAs of a cluster
    along C's rows and columns, which share A or B tiles by multicast. The epilogue goes through SMEM.
    """

    name: str
    tile_rows: int
    tile_columns: int
    tile_k: int
    stages: int
    threads: int
    consumer_warpgroups: int
    registers_per_thread: int
    smem_bytes: int
    ctas_per_sm: int
    cluster_rows: int
    cluster_columns: int
    persistent: bool
    helper_memset: bool
    instruction_path: str
    kind: str
    source: str


#: Products of attention by the shape of C: (queries x keys) or (sequence x head dim).
GEMM_ROLES = ("scores", "output", "grad_value", "grad_scores", "grad_query", "grad_key")

_HOPPER_SOURCE = "seen: PyTorch 2.11, cuBLAS of CUDA 13.0, H200, torch.profiler, 2026-11-29"
_AMPERE_SOURCE = "class: kernel names in public A100 traces (ampere_*_s16816gemm_*_ldg8_f2f_stages_*); choice assumed"
_BLACKWELL_SOURCE = (
    "class: kernel names in public B200 traces (nvjet_sm100_tst_128x256_64x6_2x1_2cta_*); choice assumed"
)


def _hopper(
    name: str, rows: int, columns: int, stages: int, smem: int, cluster: tuple[int, int], memset: bool = True
) -> GemmKernel:
    return GemmKernel(
        name, rows, columns, 64, stages, 384, 2, 168, smem, 1, cluster[0], cluster[1], True, memset, "wgmma",
        "measured", _HOPPER_SOURCE,
    )  # fmt: skip


def _multistage(name: str, rows: int, columns: int, k: int, stages: int, threads: int, regs: int, ctas: int, src: str):
    """A pre-Hopper kernel: every warp loads with cp.async and computes with mma.sync."""
    return GemmKernel(
        name, rows, columns, k, stages, threads, 0, regs, 2 * stages * k * (rows + columns), ctas, 1, 1, False, False,
        "mma.sync", "assumed", src,
    )  # fmt: skip


def _hopper_kernel(role: str, head_dim: int, queries: int) -> GemmKernel:
    scores = role in ("scores", "grad_scores")
    if queries <= 8 and scores:
        return _hopper("nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT", 8, 512, 3, 216_220, (1, 2))
    if queries <= 8:
        return _hopper("nvjet_sm90_tst_128x8_64x12_1x1_h_bz_NNT", 8, 128, 12, 225_652, (1, 1), memset=False)
    if scores:
        return _hopper("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", 128, 256, 4, 213_188, (2, 1))
    if head_dim <= 64:
        return _hopper("nvjet_sm90_tst_64x512_64x2_1x2_h_bz_coopB", 512, 64, 2, 163_972, (2, 1))
    cluster = (1, 2) if head_dim > 128 else (2, 1)
    return _hopper("nvjet_sm90_tst_128x256_64x4_bz_coopA", 256, 128, 4, 213_188, cluster)


def _unaligned_kernel(role: str) -> GemmKernel:
    """Rows whose bytes are no multiple of 16 cannot be loaded 16 bytes at a time: sm75-era kernels, on any GPU."""
    source = "seen on an H200 with 2047 keys: cutlass_75_tensorop_bf16_s1688gemm_*_align1"
    if role in ("scores", "grad_scores"):
        kernel = _multistage("cutlass_75_s1688gemm_256x128_align1", 128, 256, 32, 2, 256, 236, 1, source)
    else:
        kernel = _multistage("cutlass_75_s1688gemm_128x128_align1", 128, 128, 32, 2, 128, 252, 2, source)
    return kernel


def gemm_kernel(role: str, *, head_dim: int, queries: int, keys: int, instruction_path: str) -> GemmKernel:
    """The kernel for one batched product of 16-bit attention.

    ``role``: "scores" (Q K^T), "output" (P V), "grad_value" (P^T dO), "grad_scores" (dO V^T), "grad_query" (dS K),
    "grad_key" (dS^T Q). ``instruction_path``: the GPU's fastest, "mma.sync", "wgmma" or "tcgen05".
    InputError for an unknown role or path.
    """
    if role not in GEMM_ROLES:
        raise InputError(f"role {role!r} is unknown; expected one of {', '.join(GEMM_ROLES)}")
    if keys % 8 or head_dim % 8:
        return _unaligned_kernel(role)
    scores = role in ("scores", "grad_scores")
    if instruction_path == "wgmma":
        return _hopper_kernel(role, head_dim, queries)
    if instruction_path == "mma.sync":
        if scores:
            return _multistage("ampere_s16816gemm_256x128_stages_32x3", 128, 256, 32, 3, 256, 230, 1, _AMPERE_SOURCE)
        if head_dim <= 64:
            return _multistage("ampere_s16816gemm_128x64_stages_32x6", 128, 64, 32, 6, 128, 128, 2, _AMPERE_SOURCE)
        return _multistage("ampere_s16816gemm_128x128_stages_32x5", 128, 128, 32, 5, 128, 234, 2, _AMPERE_SOURCE)
    if instruction_path == "tcgen05":
        columns = 256 if scores else min(128, -(-head_dim // 64) * 64)
        stages = 6 if columns <= 128 else 4
        return GemmKernel(
            "nvjet_sm100_tst_2cta", 128, columns, 64, stages, 256, 1, 168, 2 * stages * 64 * (128 + columns), 1, 2,
            1, True, True, "tcgen05", "assumed", _BLACKWELL_SOURCE,
        )  # fmt: skip
    raise InputError(f"instruction_path {instruction_path!r} is unknown; expected mma.sync, wgmma or tcgen05")
