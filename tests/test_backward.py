"""Backward passes: exact gradients, FLOPs and bytes from closed forms, schedules that break when an edge is dropped."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from algorithms import build_program, default_implementation
from algorithms.fa2_backward import WARP_ROWS, Share
from simulator import simulate
from simulator.errors import UnsupportedError
from simulator.numbers import DeadlockError
from simulator.physics import Physics
from simulator.problem import AttentionProblem
from simulator.profile_loader import read_profile
from simulator.program import Await, Barrier, Compute, Matmul, Store, Wait, map_ops
from simulator.reference import (
    attention,
    attention_gradients,
    backward_inputs,
    dropout_weights,
    random_inputs,
    run_attention,
)
from simulator.sm_costs import SmSpec
from simulator.sm_timing import timing_of
from simulator.traffic import executed_work, program_traffic, sm_traffic

H200 = read_profile("h200_sxm")
A100 = read_profile("a100_sxm4_80gb")
GRADIENTS = ("dQ", "dK", "dV")
#: Rounding of P, dS and the results (half a unit in the last place of 8 or 11 bits), over sums of independent terms.
TOLERANCE = {"bf16": 1.2e-2, "fp16": 1.5e-3}


def problem(**changes) -> AttentionProblem:
    """A small backward problem."""
    return AttentionProblem(**{"heads": 2, "seqlen_q": 256, "head_dim": 64, "pass_": "bwd"} | changes)


def errors(program, inputs=None) -> dict[str, float]:
    """Largest error of each gradient relative to its largest entry, against float64."""
    p = program.problem
    inputs = backward_inputs(p) if inputs is None else inputs
    got = run_attention(program, inputs)
    exact = attention_gradients(p, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    return {name: float(np.abs(got[name] - exact[name]).max() / np.abs(exact[name]).max()) for name in GRADIENTS}


def assert_exact(program) -> None:
    """Every gradient equals float64's within the dtype's rounding (NaN fails)."""
    for name, error in errors(program).items():
        assert error < TOLERANCE[program.problem.dtype], f"{name} is off by {error:.2e}"


CASES = {
    "square": {},
    "causal": {"causal": True, "dtype": "fp16"},
    "gqa": {"heads": 4, "kv_heads": 2, "causal": True},
    "mqa": {"heads": 4, "kv_heads": 1, "batch": 2, "seqlen_q": 128},
    "odd": {"seqlen_q": 77, "dtype": "fp16"},
    "odd_causal": {"seqlen_q": 300, "causal": True},
    "few_queries": {"seqlen_q": 77, "seqlen_k": 300, "causal": True},
    "few_keys": {"seqlen_q": 300, "seqlen_k": 77, "causal": True, "dtype": "fp16"},
    "d32": {"head_dim": 32, "seqlen_q": 200},
    "d80": {"head_dim": 80, "seqlen_q": 200},
    "d96": {"head_dim": 96, "seqlen_q": 200, "causal": True},
    "d128": {"head_dim": 128, "seqlen_q": 300},
    "d128_causal": {"head_dim": 128, "seqlen_q": 300, "causal": True, "dtype": "fp16"},
    "d192": {"head_dim": 192, "seqlen_q": 200, "causal": True},
    "d256": {"head_dim": 256, "seqlen_q": 200, "causal": True},
    "d256_gqa": {"head_dim": 256, "heads": 2, "kv_heads": 1, "seqlen_q": 130},
    "window": {"window": (100, 0), "seqlen_q": 400},
    "window_both": {"window": (30, 200), "seqlen_q": 150, "seqlen_k": 333, "head_dim": 128},
    "window_causal_gqa": {"window": (128, -1), "causal": True, "seqlen_q": 300, "kv_heads": 1},
    "window_few_keys": {"window": (30, 20), "seqlen_q": 333, "seqlen_k": 150, "head_dim": 96},
    "softcap": {"softcap": 2.0, "seqlen_q": 200, "causal": True, "head_dim": 128},
    "lengths": {"batch": 3, "seqlens_q": (77, 256, 130), "seqlens_k": (200, 256, 90), "causal": True, "kv_heads": 1},
    "lengths_window": {"batch": 2, "seqlens_q": (77, 256), "seqlens_k": (200, 90), "window": (70, 30)},
    "lengths_d256": {"batch": 2, "seqlens_q": (10, 256), "seqlens_k": (256, 3), "head_dim": 256, "kv_heads": 1},
    "deterministic": {"deterministic": True, "seqlen_q": 300},
    "deterministic_causal": {"deterministic": True, "causal": True, "seqlen_q": 400, "heads": 2, "kv_heads": 1},
}


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_float64(algorithm, case):
    assert_exact(build_program(algorithm, problem(**CASES[case]), H200))


@pytest.mark.parametrize("pass_", ["bwd", "fwd_bwd"])
@pytest.mark.parametrize(
    ("changes", "parallel"),
    [
        ({"seqlens_q": (77, 256, 130), "seqlens_k": (200, 256, 90), "causal": True}, False),
        ({"seqlens_q": (77, 600, 3), "seqlens_k": (77, 600, 3), "dtype": "fp16"}, True),
        ({"seqlens_q": (77, 600, 30), "seqlens_k": (90, 600, 270), "causal": True}, True),
        ({"seqlens_q": (77, 300, 3), "seqlens_k": (90, 600, 270), "deterministic": True, "causal": True}, False),
        ({"seqlens_q": (40, 40, 40), "seqlens_k": (200, 5, 333), "head_dim": 128, "deterministic": True}, False),
    ],
    ids=str,
)
def test_first_flash_attentions_gradients_of_different_lengths(changes, parallel, pass_):
    """Both launches: a CTA a key block, and a head's key blocks in sequence."""
    longest = {"seqlen_q": max(changes["seqlens_q"]), "seqlen_k": max(changes["seqlens_k"])}
    p = problem(**({"batch": 3, "heads": 2, "kv_heads": 2, "pass_": pass_} | longest | changes))
    program = build_program("fa1", p, H200)
    assert program.attributes["key_blocks_in_parallel"] == parallel
    assert_exact(program)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 192, "head_dim_v": 128, "causal": True},
        {"head_dim": 192, "head_dim_v": 128, "pass_": "fwd_bwd", "seqlen_k": 90},
        {"head_dim": 256, "head_dim_v": 64, "window": (40, 10)},
    ],
    ids=str,
)
def test_a_narrower_v_is_padded_in_tiles_and_not_in_memory(changes):
    p = problem(**({"kv_heads": 1, "heads": 2, "seqlen_q": 150} | changes))
    program = build_program("fa3", p, H200)
    inputs = backward_inputs(p)
    got = run_attention(program, inputs)
    want = attention_gradients(p, *(inputs[name] for name in ("Q", "K", "V", "dO")))
    for name in GRADIENTS:
        assert np.abs(got[name] - want[name]).max() < TOLERANCE["bf16"] * np.abs(want[name]).max(), name
    wide = build_program("fa3", p.with_(head_dim_v=p.head_dim, pass_="bwd"), H200)
    alone = build_program("fa3", p.with_(pass_="bwd"), H200)
    narrow, full = (executed_work(main_kernel(x))["matmul"] for x in (alone, wide))
    assert narrow == full and alone.outputs["dV"].bytes * p.head_dim == wide.outputs["dV"].bytes * p.head_dim_v


