"""The time reading across the GPU: list scheduling, shared bandwidth, waves, order, and the replay's shortcuts."""

import heapq
from dataclasses import replace

import numpy as np
import pytest

from algorithms import build_program
from simulator import AttentionProblem, device, load_profile, simulate, sm_timing
from simulator.device import run_kernel
from simulator.launch import occupancy
from simulator.overrides import apply_overrides
from simulator.physics import Physics
from simulator.plan import EVENT_BUDGET
from simulator.program import Buffer, Compute, Kernel, Load, Loop, Program, Role, Tensor, Trip, tile, var
from simulator.simulation import new_cache
from simulator.sm import TICKS_PER_CYCLE

GPU = load_profile("h200_sxm")
CLOCK_HZ = 1.6e9
#: A budget of events that no launch here exceeds: every iteration of every CTA is an event of its own.
EVERY_EVENT = 10**12


def run(kernel: Kernel, gpu=GPU, physics=None, program: Program | None = None, budget=EVENT_BUDGET, **how):
    """Replay ``kernel`` on an empty L2 that is tracked as finely as ``budget`` allows."""
    physics = physics or Physics()
    l2 = new_cache(program or build_around(kernel), gpu, physics, "cold", budget)
    return run_kernel(kernel, l2, gpu, physics, how.pop("clock_hz", CLOCK_HZ), budget=budget, **how)


def build_around(kernel: Kernel) -> Program:
    """A program of one kernel."""
    return Program("test", "test", AttentionProblem(), (kernel,), {}, {}, 0)


# List scheduling, by hand --------------------------------------------------------------------------------------------
def counting_kernel(trips: np.ndarray, schedule: str = "grid") -> Kernel:
    """CTAs that do ``trips`` iterations of FP32 work and touch no memory; one CTA an SM."""
    s = Buffer("S", 128, 128)
    work = Compute("add", s, (s, s), 128, 128)
    role = Role("w", [work, Loop("i", var("n"), [work])])
    return Kernel("k", (role,), {"n": trips}, (Trip("n"),), 128, ctas_per_sm=1, schedule=schedule)


def list_schedule(durations, slots: int, gap: float, static: bool = False) -> float:
    """End of the last job: next job to the first free slot, or job i on slot i modulo ``slots``."""
    if static:
        return max(
            sum(durations[s::slots]) + gap * (len(durations[s::slots]) - 1) for s in range(min(slots, len(durations)))
        )
    free = [(0.0, s) for s in range(slots)]
    end = 0.0
    for index, duration in enumerate(durations):
        start, slot = heapq.heappop(free)
        done = start + duration + (gap if index >= slots else 0.0)
        end = max(end, done)
        heapq.heappush(free, (done, slot))
    return end


@pytest.mark.parametrize("schedule", ["grid", "dynamic", "static"])
@pytest.mark.parametrize("ctas", [1, 131, 132, 133, 1000])
def test_ctas_are_list_scheduled(schedule, ctas):
    trips = np.random.default_rng(ctas).integers(0, 40, ctas)
    kernel = counting_kernel(trips, schedule)
    result = run(kernel)
    timing = result.timings[0]
    gap = Physics().cta_launch_cycles if schedule == "grid" else Physics().persistent_fetch_cycles
    durations = timing.overhead_cycles[0] + trips * timing.period_cycles[0][0]
    first = np.where(np.arange(ctas) < GPU.num_sms, timing.first_extra_cycles[0], 0.0)
    want = list_schedule(list(durations + first), GPU.num_sms, gap, schedule == "static")
    # every event is rounded to a tick
    assert result.cycles == pytest.approx(want, abs=ctas * 42 / TICKS_PER_CYCLE)
    assert result.traffic.size == 0 or not result.traffic.any()


def test_cycles_of_pure_computation_do_not_depend_on_the_clock():
    kernel = counting_kernel(np.full(500, 20))
    assert run(kernel, clock_hz=1.0e9).cycles == run(kernel, clock_hz=2.0e9).cycles


