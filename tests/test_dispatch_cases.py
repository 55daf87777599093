"""Public cases of wrong or silent dispatch: what each thread found, the rules must say (numbers of the case list)."""

import pytest

from simulator import AttentionProblem, load_profile
from simulator.dispatch.decide import Decision
from simulator.dispatch.rule_files import find_rules
from simulator.dispatch.timing import FrameworkCall, time_of_chosen
from simulator.options import RunOptions
from simulator.physical_bounds import physical_bounds

A100, H100, B200 = (load_profile(name) for name in ("a100_sxm4_80gb", "h100_sxm", "b200"))
CALL = AttentionProblem(1, 16, seqlen_q=2048)
#: The GPUs of compute capability 8.6 and 8.9 have 99 KiB of shared memory a CTA.
ADA = ("compute_capability=8.9", "smem_bytes_per_cta_max=101376")


def decided(framework, version, problem, profile, *facts) -> Decision:
    """What the rules of a framework say."""
    return FrameworkCall(find_rules(framework, version)[0], facts).decide(problem, profile)


def rules_failed(decision: Decision, backend: str) -> list[str]:
    """The rules that a backend fails, in order."""
    return [failure.rule for failure in decision.failures[backend]]


def traps(decision: Decision) -> dict[str, str]:
    """Trap -> message."""
    return {trap.rule: trap.message for trap in decision.traps}


def test_35_a_dense_figure_beyond_the_card():
    """flash-attention#1125: 3.4 ms for 64 heads of 10 000 tokens is 964 TFLOP/s; the card has 165, an A100 312."""
    problem = AttentionProblem(1, 64, seqlen_q=10_000, dtype="fp16")
    assert problem.flops() / 3400e-6 / 1e12 == pytest.approx(964, abs=1)
    limit = physical_bounds(problem, A100)[0]
    assert limit.resource == "tensor" and limit.time_us > 3 * 3400


@pytest.mark.parametrize("profile", [A100, H100, B200])
def test_38_silent_math(profile):
    """transformers#46960, sapiens2#3: head dim 512, or fp32, with enable_gqa: math, S² of memory, and no word said."""
    for problem in (
        CALL.with_(kv_heads=4, head_dim=512, head_dim_v=512),
        CALL.with_(kv_heads=4, dtype="fp32"),
    ):
        decision = decided("torch", "2.11", problem, profile)
        assert decision.chosen.name == "math" and decision.base.fallback == "silent"
        assert "heads" in rules_failed(decision, "efficient")
        assert all(decision.why_not(name) for name in ("flash", "efficient"))
        # the workspace: 16 heads x 2048² x 4 bytes
        assert "268 MB in fp32" in traps(decision)["score_matrix"]
        # newer PyTorch has mended it
        assert decided("torch", "2.14", problem, profile).chosen.name == "efficient"


def test_39_masks_and_causal():
    """pytorch#97514, #108108, #144858, #115111: a mask or non-square causal rejects flash; the corner differs."""
    masked = decided("torch", "2.11", CALL.with_(mask="bool"), A100)
    assert masked.chosen.name == "efficient" and rules_failed(masked, "flash") == ["mask"]
    oblong = decided("torch", "2.11", CALL.with_(causal=True, seqlen_q=512), A100)
    assert oblong.chosen.name == "efficient" and rules_failed(oblong, "flash") == ["causal_square"]
    assert "first key" in traps(oblong)["causal_top_left"]
    decode = decided("torch", "2.11", CALL.with_(causal=True, seqlen_q=1), A100)
    assert "sees only key 0 of 2048" in traps(decode)["causal_decode"]
    square = decided("torch", "2.11", CALL.with_(causal=True), A100)
    assert square.chosen.name == "flash" and not traps(square)
    other_corner = decided("flash-attn", "2.8", CALL.with_(causal=True, seqlen_q=512), A100)
    assert "last key" in traps(other_corner)["causal_bottom_right"]


def test_40_cudnn_on_b200_with_few_kv_heads():
    """pytorch#193893: wrong results below 8 KV heads in the default backend, cuDNN 9.19 and 9.20."""
    few = decided("torch", "2.11", CALL.with_(kv_heads=4), B200)
    assert few.chosen.name == "cudnn" and "wrong results" in traps(few)["cudnn_wrong_few_heads"]
    for decision in (
        decided("torch", "2.11", CALL.with_(kv_heads=8), B200),
        decided("torch", "2.11", CALL.with_(kv_heads=4), H100),
        decided("torch", "2.11", CALL.with_(kv_heads=4), B200, "cudnn_version=92200"),
    ):
        assert "cudnn_wrong_few_heads" not in traps(decision)


def test_41_the_deterministic_flag():
    """flash-attention#1596, PR#1766: dropped without a word in some FA3 builds; refused at head dim 256 now."""
    training = CALL.with_(pass_="bwd", deterministic=True)
    narrow = decided("flash-attn", "3.0", training, H100)
    assert narrow.chosen.name == "fa3" and "ignored deterministic" in traps(narrow)["deterministic_dropped"]
    wide = decided("flash-attn", "3.0", training.with_(head_dim=256, head_dim_v=256), H100)
    assert wide.chosen is None and rules_failed(wide, "fa3") == ["deterministic_256"]


def test_42_fa3_decode_in_vllm():
    """vllm#27437: FA3 it is, and a decode step far above its prediction is a fault (the rest: test_explain)."""
    decision = decided("vllm", None, CALL.with_(seqlen_q=1, kv_heads=4), H100)
    assert decision.chosen.name == "flash_attn" and "software fault" in traps(decision)["far_from_model"]
    timed = time_of_chosen(decision, CALL.with_(seqlen_q=1, kv_heads=4), H100, RunOptions())
    assert timed.kernel == "flash_decoding:flash_attn_3_kvcache" and timed.kind == "itself"


def test_44_shared_memory_limits():
    """flash-attention#190, #138, #51, #69: FA1's backward needs 152 KiB at 128; FA2 lifts it to 256 without dropout."""
    training = CALL.with_(pass_="bwd", dtype="fp16")
    assert decided("flash-attn", "1.0", training, A100).chosen.name == "fa1"
    small = decided("flash-attn", "1.0", training, A100, *ADA)
    assert small.chosen is None and rules_failed(small, "fa1") == ["backward_smem"]
    assert "101 kB" in small.why_not("fa1")
    assert decided("flash-attn", "1.0", training.with_(head_dim=64, head_dim_v=64), A100, *ADA).chosen is not None
    wide = training.with_(head_dim=256, head_dim_v=256)
    assert not traps(decided("flash-attn", "2.8", wide, A100, *ADA))
    dropping = traps(decided("flash-attn", "2.8", wide.with_(dropout=0.1), A100, *ADA))
    assert "no kernel runs and nothing raises" in dropping["no_kernel_launched"]
    assert "no_kernel_launched" not in traps(decided("flash-attn", "2.8", wide.with_(dropout=0.1), A100))


def test_7_and_27_the_slow_path_is_named():
    """flash-attention PR#1999 and #1589: FA4's gather of small pages, and FA2 on Blackwell."""
    assert "16 %" in traps(decided("flash-attn", "2.8", CALL, B200))["mma_sync_on_blackwell"]
    paged = CALL.with_(seqlen_q=1, page_size=32)
    assert "row by row" in traps(decided("flash-attn", "4.0", paged, B200))["page_gather"]
    assert "page_gather" not in traps(decided("flash-attn", "4.0", paged.with_(page_size=128), B200))
