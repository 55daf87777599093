"""The committed H200 campaign: complete, taken twice, split by family, and within physical bounds."""

from pathlib import Path

import pandas as pd
import pytest

from simulator.measure import finding_tables as tables
from simulator.measure.findings import FINDINGS, main, page

DATA = Path(__file__).parents[1] / "hardware_profiles" / "measurements" / "h200_sxm"


def read(name):
    return pd.read_csv(DATA / name, comment="#")


@pytest.fixture(scope="module")
def timed():
    return read("timed_run1.csv").set_index("case_id"), read("timed_run2.csv").set_index("case_id")


@pytest.fixture(scope="module")
def counted():
    return read("counters_run1.csv").set_index("case_id"), read("counters_run2.csv").set_index("case_id")


def test_size_and_no_failed_rows(timed, counted):
    for runs, least in ((timed, 500), (counted, 250)):
        for run in runs:
            assert len(run) >= least and run.index.is_unique
            assert run.measured_error.isna().all()
        assert set(runs[0].index) == set(runs[1].index)
    assert len(read("micro_run1.csv")) >= 60
    assert set(timed[0].index) == set(read("cases.csv").case_id)


def test_the_two_runs_agree(timed, counted):
    first, second = timed[0], timed[1].loc[timed[0].index]
    assert (first.measured_time_us / second.measured_time_us - 1).abs().median() < 0.005
    first, second = counted[0], counted[1].loc[counted[0].index]
    large = first.measured_hbm_read_bytes > 30e6
    assert (first.measured_hbm_read_bytes / second.measured_hbm_read_bytes - 1).abs()[large].median() < 0.002


def test_every_family_is_on_one_side_and_both_sides_cover_every_algorithm_and_pass():
    split, cases = read("split.csv"), read("cases.csv")
    assert split.family.is_unique
    added = {
        "timed_more_run1.csv": "calibrate",
        "timed_published_run1.csv": "calibrate",
        "timed_random_run1.csv": "calibrate",
        "timed_builds_run1.csv": "calibrate",
        "timed_unaligned_run1.csv": "calibrate",
        "timed_ordered_run1.csv": "judge",
        "timed_random2_run1.csv": "judge",
        "timed_serving_run1.csv": "judge",
        "timed_fa3_2024_run1.csv": "judge",
        "timed_fa3_2024_grid_run1.csv": "judge",
    }
    families = {name: set(read(name).family) for name in added}
    assert set(split.family) == set(cases.family).union(*families.values())
    for name, side in added.items():
        assert set(split[split.family.isin(families[name])].side) == {side}
    sides = cases.merge(split[["family", "side"]], on="family").groupby(["algorithm", "pass"]).side.agg(set)
    assert (sides == {"calibrate", "judge"}).all()
    share = cases.merge(split[["family", "side"]], on="family").side.eq("calibrate").mean()
    assert 0.3 < share < 0.5


def test_rows_carry_the_family_that_the_split_knows(timed):
    families = read("cases.csv").set_index("case_id").family
    assert (timed[0].family == families.loc[timed[0].index]).all()


def test_clocks_are_physical(timed, counted):
    for run in (*timed, *counted):
        assert run.measured_sm_clock_mhz.between(1200, 1990).all()


def test_no_kernel_reads_less_from_hbm_than_its_inputs_less_what_a_flush_leaves(counted):
    """Q, K and V come from HBM at least once, but for the 12 MB of them that reading 512 MB was seen to leave in L2."""
    rows = counted[0]
    rows = rows[(rows["pass"] == "fwd") & rows.algorithm.isin(["fa2", "fa3"]) & rows.window.isna()]
    inputs = tables.input_bytes(rows)
    assert (inputs - rows.measured_hbm_read_bytes).max() < 12e6
    large = inputs > 150e6
    assert large.sum() > 50
    assert (rows.measured_hbm_read_bytes[large] / inputs[large]).min() > 0.94


def test_times_are_above_the_tensor_roofline(timed):
    """No kernel beats 4096 bf16 FLOP a clock and SM (fp8: 8192) at the clock it was counted to run at."""
    rows = timed[0]
    rows = rows[(rows["pass"] == "fwd") & ~rows.causal.astype(bool) & rows.window.isna()]
    flop = 4 * rows.batch * rows.heads * rows.seqlen_q * rows.seqlen_k * rows.head_dim
    rate = 132 * rows.measured_sm_clock_mhz * rows.dtype.map({"bf16": 4096, "fp16": 4096, "fp8": 8192})
    assert (flop / rate / rows.measured_time_us).max() < 0.95


def test_softmax_reads_and_writes_exactly_its_matrix():
    """The check that SM-sourced sectors x 32 bytes are SM-to-L2 bytes: a kernel whose traffic is known."""
    exact = tables.table_known_traffic()
    exact = exact[exact.case.str.startswith("standard")]
    assert len(exact) == 3
    assert (exact.ratio - 1).abs().max() < 1e-4


def test_the_page_of_findings_is_what_the_data_says():
    assert (DATA / "FINDINGS.md").read_text(encoding="utf-8") == page()


def test_every_finding_prints_and_an_unknown_one_is_refused(capsys):
    for finding in FINDINGS:
        assert main([finding.name]) == 0
        assert capsys.readouterr().out.count("\n") >= 2
    assert main(["nothing"]) == 2
    assert "usage" in capsys.readouterr().err
