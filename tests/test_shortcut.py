"""The replay's shortcuts against one event an iteration: several iterations an event, and repeating parts left out."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from law_settings import laws
from test_device_engine import CLOCK_HZ, EVERY_EVENT, GPU, run

from algorithms import MODULES, build_program, fa1_schedule
from simulator import AttentionProblem, simulate
from simulator.device import run_kernel
from simulator.errors import InputError
from simulator.launch import bundle_size, occupancy
from simulator.overrides import with_values
from simulator.physics import Physics
from simulator.plan import EVENT_BUDGET, crowding, iterations_of, own_unit, plan_replay, shared_streams
from simulator.program import Program
from simulator.simulation import new_cache

P = AttentionProblem
#: What the shortcuts may change: time, and HBM bytes (read and written together).
TIME, HBM_BYTES = 0.005, 0.01
#: Random launches may change by so many times as much: some in a hundred move by more than 0.5 % in time (who takes the
#: last wave's CTAs), FA2's by 2.8 % at most and FA1's by 2.4 % (ASSUMPTIONS.md).
RANDOM = 6


def assert_same(kernel, program: Program, gpu=GPU, times: int = 1, **how) -> None:
    """The shortcuts' replay of ``kernel`` on an empty L2 equals the one of every iteration."""
    full = run(kernel, gpu, program=program, budget=EVERY_EVENT)
    short = run(kernel, gpu, program=program, **how)
    assert short.cycles == pytest.approx(full.cycles, rel=times * TIME)
    assert np.array_equal(short.traffic[:2], full.traffic[:2])
    assert short.traffic[2:].sum() == pytest.approx(full.traffic[2:].sum(), rel=times * HBM_BYTES)


