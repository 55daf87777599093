"""Sliding windows and soft caps: exact numbers, the kernels' own key loops, only the tiles that a window touches."""

import numpy as np
import pytest

from algorithms import build_program
from algorithms.heuristics import fa2_key_loop, fa3_key_loop
from simulator import simulate
from simulator.accesses import sm_traffic
from simulator.errors import UnsupportedError
from simulator.options import parse_window
from simulator.problem import AttentionProblem, unmasked_pairs
from simulator.profile import load_profile
from simulator.reference import attention, random_inputs, run_attention, visible

GPU = load_profile("h200_sxm")
SIZES = [(1, 300), (200, 200), (200, 333), (333, 200), (130, 515)]
WINDOWS = [(0, 0), (1, 0), (37, 0), (-1, 40), (64, 200), (100, -1), (511, 3), (1000, 1000)]
IMPLEMENTATIONS = [("fa2", "torch_flash"), ("fa3", "flash_attn_3"), ("flash_decoding", "torch_flash_splitkv"),
                   ("flash_decoding", "flash_attn_3_kvcache")]  # fmt: skip


def error(problem, algorithm, implementation):
    inputs = random_inputs(problem, seed=3)
    out = run_attention(build_program(algorithm, problem, GPU, implementation), inputs)
    want = attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    assert not np.isnan(out["O"]).any()
    seen = np.isfinite(want["LSE"])
    assert np.abs(out["LSE"][seen] - want["LSE"][seen]).max(initial=0) < 2e-3
    assert not np.isfinite(out["LSE"][~seen]).any() and not out["O"][~seen].any()
    return np.abs(out["O"] - want["O"]).max() / np.abs(want["O"]).max()


@pytest.mark.parametrize(("algorithm", "implementation"), IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_numbers_equal_float64(algorithm, implementation, causal, window):
    sizes = SIZES if window in ((37, 0), (64, 200)) else SIZES[2:3]
    for seqlen_q, seqlen_k in sizes:
        problem = AttentionProblem(
            heads=4, kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=64, causal=causal, window=window
        )
        if algorithm in ("fa2", "flash_decoding"):
            # left alone, FA2 splits so small a grid
            problem = problem.with_(num_splits=1 if algorithm == "fa2" else 2)
        assert error(problem, algorithm, implementation) < 0.01, problem


@pytest.mark.parametrize("changes", [{"head_dim": 192}, {"head_dim": 256, "dtype": "fp16"}, {"dtype": "fp8"}], ids=str)
def test_other_fa3_kernels(changes):
    problem = AttentionProblem(heads=2, seqlen_q=300, head_dim=128, window=(90, 20)).with_(**changes)
    problem = problem.with_(head_dim_v=problem.head_dim)
    assert error(problem, "fa3", "flash_attn_3") < (0.08 if problem.dtype == "fp8" else 0.01)


@pytest.mark.parametrize(("algorithm", "implementation"), IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, (50, 0)])
def test_softcap(algorithm, implementation, window):
    problem = AttentionProblem(
        heads=2, seqlen_q=150, seqlen_k=260, head_dim=64, softcap=1.5, causal=True, window=window
    )
    problem = problem.with_(num_splits=1 if algorithm == "fa2" else None)
    assert error(problem, algorithm, implementation) < 0.01
    uncapped = attention(problem.with_(softcap=0.0), **{n.lower(): x for n, x in random_inputs(problem, 3).items()})
    capped = attention(problem, **{n.lower(): x for n, x in random_inputs(problem, 3).items()})
    assert np.abs(uncapped["LSE"] - capped["LSE"]).max() > 0.05


def test_pairs_are_those_of_the_mask():
    rng = np.random.default_rng(0)
    for _ in range(300):
        queries, keys = (int(x) for x in rng.integers(1, 60, 2))
        left, right = (int(x) for x in rng.integers(-1, 70, 2))
        causal = bool(rng.integers(2))
        problem = AttentionProblem(seqlen_q=queries, seqlen_k=keys, window=(left, right), causal=causal)
        assert problem.unmasked_pairs_per_head() == visible(problem).sum(), problem


def test_pairs_of_a_million_rows_take_no_loop():
    n = 1 << 20
    assert unmasked_pairs(n, n, 4095, 0) == 4096 * n - 4095 * 4096 // 2
    assert unmasked_pairs(10**9, 10**9, -1, 0) == 10**9 * (10**9 + 1) // 2


