"""Microbenchmarks of the chip: memory, L2, shared memory, arithmetic pipes, tensor cores, launches and the clock under load.

Each yields rows (benchmark, parameters, quantity, value, unit). Rates "per clock and SM" divide by cycles that the SMs counted
themselves, so they do not depend on the clock; bandwidths are bytes over event time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from simulator.measure import cuda_sources as sources
from simulator.measure.cuda_module import CudaModule
from simulator.measure.results import ResultFile, describe_machine
from simulator.measure.timing import Timer, quantile

COLUMNS = (
    "row_id",
    "benchmark",
    "parameters",
    "quantity",
    "unit",
    "measured_value",
    "measured_best",
    "measured_n",
    "measured_sm_clock_mhz",
    "measured_error",
)
MIB = 2**20
ROUND_CHAINS = 4 * 8  # elements a thread and trip of the pipe kernels


@dataclass(frozen=True)
class Row:
    """One measured value; ``best`` is the best repetition, ``value`` the median."""

    benchmark: str
    parameters: str
    quantity: str
    unit: str
    value: float
    best: float
    n: int
    clock_mhz: float | None = None


class Bench:
    """Shared state of a run: the timer, one large buffer, compiled modules."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.timer = Timer()
        self.sms = self.timer.sms
        self.memory = CudaModule(sources.MEMORY_SOURCE)
        self.sink = torch.zeros(16, device="cuda")
        self.cycles = torch.zeros(1 << 16, device="cuda", dtype=torch.int64)

    def buffer(self, size_bytes: int):
        """Random int32 buffer of ``size_bytes`` (random data, as attention reads it)."""
        torch = self.torch
        out = torch.empty(size_bytes // 4, device="cuda", dtype=torch.int32)
        for start in range(0, out.numel(), 1 << 28):
            out[start : start + (1 << 28)].random_()
        return out

    def events(self, launch: Callable[[], None], repetitions: int = 7, cold: bool = False) -> list[float]:
        """Event times in µs after one warm-up."""
        launch()
        return self.timer.time_events(launch, repetitions, cold=cold, hide=True)

    def bandwidth(self, name: str, parameters: str, moved_bytes: float, launch, *, cold=False, repetitions=7) -> Row:
        """Row of a bandwidth in GB/s (10⁹ bytes a second of event time)."""
        times = self.events(launch, repetitions, cold)
        clock = self.timer.measure_clock(launch, 2, cold)
        rates = moved_bytes / quantile(times, 0.5) / 1e3, moved_bytes / min(times) / 1e3
        return Row(name, parameters, "bandwidth", "GB/s", *rates, len(times), clock)

    def cycle_rate(self, name: str, parameters: str, work_an_sm: float, launch, ctas: int, unit: str, repetitions=3) -> Row:
        """Row of work per clock and SM from the CTAs' own cycle counts (the slowest warp of the slowest CTA counts)."""
        launch()
        rates = []
        for _ in range(repetitions):
            self.cycles.zero_()
            launch()
            self.torch.cuda.synchronize()
            rates.append(work_an_sm / float(self.cycles[:ctas].max()))
        clock = self.timer.measure_clock(launch, 2, False)
        return Row(name, parameters, "rate", unit, quantile(rates, 0.5), max(rates), repetitions, clock)


def hbm_streams(bench: Bench) -> Iterator[Row]:
    """HBM bandwidth by direction, footprint and read/write mix."""
    memory, grid = bench.memory, bench.sms * 4
    big = bench.buffer(8 << 30)
    other = bench.buffer(8 << 30)
    for size in (256 * MIB, 1 << 30, 4 << 30, 8 << 30):
        label = f"bytes={size}"
        vectors = size // 16
        yield bench.bandwidth("hbm_read", label, size, lambda v=vectors: memory["read_repeat"](grid, 512, big, v, 1, bench.sink))
        yield bench.bandwidth("hbm_write", label, size, lambda v=vectors: memory["write_stream"](grid, 512, other, v, bench.sink))
        yield bench.bandwidth(
            "hbm_copy_chunked", label, 2 * size, lambda v=vectors: memory["copy_chunked"](grid, 512, big, other, v)
        )
        words = size // 4
        yield bench.bandwidth("hbm_copy_torch", label, 2 * size, lambda w=words: other[:w].copy_(big[:w]))
    vectors = (1 << 30) // 16
    for reads, writes in ((4, 1), (3, 1), (2, 1), (1, 1), (1, 2)):
        kernel = CudaModule(sources.mix_source(reads, writes))["mix_stream"]
        yield bench.bandwidth(
            "hbm_mix", f"reads={reads};writes={writes};bytes={1 << 30}", (reads + writes) * (1 << 30),
            lambda k=kernel: k(vectors // 1024, 256, big, other, vectors, 1),
        )  # fmt: skip
    for size in (MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        yield bench.bandwidth(
            "hbm_read_cold_once", f"bytes={size}", size,
            lambda v=size // 16: memory["read_repeat"](grid, 512, big, v, 1, bench.sink), cold=True,
        )  # fmt: skip


def l2_bandwidth(bench: Bench) -> Iterator[Row]:
    """Read bandwidth of a footprint that is read again and again past L1: L2 below its knee, HBM above."""
    data = bench.buffer(256 * MIB)
    for mib in (1, 4, 8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 96, 120, 200):
        repeats = max(4, 2000 // mib)
        yield bench.bandwidth(
            "l2_read", f"bytes={mib * MIB}", mib * MIB * repeats,
            lambda m=mib, r=repeats: bench.memory["read_repeat"](bench.sms * 2, 1024, data, m * MIB // 16, r, bench.sink),
            repetitions=5,
        )  # fmt: skip
    copy = CudaModule(sources.mix_source(1, 1))["mix_stream"]
    for mib in (4, 8, 12, 16, 20, 24):
        yield bench.bandwidth(
            "l2_copy", f"bytes={mib * MIB};counted=read+write", 2 * mib * MIB * 50,
            lambda m=mib: copy(bench.sms * 4, 256, data, data[32 * MIB :], m * MIB // 16, 50),
        )  # fmt: skip
    floats = bench.torch.zeros(64 * MIB // 4, device="cuda")
    for mib in (1, 16, 48):
        words, repeats = mib * MIB // 4, max(2, 64 // mib)
        yield bench.bandwidth(
            "l2_atomic_add_fp32", f"bytes={mib * MIB}", words * 4 * repeats,
            lambda w=words, r=repeats: bench.memory["atomic_add"](bench.sms * 2, 1024, floats, w, r),
        )  # fmt: skip


def latency(bench: Bench) -> Iterator[Row]:
    """Dependent loads over a random cycle of 128-byte lines: L2 and HBM latency in cycles by footprint.

    Each repetition starts elsewhere in the cycle, behind a read of the footprint (up to 64 MiB) or an emptied L2 (above).
    """
    torch = bench.torch
    for mib in (1, 4, 16, 24, 32, 40, 48, 56, 64, 96, 256, 1024, 4096, 16384):
        lines = mib * MIB // 128
        order = torch.randperm(lines, device="cuda")
        chain = torch.empty(lines * 16, device="cuda", dtype=torch.int64)
        chain[order * 16] = order.roll(-1) * 16
        steps = 8192
        values = []
        for repetition in range(5):
            if mib <= 64:  # brings the footprint into L2 as far as it fits
                bench.memory["read_repeat"](bench.sms * 2, 512, chain, lines * 8, 2, bench.sink)
            else:
                bench.timer.flush()
            start = int(order[(repetition * 7919 + 13) * 1000003 % lines]) * 16
            bench.memory["chase"](1, 1, chain, start, steps, bench.cycles)
            torch.cuda.synchronize()
            values.append(float(bench.cycles[0]) / steps)
        yield Row("latency_chase", f"bytes={mib * MIB}", "latency", "cycles", quantile(values, 0.5), min(values), 5)
        del chain, order


def cta_streams(bench: Bench) -> Iterator[Row]:
    """Bandwidth that n CTAs reach, one a SM, by bytes in flight and copy engine; from HBM and from L2."""
    memory = bench.memory
    data = bench.buffer(8 << 30)
    for ctas in (1, 2, 4, 8, 16, 32, 64, 132):
        for stages in (2, 4, 8):
            region = 16 * MIB if ctas <= 32 else 32 * MIB
            yield bench.bandwidth(
                "cta_stream_cp_async", f"ctas={ctas};in_flight_bytes={stages * 16384};source=hbm", region * ctas,
                lambda c=ctas, s=stages, r=region: memory["stream_cp_async"](
                    c, 256, data, r // 16, s, 1, shared_bytes=max(s * 16384, 120_000)),
                cold=True, repetitions=3,
            )  # fmt: skip
        for stages, piece in ((2, 16384), (4, 16384), (8, 16384), (12, 16384), (4, 32768)):
            region = 16 * MIB if ctas <= 32 else 32 * MIB
            yield bench.bandwidth(
                "cta_stream_bulk", f"ctas={ctas};in_flight_bytes={stages * piece};piece_bytes={piece};source=hbm",
                region * ctas,
                lambda c=ctas, s=stages, p=piece, r=region: memory["stream_bulk"](
                    c, 32, data, r, p, s, 1, shared_bytes=max(s * p, 120_000)),
                cold=True, repetitions=3,
            )  # fmt: skip
    for ctas in (1, 8, 132):
        region = 196_608
        for stages in (2, 4, 8):
            yield bench.bandwidth(
                "cta_stream_cp_async", f"ctas={ctas};in_flight_bytes={stages * 16384};source=l2", region * ctas * 32,
                lambda c=ctas, s=stages: memory["stream_cp_async"](
                    c, 256, data, region // 16, s, 32, shared_bytes=max(s * 16384, 120_000)),
                repetitions=3,
            )  # fmt: skip
            yield bench.bandwidth(
                "cta_stream_bulk", f"ctas={ctas};in_flight_bytes={stages * 16384};piece_bytes=16384;source=l2",
                region * ctas * 32,
                lambda c=ctas, s=stages: memory["stream_bulk"](
                    c, 32, data, region, 16384, s, 32, shared_bytes=max(s * 16384, 120_000)),
                repetitions=3,
            )  # fmt: skip


def pipes(bench: Bench) -> Iterator[Row]:
    """Elements per clock and SM of each arithmetic pipe and of mixtures (do the exponential unit and FMA overlap?)."""
    iterations = 256
    for name in sources.PIPE_BODIES:
        kernel = CudaModule(sources.pipe_source(name))["pipe"]
        for threads in (128, 256, 512, 1024) if name in ("ex2", "ffma", "softmax_like") else (512,):
            work = float(threads * iterations * ROUND_CHAINS)
            if name == "convert_bf16x2":
                work /= 2  # one instruction packs two elements; count instructions
            yield bench.cycle_rate(
                "pipe_" + name, f"threads_an_sm={threads}", work,
                lambda k=kernel, t=threads: k(bench.sms, t, bench.sink, bench.cycles, iterations, 0.001),
                bench.sms, "elements/clk/SM",
            )  # fmt: skip
    shared = CudaModule(sources.SHARED_SOURCE)
    for name in ("shared_read", "shared_ldmatrix"):
        for threads in (128, 256, 512, 1024):
            yield bench.cycle_rate(
                name, f"threads_an_sm={threads}", float(threads * 16 * 8 * iterations),
                lambda n=name, t=threads: shared[n](bench.sms, t, bench.sink, bench.cycles, iterations, 0, shared_bytes=40960),
                bench.sms, "bytes/clk/SM",
            )  # fmt: skip
    for threads in (128, 256, 384, 1024):
        row = bench.cycle_rate(
            "barrier", f"threads={threads}", 8.0 * iterations,
            lambda t=threads: shared["barrier"](bench.sms, t, bench.sink, bench.cycles, iterations, 0), bench.sms, "",
        )  # fmt: skip
        yield Row("barrier", row.parameters, "latency", "cycles", 1 / row.value, 1 / row.best, row.n, row.clock_mhz)


def tensor_paths(bench: Bench) -> Iterator[Row]:
    """FLOP per clock and SM of mma.sync and wgmma, alone and beside exponentials."""
    iterations = 512
    mma_flop = 2 * 16 * 8 * 16 * 8  # eight m16n8k16 a trip and warp
    for warps in (4, 8, 16):
        kernel = CudaModule(sources.mma_source(warps))["mma"]
        yield bench.cycle_rate(
            "mma_sync_bf16", f"warps_an_sm={warps}", float(mma_flop * warps * iterations),
            lambda k=kernel, w=warps: k(bench.sms, 32 * w, bench.sink, bench.cycles, iterations, 0.5),
            bench.sms * warps, "FLOP/clk/SM",
        )  # fmt: skip
    for inner in (1, 2, 4):
        kernel = CudaModule(sources.mma_source(8, 1, inner))["mma"]
        yield bench.cycle_rate(
            "mma_sync_bf16_same_warp_ex2", f"warps_an_sm=8;ex2_a_mma={inner}", float(mma_flop * 8 * iterations),
            lambda k=kernel: k(bench.sms, 256, bench.sink, bench.cycles, iterations, 0.5), bench.sms * 8, "FLOP/clk/SM",
        )  # fmt: skip
    kernel = CudaModule(sources.mma_source(8, 1))["mma"]
    yield bench.cycle_rate(
        "mma_sync_bf16_other_warps_ex2", "warps_an_sm=8+8;ex2_a_mma=1", float(mma_flop * 8 * iterations),
        lambda: kernel(bench.sms, 512, bench.sink, bench.cycles, iterations, 0.5), bench.sms * 16, "FLOP/clk/SM",
    )  # fmt: skip
    for columns in (64, 128, 176, 256):
        module = CudaModule(sources.wgmma_source(columns))["wgmma"]
        for groups in (1, 2):
            yield bench.cycle_rate(
                "wgmma_bf16", f"shape=m64n{columns}k16;warpgroups={groups}", float(2 * 64 * columns * 16 * 8 * 256 * groups),
                lambda m=module, g=groups: m(bench.sms, 128 * g, bench.sink, bench.cycles, 256, 0.5, shared_bytes=98304),
                bench.sms * groups, "FLOP/clk/SM",
            )  # fmt: skip


def gemms(bench: Bench) -> Iterator[Row]:
    """Library matrix products: TFLOP/s and clock, short (one cold launch) and sustained, by dtype."""
    torch = bench.torch
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for size in (2048, 4096, 8192):
            a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            launch = lambda a=a, b=b: torch.mm(a, b)  # noqa: E731 - bound per shape
            times = bench.events(launch, 7, cold=True)
            clock = bench.timer.measure_clock(launch, 3, True)
            rates = [2 * size**3 / t / 1e6 for t in (quantile(times, 0.5), min(times))]
            yield Row("gemm_short", f"dtype={name};n={size}", "rate", "TFLOP/s", *rates, len(times), clock)
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    launch = lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    times = bench.events(launch, 7, cold=True)
    clock = bench.timer.measure_clock(launch, 3, True)
    rates = [2 * 8192**3 / t / 1e6 for t in (quantile(times, 0.5), min(times))]
    yield Row("gemm_short", "dtype=fp8;n=8192", "rate", "TFLOP/s", *rates, len(times), clock)


def launches(bench: Bench) -> Iterator[Row]:
    """Launch costs: empty kernels in a stream and in a graph, by length of the chain; an empty event pair."""
    torch, timer = bench.torch, bench.timer
    empty = timer.module["iosim_empty"]
    with torch.cuda.stream(timer.stream):
        times = timer.time_events(lambda: None, 25, cold=False, hide=True)
        yield Row("event_pair", "between=nothing", "time", "us", quantile(times, 0.5), min(times), len(times))
        for count in (1, 2, 3, 4, 8, 32, 128):

            def chain(count=count):
                for _ in range(count):
                    empty(1, 32)

            chain()
            torch.cuda.synchronize()
            graph = timer.capture(chain)
            graph.replay()
            for hide, label in ((True, "queued"), (False, "idle")):
                times = timer.time_events(graph.replay, 15, cold=False, hide=hide, idle=not hide)
                parameters = f"kernels={count};gpu={label}"
                yield Row("graph_replay", parameters, "time", "us", quantile(times, 0.5), min(times), len(times))
            times = timer.time_events(graph.replay, 15, cold=True, hide=False)
            parameters = f"kernels={count};gpu=behind_flush"
            yield Row("graph_replay", parameters, "time", "us", quantile(times, 0.5), min(times), len(times))
            times = timer.time_events(chain, 15, cold=False, hide=True)
            parameters = f"kernels={count};gpu=queued"
            yield Row("stream_launch", parameters, "time", "us", quantile(times, 0.5), min(times), len(times))
            times = timer.time_events(chain, 15, cold=False, hide=False, idle=True)
            parameters = f"kernels={count};gpu=idle"
            yield Row("stream_launch", parameters, "time", "us", quantile(times, 0.5), min(times), len(times))
        for ctas in (132, 1056, 8448, 67584):
            times = timer.time_events(lambda c=ctas: empty(c, 128), 15, cold=False, hide=True)
            parameters = f"ctas={ctas};threads=128"
            yield Row("empty_grid", parameters, "time", "us", quantile(times, 0.5), min(times), len(times))


def clock_under_load(bench: Bench) -> Iterator[Row]:
    """SM clock in MHz for bursts and for seconds of tensor, memory, exponential and mixed work."""
    torch, timer = bench.torch, bench.timer
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    data = bench.buffer(2 << 30)
    exp = CudaModule(sources.pipe_source("ex2"))["pipe"]
    q = torch.randn(4, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    loads = {
        "idle": lambda: torch.cuda._sleep(2_000_000),
        "tensor_gemm_bf16": lambda: torch.mm(a, b),
        "memory_read": lambda: bench.memory["read_repeat"](bench.sms * 4, 512, data, data.numel() // 4, 1, bench.sink),
        "exponential": lambda: exp(bench.sms, 1024, bench.sink, bench.cycles, 4096, 0.001),
        "attention_fa2": lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, False),
    }
    for name, launch in loads.items():
        launch()
        torch.cuda.synchronize()
        duration = min(bench.events(launch, 3)) / 1e6
        for seconds in (0.0, 0.02, 0.2, 1.0):
            count = max(1, int(seconds / duration))

            def burst(count=count, launch=launch):
                for _ in range(count):
                    launch()

            time.sleep(0.3)
            clock = timer.measure_clock(burst, 1, False)
            if clock is None:
                continue
            power = timer.board.power_w()
            yield Row("clock", f"load={name};seconds={seconds}", "sm_clock", "MHz", clock, clock, 1, clock)
            if power is not None and seconds == 1.0:
                yield Row("power", f"load={name};seconds={seconds}", "power", "W", power, power, 1, clock)


BENCHMARKS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "pipes": pipes,
    "tensor": tensor_paths,
    "hbm": hbm_streams,
    "l2": l2_bandwidth,
    "latency": latency,
    "cta": cta_streams,
    "launch": launches,
    "gemm": gemms,
    "clock": clock_under_load,
}


def run_microbench(path: str, deadline_s: float, only: tuple[str, ...] = ()) -> int:
    """Run the benchmarks not yet in ``path``; a failing group is a row with its error. Returns rows in the file."""
    begin = time.monotonic()
    bench = Bench()
    results = ResultFile(path, COLUMNS, [*describe_machine(bench.timer.board.driver()), "method: see simulator/measure"])
    for name, benchmark in BENCHMARKS.items():
        if only and name not in only:
            continue
        if time.monotonic() - begin > deadline_s:
            print(f"stopped at the time limit before {name}", file=sys.stderr)
            break
        started = time.monotonic()
        try:
            for row in benchmark(bench):
                row_id = f"{row.benchmark}[{row.parameters}]"
                if row_id in results.done:
                    continue
                results.append(
                    {
                        "row_id": row_id,
                        "benchmark": row.benchmark,
                        "parameters": row.parameters,
                        "quantity": row.quantity,
                        "unit": row.unit,
                        "measured_value": row.value,
                        "measured_best": row.best,
                        "measured_n": row.n,
                        "measured_sm_clock_mhz": row.clock_mhz,
                    }
                )
        except Exception as error:  # one broken group must not lose the others
            text = f"{type(error).__name__}: {str(error)[:200]}"
            results.append({"row_id": f"{name}[error]", "benchmark": name, "measured_error": text})
        bench.torch.cuda.empty_cache()
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    results.close()
    return len(results.done)
