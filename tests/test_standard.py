"""Unfused attention: exact numbers for every softmax kernel, bytes and memory from closed forms, mutants that break."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from algorithms import build_program
from algorithms.kernel_tables import softmax_forward_kernel
from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import UnsupportedError
from simulator.overrides import with_values
from simulator.physics import Physics
from simulator.program import Compute, Exchange, Instructions, Load, Matmul, map_ops
from simulator.reference import attention, attention_gradients, backward_inputs, random_inputs, run_attention, visible
from simulator.sm_costs import SmSpec
from simulator.sm_timing import timing_of
from simulator.tile_ops import round_to
from simulator.traffic import program_traffic, sm_traffic

GPUS = {name: load_profile(name) for name in ("a100_sxm4_80gb", "h100_sxm", "b200")}
H100 = GPUS["h100_sxm"]
#: Rounding of S (an error of exp in proportion to the logit, below 8 here), P and O.
TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3}


def build(problem: AttentionProblem, gpu=H100):
    """The program of ``torch_eager``."""
    return build_program("standard", problem, gpu)


def assert_computes_attention(problem: AttentionProblem, gpu=H100) -> None:
    """O equals float64 attention to the dtype's accuracy (NaN fails)."""
    inputs = random_inputs(problem, seed=5)
    got, want = run_attention(build(problem, gpu), inputs), attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    assert np.abs(got["O"] - want["O"]).max() < TOLERANCE[problem.dtype]


def error(program) -> float:
    """Largest deviation of O from float64; NaN counts as infinite."""
    inputs = random_inputs(program.problem, seed=5)
    got = run_attention(program, inputs)["O"]
    off = np.abs(got - attention(program.problem, inputs["Q"], inputs["K"], inputs["V"])["O"]).max()
    return float("inf") if np.isnan(off) else float(off)


def mutate(program, kernel_name: str, change):
    """``program`` with ``change`` mapped over the operations of one kernel."""

    def changed(kernel):
        roles = tuple(dataclasses.replace(role, ops=map_ops(role.ops, change)) for role in kernel.roles)
        return dataclasses.replace(kernel, roles=roles)

    kernels = tuple(changed(k) if k.name == kernel_name else k for k in program.kernels)
    return dataclasses.replace(program, kernels=kernels)


# Numbers -------------------------------------------------------------------------------------------------------------
#: Row lengths by the kernel that PyTorch 2.11 runs for them.
ROWS = {"warp": 500, "registers": 2500, "smem": 9600, "global": 9601}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ROWS)
def test_every_softmax_kernel_is_exact(kind, dtype):
    keys = ROWS[kind]
    assert softmax_forward_kernel(keys, dtype).kind == kind
    assert_computes_attention(AttentionProblem(heads=1, seqlen_q=5, seqlen_k=keys, head_dim=64, dtype=dtype))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": 300, "causal": True},
        {"seqlen_q": 77, "seqlen_k": 301},
        {"seqlen_q": 130, "seqlen_k": 90, "causal": True},
        {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 70, "seqlen_k": 140, "causal": True},
        {"seqlen_q": 1, "seqlen_k": 700, "heads": 4, "kv_heads": 1, "dtype": "fp16"},
        {"seqlen_q": 100, "head_dim": 64, "head_dim_v": 128},
    ],
    ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()),
)
def test_masks_lengths_groups_and_head_dims(changes, gpu):
    assert_computes_attention(AttentionProblem(**{"heads": 2, "head_dim": 64} | changes), GPUS[gpu])


def test_an_additive_mask_is_added():
    problem = AttentionProblem(heads=2, seqlen_q=90, seqlen_k=120, head_dim=64, mask="additive")
    inputs = random_inputs(problem, seed=2)
    mask = np.where(np.arange(120)[None] % 3 == np.arange(90)[:, None] % 2, -np.inf, 0.25).astype(np.float32)
    got = run_attention(build(problem), {**inputs, "mask": mask[None]})["O"]
    s = np.einsum("hid,hjd->hij", *(inputs[n].astype(np.float64) for n in "QK")) / 8 + mask
    p = np.exp(s - s.max(2, keepdims=True))
    want = np.einsum("hij,hjd->hid", p / p.sum(2, keepdims=True), inputs["V"])
    assert np.abs(got - want).max() < TOLERANCE["bf16"]
    with pytest.raises(UnsupportedError, match="additive"):
        build(problem.with_(mask="sparse"))