def test_every_cta_runs_once_and_no_slot_runs_two():
    program = build_program("fa3", AttentionProblem(heads=20, seqlen_q=2048, head_dim=128, causal=True), GPU)
    log = run(program.kernels[-1], program=program, log=True).cta_log
    assert len(log) == program.kernels[-1].ctas
    assert (log[:, 2] > log[:, 1]).all() or (log[:, 2] >= log[:, 1]).all()
    for slot in np.unique(log[:, 0]):
        rows = log[log[:, 0] == slot]
        rows = rows[np.argsort(rows[:, 1])]
        assert (rows[1:, 1] >= rows[:-1, 2]).all()


def test_occupancy_is_the_least_of_its_limits():
    kernel = counting_kernel(np.array([1]))
    free = replace(kernel, ctas_per_sm=None, registers_per_thread=32)
    assert occupancy(free, GPU) == min(
        GPU.max_ctas_per_sm, GPU.max_threads_per_sm // 128, GPU.registers_per_sm // (32 * 128)
    )
    assert occupancy(replace(free, threads=1024), GPU) == 2
    assert occupancy(replace(free, registers_per_thread=255), GPU) == 65536 // (256 * 128)
    assert occupancy(replace(free, smem_bytes=100 * 1024), GPU) == 2
    assert occupancy(replace(free, ctas_per_sm=3), GPU) == 3


# Shared bandwidth ----------------------------------------------------------------------------------------------------
def streaming_kernel(ctas: int, blocks: int, shared: bool) -> Kernel:
    """Each CTA reads ``blocks`` tiles of 64 KiB: its own, or all the same."""
    x = Tensor("X", ctas, blocks * 256, 128, "bf16", block_rows=256)
    head = 0 if shared else var("cta")
    role = Role("w", [Loop("i", var("n"), [Load(tile(x, head, var("i") * 256, 256), Buffer("t", 256, 128, "bf16"))])])
    coords = {"cta": np.arange(ctas), "n": np.full(ctas, blocks)}
    return Kernel("k", (role,), coords, (Trip("n"),), 128, ctas_per_sm=2)


def test_streams_share_hbm_and_l2_bandwidth():
    physics = Physics()
    blocks, ctas = 64, 4 * GPU.num_sms
    cold = run(streaming_kernel(ctas, blocks, shared=False))
    moved = ctas * blocks * 65536
    assert cold.traffic[2].sum() == moved
    floor = moved / (GPU.hbm_sustained_read_bytes_per_s * physics.hbm_read_efficiency) * CLOCK_HZ
    assert floor <= cold.cycles <= 1.1 * floor
    assert cold.hbm_busy_share == pytest.approx(floor / cold.cycles, rel=0.01)
    hot = run(streaming_kernel(ctas, blocks, shared=True))
    assert hot.traffic[2].sum() == blocks * 65536
    assert hot.traffic[0].sum() == moved
    floor = moved / (GPU.l2_bandwidth_bytes_per_s * physics.l2_bandwidth_fraction) * CLOCK_HZ
    assert floor <= hot.cycles < cold.cycles


def test_one_cta_cannot_use_all_bandwidth():
    """One block in flight: a latency and a transfer each (one CTA streams tens of GB/s, not terabytes)."""
    result = run(streaming_kernel(1, 64, shared=False))
    rate = 64 * 65536 / (result.cycles / CLOCK_HZ)
    assert 20e9 < rate < 120e9
    assert max(result.waits, key=result.waits.get) == "imbalance"


# Waves and order -----------------------------------------------------------------------------------------------------
def test_one_head_more_than_there_are_sms_costs_a_wave():
    """FA3, one query tile and 8192 keys a head: 134 us for 132 heads, 217 us for 133 (measured on an H200)."""
    times = [
        simulate("fa3", AttentionProblem(heads=h, seqlen_q=128, seqlen_k=8192, head_dim=128), GPU).time_us
        for h in (131, 132, 133)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.03)
    assert 1.4 < times[2] / times[1] < 1.95


