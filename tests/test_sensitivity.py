"""Elasticities: slopes of known laws, limits of real kernels, thresholds, and where the limiter changes."""

import csv
import math
from dataclasses import replace

import pytest
from analytic_bench import GPU, AnalyticBench
from command_line import failure

from simulator import AttentionProblem, load_profile
from simulator.cli import main
from simulator.errors import InputError
from simulator.options import RunOptions
from simulator.plots.tornado import plot_tornado, tornado_rows
from simulator.profile import SCALAR_KEYS
from simulator.sensitivity import (
    PARAMETERS,
    Bench,
    _limiter_change,
    _sensitivity,
    _slope,
    _threshold,
    actual_factor,
    sensitivities,
)

HBM = "hbm_bandwidth_bytes_per_s"
DECODE = AttentionProblem(batch=8, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=16384, head_dim=128)
PREFILL = AttentionProblem(batch=1, heads=16, seqlen_q=4096, head_dim=128)


def one(algorithm: str, problem: AttentionProblem, *keys: str, **how):
    options = RunOptions(clock_mhz=1500)
    found = sensitivities(problem, GPU, [algorithm], options, parameters=keys, limits=False, **how)
    return {s.key: s for s in found}


@pytest.mark.parametrize("power", [-1.0, -0.4, 0.0, 0.7])
def test_the_slope_of_a_power_law_is_its_power(power):
    points = [(f, 7.0 * f**power) for f in (0.9, 0.95, 1.0, 1.05, 1.1)]
    slope, error = _slope(points)
    assert math.isclose(slope, power, abs_tol=1e-12)
    assert error < 1e-9


def test_the_error_tells_luck_from_slope():
    """A zigzag has no slope, and says so."""
    slope, error = _slope([(0.9, 1.02), (0.95, 0.98), (1.0, 1.02), (1.05, 0.98), (1.1, 1.02)])
    assert abs(slope) < error
    assert error > 0.1


def test_slopes_of_nothing_are_nothing():
    assert _slope([]) == _slope([(1.0, 5.0)]) == (0.0, 0.0)
    assert _slope([(0.9, 0.0), (1.1, 5.0)]) == (0.0, 0.0)


def test_a_known_law_through_the_whole_measurement():
    """T = 60/x + 40 at x = 1: elasticity -0.6, one step below and above as the formula gives them."""
    found = _sensitivity(AnalyticBench(lambda x: 60 / x + 40), HBM, 0.01, limits=False)
    assert math.isclose(found.time, -0.6, rel_tol=2e-3)
    assert math.isclose(found.low_us, 60 * 1.01 + 40) and math.isclose(found.high_us, 60 / 1.01 + 40)
    assert found.note == ""


def test_where_it_cannot_run_the_slope_is_one_sided_and_says_why():
    found = _sensitivity(AnalyticBench(lambda x: 100 / x, least=1.0), "smem_bytes_per_sm", 0.05, limits=False)
    assert math.isclose(found.time, -1.0, rel_tol=1e-3)
    assert found.low_us is None and found.high_us is not None
    assert "x0.952: a tile needs more SMEM" in found.note


@pytest.mark.parametrize("at", [0.2, 0.65, 1.3, 6.0])
def test_the_change_of_limiter_is_found_where_it_is(at):
    bench = AnalyticBench(lambda x: 1.0, lambda x: "hbm" if x < at else "tensor")
    side = 1 if at > 1 else -1
    found = _limiter_change(bench, HBM, side)
    assert found.limiter == ("tensor" if at > 1 else "hbm")
    assert abs(math.log(found.factor / at)) < 0.04
    assert _limiter_change(bench, HBM, -side) is None


def test_memory_bound_decoding_lives_on_hbm_bandwidth():
    found = one("flash_decoding", DECODE, HBM, "tensor_flop_per_cycle_per_sm")
    assert -1.05 < found[HBM].time < -0.6
    assert abs(found["tensor_flop_per_cycle_per_sm"].time) < 0.2


def test_compute_bound_prefill_does_not():
    found = one("fa3", PREFILL, HBM, "num_sms", "tensor_flop_per_cycle_per_sm")
    assert abs(found[HBM].time) < 0.1
    assert found["tensor_flop_per_cycle_per_sm"].time < -0.25


def test_the_clock_is_worth_what_runs_at_it():
    """Cycles do not change with the clock, HBM does not follow it: between 0 and -1, near -1 for prefill."""
    found = sensitivities(PREFILL, GPU, ["fa3"], RunOptions(), parameters=["max_clock_hz"], limits=False)
    assert -1.05 < found[0].time < -0.8


def test_bytes_follow_the_size_of_the_l2_where_output_fills_it():
    """A larger L2 writes less of O back during the run; what SMs ask of it stays the same."""
    problem = PREFILL.with_(batch=2)
    found = sensitivities(problem, GPU, ["fa2"], RunOptions(clock_mhz=1500), parameters=["l2_bytes"], limits=False)
    assert -0.5 < found[0].hbm_bytes < -0.02
    assert found[0].l2_bytes == 0


