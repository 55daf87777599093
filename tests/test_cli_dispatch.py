"""``iosim dispatch``: the chosen backend, the refusals, the silence, the traps and the times as printed and as JSON."""

import json

import pytest
from command_line import failure

from simulator import AttentionProblem, load_profile, simulate
from simulator.cli import main

SMALL = ("--batch", "1", "--heads", "8", "--seqlen", "1024")


def said(capsys, *arguments: str) -> str:
    """What the command prints, as one line of single spaces."""
    assert main(["dispatch", *SMALL, *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_mask_on_an_a100_falls_to_mem_efficient(capsys):
    out = said(capsys, "--gpu", "a100_sxm4_80gb", "--mask", "bool", "--no-causal")
    assert "Runs efficient: memory-efficient attention" in out
    assert "Not flash a bool attn_mask is given: flash takes none [mask; sdp_utils_cpp.h check_for_attn_mask]" in out
    assert "Not math comes after efficient; could run too" in out
    assert "Fallback silent." in out and "sdpa_kernel" in out and "_fused_sdp_choice" in out
    assert "Hoped for" in out and "without the mask" in out


def test_times_are_simulated(capsys, tmp_path):
    """The printed and written times are those of ``simulate``; the ratio is theirs."""
    file = tmp_path / "d.json"
    out = said(capsys, "--gpu", "h200_sxm", "--gqa", "4", "--dtype", "fp32", "--json", str(file))
    data = json.loads(file.read_text())
    h200 = load_profile("h200_sxm")
    problem = AttentionProblem(1, 8, 2, 1024, causal=True)
    runs, hoped = (simulate(name, problem, h200).time_us for name in ("standard", "fa3"))
    assert data["runs"] == "math" and data["time"]["time_us"] == runs and data["hoped_for"]["time_us"] == hoped
    assert data["time"]["kind"] == "at_least" and f"at least {runs / hoped:.2f} times what was hoped for" in out
    assert [one["rule"] for one in data["failed_rules"]["efficient"]] == ["heads"]
    assert data["facts"]["dtype"] == "fp32" and data["fallback"] == "silent"


def test_the_same_call_by_version(capsys):
    """cuDNN first from 2.11 on; before that Hopper runs FA2, and says so; 2.14's mem-efficient takes GQA."""
    plain = ("--gpu", "h100_sxm", "--no-causal")
    assert "Runs cudnn" in said(capsys, *plain)
    old = said(capsys, *plain, "--version", "2.5.1")
    assert "Runs flash" in old and "never tries cuDNN by itself" in old
    gqa = (*plain, "--gqa", "4", "--head-dim", "512", "--seqlen", "256")
    assert "Runs math" in said(capsys, *gqa)
    assert "Runs efficient" in said(capsys, *gqa, "--version", "2.14")


def test_other_frameworks(capsys):
    out = said(capsys, "--gpu", "b200", "--framework", "vllm", "--head-dim", "192")
    assert "Runs flash_attn" in out and "FA4 on 10.x ends at head size 128" in out and "fa2:torch_flash" in out
    out = said(capsys, "--gpu", "h100_sxm", "--framework", "tensorrt-llm", "--seqlen-q", "1", "--seqlen-k", "4096")
    assert "Runs mmha" in out and "XQA leaves plain MHA to masked MHA" in out and "could not run" not in out
    out = said(capsys, "--gpu", "a100_sxm4_80gb", "--framework", "flash-attn", "--version", "3")
    assert "Runs nothing. The call raises." in out and "FA3 runs on 9.0" in out
    out = said(capsys, "--gpu", "h100_sxm", "--framework", "flash-attn", "--version", "3", "--training")
    assert "fa3:flash_attn_4_sm90 stands in for it" in out


def test_lists(capsys):
    assert main(["dispatch", "--list"]) == 0
    out = capsys.readouterr().out
    for framework in ("torch", "flash-attn", "vllm", "tensorrt-llm"):
        assert framework in out
    assert main(["dispatch", "--facts", "--framework", "vllm"]) == 0
    assert "kv_cache_dtype" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--framework", "pytorch"), "did you mean 'torch'?"),
        (("--version", "0.4"), "there are rules for 2.5"),
        (("--fact", "enable_gpa=yes"), "did you mean 'enable_gqa'?"),
        (("--gqa", "3"), "16 heads are no multiple of 3"),
        (("--gqa", "4", "--kv-heads", "4"), "give one of them"),
        (("--rules", "nowhere"), "no rule files"),
        (("--gpu", "h100"), "h100_sxm"),
        (("--hoped", "fa9"), "fa9"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert message in failure(capsys, "dispatch", *arguments)