def test_fa2_holds_two_ctas_an_sm_so_its_wave_ends_elsewhere():
    def time(heads):
        problem = AttentionProblem(heads=heads, seqlen_q=128, seqlen_k=8192, head_dim=128)
        return simulate("fa2", problem, GPU, clock_mhz=1600).time_us

    assert time(133) / time(132) < time(265) / time(264)


def reordered(program: Program, order: np.ndarray, schedule: str | None = None) -> Program:
    """``program`` with its kernel's CTAs in another order."""
    kernel = program.kernels[-1]
    coords = {name: values[order] for name, values in kernel.coords.items()}
    return replace(program, kernels=(replace(kernel, coords=coords, schedule=schedule or kernel.schedule),))


def test_longest_first_beats_shortest_first():
    problem = AttentionProblem(heads=6, seqlen_q=8192, head_dim=128, causal=True)
    program = build_program("fa3", problem, GPU)
    length = program.kernels[-1].coords["n_full"]
    longest = run_program_cycles(reordered(program, np.argsort(-length, kind="stable")))
    shortest = run_program_cycles(reordered(program, np.argsort(length, kind="stable")))
    assert longest < 0.95 * shortest


def run_program_cycles(program: Program) -> float:
    """Cycles of the first kernel."""
    return run(program.kernels[-1], program=program).cycles


def test_a_dynamic_schedule_balances_what_a_static_one_cannot():
    problem = AttentionProblem(heads=8, seqlen_q=8192, head_dim=128, causal=True)
    program = build_program("fa3", problem, GPU)
    order = np.argsort(-program.kernels[-1].coords["n_full"], kind="stable")
    dynamic = run_program_cycles(reordered(program, order, "dynamic"))
    static = run_program_cycles(reordered(program, order, "static"))
    assert dynamic < static
    # equal tiles: nothing to balance
    even = build_program("fa3", problem.with_(causal=False, heads=33, kv_heads=33), GPU)
    everything = np.arange(even.kernels[-1].ctas)
    assert run_program_cycles(reordered(even, everything, "dynamic")) == pytest.approx(
        run_program_cycles(reordered(even, everything, "static")), rel=0.02
    )


def test_causal_halves_the_work_but_not_the_tail():
    full = AttentionProblem(heads=16, seqlen_q=8192, head_dim=128)
    for algorithm in ("fa2", "fa3"):
        dense = simulate(algorithm, full, GPU, clock_mhz=1600).time_us
        causal = simulate(algorithm, full.with_(causal=True), GPU, clock_mhz=1600).time_us
        assert 0.5 < causal / dense < 0.8


def test_tile_quantisation_is_paid():
    """FA3 at d=64 has 192-row tiles: 1024 rows cost as many tiles as 1152."""
    times = [
        simulate(
            "fa3", AttentionProblem(batch=16, heads=33, seqlen_q=n, seqlen_k=1024, head_dim=64), GPU, clock_mhz=1600
        )
        for n in (960, 1024, 1152)
    ]
    assert times[1].executed_flops == times[2].executed_flops > times[0].executed_flops
    assert times[1].time_us == pytest.approx(times[2].time_us, rel=0.02)
    assert times[0].time_us < 0.9 * times[1].time_us


# What order does to L2 -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_cta_order_decides_how_often_l2_is_missed():
    """128k tokens, causal, GQA on an H200: 373 GB in FA2's order, 8.2 GB in FA3's (counted); 1.6 GB are unique.

    SMs ask for 1.10 TB in either; in FA3's, neighbours ask together and L2 counts 0.943 TB (1.10 in FA2's).
    """
    problem = AttentionProblem(heads=32, kv_heads=8, seqlen_q=131072, head_dim=128, causal=True)
    read = {}
    for algorithm in ("fa2", "fa3"):
        result = simulate(algorithm, problem, GPU, clock_mhz=1500)
        read[algorithm] = result.hbm_read_bytes
        counted = {"fa2": 1.10e12, "fa3": 0.943e12}[algorithm]
        # how long pairs last over tiles of hundreds of key blocks: no shorter launch says
        assert result.l2_read_bytes == pytest.approx(counted, rel={"fa2": 0.04, "fa3": 0.1}[algorithm])
    assert 4e9 < read["fa3"] < 16e9
    assert read["fa2"] > 5 * read["fa3"]


