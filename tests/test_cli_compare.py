"""``iosim compare``: what is compared with what, what cannot run, and what is printed and written."""

import csv
import dataclasses
import json
import re

import pytest
from command_line import failure
from stub_results import stub_result

import simulator
from simulator.cli import main
from simulator.comparison import all_algorithms, compare, decode_problem
from simulator.errors import InputError, UnsupportedError
from simulator.options import RunOptions
from simulator.palette import ALGORITHM_COLOURS
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.wording import problem_text, scaled, time_text

PROBLEM = AttentionProblem(batch=2, heads=16, seqlen_q=8192, head_dim=128, causal=True)
TIMES_US = {"standard": 1000.0, "fa1": 400.0, "fa2": 200.0, "fa3": 100.0, "flash_decoding": 5.0}


@pytest.fixture
def stub(monkeypatch):
    """``simulate`` answers with :data:`TIMES_US`, 50 us for standard on a decode problem; FA3 needs Hopper."""
    monkeypatch.setenv("COLUMNS", "140")
    calls = []

    def simulate(algorithm, problem, profile, *, hypothetical, **conditions):
        calls.append((algorithm, problem, profile.name, hypothetical, conditions))
        substitutions = ()
        if algorithm == "fa3" and "wgmma" not in profile.capabilities:
            if not hypothetical:
                raise UnsupportedError(f"flash_attn_3 needs tma, wgmma, which {profile.name} lacks")
            substitutions = ("wgmma -> mma_sync instructions",)
        if problem.dtype == "fp8":
            raise UnsupportedError("fp8: not modelled for these kernels")
        time_us = 50.0 if algorithm == "standard" and problem.seqlen_q == 1 else TIMES_US[algorithm]
        path = "wgmma" if algorithm == "fa3" else "mma_sync"
        return stub_result(algorithm, problem, profile, time_us=time_us, path=path, substitutions=substitutions)

    monkeypatch.setattr(simulator, "simulate", simulate, raising=False)
    return calls


def test_the_defaults_are_the_papers_problem_on_three_gpus(stub, capsys):
    assert main(["compare", "--jobs", "1"]) == 0
    assert {call[2] for call in stub} == {"a100_sxm4_80gb", "h100_sxm", "b200"}
    assert {call[0] for call in stub} == set(all_algorithms())
    assert {call[1] for call in stub} == {PROBLEM, PROBLEM.with_(seqlen_q=1)}
    assert "2, 16 heads, 8192 queries x 8192 keys, head dim 128, bf16, causal" in capsys.readouterr().out


def test_flash_decoding_runs_one_query_against_standard_on_the_same(stub):
    comparison = compare(PROBLEM, [load_profile("h100_sxm")], ["standard", "fa2", "flash_decoding"])
    standard, fa2, decoding = comparison.entries
    assert (decoding.problem.seqlen_q, decoding.problem.seqlen_k) == (1, 8192)
    assert (standard.speedup, fa2.speedup) == (1.0, 5.0)
    assert decoding.speedup == 10.0
    assert (fa2.decode, decoding.decode) == (False, True)
    assert comparison.decode_problem == PROBLEM.with_(seqlen_q=1)


@pytest.mark.parametrize("queries", [1, 8])
def test_a_decode_problem_is_everyones(stub, queries):
    problem = AttentionProblem(heads=8, seqlen_q=queries, seqlen_k=4096)
    assert decode_problem(problem) is problem
    comparison = compare(problem, [load_profile("h100_sxm")], ["fa2", "flash_decoding"])
    assert comparison.decode_problem is None
    assert [entry.problem for entry in comparison.entries] == [problem] * 2


@pytest.mark.parametrize("pass_", ["bwd", "fwd_bwd"])
def test_training_runs_kernels_that_have_its_pass(pass_):
    problem = AttentionProblem(heads=4, seqlen_q=256, head_dim=64, pass_=pass_)
    comparison = compare(problem, [load_profile("h100_sxm")], ["fa3", "flash_decoding"])
    fa3, decoding = comparison.entries
    assert (fa3.implementation, fa3.result.problem.pass_) == ("flash_attn_4_sm90", pass_)
    assert comparison.decode_problem is None and "pass" in decoding.error


def test_standard_is_the_yardstick_even_when_not_asked_for(stub):
    (entry,) = compare(PROBLEM, [load_profile("h100_sxm")], ["fa2"]).entries
    assert entry.speedup == 5.0


def test_each_problem_is_simulated_once(stub):
    compare(PROBLEM, [load_profile("h100_sxm")], all_algorithms())
    asked = [(algorithm, problem) for algorithm, problem, *_ in stub]
    assert len(asked) == len(set(asked)) == len(all_algorithms()) + 1


