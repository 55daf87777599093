"""FlashDecoding: exact numbers for every split count and shape, exact bytes, and what each library decides."""

from dataclasses import replace

import numpy as np
import pytest

from algorithms import build_program, default_implementation
from simulator.errors import InputError, UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.program import Compute, Store, map_ops
from simulator.reference import attention, random_inputs, run_attention
from simulator.traffic import sm_traffic

FA2, FA3 = "torch_flash_splitkv", "flash_attn_3_kvcache"
#: Largest difference to float64 that rounding P and O to the dtype allows at these sizes.
TOLERANCE = {"bf16": 1.5e-2, "fp16": 2e-3}


def problem(**changes) -> AttentionProblem:
    return AttentionProblem(**({"heads": 4, "kv_heads": 4, "seqlen_q": 1, "seqlen_k": 700, "head_dim": 64} | changes))


def program(p: AttentionProblem, implementation: str, gpu: str = "h100_sxm"):
    return build_program("flash_decoding", p, load_profile(gpu), implementation)


def reference(p: AttentionProblem, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """float64 attention; sequence by sequence where lengths vary."""
    if p.seqlens_k is None:
        return attention(p, inputs["Q"], inputs["K"], inputs["V"])
    parts = []
    for b, length in enumerate(p.seqlens_k):
        one = p.with_(batch=1, seqlen_k=length, seqlens_k=None, kv_capacity=None)
        q = inputs["Q"][b * p.heads : (b + 1) * p.heads]
        k, v = (inputs[n][b * p.kv_heads : (b + 1) * p.kv_heads, :length] for n in "KV")
        parts.append(attention(one, q, k, v))
    return {name: np.concatenate([part[name] for part in parts]) for name in ("O", "LSE")}


def assert_exact(p: AttentionProblem, implementation: str, gpu: str = "h100_sxm"):
    built = program(p, implementation, gpu)
    inputs = random_inputs(p)
    got, want = run_attention(built, inputs), reference(p, inputs)
    assert np.abs(got["O"] - want["O"]).max() < TOLERANCE[p.dtype]
    seen = np.isfinite(want["LSE"])
    assert np.abs(got["LSE"][seen] - want["LSE"][seen]).max() < 1e-4
    assert np.isneginf(got["LSE"][~seen]).all()
    return built


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("num_splits", [1, 2, 7, None])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_one_query_token_of_every_group_and_split_count(implementation, num_splits, kv_heads):
    built = assert_exact(problem(heads=8, kv_heads=kv_heads, seqlen_k=1100, num_splits=num_splits), implementation)
    if num_splits is not None:
        assert built.attributes["num_splits"] == num_splits
    else:
        assert built.attributes["num_splits"] > 1
    has_combine = any("combine" in kernel.name for kernel in built.kernels)
    assert has_combine == (num_splits != 1)


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("seqlen_q", range(1, 9))
def test_several_query_tokens_are_causal_to_the_bottom_right(implementation, seqlen_q):
    assert_exact(
        problem(heads=6, kv_heads=2, seqlen_q=seqlen_q, causal=True, num_splits=3, seqlen_k=449), implementation
    )


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "fp16", "num_splits": 2, "seqlen_k": 1},
        {"dtype": "fp16", "num_splits": 5, "seqlen_k": 129},
        {"head_dim": 80, "num_splits": 3, "seqlen_k": 333},
        {"head_dim": 128, "num_splits": 4},
        {"head_dim": 192, "num_splits": 4, "seqlen_q": 3},
        {"head_dim": 256, "num_splits": 2, "heads": 2, "kv_heads": 1},
    ],
    ids=str,
)
def test_odd_lengths_dtypes_and_head_dims(implementation, changes):
    assert_exact(problem(**changes), implementation)


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": 200, "seqlen_k": 900, "heads": 2, "kv_heads": 1, "num_splits": 3},  # chunked prefill
        {"seqlen_q": 130, "seqlen_k": 100, "num_splits": 2},  # rows that see no key
        {"seqlen_q": 300, "seqlen_k": 40, "num_splits": 1},  # whole row blocks that see no key
    ],
    ids=str,
)
def test_many_query_tokens(implementation, changes):
    assert_exact(problem(causal=True, **changes), implementation)


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("num_splits", [1, 7, None])
def test_a_half_filled_cache(implementation, num_splits):
    assert_exact(
        problem(kv_capacity=2100, seqlen_q=2, kv_heads=2, batch=2, causal=True, num_splits=num_splits), implementation
    )


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("lengths", [(700, 3, 256), (64, 64, 700), (20, 30, 40)])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_every_sequence_has_its_own_length(implementation, lengths, seqlen_q):
    p = problem(batch=3, kv_heads=2, seqlens_k=lengths, seqlen_q=seqlen_q, causal=True)
    assert_exact(p, implementation)


