"""Kernel tables against dispatch.md's rows and against the SMEM and register limits of the GPUs they run on."""

import pytest

from algorithms import kernel_tables as tables
from simulator.errors import InputError

A100 = dict(smem_bytes_per_cta_max=163 * 1024, smem_bytes_per_sm=164 * 1024, compute_capability=(8, 0))
H100 = dict(smem_bytes_per_cta_max=227 * 1024, smem_bytes_per_sm=228 * 1024, compute_capability=(9, 0))
SM86 = dict(smem_bytes_per_cta_max=99 * 1024, smem_bytes_per_sm=100 * 1024, compute_capability=(8, 6))


def _fa2(head_dim, gpu, **more):
    tile = tables.fa2_forward_tile(head_dim, "bf16", **gpu, **more)
    return tile.tile_m, tile.tile_n, tile.num_warps, tile.ctas_per_sm


@pytest.mark.parametrize(
    ("head_dim", "gpu", "more", "expected"),
    [
        (64, A100, {}, (128, 128, 4, 2)),
        (80, A100, {}, (128, 64, 4, 2)),
        (128, A100, {}, (128, 64, 4, 2)),
        (128, H100, {"causal": True}, (128, 64, 4, 2)),
        (128, SM86, {}, (128, 32, 4, 2)),
        (128, SM86, {"causal": True}, (64, 64, 4, 2)),
        (192, H100, {}, (128, 64, 8, 1)),
        (256, A100, {}, (128, 64, 8, 1)),
        (256, H100, {}, (64, 64, 4, 2)),
        (256, SM86, {}, (64, 64, 4, 1)),
        (128, A100, {"dropout": True}, (128, 32, 4, 2)),
    ],
)
def test_fa2_forward(head_dim, gpu, more, expected):
    assert _fa2(head_dim, gpu, **more) == expected


def test_fa2_fits_everywhere():
    for gpu in (A100, H100, SM86):
        for head_dim in (32, 64, 96, 128, 160, 192, 224, 256):
            for causal in (False, True):
                tile = tables.fa2_forward_tile(head_dim, "fp16", causal, False, **gpu)
                assert tile.smem_bytes <= gpu["smem_bytes_per_cta_max"]
                assert tile.ctas_per_sm >= 1 and tile.tile_m % (16 * tile.num_warps) == 0
                assert tile.padded_head_dim >= head_dim


def test_fa2_smem_is_q_plus_k_plus_v():
    assert tables.fa2_forward_tile(128).smem_bytes == 64 * 1024  # 32 + 16 + 16 KiB
    assert tables.fa2_splitkv_tile(128).smem_bytes == 80 * 1024  # 16 + 32 + 32 KiB


@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 256), (96, 128), (128, 128), (192, 64), (256, 64)])
def test_fa2_split(head_dim, tile_n):
    tile = tables.fa2_splitkv_tile(head_dim)
    assert (tile.tile_m, tile.tile_n, tile.num_warps) == (64, tile_n, 4)


@pytest.mark.parametrize(
    ("head_dim", "more", "expected"),
    [
        # dispatch.md section 2; threads = producer + consumers
        (64, {}, (192, 192, 512)),
        (64, {"causal": True}, (192, 128, 512)),
        (96, {}, (192, 144, 512)),
        (128, {}, (128, 176, 384)),
        (128, {"causal": True}, (128, 128, 384)),
        (160, {}, (128, 112, 384)),
        (256, {}, (128, 80, 384)),
        (128, {"dtype": "e4m3"}, (128, 224, 384)),
        (128, {"paged_gather": True}, (128, 128, 384)),
        (256, {"local": True}, (128, 64, 384)),
        (192, {"head_dim_v": 128}, (128, 128, 384)),
        (64, {"head_dim_v": 512}, (64, 64, 384)),
    ],
)
def test_fa3_forward(head_dim, more, expected):
    tile = tables.fa3_forward_tile(head_dim, **more)
    assert (tile.tile_m, tile.tile_n, tile.threads) == expected


def test_fa3_fits_h100_smem_and_registers():
    for dtype in ("bf16", "e4m3"):
        for head_dim in (64, 96, 128, 192, 256):
            for causal, local in ((False, False), (True, False), (False, True)):
                for gather in (False, True):
                    tile = tables.fa3_forward_tile(
                        head_dim, dtype=dtype, causal=causal, local=local, paged_gather=gather
                    )
                    assert tile.smem_bytes <= 227 * 1024
                    registers = 128 * (tile.producer_registers + tile.num_mma_warpgroups * tile.consumer_registers)
                    assert registers <= 65_536


