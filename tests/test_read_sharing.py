"""Reads that SMs of one TPC share before L2: what the microbenchmark says, the law, and the fit to counted launches."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from algorithms import build_program
from algorithms.in_step import OWN_SM
from simulator.overrides import with_values
from simulator.predict import INPUT_COLUMNS, cell_text, parse_case
from simulator.problem import AttentionProblem
from simulator.profile import Profile, load_profile
from simulator.program import Kernel
from simulator.read_sharing import PAIRS_AGAIN, unseen_read_bytes
from simulator.simulation import simulate
from simulator.traffic import sm_traffic

GPU = load_profile("h200_sxm")
MEASURED = Path(__file__).parent.parent / "hardware_profiles/measurements/h200_sxm"
CAUSAL = AttentionProblem(batch=2, heads=8, seqlen_q=2048, seqlen_k=2048, head_dim=128, causal=True)


def shared_share(algorithm: str, problem: AttentionProblem, gpu: Profile = GPU) -> float:
    """Share of the SMs' reads that L2 does not see."""
    return unseen_share(build_program(algorithm, problem, gpu).kernels, gpu)


def unseen_share(kernels: tuple[Kernel, ...], gpu: Profile = GPU) -> float:
    unseen = sum(sum(unseen_read_bytes(k, gpu).values()) for k in kernels)
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
PLAIN = CAUSAL.with_(causal=False)


def test_causal_rows_start_apart_and_share_nothing():
    assert shared_share("fa2", CAUSAL) < 0.001
    assert shared_share("fa2", PLAIN) > 0.1


def test_query_heads_of_one_kv_head_share_in_fa3():
    plain, grouped = (shared_share("fa3", CAUSAL.with_(kv_heads=n, heads=16)) for n in (16, 2))
    assert plain < 0.001
    assert grouped > 0.2


def test_more_sharers_share_more_and_one_nothing():
    by_sharers = [shared_share("fa2", PLAIN, with_values(GPU, {"l2_read_sharers": n})) for n in (1, 2, 4)]
    assert by_sharers[0] == 0
    assert by_sharers[1] < by_sharers[2] < 0.75
    assert by_sharers[1] < 0.5


def test_ctas_with_an_sm_each_keep_in_step():
    # 16 row blocks of 8 heads: 128 CTAs, pairs of one head; four times as many have company on their SMs
    few, many = (shared_share("fa2", PLAIN.with_(batch=n)) for n in (1, 4))
    assert few == pytest.approx(0.5, abs=0.05)
    assert many < 0.5 * few


def test_sharing_of_a_static_schedule_falls_with_the_launch_not_with_the_tile():
    # 13 row blocks of 192 rows, head dim 64: the same tile, more and more of them
    rows = PLAIN.with_(head_dim=64, head_dim_v=64, seqlen_q=2400, seqlen_k=2400)
    shares = [shared_share("fa3", rows.with_(batch=n)) for n in (1, 8, 64)]
    assert shares[0] > 1.4 * shares[1] > 1.4 * 1.4 * shares[2] > 0


def test_pairs_of_a_grid_part_where_walks_change():
    # 1024 CTAs each, as two or 16 row blocks to a head: of two, the next CTAs mostly belong to two heads
    two, sixteen = (
        shared_share("fa2", PLAIN.with_(batch=b, seqlen_q=n, seqlen_k=512)) for b, n in ((64, 256), (8, 2048))
    )
    assert two < 0.9 * sixteen


def test_a_launch_opens_in_step_across_its_gpcs():
    # four row blocks of one head read one block of keys each: more than a pair could share
    opening = AttentionProblem(batch=2, heads=16, seqlen_q=256, seqlen_k=256, head_dim=256)
    kernel = build_program("fa2", opening, GPU).kernels[0]
    read = sm_traffic(kernel)
    unseen = unseen_read_bytes(kernel, GPU)
    assert 0.5 < unseen["K"] / read["K"][0] < 0.75


def test_rows_that_fit_l1_are_read_from_l2_once():
    # three passes over rows of scores that are no multiple of 16 bytes (9643, seen 1.01 times) or too long for SMEM
    for length, times in ((9643, 1.01), (32768, 1.84)):
        kernels = build_program("standard", PLAIN.with_(seqlen_q=256, seqlen_k=length), GPU).kernels
        softmax = next(k for k in kernels if k.name == "softmax")
        asked, seen = sm_traffic(softmax)["S"][0], unseen_read_bytes(softmax, GPU)["S"]
        assert 3 * (1 - seen / asked) == pytest.approx(times, rel=0.02)


# The fit -------------------------------------------------------------------------------------------------------------
def head_dims(low: int, high: int, *keys: tuple[str, str]) -> Callable[[dict[str, Any]], bool]:
    """Rows of the implementations and passes in ``keys`` at head dims above ``low`` up to ``high``."""
    return lambda row: (row["implementation"], row["pass"]) in keys and low < row["head_dim"] <= high


