"""The rules of torch 2.11 against what PyTorch 2.11 answered and ran on an H200, call by call."""

import csv
from dataclasses import replace
from pathlib import Path

import hardware_profiles
from simulator import load_profile
from simulator.dispatch.decide import Decision, decide
from simulator.dispatch.facts import facts_of, with_settings
from simulator.dispatch.rule_files import find_rules
from simulator.dispatch.timing import FrameworkCall, time_of_chosen
from simulator.options import RunOptions
from simulator.problem import AttentionProblem

OURS = Path(hardware_profiles.__file__).parent / "measurements" / "h200_sxm"
PROBE, TIMES = OURS / "dispatch_probe.csv", OURS / "backend_times.csv"
TORCH, _ = find_rules("torch", "2.11")
H200 = load_profile("h200_sxm")
PLAIN = facts_of(AttentionProblem(), H200)
#: Score elements up to which a backend is also simulated here: larger calls take seconds.
SMALL_SCORES = 3e8

#: What PyTorch prints when a filter refuses -> our rule for it. It prints nothing for a mask that needs a gradient.
REASONS = {
    "4 dimensional": "rank",
    "non-null attn_mask": "mask",
    "same last dimension": "head_dim",
    "of dtype": "dtype",
    "zero seq_len": "empty",
    "last dimension of the input to have stride 1": "strides",
    "same num_heads": "heads",
    "must divide": "heads",
    "is_causal flag": "causal_square",
    "last dimension of inputs to be divisible": "head_dim_multiple",
    "head_dim should be a multiple": "head_dim_multiple",
    "head_dim should be no more": "head_dim_limit",
    "not deterministic": "deterministic",
    "attn mask shapes": "mask_rank",
    "key/value sequence length 1": "one_key",
    "query sequence length 1 with dropout": "one_query_dropout",
}


