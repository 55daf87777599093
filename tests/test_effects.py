"""Effects that come from no parameter, each by its signature in measurements.

Others have their test beside the part of the model that they come from: waves, order, the clock, splits, row locality,
instruction supply.
"""

from pathlib import Path

import pandas as pd
import pytest

from simulator import AttentionProblem, load_profile, simulate
from simulator.physics import Physics
from simulator.predict import predict_frame
from simulator.program import Instructions
from simulator.sm_costs import PIPE_INDEX, SmSpec, compile_ops

ROOT = Path(__file__).parents[1] / "hardware_profiles"
H200 = load_profile("h200_sxm")


@pytest.fixture(scope="module")
def timed() -> pd.DataFrame:
    return pd.read_csv(ROOT / "measurements" / "h200_sxm" / "timed_run1.csv", comment="#")


@pytest.fixture(scope="module")
def counted() -> pd.DataFrame:
    return pd.read_csv(ROOT / "measurements" / "h200_sxm" / "counters_run1.csv", comment="#")


def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    out = predict_frame(rows, "h200_sxm")
    assert (out["error"] == "").all()
    return out.set_index("case_id")


def test_a_launch_of_one_cta_takes_its_floor(timed):
    """One tile and 128 keys: 9 to 12 us in a graph, of which the tile's work is a fraction."""
    rows = timed[timed["case_id"].str.match(r"fa[23]_cta-b1-h1-q\d+(k128)?-d\d+") & (timed["measured_time_us"] < 12)]
    assert len(rows) >= 6
    out = predicted(rows)
    ratio = out["time_us"].astype(float) / out["measured_time_us"].astype(float)
    assert ratio.between(0.88, 1.16).all(), ratio
    assert ratio.mean() == pytest.approx(1.0, abs=0.05)


def test_masked_tiles_on_the_diagonal_cost_more_than_whole_ones(timed):
    """256 keys: a mask saves FA3 a fifth of its time where it saves a quarter of its tiles, and FA2 (blocks of 64 keys)
    nothing at all: masked blocks run instructions of their own, and epilogues are not saved."""
    for name, most in (("fa3", 0.9), ("fa2", 1.1)):
        pair = [f"{name}_length_d128-b64-h16-q256-d128{mask}" for mask in ("", "-causal")]
        out = predicted(timed[timed["case_id"].isin(pair)])
        plain, masked = (out.loc[case] for case in pair)
        measured = masked["measured_time_us"] / plain["measured_time_us"]
        saved = masked["executed_flops"] / plain["executed_flops"]
        ratio = masked["time_us"] / plain["time_us"]
        assert saved + 0.02 < ratio < most
        assert ratio == pytest.approx(measured, rel=0.06)


def test_a_persistent_tile_pays_for_what_is_outside_its_loop():
    """Tiles of one key block, query heads packed into rows or not: 1000 to 1500 instructions a warp that no loop has,
    the copies of Q and O by threads among them."""
    rows = pd.read_csv(ROOT / "measurements" / "h200_sxm" / "timed_builds_run1.csv", comment="#")
    rows = rows[(rows["family"] == "builds_packed") & (rows["dtype"] == "bf16")]
    rows = rows[rows["seqlen_k"] == rows["seqlen_q"]]
    out = predicted(rows)
    error = out["time_us"].astype(float) / out["measured_time_us"].astype(float) - 1
    assert len(error) == 24
    assert error.abs().mean() < 0.09
    assert abs(error.mean()) < 0.06


def test_spilled_registers_reach_l2_and_stay_there(counted):
    """FA2 at head dim 64 writes several times O to L2, once a key block and thread, and HBM sees none of it."""
    rows = counted[counted["case_id"].str.startswith("fa2_length_d64-") & (counted["seqlen_q"] >= 2048)]
    assert len(rows) >= 4
    out = predicted(rows)
    for _, row in out.iterrows():
        o_and_lse = row["batch"] * row["heads"] * row["seqlen_q"] * (row["head_dim"] * 2 + 4)
        assert row["measured_l2_write_bytes"] > 2 * o_and_lse
        assert row["l2_write_bytes"] == pytest.approx(row["measured_l2_write_bytes"], rel=0.2)
        assert row["hbm_write_bytes"] <= 1.02 * o_and_lse


def test_pipes_are_separate_and_every_instruction_takes_an_issue_slot():
    """Exponentials, multiply-adds, comparisons and conversions each load a pipe of their own (conversions the ALU's, at
    their own rate); a faster one shortens nothing but itself."""
    spec = SmSpec.of(H200, Physics(), "wgmma", "bf16")
    amounts = {"fma": 4096.0, "alu": 2048.0, "convert": 1024.0, "exp": 512.0}
    (op,) = compile_ops([Instructions("all", tuple(amounts.items()))], 8, spec)
    cycles = {name: dict(op.work)[PIPE_INDEX[name]] for name in ("fp32", "alu", "exp", "issue")}
    assert cycles["fp32"] == pytest.approx(4096 / spec.fma)
    assert cycles["alu"] == pytest.approx(2048 / spec.alu + 1024 / spec.convert)
    assert cycles["exp"] == pytest.approx(512 / spec.exp)
    assert cycles["issue"] == pytest.approx(sum(amounts.values()) / spec.issue_lanes)


@pytest.mark.parametrize(("gpu", "ceiling"), [("a100_sxm4_80gb", 1.0), ("h100_sxm", 0.63), ("b200", 0.25)])
def test_mma_sync_is_a_ceiling_on_newer_gpus(gpu, ceiling):
    """FA2's instructions reach a part of the datasheet's FLOP/s on Hopper and less on Blackwell, and FA2 about two
    thirds of that part: published 355 of 989 TFLOP/s on an H100 and 354 of 2250 on a B200."""
    profile = load_profile(gpu)
    result = simulate("fa2", AttentionProblem(batch=4, heads=16, seqlen_q=8192, head_dim=128, dtype="fp16"), profile)
    share = result.flops / result.time_us * 1e6 / result.spec_tensor_flops
    assert 0.5 * ceiling < share < 0.8 * ceiling
    assert result.path_peak_flops / result.spec_tensor_flops == pytest.approx(ceiling, abs=0.03)


def test_hbm_takes_longer_for_bytes_that_are_written():
    """A softmax that reads S and writes P against a decode step that only reads, both bound by HBM: the writer reaches
    less bandwidth."""
    read = simulate(
        "flash_decoding",
        AttentionProblem(batch=64, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=32768, head_dim=128),
        H200,
        implementation="flash_attn_3_kvcache",
    )
    both = simulate("standard", AttentionProblem(batch=16, heads=16, seqlen_q=4096, head_dim=128), H200)
    softmax = next(k for k in both.kernels if "oft" in k.name)
    rates = [(k.hbm_read_bytes + k.hbm_write_bytes) / k.time_us for k in (read.kernels[0], softmax)]
    assert read.limiter == "hbm"
    assert rates[1] < 0.97 * rates[0]