def test_fa3_barriers_clusters_and_roles():
    full = tables.fa3_forward_tile(128, row_blocks=64)
    assert full.cluster_m == 2 and full.scheduler_barrier and not full.rescale_o_before_gemm
    assert full.producer_threads == 32 and full.producer_registers == 24 and full.consumer_registers == 240
    assert tables.fa3_forward_tile(128, row_blocks=63).cluster_m == 1
    assert tables.fa3_forward_tile(128, causal=True, row_blocks=64).cluster_m == 1
    assert tables.fa3_forward_tile(64, row_blocks=64).cluster_m == 1
    big = tables.fa3_forward_tile(256)
    assert not big.scheduler_barrier and big.rescale_o_before_gemm
    assert not tables.fa3_forward_tile(64).mma_pv_is_rs and tables.fa3_forward_tile(64, causal=True).mma_pv_is_rs
    assert tables.fa3_forward_tile(64).num_mma_warpgroups == 3
    fp8 = tables.fa3_forward_tile(128, dtype="e4m3")
    assert fp8.v_transposed_in_kernel and fp8.producer_threads == 128
    decode = tables.fa3_forward_tile(128, split=True, varlen=True)
    assert not decode.q_by_tma and decode.kv_by_tma and decode.producer_threads == 128


def test_combine_kernels():
    fa2 = tables.fa2_combine_kernel(128, 5)
    assert (fa2.rows_per_cta, fa2.threads, fa2.lse_rows_padded) == (4, 128, 8)
    fa3 = tables.fa3_combine_kernel(128, 5)
    assert (fa3.rows_per_cta, fa3.columns_per_cta, fa3.threads, fa3.lse_rows_padded) == (8, 128, 256, 32)
    assert tables.fa3_combine_kernel(64, 5).rows_per_cta == 16


@pytest.mark.parametrize(
    "call",
    [
        lambda: tables.fa2_forward_tile(264),
        lambda: tables.fa2_forward_tile(128, "e4m3"),
        lambda: tables.fa3_forward_tile(128, 512),
        lambda: tables.fa3_forward_tile(128, causal=True, local=True),
        lambda: tables.fa3_forward_tile(128, dtype="fp32"),
        lambda: tables.fa2_combine_kernel(128, 1),
        lambda: tables.element_bytes("int4"),
    ],
)
def test_unsupported_is_one_clear_error(call):
    with pytest.raises(InputError):
        call()


# What torch.profiler saw on one H200 with PyTorch 2.11 (CUDA 13.0) on 2026-11-29: grid, threads, dynamic SMEM.


