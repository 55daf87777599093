"""The time reading inside one SM: hand-computed programs, the loop shortcut, and what overlap is worth."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from algorithms import build_program
from simulator import AttentionProblem, load_profile
from simulator.device import LATENCY_GRID_CYCLES
from simulator.launch import occupancy
from simulator.physics import Physics
from simulator.program import (
    Acquire,
    Await,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Index,
    Kernel,
    Load,
    Loop,
    Matmul,
    Pipe,
    Release,
    Role,
    Signal,
    Tensor,
    Trip,
    Wait,
    map_ops,
    tile,
    var,
)
from simulator.sm import TICKS_PER_CYCLE, run_sm, to_ticks
from simulator.sm_costs import CAUSES, PIPES, SmSpec, compile_kernel
from simulator.sm_timing import FIRST_TRIPS, TripProfile, cycles_out_of_step, timing_of

GPU = load_profile("h200_sxm")
#: One lane-operation, byte or FLOP a cycle and no latency, so that cycles can be counted by hand.
_UNIT = {f.name: 1.0 for f in fields(SmSpec)}
UNIT_SPEC = SmSpec(
    **_UNIT
    | {
        "is_wgmma": True,
        "matmul_latency": 0.0,
        "elementwise_latency": 0.0,
        "barrier_latency": 0.0,
        "smem_bytes": 1e9,
        "issue_lanes": 1e9,
        "warp_issue_rate": 1e9,
        "tensor_issue_share": 0.0,
        "issue_interval": 0.0,
    }
)
LATENCY = 100.0


def kernel_of(*roles: Role, trips=(), semaphores=(), coords=None) -> Kernel:
    """A kernel of one CTA."""
    return Kernel("k", roles, coords or {"n": np.array([4])}, trips, 128, semaphores=tuple(semaphores))


def ticked(kernel: Kernel, spec: SmSpec):
    """The compiled roles that ``run_sm`` takes."""
    return tuple((name, warps, to_ticks(ops)) for name, warps, ops in compile_kernel(kernel, spec))


def cycles(*roles: Role, spec=UNIT_SPEC, latency=LATENCY, residents=1, items=1, semaphores=(), **trips) -> float:
    """Time of one CTA of ``roles``."""
    kernel = kernel_of(*roles, semaphores=semaphores)
    return run_sm(ticked(kernel, spec), kernel.semaphores, trips, latency, residents, items).end_cycles


# Tiny programs, by hand --------------------------------------------------------------------------------------------
S, T = Buffer("S", 4, 8), Buffer("T", 4, 8)
X = Tensor("X", 1, 1024, 8, "bf16")
TILE_BYTES = 4 * 8 * 2
PIPE = Pipe("x", 4, 8, "bf16", 1, 1)
EXP = Compute("exp", S, (S, T), 4, 8)  # 32 exp and 32 fma lane-operations
ADD = Compute("add", S, (S, T), 4, 8)  # 32 fma
MATMUL = Matmul(Buffer("O", 64, 64), Buffer("P", 64, 64), Buffer("V", 64, 64, space="smem"))
MATMUL_CYCLES = 2 * 64**3


def test_one_operation_takes_its_work_over_the_rate():
    assert cycles(Role("w", [ADD])) == 32
    assert cycles(Role("w", [ADD]), spec=replace(UNIT_SPEC, fma=4.0)) == 8
    assert cycles(Role("w", [MATMUL])) == MATMUL_CYCLES
    assert cycles(Role("w", [MATMUL]), spec=replace(UNIT_SPEC, matmul_latency=50.0)) == MATMUL_CYCLES + 50


def test_dependent_operations_add_up():
    assert cycles(Role("w", [ADD, EXP, ADD])) == 96
    # element-wise operations in a row are one stream of instructions: one latency at its end
    assert cycles(Role("w", [ADD, ADD]), spec=replace(UNIT_SPEC, elementwise_latency=5.0)) == 69


def test_roles_share_a_pipe_but_not_different_pipes():
    # FP32 work of two roles shares one pipe; exp and tensor work of two roles overlap
    assert cycles(Role("a", [ADD]), Role("b", [ADD])) == 64
    small = Matmul(Buffer("O", 64, 8), Buffer("P", 64, 16), Buffer("V", 16, 8, space="smem"))
    alone = cycles(Role("a", [small]))
    assert cycles(Role("a", [small]), Role("b", [ADD] * 10)) == max(alone, 320)


def test_few_warps_cannot_use_all_sub_partitions():
    assert cycles(Role("w", [ADD], warps=1)) == 128


def test_an_asynchronous_matmul_overlaps_until_it_is_awaited():
    issue = replace(MATMUL, token="t")
    assert cycles(Role("w", [issue, ADD, Await("t"), ADD])) == MATMUL_CYCLES + 32
    assert cycles(Role("w", [issue, Await("t"), ADD, ADD])) == MATMUL_CYCLES + 64


def test_a_blocking_load_takes_port_time_and_latency():
    load = Load(tile(X, 0, 0, 4), S)
    assert cycles(Role("w", [load, ADD])) == TILE_BYTES + LATENCY + 32


def test_one_stage_serialises_load_and_work_and_two_overlap_them():
    n = 10
    load = [Acquire(PIPE), Load(tile(X, 0, var("i") * 4, 4), PIPE)]
    work = [Consume(PIPE), *[ADD] * 4, Release(PIPE)]

    def time(stages: int) -> float:
        pipe = replace(PIPE, stages=stages)

        def restage(op):
            if isinstance(op, Acquire | Consume | Release):
                return replace(op, pipe=pipe)
            return replace(op, into=pipe) if isinstance(op, Load) else op

        return cycles(
            Role("loader", [Loop("i", Index(n), map_ops(load, restage))], warps=0),
            Role("w", [Loop("i", Index(n), map_ops(work, restage))]),
        )

    fetch, use = TILE_BYTES + LATENCY, 128
    # one slot: fetched, used, fetched ...; two: a slot comes round again after its fetch and its use
    assert time(1) == n * (fetch + use)
    assert time(2) == fetch + 2 * use + (n // 2 - 1) * (fetch + use)
    # with slots enough only the port remains, or the work
    assert time(8) == fetch + n * use


def test_a_barrier_holds_the_first_until_the_last():
    waits = [Barrier("b", 2), ADD]
    # both finish their adds before the barrier at 64 and 96 (one pipe), then take turns again
    assert cycles(Role("a", [ADD, *waits]), Role("b", [ADD, ADD, *waits])) == 96 + 64


def test_a_semaphore_orders_roles():
    first, second = Role("a", [Wait("t"), ADD, Signal("u")]), Role("b", [Wait("u"), EXP])
    assert cycles(first, second, semaphores=(("t", 1),)) == 64
    with pytest.raises(RuntimeError, match="never satisfied"):
        cycles(first, second)


def test_a_loop_takes_its_trips_from_the_coordinates():
    body = Role("w", [Loop("i", var("n") - 1, [ADD])])
    assert [cycles(body, n=n) for n in (0, 1, 2, 5)] == [0, 0, 32, 128]


def test_resident_ctas_share_the_pipes():
    role = Role("w", [ADD, Barrier("x"), ADD])
    assert cycles(role) == 64
    # in order of arrival: the first CTA's adds run from 0 and 64, the second's from 32 and 96; the mean end is told
    assert cycles(role, residents=2) == (96 + 128) / 2
    # a pipe serves roles in turn: 32 + 64 cycles of work end at 32 and 96
    run = run_sm(ticked(kernel_of(Role("a", [ADD]), Role("b", [ADD, ADD])), UNIT_SPEC), (), {}, LATENCY)
    assert run.end_cycles == 96


def test_busy_time_is_work_over_rate_and_waits_fill_the_time():
    kernel = build_program("fa3", AttentionProblem(head_dim=128, seqlen_q=1024), GPU).kernels[-1]
    spec = SmSpec.of(GPU, Physics(), kernel.path, kernel.compute_dtype)
    run = run_sm(ticked(kernel, spec), kernel.semaphores, {"n_masked": 1, "n_full": 7}, 500.0)
    m, n, k, blocks = 128, 176, 128, 8
    busy = dict(zip(PIPES, run.busy_cycles, strict=True))
    assert busy["tensor"] == pytest.approx(blocks * 4 * m * n * k / spec.tensor_flop / spec.tensor_efficiency, rel=1e-3)
    assert busy["exp"] >= blocks * m * n / spec.exp
    assert max(busy.values()) <= run.end_cycles
    assert len(run.waits_cycles) == len(CAUSES)
    assert sum(run.waits_cycles) == pytest.approx(run.end_cycles, rel=0.02)


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_tensor_cores_that_are_fast_enough_wait_for_their_operands(algorithm):
    """Asynchronous and synchronous products alike: with eight times the tensor rate SMEM is what they take."""
    kernel = build_program(algorithm, AttentionProblem(heads=64, head_dim=128, seqlen_q=2048), GPU).kernels[0]
    spec = SmSpec.of(GPU, Physics(), kernel.path, kernel.compute_dtype)
    shares = []
    for faster in (1, 8):
        rates = replace(spec, tensor_flop=faster * spec.tensor_flop)
        run = run_sm(ticked(kernel, rates), kernel.semaphores, {"n_masked": 1, "n_full": 7}, 500.0)
        waits = dict(zip(CAUSES, run.waits_cycles, strict=True))
        shares.append({cause: waits[cause] / run.end_cycles for cause in ("tensor", "smem")})
    assert shares[0]["tensor"] > 0.2 > shares[0]["smem"]
    assert shares[1]["smem"] > 0.1 > shares[1]["tensor"]


# The shortcut ------------------------------------------------------------------------------------------------------
def _cases():
    for algorithm in ("fa2", "fa3"):
        for head_dim in (64, 128, 256):
            for causal in (False, True):
                name = f"{algorithm}-d{head_dim}-{'causal' if causal else 'full'}"
                yield pytest.param(algorithm, head_dim, causal, id=name)


@pytest.mark.parametrize("algorithm,head_dim,causal", list(_cases()))
def test_the_shortcut_equals_simulating_every_iteration(algorithm, head_dim, causal):
    problem = AttentionProblem(heads=64, seqlen_q=8192, head_dim=head_dim, causal=causal)
    kernel = build_program(algorithm, problem, GPU).kernels[-1]
    spec = SmSpec.of(GPU, Physics(), kernel.path, kernel.compute_dtype)
    roles = ticked(kernel, spec)
    persistent = kernel.schedule != "grid"
    latencies = (200.0, 1500.0, 4000.0)
    masked = int(np.median(kernel.coords["n_masked"]))
    for residents in sorted({1, occupancy(kernel, GPU)}):
        timing = timing_of(kernel, spec, latencies, residents)
        for k, latency in enumerate(latencies):
            for n in (48, 100):
                items = 2 if persistent else 1
                trips = {"n_masked": masked, "n_full": n}
                full = run_sm(roles, kernel.semaphores, trips, latency, residents, items).end_cycles
                short = predicted(timing, k, masked, n, items)
                # warpgroups keep the phase that a tile begins with: without turns a first tile may run in another one
                within = {256: 3e-2, 64: 5e-3}.get(head_dim, 1e-3) if algorithm == "fa3" else 1e-3
                assert short == pytest.approx(full, rel=within), (residents, latency, n)


def predicted(timing, k: int, masked: int, n: int, items: int = 1) -> float:
    """The shortcut's time of ``items`` tiles of ``masked`` + ``n`` iterations at grid point ``k``."""
    row = timing.short_overhead_cycles[n] if n < len(timing.short_overhead_cycles) else timing.overhead_cycles
    tile_cycles = row[k] + masked * timing.period_cycles[0][k] + n * timing.period_cycles[1][k]
    return items * tile_cycles + (timing.first_extra_cycles[k] if items > 1 else 0.0)