def test_a_wider_v_has_no_backward_kernel():
    with pytest.raises(UnsupportedError, match="head_dim_v 128 above head_dim 64"):
        build_program("fa3", problem(head_dim=64, head_dim_v=128), H200)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_equal_lengths_cost_what_one_length_costs(algorithm, kv_heads):
    one = problem(batch=2, heads=4, kv_heads=kv_heads, seqlen_q=512, causal=True)
    each = one.with_(seqlens_q=(512, 512), seqlens_k=(512, 512))
    short = one.with_(seqlens_q=(512, 64), seqlens_k=(512, 64))
    plain, ragged, less = (simulate(algorithm, p, H200) for p in (one, each, short))
    assert (plain.hbm_read_bytes, plain.peak_memory_bytes) == (ragged.hbm_read_bytes, ragged.peak_memory_bytes)
    # FA2's kernel for sequences of their own lengths checks bounds, whatever they are
    slower = 1.05 if algorithm == "fa2" else 1.0
    assert plain.time_us <= ragged.time_us <= slower * plain.time_us
    # a sequence an eighth as long: its bytes are gone, down to what a tile rounds up
    assert 0.54 < less.peak_memory_bytes / plain.peak_memory_bytes < 0.62
    assert 0.54 < less.hbm_read_bytes / plain.hbm_read_bytes < 0.62
    assert less.executed_flops < 0.7 * plain.executed_flops