FA3, FA2_BACKWARD = ("flash_attn_3", "fwd"), ("torch_flash", "bwd")
#: The rows that each constant is fitted to, and by how much a step of the fit may beat it (few rows, much scatter).
FITTED = {
    "own_sm_64": head_dims(0, 64, FA3, FA2_BACKWARD),
    "own_sm_128": head_dims(64, 128, FA3),
    "own_sm_256": head_dims(128, 256, FA3, FA2_BACKWARD),
    "fa2_backward_128": head_dims(64, 128, FA2_BACKWARD),
    "fa4_backward": head_dims(0, 256, ("flash_attn_4_sm90", "bwd")),
    "cudnn_backward": head_dims(0, 256, ("cudnn_sm90", "bwd")),
    "fa2_forward": head_dims(0, 256, ("torch_flash", "fwd")),
}


@cache
def counted(side: str) -> pandas.DataFrame:
    """Counted rows of one side of the split above 30 MB: ``asked`` by the SMs, ``seen`` by L2 (bytes), and kernels."""
    tables = [
        pandas.read_csv(MEASURED / name, comment="#", dtype=str, keep_default_na=False).assign(file=name)
        for name in ("counters_run1.csv", "counters_random_run1.csv")
    ]
    table = pandas.concat(tables).fillna("")
    split = pandas.read_csv(MEASURED / "split.csv", comment="#").set_index("family").side
    table = table[(table.family.map(split) == side) & (table.measured_l2_read_bytes != "")]
    rows = []
    for record in table.to_dict("records"):
        seen = float(record["measured_l2_read_bytes"])
        row = {"implementation": record["implementation"], "pass": record["pass"] or "fwd", "seen": seen}
        row |= {"head_dim": int(record["head_dim"]), "file": record["file"]}
        row["fits"] = next((name for name, takes in FITTED.items() if takes(row)), "")
        if seen < 30e6 or not row["fits"]:
            continue
        case = parse_case({name: cell_text(record[name]) for name in INPUT_COLUMNS if name in record}, "h200_sxm")
        row["kernels"] = build_program(case.algorithm, case.problem, GPU, case.implementation).kernels
        row["asked"] = sum(read for k in row["kernels"] for read, _ in sm_traffic(k).values())
        rows.append(row)
    return pandas.DataFrame(rows)


def errors(rows: pandas.DataFrame, times: float = 1.0) -> np.ndarray:
    """Errors of the reads that L2 sees, with ``times`` the kernels' own iterations in step."""
    found = []
    for row in rows.itertuples():
        kernels = row.kernels
        if times != 1.0:
            kernels = [replace(k, in_step_iterations=times * k.in_step_iterations) for k in kernels]
        unseen = sum(sum(unseen_read_bytes(k, GPU).values()) for k in kernels)
        found.append((row.asked - unseen) / row.seen - 1)
    return np.array(found)


def mean_error(rows: pandas.DataFrame, times: float = 1.0) -> float:
    return float(np.abs(errors(rows, times)).mean())


@pytest.mark.parametrize("fitted", FITTED)
def test_each_constant_is_the_calibrating_rows_optimum(fitted):
    rows = counted("calibrate")
    rows = rows[rows.fits == fitted]
    best = min(mean_error(rows, times) for times in (0.25, 0.5, 1.0, 2.0, 4.0))
    assert mean_error(rows) <= best + 0.004


def test_how_likely_pairs_form_again_is_the_calibrating_rows_optimum(monkeypatch):
    rows = counted("calibrate")
    own = mean_error(rows)
    for chance in (0.5 * PAIRS_AGAIN, 2 * PAIRS_AGAIN):
        monkeypatch.setattr("simulator.read_sharing.PAIRS_AGAIN", chance)
        # kernels keep their answers: other kernels, the same numbers
        assert own <= mean_error(rows, 1.0 + 1e-9) + 0.001


def test_reads_of_calibrating_rows():
    rows = counted("calibrate")
    by_file = [mean_error(rows[rows.file == name]) for name in ("counters_run1.csv", "counters_random_run1.csv")]
    assert by_file[0] < 0.025
    assert by_file[1] < 0.045


def test_judging_rows_are_closer_with_sharing_than_without():
    rows = counted("judge")
    assert mean_error(rows) < 0.5 * mean_error(rows, 0.0)


def test_a_head_dims_constant_is_that_of_the_next_larger_one():
    problem = PLAIN.with_(head_dim=96, head_dim_v=96)
    kernel = build_program("fa3", problem, GPU).kernels[-1]
    assert kernel.in_step_iterations == OWN_SM[128]


def test_no_more_is_shared_than_is_asked_twice():
    """Two key blocks of FA2's backward whose common query block has two rows: all but those 512 bytes are unique."""
    problem = AttentionProblem(heads=2, kv_heads=1, seqlen_q=130, seqlen_k=129, head_dim=64, causal=True, pass_="bwd")
    result = simulate("fa2", problem, load_profile("h200_sxm"))
    unique = 2 * 130 * 64 * 2
    assert result.traffic_by_tensor()["Q"].hbm_read_bytes == unique <= result.traffic_by_tensor()["Q"].l2_read_bytes
