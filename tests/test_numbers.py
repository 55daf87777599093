"""The first reading: every tile program computes attention, and the program that is timed is the one that computes."""

import dataclasses

import numpy as np
import pytest

from algorithms import MODULES, build_program
from simulator import AttentionProblem, load_profile
from simulator.accesses import sm_traffic
from simulator.numbers import DeadlockError
from simulator.problem import DTYPE_BYTES
from simulator.program import (
    Acquire,
    Barrier,
    Compute,
    Consume,
    Load,
    Loop,
    Matmul,
    Pipe,
    Release,
    Signal,
    Store,
    Wait,
    map_ops,
    view,
)
from simulator.reference import attention, random_inputs, run_attention
from simulator.simulation import Conditions, run_program

GPU = load_profile("h200_sxm")
#: Relative rounding step of the type that P and O are rounded to.
STEP = {"fp16": 2.0**-11, "bf16": 2.0**-8}


ALGORITHMS = list(MODULES)
#: Problems by name: masks, odd lengths, GQA, head dims that are padded, rows that see no key.
PROBLEMS = {
    "plain": AttentionProblem(batch=2, heads=2, seqlen_q=256, seqlen_k=384, head_dim=64),
    "causal": AttentionProblem(heads=2, seqlen_q=384, seqlen_k=384, head_dim=128, causal=True),
    "odd": AttentionProblem(heads=2, seqlen_q=131, seqlen_k=277, head_dim=64),
    "odd_causal": AttentionProblem(heads=1, seqlen_q=197, seqlen_k=403, head_dim=128, causal=True),
    "more_queries": AttentionProblem(heads=1, seqlen_q=403, seqlen_k=197, head_dim=64, causal=True),
    "one_key": AttentionProblem(heads=1, seqlen_q=70, seqlen_k=1, head_dim=64),
    "one_query": AttentionProblem(batch=2, heads=4, kv_heads=2, seqlen_q=1, seqlen_k=513, head_dim=128),
    "one_query_causal": AttentionProblem(heads=2, seqlen_q=1, seqlen_k=300, head_dim=64, causal=True),
    "gqa": AttentionProblem(batch=2, heads=4, kv_heads=2, seqlen_q=150, seqlen_k=260, head_dim=64, causal=True),
    "mqa": AttentionProblem(batch=1, heads=6, kv_heads=1, seqlen_q=33, seqlen_k=200, head_dim=128),
    "d40": AttentionProblem(heads=1, seqlen_q=140, seqlen_k=300, head_dim=40),
    "d80": AttentionProblem(heads=1, seqlen_q=140, seqlen_k=300, head_dim=80, causal=True),
    "d96": AttentionProblem(heads=2, seqlen_q=200, seqlen_k=200, head_dim=96),
    "d160": AttentionProblem(heads=1, seqlen_q=200, seqlen_k=200, head_dim=160, causal=True),
    "d192": AttentionProblem(heads=1, seqlen_q=140, seqlen_k=190, head_dim=192),
    "d256": AttentionProblem(heads=1, seqlen_q=170, seqlen_k=210, head_dim=256, causal=True),
}


def forward(algorithm: str, problem: AttentionProblem, gpu=GPU, implementation: str | None = None):
    """The forward program, or a skip where the kernel does not take the problem."""
    from simulator.errors import UnsupportedError

    try:
        return build_program(algorithm, problem, gpu, implementation)
    except UnsupportedError as why:
        pytest.skip(str(why))