def rows(path: Path = PROBE) -> list[dict[str, str]]:
    """The rows of a file as texts."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def decision_of(row: dict[str, str]) -> Decision:
    """What the rules say of a row's call, from nothing but what the row asked."""
    number = {name: int(row[name]) for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")}
    number |= {name: int(row[name]) for name in ("head_dim", "head_dim_v")}
    mask = row["mask"]
    kind = "none" if mask == "none" else "bool" if mask.startswith("bool") or mask == "broadcast" else "additive"
    rank = int(row["rank"])
    mask_rank = min({"bool2d": 2, "float2d": 2, "float3d": 3}.get(mask, 4), rank)
    facts = PLAIN | number | {
        "dtype": row["dtype"],
        "gqa": row["heads"] != row["kv_heads"],
        "causal": row["causal"] == "1",
        "mask": kind,
        "dropout": float(row["dropout"]),
        "training": row["requires_grad"] == "1",
        "deterministic": row["deterministic"] == "1",
    }  # fmt: skip
    given = {
        "enable_gqa": row["enable_gqa"] == "1",
        "rank": rank,
        "last_dim_contiguous": row["last_stride"] == "1",
        "offset_elements": int(row["storage_offset"]),
        "mask_last_dim_contiguous": mask != "expanded" or row["seqlen_k"] == "1",
        "mask_rank": mask_rank,
        "mask_requires_grad": row["mask_requires_grad"] == "1",
        "cudnn_version": int(row["cudnn"]),
        "cudnn_deprioritized": row["cudnn_deprioritized"] == "1",
    }
    return decide(TORCH, with_settings(TORCH, facts, given))


ANSWERED = [(row, decision_of(row)) for row in rows()]


def test_the_probe_is_large_and_varied():
    """Enough calls, of the version that the rules are for, with every backend and every kind of refusal among them."""
    calls = {tuple(row[name] for name in list(row)[2:20]) for row, _ in ANSWERED}
    assert len(calls) >= 300
    assert {row["torch"] for row, _ in ANSWERED} == {"2.11.0+cu130"}
    assert {row["ran"] for row, _ in ANSWERED} >= {"cudnn", "flash", "efficient", "math"}
    for backend, least in (("flash", 8), ("efficient", 6), ("cudnn", 10)):
        failed = {d.failures[backend][0].rule for _, d in ANSWERED if d.failures[backend]}
        assert len(failed) >= least, f"{backend}: only {failed} refused"


def test_every_backend_may_run_when_pytorch_says_so():
    wrong = [
        f"case {row['case']}: {name} may run: {said}, but by the rules: {decision.why_not(name) or 'it may'}"
        for row, decision in ANSWERED
        for name in ("flash", "efficient", "cudnn")
        if (said := row[f"can_{name}"] == "1") != (not decision.failures[name])
    ]
    assert not wrong, "\n".join(wrong[:20])


def test_the_backend_that_pytorch_picks_is_chosen():
    wrong = [
        f"case {row['case']}: {row['choice']}, the rules say {decision.chosen.name}"
        for row, decision in ANSWERED
        if row["choice"] != decision.chosen.name
    ]
    assert not wrong, "\n".join(wrong[:20])


def test_the_kernel_that_ran_is_the_chosen_backends():
    """By the kernels' names; a call on empty tensors runs fills and copies, one that raised nothing."""
    ran = [(row, decision) for row, decision in ANSWERED if row["ran"] not in ("", "none")]
    assert len(ran) >= 600
    assert all(row["ran"] == decision.chosen.name for row, decision in ran)
    for row, decision in ANSWERED:
        if row["ran"] == "none":
            assert "0" in (row["seqlen_q"], row["seqlen_k"]) and decision.chosen.name == "math"


def test_the_first_rule_that_fails_is_the_reason_that_pytorch_prints():
    checked = 0
    for row, decision in ANSWERED:
        for name in ("flash", "efficient", "cudnn"):
            if row[f"can_{name}"] == "1":
                continue
            reason = row[f"reason_{name}"]
            expected = next((rule for text, rule in REASONS.items() if text in reason), None)
            if not reason:
                expected = "mask_gradient"
            assert decision.failures[name][0].rule == expected, f"case {row['case']}, {name}: {reason!r}"
            checked += 1
    assert checked >= 800


def test_calls_that_raised_were_warned_of():
    """Misaligned slices crash the fused kernels; head counts that do not fit reach math, which raises."""
    raised = {"aligned": 0, "heads": 0}
    for row, decision in ANSWERED:
        warned = {trap.rule for trap in decision.traps}
        if "aligned" in row["error"]:
            raised["aligned"] += 1
            assert "misaligned" in warned
        elif "size of tensor a" in row["error"]:
            raised["heads"] += 1
            assert "heads_without_flag" in warned
        elif row["error"]:
            assert "must divide the number of heads" in row["error"] and decision.why_not("flash")
    assert min(raised.values()) >= 5


def timed_calls() -> list[tuple[dict[str, str], AttentionProblem, Decision]]:
    """The rows of the timed backends with their problem and what the rules say of it."""
    calls = []
    for row in rows(TIMES):
        sizes = [int(row[name]) for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim")]
        problem = AttentionProblem(*sizes, dtype=row["dtype"], causal=row["causal"] == "1", mask=row["mask"] or None)
        calls.append((row, problem, FrameworkCall(TORCH).decide(problem, H200)))
    return calls


def test_timed_backends_run_and_are_picked_as_the_rules_say():
    """A forced backend raises exactly where its rules fail; on its own PyTorch takes the one that the rules choose."""
    calls = timed_calls()
    assert len(calls) >= 80
    for row, _, decision in calls:
        assert (row["error"] == "") == (not decision.failures[row["backend"]]), row
        assert (row["picked"] == "1") == (row["backend"] == decision.chosen.name), row


def test_lower_bounds_are_below_and_stand_ins_near_the_measured_times():
    """What ``auto`` and ``dispatch`` predict for kernels without a model of their own."""
    found = {"at_least": [], "stand_in": []}
    for row, problem, decision in timed_calls():
        scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
        if row["error"] or scores > SMALL_SCORES or row["backend"] == "flash":
            continue
        forced = replace(decision, chosen=TORCH.backends[row["backend"]])
        timed = time_of_chosen(forced, problem, H200, RunOptions())
        found[timed.kind].append(float(row["measured_time_us"]) / timed.result.time_us)
    # a launch-bound call of 15 us is within the model's own error of its bound
    assert len(found["at_least"]) >= 12 and min(found["at_least"]) > 0.93 and sorted(found["at_least"])[1] > 1.0
    assert len(found["stand_in"]) >= 7 and min(found["stand_in"]) > 0.9 and max(found["stand_in"]) < 1.5
