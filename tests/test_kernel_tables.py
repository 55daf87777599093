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
