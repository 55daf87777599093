"""Per-kernel spans from activity records, order of the cases, and quantiles."""

import pytest

from simulator.measure.cases import Case
from simulator.measure.run_timed import shuffled, span_rows
from simulator.measure.timing import quantile


def run(start, *kernels):
    """Records of one run: flush, kernels of (offset, duration, name), closing empty kernel."""
    records = [(start, 100, "iosim_flush_l2")]
    records += [(start + offset, duration, name) for offset, duration, name in kernels]
    return [*records, (start + 10_000, 1, "iosim_empty")]


def test_a_run_is_what_lies_between_flush_and_marker():
    events = [(0, 5, "randn")]
    for start, long in ((1000, 500), (20_000, 520), (40_000, 510)):
        events += run(start, (200, 50, "fill"), (270, long, "attention"))
    rows = span_rows(events[::-1], ["a"] * 3)
    assert [(row["row_id"], row["kernel_name"]) for row in rows] == [("a/0", "fill"), ("a/1", "attention")]
    assert rows[1]["measured_kernel_us"] == pytest.approx(0.510)
    assert rows[1]["measured_gap_us"] == pytest.approx(0.020)
    assert rows[0]["measured_span_us"] == pytest.approx(0.580)


def test_runs_that_differ_in_their_kernels_are_an_error_row():
    events = run(1000, (200, 50, "one")) + run(20_000, (200, 50, "other"))
    (row,) = span_rows(events, ["a", "a"])
    assert "differ" in row["measured_error"]


def test_dropped_records_are_noticed():
    with pytest.raises(RuntimeError, match="1 recorded runs for 2"):
        span_rows(run(1000, (200, 50, "one")), ["a", "a"])


def test_the_order_is_fixed_by_the_seed_and_keeps_every_case():
    cases = [Case(str(index), "f", "fa2", "torch_flash") for index in range(50)]
    assert shuffled(cases, 1) == shuffled(cases, 1) != shuffled(cases, 2)
    assert sorted(shuffled(cases, 3), key=lambda case: int(case.case_id)) == cases


def test_quantiles():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert quantile([float(value) for value in range(10)], 0.9) == 9.0