def test_another_number_of_resident_ctas_is_a_threshold_not_a_slope():
    """FA2 at head dim 128 fills the register file with two CTAs: one register less and there is one."""
    found = one("fa2", PREFILL, "registers_per_sm")["registers_per_sm"]
    assert "1 CTA of flash_fwd an SM instead of 2, a threshold" in found.note
    assert abs(found.time) < 0.05
    assert found.low_us > 1.1 * found.base_us


def test_another_tile_is_a_threshold():
    base = Bench("fa2", PREFILL.with_(seqlen_q=256, seqlen_k=256, num_splits=1), GPU, RunOptions()).result({})
    assert _threshold(base, base) == ""
    assert _threshold(base, replace(base, attributes=dict(base.attributes) | {"tile": (1, 2)})) == (
        "tile 1x2 instead of 128x64, a threshold"
    )


def test_whole_numbers_move_by_what_they_can():
    assert actual_factor(GPU, "num_sms", 1.001) == 1.0
    assert actual_factor(GPU, "num_sms", 1.05) == 139 / 132
    assert actual_factor(GPU, HBM, 1.001) == 1.001


def test_every_parameter_is_a_key_of_a_profile():
    assert set(PARAMETERS) - set(SCALAR_KEYS) == {"tensor_flop_per_cycle_per_sm"}


def test_an_algorithm_that_cannot_run_here_is_an_error():
    with pytest.raises(InputError, match="lacks"):
        sensitivities(PREFILL, load_profile("a100_sxm4_80gb"), ["fa3"], RunOptions(), parameters=[HBM])


def test_the_tornado_shows_what_the_table_says():
    found = [
        _sensitivity(AnalyticBench(lambda x: 60 / x + 40), HBM, 0.05, limits=False),
        _sensitivity(AnalyticBench(lambda x: 100.0), "l2_bytes", 0.05, limits=False),
        _sensitivity(AnalyticBench(lambda x: 90 / x + 10), "num_sms", 0.05, limits=False),
    ]
    rows = tornado_rows(found, "h100_sxm", 0.05)
    figure, ax = plot_tornado(rows)
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert labels == ["SMs", "HBM bandwidth"], "the largest effect on top, no effect left out"
    widths = {round(patch.get_width(), 6) for patch in ax.patches if patch.get_width()}
    assert {round(row[f"change_{side}_percent"], 6) for row in rows for side in ("below", "above")} - {0.0} == widths
    assert ax.get_xlabel() == "change of time, %"
    assert figure.legends


def test_the_command_prints_a_table_and_writes_the_picture_with_its_csv(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plot = tmp_path / "t.svg"
    small = ["--heads", "2", "--seqlen", "512", "--head-dim", "64", "--gpu", "h100_sxm"]
    asked = ["--parameters", "hbm_bandwidth,tensor_rate", "--algorithm", "fa2,fa3", "--no-limits", "-o", str(plot)]
    assert main(["sensitivity", *small, *asked]) == 0
    shown = capsys.readouterr().out
    assert "fa2 on h100_sxm" in shown and "fa3 on h100_sxm" in shown and "tensor rate" in shown
    assert plot.read_text().startswith("<?xml")
    with plot.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and {row["parameter"] for row in rows} == {HBM, "tensor_flop_per_cycle_per_sm"}
    assert all(-1.2 < float(row["time_elasticity"]) < 0.5 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parameters", "hbm_bandwith"], "--parameters: unknown key 'hbm_bandwith'; did you mean 'hbm_bandwidth'?"),
        (["--parameters", "l2,l2_bytes"], "'l2_bytes' is given twice"),
        (["--step", "0"], "--step: 0 is not between"),
        (["--algorithm", "fa9"], "'fa9' is unknown"),
        (["-o", "picture.txt"], "is no picture"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, said):
    assert said in failure(capsys, "sensitivity", "--heads", "1", "--seqlen", "128", *arguments)


@pytest.mark.parametrize("command", [("sensitivity",), ("require", "--target", "fa3 <= 1ms")])
def test_a_list_of_gpus_is_one_too_many(command, capsys):
    assert main([*command, "--gpu", "a100_sxm4_80gb,h100_sxm"]) == 2
    assert "this command takes one GPU" in capsys.readouterr().err


def test_what_a_changed_gpu_lacks_is_said_without_its_long_name():
    problem, profile = AttentionProblem(heads=8, seqlen_q=512, head_dim=128), load_profile("h100_sxm")
    keys = {"parameters": ["registers_per_sm"], "step": 0.05, "limits": False}
    (found,) = sensitivities(problem, profile, ["fa3"], RunOptions(), **keys)
    assert "h100_sxm has 62" in found.note and "[" not in found.note
