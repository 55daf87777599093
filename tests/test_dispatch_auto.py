"""``algorithm=auto`` in compare and predict, and the warning where the asked kernel is not what runs."""

import csv

import pandas
import pytest
from command_line import failure

from simulator import AttentionProblem, load_profile, simulate
from simulator.cli import main
from simulator.comparison import compare
from simulator.dispatch.automatic import framework_call, not_what_runs, pick
from simulator.errors import UnsupportedError
from simulator.predict import predict_frame

H100, A100, B200 = (load_profile(name) for name in ("h100_sxm", "a100_sxm4_80gb", "b200"))
SMALL = AttentionProblem(1, 8, seqlen_q=512)


def frame(**cells) -> pandas.DataFrame:
    """One case."""
    row = {"algorithm": "auto", "batch": 1, "heads": 8, "seqlen_q": 512, "head_dim": 128} | cells
    return pandas.DataFrame([row])


@pytest.mark.parametrize(
    ("framework", "version", "profile", "problem", "kernel"),
    [
        ("torch", "2.11", H100, SMALL, ("fa3", "flash_attn_3")),
        ("torch", "2.5", H100, SMALL, ("fa2", "torch_flash")),
        ("torch", "2.11", A100, SMALL, ("fa2", "torch_flash")),
        ("torch", "2.11", A100, SMALL.with_(dtype="fp32", kv_heads=2), ("standard", "torch_eager")),
        ("torch", "2.11", H100, SMALL.with_(pass_="bwd"), ("fa3", "cudnn_sm90")),
        ("torch", "2.11", A100, SMALL.with_(seqlen_q=1, seqlen_k=512), ("flash_decoding", "torch_flash_splitkv")),
        ("flash-attn", "2.8", H100, SMALL, ("fa2", "torch_flash")),
        ("flash-attn", "3.0", H100, SMALL, ("fa3", "flash_attn_3")),
        ("vllm", None, H100, SMALL.with_(seqlen_q=1, seqlen_k=512), ("flash_decoding", "flash_attn_3_kvcache")),
        ("tensorrt-llm", None, A100, SMALL, ("fa2", "torch_flash")),
    ],
)
def test_what_is_picked(framework, version, profile, problem, kernel):
    picked = pick(framework_call(framework, version), problem, profile)
    assert (picked.algorithm, picked.implementation) == kernel
    assert simulate(picked.algorithm, picked.problem, profile, implementation=picked.implementation).time_us > 0


def test_what_cannot_be_picked():
    with pytest.raises(UnsupportedError, match="trtllm_gen, whose kernel is not modelled"):
        pick(framework_call("tensorrt-llm"), SMALL, B200)
    with pytest.raises(UnsupportedError, match=r"flash-attn 3\.0 runs nothing here: .*FA3 runs on 9\.0"):
        pick(framework_call("flash-attn", "3"), SMALL, A100)


def test_what_sdpa_cannot_express():
    """A window is a mask to SDPA, which flash refuses; a soft cap it does not have at all."""
    window = pick(framework_call("torch"), SMALL.with_(window=(128, 0)), A100)
    assert window.problem.window is None and "runs efficient (not flash: a window" in window.note
    for changed in ({"softcap": 30.0}, {"page_size": 256}):
        with pytest.raises(UnsupportedError, match="no soft cap and no paged cache"):
            pick(framework_call("torch"), SMALL.with_(**changed), H100)


def test_predict_auto_is_the_picked_kernels_prediction():
    [row] = predict_frame(frame(kv_heads=8), "a100_sxm4_80gb").to_dict("records")
    assert row["error"] == "" and row["time_us"] == simulate("fa2", SMALL, A100).time_us
    assert "torch 2.11 runs flash" in row["warnings"]
    [old] = predict_frame(frame(dispatch_framework="torch", dispatch_version="2.5"), "h100_sxm").to_dict("records")
    assert old["time_us"] == simulate("fa2", SMALL, H100).time_us
    assert "torch 2.5 runs flash" in old["warnings"]


