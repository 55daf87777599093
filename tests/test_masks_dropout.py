"""Masks and dropout of unfused attention and FlashAttention-1: exact numbers, bytes, and the FA1 paper's rows."""

import numpy as np
import pytest

from algorithms import build_program
from simulator import simulate
from simulator.accesses import sm_traffic
from simulator.errors import UnsupportedError
from simulator.predict import predict_row
from simulator.problem import AttentionProblem
from simulator.profile import load_profile
from simulator.published import load_published
from simulator.reference import (
    attention,
    attention_gradients,
    backward_inputs,
    dropout_weights,
    random_inputs,
    random_mask,
    run_attention,
)

GPU = load_profile("a100_sxm4_40gb")
BASE = AttentionProblem(batch=2, heads=2, seqlen_q=150, seqlen_k=170, head_dim=64, dtype="fp16")
CASES = [
    {"mask": "additive"},
    {"mask": "bool"},
    {"mask": "padding"},
    {"mask": "padding", "causal": True},
    {"mask": "bool", "causal": True},
    {"window": (30, 10)},
    {"window": (30, 0), "mask": "additive"},
    {"dropout": 0.3},
    {"dropout": 0.3, "mask": "padding", "heads": 4, "kv_heads": 2},
]


def inputs_of(problem):
    inputs = random_inputs(problem, seed=2)
    mask = random_mask(problem) if problem.mask else None
    return inputs, mask


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_standard_equals_float64(changes):
    problem = BASE.with_(kv_heads=None).with_(**changes) if "heads" not in changes else BASE.with_(**changes)
    inputs, mask = inputs_of(problem)
    program = build_program("standard", problem, GPU)
    out = run_attention(program, inputs | ({"mask": mask} if mask is not None else {}))
    want = attention(problem, inputs["Q"], inputs["K"], inputs["V"], mask)["O"]
    assert np.abs(out["O"] - want).max() < 5e-3
    assert np.abs(attention(problem.with_(mask=None, dropout=0.0, window=None, causal=False),
                            inputs["Q"], inputs["K"], inputs["V"])["O"] - want).max() > 0.05  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("mask", [None, "additive"])
def test_standard_forward_and_backward(dropout, mask):
    problem = BASE.with_(pass_="fwd_bwd", dropout=dropout, mask=mask)
    inputs, values = inputs_of(problem)
    do = backward_inputs(problem)["dO"]
    given = inputs | {"dO": do} | ({"mask": values} if mask else {})
    got = run_attention(build_program("standard", problem, GPU), given)
    want = attention_gradients(problem, inputs["Q"], inputs["K"], inputs["V"], do, values)
    for name, exact in want.items():
        assert np.abs(got[name] - exact).max() / np.abs(exact).max() < 1e-2, name


@pytest.mark.parametrize("mask", [None, "additive"])
def test_standard_with_a_soft_cap_forward_and_backward(mask):
    problem = BASE.with_(pass_="fwd_bwd", softcap=1.5, mask=mask)
    inputs, values = inputs_of(problem)
    do = backward_inputs(problem)["dO"]
    given = inputs | {"dO": do} | ({"mask": values} if mask else {})
    program = build_program("standard", problem, GPU)
    got = run_attention(program, given)
    want = attention_gradients(problem, inputs["Q"], inputs["K"], inputs["V"], do, values)
    uncapped = attention_gradients(problem.with_(softcap=0.0), inputs["Q"], inputs["K"], inputs["V"], do, values)
    for name, exact in want.items():
        assert np.abs(got[name] - exact).max() / np.abs(exact).max() < 2e-2, name
        assert np.abs(got[name] - uncapped[name]).max() / np.abs(exact).max() > 0.1, name
    # a quotient, tanh and a product, each a kernel that reads and writes S; the same backward, where tanh is read too
    scores = 2 * BASE.batch * BASE.heads * BASE.seqlen_q * BASE.seqlen_k
    moved = {k.name: sm_traffic(k) for k in program.kernels if k.name.startswith("cap_")}
    assert [sum(r for r, _ in moved[n].values()) for n in moved] == [scores] * 4 + [2 * scores, scores]
    assert len(moved) == 6 and all(sum(w for _, w in m.values()) == scores for m in moved.values())


def test_which_weights_dropout_keeps_is_what_the_mask_says():
    problem = BASE.with_(dropout=0.3, pass_="fwd_bwd")
    program = build_program("standard", problem, GPU)
    kept = run_attention(program, random_inputs(problem) | {"dO": backward_inputs(problem)["dO"]})["dropout_mask"]
    assert np.array_equal(kept, (dropout_weights(problem) > 0).astype(np.float32))


def kernel_named(problem, name):
    return next(k for k in build_program("standard", problem, GPU).kernels if k.name == name)


