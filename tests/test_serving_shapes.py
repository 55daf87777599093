"""What serving runs: chunks on a long cache, prefixes, a few queries, pages, windows. Exact numbers, and our H200."""

import csv

import numpy as np
import pytest

from algorithms import build_program
from simulator import simulate
from simulator.accesses import sm_traffic
from simulator.predict import predict_row
from simulator.problem import AttentionProblem
from simulator.profile import load_profile, profile_folder
from simulator.reference import attention, random_inputs, run_attention

GPU = load_profile("h200_sxm")
#: Families of the H200 campaign that these shapes are judged by, and the mean absolute error of time each may have.
FAMILIES = {
    "fa2_chunked": 0.12,
    "fa3_chunked": 0.10,
    "fa2_window": 0.16,
    "fa3_window": 0.12,
    "decode_fa2_queries": 0.12,
    "decode_fa3_queries": 0.10,
    "decode_fa3_paged": 0.10,
    "decode_fa3_capacity": 0.12,
}


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8, 100])
def test_queries_on_a_cached_prefix_see_the_prefix_and_their_own_past(algorithm, seqlen_q):
    # the keys of a cached prefix are read, not computed: queries are the last of the sequence
    problem = AttentionProblem(heads=4, kv_heads=2, seqlen_q=seqlen_q, seqlen_k=600, head_dim=64, causal=True)
    inputs = random_inputs(problem, seed=7)
    got = run_attention(build_program(algorithm, problem, GPU), inputs)["O"]
    want = attention(problem, inputs["Q"], inputs["K"], inputs["V"])["O"]
    assert np.abs(got - want).max() < 0.01 * np.abs(want).max()
    whole = problem.with_(seqlen_q=600)
    queries = np.zeros((4, 600, 64), np.float32)
    queries[:, 600 - seqlen_q :] = inputs["Q"]
    last = attention(whole, queries, inputs["K"], inputs["V"])["O"][:, 600 - seqlen_q :]
    assert np.abs(last - want).max() < 1e-12


def test_chunks_of_a_prefill_add_up_to_its_work_and_cost_a_little_more():
    whole = AttentionProblem(heads=32, kv_heads=8, seqlen_q=8192, head_dim=128, causal=True)
    chunks = [whole.with_(seqlen_q=2048, seqlen_k=2048 * (i + 1)) for i in range(4)]
    assert sum(chunk.flops() for chunk in chunks) == whole.flops()
    for algorithm in ("fa2", "fa3"):
        times = [simulate(algorithm, p, GPU).time_us for p in (whole, *chunks)]
        assert 1.0 < sum(times[1:]) / times[0] < 1.35
        assert times[1:] == sorted(times[1:])


def test_a_512_query_chunk_on_16k_keys_reads_the_cache_once_a_row_block():
    problem = AttentionProblem(heads=32, kv_heads=8, seqlen_q=512, seqlen_k=16384, head_dim=128, causal=True)
    kernel = build_program("fa3", problem, GPU).kernels[-1]
    row_blocks, cache = 512 // 128, 8 * 16384 * 256
    # each query head reads its KV head's cache for each of its row blocks, up to the diagonal
    assert 0.97 * 4 * row_blocks * cache < sm_traffic(kernel)["K"][0] <= 4 * row_blocks * cache


def measured_rows():
    path = profile_folder() / "measurements" / "h200_sxm" / "timed_run1.csv"
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [row for row in rows if row["family"] in FAMILIES and row["measured_time_us"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_our_h200_runs_and_the_family_is_near_it(family):
    rows = [row for row in measured_rows() if row["family"] == family]
    assert len(rows) >= 3
    errors = []
    for row in rows:
        output = predict_row(row, "h200_sxm")
        assert not output["error"], (row["case_id"], output["error"])
        errors.append(float(output["time_us"]) / float(row["measured_time_us"]) - 1)
    assert np.mean(np.abs(errors)) < FAMILIES[family], dict(zip((r["case_id"] for r in rows), errors, strict=True))