QUERY_COUNTS = (1, 5, 2, 130)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_heads": 1},
        {"seqlens_k": (700, 90, 256, 300)},
        {"kv_capacity": 900, "num_splits": 1},
        {"window": (200, 0)},
        {"page_size": 256, "seqlens_k": (700, 90, 256, 300)},
        {"seqlens_q": (1, 5, 2, 8), "seqlen_q": 8, "kv_heads": 1, "seqlens_k": (700, 90, 256, 300)},
        {"seqlens_q": (1, 1, 1, 1), "seqlen_q": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", [FA2, FA3])
def test_every_sequence_has_its_own_number_of_queries(implementation, changes):
    p = problem(**({"batch": 4, "kv_heads": 2, "seqlen_q": 130, "seqlens_q": QUERY_COUNTS, "causal": True} | changes))
    inputs = random_inputs(p)
    got = run_attention(program(p, implementation), inputs)
    want = attention(p, inputs["Q"], inputs["K"], inputs["V"])
    assert np.abs(got["O"] - want["O"]).max() < TOLERANCE[p.dtype]
    seen = np.isfinite(want["LSE"])
    assert np.abs(got["LSE"][seen] - want["LSE"][seen]).max() < 1e-4 and np.isneginf(got["LSE"][~seen]).all()


def test_query_counts_in_splits_and_bytes_of_each_library():
    p = problem(
        batch=4, heads=8, kv_heads=2, seqlen_q=8, seqlens_q=(1, 5, 2, 8), seqlen_k=4096, num_splits=4, causal=True
    )
    fa3 = program(p, FA3)
    inputs = random_inputs(p)
    got, want = run_attention(fa3, inputs), attention(p, inputs["Q"], inputs["K"], inputs["V"])
    assert np.abs(got["O"] - want["O"]).max() < TOLERANCE["bf16"] and any("combine" in k.name for k in fa3.kernels)
    main, combine = (next(k for k in fa3.kernels if name in k.name) for name in ("sm90", "combine"))
    # the queries that there are, once a split; each split's fp32 rows are read back once
    assert fa3.attributes["splits_per_sequence"] == (4,) * 4 and fa3.attributes["pack_gqa"]
    assert sm_traffic(main)["Q"] == (4 * 8 * 16 * 64 * 2, 0)
    assert sm_traffic(main)["O_partial"] == (0, 4 * 8 * 16 * 64 * 4) == sm_traffic(combine)["O_partial"][::-1]
    # FA2's varlen entry neither splits nor packs: each query head's CTA reads K and V
    fa2 = program(p.with_(num_splits=None), FA2)
    assert len(fa2.kernels) == 1 and not fa2.attributes["pack_gqa"]
    assert sm_traffic(fa2.kernels[0])["K"] == (4 * 8 * 4096 * 64 * 2, 0)
    with pytest.raises(UnsupportedError, match="never splits"):
        program(p, FA2)


def test_large_logits_do_not_overflow_in_fp16():
    p = problem(dtype="fp16", num_splits=4)
    inputs = random_inputs(p, scale=40.0)
    for implementation in (FA2, FA3):
        got = run_attention(program(p, implementation), inputs)
        want = attention(p, inputs["Q"], inputs["K"], inputs["V"])
        assert np.isfinite(got["O"]).all()
        assert np.abs(got["LSE"] - want["LSE"]).max() < 1e-4 * np.abs(want["LSE"]).max()
        assert np.abs(got["O"] - want["O"]).max() < 5e-3


# ------------------------------------------------------------------------------------------------ mutations


def _mutated(built, kernel_name: str, change):
    kernels = tuple(
        replace(k, roles=tuple(replace(r, ops=map_ops(r.ops, change)) for r in k.roles)) if kernel_name in k.name else k
        for k in built.kernels
    )
    return replace(built, kernels=kernels)


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("dropped", ["normalise", "exp", "weighted_add", "row_sum"])
def test_the_combine_kernel_needs_each_of_its_steps(implementation, dropped):
    p = problem(num_splits=4)
    built = program(p, implementation)
    inputs = random_inputs(p)
    want = run_attention(built, inputs)["O"]
    broken = _mutated(built, "combine", lambda op: None if isinstance(op, Compute) and op.fn == dropped else op)
    with np.errstate(all="ignore"):
        got = run_attention(broken, inputs)["O"]
    assert not np.allclose(got, want, atol=TOLERANCE["bf16"])


@pytest.mark.parametrize("implementation", [FA2, FA3])
def test_partial_lse_that_nobody_wrote_shows(implementation):
    p = problem(num_splits=4)
    built = program(p, implementation)

    def drop(op):
        return None if isinstance(op, Store) and op.into.tensor.name == "LSE_partial" else op

    got = run_attention(_mutated(built, "fwd", drop), random_inputs(p))
    assert not np.isfinite(got["LSE"]).any()


# ------------------------------------------------------------------------------------------------ bytes


def _traffic(built, kernel_index: int) -> dict[str, tuple[int, int]]:
    return sm_traffic(built.kernels[kernel_index])


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("num_splits", [1, 2, 7, None])
def test_packed_decode_reads_keys_and_values_once_a_kv_head(implementation, num_splits):
    p = problem(heads=8, kv_heads=2, batch=3, seqlen_k=1500, head_dim=128, num_splits=num_splits)
    traffic = _traffic(program(p, implementation), 0)
    one = p.batch * p.kv_heads * p.seqlen_k * p.head_dim * 2
    assert traffic["K"] == traffic["V"] == (one, 0)


def test_fa2_packs_only_one_query_token():
    p = problem(heads=8, kv_heads=2, seqlen_k=1500, head_dim=128, num_splits=3, seqlen_q=2, causal=True)
    one = p.kv_heads * p.seqlen_k * p.head_dim * 2
    assert _traffic(program(p, FA2), 0)["K"] == (4 * one, 0)
    assert _traffic(program(p, FA3), 0)["K"] == (one, 0)
    assert not program(p, FA2).attributes["pack_gqa"]
    assert program(p, FA3).attributes["pack_gqa"]


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize("seqlen_q", [1, 3, 150])
@pytest.mark.parametrize("head_dim", [64, 80, 192])
def test_partials_are_written_and_read_once(implementation, seqlen_q, head_dim):
    p = problem(heads=6, kv_heads=2, batch=2, seqlen_k=1900, seqlen_q=seqlen_q, head_dim=head_dim, num_splits=5)
    built = program(p, implementation)
    rows = p.batch * p.heads * p.seqlen_q
    o, lse = 5 * rows * head_dim * 4, 5 * rows * 4
    main, combine = _traffic(built, 0), _traffic(built, 1)
    assert main["O_partial"] == (0, o)
    assert main["LSE_partial"] == (0, lse)
    assert combine["O_partial"] == (o, 0)
    slices = -(-head_dim // 128) if implementation == FA3 else 1
    assert combine["LSE_partial"] == (lse * slices, 0)
    assert combine["O"] == (0, rows * head_dim * 2)
    assert combine["LSE"] == (0, rows * 4)
    assert "O" not in main


def test_empty_splits_of_a_half_filled_cache():
    p = problem(kv_capacity=2048, seqlen_k=512, head_dim=128, num_splits=8, heads=8, kv_heads=2)
    rows = p.heads
    fa2 = program(p, FA2)
    main, combine = _traffic(fa2, 0), _traffic(fa2, 1)
    # 16 blocks of capacity over 8 splits: the 4 blocks in use fill two of them
    assert main["Q"] == (2 * rows * 128 * 2, 0)
    assert main["O_partial"] == (0, 8 * rows * 128 * 4)
    assert combine["O_partial"] == (8 * rows * 128 * 4, 0)
    # FA3 counts used blocks: 3 of 176 keys, so 3 splits and none empty
    assert program(p, FA3).attributes["splits_per_sequence"] == (3,)


def test_fa3_leaves_out_the_partial_o_of_splits_without_keys():
    # 5 key blocks over 4 splits are 2 + 2 + 1 + 0
    p = problem(seqlen_k=5 * 176, head_dim=128, num_splits=4)
    built = program(p, FA3)
    assert _traffic(built, 0)["O_partial"] == (0, 3 * p.heads * 128 * 4)
    assert _traffic(built, 0)["LSE_partial"] == (0, 4 * p.heads * 4)
    assert _traffic(built, 1)["O_partial"] == (3 * p.heads * 128 * 4, 0)
    assert_exact(p, FA3)


def test_peak_memory_holds_the_capacity_and_the_partials():
    p = problem(kv_capacity=2048, seqlen_k=512, head_dim=128, num_splits=8)
    q = o = p.heads * 128 * 2
    cache = 2 * p.heads * 2048 * 128 * 2
    partials = 8 * p.heads * (128 + 1) * 4
    assert program(p, FA2).live_bytes == q + o + p.heads * 4 + cache + partials


# ------------------------------------------------------------------------------------------------ decisions


def test_default_follows_the_instructions():
    names = {gpu: default_implementation("flash_decoding", load_profile(gpu)) for gpu in ("a100_sxm4_80gb", "h100_sxm")}
    assert names == {"a100_sxm4_80gb": FA2, "h100_sxm": FA3}


@pytest.mark.parametrize(("batch", "splits"), [(24, 4), (25, 1), (33, 1)])
def test_fa2_splits_by_capacity(batch, splits):
    # Dao-AILab/flash-attention#1095, derived there from the heuristic: 40/8 heads, capacity 1024, 132 SMs
    p = AttentionProblem(
        batch=batch, heads=40, kv_heads=8, seqlen_q=1, seqlen_k=512, kv_capacity=1024, head_dim=128, dtype="fp16"
    )
    built = program(p, FA2)
    assert built.attributes["num_splits"] == splits
    assert built.kernels[0].ctas == batch * 8 * splits


def test_one_split_is_the_ordinary_kernel():
    built = program(problem(num_splits=1), FA2)
    assert [k.name for k in built.kernels] == ["flash_fwd"]
    assert built.attributes["tile"] == (128, 128)
    assert any("ordinary" in note for note in built.notes)


def test_fa3_schedules():
    dense = program(problem(num_splits=4), FA3)
    assert [(k.name, k.schedule) for k in dense.kernels] == [("flash_fwd_sm90", "grid"), ("flash_fwd_combine", "grid")]
    cached = program(problem(num_splits=4, kv_capacity=700), FA3)
    assert [k.name for k in cached.kernels] == ["prepare_varlen_num_blocks", "flash_fwd_sm90", "flash_fwd_combine"]
    assert cached.kernels[1].schedule == "dynamic"
    causal = program(problem(num_splits=1, seqlen_q=4, causal=True), FA3)
    assert [k.name for k in causal.kernels] == ["fill", "flash_fwd_sm90"]


def test_prepare_kernel_leaves_a_large_batch_unsplit():
    p = problem(batch=64, heads=32, kv_heads=8, seqlen_k=4096, kv_capacity=4096, head_dim=128)
    built = program(p, FA3)
    assert built.attributes["num_splits"] > 1
    assert set(built.attributes["splits_per_sequence"]) == {1}
    assert "O_partial" not in _traffic(built, 1)
    # its CTAs read one word each and leave
    assert set(_traffic(built, 2)) == {"scheduler_metadata"}


def test_only_long_sequences_are_split_and_the_longest_share_comes_first():
    p = problem(batch=3, kv_heads=2, seqlen_k=40_000, seqlens_k=(200, 40_000, 300), head_dim=128)
    built = program(p, FA3)
    splits = built.attributes["splits_per_sequence"]
    assert splits[0] == splits[2] == 1 < splits[1]
    main = next(k for k in built.kernels if k.name == "flash_fwd_sm90")
    work = main.coords["n_masked"] + main.coords["n_full"]
    assert main.ctas == 2 * sum(splits)
    assert work[0] == work.max()
    traffic = sm_traffic(main)
    rows = p.heads
    assert traffic["O"] == (0, 2 * rows * 128 * 2)
    assert traffic["O_partial"] == (0, splits[1] * rows * 128 * 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_capacity": 100}, "kv_capacity: 100 is below"),
        ({"batch": 2, "seqlens_k": (5,)}, "seqlens_k: 1 lengths for batch 2"),
        ({"seqlens_k": (701,)}, "seqlens_k: 701 is outside"),
    ],
)
@pytest.mark.parametrize("implementation", [FA2, FA3])
def test_bad_lengths_are_one_clear_line(implementation, changes, says):
    with pytest.raises(InputError, match=says):
        program(problem(**changes), implementation)


@pytest.mark.parametrize("implementation", [FA2, FA3])
@pytest.mark.parametrize(
    "changes",
    [{"dropout": 0.1}, {"mask": "bool"}, {"pass_": "bwd"}],
    ids=str,
)
def test_what_is_not_modelled_is_an_error(implementation, changes):
    with pytest.raises(UnsupportedError):
        program(problem(**changes), implementation)


def test_fa3_needs_hopper():
    with pytest.raises(UnsupportedError, match="wgmma"):
        program(problem(), FA3, "a100_sxm4_80gb")


def test_the_ordinary_kernel_spills_as_it_does_in_fa2():
    # H200 counters: 136.6 MB written to L2 by this decode, of which O and LSE are 0.5
    p = AttentionProblem(batch=64, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=4096, head_dim=128)
    built = program(p, FA2, "h200_sxm")
    assert [k.name for k in built.kernels] == ["flash_fwd"]
    written = sum(write for _, write in sm_traffic(built.kernels[0]).values())
    assert written == pytest.approx(136.59e6, rel=0.05)
    assert "spill" not in sm_traffic(program(problem(num_splits=2), FA2).kernels[0])


def test_tma_reads_whole_tiles_of_a_cache_and_garbage_behind_the_end_stays_out():
    # 300 of 1000 rows: whole tiles are copied, of which rows behind 300 are hidden
    p = problem(batch=2, kv_heads=2, seqlen_k=300, kv_capacity=1000)
    built = program(p, FA3)
    tile_n = built.attributes["tile"][1]
    main = next(k for k in built.kernels if k.name == "flash_fwd_sm90")
    rows = -(-300 // tile_n) * tile_n
    assert sm_traffic(main)["K"][0] == 2 * 2 * rows * p.head_dim * 2
    inputs = random_inputs(p)
    want = attention(p, inputs["Q"], inputs["K"], inputs["V"])["O"]
    assert np.abs(run_attention(built, inputs)["O"] - want).max() < 0.02
    # FA2 and gathers of pages read the rows that exist
    assert sm_traffic(program(p, FA2).kernels[0])["K"][0] == 2 * 2 * 300 * p.head_dim * 2
