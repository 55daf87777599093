"""The laws that every result obeys (DESIGN), over random hardware and problems."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from law_settings import MORE, laws

from algorithms import MODULES
from simulator import AttentionProblem, load_profile, simulate
from simulator.errors import InputError
from simulator.launch import occupancy
from simulator.overrides import apply_overrides, with_values
from simulator.physics import Physics
from simulator.program import Store
from simulator.read_sharing import unseen_read_bytes
from simulator.result import LIMITERS
from simulator.sm_costs import SmSpec
from simulator.traffic import sm_traffic

ALGORITHMS = list(MODULES)
BASES = {name: load_profile(name) for name in ("a100_sxm4_80gb", "h100_sxm", "h200_sxm", "b200")}
GPU = BASES["h200_sxm"]
#: Below what load leaves of any of these GPUs' clocks: a set clock is an upper bound.
CLOCK_MHZ = 1300

#: Hardware parameters that may be scaled at a fixed schedule, and by which factor they improve.
RATES = {
    "hbm_bandwidth_bytes_per_s": 2.0,
    "l2_bandwidth_bytes_per_s": 2.0,
    "exp_per_cycle_per_sm": 2.0,
    "fma_per_cycle_per_sm": 2.0,
    "alu_per_cycle_per_sm": 2.0,
    "convert_per_cycle_per_sm": 2.0,
    "smem_bandwidth_bytes_per_cycle_per_sm": 2.0,
    "l2_to_sm_bandwidth_bytes_per_cycle_per_sm": 2.0,
    "issue_slots_per_cycle_per_sm": 2.0,
    "l2_latency_s": 0.5,
    "hbm_latency_s": 0.5,
}
SIZES = ("l2_bytes", "num_sms")


@st.composite
def hardware(draw, bases=tuple(BASES)):
    """A GPU that may not exist: a real one with every rate scaled between a quarter and four times."""
    base = BASES[draw(st.sampled_from(bases))]
    factors = {key: 2.0 ** draw(st.floats(-2, 2)) for key in (*RATES, *SIZES)}
    values = {key: getattr(base, key) * factor for key, factor in factors.items()}
    # a miss takes longer than a hit
    values["hbm_latency_s"] = max(values["hbm_latency_s"], 1.1 * values["l2_latency_s"])
    values["num_sms"] = max(1, round(values["num_sms"]))
    return with_values(base, values, name="random")


PASSES = ("fwd", "fwd", "bwd", "fwd_bwd")


@st.composite
def problems(draw, passes=PASSES):
    """A problem of up to a hundred thousand tile iterations."""
    kv_heads = draw(st.sampled_from([1, 2, 5]))
    seqlen_q = draw(st.one_of(st.integers(1, 300), st.integers(300, 3000)))
    seqlen_k = draw(st.one_of(st.just(seqlen_q), st.integers(1, 3000)))
    return AttentionProblem(
        batch=draw(st.integers(1, 4)),
        heads=kv_heads * draw(st.sampled_from([1, 4, 8])),
        kv_heads=kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=draw(st.sampled_from([40, 64, 96, 128, 192, 256])),
        dtype=draw(st.sampled_from(["fp16", "bf16"])),
        causal=draw(st.booleans()),
        pass_=draw(st.sampled_from(passes)),
    )


def taken(algorithm: str, problem: AttentionProblem) -> AttentionProblem:
    """``problem``, forward where the algorithm has no other pass."""
    return problem.with_(pass_="fwd") if algorithm == "flash_decoding" else problem


def run(algorithm: str, problem: AttentionProblem, gpu, **how):
    """Simulate, or drop the example where the kernel does not take the problem."""
    try:
        return simulate(algorithm, taken(algorithm, problem), gpu, hypothetical=True, **how)
    except InputError:
        assume(False)


def program(algorithm: str, problem: AttentionProblem, gpu):
    """The program that :func:`run` times."""
    from algorithms import build_program

    return build_program(algorithm, taken(algorithm, problem), gpu, hypothetical=True)


# Bounds --------------------------------------------------------------------------------------------------------------
#: Found at night: copies of K for each query head, bound by the ALU of SMs that hold 16 CTAs while others are launched.
CROWDED = (
    AttentionProblem(batch=3, heads=8, kv_heads=1, seqlen_q=1, seqlen_k=527, head_dim=256, dtype="fp16"),
    with_values(
        BASES["a100_sxm4_80gb"], {"num_sms": 54, "alu_per_cycle_per_sm": 22.6, "issue_slots_per_cycle_per_sm": 8.0}
    ),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@laws(40)
@given(problem=problems(), gpu=hardware())
@example(*CROWDED)
def test_no_run_beats_its_resources(algorithm, problem, gpu):
    physics = Physics()
    result = run(algorithm, problem, gpu, clock_mhz=CLOCK_MHZ, physics=physics)
    kernels = program(algorithm, problem, gpu).kernels
    clock_hz = CLOCK_MHZ * 1e6
    assert len(kernels) == len(result.kernels)
    for kernel, got in zip(kernels, result.kernels, strict=True):
        seconds = got.time_us * 1e-6
        spec = SmSpec.of(gpu, physics, kernel.path, kernel.compute_dtype)
        sms = min(gpu.num_sms, kernel.ctas)
        rates = {"exp": spec.exp, "fma": spec.fma, "alu": spec.alu, "convert": spec.convert}
        if got.work["matmul"]:
            rates["matmul"] = gpu.tensor_rate(kernel.path, _tensor_dtype(kernel))
        for unit, rate in rates.items():
            # a loop's period is known to 0.1 %; 0.11 % was found at night (ALU of unfused attention)
            assert seconds >= got.work[unit] / rate / sms / clock_hz * 0.998, unit
        hbm = (got.hbm_read_bytes + got.hbm_write_bytes) / gpu.hbm_bandwidth_bytes_per_s
        # extrapolated launches count the drain of posted writes once
        assert seconds >= hbm * 0.99
        l2 = (got.l2_read_bytes + got.l2_write_bytes) / gpu.l2_bandwidth_bytes_per_s / physics.l2_bandwidth_fraction
        assert seconds >= l2 * 0.99
        assert got.ctas == kernel.ctas
        assert 1 <= got.ctas_per_sm == occupancy(kernel, gpu)
    assert result.time_us >= max(k.start_us + k.time_us for k in result.kernels) * 0.999999
    assert result.executed_flops >= result.flops * products_made(algorithm, result.problem.pass_)


def products_made(algorithm: str, pass_: str) -> float:
    """Share of the nominal products that a schedule has to make: unfused attention reads P again in its backward pass,
    whose nominal five products include making it (two forward)."""
    return {"fwd": 1.0, "bwd": 4 / 5, "fwd_bwd": 6 / 7}[pass_] if algorithm == "standard" else 1.0


def _tensor_dtype(kernel) -> str:
    return kernel.compute_dtype if kernel.compute_dtype != "fp32" else "bf16"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@laws(40)
@given(
    problem=problems(),
    gpu=hardware(),
    timing=st.sampled_from(["kernel", "graph", "eager"]),
    l2_state=st.sampled_from(["cold", "warm"]),
)
def test_results_are_finite_named_and_add_up(algorithm, problem, gpu, timing, l2_state):
    result = run(algorithm, problem, gpu, timing=timing, l2_state=l2_state)
    numbers = json.loads(json.dumps(result.to_json()), parse_constant=lambda name: pytest.fail(f"{name} in a result"))
    assert all(value >= 0 for value in _numbers({k: v for k, v in numbers.items() if k != "problem"}))
    assert result.limiter in LIMITERS
    assert set(result.waits) <= set(LIMITERS)
    assert sum(result.waits.values()) == pytest.approx(1.0, abs=0.03)
    assert type(result.time_us) is float and result.time_us > 0 and math.isfinite(result.tflops)
    for name in ("hbm_read_bytes", "hbm_write_bytes", "dirty_bytes_at_end", "l2_read_bytes", "l2_write_bytes", "flops"):
        assert isinstance(getattr(result, name), int), name
    for kernel in result.kernels:
        assert sum(kernel.waits.values()) == pytest.approx(1.0, abs=0.03)


def _numbers(data):
    """Every number in nested plain data."""
    if isinstance(data, dict):
        for value in data.values():
            yield from _numbers(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _numbers(value)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield data


# Bytes ---------------------------------------------------------------------------------------------------------------
def unique_bytes(kernels) -> tuple[dict[str, int], dict[str, int]]:
    """Distinct bytes by tensor that ``kernels`` read before they were written, and that they write.

    From the tiles of every CTA and iteration, each marked in a bitmap of its tensor. CTAs go one after another,
    reads before writes: a CTA (FlashAttention-1's key block) may read what an earlier one wrote.
    """
    from simulator.accesses import kernel_accesses

    seen: dict[str, np.ndarray] = {}
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    # a rectangle that was marked before adds nothing, and most are accessed by many CTAs
    marked: set[tuple] = set()
    for kernel in kernels:
        accesses = sorted(kernel_accesses(kernel), key=lambda access: access.is_write)
        for cta in range(kernel.ctas):
            env = {name: int(values[cta]) for name, values in kernel.coords.items()}
            for access in accesses:
                t = access.tile.tensor
                size = t.bytes // (t.heads * t.rows * t.cols)
                if t.name not in seen:
                    seen[t.name] = np.zeros((2, t.heads, t.rows, t.cols), bool)
                was_read, was_written = seen[t.name]
                for edges in _rectangles(access, access.loops, env):
                    key = (t.name, access.is_write, access.accumulate, edges)
                    if key in marked:
                        continue
                    marked.add(key)
                    head, r0, r1, c0, c1 = edges
                    where = head, slice(r0, r1), slice(c0, c1)
                    if not access.is_write or access.accumulate:
                        fresh = int((~(was_read[where] | was_written[where])).sum())
                        was_read[where] = True
                        read[t.name] = read.get(t.name, 0) + fresh * size
                    if access.is_write:
                        fresh = int((~was_written[where]).sum())
                        was_written[where] = True
                        written[t.name] = written.get(t.name, 0) + fresh * size
    return tuple({name: count for name, count in found.items() if count} for found in (read, written))


def _rectangles(access, loops, env):
    """The clipped rectangle of ``access`` (head, rows from and to, columns) for every iteration of one CTA."""
    if loops:
        for i in range(max(0, int(loops[0].count.at(env)))):
            yield from _rectangles(access, loops[1:], env | {loops[0].var: i})
        return
    place, t = access.tile, access.tile.tensor
    head, row, col = (int(x.at(env)) for x in (place.head, place.row, place.col))
    r0, r1, c0, c1 = max(row, 0), min(row + place.rows, t.rows), max(col, 0), min(col + place.cols, t.cols)
    if 0 <= head < t.heads and r1 > r0 and c1 > c0:
        yield head, r0, r1, c0, c1


SMALL = st.builds(
    AttentionProblem,
    batch=st.integers(1, 2),
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    seqlen_q=st.integers(1, 500),
    seqlen_k=st.integers(1, 500),
    head_dim=st.sampled_from([64, 128]),
    causal=st.booleans(),
    pass_=st.sampled_from(PASSES),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@laws(40)
@given(problem=SMALL, l2_bytes=st.sampled_from([3e5, 2e6, 6e7]))
def test_a_cold_run_reads_at_least_what_is_unique(algorithm, problem, l2_bytes):
    gpu = with_values(GPU, {"l2_bytes": l2_bytes})
    result = run(algorithm, problem, gpu, clock_mhz=CLOCK_MHZ)
    got = {n: t.hbm_read_bytes for n, t in result.traffic_by_tensor().items()}
    for name, unique in unique_bytes(program(algorithm, problem, gpu).kernels)[0].items():
        assert got[name] >= unique, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@laws(40)
@given(problem=SMALL)
def test_an_infinite_l2_moves_exactly_what_is_unique(algorithm, problem):
    gpu = with_values(GPU, {"l2_bytes": 1e12})
    result = run(algorithm, problem, gpu, clock_mhz=CLOCK_MHZ)
    kernels = program(algorithm, problem, gpu).kernels
    got = {n: t.hbm_read_bytes for n, t in result.traffic_by_tensor().items() if t.hbm_read_bytes}
    read, written = unique_bytes(kernels)
    assert got == read
    assert result.hbm_write_bytes == 0
    assert result.dirty_bytes_at_end == sum(written.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@laws(40)
@given(problem=SMALL, l2_bytes=st.sampled_from([1e5, 1e6, 6e7]))
def test_what_is_written_reaches_memory_or_stays_dirty(algorithm, problem, l2_bytes):
    gpu = with_values(GPU, {"l2_bytes": l2_bytes})
    result = run(algorithm, problem, gpu, clock_mhz=CLOCK_MHZ)
    unique = sum(unique_bytes(program(algorithm, problem, gpu).kernels)[1].values())
    assert unique <= result.hbm_write_bytes + result.dirty_bytes_at_end <= result.l2_write_bytes
    assert result.dirty_bytes_at_end <= l2_bytes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@laws(40)
@given(problem=problems())
def test_without_an_l2_memory_sees_what_the_sms_ask(algorithm, problem):
    gpu = with_values(GPU, {"l2_bytes": 1})
    result = run(algorithm, problem, gpu, clock_mhz=CLOCK_MHZ)
    assert result.dirty_bytes_at_end == 0
    assert result.hbm_write_bytes == result.l2_write_bytes
    exact: dict[str, list[int]] = {}
    added = 0
    for kernel in program(algorithm, problem, gpu).kernels:
        for name, moved in sm_traffic(kernel).items():
            exact[name] = [a + b for a, b in zip(exact.get(name, [0, 0]), moved, strict=True)]
            # L2 adds to what memory holds: it has to be read, though no SM asks for it
            kinds = {op.accumulate for *_, op in kernel.walk() if isinstance(op, Store) and op.into.tensor.name == name}
            assert len(kinds) < 2
            added += moved[1] if True in kinds else 0
        for name, unseen in unseen_read_bytes(kernel, gpu).items():
            exact[name][0] -= unseen
    assert result.hbm_read_bytes == result.l2_read_bytes + added
    assert result.l2_read_bytes == sum(r for r, _ in exact.values())
    assert result.l2_write_bytes == sum(w for _, w in exact.values())


@laws(15)
@given(problem=problems(), gpu=hardware(("h200_sxm",)))
def test_bytes_between_sm_and_l2_do_not_depend_on_rates_or_caches(problem, gpu):
    # SMs decide occupancy and spills; everything else may change at will
    gpu = with_values(gpu, {"num_sms": GPU.num_sms})
    for algorithm in ("fa2", "fa3"):
        here, there = (run(algorithm, problem, g, clock_mhz=CLOCK_MHZ) for g in (GPU, gpu))
        assert here.l2_read_bytes == there.l2_read_bytes
        assert here.l2_write_bytes == there.l2_write_bytes


@laws(10)
@given(problem=problems())
def test_a_warm_l2_reads_no_more_than_a_cold_one(problem):
    for algorithm in ("fa2", "fa3"):
        cold, warm = (run(algorithm, problem, GPU, clock_mhz=CLOCK_MHZ, l2_state=state) for state in ("cold", "warm"))
        assert warm.hbm_read_bytes <= cold.hbm_read_bytes
        assert warm.l2_read_bytes == cold.l2_read_bytes
        # earlier data can put warpgroups in step (see MOST_ANOMALIES): 1.4 % was the worst of some hundred problems.
        # FA2's causal CTAs are handed out unequal: of a night's problems one run was 4.4 % longer, though
        # its CTAs were shorter
        unequal = algorithm == "fa2" and problem.causal
        assert warm.time_us <= (WORST_ANOMALY if unequal else 1.03) * cold.time_us


# Monotonicity --------------------------------------------------------------------------------------------------------
#: Arbitration may cost 1 %. Two effects go beyond it, in few designs. List scheduling of unequal CTAs (FA2's causal
#: grid) has Graham's anomalies: a CTA that ends earlier moves a long one to another slot. And warpgroups that take
#: turns at pipes have several steady states; a faster unit may tip them into a slower one.
ARBITRATION = 1.01
MOST_ANOMALIES = 0.12
WORST_ANOMALY = 1.25


def random_designs(seed: int, count: int):
    """``count`` pairs of a problem and a GPU, and a random generator to improve the GPU with."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        base = BASES[str(rng.choice(list(BASES)))]
        values = {key: getattr(base, key) * 2.0 ** rng.uniform(-2, 2) for key in (*RATES, *SIZES)}
        values["hbm_latency_s"] = max(values["hbm_latency_s"], 1.1 * values["l2_latency_s"])
        kv_heads = int(rng.choice([1, 2, 5]))
        seqlen_q = int(rng.integers(1, 4000))
        yield (
            AttentionProblem(
                batch=int(rng.integers(1, 5)),
                heads=kv_heads * int(rng.choice([1, 4, 8])),
                kv_heads=kv_heads,
                seqlen_q=seqlen_q,
                seqlen_k=seqlen_q if rng.random() < 0.5 else int(rng.integers(1, 4000)),
                head_dim=int(rng.choice([40, 64, 96, 128, 192, 256])),
                causal=bool(rng.integers(2)),
            ),
            with_values(base, values, name="random"),
            rng,
        )


def improved(gpu, key: str, factor: float):
    """``gpu`` with one rate ``factor`` times better."""
    if key == "tensor_rate":
        return apply_overrides(gpu, {key: f"x{factor}"})
    better = 1 / factor if RATES[key] < 1 else factor
    return with_values(gpu, {key: getattr(gpu, key) * better}, name="random")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_improving_one_rate_never_slows_a_run(algorithm):
    ratios = []
    # the tests of FA2 and FA3 are cheap, those of the others take seconds a design
    for problem, gpu, rng in random_designs(seed=11, count=MORE * (40 if algorithm in ("fa2", "fa3") else 16)):
        key = str(rng.choice([*RATES, "tensor_rate"]))
        better = improved(gpu, key, 2.0 ** rng.uniform(0.1, 1.0))
        if better.hbm_latency_s <= better.l2_latency_s:
            continue
        try:
            before, after = (
                simulate(algorithm, problem, g, hypothetical=True, clock_mhz=CLOCK_MHZ) for g in (gpu, better)
            )
        except InputError:
            continue
        assert after.l2_read_bytes == before.l2_read_bytes
        ratios.append((after.time_us / before.time_us, key, problem))
    slower = [r for r in ratios if r[0] > ARBITRATION]
    assert len(ratios) > 8
    assert len(slower) <= max(1, MOST_ANOMALIES * len(ratios)), slower
    assert max(r[0] for r in ratios) <= WORST_ANOMALY


@pytest.mark.parametrize("key", [*RATES, "tensor_rate"])
def test_on_the_gpu_that_exists_every_rate_helps_or_does_nothing(key):
    """CTAs of equal length, or handed out longest first: no anomaly of list scheduling hides the rate's own effect."""
    problem = AttentionProblem(batch=2, heads=16, kv_heads=4, seqlen_q=4096, head_dim=128)
    for algorithm, causal in (("fa2", False), ("fa3", False), ("fa3", True)):
        before = simulate(algorithm, problem.with_(causal=causal), GPU, clock_mhz=CLOCK_MHZ).time_us
        for factor in (1.1, 1.3):
            better = improved(GPU, key, factor)
            after = simulate(algorithm, problem.with_(causal=causal), better, clock_mhz=CLOCK_MHZ).time_us
            assert after <= ARBITRATION * before


@laws(10)
@given(problem=problems(), clock=st.integers(800, 1900))
def test_a_faster_clock_never_slows_a_run(problem, clock):
    for algorithm in ("fa2", "fa3"):
        slow, fast = (run(algorithm, problem, GPU, clock_mhz=c) for c in (clock, clock * 1.1))
        assert fast.time_us <= ARBITRATION * slow.time_us
        assert fast.time_us >= slow.time_us / 1.1 * 0.99


# The design space ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_random_designs_never_crash():
    """Hundreds of designs, rates changed by up to sixteen times: a result or one clear line, nothing else."""
    rng = np.random.default_rng(2)
    done = 0
    for _ in range(250 * MORE):
        base = BASES[str(rng.choice(list(BASES)))]
        factors = {k: 2.0 ** rng.uniform(-4, 4) for k in (*RATES, *SIZES)}
        values = {k: max(1, getattr(base, k) * f) if k in SIZES else getattr(base, k) * f for k, f in factors.items()}
        values["smem_bytes_per_sm"] = base.smem_bytes_per_sm * 2.0 ** rng.uniform(-2, 2)
        kv_heads = int(rng.choice([1, 2, 8]))
        problem = AttentionProblem(
            batch=int(rng.integers(1, 9)),
            heads=kv_heads * int(rng.choice([1, 2, 8])),
            kv_heads=kv_heads,
            seqlen_q=int(2 ** rng.uniform(0, 12)),
            seqlen_k=int(2 ** rng.uniform(0, 13)),
            head_dim=int(rng.choice([32, 64, 80, 128, 160, 256])),
            causal=bool(rng.integers(2)),
        )
        algorithm = str(rng.choice(ALGORITHMS))
        try:
            gpu = with_values(base, values)
            result = simulate(algorithm, problem, gpu, hypothetical=True)
        except InputError as why:
            assert str(why) and "\n" not in str(why)
            continue
        assert math.isfinite(result.time_us) and result.time_us > 0
        assert min(result.hbm_read_bytes, result.hbm_write_bytes, result.dirty_bytes_at_end) >= 0
        done += 1
    assert done > 150 * MORE
