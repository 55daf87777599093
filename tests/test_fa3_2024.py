"""FlashAttention-3 of July 2024: the kernel of the paper's figures, against our H200 and by its tiles and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from test_numbers import check_exact
from test_sm_engine import map_ops, softmax_waits_for_both_gemms

from algorithms import build_program
from algorithms.kernels_fa3_2024 import GRID_NAME, NAME, forward_tile
from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import UnsupportedError
from simulator.physics import Physics
from simulator.program import Signal, Wait
from simulator.sm_costs import SmSpec
from simulator.sm_timing import timing_of

H200 = load_profile("h200_sxm")
MEASURED = Path(__file__).parents[1] / "hardware_profiles" / "measurements" / "h200_sxm"
PAPER = AttentionProblem(batch=4, heads=16, seqlen_q=8448, head_dim=128, dtype="fp16")


def measured(name):
    return pandas.read_csv(MEASURED / name, comment="#")


def problem_of(row):
    sizes = {n: int(row[n]) for n in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim")}
    return AttentionProblem(**sizes, dtype=row["dtype"], causal=bool(row["causal"]))


def test_tiles_are_those_of_its_launch_templates():
    tiles = {(d, c): forward_tile(d, "fp16", c, 4) for d in (64, 128, 256) for c in (False, True)}
    shape = {key: (t.tile_m, t.tile_n, t.num_mma_warpgroups, t.cluster_m) for key, t in tiles.items()}
    assert shape[64, False] == shape[64, True] == (192, 128, 3, 1)
    assert shape[128, False] == (128, 176, 2, 2) and shape[128, True] == (128, 128, 2, 1)
    assert shape[256, False] == (128, 80, 2, 2) and shape[256, True] == (128, 80, 2, 1)
    assert forward_tile(128, "fp16", False, 3).cluster_m == 1
    eight = forward_tile(128, "e4m3", False, 4)
    assert (eight.tile_n, eight.intra_wg_overlap, eight.v_transposed_in_kernel) == (256, False, True)
    assert all(t.smem_bytes <= H200.smem_bytes_per_cta_max for t in (*tiles.values(), eight))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16"), (256, "fp16")])
def test_it_is_exact(head_dim, dtype, causal):
    problem = AttentionProblem(heads=2, seqlen_q=300, head_dim=head_dim, dtype=dtype, causal=causal)
    check_exact(build_program("fa3", problem, H200, NAME), problem)


def test_causal_tiles_go_out_as_they_come():
    problem = AttentionProblem(heads=4, seqlen_q=4096, head_dim=128, causal=True)
    old, new = (build_program("fa3", problem, H200, name).kernels[-1] for name in (NAME, "flash_attn_3"))
    assert old.schedule == new.schedule == "dynamic"
    first = slice(0, 32)
    assert (np.diff(old.coords["row0"][first]) == 128).all()
    assert new.coords["row0"][0] == 4096 - 128
    # it tests the mask in one block more, and walks no block twice
    assert old.coords["n_masked"].max() == new.coords["n_masked"].max() + 1
    both = [np.sort(k.coords["n_masked"] + k.coords["n_full"]) for k in (old, new)]
    assert np.array_equal(*both)


@pytest.mark.parametrize(
    ("dtype", "causal", "shortest", "mean"), [("fp16", 0, 512, 0.07), ("fp16", 1, 1024, 0.075), ("fp8", 0, 1024, 0.06)]
)
def test_our_h200_takes_as_long(dtype, causal, shortest, mean):
    """Nothing is fitted to these rows. Calls shorter than these lose more than the model says, up to 15 % (fp8: 25)."""
    rows = measured("timed_fa3_2024_run1.csv").query("dtype == @dtype and causal == @causal and seqlen_q >= @shortest")
    errors = [
        simulate("fa3", problem_of(row), H200, implementation=NAME, timing="graph").time_us / row.measured_time_us - 1
        for _, row in rows.iterrows()
    ]
    assert len(errors) >= 5
    assert np.abs(errors).mean() <= mean and np.abs(errors).max() <= 0.17


def test_the_papers_e4m3_kernel_gives_every_tile_a_cta():
    """Its figures are of a kernel that is not persistent: built so, the release takes on our H200 what the paper's H100
    took, within 8 % on average and without a bias; as released (persistent) it is 7 % faster. The model is fitted to
    neither; calls of up to 2048 keys lose up to 25 % more to a CTA's first blocks than it says."""
    published = pandas.read_csv(MEASURED.parents[1] / "published" / "fa3_h100_fp8_fwd.csv")
    key = ["seqlen_q", "head_dim", "causal"]

    def of(name, query):
        rows = measured(name).query(query).merge(published[[*key, "measured_time_us"]], on=key, suffixes=("", "_paper"))
        assert len(rows) == 24
        return rows

    grid = of("timed_fa3_2024_grid_run1.csv", "l2_state == 'warm'")
    released = of("timed_fa3_2024_run1.csv", "dtype == 'fp8'")
    faster = [r.measured_time_us_paper / r.measured_time_us - 1 for r in (grid, released)]
    assert abs(faster[0].mean()) < 0.03 and faster[0].abs().mean() < 0.08
    assert faster[1].mean() > 0.06 and faster[1].abs().mean() > 0.1
    assert set(published.implementation) == {GRID_NAME}
    long = grid.query("seqlen_q > 4000")
    errors = [
        simulate("fa3", problem_of(r), H200, implementation=GRID_NAME, timing="graph").time_us / r.measured_time_us - 1
        for _, r in long.iterrows()
    ]
    assert np.abs(errors).mean() < 0.07 and np.abs(errors).max() < 0.12