def test_large_logits_in_fp16_stay_finite():
    problem = AttentionProblem(heads=1, seqlen_q=100, seqlen_k=200, head_dim=128, dtype="fp16", causal=True)
    inputs = random_inputs(problem, scale=30.0)
    assert np.isfinite(run_attention(build(problem), inputs)["O"]).all()


@pytest.mark.parametrize(
    "kernel,fn", [("qk_gemm", "scale"), ("mask_add", "mask_add"), ("softmax", "normalise"), ("softmax", "row_max")]
)
def test_dropping_a_step_breaks_the_numbers(kernel, fn):
    program = build(AttentionProblem(heads=1, seqlen_q=64, seqlen_k=96, head_dim=64, causal=True))
    assert error(program) < TOLERANCE["bf16"]
    mutant = mutate(program, kernel, lambda op: None if isinstance(op, Compute) and op.fn == fn else op)
    assert error(mutant) > TOLERANCE["bf16"]


# Kernels, bytes, memory ----------------------------------------------------------------------------------------------
def names(problem: AttentionProblem) -> list[str]:
    """Kernels of ``problem`` that compute something (cuBLAS's counter memsets aside)."""
    return [k.name for k in build(problem).kernels if not k.name.startswith("memset")]


def test_which_kernels_run():
    plain = AttentionProblem(heads=4, seqlen_q=256, head_dim=64)
    assert names(plain) == ["qk_gemm", "softmax", "pv_gemm"]
    assert names(plain.with_(causal=True)) == ["qk_gemm", "mask_add", "softmax", "pv_gemm"]
    assert names(plain.with_(kv_heads=2))[:2] == ["expand_K", "expand_V"]
    # beyond 2 GiB a masked launch is cut in two: 4 GiB of S here
    long = AttentionProblem(batch=2, heads=16, seqlen_q=8192, causal=True)
    assert names(long).count("mask_add_0") == names(long).count("mask_add_1") == 1


def test_an_fp16_score_matrix_of_8192_is_128_mib():
    program = build(AttentionProblem(seqlen_q=8192, head_dim=64, dtype="fp16"))
    assert program.tensors()["S"].bytes == 128 * 2**20


def test_scores_move_four_times_and_more_with_a_mask():
    problem = AttentionProblem(batch=2, heads=3, seqlen_q=1024, head_dim=64)
    score_bytes = 2 * 3 * 1024 * 1024 * 2
    traffic = program_traffic(build(problem))
    assert traffic["S"] == traffic["P"] == (score_bytes, score_bytes)
    masked = program_traffic(build(problem.with_(causal=True)))
    # the mask is one matrix, read for every head
    assert masked["S"] == masked["S_masked"] == (score_bytes, score_bytes)
    assert masked["mask"] == (score_bytes, 0)


def test_a_row_too_long_to_keep_is_read_three_times():
    problem = AttentionProblem(heads=2, seqlen_q=10, seqlen_k=32768, head_dim=64)
    softmax = next(k for k in build(problem).kernels if k.name == "softmax")
    score_bytes = 2 * 10 * 32768 * 2
    assert sm_traffic(softmax) == {"S": (3 * score_bytes, 0), "P": (0, score_bytes)}


def unique(problem: AttentionProblem) -> dict[str, int]:
    """HBM bytes by tensor with an L2 that holds everything: each tensor once, S and P never."""
    gpu = with_values(H100, {"l2_bytes": 1e12})
    return {n: t.hbm_read_bytes for n, t in simulate("standard", problem, gpu).traffic_by_tensor().items()}


def test_an_endless_l2_reads_only_the_inputs():
    problem = AttentionProblem(heads=2, seqlen_q=512, head_dim=64)
    read = {name: count for name, count in unique(problem).items() if count}
    assert read == dict.fromkeys("QKV", 2 * 512 * 64 * 2)