@pytest.mark.parametrize("loop", [fa2_key_loop, fa3_key_loop])
def test_blocks_cover_what_is_visible_and_unmasked_blocks_hide_nothing(loop):
    rng = np.random.default_rng(1)
    for _ in range(200):
        tile_m, tile_n = (int(x) for x in rng.choice([16, 32, 48], 2))
        queries, keys = (int(x) for x in rng.integers(1, 300, 2))
        window = tuple(int(x) for x in rng.choice([0, 1, 20, 100, 250, -1], 2))
        if window == (-1, -1):
            continue
        problem = AttentionProblem(seqlen_q=queries, seqlen_k=keys, window=window)
        seen = visible(problem)[0]
        for block in range(-(-queries // tile_m)):
            walk = loop(row_block=block, tile_m=tile_m, tile_n=tile_n, seqlen_q=queries, seqlen_k=keys, causal=False,
                        window=window)  # fmt: skip
            rows = seen[block * tile_m : (block + 1) * tile_m]
            touched = np.flatnonzero(rows.any(axis=0)) // tile_n
            assert set(touched) <= set(range(walk.first, walk.last))
            # a block at each end may be touched by rows behind the last query only
            assert walk.count <= len(set(touched)) + 2 + tile_m // tile_n or not len(touched)
            # FA2 masks the blocks of its loop too
            full = range(walk.first + walk.left, walk.last - walk.masked) if loop is fa3_key_loop else ()
            for j in full:
                assert rows[:, j * tile_n : (j + 1) * tile_n].all() and (j + 1) * tile_n <= keys


def test_fa3_masks_both_edges_and_fa2_unrolls_its_first_blocks():
    base = dict(row_block=8, seqlen_q=4096, seqlen_k=4096, causal=False, tile_m=128, tile_n=128, window=(512, 512))
    fa2, fa3 = fa2_key_loop(**base), fa3_key_loop(**base)
    # rows 1024..1151 see keys 512..1663: blocks 4 to 12, of which the first and the last are cut
    assert (fa3.first, fa3.last, fa3.masked, fa3.left) == (4, 13, 1, 1)
    assert (fa2.first, fa2.last, fa2.masked, fa2.left) == (4, 13, 2, 0)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_traffic_is_that_of_the_window(algorithm):
    full = AttentionProblem(heads=1, seqlen_q=8192, head_dim=128, causal=True, num_splits=1)
    narrow = full.with_(window=(255, 0))
    kernels = [build_program(algorithm, p, GPU).kernels[-1] for p in (full, narrow)]
    read = [sm_traffic(kernel)["K"][0] for kernel in kernels]
    # 64 row blocks of 128 rows see at most 383 keys in three or four blocks
    assert read[1] < 64 * 4 * 128 * 256 and read[1] > 64 * 256 * 256
    assert read[0] / read[1] > 8


def test_time_follows_the_window_and_a_wide_one_is_none():
    base = AttentionProblem(batch=2, heads=16, seqlen_q=4096, head_dim=128, causal=True)
    for algorithm in ("fa2", "fa3"):
        times = [simulate(algorithm, base.with_(window=w), GPU).time_us for w in ((128, 0), (1024, 0), (4096, 0), None)]
        assert times[0] < 0.6 * times[1] < 0.5 * times[2]
        assert times[2] == times[3]


def test_softcap_costs_special_functions():
    base = AttentionProblem(heads=16, seqlen_q=2048, head_dim=64)
    for algorithm in ("fa2", "fa3"):
        plain, capped = (simulate(algorithm, base.with_(softcap=c), GPU) for c in (0.0, 30.0))
        assert capped.work["exp"] > 1.9 * plain.work["exp"]
        assert capped.time_us > 1.05 * plain.time_us


@pytest.mark.parametrize(
    "changes",
    [
        {"pass_": "bwd", "window": (10, 0), "deterministic": True},
        {"softcap": 3.0, "dropout": 0.1},
        {"mask": "additive"},
    ],
)
def test_what_fa2_lacks_is_an_error(changes):
    with pytest.raises(UnsupportedError):
        build_program("fa2", AttentionProblem(seqlen_q=64, head_dim=64, **changes), GPU)


def test_a_mask_names_where_sdpa_goes_instead():
    with pytest.raises(UnsupportedError, match="mem-efficient, then math"):
        build_program("fa2", AttentionProblem(seqlen_q=64, head_dim=64, mask="bool"), GPU)


@pytest.mark.parametrize("text", ["512;512", "512,512", "512:512", "(512, 512)"])
def test_window_texts(text):
    assert parse_window(text) == (512, 512)
    assert parse_window("128;0") == (128, 0) and parse_window("-1;0") == (-1, 0) and parse_window("-1") is None