def test_what_a_gpu_lacks_is_shown(stub, capsys):
    assert main(["compare", "--gpu", "a100_sxm4_80gb", "--algorithm", "fa2,fa3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fa3 cannot run" in shown
    assert "fa3 cannot run: flash_attn_3 needs tma, wgmma, which a100_sxm4_80gb lacks (--hypothetical" in shown


def test_only_what_a_gpu_lacks_is_an_answer_too(stub, capsys):
    assert main(["compare", "--gpu", "b200", "--algorithm", "fa3"]) == 0
    assert "fa3 cannot run" in capsys.readouterr().out


def test_hypothetical_prints_each_substitution(stub, capsys):
    assert main(["compare", "--gpu", "a100_sxm4_80gb", "--algorithm", "fa3", "--hypothetical"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "fa3 is hypothetical on a100_sxm4_80gb: wgmma -> mma_sync instructions" in shown
    assert "cannot run" not in shown


def test_nothing_that_is_modelled_is_a_mistake(stub, capsys):
    assert "fp8: not modelled" in failure(capsys, "compare", "--dtype", "fp8", "--gpu", "h100_sxm")


@pytest.mark.parametrize(("gpu", "said"), [("b200", True), ("h100_sxm", False)])
def test_blackwells_own_kernels_are_said_to_be_missing(stub, capsys, gpu, said):
    assert main(["compare", "--gpu", gpu, "--algorithm", "fa2"]) == 0
    assert ("FA4" in capsys.readouterr().out) is said


@pytest.mark.parametrize("width", [100, 120, 160])
def test_no_number_is_cut_off(stub, capsys, monkeypatch, width):
    """Five algorithms fit 100 columns; nothing is shortened with an ellipsis and no cell is broken into lines."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["compare", "--gpu", "h100_sxm"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for algorithm in all_algorithms():
        assert len(re.findall(rf"^ {algorithm}\*? .*\d", shown, re.MULTILINE)) == 2
    assert "flash_decoding*" in shown


def test_a_problem_that_does_not_fit_is_told(monkeypatch, capsys):
    monkeypatch.setattr(
        simulator,
        "simulate",
        lambda a, problem, profile, **_: stub_result(a, problem, profile, peak_memory_bytes=81 * 10**9),
        raising=False,
    )
    assert main(["compare", "--gpu", "h100_sxm", "--algorithm", "standard"]) == 0
    assert "standard does not fit: it needs 81.0 GB, h100_sxm has 80.0 GB" in " ".join(capsys.readouterr().out.split())


def test_percent_is_of_the_path_that_does_the_matrix_work(stub):
    """FA2 issues mma.sync, which on Hopper cannot reach the datasheet's rate."""
    (entry,) = compare(PROBLEM, [load_profile("h100_sxm")], ["fa2"]).entries
    assert (entry.peak_path, entry.peak_flops) == ("mma_sync", 500e12)
    assert entry.percent_of_peak == pytest.approx(100 * PROBLEM.flops() / 200e-6 / 500e12)


def test_files_say_what_the_table_says(stub, tmp_path, capsys):
    table, data, picture = tmp_path / "rows.csv", tmp_path / "all.json", tmp_path / "bars.png"
    files = ["--csv", str(table), "--json", str(data), "--plot", str(picture)]
    assert main(["compare", "--gpu", "a100_sxm4_80gb,h100_sxm", "--jobs", "1", *files]) == 0
    rows = list(csv.DictReader(table.open(newline="")))
    objects = json.loads(data.read_text())
    assert [(row["gpu"], row["algorithm"]) for row in rows] == [(o["gpu"], o["algorithm"]) for o in objects]
    assert len(rows) == 10
    by_name = {(row["gpu"], row["algorithm"]): row for row in rows}
    assert float(by_name["h100_sxm", "fa3"]["time_us"]) == 100.0
    assert float(by_name["h100_sxm", "fa3"]["speedup_over_standard"]) == 10.0
    assert by_name["h100_sxm", "flash_decoding"]["seqlen_q"] == "1"
    lacking = by_name["a100_sxm4_80gb", "fa3"]
    assert lacking["time_us"] == "" and "wgmma" in lacking["error"]
    assert objects[0]["result"]["kernels"][0]["traffic"]
    assert next(o for o in objects if o["error"])["result"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.with_suffix(".csv").read_text() == table.read_text()
    assert len(list(tmp_path.iterdir())) == 4


def test_an_intensity_without_bytes_is_null_in_json(monkeypatch, tmp_path):
    """JSON has no infinity."""
    monkeypatch.setattr(
        simulator,
        "simulate",
        lambda a, problem, profile, **_: stub_result(a, problem, profile, hbm_bytes={"K": (0, 0)}),
        raising=False,
    )
    path = tmp_path / "all.json"
    assert main(["compare", "--gpu", "h100_sxm", "--algorithm", "fa2", "--json", str(path)]) == 0
    (entry,) = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert entry["flop_per_hbm_byte"] is None


def test_options_reach_the_simulation(stub):
    arguments = "--batch 3 --heads 8 --kv-heads 2 --seqlen 100 --seqlen-k 300 --head-dim 64 --dtype fp16 --no-causal"
    conditions = "--l2-state warm --timing eager --clock-mhz 1500 --set l2_bytes=64MiB"
    assert main(["compare", "--gpu", "h100_sxm", "--algorithm", "fa2", *arguments.split(), *conditions.split()]) == 0
    _, problem, name, _, given = stub[-1]
    assert problem == AttentionProblem(
        batch=3, heads=8, kv_heads=2, seqlen_q=100, seqlen_k=300, head_dim=64, dtype="fp16"
    )
    assert name == "h100_sxm[l2_bytes=64MiB]"
    assert given == {"implementation": "torch_flash", "l2_state": "warm", "timing": "eager", "clock_mhz": 1500.0}


def test_a_kernel_can_be_picked(stub):
    (entry,) = compare(PROBLEM, [load_profile("h100_sxm")], ["fa2:torch_flash"]).entries
    assert stub[-1][4]["implementation"] == "torch_flash"
    with pytest.raises(InputError, match="torch_flash"):
        compare(PROBLEM, [load_profile("h100_sxm")], ["fa2:nothing"])
    assert entry.algorithm == "fa2"


def test_every_algorithm_has_a_colour_of_its_own():
    assert set(all_algorithms()) <= set(ALGORITHM_COLOURS)
    assert len(set(ALGORITHM_COLOURS.values())) == len(ALGORITHM_COLOURS)


def test_run_options_refuse_nonsense():
    with pytest.raises(InputError, match="l2_state"):
        RunOptions(l2_state="tepid")


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (scaled(1.2345e9, "B"), "1.23 GB"),
        (scaled(999.6e6, "B"), "1.00 GB"),
        (scaled(12_345, "B"), "12.3 kB"),
        (scaled(123_456_789), "123 M"),
        (scaled(0, "B"), "0 B"),
        (scaled(512, "B"), "512 B"),
        (time_text(0.5), "0.5 us"),
        (time_text(761.2), "761 us"),
        (time_text(1462.2), "1.46 ms"),
        (time_text(2_500_000), "2.50 s"),
    ],
)
def test_numbers_are_short_and_keep_three_digits(shown, text):
    assert shown == text


def test_the_problem_text_names_what_is_not_plain():
    problem = AttentionProblem(
        heads=32, kv_heads=8, seqlen_q=1, seqlen_k=4096, head_dim=192, head_dim_v=128, window=(1024, 0), page_size=64
    )
    text = problem_text(problem)
    for part in ("8 KV heads", "1 queries x 4096 keys", "192/128", "no mask", "window 1024,0", "pages of 64 keys"):
        assert part in text
    assert "splits" not in text
    assert "dropout" in problem_text(dataclasses.replace(problem, dropout=0.1))


@pytest.mark.slow
def test_processes_give_the_same_as_one():
    """Real runs, spread over two processes."""
    profiles = [load_profile("h100_sxm"), load_profile("b200")]
    problem = AttentionProblem(heads=8, seqlen_q=512, causal=True)
    one, two = (compare(problem, profiles, ["fa2", "fa3"], jobs=jobs) for jobs in (1, 2))
    assert [entry.row() for entry in one.entries] == [entry.row() for entry in two.entries]
    assert [entry.lacking for entry in two.entries] == [(), (), (), ("wgmma",)]


@pytest.mark.slow
def test_the_real_comparison_is_consistent(monkeypatch, tmp_path):
    """No stub: every algorithm on three GPUs; what runs has positive times and bytes, FA3 only on Hopper."""
    path = tmp_path / "rows.csv"
    assert main(["compare", "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.open(newline="")))
    assert len(rows) == 15
    assert {row["gpu"] for row in rows if row["error"]} == {"a100_sxm4_80gb", "b200"}
    assert {row["algorithm"] for row in rows if row["error"]} == {"fa3"}
    for row in rows:
        if not row["error"]:
            assert float(row["time_us"]) > 0
            assert 0 < float(row["percent_of_peak"]) <= 100
            assert int(row["hbm_read_bytes"]) > 0
    by_name = {(row["gpu"], row["algorithm"]): row for row in rows}
    for gpu in ("a100_sxm4_80gb", "h100_sxm", "b200"):
        times = [float(by_name[gpu, name]["time_us"]) for name in ("standard", "fa1", "fa2")]
        assert times == sorted(times, reverse=True)
        peaks = {name: int(by_name[gpu, name]["peak_memory_bytes"]) for name in ("standard", "fa2")}
        assert peaks["standard"] > 10 * peaks["fa2"]
    assert float(by_name["h100_sxm", "fa3"]["time_us"]) < float(by_name["h100_sxm", "fa2"]["time_us"])
