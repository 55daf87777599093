"""FlashAttention-1: exact numbers, bytes against the paper's forms, work tiles that cover each pair once, mutants."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from algorithms import build_program
from algorithms.fa1_backward import backward_schedule, key_blocks_in_parallel
from algorithms.fa1_schedule import KINDS, interleaved, schedule_for, work_tiles
from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import UnsupportedError
from simulator.measure.fa1_triton import schedule_in_numpy
from simulator.overrides import with_values
from simulator.physics import Physics
from simulator.program import Barrier, Compute, Exchange, Load, map_ops
from simulator.reference import attention, attention_gradients, backward_inputs, random_inputs, run_attention
from simulator.sm_costs import SmSpec
from simulator.sm_timing import timing_of
from simulator.traffic import program_traffic, sm_traffic

A100, H200 = load_profile("a100_sxm4_80gb"), load_profile("h200_sxm")
IMPLEMENTATIONS = ("flash_attn_1", "flash_attn_1_paper", "flash_attn_1_sram")
#: P is rounded before PV, O once at the end.
TOLERANCE = {"bf16": 1.6e-2, "fp16": 2e-3}


def build(problem: AttentionProblem, implementation: str = "flash_attn_1", gpu=H200):
    """The FA1 program of ``implementation``."""
    return build_program("fa1", problem, gpu, implementation)


def error(program, scale: float = 1.0) -> float:
    """Largest deviation of O from float64 (NaN: infinite); the LSE, where there is one, must be exact."""
    problem = program.problem
    inputs = random_inputs(problem, seed=11, scale=scale)
    got, want = run_attention(program, inputs), attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    if "LSE" in got:
        blind = np.isneginf(want["LSE"])
        assert np.array_equal(np.isneginf(got["LSE"]), blind)
        assert np.abs(got["LSE"][~blind] - want["LSE"][~blind]).max(initial=0.0) < 1e-5 * max(1.0, scale**2)
    off = np.abs(got["O"] - want["O"]).max()
    return float("inf") if np.isnan(off) else float(off)


def mutate(program, change):
    """``program`` with ``change`` mapped over its last kernel's operations."""
    kernel = program.kernels[-1]
    roles = tuple(dataclasses.replace(role, ops=map_ops(role.ops, change)) for role in kernel.roles)
    return dataclasses.replace(program, kernels=(*program.kernels[:-1], dataclasses.replace(kernel, roles=roles)))


def drop(kind, **fields):
    """A change that drops the operations of ``kind`` whose attributes are as given."""

    def change(op):
        return None if isinstance(op, kind) and all(getattr(op, k) == v for k, v in fields.items()) else op

    return change