def test_a_window_skips_query_blocks_backward():
    p = problem(heads=4, seqlen_q=4096, head_dim=128)
    for algorithm in ("fa2", "fa3"):
        whole = executed_work(main_kernel(build_program(algorithm, p, H200)))["matmul"]
        seen = executed_work(main_kernel(build_program(algorithm, p.with_(window=(512, 0)), H200)))["matmul"]
        assert 512 / 4096 < seen / whole < 768 / 4096


@pytest.mark.parametrize("changes", [{}, {"causal": True, "seqlen_q": 200, "head_dim": 128}, {"deterministic": True}])
def test_dropout_drops_the_same_weights_forward_and_backward(changes):
    p = problem(pass_="fwd_bwd", heads=4, kv_heads=2, dropout=0.2, **changes)
    kept = dropout_weights(p)
    assert np.unique(kept).tolist() == [0.0, 1.25] and abs((kept > 0).mean() - 0.8) < 0.01
    program = build_program("fa2", p, H200)
    inputs = random_inputs(p) | {"dO": backward_inputs(p)["dO"]}
    got = run_attention(program, inputs)
    q, k, v, do = (inputs[name] for name in ("Q", "K", "V", "dO"))
    exact = attention(p, q, k, v) | attention_gradients(p, q, k, v, do)
    for name in ("O", "LSE", *GRADIENTS):
        error = np.abs(got[name] - exact[name]).max() / np.abs(exact[name]).max()
        assert error < TOLERANCE["bf16"], name
    without = attention_gradients(p.with_(dropout=0.0), q, k, v, do)
    assert np.abs(without["dQ"] - exact["dQ"]).max() > 0.1 * np.abs(exact["dQ"]).max()


def test_gradients_of_cudnn_and_of_ampere_tiles():
    assert_exact(build_program("fa3", problem(head_dim=128, seqlen_q=200), H200, "cudnn_sm90"))
    # A100: no double buffer of Q at head dim 256; V stays in registers at 96
    assert_exact(build_program("fa2", problem(head_dim=256, seqlen_q=130), A100))
    program = build_program("fa2", problem(head_dim=96, seqlen_q=130, causal=True), A100)
    assert any(
        isinstance(op, Matmul) and getattr(op.b, "name", "") == "V_reg" for *_, op in main_kernel(program).walk()
    )
    assert_exact(program)


def test_unfused_attention_is_deterministic_as_it_is():
    p = problem(heads=4, seqlen_q=256)
    plain, fixed = (build_program("standard", q, H200).kernels for q in (p, p.with_(deterministic=True)))
    assert [k.name for k in plain] == [k.name for k in fixed]
    fa1 = build_program("fa1", p.with_(heads=4, seqlen_q=2048, deterministic=True), A100)
    assert not any(op.accumulate for k in fa1.kernels for _, _, op in k.walk() if isinstance(op, Store))


def test_a_deterministic_cta_walks_several_key_blocks():
    """With more heads than the GPU has SMs per key block, one CTA owns several key blocks and one dQ buffer."""
    tiny = replace_sms(H200, 3)
    p = problem(deterministic=True, causal=True, heads=2, seqlen_q=500, head_dim=64)
    program = build_program("fa2", p, tiny)
    assert program.attributes["dq_splits"] == 2
    assert main_kernel(program).coords["n_keys"].max() == 2
    assert_exact(program)


