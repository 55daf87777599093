"""Launch decisions against values published in threads or derived by hand from the launchers' rules."""

from itertools import pairwise

import pytest

from algorithms.heuristics import (
    blocks_of_split,
    fa2_key_loop,
    fa2_launch,
    fa2_num_splits,
    fa3_dynamic_splits,
    fa3_key_loop,
    fa3_num_splits,
    fa3_pack_gqa,
    fa3_paged_by_tma,
    fa3_schedule,
    fa3_section_heads,
    fa3_tile_order,
    fa3_varlen_section_heads,
)


def _case_6_splits(batch: int, num_sms: int) -> int:
    """cases.md 6: fp16, 40/8 heads, cache of 1024, d=128, one query token."""
    return fa2_launch(
        batch=batch, heads=40, kv_heads=8, seqlen_q=1, kv_capacity=1024, head_dim=128, num_sms=num_sms
    ).num_splits


def test_fa2_splits_jump_where_users_saw_them():
    assert _case_6_splits(24, 132) == 4
    assert [_case_6_splits(b, 132) for b in (25, 33, 34, 49)] == [1, 1, 1, 1]
    a100 = [_case_6_splits(b, 108) for b in range(10, 50)]
    jumps = [b for b, (before, after) in enumerate(pairwise(a100), start=10) if before != after]
    assert 20 in jumps and max(jumps) <= 21


def test_fa2_swaps_groups_into_rows_only_for_one_query_token():
    one = fa2_launch(
        batch=1, heads=32, kv_heads=8, seqlen_q=1, kv_capacity=4096, head_dim=128, num_sms=132, causal=True
    )
    assert (one.seqlen_q, one.heads, one.causal, one.group_in_rows) == (4, 8, False, True)
    two = fa2_launch(batch=1, heads=32, kv_heads=8, seqlen_q=2, kv_capacity=4096, head_dim=128, num_sms=132)
    assert (two.seqlen_q, two.heads, two.group_in_rows) == (2, 32, False)


def test_fa2_splits_small_prefill_grids_too():
    # 1 x 4 heads x 2048 rows: 128 work tiles of 64 rows on 264 slots; 32 key blocks.
    launch = fa2_launch(batch=1, heads=4, kv_heads=4, seqlen_q=2048, kv_capacity=4096, head_dim=128, num_sms=132)
    assert launch.splitkv_kernel and launch.num_splits == 2
    assert (
        fa2_launch(
            batch=1, heads=4, kv_heads=4, seqlen_q=2048, kv_capacity=4096, head_dim=128, num_sms=132, dropout=True
        ).num_splits
        == 1
    )


def test_fa2_counts_a_split_only_if_it_shortens_the_walk():
    # 8 blocks: 5, 6 and 7 splits walk ceil(8/s) = 2 blocks like 4 splits do.
    assert fa2_num_splits(work_tiles=40, slots=264, key_blocks=8) in (1, 2, 3, 4, 8)
    chosen = {fa2_num_splits(work_tiles=w, slots=264, key_blocks=8) for w in range(1, 212)}
    assert chosen <= {1, 2, 3, 4, 8} and 8 in chosen


@pytest.mark.parametrize(
    ("total", "blocks", "expected"),
    [
        (106, 64, 1),  # 106 >= 0.8 x 132
        (8, 4, 1),  # too few key blocks to split
        (8, 32, 14),  # 8 x 14 = 112 of 132 (0.848) is the first within 85 % of 8 x 16 = 128 (0.970)
    ],
)
def test_fa3_splits(total, blocks, expected):
    assert (
        fa3_num_splits(
            total_row_blocks=total,
            num_sms=132,
            key_blocks=blocks,
            row_blocks=1,
            kv_head_bytes=1 << 20,
            causal_or_local=False,
        )
        == expected
    )


def test_fa3_splits_a_kv_head_that_l2_cannot_hold():
    arguments = dict(total_row_blocks=2112, num_sms=132, key_blocks=1024, row_blocks=264, max_splits=128)
    big = 131072 * 256 * 2  # 64 MiB of K and V a head
    assert fa3_num_splits(kv_head_bytes=big, causal_or_local=False, **arguments) == 2
    assert fa3_num_splits(kv_head_bytes=big, causal_or_local=True, **arguments) == 1


def test_fa3_packs_when_rows_would_be_empty():
    assert fa3_pack_gqa(seqlen_q=1, group=4, tile_m=128)
    assert not fa3_pack_gqa(seqlen_q=8192, group=4, tile_m=128)
    assert fa3_pack_gqa(seqlen_q=8192, group=4, tile_m=128, varlen_q=True)
    assert not fa3_pack_gqa(seqlen_q=100, group=1, tile_m=128)


def test_fa3_decode_never_pages_by_tma():
    assert not fa3_paged_by_tma(page_size=256, seqlen_q=1, group=16, tile_m=128, tile_n=128)
    assert fa3_paged_by_tma(page_size=256, seqlen_q=512, group=4, tile_m=128, tile_n=128)
    assert not fa3_paged_by_tma(page_size=256, seqlen_q=512, group=4, tile_m=128, tile_n=176)


def test_fa3_dynamic_splits_follow_length():
    # 2 sequences x 1 row block, 8 KV heads: (32 + 8) x 8 x 1.1 / 132 -> 3 blocks an SM.
    assert fa3_dynamic_splits(row_blocks_and_key_blocks=[(1, 32), (1, 8)], heads=8, num_sms=132, static=16) == [11, 3]
    assert fa3_dynamic_splits(row_blocks_and_key_blocks=[(1, 32)], heads=8, num_sms=132, static=1) == [1]