def test_predict_says_why_a_fallback_runs():
    [row] = predict_frame(frame(dtype="fp32", kv_heads=2), "h100_sxm").to_dict("records")
    assert row["error"] == ""
    assert "torch 2.11 runs math (not cudnn: dtype fp32" in row["warnings"] and "lower bound" in row["warnings"]


def test_predict_warns_when_another_kernel_would_run():
    [plain] = predict_frame(frame(algorithm="fa2"), "h100_sxm").to_dict("records")
    [warned] = predict_frame(frame(algorithm="fa2"), "h100_sxm", framework="torch").to_dict("records")
    assert "would run" not in plain["warnings"] and plain["time_us"] == warned["time_us"]
    assert "torch 2.11 would run cudnn here, not fa2: cudnn comes before flash" in warned["warnings"]
    asked = frame(algorithm="fa2", causal=1, seqlen_k=1024, dispatch_framework="torch")
    [causal] = predict_frame(asked, "a100_sxm4_80gb").to_dict("records")
    assert "would run efficient here, not fa2: is_causal with 512 queries and 1024 keys" in causal["warnings"]


def test_no_warning_for_what_runs():
    torch, old = framework_call("torch"), framework_call("torch", "2.5")
    assert not_what_runs(torch, "fa2", None, SMALL, A100) == ""
    assert not_what_runs(torch, "fa3", None, SMALL, H100) == ""
    assert not_what_runs(old, "fa2", "torch_flash", SMALL, H100) == ""
    assert not_what_runs(torch, "standard", None, SMALL.with_(dtype="fp32", kv_heads=2), A100) == ""
    assert "none of its backends is fa1" in not_what_runs(torch, "fa1", None, SMALL, A100)
    assert "cudnn comes before math" in not_what_runs(torch, "standard", None, SMALL, H100)


def test_compare_auto_beside_others():
    comparison = compare(SMALL, [H100, A100], ["auto", "fa2"], framework=framework_call("torch"))
    labels = [entry.label for entry in comparison.entries]
    assert labels == ["auto: fa3", "fa2", "auto: fa2", "fa2"]
    h100_auto, h100_fa2, a100_auto, a100_fa2 = comparison.entries
    assert a100_auto.result.time_us == a100_fa2.result.time_us and a100_auto.speedup == a100_fa2.speedup
    assert h100_auto.result.time_us == simulate("fa3", SMALL, H100).time_us
    assert "torch 2.11 runs cudnn" in h100_auto.result.warnings[0]
    assert "would run cudnn here, not fa2" in h100_fa2.result.warnings[0]
    assert not any("would run" in line for line in a100_fa2.result.warnings)


def test_compare_without_a_framework_is_as_before():
    asked, before = (compare(SMALL, [H100], ["fa2"], framework=f) for f in (framework_call("flash-attn"), None))
    assert asked.entries[0].result == before.entries[0].result


def test_compare_shows_why_auto_cannot_run(capsys, tmp_path):
    file = tmp_path / "c.csv"
    small = ("--batch", "1", "--seqlen", "512", "--jobs", "1")
    arguments = ("--gpu", "b200", "--algorithm", "auto,fa2", "--framework", "tensorrt-llm", "--csv", str(file))
    assert main(["compare", *small, *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tensorrt-llm 1.0 runs trtllm_gen, whose kernel is not modelled" in out
    rows = list(csv.DictReader(file.open()))
    assert [row["algorithm"] for row in rows] == ["auto", "fa2"] and rows[0]["error"] and rows[1]["time_us"]


def test_mistakes(capsys, tmp_path):
    assert "did you mean 'torch'?" in failure(capsys, "compare", "--framework", "torhc")
    assert "without a framework" in failure(capsys, "compare", "--framework-version", "2")
    cases = tmp_path / "cases.csv"
    frame().to_csv(cases, index=False)
    assert "is unknown" in failure(capsys, "predict", str(cases), "--gpu", "h100_sxm", "--framework", "jaxx")
    [row] = predict_frame(frame(implementation="torch_flash"), "h100_sxm").to_dict("records")
    assert "leave one out" in row["error"]
    [row] = predict_frame(frame(dispatch_framework="tensorflow"), "h100_sxm").to_dict("records")
    assert "framework: 'tensorflow' is unknown" in row["error"]