OTHERS = {
    "standard": ("standard", None, {"head_dim": 128}),
    "standard-backward": ("standard", None, {"head_dim": 128, "pass_": "bwd"}),
    "fa1": ("fa1", None, {"causal": True}),
    "fa1-paper": ("fa1", "flash_attn_1_paper", {}),
    "fa1-backward": ("fa1", None, {"causal": True, "pass_": "bwd"}),
    "fa1-paper-backward": ("fa1", "flash_attn_1_paper", {"pass_": "bwd"}),
    "fa2-backward": ("fa2", None, {"head_dim": 128, "causal": True, "pass_": "bwd"}),
    "fa3-backward": ("fa3", None, {"head_dim": 128, "causal": True, "pass_": "bwd"}),
    "decode": ("flash_decoding", None, {"batch": 32, "seqlen_q": 1, "seqlen_k": 16384, "head_dim": 128}),
    "decode-fa2": ("flash_decoding", "torch_flash_splitkv", {"batch": 32, "seqlen_q": 1, "seqlen_k": 16384}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_shortcut_of_every_other_loop(name):
    """One loop of a hundred iterations in every kernel that has a long one. Products prefetch several slices of k: the
    first iterations and the last ones do not wait for memory, those between do."""
    algorithm, implementation, changes = OTHERS[name]
    problem = AttentionProblem(**{"heads": 64, "seqlen_q": 4096, "head_dim": 64} | changes)
    measured = 0
    for kernel in build_program(algorithm, problem, GPU, implementation).kernels:
        profile = TripProfile.of(kernel.trips, kernel.coords) if kernel.trips else None
        if profile is None or profile.main is None or profile.longest < FIRST_TRIPS:
            continue
        spec = SmSpec.of(GPU, Physics(), kernel.path, kernel.compute_dtype)
        trips = {trip.coord: count for trip, count in zip(kernel.trips, profile.typical, strict=True)}
        trips[kernel.trips[profile.main].coord] = 100
        latencies = (200.0, 1500.0)
        for residents in sorted({1, occupancy(kernel, GPU)}):
            timing = timing_of(kernel, spec, latencies, residents, persistent=False)
            for k, latency in enumerate(latencies):
                full = run_sm(ticked(kernel, spec), kernel.semaphores, trips, latency, residents).end_cycles
                counts = (trips[trip.coord] for trip in kernel.trips)
                loops = sum(n * period[k] for n, period in zip(counts, timing.period_cycles, strict=True))
                assert timing.overhead_cycles[k] + loops == pytest.approx(full, rel=1e-3), (kernel.name, residents)
        measured += 1
    assert measured


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
@pytest.mark.parametrize("seqlen_k", [77, 256, 500, 900])
def test_loops_too_short_to_be_steady_are_exact(algorithm, seqlen_k):
    problem = AttentionProblem(heads=64, seqlen_q=1024, seqlen_k=seqlen_k, head_dim=128)
    kernel = build_program(algorithm, problem, GPU).kernels[-1]
    spec = SmSpec.of(GPU, Physics(), kernel.path, kernel.compute_dtype)
    trips = {name: int(kernel.coords[name][0]) for name in ("n_masked", "n_full")}
    for residents in sorted({1, occupancy(kernel, GPU)}):
        timing = timing_of(kernel, spec, LATENCY_GRID_CYCLES, residents, persistent=False)
        for k, latency in enumerate(LATENCY_GRID_CYCLES):
            full = run_sm(ticked(kernel, spec), kernel.semaphores, trips, latency, residents).end_cycles
            assert predicted(timing, k, *trips.values()) == pytest.approx(full, rel=1e-3), (residents, latency)


def test_nested_loops_are_timed_by_differences():
    inner = Loop("i", var("n_in"), [ADD])
    role = Role("w", [EXP, Loop("o", var("n_out"), [EXP, EXP, inner])])
    coords = {"n_in": np.array([7]), "n_out": np.array([5])}
    kernel = kernel_of(role, trips=(Trip("n_out"), Trip("n_in", "n_out")), coords=coords)
    timing = timing_of(kernel, UNIT_SPEC, (100.0, 200.0), 1)
    assert timing.period_cycles == ((64.0, 64.0), (32.0, 32.0))
    assert timing.overhead_cycles == (32.0, 32.0)
    full = run_sm(ticked(kernel, UNIT_SPEC), (), {"n_in": 7, "n_out": 5}, 100.0).end_cycles
    assert full == 32 + 5 * (64 + 7 * 32)


def test_equal_schedules_share_one_reading():
    spec = SmSpec.of(GPU, Physics(), "wgmma", "bf16")
    kernels = [
        build_program("fa3", AttentionProblem(heads=h, seqlen_q=n, head_dim=128), GPU).kernels[-1]
        for h, n in ((8, 4096), (64, 16384))
    ]
    one, two = (timing_of(k, spec, (200.0, 700.0), 1, True) for k in kernels)
    assert one is two


def test_trip_profile_names_what_carries_the_work():
    trips = (Trip("a"), Trip("b"))
    profile = TripProfile.of(trips, {"a": np.array([1, 1, 2]), "b": np.array([3, 3, 40])})
    assert profile.main == 1 and profile.varies == (True, False)
    assert 3 in profile.short and 40 not in profile.short
    assert TripProfile.of((), {}).main is None


def test_latency_only_ever_costs_time():
    for algorithm in ("fa2", "fa3"):
        kernel = build_program(algorithm, AttentionProblem(heads=64, seqlen_q=4096, head_dim=128), GPU).kernels[-1]
        spec = SmSpec.of(GPU, Physics(), kernel.path, kernel.compute_dtype)
        periods = timing_of(kernel, spec, LATENCY_GRID_CYCLES, occupancy(kernel, GPU)).period_cycles[1]
        assert all(b >= a * 0.999 for a, b in pairwise(periods))
        # two stages of K and V hide twice the latency that one stage hides; FA2 asks for V once K has come
        assert periods[-1] - periods[-2] == pytest.approx(16000 / 2 if algorithm == "fa3" else 2 * 16000, rel=0.05)


# What overlap is worth -----------------------------------------------------------------------------------------------
def _fa3_period(change=lambda op: op) -> float:
    """Cycles an iteration of FA3 in the published ablation (B=4, N=8448, H=16, d=128), operations changed."""
    problem = AttentionProblem(batch=4, heads=16, seqlen_q=8448, head_dim=128, dtype="fp16")
    gpu = load_profile("h100_sxm")
    kernel = build_program("fa3", problem, gpu).kernels[-1]
    kernel = replace(kernel, roles=tuple(replace(r, ops=map_ops(r.ops, change)) for r in kernel.roles))
    spec = SmSpec.of(gpu, Physics(), kernel.path, kernel.compute_dtype)
    return timing_of(kernel, spec, (400.0, 800.0), 1).period_cycles[1][0]


def softmax_waits_for_both_gemms(op):
    """No overlap inside a warpgroup: softmax starts when PV is done as well as QK."""
    return Await("O") if isinstance(op, Await) and op.token == "S" else op


def lockstep(op):
    """No warp specialisation: the CTA's warps meet at every tile, and so nobody can be out of phase."""
    if isinstance(op, Wait):
        return Barrier("block", 2)
    return None if isinstance(op, Signal) else op


def test_warp_specialisation_is_worth_what_was_published():
    """661 against 570 TFLOP/s, 14 % (FA3 paper, ablation); the schedule alone must cost between 8 and 25 %."""
    assert 0.08 <= 1 - _fa3_period() / _fa3_period(lockstep) <= 0.25


def test_overlap_inside_a_warpgroup_helps_most_where_warpgroups_cannot():
    """With ping-pong it may hide nothing more; in lockstep it is all the overlap that there is. It is little: the
    compiled loop waits for PV after a third of its softmax (sass_fa3_loops.csv)."""
    assert _fa3_period() <= _fa3_period(softmax_waits_for_both_gemms)
    alone = 1 - _fa3_period(lockstep) / _fa3_period(lambda op: lockstep(softmax_waits_for_both_gemms(op)))
    assert alone >= 0.05


def test_no_schedule_beats_its_busiest_pipe():
    spec = SmSpec.of(load_profile("h100_sxm"), Physics(), "wgmma", "fp16")
    tensor = 4 * 128 * 176 * 128 / spec.tensor_flop / spec.tensor_efficiency
    assert _fa3_period() >= tensor * 0.9999
    # and overlap is real: less than the sum of GEMMs and exponentials
    assert _fa3_period() < tensor + 128 * 176 / spec.exp


def test_ticks_are_whole():
    assert isinstance(TICKS_PER_CYCLE, int)
    for _name, _warps, ops in ticked(kernel_of(Role("w", [EXP, ADD])), replace(UNIT_SPEC, fma=3.0)):
        assert all(isinstance(t, int) for op in ops for _, t in op.work)


def test_ctas_out_of_step_overlap_but_queue():
    """Between the busiest pipe's work and everything in a row; one alone, or CTAs that share nothing, wait for none."""
    assert cycles_out_of_step(1000.0, 400.0, 1, 100.0) == 1000.0
    assert cycles_out_of_step(1000.0, 0.0, 8, 100.0) == 1000.0
    times = [cycles_out_of_step(1000.0, 400.0, n, 100.0) for n in range(1, 9)]
    assert all(a < b for a, b in pairwise(times))
    assert all(max(1000.0, n * 400.0 - 100.0) <= t <= 1000.0 + (n - 1) * 400.0 for n, t in enumerate(times, 1))
    # two of them: each finds the other at the pipe in 400 of 1100 cycles
    assert times[1] == pytest.approx(1000.0 + 400.0 * 400.0 / 1100.0)