def test_where_everything_fits_order_does_not_matter():
    problem = AttentionProblem(heads=16, kv_heads=4, seqlen_q=8192, head_dim=128, causal=True)
    reads = {a: simulate(a, problem, GPU, clock_mhz=1600).hbm_read_bytes for a in ("fa2", "fa3")}
    unique = (16 + 2 * 4) * 8192 * 128 * 2
    # but for a few conflicts in L2's sets
    assert all(unique <= read <= 1.05 * unique for read in reads.values())


# What is recorded ---------------------------------------------------------------------------------------------------
P = AttentionProblem


def test_a_log_changes_nothing():
    program = build_program("fa2", P(batch=2, heads=16, seqlen_q=2048, head_dim=128, causal=True), GPU)
    kernel = program.kernels[-1]
    plain, logged = run(kernel, program=program), run(kernel, program=program, log=True)
    assert plain.cycles == logged.cycles
    assert np.array_equal(plain.traffic, logged.traffic)
    assert logged.cta_log[:, 2].max() <= logged.cycles * TICKS_PER_CYCLE


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_a_launch_does_not_depend_on_how_much_of_its_reading_was_there(monkeypatch, algorithm):
    """Points of the latency grid are read when a launch reaches them: those beyond change no bit of what it says."""
    problem = AttentionProblem(batch=1, heads=8, seqlen_q=1024, seqlen_k=1024, head_dim=128)
    program = build_program(algorithm, problem, GPU)

    def runs():
        sm_timing._reading.cache_clear()
        return [run(program.kernels[0], gpu, program=program) for gpu in (GPU, slow)]

    slow = apply_overrides(GPU, {"hbm_bandwidth": "x0.05"})
    as_needed = runs()
    monkeypatch.setattr(device, "_points_to", lambda grid, latency: len(grid))
    everything = runs()
    points = [len(r.timings[0].latencies_cycles) for r in as_needed]
    assert points[0] < points[1] <= len(device.LATENCY_GRID_CYCLES)
    for few, full in zip(as_needed, everything, strict=True):
        assert len(full.timings[0].latencies_cycles) == len(device.LATENCY_GRID_CYCLES)
        assert (few.cycles, few.waits) == (full.cycles, full.waits)
        assert np.array_equal(few.traffic, full.traffic)


def test_waits_are_shares():
    for algorithm, causal in (("fa2", True), ("fa3", False)):
        program = build_program(algorithm, P(heads=40, seqlen_q=4096, head_dim=128, causal=causal), GPU)
        waits = run(program.kernels[-1], program=program).waits
        assert all(share >= 0 for share in waits.values())
        assert sum(waits.values()) == pytest.approx(1.0, abs=0.02)


def test_a_launch_that_ends_when_its_writes_have_drained_waits_for_hbm():
    """Unfused attention's first product writes S: after its last CTA the writes go on, most of the time at half the
    bandwidth. The gaps between short CTAs are no idle SMs either."""
    problem = AttentionProblem(batch=1, heads=16, seqlen_q=4096, head_dim=128, causal=False)
    today, half = (
        next(k for k in simulate("standard", problem, gpu).kernels if k.name == "qk_gemm")
        for gpu in (load_profile("h100_sxm"), load_profile("h100_sxm", {"hbm_bandwidth": "x0.5"}))
    )
    assert today.waits["hbm"] < half.waits["hbm"] and half.limiter == "hbm"
    assert half.waits["imbalance"] < 0.1 < half.empty
    assert sum(half.waits.values()) == pytest.approx(1.0, abs=1e-6)