def test_bytes_of_masks_and_dropout():
    heads, scores = BASE.batch * BASE.heads, BASE.seqlen_q * BASE.seqlen_k
    assert sm_traffic(kernel_named(BASE.with_(mask="additive"), "mask_add"))["mask"] == (2 * heads * scores, 0)
    assert sm_traffic(kernel_named(BASE.with_(mask="bool"), "mask_fill"))["mask"] == (heads * scores, 0)
    # a padding mask is one row a sequence: each CTA reads its part of it, for one row here
    padding = sm_traffic(kernel_named(BASE.with_(mask="padding"), "mask_add"))["mask"][0]
    assert 0 < padding <= 2 * heads * scores
    dropped = sm_traffic(kernel_named(BASE.with_(dropout=0.1), "dropout"))
    assert dropped["P"] == (2 * heads * scores, 0)
    assert dropped["P_dropped"] == (0, 2 * heads * scores) and dropped["dropout_mask"] == (0, heads * scores)


def test_peak_memory_grows_by_what_dropout_keeps():
    big = AttentionProblem(batch=4, heads=8, seqlen_q=2048, head_dim=64, dtype="fp16")
    plain, dropped = (simulate("standard", big.with_(dropout=d), GPU).peak_memory_bytes for d in (0.0, 0.1))
    scores = 32 * 2048 * 2048
    # S and P without; P, P dropped and a byte an element with
    assert dropped - plain == scores


def test_an_unknown_mask_is_named():
    with pytest.raises(UnsupportedError, match="block_sparse"):
        build_program("standard", BASE.with_(mask="block_sparse"), GPU)


@pytest.mark.parametrize("implementation", ["flash_attn_1", "flash_attn_1_paper"])
@pytest.mark.parametrize("changes", [{}, {"causal": True, "seqlen_q": 300, "seqlen_k": 300}, {"kv_heads": 1}])
def test_fa1_drops_the_same_weights_forward_and_backward(implementation, changes):
    problem = BASE.with_(pass_="fwd_bwd", dropout=0.25, **changes)
    inputs = random_inputs(problem)
    do = backward_inputs(problem)["dO"]
    got = run_attention(build_program("fa1", problem, GPU, implementation), inputs | {"dO": do})
    q, k, v = (inputs[name] for name in "QKV")
    want = attention(problem, q, k, v) | attention_gradients(problem, q, k, v, do)
    for name in ("O", "dQ", "dK", "dV"):
        assert np.abs(got[name] - want[name]).max() / np.abs(want[name]).max() < 1e-2, name


def test_the_parallel_backward_launch_too():
    problem = AttentionProblem(heads=1, seqlen_q=600, head_dim=64, dtype="fp16", dropout=0.25, pass_="bwd")
    program = build_program("fa1", problem, GPU)
    assert program.attributes["key_blocks_in_parallel"]
    inputs = backward_inputs(problem)
    want = attention_gradients(problem, *(inputs[name] for name in ("Q", "K", "V", "dO")))
    got = run_attention(program, inputs)
    for name, exact in want.items():
        assert np.abs(got[name] - exact).max() / np.abs(exact).max() < 1e-2, name


def test_fa1_paper_forward_alone_drops_too():
    problem = BASE.with_(dropout=0.25, heads=1, kv_heads=1)
    inputs = random_inputs(problem)
    got = run_attention(build_program("fa1", problem, GPU, "flash_attn_1_paper"), inputs)["O"]
    assert np.abs(got - attention(problem, inputs["Q"], inputs["K"], inputs["V"])["O"]).max() < 5e-3


def test_dropout_and_masks_cost_time():
    big = AttentionProblem(batch=8, heads=8, seqlen_q=2048, head_dim=64, dtype="fp16")
    times = {
        name: simulate("standard", big.with_(**changes), GPU).time_us
        for name, changes in {
            "plain": {}, "dropout": {"dropout": 0.1}, "bool": {"mask": "bool"}, "additive": {"mask": "additive"},
            "padding": {"mask": "padding"},
        }.items()
    }  # fmt: skip
    assert times["plain"] < times["padding"] <= times["bool"] * 1.01 and times["bool"] <= times["additive"] * 1.01
    assert times["dropout"] > 1.1 * times["plain"]


def test_every_row_of_the_fa1_paper_runs():
    table = load_published()
    rows = table[table["file"].isin(["fa1_paper_a100.csv", "fa1_other.csv"])]
    rows = rows[rows["seqlen_q"] <= 1024].astype(object).where(rows.notna(), "")
    assert set(rows["mask"]) == {"", "padding"} and len(rows) > 40
    for row in rows.drop(columns="file").astype(str).to_dict("records"):
        output = predict_row(row)
        assert not output["error"], (row, output["error"])
        assert ("padding" in output["warnings"]) == (row["algorithm"] == "fa1" and row["mask"] == "padding")