@pytest.mark.parametrize("factor", [2, 4])
def test_memory_traffic_grows_as_nd_plus_n_squared(factor):
    """Theta(N d + N^2): at a given length more head dim adds to the inputs only, at a given head dim N^2 wins."""

    def bytes_of(n: int, d: int) -> tuple[int, int]:
        # enough heads for tiles as wide as the head dim (or pairs of them): P is then read once
        traffic = program_traffic(build(AttentionProblem(heads=64, seqlen_q=n, head_dim=d)))
        scores = sum(sum(moved) for name, moved in traffic.items() if name in "SP")
        return scores, sum(t.bytes for t in build(AttentionProblem(seqlen_q=n, head_dim=d)).inputs.values())

    base = bytes_of(512, 64)
    assert bytes_of(512 * factor, 64) == (base[0] * factor**2, base[1] * factor)
    assert bytes_of(512, 64 * factor) == (base[0], base[1] * factor)


def test_intensity_is_half_the_head_dim():
    problem = AttentionProblem(batch=4, heads=16, seqlen_q=4096, head_dim=128)
    traffic = program_traffic(build(problem))
    scores = sum(sum(moved) for name, moved in traffic.items() if name in "SP")
    assert problem.flops() / scores == pytest.approx(problem.head_dim / 2)


def test_gpt2_medium_moves_what_counters_saw():
    """batch 64, 16 heads, N=1024, d=64, fp16, no mask on an H200: 4.70 GB read and 4.42 GB written."""
    problem = AttentionProblem(batch=64, heads=16, seqlen_q=1024, head_dim=64, dtype="fp16")
    result = simulate("standard", problem, load_profile("h200_sxm"))
    assert result.hbm_read_bytes == pytest.approx(4.70e9, rel=0.03)
    assert result.hbm_write_bytes == pytest.approx(4.42e9, rel=0.03)


def test_peak_memory_is_quadratic():
    problem = AttentionProblem(batch=1, heads=4, seqlen_q=2048, head_dim=64)
    score, row = 4 * 2048 * 2048 * 2, 4 * 2048 * 64 * 2
    assert build(problem).live_bytes == 2 * score + 4 * row
    assert build(problem.with_(causal=True)).live_bytes == 2 * score + 4 * row + 2048 * 2048 * 2


def test_what_does_not_fit_memory_is_refused():
    huge = AttentionProblem(heads=32, seqlen_q=65536)
    with pytest.raises(UnsupportedError, match="out of memory: the score matrix alone needs 275 GB"):
        build(huge)
    assert build_program("standard", huge, H100, hypothetical=True).live_bytes > H100.hbm_bytes


# Time ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_every_kernel_takes_a_plausible_time(gpu, pass_):
    profile = GPUS[gpu]
    problem = AttentionProblem(heads=4, kv_heads=2, seqlen_q=4096, head_dim=128, causal=True, pass_=pass_)
    for kernel in build(problem, profile).kernels:
        spec = SmSpec.of(profile, Physics(), kernel.path, kernel.compute_dtype)
        timing = timing_of(kernel, spec, (600.0,), 1)
        if kernel.name.startswith("memset"):
            continue
        trips = [int(kernel.coords[t.coord].max()) for t in kernel.trips]
        cycles = timing.overhead_cycles[0] + sum(n * p[0] for n, p in zip(trips, timing.period_cycles, strict=True))
        assert 0 < cycles < 1e6, kernel.name
        if kernel.name.endswith("gemm"):
            # a tile takes at least its tensor work, and beside its start and end at most three times that
            work = sum(2.0 * np.prod(op.mnk) for _, _, op in kernel.walk() if isinstance(op, Matmul))
            tensor = trips[0] * work / spec.tensor_flop
            assert tensor <= cycles <= 3 * tensor + 6000, kernel.name


def test_counted_instructions_cost_time():
    problem = AttentionProblem(batch=2, heads=16, seqlen_q=2048, head_dim=64)
    program = build(problem)
    kernel = next(k for k in program.kernels if k.name == "softmax")
    lean = next(
        k
        for k in mutate(program, "softmax", lambda op: None if isinstance(op, Instructions) else op).kernels
        if k.name == "softmax"
    )
    spec = SmSpec.of(H100, Physics(), kernel.path, kernel.compute_dtype)
    full, less = (timing_of(k, spec, (600.0,), 8).overhead_cycles[0] for k in (kernel, lean))
    assert less < 0.8 * full