CASES = {
    # chunked: several iterations an event
    "fa2-long": ("fa2", P(heads=16, seqlen_q=16384, head_dim=128), {}),
    "fa3-causal-long": ("fa3", P(batch=2, heads=16, kv_heads=4, seqlen_q=16384, head_dim=128, causal=True), {}),
    # 0.7 % too fast: who takes the last wave's CTAs
    "fa2-causal-d64": ("fa2", P(batch=8, heads=16, seqlen_q=8192, head_dim=64, causal=True), {"times": 2}),
    "fa1-long": ("fa1", P(heads=8, seqlen_q=8192, head_dim=128), {}),
    "fa1-paper": ("fa1:flash_attn_1_paper", P(heads=32, seqlen_q=4096, head_dim=128), {}),
    # K and V of all sequences between two heads of a group come near the L2's capacity
    "fa2-group": ("fa2", P(batch=8, heads=8, kv_heads=2, seqlen_q=9977, head_dim=128, causal=True), {}),
    # streams of many capacities of the L2: of CTAs that are all alike and keep in step, and under a mask
    "fa2-1m": ("fa2", P(heads=2, seqlen_q=135_168, seqlen_k=1_048_576, head_dim=128), {}),
    "fa3-1m": ("fa3", P(heads=2, seqlen_q=135_168, seqlen_k=1_048_576, head_dim=128), {}),
    "fa3-512k": ("fa3", P(heads=2, seqlen_q=135_168, seqlen_k=524_288, head_dim=128, causal=True), {}),
    # repeating: many equal heads
    "fa3-many-heads": ("fa3", P(batch=16, heads=16, seqlen_q=4096, head_dim=128), {"budget": 50_000}),
    "fa2-many-heads": ("fa2", P(batch=64, heads=32, seqlen_q=2048, head_dim=128, causal=True), {}),
    # a grid of very many short CTAs, of which most heads are left out; its scores exceed the L2
    "standard-many": ("standard", P(batch=20, heads=32, seqlen_q=1024, head_dim=128), {}),
    # a tenth of the usual events
    "fa2-coarse": ("fa2", P(batch=4, heads=16, seqlen_q=4096, head_dim=128), {"budget": 25_000}),
    "fa3-coarse": ("fa3", P(batch=8, heads=16, seqlen_q=4096, head_dim=128, causal=True), {"budget": 50_000}),
    "standard-mask": ("standard", P(batch=16, heads=16, seqlen_q=1024, head_dim=128, causal=True), {"budget": 50_000}),
    # backward passes and decoding
    "fa1-backward": ("fa1", P(batch=8, heads=8, seqlen_q=8192, head_dim=64, causal=True, pass_="bwd"), {}),
    "fa1-paper-backward": ("fa1:flash_attn_1_paper", P(heads=132, seqlen_q=4096, head_dim=64, pass_="bwd"), {}),
    "fa2-backward": (
        "fa2",
        P(batch=4, heads=16, kv_heads=8, seqlen_q=8192, head_dim=128, causal=True, pass_="bwd"),
        {},
    ),
    "fa3-backward": ("fa3", P(batch=8, heads=16, seqlen_q=8192, head_dim=128, pass_="bwd"), {}),
    "standard-backward": ("standard", P(batch=40, heads=16, seqlen_q=1024, head_dim=64, pass_="bwd"), {}),
    "decode": ("flash_decoding", P(batch=512, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=16384, head_dim=128), {}),
    "decode-fa2": (
        "flash_decoding:torch_flash_splitkv",
        P(batch=256, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=16384, head_dim=128),
        {},
    ),
    # HBM-bound: a slow memory
    "fa3-slow-hbm": ("fa3", P(batch=8, heads=132, seqlen_q=128, seqlen_k=8192, head_dim=128), {"budget": 10_000}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_shortcuts_equal_one_event_an_iteration(name):
    algorithm, problem, how = CASES[name]
    gpu = with_values(GPU, {"hbm_bandwidth_bytes_per_s": 1e12}) if name.endswith("slow-hbm") else GPU
    algorithm, _, implementation = algorithm.partition(":")
    program = build_program(algorithm, problem, gpu, implementation or None)
    kernels = {kernel.name: kernel for kernel in program.kernels}
    budget = how.get("budget", EVENT_BUDGET)
    # some launch is long enough for a shortcut
    assert max(iterations_of(kernel).sum() + 2 * kernel.ctas for kernel in kernels.values()) > budget
    for kernel in program.kernels:
        assert_same(kernel, program, gpu, **how)


def test_every_algorithm_has_a_long_launch_and_a_backward_pass_where_it_has_one():
    asked = {(algorithm.partition(":")[0], problem.pass_) for algorithm, problem, _ in CASES.values()}
    assert asked == {(name, pass_) for name in MODULES for pass_ in ("fwd", "bwd")} - {("flash_decoding", "bwd")}


@laws(6)
@given(
    algorithm=st.sampled_from(["standard", "fa1", "fa2", "fa3"]),
    batch=st.sampled_from([1, 2, 3, 8]),
    kv_heads=st.integers(1, 8),
    group=st.sampled_from([1, 2, 4]),
    seqlen=st.integers(2000, 12000),
    head_dim=st.sampled_from([64, 128]),
    causal=st.booleans(),
)
def test_shortcuts_of_any_launch(algorithm, batch, kv_heads, group, seqlen, head_dim, causal):
    """Launches of more events than the budget, but not too many to replay in full."""
    problem = P(
        batch=batch, heads=kv_heads * group, kv_heads=kv_heads, seqlen_q=seqlen, head_dim=head_dim, causal=causal
    )
    try:
        program = build_program(algorithm, problem, GPU)
    except InputError:
        assume(False)
    long = [k for k in program.kernels if EVENT_BUDGET < iterations_of(k).sum() + 2 * k.ctas < 3 * EVENT_BUDGET]
    assume(long)
    assert_same(long[0], program, times=RANDOM)


@pytest.mark.slow
def test_long_streams_out_of_step_lose_some_reads():
    """FA2 under a mask: CTAs begin at different keys, and those that an event of many keys brings together stay so."""
    program = build_program("fa2", P(heads=2, seqlen_q=135_168, seqlen_k=524_288, head_dim=128, causal=True), GPU)
    kernel = program.kernels[0]
    full, short = run(kernel, program=program, budget=EVERY_EVENT), run(kernel, program=program)
    assert short.cycles == pytest.approx(full.cycles, rel=TIME)
    assert 0.9 < short.traffic[2].sum() / full.traffic[2].sum() <= 1.0 + HBM_BYTES


def test_an_event_reads_a_small_part_of_the_l2():
    """A larger one would find nothing of what it read before, though its tiles would still be there."""
    capacity = new_cache(build_program("fa2", P(seqlen_q=1024), GPU), GPU, Physics(), "cold").capacity
    for algorithm, keys in (("fa2", 64), ("fa3", 176)):
        kernel = build_program(algorithm, P(heads=16, seqlen_q=1_048_576, head_dim=128), GPU).kernels[-1]
        plan = plan_replay(kernel, GPU.num_sms * occupancy(kernel, GPU), capacity, EVENT_BUDGET)
        assert 0.05 * capacity < plan.chunk * 2 * keys * 128 * 2 <= 0.13 * capacity


def test_what_is_left_out_is_neither_the_start_nor_the_end():
    problem = P(batch=20, heads=32, seqlen_q=1024, head_dim=128)
    program = build_program("standard", problem, GPU)
    scores = next(kernel for kernel in program.kernels if kernel.name == "qk_gemm")
    slots = GPU.num_sms * occupancy(scores, GPU)
    capacity = new_cache(program, GPU, Physics(), "cold").capacity
    plan = plan_replay(scores, slots, capacity, EVENT_BUDGET)
    assert plan.skip >= scores.ctas // 2
    assert plan.skip % plan.unit == 0
    assert plan.jump_at >= 2 * plan.unit
    assert scores.ctas - plan.skip - plan.jump_at >= plan.unit
    written = 20 * 32 * 1024 * 1024 * 2
    assert plan.jump_at / scores.ctas * written > capacity
    # what stays in L2 is the last heads' scores, as without the shortcut
    states = []
    for budget in (EVENT_BUDGET, EVERY_EVENT):
        l2 = new_cache(program, GPU, Physics(), "cold", budget)
        run_kernel(scores, l2, GPU, Physics(), CLOCK_HZ, budget=budget)
        states.append((l2.dirty_bytes, l2.counters[3].sum()))
    assert states[0][0] == pytest.approx(states[1][0], rel=0.02)
    assert states[0][1] + states[0][0] == pytest.approx(written, rel=0.002)


def test_what_one_cta_reads_is_no_shared_stream():
    problem = P(heads=16, seqlen_q=4096, head_dim=128, causal=True)
    product = build_program("standard", problem, GPU).kernels[-1]
    assert shared_streams(product, 0, GPU.num_sms)[0] == 4096 * 128 * 2  # V, not P
    attention = build_program("fa2", problem, GPU).kernels[0]
    assert shared_streams(attention, 0, 2 * GPU.num_sms)[0] == 2 * 4096 * 128 * 2  # K and V


def test_a_group_comes_back_after_all_sequences():
    """FA2's grid walks sequences before heads: K and V of a head are used again after those of every sequence."""

    def crowded(batch: int, kv_heads: int, seqlen: int = 8192) -> bool:
        problem = P(batch=batch, heads=8, kv_heads=kv_heads, seqlen_q=seqlen, head_dim=128)
        kernel = build_program("fa2", problem, GPU).kernels[0]
        return crowding(kernel, 2 * GPU.num_sms, 60 * 2**20)[1]

    assert crowded(8, 2)  # 8 x 4 MiB between two uses
    assert not crowded(8, 8)  # used once
    assert not crowded(2, 2)
    assert not crowded(64, 2)  # 256 MiB: nothing is left
    assert crowded(1, 8, 65536)  # 32 MiB of a single head


def test_launches_whose_ctas_have_bytes_of_their_own():
    """Neither heads nor waves matter to the mask's addition: most of it is left out, also within a head."""
    program = build_program("standard", P(heads=4, seqlen_q=8192, head_dim=128, causal=True), GPU)
    addition = next(kernel for kernel in program.kernels if kernel.name.startswith("mask_add"))
    slots = GPU.num_sms * occupancy(addition, GPU)
    plan = plan_replay(addition, slots, new_cache(program, GPU, Physics(), "cold").shared_capacity, EVENT_BUDGET)
    assert plan.skip > addition.ctas // 4
    assert_same(addition, program)


def test_bundles_of_alike_ctas_are_left_out():
    """Softmax over short rows: CTAs by the ten thousand, replayed a few together."""
    program = build_program("standard", P(batch=16, heads=16, seqlen_q=1024, head_dim=128), GPU)
    softmax = next(kernel for kernel in program.kernels if kernel.name == "softmax")
    slots = GPU.num_sms * occupancy(softmax, GPU)
    bundle = bundle_size(softmax, slots)
    plan = plan_replay(softmax, slots, new_cache(program, GPU, Physics(), "cold").capacity, EVENT_BUDGET, bundle)
    assert bundle > 1
    assert plan.skip > softmax.ctas // bundle // 4
    assert plan.skip % plan.unit == 0 and plan.unit % slots == 0
    assert_same(softmax, program)


def test_rows_that_a_tensor_ends_in_are_not_left_out():
    """CTAs of cut tiles do less than the others: such launches repeat head by head or not at all."""
    program = build_program("standard", P(heads=60, seqlen_q=1605, head_dim=64), GPU)
    assert all(
        own_unit(k, GPU.num_sms * occupancy(k, GPU), 2**20) == (0, 0) for k in program.kernels if not k.ctas_each > 1
    )


@pytest.mark.parametrize("implementation", ["flash_attn_1", "flash_attn_1_paper"])
@pytest.mark.parametrize("causal", [True, False])
def test_key_blocks_that_stand_for_their_neighbours(monkeypatch, implementation, causal):
    problem = P(heads=4, seqlen_q=65536, head_dim=128, causal=causal)
    assert build_program("fa1", problem, GPU, implementation).kernels[-1].times > 1
    few = simulate("fa1", problem, GPU, implementation=implementation)
    monkeypatch.setattr(fa1_schedule, "LISTED_STEPS", 10**12)
    assert build_program("fa1", problem, GPU, implementation).kernels[-1].times == 1
    everyone = simulate("fa1", problem, GPU, implementation=implementation)
    assert few.kernels[-1].ctas == everyone.kernels[-1].ctas
    assert few.time_us == pytest.approx(everyone.time_us, rel=TIME)
    assert few.executed_flops == pytest.approx(everyone.executed_flops, rel=1e-4)
    for name in ("l2_read_bytes", "l2_write_bytes"):
        assert getattr(few, name) == pytest.approx(getattr(everyone, name), rel=1e-3)
    for name in ("hbm_read_bytes", "hbm_write_bytes"):
        assert getattr(few, name) == pytest.approx(getattr(everyone, name), rel=5 * HBM_BYTES)
