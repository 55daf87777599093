"""What instructions cost beyond their pipes: code that no cache holds, chains of dependent ones, and roles in turn."""

from simulator import AttentionProblem, load_profile, simulate
from simulator.physics import Physics
from simulator.program import Barrier, Buffer, Compute, Fetch, Loop, Matmul, Role, var
from simulator.sm import run_sm
from simulator.sm_costs import INSTRUCTION_CACHE_BYTES, MMA_SYNC_CHAIN_CYCLES, PIPE_INDEX, SmSpec, compile_ops

H200 = load_profile("h200_sxm")
SPEC = SmSpec.of(H200, Physics(), "mma_sync", "bf16")


def compiled(op, warps=4):
    (timed,) = compile_ops((op,), warps, SPEC)
    return timed


def test_code_that_the_cache_holds_is_free_and_the_rest_is_fetched():
    assert compiled(Fetch(INSTRUCTION_CACHE_BYTES)).latency == 0
    whole = compiled(Fetch(2 * INSTRUCTION_CACHE_BYTES)).latency
    assert whole > 1000 and compiled(Fetch(2 * INSTRUCTION_CACHE_BYTES, 4)).latency == whole / 4


def test_a_narrow_product_runs_at_the_pace_of_its_chain():
    """FA1's PV: 16 rows, 256 keys, 64 columns over four warps: two accumulators a warp, sixteen steps each."""
    p, v, o = Buffer("P", 16, 256, "bf16", "smem"), Buffer("V", 256, 64, "bf16", "smem"), Buffer("O", 16, 64)
    timed = compiled(Matmul(o, p, v, split="cols"))
    assert timed.minimum == 16 * MMA_SYNC_CHAIN_CYCLES > dict(timed.work)[PIPE_INDEX["tensor"]]
    # the package's warps split the keys instead: a quarter of the chain
    assert compiled(Matmul(o, p, v, split="inner")).minimum == timed.minimum / 4


def test_roles_with_equal_work_fall_out_of_step():
    """Two sets of warps that multiply, then exponentiate: each computes while the other waits for the tensor cores."""
    a, b, s = Buffer("a", 128, 128, "bf16", "smem"), Buffer("b", 128, 128, "bf16", "smem"), Buffer("s", 128, 128)
    body = (Matmul(s, a, b, transpose_b=True), Compute("exp", s, (s, s), 128, 128), Barrier("both", 2))
    roles = [Role(f"r{i}", (Loop("j", var("n"), body),), warps=4) for i in range(2)]
    timed = [(r.name, r.warps, compile_ops(r.ops, r.warps, SPEC)) for r in roles]
    end = run_sm(timed, (), {"n": 10}, 500.0).end_cycles
    product, softmax = (max(cycles for _, cycles in op.work) for op in timed[0][2][0].body[:2])
    # in step, each iteration would take both products and then both softmaxes
    assert end < 0.92 * 10 * 2 * (product + softmax)


def test_causal_launches_of_odd_lengths_pay_for_their_code():
    """Measured on an H200: 475 us at 1000 tokens, 315 at 1024 (16 x 32 heads of 64); without a mask 482 and 476."""

    def time_us(seqlen, causal):
        problem = AttentionProblem(batch=16, heads=32, seqlen_q=seqlen, head_dim=64, causal=causal)
        return simulate("fa2", problem, H200).time_us

    assert 1.25 < time_us(1000, True) / time_us(1024, True) < 1.6
    assert 0.95 < time_us(1000, False) / time_us(1024, False) < 1.1


def test_cudnn_forward_is_the_kernel_that_was_seen():
    problem = AttentionProblem(batch=8, heads=16, seqlen_q=2048, head_dim=128)
    result = simulate("fa3", problem, H200, implementation="cudnn_sm90")
    assert result.attributes["tile"] == (128, 128) and result.attributes["stages"] == 3
    # 417 us measured
    assert 380 < result.time_us < 450