def check_exact(program, problem: AttentionProblem, scale: float = 1.0) -> None:
    """The program's O and LSE against float64 attention on the same (rounded) inputs."""
    inputs = random_inputs(problem, seed=7, scale=scale)
    got, want = run_attention(program, inputs), attention(problem, **{k.lower(): v for k, v in inputs.items()})
    # P is rounded once before PV and O once at the end: each moves a value by at most half a step of its size
    largest = np.abs(inputs["V"]).max()
    assert got["O"].shape == want["O"].shape
    assert np.isfinite(got["O"]).all()
    assert np.abs(got["O"] - want["O"]).max() <= 2.0 * STEP[problem.dtype] * largest
    if "LSE" in got:
        blind = np.isneginf(want["LSE"])
        assert np.array_equal(np.isneginf(got["LSE"]), blind)
        # fp32 sums of head_dim products: the error grows with the logits, scale squared times those of scale 1
        assert np.abs(got["LSE"][~blind] - want["LSE"][~blind]).max(initial=0.0) <= 1e-5 * max(1.0, scale**2)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_program_computes_attention(algorithm, name):
    problem = PROBLEMS[name]
    check_exact(forward(algorithm, problem), problem)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fp16_with_large_logits_does_not_overflow(algorithm):
    # logits reach several hundred: exp of them overflows even fp32, and fp16 holds no S beyond 65504
    problem = AttentionProblem(heads=2, seqlen_q=150, seqlen_k=290, head_dim=64, dtype="fp16", causal=True)
    inputs = random_inputs(problem, seed=7, scale=12.0)
    logits = np.einsum("hid,hjd->hij", inputs["Q"], inputs["K"]) / 8
    assert logits.max() > 300
    program = forward(algorithm, problem)
    if algorithm == "standard":
        # S itself passes through HBM in fp16: exp turns its rounding into an error of many steps
        got = run_attention(program, inputs)
        assert np.isfinite(got["O"]).all()
        return
    check_exact(program, problem, scale=12.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_that_see_no_key_are_zero(algorithm, dtype):
    problem = AttentionProblem(heads=2, seqlen_q=300, seqlen_k=40, head_dim=64, dtype=dtype, causal=True)
    inputs = random_inputs(problem, seed=3)
    got = run_attention(forward(algorithm, problem), inputs)
    assert (got["O"][:, : 300 - 40] == 0).all()
    if "LSE" in got:
        assert np.isneginf(got["LSE"][:, : 300 - 40]).all()
        assert np.isfinite(got["LSE"][:, 300 - 40 :]).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("gpu", ["a100_sxm4_80gb", "h100_sxm", "b200"])
def test_every_gpu_runs_the_same_numbers(algorithm, gpu):
    problem = PROBLEMS["odd_causal"]
    profile = load_profile(gpu)
    if algorithm == "fa3" and gpu != "h100_sxm":
        program = build_program("fa3", problem, profile, hypothetical=True)
        assert program.substitutions
    else:
        program = forward(algorithm, problem, profile)
    check_exact(program, problem)


# Mutations: the same program object is computed, counted and timed -----------------------------------------------
# one split: left to choose, FA2 hands small grids to its split-KV kernel
MUTATED = AttentionProblem(batch=2, heads=32, seqlen_q=640, seqlen_k=1024, head_dim=128, num_splits=1)
SMALL = MUTATED.with_(batch=1, heads=1, kv_heads=1, seqlen_q=128, seqlen_k=640)


def main_kernel(program):
    """The first kernel that multiplies: a fill of the scheduler's counter may come before it."""
    return next(k for k in program.kernels if any(isinstance(op, Matmul) for _, _, op in k.walk()))


def mutate(program, change, **kernel_changes):
    """``program`` with ``change`` mapped over the operations of its main kernel."""
    kernel = main_kernel(program)
    roles = tuple(dataclasses.replace(role, ops=map_ops(role.ops, change)) for role in kernel.roles)
    changed = dataclasses.replace(kernel, roles=roles, **kernel_changes)
    return dataclasses.replace(program, kernels=tuple(changed if k is kernel else k for k in program.kernels))


def drop(kind, **fields):
    """A change that drops every operation of ``kind`` whose attributes are as given."""

    def change(op):
        same = isinstance(op, kind) and all(getattr(op, name) == value for name, value in fields.items())
        return None if same else op

    return change


def restage(name: str, stages: int):
    """A change that gives the pipe called ``name`` another number of stages."""

    def pipe_of(operand):
        if isinstance(operand, Pipe):
            return dataclasses.replace(operand, stages=stages) if operand.name == name else operand
        if operand is not None and not isinstance(operand, tuple) and hasattr(operand, "source"):
            return dataclasses.replace(operand, source=pipe_of(operand.source))
        return operand

    def change(op):
        if isinstance(op, Acquire | Consume | Release):
            return dataclasses.replace(op, pipe=pipe_of(op.pipe))
        if isinstance(op, Load):
            return dataclasses.replace(op, into=pipe_of(op.into))
        if isinstance(op, Matmul):
            return dataclasses.replace(op, a=pipe_of(op.a), b=pipe_of(op.b))
        return op

    return change


def error(program, problem) -> float:
    """Largest deviation of O from float64 attention (NaN counts as infinite)."""
    inputs = random_inputs(problem, seed=7)
    got, want = run_attention(program, inputs), attention(problem, **{k.lower(): v for k, v in inputs.items()})
    difference = np.abs(got["O"] - want["O"]).max()
    return float("inf") if np.isnan(difference) else float(difference)


def time_us(program, gpu=GPU) -> float:
    """Kernel time at a locked clock."""
    return run_program(program, gpu, Conditions(clock_hz=1.6e9)).time_us


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_dropping_a_rescale_breaks_the_numbers_and_saves_time(algorithm):
    small, timed = build_program(algorithm, SMALL, GPU), build_program(algorithm, MUTATED, GPU)
    assert error(small, SMALL) < 0.02
    assert error(mutate(small, drop(Compute, fn="rescale")), SMALL) > 0.02
    assert time_us(mutate(timed, drop(Compute, fn="rescale"))) < time_us(timed)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("fn", ["row_max", "accumulate_sum", "normalise", "exp", "rescale_factor"])
def test_every_step_of_the_softmax_matters(algorithm, fn):
    program = build_program(algorithm, SMALL, GPU)
    assert error(mutate(program, drop(Compute, fn=fn)), SMALL) > 0.02


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_dropping_a_mask_breaks_only_masked_problems(algorithm):
    causal = SMALL.with_(causal=True, seqlen_q=200)
    # FA2 pads K to 640 = 5 x 128 with no partial tile, so without a mask there is nothing to hide
    even = SMALL.with_(seqlen_k=704 if algorithm == "fa3" else 640)
    program = build_program(algorithm, causal, GPU)
    assert error(program, causal) < 0.02
    assert error(mutate(program, drop(Compute, fn="mask")), causal) > 0.02
    assert error(mutate(build_program(algorithm, even, GPU), drop(Compute, fn="mask")), even) < 0.02


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("tensor", ["Q", "K", "V"])
def test_dropping_a_load_loses_its_bytes(algorithm, tensor):
    program = build_program(algorithm, MUTATED, GPU)

    def change(op):
        return None if isinstance(op, Load) and op.source.tensor.name == tensor else op

    before, after = sm_traffic(main_kernel(program)), sm_traffic(main_kernel(mutate(program, change)))
    assert tensor not in after
    assert {k: v for k, v in before.items() if k != tensor} == after
    assert before[tensor][0] > 0
    # without its load a consumer waits for ever, or reads what was never loaded
    small = mutate(build_program(algorithm, SMALL, GPU), change)
    try:
        assert error(small, SMALL) > 0.02
    except DeadlockError:
        assert algorithm == "fa3" or tensor in "KV"


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_dropping_a_store_loses_its_bytes_and_its_output(algorithm):
    program = build_program(algorithm, SMALL, GPU)

    def change(op):
        return None if isinstance(op, Store) and op.into.tensor.name == "LSE" else op

    mutant = mutate(program, change)
    before, after = sm_traffic(main_kernel(program)), sm_traffic(main_kernel(mutant))
    rows = SMALL.batch * SMALL.heads * SMALL.seqlen_q
    assert before["LSE"] == (0, rows * DTYPE_BYTES["fp32"])
    assert "LSE" not in after
    assert "O" in after


def test_dropping_a_barrier_changes_the_time():
    program = build_program("fa2", MUTATED, GPU)
    assert time_us(mutate(program, drop(Barrier))) < time_us(program)


@pytest.mark.parametrize("algorithm,stages", [("fa3", 1)])
def test_dropping_a_pipeline_stage_costs_time_and_keeps_the_numbers(algorithm, stages):
    small, timed = build_program(algorithm, SMALL, GPU), build_program(algorithm, MUTATED, GPU)

    def fewer(program):
        return mutate(mutate(program, restage("k", stages)), restage("v", stages))

    assert error(fewer(small), SMALL) < 0.02
    assert time_us(fewer(timed)) > 1.005 * time_us(timed)


def test_a_second_stage_hides_a_long_latency():
    """FA2 has one buffer each for K and V; where memory is far away a second one pays."""
    far = load_profile("h200_sxm", {"l2_latency_s": "2us", "hbm_latency_s": "3us"})
    timed = build_program("fa2", MUTATED, far)
    more = mutate(mutate(timed, restage("k", 2)), restage("v", 2))
    assert time_us(more, far) < 0.9 * time_us(timed, far)


# Deadlocks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [Release, Signal])
def test_a_schedule_that_waits_for_ever_is_reported(kind):
    problem = SMALL.with_(seqlen_k=1280)
    program = mutate(build_program("fa3", problem, GPU), drop(kind))
    with pytest.raises(DeadlockError, match="wait for each other"):
        run_attention(program, random_inputs(problem))
    with pytest.raises(RuntimeError, match="never satisfied"):
        time_us(program)


def test_a_barrier_for_more_parties_than_roles_deadlocks():
    program = build_program("fa2", SMALL, GPU)

    def change(op):
        return dataclasses.replace(op, parties=op.parties + 1) if isinstance(op, Barrier) else op

    with pytest.raises(DeadlockError):
        run_attention(mutate(program, change), random_inputs(SMALL))


def test_turns_do_not_change_the_numbers():
    """Ping-pong only orders the warpgroups: without it the numbers are bit for bit the same."""
    program = build_program("fa3", SMALL, GPU)

    def change(op):
        return None if isinstance(op, Wait | Signal) else op

    inputs = random_inputs(SMALL, seed=7)
    with_turns, without = run_attention(program, inputs), run_attention(mutate(program, change), inputs)
    assert np.array_equal(with_turns["O"], without["O"])


def test_mutations_reach_every_loop():
    """``map_ops`` visits operations inside loops, and a mutation that changes nothing gives an equal program."""
    program = build_program("fa3", SMALL, GPU)
    seen = []

    def count(op):
        seen.append(op)
        return op

    assert main_kernel(mutate(program, count)).roles == main_kernel(program).roles
    walked = [op for _, _, op in main_kernel(program).walk()]
    assert [op for op in seen if not isinstance(op, Loop)] == walked
    assert any(view(op.a).space == "smem" for op in walked if isinstance(op, Matmul))
