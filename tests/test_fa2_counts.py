"""FA2's builds as counted: the tables against every launch, and what follows for time and traffic."""

import ast
import csv
from pathlib import Path

import pytest

from algorithms import build_program
from algorithms.fa2 import forward_coordinates, forward_tile, launched_problem
from algorithms.fa2_code import build_of, code_bytes, has_whole_tiles
from algorithms.fa2_counts import fa2_build
from simulator import AttentionProblem, load_profile, simulate
from simulator.program import Fetch, walk_ops
from simulator.sm_costs import NEAR_INSTRUCTION_CACHE_BYTES
from simulator.traffic import sm_traffic

MEASUREMENTS = Path(__file__).parent.parent / "hardware_profiles" / "measurements" / "h200_sxm"
H200 = load_profile("h200_sxm")


def read(name):
    with (MEASUREMENTS / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def problem_of(row):
    def number(name):
        return int(float(row[name])) if row[name] else None

    window = tuple(int(x) for x in row["window"].split(";")) if row["window"] else None
    return AttentionProblem(
        batch=number("batch"), heads=number("heads"), kv_heads=number("kv_heads"), seqlen_q=number("seqlen_q"),
        seqlen_k=number("seqlen_k"), head_dim=number("head_dim"), causal=bool(number("causal")), window=window,
        num_splits=number("num_splits"),
    )  # fmt: skip


def counted_launches():
    """Every counted launch of the ordinary forward kernel of a random case or of a build, with its problem."""
    for part in ("builds", "random"):
        cases = {row["case_id"]: row for row in read(f"cases_{part}.csv")}
        for row in read(f"mix_launches_{part}_run1.csv"):
            case = cases[row["case_id"]]
            if "flash_fwd_kernel" in row["kernel_name"] and case["algorithm"] == "fa2":
                yield pytest.param(problem_of(case), row, id=row["case_id"])


@pytest.mark.parametrize(("problem", "launch"), list(counted_launches()))
def test_a_build_executes_what_was_counted(problem, launch):
    problem = launched_problem(problem)
    t = forward_tile(problem, H200)
    coords = forward_coordinates(problem, t)
    blocks, threads = ast.literal_eval(launch["grid"]), ast.literal_eval(launch["block"])[0]
    ctas = blocks[0] * blocks[1] * blocks[2]
    assert len(coords["row0"]) == ctas and threads == t.threads
    build, warps = build_of(problem, t), ctas * t.num_warps
    masked, looped = coords["n_masked"].sum() * t.num_warps, coords["n_full"].sum() * t.num_warps
    made = build.around * warps + build.masked.issue * masked + build.loop.issue * looped
    assert made == pytest.approx(float(launch["smsp__inst_executed.sum"]), rel=0.04)
    stores = build.masked.stores * masked + build.loop.stores * looped
    counted = float(launch["smsp__inst_executed_op_local_st.sum"])
    # where the first blocks spill unlike each other, launches of a few blocks differ
    assert stores == pytest.approx(counted, rel=0.15 if masked < 2 * looped else 0.75, abs=4.0 * warps)


def test_the_varlen_entry_checks_bounds_whatever_the_lengths():
    """num_splits=1 is PyTorch's varlen entry: 129.8 us measured at 1024 and at 1000 tokens, of which 91 without."""
    whole = AttentionProblem(batch=8, heads=16, seqlen_q=1024, head_dim=64, causal=True)
    t = forward_tile(whole, H200)
    assert has_whole_tiles(whole, t) and not has_whole_tiles(whole.with_(num_splits=1), t)
    cut = whole.with_(seqlen_q=1000, seqlen_k=1000)
    times = [simulate("fa2", p.with_(num_splits=1), H200).time_us for p in (whole, cut)]
    assert times[0] == pytest.approx(129.8, rel=0.08) and times[1] == pytest.approx(times[0], rel=0.04)
    assert simulate("fa2", whole, H200).time_us < 0.85 * times[0]


def test_windows_spill_and_outgrow_the_cache_at_head_dim_64():
    window = AttentionProblem(batch=8, heads=16, seqlen_q=1024, head_dim=64, causal=True, window=(256, 0), num_splits=1)
    kernel = build_program("fa2", window, H200).kernels[-1]
    # counted: 427,008 stores of 128 bytes
    assert sm_traffic(kernel)["spill"][1] == pytest.approx(427_008 * 128, rel=0.03)
    t = forward_tile(window, H200)
    assert code_bytes(window, t, False) > 128 << 10
    large = {op.code_bytes > NEAR_INSTRUCTION_CACHE_BYTES for role in kernel.roles for _, op in walk_ops(role.ops)
             if isinstance(op, Fetch) and op.again}  # fmt: skip
    assert large == {True}
    assert simulate("fa2", window, H200).time_us == pytest.approx(107.3, rel=0.08)


def test_head_dim_192_spills_nothing_and_is_no_mean_of_its_neighbours():
    build = fa2_build(192, causal=True, window=False, even=False)
    assert build.head_dim == 192 and not build.masked.stores and not build.loop.stores
    problem = AttentionProblem(batch=8, heads=16, seqlen_q=1024, head_dim=192, causal=True, num_splits=1)
    assert "spill" not in sm_traffic(build_program("fa2", problem, H200).kernels[-1])
    # 233 us measured
    assert 220 < simulate("fa2", problem, H200).time_us < 262


def test_code_that_many_iterations_hide_costs_little():
    """FA2's causal build of head dim 128 is 79 KB; measured it costs 16 % at 256 tokens and nothing at 4096."""

    def fetched(seqlen):
        problem = AttentionProblem(batch=16384 // seqlen, heads=16, seqlen_q=seqlen, head_dim=128, causal=True)
        (once,) = {op for role in build_program("fa2", problem, H200).kernels[-1].roles for _, op in walk_ops(role.ops)
                   if isinstance(op, Fetch) and not op.again}  # fmt: skip
        return once

    short, long = fetched(256), fetched(4096)
    assert short.code_bytes == long.code_bytes > 72 << 10
    assert short.times < 1.5 and long.times > 8


def test_the_combine_kernel_of_many_rows_is_busy_with_addresses():
    """2 x 16 heads of 256 queries, head dim 256: two splits, then 10 us of combining (26.3 us in all)."""
    result = simulate("fa2", AttentionProblem(batch=2, heads=16, seqlen_q=256, head_dim=256), H200)
    assert [k.name for k in result.kernels] == ["flash_fwd_splitkv", "flash_fwd_splitkv_combine"]
    assert 7 < result.kernels[1].time_us < 11
