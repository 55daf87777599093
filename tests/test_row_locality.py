"""What short runs cost HBM: the microbenchmark behind the rule, and a kernel that the rule was not taken from."""

from pathlib import Path

import pandas as pd
import pytest

from simulator.predict import predict_row
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.program import Tensor, tile
from simulator.row_locality import read_cost
from simulator.simulation import simulate

DATA = Path(__file__).parents[1] / "hardware_profiles" / "measurements" / "h200_sxm"


def cost(page_rows):
    return read_cost(tile(Tensor("K", 1, 4096, 128, "bf16", page_rows=page_rows), 0, 0, 128, 0, 128))


@pytest.fixture(scope="module")
def walks():
    rows = pd.read_csv(DATA / "micro_pages.csv", comment="#")
    return rows[(rows.stages == 6) & (rows["mode"] == 0) & (rows.bytes == 4 << 30)]


def test_the_rule_is_what_walks_over_random_pages_lose(walks):
    rows = walks[walks.window_bytes == 2 << 30].groupby(["heads", "page"]).median_us.median().unstack()
    large = rows[[256, 1024, 4096]].mean(axis=1)
    measured = rows.div(large, axis=0).mean()
    for page in rows.columns:
        assert cost(page) / cost(1024) == pytest.approx(measured[page], abs=0.006), page


def test_pages_that_are_in_flight_together_lose_nothing_so_it_is_no_table_read(walks):
    eight = walks[(walks.heads == 8) & (walks.page == 1)].groupby("window_bytes").median_us.median()
    assert eight[64 << 10] == pytest.approx(eight[0], rel=0.01)
    assert eight[2 << 30] > 1.02 * eight[64 << 10]


def test_rows_in_order_cost_their_bytes():
    assert cost(0) == 1.0
    costs = [cost(rows) for rows in (1, 4, 16, 64, 256, 4096)]
    assert costs == sorted(costs, reverse=True)
    assert 1.0 < costs[-1] < 1.001


def test_fa3_loses_by_page_size_what_it_was_measured_to_lose():
    """Its gathers were not part of the microbenchmark: 32/8 heads, 64 sequences of 4096 keys."""
    rows = pd.read_csv(DATA / "timed_serving_run1.csv", comment="#", dtype=str, keep_default_na=False)
    rows = rows[rows.case_id.str.startswith("decode-b64") & (rows.page_order == "random")]
    rows = rows.set_index("page_size", drop=False)
    predicted = {p: float(predict_row(dict(rows.loc[p]))["time_us"]) for p in ("1", "16", "256")}
    measured = rows.measured_time_us.astype(float)
    for page, within in (("1", 0.02), ("16", 0.02)):
        assert predicted[page] / predicted["256"] == pytest.approx(measured[page] / measured["256"], abs=within)
        assert predicted[page] / predicted["256"] > 1.015
    assert predicted["256"] == pytest.approx(measured["256"], rel=0.02)


def test_page_size_costs_time_and_no_bytes():
    p = AttentionProblem(4, 8, 2, 1, 4096, 128, kv_capacity=4096, causal=True)
    gpu, name = load_profile("h200_sxm"), "flash_attn_3_kvcache"
    small, large = (simulate("flash_decoding", p.with_(page_size=n), gpu, implementation=name) for n in (1, 256))
    tables = 4 * p.batch * p.seqlen_k
    assert 0 <= small.hbm_read_bytes - large.hbm_read_bytes <= tables
    assert small.time_us > large.time_us
