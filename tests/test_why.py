"""``iosim why``: the sentences follow from the numbers, in every direction."""

import pytest
from stub_results import stub_result

import simulator
from simulator.cli import main
from simulator.explanation import explain
from simulator.problem import AttentionProblem
from simulator.profile import load_profile

PROBLEM = AttentionProblem(batch=64, heads=16, seqlen_q=1024, head_dim=64, dtype="fp16")
A100 = load_profile("a100_sxm4_80gb")


def unfused():
    """9 GB through HBM, limited by it."""
    return stub_result(
        "standard",
        PROBLEM,
        A100,
        time_us=6000.0,
        hbm_bytes={"Q": (134_000_000, 0), "S": (2_147_000_000, 2_147_000_000), "P": (2_147_000_000, 2_147_000_000)},
        waits={"hbm": 0.9, "tensor": 0.1},
        path_peak_flops=312e12,
        ridge_flop_per_byte=153.0,
    )


def fused(**changes):
    """The same work and 0.5 GB, limited by the tensor cores."""
    values = {
        "time_us": 1500.0,
        "hbm_bytes": {"Q": (134_000_000, 0), "K": (134_000_000, 0), "O": (0, 134_000_000)},
        "waits": {"hbm": 0.1, "tensor": 0.9},
        "matmul": 1.25 * PROBLEM.flops(),
        "path_peak_flops": 312e12,
        "ridge_flop_per_byte": 153.0,
    }
    return stub_result("fa1", PROBLEM, A100, **values | changes)


def test_the_interview_answer():
    """More FLOPs, fewer bytes, across the ridge, another limiter, and where the time went."""
    said = explain(fused(), unfused(), A100)
    assert said.headline == "On a100_sxm4_80gb, fa1 takes 1.50 ms, standard 6.00 ms: fa1 is 4.00x faster."
    assert "1.25x more" in said.sentences["Work"]
    assert "So fa1 is not faster by doing less arithmetic." in said.sentences["Work"]
    assert "402 MB" in said.sentences["Bytes"] and "8.72 GB" in said.sentences["Bytes"]
    assert "21.7x fewer" in said.sentences["Bytes"]
    assert "S -4.29 GB" in said.sentences["Bytes"] and "P -4.29 GB" in said.sentences["Bytes"]
    assert "across the ridge at 153: from the bandwidth side to the compute side" in said.sentences["Intensity"]
    assert said.sentences["Limiter"].startswith("The limiter changes from hbm (standard) to tensor (fa1).")
    assert "saves 4.50 ms: 5.25 ms in hbm; against that it spends 750 us in tensor" in said.sentences["Time"]


def test_the_other_way_round_every_sentence_turns():
    said = explain(unfused(), fused(), A100)
    assert said.headline.endswith("standard is 4.00x slower.")
    assert "1.25x fewer" in said.sentences["Work"]
    assert "not faster" not in said.sentences["Work"]
    assert "21.7x more" in said.sentences["Bytes"]
    assert "from the compute side to the bandwidth side" in said.sentences["Intensity"]
    assert "loses 4.50 ms: 5.25 ms in hbm; against that it saves 750 us in tensor" in said.sentences["Time"]


def test_equal_results_are_called_equal():
    said = explain(fused(), fused(), A100, ("a", "b"))
    assert said.headline.endswith("a is as fast.")
    assert "the same" in said.sentences["Bytes"]
    assert "both are on the compute side of the ridge" in said.sentences["Intensity"]
    assert said.sentences["Limiter"] == "The limiter is tensor in both."
    assert said.sentences["Time"] == "There is no difference in time to explain."


def test_a_limiter_against_the_roofline_is_pointed_out():
    said = explain(fused(waits={"hbm": 0.9, "tensor": 0.1}), unfused(), A100)
    assert "The roofline would call fa1 compute-bound" in said.sentences["Limiter"]


def test_skipped_work_is_measured_against_what_the_mask_leaves():
    said = explain(fused(matmul=1.05 * PROBLEM.flops()), unfused(), A100)
    assert "fa1 executes 1.05x of it, standard 1.00x" in said.sentences["Work"]


def test_another_instruction_path_is_named():
    said = explain(fused(path="wgmma", path_peak_flops=989e12), unfused(), A100)
    assert "fa1 on wgmma (989 TFLOP/s), standard on mma_sync (312 TFLOP/s)" in said.sentences["Work"]


def test_causes_add_up_to_the_time():
    first, second = fused(), unfused()
    causes = explain(first, second, A100).causes
    assert sum(x for _, x, _ in causes) == pytest.approx(first.time_us)
    assert sum(y for _, _, y in causes) == pytest.approx(second.time_us)


@pytest.mark.parametrize("pair", [("fa2", "flash_decoding"), ("flash_decoding", "fa2")])
def test_decoding_is_explained_on_its_own_problem(monkeypatch, capsys, pair):
    asked = []

    def simulate(algorithm, problem, profile, **_):
        asked.append(problem)
        return stub_result(algorithm, problem, profile)

    monkeypatch.setattr(simulator, "simulate", simulate, raising=False)
    assert main(["why", *pair, "--seqlen", "4096"]) == 0
    assert [(p.seqlen_q, p.seqlen_k) for p in asked] == [(1, 4096)] * 2
    assert "1 queries x 4096 keys" in capsys.readouterr().out


def test_the_real_fa3_against_fa2(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["why", "fa3", "fa2", "--gpu", "h100_sxm", "--seqlen", "2048"]) == 0
    shown = capsys.readouterr().out
    assert "fa3 on wgmma" in shown
    for topic in ("Work", "Bytes", "Intensity", "Limiter", "Time"):
        assert f"{topic}: " in shown


def test_the_real_fa1_against_standard(capsys, monkeypatch):
    """The main claim of the FlashAttention paper, on the GPU and shape of its figure 2."""
    monkeypatch.setenv("COLUMNS", "140")
    shape = "--batch 64 --heads 16 --seqlen 1024 --head-dim 64 --dtype fp16 --no-causal"
    assert main(["why", "fa1", "standard", "--gpu", "a100_sxm4_40gb", *shape.split()]) == 0
    shown = capsys.readouterr().out
    assert "faster" in shown
    assert "x fewer. At the datasheet's" in shown