def test_splits_cover_every_block_once():
    for blocks in (1, 7, 64):
        for splits in (1, 3, 8):
            walked = [b for s in range(splits) for b in blocks_of_split(blocks, splits, s)]
            assert walked == list(range(blocks))


def test_fa3_schedulers_and_helpers():
    pick = lambda **k: fa3_schedule(**{**dict(causal=False, local=False, split=False, varlen=False), **k})  # noqa: E731 - a table of calls reads best
    assert pick().kind == "static_persistent" and pick().helper_kernels == ("main",)
    assert pick(causal=True).kind == "dynamic_persistent" and pick(causal=True).helper_kernels == ("fill", "main")
    assert pick(split=True, causal=True).kind == "single_tile"
    assert pick(split=True, varlen=True).helper_kernels == ("prepare", "main", "combine")


def test_fa3_sections_hold_32_mib_of_keys_and_values():
    # first_principles.md: 32/8 heads, 128k keys, d=128 -> one KV head, four query heads a section.
    size = dict(head_dim=128, head_dim_v=128, element_bytes=2)
    assert fa3_section_heads(seqlen_k=131072, group=4, pack_gqa=False, **size) == 4
    assert fa3_section_heads(seqlen_k=8192, group=1, pack_gqa=False, **size) == 8
    assert fa3_section_heads(seqlen_k=9000, group=1, pack_gqa=True, **size) == 4  # 7.28 -> 4
    assert fa3_varlen_section_heads(key_blocks=32, tile_n=128, group=4, pack_gqa=True, heads=8, **size) == 4


def test_fa3_tile_order_is_a_permutation_and_starts_with_the_longest():
    order = list(fa3_tile_order(kind="dynamic_persistent", row_blocks=5, heads=6, batch=2, section_heads=4))
    assert len(set(order)) == 5 * 6 * 2 == len(order)
    assert order[:5] == [(4, 0, 0, 0), (4, 1, 0, 0), (4, 2, 0, 0), (4, 3, 0, 0), (3, 0, 0, 0)]
    assert order[20] == (4, 4, 0, 0) and order[22] == (4, 0, 1, 0)  # sections run across the batch
    static = list(fa3_tile_order(kind="static_persistent", row_blocks=3, heads=2, batch=2))
    assert static[:4] == [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (0, 1, 0, 0)]


@pytest.mark.parametrize("loop", [fa2_key_loop, fa3_key_loop])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(512, 512), (200, 777), (777, 200), (1, 1000)])
def test_causal_loops_visit_exactly_the_blocks_with_an_unmasked_pair(loop, seqlen_q, seqlen_k):
    tile_m, tile_n = 128, 64
    for row_block in range(-(-seqlen_q // tile_m)):
        rows = range(row_block * tile_m, min((row_block + 1) * tile_m, seqlen_q))
        last_key = min(seqlen_k, rows[-1] + seqlen_k - seqlen_q + 1)
        got = loop(row_block=row_block, tile_m=tile_m, tile_n=tile_n, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
        needed = max(0, -(-last_key // tile_n))
        assert needed <= got.last <= max(needed, -(-seqlen_k // tile_n))
        # every block that holds a masked pair is among the masked ones of the walk
        first_row_last_key = rows[0] + seqlen_k - seqlen_q
        for block in range(got.first, got.last - got.masked):
            assert (block + 1) * tile_n - 1 <= first_row_last_key


def test_masked_counts():
    base = dict(row_block=7, seqlen_q=1024, seqlen_k=1024)
    assert fa2_key_loop(tile_m=128, tile_n=64, causal=False, **base).masked == 1
    assert fa2_key_loop(tile_m=128, tile_n=64, causal=True, **base).masked == 2
    assert fa2_key_loop(tile_m=128, tile_n=64, causal=True, even_head_dim=False, **base).masked == 3
    assert fa2_key_loop(tile_m=128, tile_n=64, causal=True, even_lengths=False, **base).masked == 3
    assert fa3_key_loop(tile_m=128, tile_n=128, causal=True, **base).masked == 1
    assert fa3_key_loop(tile_m=128, tile_n=176, causal=False, **base).masked == 1


def test_half_filled_cache_leaves_fa2_splits_empty():
    counts = [
        fa2_key_loop(
            row_block=0,
            tile_m=64,
            tile_n=128,
            seqlen_q=5,
            seqlen_k=512,
            causal=False,
            num_splits=4,
            split=s,
            kv_capacity=1024,
        ).count
        for s in range(4)
    ]
    assert counts == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_q", "keys", "head_dim", "grid"),
    [
        # grids that torch.profiler saw on an H200 (132 SMs) with PyTorch 2.11 on 2026-11-29
        (1, 32, 8, 1, 4096, 128, (1, 32, 8)),
        (4, 32, 8, 1, 8192, 128, (1, 7, 32)),
        (24, 40, 8, 1, 1024, 128, (1, 4, 192)),
        (25, 40, 8, 1, 1024, 128, (1, 25, 8)),
        (64, 32, 8, 1, 4096, 128, (1, 64, 8)),
        (1, 32, 32, 1, 8192, 64, (1, 7, 32)),
        (1, 4, 4, 2048, 2048, 128, (32, 2, 4)),
    ],
)
def test_fa2_launch_as_seen_in_pytorch(batch, heads, kv_heads, seqlen_q, keys, head_dim, grid):
    launch = fa2_launch(
        batch=batch, heads=heads, kv_heads=kv_heads, seqlen_q=seqlen_q, kv_capacity=keys, head_dim=head_dim, num_sms=132
    )
    if launch.splitkv_kernel:
        got = (-(-launch.seqlen_q // 64), launch.num_splits, batch * launch.heads)
    else:
        got = (-(-launch.seqlen_q // 128), batch, launch.heads)
    assert got == grid
