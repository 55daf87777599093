"""Reads that SMs of one TPC share before L2: what the microbenchmark says, the law, and the fit to counted launches."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas
import pytest

from algorithms import build_program
from algorithms.in_step import IN_STEP_ITERATIONS
from simulator.predict import INPUT_COLUMNS, cell_text, parse_case
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.read_sharing import unseen_read_bytes
from simulator.traffic import sm_traffic

GPU = load_profile("h200_sxm")
MEASURED = Path(__file__).parent.parent / "hardware_profiles/measurements/h200_sxm"
CAUSAL = AttentionProblem(batch=2, heads=8, seqlen_q=2048, seqlen_k=2048, head_dim=128, causal=True)


def shared_share(algorithm: str, problem: AttentionProblem) -> float:
    """Share of the SMs' reads that L2 does not see."""
    kernels = build_program(algorithm, problem, GPU).kernels
    unseen = sum(sum(unseen_read_bytes(k, GPU.l2_read_sharers).values()) for k in kernels)
    return unseen / sum(read for k in kernels for read, _ in sm_traffic(k).values())


# What the GPU does ---------------------------------------------------------------------------------------------------
@cache
def microbenchmark() -> pandas.DataFrame:
    table = pandas.read_csv(MEASURED / "micro_read_sharing.csv", comment="#")
    asked = table.asked_sectors
    return table.assign(seen=(table.l2_read_sectors - table.leader_only_sectors) / asked).set_index("case")


def test_the_two_sms_of_a_tpc_share_reads_and_those_of_two_do_not():
    seen = microbenchmark().seen
    assert seen["tpc delay=300"] == pytest.approx(0.5, abs=0.01)
    assert 0.6 < seen["tpc delay=1200"] < 0.7
    assert seen["stay0 1200"] > 0.99


def test_consecutive_ctas_land_on_the_sms_of_one_tpc():
    with (MEASURED / "micro_read_sharing.csv").open() as file:
        line = next(line for line in file if "SM of CTA" in line)
    sms = [int(word) for word in line.split(":")[1].split()]
    assert sorted(sms) == list(range(132))
    assert all(a // 2 == b // 2 for a, b in zip(sms[::2], sms[1::2], strict=True))


# What the model makes of it ------------------------------------------------------------------------------------------
def test_causal_rows_start_apart_and_share_nothing():
    assert shared_share("fa2", CAUSAL) == 0
    assert shared_share("fa2", CAUSAL.with_(causal=False)) > 0.1


def test_query_heads_of_one_kv_head_share_in_fa3():
    plain, grouped = (shared_share("fa3", CAUSAL.with_(kv_heads=n, heads=16)) for n in (16, 2))
    assert plain == 0
    assert grouped > 0.2


def test_at_most_half_is_shared_by_two_and_nothing_by_one():
    kernel = build_program("fa2", CAUSAL.with_(causal=False), GPU).kernels[0]
    asked = sum(read for read, _ in sm_traffic(kernel).values())
    by_sharers = [sum(unseen_read_bytes(kernel, n).values()) for n in (1, 2, 4)]
    assert by_sharers[0] == 0
    assert by_sharers[1] < by_sharers[2] < 0.75 * asked
    assert by_sharers[1] < 0.5 * asked


# The fit -------------------------------------------------------------------------------------------------------------
@cache
def counted(side: str) -> pandas.DataFrame:
    """Counted rows of one side of the split: ``asked`` by the SMs, ``seen`` by L2 (bytes), and the kernels."""
    table = pandas.read_csv(MEASURED / "counters_run1.csv", comment="#", dtype=str, keep_default_na=False)
    split = pandas.read_csv(MEASURED / "split.csv", comment="#").set_index("family").side
    table = table[(table.family.map(split) == side) & (table.measured_l2_read_bytes != "")]
    rows = []
    for record in table.to_dict("records"):
        key = (record["implementation"], record["pass"] or "fwd")
        if key not in IN_STEP_ITERATIONS:
            continue
        case = parse_case({name: cell_text(record[name]) for name in INPUT_COLUMNS if name in record}, "h200_sxm")
        kernels = build_program(case.algorithm, case.problem, GPU, case.implementation).kernels
        asked = sum(read for k in kernels for read, _ in sm_traffic(k).values())
        rows.append({"key": key, "asked": asked, "seen": float(record["measured_l2_read_bytes"]), "kernels": kernels})
    return pandas.DataFrame(rows)


def mean_error(rows: pandas.DataFrame, iterations: float | None = None) -> float:
    """Mean error of the reads that L2 sees; ``iterations`` instead of the kernels' own."""
    from dataclasses import replace

    errors = []
    for row in rows.itertuples():
        kernels = row.kernels
        if iterations is not None:
            kernels = [replace(k, in_step_iterations=iterations if k.in_step_iterations else 0.0) for k in kernels]
        unseen = sum(sum(unseen_read_bytes(k, GPU.l2_read_sharers).values()) for k in kernels)
        errors.append(abs((row.asked - unseen) / row.seen - 1))
    return float(np.mean(errors))


@pytest.mark.parametrize("key", sorted(IN_STEP_ITERATIONS), ids="-".join)
def test_the_tables_value_is_the_calibrating_rows_optimum(key):
    rows = counted("calibrate")
    rows = rows[rows.key == key]
    value = IN_STEP_ITERATIONS[key]
    best = min(mean_error(rows, tried) for tried in value * np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0]))
    assert mean_error(rows, value) <= best + 0.003


def test_judging_rows_are_closer_with_sharing_than_without():
    rows = counted("judge")
    assert mean_error(rows) < 0.6 * mean_error(rows, 0.0)