@pytest.mark.parametrize(
    ("head_dim", "grid_x", "threads", "smem_bytes"),
    [
        (32, 16, 128, 24_576), (64, 16, 128, 49_152), (96, 16, 128, 49_152), (128, 16, 128, 65_536),
        (192, 16, 256, 98_304), (256, 32, 128, 98_304),
    ],
)  # fmt: skip
def test_fa2_forward_launch_as_seen_at_2048_queries(head_dim, grid_x, threads, smem_bytes):
    tile = tables.fa2_forward_tile(head_dim, "bf16", **H100)
    assert (2048 // tile.tile_m, tile.threads, tile.smem_bytes) == (grid_x, threads, smem_bytes)


@pytest.mark.parametrize(
    ("head_dim", "main_grid_x", "helper_grid_x", "smem_bytes"),
    [(64, 16, 16, 147_456), (128, 16, 32, 147_456), (256, 32, 32, 180_224)],
)
def test_fa2_backward_launch_as_seen_at_2048(head_dim, main_grid_x, helper_grid_x, smem_bytes):
    tile = tables.fa2_backward_tile(head_dim, smem_bytes_per_cta_max=227 * 1024)
    assert (2048 // tile.tile_n, tile.threads, tile.smem_bytes) == (main_grid_x, 256, smem_bytes)
    assert [2048 // helper.rows_per_cta for helper in tile.helpers] == [helper_grid_x] * 2
    assert [helper.before_main for helper in tile.helpers] == [True, False]


@pytest.mark.parametrize(
    ("row_length", "rows", "name", "grid", "threads", "smem_bytes"),
    [
        (512, 16_384, "softmax_warp_forward", 4096, 128, 0),
        (1000, 64_000, "softmax_warp_forward", 16_000, 128, 0),
        (2048, 131_072, "softmax_warp_forward", 32_768, 128, 0),
        (2056, 131_584, "cunn_SoftMaxForwardReg", 131_584, 1024, 128),
        (8192, 262_144, "cunn_SoftMaxForwardReg", 262_144, 1024, 128),
        (16_384, 131_072, "cunn_SoftMaxForwardSmem", 131_072, 1024, 32_896),
        (32_768, 131_072, "cunn_SoftMaxForward", 131_072, 1024, 128),
    ],
)
def test_softmax_launch_as_seen(row_length, rows, name, grid, threads, smem_bytes):
    kernel = tables.softmax_forward_kernel(row_length, "bf16")
    assert (kernel.name, rows // kernel.rows_per_cta, kernel.threads, kernel.smem_bytes) == (
        name, grid, threads, smem_bytes
    )  # fmt: skip
    assert kernel.global_reads == (("S", 3 if kernel.kind == "global" else 1),)


def test_softmax_backward_launch_as_seen():
    warp = tables.softmax_backward_kernel(1024, "bf16")
    assert (warp.kind, 65_536 // warp.rows_per_cta) == ("warp", 16_384)
    for row_length, threads, smem_bytes in [(2048, 128, 4112), (4096, 256, 8224)]:
        kernel = tables.softmax_backward_kernel(row_length, "bf16")
        assert (kernel.kind, kernel.threads, kernel.smem_bytes) == ("smem", threads, smem_bytes)


def test_softmax_of_older_releases():
    assert tables.softmax_forward_kernel(2048, "fp16", "2.0").global_reads == (("S", 3),)
    assert tables.softmax_forward_kernel(2048, "fp16", "2.1").kind == "smem"
    assert tables.softmax_forward_kernel(1024, "fp16", "2.0").kind == "warp"


@pytest.mark.parametrize(
    ("matrices", "length", "launches", "vectorised", "grid"),
    [
        (64, 2048, 1, False, 524_288),
        (32, 8192, 2, False, 2_097_152),
        (8, 16_384, 2, False, 2_097_152),
        (4, 32_768, 4, True, 1_048_576),
    ],
)
def test_mask_add_launch_as_seen(matrices, length, launches, vectorised, grid):
    kernel = tables.mask_add_kernel(matrices, length, length, "bf16")
    per_cta = kernel.threads * kernel.elements_per_thread
    assert (kernel.launches, kernel.vectorised) == (launches, vectorised)
    assert matrices * length * length // launches // per_cta == grid


def test_gemm_fits_and_falls_back_for_unaligned_rows():
    for path, smem_per_sm in (("wgmma", 228 * 1024), ("mma.sync", 164 * 1024), ("tcgen05", 228 * 1024)):
        for head_dim in (64, 128, 256):
            for role in ("scores", "output", "grad_value", "grad_scores", "grad_query", "grad_key"):
                kernel = tables.gemm_kernel(role, head_dim=head_dim, queries=4096, keys=4096, instruction_path=path)
                assert kernel.ctas_per_sm * (kernel.smem_bytes + 1024) <= smem_per_sm
                assert kernel.smem_bytes >= 2 * kernel.stages * kernel.tile_k * (kernel.tile_rows + kernel.tile_columns)
                assert kernel.instruction_path == path
    odd = tables.gemm_kernel("scores", head_dim=128, queries=2047, keys=2047, instruction_path="wgmma")
    assert odd.instruction_path == "mma.sync" and (odd.tile_rows, odd.tile_columns) == (128, 256)
    # seen: 32 x 2047^2 launched (128, 1, 32) CTAs of 128 x 256
    assert -(-2047 // odd.tile_rows) * -(-2047 // odd.tile_columns) == 128


@pytest.mark.parametrize(
    "role,length,matrices,head_dim,tile",
    [
        ("scores", 4096, 64, 128, (128, 256)),
        ("scores", 1280, 64, 64, (128, 320)),
        ("scores", 768, 64, 128, (192, 192)),
        ("scores", 1024, 1, 128, (64, 128)),
        ("output", 4096, 64, 128, (256, 128)),
        ("output", 4096, 128, 64, (512, 64)),
        ("output", 1024, 16, 128, (128, 128)),
        ("output", 512, 16, 128, (128, 64)),
    ],
)
def test_tiles_that_cublas_was_seen_to_choose(role, length, matrices, head_dim, tile):
    kernel = tables.gemm_kernel(
        role, head_dim=head_dim, queries=length, keys=length, instruction_path="wgmma", matrices=matrices
    )
    # its size; 320 x 128 and 256 x 160 are one
    assert kernel.tile_rows * kernel.tile_columns == tile[0] * tile[1]


def test_unaligned_rows_pay_for_narrow_accesses():
    one, two, eight = (
        tables.gemm_kernel("scores", head_dim=128, queries=n, keys=n, instruction_path="wgmma").narrow
        for n in (2049, 2050, 2048)
    )
    assert eight is None and one.load_wavefronts > two.load_wavefronts > 0


def test_fa1_paper_blocks():
    # The paper's example: SRAM of 100 KB in fp16 and d = 64.
    blocks = tables.fa1_paper_blocks(51_200, 64)
    assert (blocks.columns, blocks.rows) == (200, 64)
    with pytest.raises(InputError):
        tables.fa1_paper_blocks(100, 64)


def test_fa1_package():
    tile = tables.fa1_forward_tile(64, 2048)
    assert (tile.tile_m, tile.tile_n, tile.threads, tile.grid_order[0]) == (16, 256, 128, "batch")
    assert tile.smem_bytes <= 48 * 1024
    assert tables.fa1_forward_tile(128, 2048).tile_n == 128
    # 16 batch x heads on an A100 with 2 CTAs an SM: 13 splits fill 208 of 216 slots (0.963); nothing below passes 95 %
    assert tables.fa1_num_splits(batch_heads=16, num_sms=108, ctas_per_sm=2, seqlen_q=2048) == 13
    assert tables.fa1_num_splits(batch_heads=216, num_sms=108, ctas_per_sm=2, seqlen_q=2048) == 1


def test_fa1_causal_rows_keep_their_cta():
    tile = tables.fa1_forward_tile(64, 2048)
    for splits in (1, 3, 13):
        for row_slice in range(splits):
            for key_block in range(8):
                first = tables.fa1_first_row_step(
                    key_block=key_block, tile=tile, num_splits=splits, row_slice=row_slice, causal=True
                )
                assert first % splits == row_slice
                assert first > key_block * tile.tile_n // tile.tile_m - splits


def test_fa3_backward_fits_and_walks():
    for head_dim in (64, 96, 128, 192, 256):
        for causal in (False, True):
            assert tables.fa3_backward_tile(head_dim, causal=causal).smem_bytes <= 227 * 1024
    assert tables.fa3_backward_tile(128).tile_m == 80 and tables.fa3_backward_tile(128, causal=True).tile_m == 64
    assert [h.name for h in tables.fa3_backward_tile(128, gqa=True).helpers if h.before_main] == [
        "fill_dKaccum", "fill_dVaccum", "bwd_preprocess",
    ]  # fmt: skip
    seen = tables.backward_row_blocks(key_block=3, tile_m=64, tile_n=128, seqlen_q=512, seqlen_k=512, sides=(-1, 0))
    assert list(seen) == [6, 7]


@pytest.mark.parametrize(
    ("head_dim", "more", "smem_bytes", "threads", "registers"),
    [
        # launches seen by ncu on an H200 (tokenspeed-fa3, 2026-11-29)
        (64, {}, 200_704, 512, 128), (64, {"causal": True}, 93_184, 512, 128),
        (128, {}, 216_064, 384, 168), (128, {"causal": True}, 166_912, 384, 168),
        (192, {}, 224_256, 384, 168), (256, {}, 232_448, 384, 168),
        (128, {"dtype": "e4m3"}, 191_488, 384, 168),
        (128, {"split": True, "varlen": True}, 216_064, 384, 168),
    ],
)  # fmt: skip
def test_fa3_launch_as_seen(head_dim, more, smem_bytes, threads, registers):
    tile = tables.fa3_forward_tile(head_dim, **more)
    assert (tile.smem_bytes, tile.threads) == (smem_bytes, threads)
    assert registers * threads <= 65_536 < (registers + 8) * threads  # launched with all of the register file


def test_fa3_combine_smem_as_seen():
    assert {tables.fa3_combine_kernel(128, 16).smem_bytes, tables.fa3_combine_kernel(64, 16).smem_bytes} == {17_536}