def replace_sms(profile, sms: int):
    """``profile`` with another number of SMs."""
    changed = read_profile(profile.name)
    object.__setattr__(changed, "num_sms", sms)
    return changed


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_float64_gradients_against_finite_differences(dropout):
    p = AttentionProblem(heads=2, kv_heads=1, seqlen_q=3, seqlen_k=5, head_dim=4, causal=True, dropout=dropout)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 3, 4)), rng.standard_normal((1, 5, 4)), rng.standard_normal((1, 5, 4))
    do = rng.standard_normal((2, 3, 4))
    exact = attention_gradients(p, q, k, v, do)
    for name, x in (("dQ", q), ("dK", k), ("dV", v)):
        numeric = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            values = []
            for step in (1e-6, -1e-6):
                x[index] += step
                values.append((attention(p, q, k, v)["O"] * do).sum())
                x[index] -= step
            numeric[index] = (values[0] - values[1]) / 2e-6
        np.testing.assert_allclose(exact[name], numeric, atol=1e-7)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_forward_and_backward_in_one_program(algorithm):
    p = problem(pass_="fwd_bwd", heads=4, kv_heads=2, causal=True, seqlen_q=200)
    program = build_program(algorithm, p, H200)
    inputs = random_inputs(p) | {"dO": backward_inputs(p)["dO"]}
    assert set(program.inputs) == {"Q", "K", "V", "dO"}
    got = run_attention(program, inputs)
    exact = attention_gradients(p, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    exact |= attention(p, inputs["Q"], inputs["K"], inputs["V"])
    for name in ("O", "LSE", *GRADIENTS):
        error = np.abs(got[name] - exact[name]).max() / np.abs(exact[name]).max()
        assert error < TOLERANCE["bf16"], name
    backward = build_program(algorithm, p.with_(pass_="bwd"), H200)
    assert program.live_bytes == backward.live_bytes
    assert program.attributes["kept_bytes"] == p.heads * p.seqlen_q * (p.head_dim * 2 + 4)
    assert program.implementation == ("torch_flash" if algorithm == "fa2" else "flash_attn_4_sm90")


# ------------------------------------------------------------------------------------------------- work and bytes


def main_kernel(program):
    """The kernel with the five products."""
    return next(k for k in program.kernels if any(isinstance(op, Matmul) for _, _, op in k.walk()))


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_flops_are_two_and_a_half_times_forward(algorithm, head_dim):
    """Whole tiles, no mask: five products, each of 2 * Sq * Sk * d; forward has two."""
    tile_m, tile_n = build_program(algorithm, problem(head_dim=head_dim), H200).attributes["backward_tile"]
    p = problem(batch=2, heads=4, kv_heads=2, head_dim=head_dim, seqlen_q=6 * tile_m, seqlen_k=4 * tile_n)
    executed = executed_work(main_kernel(build_program(algorithm, p, H200)))["matmul"]
    assert executed == 2.5 * p.with_(pass_="fwd").flops() == p.flops()


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_causal_work_is_whole_tiles_on_and_below_the_diagonal(algorithm):
    p = problem(causal=True, seqlen_q=1024, head_dim=128)
    program = build_program(algorithm, p, H200)
    m, n = program.attributes["backward_tile"]
    tiles = sum((i + 1) * m > j * n for i in range(1024 // m) for j in range(1024 // n))
    assert executed_work(main_kernel(program))["matmul"] == p.heads * tiles * 5 * 2 * m * n * 128


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_main_kernel_bytes_by_tensor(algorithm, kv_heads):
    p = problem(heads=4, kv_heads=kv_heads, head_dim=128, seqlen_q=640, seqlen_k=512)
    program = build_program(algorithm, p, H200)
    traffic = sm_traffic(main_kernel(program))
    visits = 512 // program.attributes["backward_tile"][1]
    queries, keys = p.heads * 640 * 128, p.heads * 512 * 128
    assert traffic["Q"] == traffic["dO"] == (visits * queries * 2, 0)
    assert traffic["K"] == traffic["V"] == (keys * 2, 0)
    lse = "LSE" if algorithm == "fa2" else "LSE_log2"
    assert traffic[lse] == traffic["D"] == (visits * p.heads * 640 * 4, 0)
    # S^2 * d * 4 / tile_n a head: what case 23 of the reference counts for dQ's reduction
    assert traffic["dQ_accum"] == (0, visits * queries * 4)
    grouped = kv_heads < p.heads
    if not grouped:
        assert traffic["dK"] == traffic["dV"] == (0, keys * 2)
    elif algorithm == "fa2":
        assert traffic["dK_expanded"] == traffic["dV_expanded"] == (0, keys * 2)
    else:
        assert traffic["dK_accum"] == traffic["dV_accum"] == (0, keys * 4)


def test_helper_kernels_are_itemised():
    """Zero fill, rowsum(dO * O), conversion and the sums over the group: each a launch with its own bytes."""
    p = problem(heads=4, kv_heads=2, head_dim=128, seqlen_q=512)
    fp32, io, kv = 4 * 512 * 128 * 4, 4 * 512 * 128 * 2, 2 * 512 * 128 * 2
    rows = 4 * 512 * 4

    fa2 = build_program("fa2", p, H200)
    assert [k.name for k in fa2.kernels] == [
        "flash_bwd_dot_do_o", "flash_bwd", "flash_bwd_convert_dq", "sum_dK", "sum_dV",
    ]  # fmt: skip
    by_name = {k.name: sm_traffic(k) for k in fa2.kernels}
    assert by_name["flash_bwd_dot_do_o"] == {"dO": (io, 0), "O": (io, 0), "D": (0, rows), "dQ_accum": (0, fp32)}
    assert by_name["flash_bwd_convert_dq"] == {"dQ_accum": (fp32, 0), "dQ": (0, io)}
    assert by_name["sum_dK"] == {"dK_expanded": (io, 0), "dK": (0, kv)}

    hopper = build_program("fa3", p.with_(seqlen_q=640, seqlen_k=512), H200)
    assert [k.name for k in hopper.kernels] == [
        "fill_dK_accum", "fill_dV_accum", "bwd_preprocess", "flash_bwd_sm90", "bwd_postprocess_dq",
        "bwd_postprocess_dK", "bwd_postprocess_dV",
    ]  # fmt: skip
    by_name = {k.name: sm_traffic(k) for k in hopper.kernels}
    kv_fp32 = 2 * 512 * 128 * 4
    assert by_name["fill_dK_accum"] == {"dK_accum": (0, kv_fp32)}
    assert by_name["bwd_postprocess_dV"] == {"dV_accum": (kv_fp32, 0), "dV": (0, kv)}
    assert by_name["bwd_preprocess"]["LSE_log2"] == (0, 4 * 640 * 4)

    wide = build_program("fa2", p.with_(deterministic=True), H200)
    splits = -(-H200.num_sms // 4)
    fill, read = (sm_traffic(wide.kernels[i])["dQ_accum"] for i in (0, 3))
    assert fill == (0, splits * fp32) and read == (splits * fp32, 0)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_bytes_exceed_the_compulsory_sum_as_counters_show(algorithm):
    """fp32 dQ, zero fills, helpers and grouped dK/dV: 1.3 to 4 times what must move, already once through each."""
    p = problem(batch=4, heads=32, kv_heads=8, head_dim=128, seqlen_q=2048, causal=True)
    program = build_program(algorithm, p, H200)
    compulsory = sum(t.bytes for t in (*program.inputs.values(), *program.outputs.values()))
    scratch = sum(t.bytes for t in program.tensors().values() if t.kind == "scratch")
    # zeroed or written, accumulated into, read back: at least one write and one read of each scratch byte
    assert 1.3 < (compulsory + 2 * scratch) / compulsory < 4
    assert program.live_bytes == compulsory + scratch
    assert sum(r + w for r, w in program_traffic(program).values()) > compulsory + 2 * scratch


# ------------------------------------------------------------------------------------------------- mutations


def changed(program, change):
    """``program`` with ``change`` applied to every operation of the main kernel; asserts that something changed."""
    kernel = main_kernel(program)
    roles = tuple(replace(r, ops=map_ops(r.ops, change)) for r in kernel.roles)
    assert roles != kernel.roles
    mutant = replace(kernel, roles=roles)
    return replace(program, kernels=tuple(mutant if k is kernel else k for k in program.kernels))


def is_wrong(program) -> bool:
    """Whether the mutant deadlocks or computes anything else than the gradients."""
    try:
        found = errors(program)
    except DeadlockError:
        return True
    return any(not error < TOLERANCE[program.problem.dtype] for error in found.values())


def drop(kind, **fields):
    """A change that drops operations of ``kind`` with these field values."""

    def change(op):
        hit = isinstance(op, kind) and all(getattr(op, name) == value for name, value in fields.items())
        return None if hit else op

    return change


MUTATIONS = {
    "no mask": ("both", lambda op: None if isinstance(op, Compute) and op.fn.startswith("mask") else op),
    "dQ overwritten": ("both", lambda op: replace(op, accumulate=False) if isinstance(op, Store) else op),
    "dK and dV overwritten": ("both", lambda op: replace(op, accumulate=False) if isinstance(op, Matmul) else op),
    "dS without D": (
        "both",
        lambda op: (
            replace(op, fn="multiply", args=op.args[:2])
            if isinstance(op, Compute) and op.fn.startswith("softmax_grad")
            else op
        ),
    ),
    "dK not scaled": ("both", drop(Compute, fn="scale")),
    "no block barrier": ("fa2", drop(Barrier, name="block")),
    "P and dS not met": ("fa3", drop(Barrier, name="PdS")),
    "dQ sent unasked": ("fa3", drop(Wait, name="dq_full0")),
    "dQ not awaited": ("fa3", drop(Await, token="dQ")),
    "one buffer of dS": (
        "fa3",
        lambda op: _one_buffer(op),
    ),
}


def _one_buffer(op):
    """Both stages of dS in one buffer: a warpgroup that runs ahead overwrites what the other still reads."""

    def fix(operand):
        source = getattr(operand, "source", operand)
        if getattr(source, "name", "") != "dS_smem1":
            return operand
        other = replace(source, name="dS_smem0")
        return replace(operand, source=other) if operand is not source else other

    if isinstance(op, Compute):
        return replace(op, out=fix(op.out), args=tuple(fix(a) for a in op.args))
    if isinstance(op, Matmul):
        return replace(op, a=fix(op.a), b=fix(op.b))
    return op


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutants_are_caught(name):
    where, change = MUTATIONS[name]
    for algorithm in ("fa2", "fa3") if where == "both" else (where,):
        program = build_program(algorithm, problem(causal=True, seqlen_q=384), H200)
        assert not is_wrong(program)
        assert is_wrong(changed(program, change)), algorithm


def test_skipped_zero_fill_shows_as_nan():
    program = build_program("fa2", problem(), H200)
    first = program.kernels[0]
    keeps = drop(Store, into=next(op.into for _, _, op in first.walk() if _writes(op, "dQ_accum")))
    roles = tuple(replace(r, ops=map_ops(r.ops, keeps)) for r in first.roles)
    mutant = replace(program, kernels=(replace(first, roles=roles), *program.kernels[1:]))
    assert np.isnan(errors(mutant)["dQ"])


def _writes(op, tensor: str) -> bool:
    return isinstance(op, Store) and op.into.tensor.name == tensor


# ------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_iteration_costs_at_least_its_products_and_not_much_more(algorithm, head_dim):
    program = build_program(algorithm, problem(head_dim=head_dim, seqlen_q=2048), H200)
    kernel = main_kernel(program)
    spec = SmSpec.of(H200, Physics(), kernel.path, kernel.compute_dtype)
    timing = timing_of(kernel, spec, (500.0, 1500.0), 1)
    m, n = program.attributes["backward_tile"]
    tensor_cycles = 5 * 2 * m * n * head_dim / spec.tensor_flop
    blocks = 2 if any(t.coord == "n_pairs" for t in kernel.trips) else 1
    period = timing.period_cycles[0][0] / blocks
    assert tensor_cycles < period < 4 * tensor_cycles
    assert all(o > 0 for o in timing.overhead_cycles)


def test_two_blocks_at_a_time_cost_twice_one():
    """The walk in pairs is a way of writing two buffers, not another schedule."""
    kernel = main_kernel(build_program("fa3", problem(causal=True, seqlen_q=2048), H200))
    assert set(kernel.coords["n_odd"]) == {0, 1}
    timing = timing_of(kernel, SmSpec.of(H200, Physics(), kernel.path, kernel.compute_dtype), (500.0,), 1)
    pair, single = (p[0] for p in timing.period_cycles)
    assert pair == pytest.approx(2 * single, rel=0.03)


@pytest.mark.parametrize("rows", sorted({r for layout in WARP_ROWS.values() for r in layout}))
def test_two_warp_sets_read_what_a_grid_of_warps_reads(rows):
    """Eight warps in ``rows`` x ``8/rows``: each row block of A goes to every column of warps, and B likewise."""
    share = Share.of(rows)
    a_reads = (1 if share.by_rows else 2) * (4 if share.split == "cols" else 1)
    b_reads = (2 if share.by_rows else 1) * (4 if share.split == "rows" else 1)
    assert (a_reads, b_reads) == (8 // rows, rows)


# ------------------------------------------------------------------------------------------------- choice and limits


def test_default_implementations_by_pass():
    assert default_implementation("fa3", H200) == "flash_attn_3"
    assert default_implementation("fa3", H200, problem()) == "flash_attn_4_sm90"
    assert build_program("fa3", problem(pass_="fwd"), H200).implementation == "flash_attn_3"
    assert default_implementation("fa2", H200, problem()) == "torch_flash"


@pytest.mark.parametrize(
    ("algorithm", "implementation", "gpu", "changes", "says"),
    [
        ("fa3", "flash_attn_3", H200, {}, "pass 'bwd'"),
        ("fa3", None, A100, {}, "wgmma"),
        ("fa3", "cudnn_sm90", H200, {"window": (128, 0)}, "window"),
        ("fa3", None, H200, {"window": (128, 0), "deterministic": True}, "deterministic with a window"),
        ("fa3", None, H200, {"dropout": 0.1}, "dropout"),
        ("fa2", None, H200, {"head_dim": 512}, "up to 256"),
        ("fa2", None, H200, {"deterministic": True, "causal": True, "seqlen_k": 512}, "seqlen_q >= seqlen_k"),
        ("fa3", "cudnn_sm90", H200, {"head_dim": 256}, "up to 128"),
    ],
)
def test_what_no_kernel_does_is_refused(algorithm, implementation, gpu, changes, says):
    with pytest.raises(UnsupportedError, match=says):
        build_program(algorithm, problem(**changes), gpu, implementation)


def test_a_deterministic_causal_launch_takes_as_long_as_its_busiest_cta():
    """FA2's CTAs stride over key blocks whose rows fall with the diagonal: 74 of 128 steps at 4096 (on an H200:
    0.56 of the launch without a mask, timed_ordered_run1.csv)."""
    p = AttentionProblem(
        batch=1, heads=16, kv_heads=16, seqlen_q=4096, seqlen_k=4096, head_dim=64, pass_="bwd", deterministic=True
    )
    whole, causal = (
        next(k for k in simulate("fa2", q, H200).kernels if k.name == "flash_bwd") for q in (p, p.with_(causal=True))
    )
    assert causal.time_us / whole.time_us == pytest.approx(74 / 128, rel=0.1)
