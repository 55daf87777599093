"""Paged KV caches: exact numbers, page-table bytes, and which kernels copy whole tiles or gather rows."""

import numpy as np
import pytest

from algorithms import build_program
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.program import Acquire, Await, Compute, Load, walk_ops
from simulator.reference import attention, random_inputs, run_attention
from simulator.traffic import sm_traffic

FA2, FA3 = "torch_flash_splitkv", "flash_attn_3_kvcache"


def problem(**changes) -> AttentionProblem:
    defaults = {"heads": 8, "kv_heads": 2, "seqlen_q": 1, "seqlen_k": 1300, "head_dim": 128, "page_size": 16}
    return AttentionProblem(**(defaults | changes))


def program(p: AttentionProblem, implementation: str = FA3):
    return build_program("flash_decoding", p, load_profile("h100_sxm"), implementation)


def main_kernel(built):
    return next(k for k in built.kernels if k.name in ("flash_fwd_sm90", "flash_fwd_splitkv"))


@pytest.mark.parametrize(
    ("implementation", "changes"),
    [
        (FA3, {"page_size": 1, "kv_heads": 8, "num_splits": 1}),
        (FA3, {"page_size": 16}),
        (FA3, {"page_size": 16, "head_dim": 192, "seqlen_q": 2, "causal": True}),
        (FA3, {"page_size": 128, "seqlen_q": 100, "causal": True, "num_splits": 3}),
        (FA3, {"page_size": 64, "kv_capacity": 2048, "seqlen_q": 3, "causal": True}),
        (FA2, {"page_size": 256}),
        (FA2, {"page_size": 512, "num_splits": 1, "seqlen_q": 5, "causal": True}),
    ],
    ids=str,
)
def test_numbers(implementation, changes):
    p = problem(**changes)
    inputs = random_inputs(p)
    got = run_attention(program(p, implementation), inputs)
    want = attention(p, inputs["Q"], inputs["K"], inputs["V"])
    assert np.abs(got["O"] - want["O"]).max() < 1.5e-2
    assert np.abs(got["LSE"] - want["LSE"]).max() < 1e-4


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 128])
def test_decode_gathers_and_reads_each_entry_once_a_kv_head(page_size):
    p = problem(page_size=page_size, seqlen_k=1280, batch=3)
    built = program(p)
    assert built.attributes["kv_copies"] == "gather (cp.async)"
    traffic = sm_traffic(main_kernel(built))
    assert traffic["page_table"] == (p.batch * p.kv_heads * 4 * p.seqlen_k // page_size, 0)
    assert traffic["K"] == (p.batch * p.kv_heads * p.seqlen_k * p.head_dim * 2, 0)


@pytest.mark.parametrize(("page_size", "seqlen_q", "copies"), [
    (128, 100, "TMA"),
    (256, 100, "TMA"),
    (64, 100, "gather (cp.async)"),  # no whole key block
    (128, 32, "gather (cp.async)"),  # 32 queries x 4 heads fill one tile of 128 rows: not more
])  # fmt: skip
def test_whole_tiles_need_large_pages_and_many_queries(page_size, seqlen_q, copies):
    p = problem(page_size=page_size, seqlen_q=seqlen_q, causal=True)
    assert program(p).attributes["kv_copies"] == copies


def test_entries_are_requested_before_the_slot_is_awaited_and_used_after():
    loader = main_kernel(program(problem())).roles[0]
    ops = [op for _, op in walk_ops(loader.ops)]
    for i, op in enumerate(ops):
        if isinstance(op, Acquire) and op.pipe.name == "k":
            assert isinstance(ops[i - 1], Load) and ops[i - 1].source.tensor.name == "page_table"
            assert isinstance(ops[i + 1], Await) and ops[i + 1].token == ops[i - 1].token
            assert isinstance(ops[i + 2], Compute) and ops[i + 2].fn == "gather_address"
            assert isinstance(ops[i + 3], Load) and ops[i + 3].via == "cp_async"
    assert loader.warps == 4


def test_fa2_pages_force_its_split_kernel_and_hold_whole_tiles():
    built = program(problem(page_size=256, num_splits=1), FA2)
    assert [k.name for k in built.kernels] == ["flash_fwd_splitkv"]
    assert built.attributes["tile"] == (64, 64)
    assert not any(isinstance(op, Compute) and op.fn == "gather_address" for _, _, op in built.kernels[0].walk())
    with pytest.raises(UnsupportedError, match="multiple of 256"):
        program(problem(page_size=128), FA2)


def test_capacity_comes_in_whole_pages():
    p = problem(page_size=1024, seqlen_k=1300, kv_capacity=1500, num_splits=1)
    cache = 2 * p.kv_heads * 2048 * p.head_dim * 2
    without = program(p.with_(page_size=None, kv_capacity=2048)).live_bytes
    table = 2 * 4
    assert program(p).live_bytes - table == without
    assert without > cache


def test_sequences_of_their_own_length():
    p = problem(batch=2, seqlens_k=(1300, 77), seqlen_q=3, causal=True, page_size=64)
    inputs = random_inputs(p)
    got = run_attention(program(p), inputs)
    for b, length in enumerate(p.seqlens_k):
        one = p.with_(batch=1, seqlen_k=length, seqlens_k=None)
        q = inputs["Q"][b * p.heads : (b + 1) * p.heads]
        k, v = (inputs[n][b * p.kv_heads : (b + 1) * p.kv_heads, :length] for n in "KV")
        want = attention(one, q, k, v)
        assert np.abs(got["O"][b * p.heads : (b + 1) * p.heads] - want["O"]).max() < 1.5e-2