def test_hbm_bytes_are_the_counted_ones():
    rows = measured("counters_fa3_2024_run1.csv").query("seqlen_q in (2048, 16384) and dtype == 'fp16'")
    for _, row in rows.iterrows():
        result = simulate("fa3", problem_of(row), H200, implementation=NAME)
        got, want = result.hbm_read_bytes, row.measured_hbm_read_bytes
        assert got == pytest.approx(want, rel=0.1), row.case_id


def _period(change=lambda op: op):
    kernel = build_program("fa3", PAPER, H200, NAME).kernels[-1]
    kernel = replace(kernel, roles=tuple(replace(r, ops=map_ops(r.ops, change)) for r in kernel.roles))
    spec = SmSpec.of(H200, Physics(), kernel.path, kernel.compute_dtype)
    return timing_of(kernel, spec, (400.0, 800.0), 1).period_cycles[1][0]


def test_what_we_measured_of_its_ablation_is_what_the_schedule_says():
    """The same sources with one thing taken out, built and run on our H200: turns are worth nothing and pipelining a
    few per cent of the cycles, because the compiler put the wait for PV before the exponentials. (The paper has 12 %
    for pipelining.)"""
    builds = measured("timed_fa3_2024_builds_run1.csv").query("seqlen_q == 8448").set_index("measured_build")
    cycles = builds.measured_time_us * builds.measured_sm_clock_mhz
    without_turns, without_pipelining = (cycles[name] / cycles["full"] for name in ("no_turns", "no_pipelining"))
    assert abs(without_turns - 1) < 0.01 and 1.02 < without_pipelining < 1.06
    whole = _period()
    turns = _period(lambda op: None if isinstance(op, (Wait, Signal)) else op)
    assert turns / whole == pytest.approx(without_turns, abs=0.02)
    assert _period(softmax_waits_for_both_gemms) / whole == pytest.approx(without_pipelining, abs=0.06)


def test_what_it_does_not_run_is_said():
    problem = AttentionProblem(heads=4, seqlen_q=512, head_dim=128)
    with pytest.raises(UnsupportedError, match="window"):
        simulate("fa3", problem.with_(window=(64, 0)), H200, implementation=NAME)
    with pytest.raises(UnsupportedError, match="the paper's e4m3 kernel"):
        simulate("fa3", problem, H200, implementation=GRID_NAME)
    with pytest.raises(UnsupportedError, match="tiles of its release"):
        simulate("fa3", problem, H200, implementation=NAME, tiles="128x64x2x2")