def test_dropping_a_load_or_an_exchange_shows():
    problem = AttentionProblem(heads=2, seqlen_q=512, head_dim=64)
    program = build(problem)
    no_v = mutate(program, "pv_gemm", lambda op: None if isinstance(op, Load) and op.source.tensor.name == "V" else op)
    before, after = (program_traffic(p) for p in (program, no_v))
    assert before["V"][0] > 0 and "V" not in after
    kernel = program.kernels[0]
    bare = mutate(program, kernel.name, lambda op: None if isinstance(op, Exchange) else op).kernels[0]
    spec = SmSpec.of(H100, Physics(), kernel.path, kernel.compute_dtype)
    full, less = (timing_of(k, spec, (600.0,), 1).overhead_cycles[0] for k in (kernel, bare))
    assert less < full


# Backward ------------------------------------------------------------------------------------------------------------
def with_weights(problem: AttentionProblem) -> dict[str, np.ndarray]:
    """Inputs of the backward pass: what autograd kept of the forward one is P in the problem's dtype."""
    inputs = backward_inputs(problem)
    q, k = inputs["Q"].astype(np.float64), np.repeat(inputs["K"], problem.group, axis=0)
    s = np.einsum("hid,hjd->hij", q, k) * problem.head_dim**-0.5
    s = np.where(visible(problem), s, -np.inf)
    m = s.max(2, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    total = e.sum(2, keepdims=True)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return inputs | {"P": round_to(p, problem.dtype)}


@pytest.mark.parametrize("pass_", ["bwd", "fwd_bwd"])
@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": 200, "dtype": "fp16"},
        {"seqlen_q": 150, "causal": True},
        {"seqlen_q": 77, "seqlen_k": 201, "causal": True, "dtype": "fp16"},
        {"seqlen_q": 120, "seqlen_k": 60, "causal": True},
        {"heads": 4, "kv_heads": 2, "seqlen_q": 64, "seqlen_k": 100, "causal": True},
        {"seqlen_q": 3, "seqlen_k": 1500, "head_dim": 128},
    ],
    ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()),
)
def test_gradients_are_exact(changes, pass_):
    problem = AttentionProblem(**{"heads": 2, "head_dim": 64, "pass_": pass_} | changes)
    inputs = with_weights(problem)
    got = run_attention(build(problem), inputs)
    want = attention_gradients(problem, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    for name in ("dQ", "dK", "dV"):
        off = np.abs(got[name] - want[name]).max() / np.abs(want[name]).max()
        assert off < TOLERANCE[problem.dtype], name


@pytest.mark.parametrize("release", ["2.0", "2.1"])
def test_calls_with_copies_are_exact_and_move_the_copies_bytes(release):
    problem = AttentionProblem(heads=2, seqlen_q=40, seqlen_k=1040, head_dim=64, pass_="fwd_bwd")
    inputs = with_weights(problem)
    program = build_program("standard", problem, H100, f"torch_eager_{release}_bshd")
    got = run_attention(program, inputs)
    want = attention_gradients(problem, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    for name in ("dQ", "dK", "dV"):
        assert np.abs(got[name] - want[name]).max() < TOLERANCE[problem.dtype] * np.abs(want[name]).max(), name
    traffic = program_traffic(program)
    assert traffic["K_copied"][1] == 2 * 1040 * 64 * 2 and traffic["dO_copied"][1] == 2 * 40 * 64 * 2
    assert traffic["S"][0] == (3 if release == "2.0" else 1) * 2 * 40 * 1040 * 2


def test_a_dropped_row_sum_breaks_the_gradients():
    problem = AttentionProblem(heads=1, seqlen_q=64, head_dim=64, pass_="bwd")
    inputs = with_weights(problem)
    drop = mutate(
        build(problem), "softmax_backward", lambda op: None if isinstance(op, Compute) and op.fn == "row_sum" else op
    )
    assert not np.isfinite(run_attention(drop, inputs)["dQ"]).all()


def test_backward_moves_eleven_score_matrices():
    problem = AttentionProblem(heads=2, seqlen_q=1024, head_dim=64, pass_="bwd")
    score_bytes = 2 * 1024 * 1024 * 2
    traffic = program_traffic(build(problem))
    # P feeds dV, the product and dS; dS feeds dQ and dK
    assert traffic["P"] == (3 * score_bytes, 0)
    assert traffic["dP"] == traffic["dPP"] == (score_bytes, score_bytes)
    assert traffic["dS"] == (2 * score_bytes, score_bytes)
    assert build(problem).live_bytes == 4 * score_bytes + 7 * 2 * 1024 * 64 * 2
