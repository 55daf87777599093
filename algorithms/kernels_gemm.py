"""The batched matrix products of ``torch_eager`` as data: which cuBLAS kernel class, and how it tiles.

cuBLAS chooses by heuristics that are not public. On Hopper the table holds what it chose on an H200 (PyTorch 2.11,
CUDA 13.0, torch.profiler, 2026-11-29) for square problems of 1k to 16k at head dims 64, 128 and 256; elsewhere the
kernel class is public (its name) and the choice assumed, and ``kind`` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from algorithms.common import ceil_div
from simulator.errors import InputError
from simulator.problem import AttentionProblem


@dataclass(frozen=True)
class NarrowAccess:
    """What a kernel pays that moves A, B and C by 2 or 4 bytes a thread, counted: cycles of the L1 and SMEM port
    (``wavefronts``) and instructions (``lanes``, 32 a warp's) per element of A and B loaded and of C written, beyond
    what every product's tiles cost that port."""

    load_wavefronts: float
    load_lanes: float
    store_wavefronts: float
    store_lanes: float
    issue_interval_cycles: float


@dataclass(frozen=True)
class GemmKernel:
    """C (rows x columns, row-major) = A B with ``tile_rows`` x ``tile_columns`` of C a CTA, walking K by ``tile_k``.

    ``consumer_warpgroups`` 0: no warp specialisation, all ``threads`` load with cp.async and compute.
    ``persistent``: one CTA an SM takes tiles in turn; a memset of the tile counter then precedes the kernel
    (``helper_memset``) where there are more tiles than CTAs. ``cluster_rows``/``cluster_columns``: CTAs of a cluster
    along C's rows and columns, which share A or B tiles by multicast. ``splits``: CTAs that share a C tile, each for
    a part of K; a second kernel adds their fp32 results. The epilogue goes through SMEM.
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
    narrow: NarrowAccess | None = None
    splits: int = 1


#: Share of the GPU's SMs that a tile of unaligned products gives a CTA each, or a smaller one is taken; multiply-adds
#: of a single matrix from which its tiles are large (seen of 500 x 5001 x 128, not of 2047 x 2047 x 64).
_FILLED, _LARGE_SINGLE = 0.84, 3e8
#: By ncu on an H200 (CUTLASS kernels of cuBLAS 13.0 at 250 to 3003 queries and keys, head dims 64 and 128): wavefronts
#: and instructions of a CTA against the elements that it loads and writes. The port is busy in 0.70 to 0.87 of cycles.
_ALIGN1 = NarrowAccess(0.145, 4.1, 0.23, 16.2, 2.9)
_ALIGN2_ROWS = NarrowAccess(0.02, 1.85, 0.26, 21.8, 2.9)
_ALIGN2_COLUMNS = NarrowAccess(0.07, 1.5, 0.26, 21.8, 2.9)

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


def _multistage(
    name: str, rows: int, columns: int, k: int, stages: int, threads: int, regs: int, ctas: int, src: str
) -> GemmKernel:
    """A pre-Hopper kernel: every warp loads with cp.async and computes with mma.sync."""
    return GemmKernel(
        name, rows, columns, k, stages, threads, 0, regs, 2 * stages * k * (rows + columns), ctas, 1, 1, False, False,
        "mma.sync", "assumed", src,
    )  # fmt: skip


def _hopper_stages(rows: int, columns: int) -> int:
    """Slices of 64 that fit beside each other: 4 of 256 x 128, 6 of 128 x 128, 2 of 64 x 512, never more than 16."""
    return min(16, _HOPPER_PIPE_BYTES // (2 * 64 * (rows + columns)))


def _hopper_tile(rows: int, columns: int, matrices: int, sms: int, output: bool) -> tuple[int, int]:
    """(rows, columns) of the C tile that lets all tiles finish first, ``sms`` at a time; of two alike the larger.

    cuBLAS's rule is not public. This one finds 72 % of 1248 tiles seen on an H200 (torch.profiler), from 64 x 8 for a
    single matrix to 320 x 128. wgmma makes one side a multiple of 64 and the other of 8; below 64 columns it is slower
    than its size (16 + N/4 cycles against N/2). A tile costs its area, its loads and a start and end.
    """
    best: tuple[tuple[float, int, int], tuple[int, int]] | None = None
    for long in _HOPPER_LONG_SIDES:
        for short in _HOPPER_SHORT_SIDES:
            if long * short > _HOPPER_MOST_ELEMENTS or (output and long > ceil_div(columns, 64) * 64):
                continue
            for tile_rows, tile_columns in ((short, long),) if output else ((short, long), (long, short)):
                tiles = matrices * ceil_div(rows, tile_rows) * ceil_div(columns, tile_columns)
                work = _tile_cost(long, short)
                key = (ceil_div(tiles, sms) * work, -long * short, abs(tile_columns - 256))
                if best is None or key < best[0]:
                    best = (key, (tile_rows, tile_columns))
    assert best is not None, "the smallest sides make a tile of every shape"
    return best[1]


#: Odd numbers of tiles from here on are taken in pairs, the last with an empty neighbour.
MOST_LONE_TILES = 16
#: SMEM that the seen kernels leave their pipes, the largest tile, and sides of tiles that were seen.
_HOPPER_PIPE_BYTES = 214_000
_HOPPER_MOST_ELEMENTS = 40_960
_HOPPER_LONG_SIDES = (64, 128, 192, 256, 320)
_HOPPER_SHORT_SIDES = (
    8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200, 232, 256, 304, 352, 384, 432, 512,
)  # fmt: skip
#: What a tile costs beside its area, in elements: its start and end, each row or column of A and B, and a share of all
#: where the second side is no multiple of 64.
_HOPPER_TILE_OVERHEAD, _HOPPER_LOADS, _HOPPER_UNEVEN = 500, 10, 1.03


def _tile_cost(long: int, short: int) -> float:
    area = long * max(short, 32 + short // 2)
    work = float(area) + _HOPPER_LOADS * (long + short) + _HOPPER_TILE_OVERHEAD
    return work * (1.0 if short % 64 == 0 else _HOPPER_UNEVEN)


def tile_cost(rows: int, columns: int) -> float:
    """What a C tile costs in :func:`_hopper_tile`'s terms, its side of whole 64s (else the longer) first."""
    long, short = (rows, columns) if (rows % 64 == 0, rows) >= (columns % 64 == 0, columns) else (columns, rows)
    return _tile_cost(long, short)


def product_shape(role: str, problem: AttentionProblem) -> tuple[int, int]:
    """Rows and columns of C of one product of ``problem``."""
    rows = problem.seqlen_k if role in ("grad_value", "grad_key") else problem.seqlen_q
    return rows, problem.seqlen_k if role in ("scores", "grad_scores") else max(problem.head_dim, problem.head_dim_v)


def hopper_kernel_at(role: str, rows: int, columns: int, tile_rows: int, tile_columns: int, stages: int) -> GemmKernel:
    """The Hopper kernel for a C of ``rows`` x ``columns`` with a given tile and slices in flight."""
    scores = role in ("scores", "grad_scores")
    # CTAs in pairs along tiles of an even number, or so many that one more costs little; those that share the long
    # operand of an output before others
    row_pairs, column_pairs = _in_pairs(ceil_div(rows, tile_rows)), _in_pairs(ceil_div(columns, tile_columns))
    cluster = (1, 2) if column_pairs and not (scores and row_pairs) else (2, 1) if row_pairs else (1, 1)
    smem = 2 * stages * 64 * (tile_rows + tile_columns) + 16_580
    name = f"nvjet_sm90_tst_{tile_columns}x{tile_rows}_64x{stages}_{cluster[1]}x{cluster[0]}"
    return _hopper(name, tile_rows, tile_columns, stages, min(smem, 231_000), cluster)


def _in_pairs(tiles: int) -> bool:
    """Whether cuBLAS takes ``tiles`` in clusters of two: seen of 19, 37, 45, 79 and 171, not of 7 and 11."""
    return tiles % 2 == 0 or tiles >= MOST_LONE_TILES


def _hopper_kernel(role: str, head_dim: int, queries: int, keys: int, matrices: int, sms: int) -> GemmKernel:
    scores = role in ("scores", "grad_scores")
    if queries <= 8 and scores:
        return _hopper("nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT", 8, 512, 3, 216_220, (1, 2))
    if queries <= 8:
        return _hopper("nvjet_sm90_tst_128x8_64x12_1x1_h_bz_NNT", 8, 128, 12, 225_652, (1, 1), memset=False)
    rows = keys if role in ("grad_value", "grad_key") else queries
    columns = keys if scores else head_dim
    tile_rows, tile_columns = _hopper_tile(rows, columns, matrices, sms, not scores)
    return hopper_kernel_at(role, rows, columns, tile_rows, tile_columns, _hopper_stages(tile_rows, tile_columns))


def _narrow(
    name: str, rows: int, columns: int, k: int, stages: int, threads: int, regs: int, ctas: int, pays: NarrowAccess
) -> GemmKernel:
    source = "seen: PyTorch 2.11, H200, torch.profiler: cutlass_75_tensorop_*_align1, cutlass_80_tensorop_*_align2"
    kernel = _multistage(name, rows, columns, k, stages, threads, regs, ctas, source)
    return replace(kernel, kind="measured", narrow=pays)


def _least_waves(tall: GemmKernel, flat: GemmKernel, rows: int, matrices: int, sms: int) -> GemmKernel:
    """The one whose tiles, ``sms`` at a time, are done first; ``tall``, which reads B half as often, if it takes up to
    a tenth longer (seen of 6391 and 1570 rows of 64 and 1024 matrices; ``flat`` of 596 rows of 256, a fifth)."""

    def rows_in_turn(kernel: GemmKernel) -> int:
        return ceil_div(matrices * ceil_div(rows, kernel.tile_rows), sms) * kernel.tile_rows

    return tall if rows_in_turn(tall) <= 1.1 * rows_in_turn(flat) else flat


#: The smallest product of unaligned rows whose elements are loaded one by one, of scores and of outputs.
_SMALL_ALIGN1 = _narrow("cutlass_75_s1688gemm_64x64_align1", 64, 64, 32, 1, 128, 96, 5, _ALIGN1)


def _ctas(kernel: GemmKernel, rows: int, columns: int, matrices: int) -> int:
    return matrices * ceil_div(rows, kernel.tile_rows) * ceil_div(columns, kernel.tile_columns)


def _splits(tiles: int, inner: int, sms: int) -> int:
    """CTAs that share one C tile of a single matrix, each a part of ``inner``: as many as fill the GPU once, or twice
    if 96 are left for each; never less than 64. 4 of 257 to 63 of 5001 were seen for few tiles, 8 for 32."""
    waves = 2 if inner * tiles >= 96 * 2 * sms else 1
    return max(1, min(63, inner // 64, waves * sms // tiles))


def _unaligned_scores(head_dim: int, queries: int, keys: int, matrices: int, sms: int) -> GemmKernel:
    if keys % 2 or head_dim % 2:
        small = _SMALL_ALIGN1
        square = _narrow("cutlass_75_s1688gemm_128x128_align1", 128, 128, 32, 1, 128, 254, 2, _ALIGN1)
        wide = _narrow("cutlass_75_s1688gemm_256x128_align1", 128, 256, 32, 1, 256, 236, 1, _ALIGN1)
        if keys < 256 and head_dim <= 64:
            return small
        padded = [ceil_div(keys, n) * n * ceil_div(queries, 128) * 128 for n in (256, 128)]
        larger = (wide, square) if padded[0] <= 1.05 * padded[1] else (square,)
        return next((k for k in larger if _ctas(k, queries, keys, matrices) >= _FILLED * sms), small)
    padded = [ceil_div(keys, n) * n * ceil_div(queries, m) * m for m, n in ((128, 256), (128, 128), (64, 128))]
    chosen = small = _narrow("cutlass_80_s16816gemm_128x64_align2", 64, 128, 64, 3, 128, 156, 3, _ALIGN2_ROWS)
    if head_dim > 64 and padded[0] <= 1.03 * padded[2]:
        chosen = _narrow("cutlass_80_s16816gemm_256x128_align2", 128, 256, 64, 3, 256, 230, 1, _ALIGN2_ROWS)
    elif head_dim > 64 and padded[1] <= 1.03 * padded[2]:
        chosen = _narrow("cutlass_80_s16816gemm_128x128_align2", 128, 128, 32, 4, 128, 236, 2, _ALIGN2_ROWS)
    return chosen if _ctas(chosen, queries, keys, matrices) >= 0.6 * sms else small


def _unaligned_output(head_dim: int, rows: int, inner: int, odd: bool, matrices: int, sms: int) -> GemmKernel:
    """For a C of ``rows`` x ``head_dim``: the largest tile that fills the GPU; of a single matrix the inner dimension
    is split, whose parts a second kernel adds."""
    if odd:
        square = _narrow("cutlass_75_s1688gemm_128x128_align1", 128, 128, 32, 1, 128, 252, 2, _ALIGN1)
        small = _SMALL_ALIGN1
        least = _narrow("cutlass_75_wmma_s161616gemm_32x32_32x1_align1", 32, 32, 32, 1, 128, 64, 8, _ALIGN1)
        larger = square if head_dim > 64 else small
    else:
        larger = _narrow("cutlass_80_s16816gemm_64x256_align2", 256, 64, 64, 4, 128, 234, 1, _ALIGN2_COLUMNS)
        small = _narrow("cutlass_80_s16816gemm_64x64_64x6_align2", 64, 64, 64, 4, 128, 128, 2, _ALIGN2_COLUMNS)
        least = _narrow("cutlass_80_wmma_s161616gemm_32x32_128x2_align2", 32, 32, 128, 1, 128, 96, 5, _ALIGN2_COLUMNS)
        if head_dim > 64:
            tall = _narrow("cutlass_80_s16816gemm_128x256_align2", 256, 128, 64, 3, 256, 226, 1, _ALIGN2_COLUMNS)
            flat = _narrow("cutlass_80_s16816gemm_128x128_align2", 128, 128, 64, 3, 128, 240, 2, _ALIGN2_COLUMNS)
            larger = _least_waves(tall, flat, rows, matrices, sms)
            small = _narrow("cutlass_80_s16816gemm_128x64_align2", 64, 128, 64, 3, 128, 156, 3, _ALIGN2_COLUMNS)
    if matrices == 1:
        chosen = larger if rows * inner * head_dim >= _LARGE_SINGLE else small
        return replace(chosen, splits=_splits(_ctas(chosen, rows, head_dim, 1), inner, sms))
    if _ctas(larger, rows, head_dim, matrices) >= (_FILLED if odd else 0.6) * sms:
        return larger
    return small if _ctas(small, rows, head_dim, matrices) >= (_FILLED if odd else 0.35) * sms else least


def _unaligned_kernel(role: str, head_dim: int, queries: int, keys: int, matrices: int, sms: int) -> GemmKernel:
    """Rows whose bytes are no multiple of 16 cannot be loaded 16 bytes at a time: kernels of older GPUs, on any GPU.

    Elements two by two (align2, cp.async) where the row length is even, one by one (align1, through registers) where
    it is odd: then one slice is in flight, in registers, while another is multiplied. Tiles are those seen on an H200
    at 250 to 14,434 keys (launches_unaligned_run1.csv); where two were, the one that pads less.
    """
    if role in ("scores", "grad_scores"):
        return _unaligned_scores(head_dim, queries, keys, matrices, sms)
    rows, inner = (keys, queries) if role in ("grad_value", "grad_key") else (queries, keys)
    return _unaligned_output(head_dim, rows, inner, bool(keys % 2 or head_dim % 2), matrices, sms)


def gemm_kernel(
    role: str, *, head_dim: int, queries: int, keys: int, instruction_path: str, matrices: int = 64, sms: int = 132
) -> GemmKernel:
    """The kernel for one batched product of 16-bit attention.

    ``role``: "scores" (Q K^T), "output" (P V), "grad_value" (P^T dO), "grad_scores" (dO V^T), "grad_query" (dS K),
    "grad_key" (dS^T Q). ``instruction_path``: the GPU's fastest, "mma.sync", "wgmma" or "tcgen05".
    InputError for an unknown role or path.
    """
    if role not in GEMM_ROLES:
        raise InputError(f"role {role!r} is unknown; expected one of {', '.join(GEMM_ROLES)}")
    if keys % 8 or head_dim % 8:
        return _unaligned_kernel(role, head_dim, queries, keys, matrices, sms)
    scores = role in ("scores", "grad_scores")
    if instruction_path == "wgmma":
        return _hopper_kernel(role, head_dim, queries, keys, matrices, sms)
    if instruction_path == "mma.sync":
        if queries <= 16 and role in ("scores", "output"):
            return _multistage("ampere_s16816gemm_64x16_stages_64x6", 16, 64, 64, 6, 128, 96, 2, _AMPERE_SOURCE)
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