# Numbers -------------------------------------------------------------------------------------------------------------
CASES = {
    "square": {"seqlen_q": 300},
    "causal": {"seqlen_q": 300, "causal": True},
    "one_block": {"seqlen_q": 77, "seqlen_k": 100},
    "few_queries": {"seqlen_q": 77, "seqlen_k": 600, "causal": True},
    "rows_that_see_nothing": {"seqlen_q": 330, "seqlen_k": 140, "causal": True},
    "gqa": {"heads": 4, "kv_heads": 2, "seqlen_q": 70, "seqlen_k": 300, "causal": True},
    "d80": {"head_dim": 80, "seqlen_q": 140, "seqlen_k": 300},
    "d128": {"head_dim": 128, "seqlen_q": 270, "causal": True},
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forward_is_exact(implementation, case, dtype):
    problem = AttentionProblem(**{"heads": 2, "head_dim": 64, "dtype": dtype} | CASES[case])
    assert error(build(problem, implementation)) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_logits_in_fp16_do_not_overflow(implementation):
    problem = AttentionProblem(heads=1, seqlen_q=150, seqlen_k=300, head_dim=64, dtype="fp16", causal=True)
    assert error(build(problem, implementation), scale=30.0) < TOLERANCE["fp16"]


def test_head_dims_beyond_the_package_are_refused():
    with pytest.raises(UnsupportedError, match="128"):
        build(AttentionProblem(head_dim=192))
    assert error(build(AttentionProblem(seqlen_q=100, head_dim=192), "flash_attn_1_paper")) < TOLERANCE["bf16"]


@pytest.mark.parametrize("fn", ["rescale", "rescale_factor", "row_max", "exp", "row_sum", "normalise", "mask"])
@pytest.mark.parametrize("implementation", ["flash_attn_1", "flash_attn_1_paper"])
def test_every_step_matters(implementation, fn):
    problem = AttentionProblem(heads=1, seqlen_q=300, head_dim=64, causal=True)
    program = build(problem, implementation)
    # logits large enough that a later key block beats the sum of the earlier ones, which seeds the package's maximum
    assert error(program, scale=3.0) < TOLERANCE["bf16"]
    with np.errstate(all="ignore"):
        try:
            broken = error(mutate(program, drop(Compute, fn=fn)), scale=3.0)
        except AssertionError:  # the LSE was wrong
            return
    assert broken > TOLERANCE["bf16"]


# Work tiles ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("slots", [4, 7, 64])
@pytest.mark.parametrize("slices", [1, 3, 5, 16])
@pytest.mark.parametrize("lengths", [(300, 300), (77, 600), (500, 130)])
def test_every_visible_pair_of_blocks_is_worked_on_once(lengths, slices, slots):
    problem = AttentionProblem(batch=2, heads=2, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=64, causal=True)
    s = dataclasses.replace(schedule_for(problem, "flash_attn_1", H200), slices=slices)
    tiles = work_tiles(problem, s, slots)
    shift = problem.seqlen_k - problem.seqlen_q
    done: dict[tuple[int, int], list[tuple[int, str]]] = {}
    owner: dict[tuple[int, int], int] = {}
    for index in range(len(tiles["q_head"])):
        for kind, (row, _, _) in KINDS.items():
            for i in range(int(tiles[kind][index])):
                block = (int(tiles["q_head"][index]), int(tiles[row][index]) // s.rows + i * slices)
                done.setdefault(block, []).append((int(tiles["key_row"][index]) // s.keys, kind))
                # one slot owns a row block, so what it wrote for one key block it reads for the next
                assert owner.setdefault(block, index % slots) == index % slots
    row_blocks, key_blocks = -(-problem.seqlen_q // s.rows), -(-problem.seqlen_k // s.keys)
    assert set(done) == {(h, r) for h in range(4) for r in range(row_blocks)}
    for (_, r), visits in done.items():
        last_row = min(r * s.rows + s.rows, problem.seqlen_q) - 1
        # rounded up to whole row blocks, as the kernel pads them
        seen = [j for j in range(key_blocks) if j == 0 or j * s.keys <= r * s.rows + s.rows - 1 + shift]
        assert [j for j, _ in visits] == seen
        assert last_row < problem.seqlen_q
        first, final = (("n_only", "n_first"), ("n_only", "n_final"))
        assert [kind in first for _, kind in visits] == [j == 0 for j in seen]
        assert [kind in final for _, kind in visits] == [j == seen[-1] for j in seen]


def test_long_launches_share_rows_in_runs_of_the_same_size():
    problem = AttentionProblem(heads=2, seqlen_q=16384, head_dim=64, causal=True)
    s = dataclasses.replace(schedule_for(problem, "flash_attn_1", A100), slices=13)
    assert not interleaved(problem, s)
    runs, row_blocks = work_tiles(problem, s, 32), 16384 // s.rows
    counts = {kind: runs[kind].sum() for kind in KINDS}
    # every row block is final once, and meets all earlier key blocks before
    assert counts["n_only"] + counts["n_final"] == 2 * row_blocks
    blocks_per_key = s.keys // s.rows
    assert sum(counts.values()) == 2 * sum(r // blocks_per_key + 1 for r in range(row_blocks))
    short = problem.with_(seqlen_q=1024, seqlen_k=1024)
    assert interleaved(short, s)
    # a CTA's work differs by less than two row blocks a key block from its neighbour's
    steps = sum(runs[kind] for kind in KINDS)
    by_slice = np.bincount(np.arange(len(steps)) % 32, steps, 32)[:26]
    assert by_slice.max() - by_slice.min() < 0.05 * by_slice.mean()


def test_slices_fill_the_sms():
    """32 heads leave 184 of 216 slots of an A100 empty; 13 slices fill 96 % of two waves."""
    problem = AttentionProblem(batch=1, heads=32, seqlen_q=16384, head_dim=64)
    assert build(problem, gpu=A100).attributes["row_slices"] == 13
    assert build(problem, "flash_attn_1_paper", A100).attributes["row_slices"] == 1


# Bytes ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim,columns", [(64, 256), (128, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_paper_kernel_moves_what_its_loops_say(head_dim, columns, causal):
    n, heads = 1024, 3
    problem = AttentionProblem(heads=heads, seqlen_q=n, head_dim=head_dim, causal=causal)
    moved = sum(sum(x) for x in program_traffic(build(problem, "flash_attn_1_paper")).values())
    q, k, v = np.random.default_rng(0).standard_normal((3, n, head_dim))
    _, expected = schedule_in_numpy(q, k, v, causal, head_dim**-0.5, 16, columns)
    assert moved == heads * expected


def test_traffic_is_the_closed_form():
    """K and V once a CTA, Q once a key block, O read J-1 times and written J times, the LSE alike."""
    problem = AttentionProblem(batch=4, heads=8, seqlen_q=1024, head_dim=64, dtype="fp16")
    program = build(problem, gpu=A100)
    rows, j = 32 * 1024, 1024 // 256
    slices = program.attributes["row_slices"]
    assert slices > 1
    assert sm_traffic(program.kernels[0]) == {
        "Q": (j * rows * 64 * 2, 0),
        "K": (slices * rows * 64 * 2, 0),
        "V": (slices * rows * 64 * 2, 0),
        "LSE": ((j - 1) * rows * 4, j * rows * 4),
        "O_tmp": ((j - 1) * rows * 64 * 4, (j - 1) * rows * 64 * 4),
        "O": (0, rows * 64 * 2),
    }


def hbm_bytes(n: int, d: int, smem_bytes: int) -> int:
    """HBM bytes of the paper's block sizes without an L2."""
    gpu = with_values(H200, {"smem_bytes_per_cta_max": smem_bytes})
    program = build(AttentionProblem(heads=1, seqlen_q=n, head_dim=d, dtype="fp16"), "flash_attn_1_sram", gpu)
    return sum(sum(moved) for moved in program_traffic(program).values())


def test_memory_traffic_is_n_squared_d_squared_over_m():
    """Theta(N^2 d^2 / M), the paper's theorem 2: each exponent from doubling its variable."""
    base = hbm_bytes(32768, 64, 64 * 1024)
    assert hbm_bytes(65536, 64, 64 * 1024) / base == pytest.approx(4.0, rel=0.02)
    assert hbm_bytes(32768, 128, 64 * 1024) / base == pytest.approx(4.0, rel=0.05)
    assert hbm_bytes(32768, 64, 128 * 1024) / base == pytest.approx(0.5, rel=0.02)


def test_an_endless_l2_keeps_the_accumulator():
    gpu = with_values(H200, {"l2_bytes": 1e12})
    problem = AttentionProblem(heads=2, seqlen_q=1024, head_dim=64)
    moved = simulate("fa1", problem, gpu).traffic_by_tensor()
    assert {n: t.hbm_read_bytes for n, t in moved.items() if t.hbm_read_bytes} == dict.fromkeys("QKV", 2 * 1024 * 128)


def test_memory_is_linear_in_the_length():
    live = [build(AttentionProblem(heads=2, seqlen_q=n, head_dim=64)).live_bytes for n in (1024, 2048, 4096)]
    assert live[1] == 2 * live[0] and live[2] == 2 * live[1]


# Time ----------------------------------------------------------------------------------------------------------------
def period(program, latency: float = 600.0) -> float:
    """Cycles of one row block against a key block in the longest loop."""
    kernel = program.kernels[-1]
    spec = SmSpec.of(H200, Physics(), kernel.path, kernel.compute_dtype)
    trip = max(range(len(kernel.trips)), key=lambda i: int(kernel.coords[kernel.trips[i].coord].sum()))
    return timing_of(kernel, spec, (latency,), 1).period_cycles[trip][0]


TIMED = AttentionProblem(batch=4, heads=16, seqlen_q=4096, head_dim=64)


@pytest.mark.parametrize("implementation", ["flash_attn_1", "flash_attn_1_paper"])
def test_synchronisation_exchange_and_state_cost_time(implementation):
    program = build(TIMED, implementation)
    full = period(program)
    tensor = 4 * 16 * 256 * 64 / H200.tensor_rate("mma_sync", "bf16")
    assert full > 3 * tensor
    assert period(mutate(program, drop(Barrier))) < full
    assert period(mutate(program, drop(Exchange))) < full
    stateless = mutate(
        program, lambda op: None if isinstance(op, Load) and op.source.tensor.name in ("O_tmp", "m", "l") else op
    )
    assert period(stateless, 3000.0) < period(program, 3000.0)


def test_dropping_a_load_loses_its_bytes():
    program = build(AttentionProblem(heads=1, seqlen_q=600, head_dim=64))
    mutant = mutate(program, lambda op: None if isinstance(op, Load) and op.source.tensor.name == "O_tmp" else op)
    before, after = (sm_traffic(p.kernels[-1]) for p in (program, mutant))
    assert before["O_tmp"][0] > 0 == after["O_tmp"][0]
    assert {k: v for k, v in before.items() if k != "O_tmp"} == {k: v for k, v in after.items() if k != "O_tmp"}
    assert error(mutant) > TOLERANCE["bf16"]


# Backward ------------------------------------------------------------------------------------------------------------
BACKWARD = {
    "parallel": {"seqlen_q": 300},
    "parallel_causal": {"seqlen_q": 300, "causal": True, "dtype": "fp16"},
    "one_block": {"seqlen_q": 90, "seqlen_k": 120},
    "more_keys": {"seqlen_q": 77, "seqlen_k": 400, "causal": True},
    "more_queries": {"seqlen_q": 300, "seqlen_k": 140, "causal": True, "dtype": "fp16"},
    "gqa": {"heads": 4, "kv_heads": 2, "seqlen_q": 64, "seqlen_k": 160, "causal": True},
    "d128": {"head_dim": 128, "seqlen_q": 200, "causal": True},
    "deterministic": {"seqlen_q": 300, "deterministic": True},
}


@pytest.mark.parametrize("pass_", ["bwd", "fwd_bwd"])
@pytest.mark.parametrize("case", BACKWARD)
@pytest.mark.parametrize("implementation", ["flash_attn_1", "flash_attn_1_paper"])
def test_gradients_are_exact(implementation, case, pass_):
    problem = AttentionProblem(**{"heads": 2, "head_dim": 64, "pass_": pass_} | BACKWARD[case])
    inputs = backward_inputs(problem)
    got = run_attention(build(problem, implementation), inputs)
    want = attention_gradients(problem, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    for name in ("dQ", "dK", "dV"):
        off = np.abs(got[name] - want[name]).max() / np.abs(want[name]).max()
        assert off < TOLERANCE[problem.dtype], name


def test_which_backward_launch_runs():
    def parallel(**shape) -> bool:
        problem = AttentionProblem(**{"head_dim": 64, "pass_": "bwd"} | shape)
        return key_blocks_in_parallel(problem, backward_schedule(problem, A100), A100)

    # 1024 heads fill 9.5 waves of 108 SMs by themselves; 32 heads do not fill one
    assert not parallel(batch=32, heads=32, seqlen_q=512)
    assert parallel(batch=1, heads=32, seqlen_q=16384)
    # ten key blocks under a causal mask are always run in parallel
    assert parallel(batch=32, heads=32, seqlen_q=2560, causal=True)
    # atomics add dQ in any order
    assert not parallel(batch=1, heads=32, seqlen_q=16384, deterministic=True)


def test_backward_bytes():
    problem = AttentionProblem(heads=2, seqlen_q=1024, head_dim=64, pass_="bwd")
    rows, j = 2 * 1024, 1024 // 256
    together = build(problem, "flash_attn_1_paper")
    assert [k.name for k in together.kernels] == ["fmha_bwd"]
    traffic = sm_traffic(together.kernels[0])
    assert traffic["dQ_tmp"] == ((j - 1) * rows * 64 * 4, (j - 1) * rows * 64 * 4)
    assert traffic["dQ"] == (0, rows * 64 * 2)
    # O is read once, to make D; D is read by every later key block
    assert traffic["O"] == (rows * 64 * 2, 0)
    assert traffic["D"] == ((j - 1) * rows * 4, rows * 4)
    apart = build(problem)
    assert [k.name for k in apart.kernels] == ["zero_dQ_tmp", "fmha_bwd_dot_do_o", "fmha_bwd", "copy_dQ"]
    main = sm_traffic(apart.kernels[2])
    assert main["dQ_tmp"] == (0, j * rows * 64 * 4)
    assert main["Q"] == main["dO"] == (j * rows * 64 * 2, 0)


@pytest.mark.parametrize("fn", ["exp_lse", "softmax_grad", "mask", "scale"])
def test_every_backward_step_matters(fn):
    problem = AttentionProblem(heads=1, seqlen_q=100, head_dim=64, causal=True, pass_="bwd")
    inputs = backward_inputs(problem)
    want = attention_gradients(problem, inputs["Q"], inputs["K"], inputs["V"], inputs["dO"])
    with np.errstate(all="ignore"):
        got = run_attention(mutate(build(problem), drop(Compute, fn=fn)), inputs)
    off = max(np.abs(got[n] - want[n]).max() / np.abs(want[n]).max() for n in want)
    assert not off < TOLERANCE["bf16"]
