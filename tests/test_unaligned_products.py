"""Unfused attention whose rows are no multiple of 16 bytes: split products, small tiles, scalar softmax steps."""

from pathlib import Path

import pandas as pd
import pytest
from test_backward import assert_exact
from test_numbers import check_exact

from algorithms import build_program
from simulator import AttentionProblem, load_profile, simulate
from simulator.accesses import sm_traffic
from simulator.predict import predict_frame

M = Path(__file__).parents[1] / "hardware_profiles" / "measurements" / "h200_sxm"
H200 = load_profile("h200_sxm")


def single(seqlen_q, seqlen_k=None, head_dim=64, **more):
    return AttentionProblem(seqlen_q=seqlen_q, seqlen_k=seqlen_k or seqlen_q, head_dim=head_dim, **more)


def predicted_kernels(problem):
    return simulate("standard", problem, H200).kernels


@pytest.mark.parametrize(
    "problem",
    [
        single(257),
        single(131, 1501, 128, dtype="fp16"),
        single(70, 1026, causal=True),
        single(66, 514, heads=5, kv_heads=1),
        single(257, heads=4),
    ],
)
def test_split_products_are_exact(problem):
    check_exact(build_program("standard", problem, H200), problem)


def test_split_gradients_are_exact():
    assert_exact(build_program("standard", single(321, head_dim=128, pass_="fwd_bwd"), H200))


def test_a_single_matrix_splits_its_inner_dimension_and_several_do_not():
    """By ncu: P V of 895 keys in 9 parts of 28 tiles, 3.7 MB written and read again by the kernel that adds them."""
    program = build_program("standard", single(895, head_dim=128), H200)
    names = [k.name for k in program.kernels]
    assert names[-2:] == ["pv_gemm", "pv_gemm_sum"]
    product, add = program.kernels[-2:]
    parts = product.coords["split"].max() + 1
    assert 3 <= parts <= 9 and product.ctas == 28 * parts
    # every slice of P's columns by one CTA of a tile
    assert product.coords["n_k"].sum() == 28 * -(-895 // 32)
    written = sm_traffic(product)["O_parts"][1]
    assert written == parts * 895 * 128 * 4 == sm_traffic(add)["O_parts"][0]
    several = build_program("standard", single(895, head_dim=128, heads=4), H200)
    assert [k.name for k in several.kernels][-1] == "pv_gemm" and several.kernels[-1].ctas == 14 * 2 * 4


def test_rows_between_vectors_take_softmax_backward_longer():
    """By ncu a row of 2079 takes longer than one of 3281: it has no whole vector for every thread."""
    timed = {}
    for seqlen, heads in ((2079, 13), (3281, 5), (2080, 13)):
        kernel = next(
            k
            for k in predicted_kernels(single(seqlen, head_dim=128, heads=heads, pass_="bwd"))
            if k.name == "softmax_backward"
        )
        timed[seqlen] = kernel.time_us / (heads * seqlen)
    assert timed[2079] > timed[3281] > 1.2 * timed[2080]
    # 263.8 us for 13 heads of 2079 rows, 149.9 for 5 of 3281
    assert timed[2079] * 13 * 2079 == pytest.approx(263.8, rel=0.1)
    assert timed[3281] * 5 * 3281 == pytest.approx(149.9, rel=0.2)


def test_times_of_the_measured_rows():
    """94 rows, all of the calibrating side; no parameter is fitted to them."""
    rows = pd.read_csv(M / "timed_unaligned_run1.csv", comment="#")
    rows = rows[rows["algorithm"] == "standard"]
    out = predict_frame(rows, "h200_sxm")
    assert len(out) == 94 and (out["error"] == "").all()
    error = out["time_us"].astype(float) / out["measured_time_us"].astype(float) - 1
    assert error.abs().mean() < 0.08
    assert abs(error.mean()) < 0.04
    assert error.abs().max() < 0.3


def test_parts_of_rows_are_read_once():
    """Two CTAs of an element-wise kernel share a row of 1025: each reads its part."""
    problem = single(1025, head_dim=40, heads=40, kv_heads=5, pass_="bwd")
    kernel = next(k for k in predicted_kernels(problem) if k.name == "dp_times_p")
    matrix = 40 * 1025 * 1025 * 2
    assert kernel.l2_read_bytes == 2 * matrix and kernel.l2_write_bytes == matrix
