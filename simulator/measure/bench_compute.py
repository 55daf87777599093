"""Microbenchmarks of the SM: arithmetic pipes, shared memory, tensor cores; launches; the clock under load."""

from __future__ import annotations

import time
from collections.abc import Iterator

from simulator.measure import cuda_sources as sources
from simulator.measure.bench import Bench, Row
from simulator.measure.cuda_module import CudaModule
from simulator.measure.timing import Launch, quantile

ROUND_CHAINS = 4 * 8  # elements a thread and trip of the pipe kernels


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
                "pipe_" + name,
                f"threads_an_sm={threads}",
                work,
                lambda k=kernel, t=threads: k(bench.sms, t, bench.sink, bench.cycles, iterations, 0.001),
                bench.sms,
                "elements/clk/SM",
            )
    shared = CudaModule(sources.SHARED_SOURCE)
    for name in ("shared_read", "shared_ldmatrix"):
        for threads in (128, 256, 512, 1024):
            yield bench.cycle_rate(
                name,
                f"threads_an_sm={threads}",
                float(threads * 16 * 8 * iterations),
                lambda n=name, t=threads: shared[n](
                    bench.sms, t, bench.sink, bench.cycles, iterations, 0, shared_bytes=40960
                ),
                bench.sms,
                "bytes/clk/SM",
            )
    for threads in (128, 256, 384, 1024):
        row = bench.cycle_rate(
            "barrier",
            f"threads={threads}",
            8.0 * iterations,
            lambda t=threads: shared["barrier"](bench.sms, t, bench.sink, bench.cycles, iterations, 0),
            bench.sms,
            "",
        )
        yield Row("barrier", row.parameters, "latency", "cycles", 1 / row.value, 1 / row.best, row.n, row.clock_mhz)


def tensor_paths(bench: Bench) -> Iterator[Row]:
    """FLOP per clock and SM of mma.sync and wgmma, alone and beside exponentials."""
    iterations = 512
    mma_flop = 2 * 16 * 8 * 16 * 8  # eight m16n8k16 a trip and warp
    for warps in (4, 8, 16):
        kernel = CudaModule(sources.mma_source(warps))["mma"]
        yield bench.cycle_rate(
            "mma_sync_bf16",
            f"warps_an_sm={warps}",
            float(mma_flop * warps * iterations),
            lambda k=kernel, w=warps: k(bench.sms, 32 * w, bench.sink, bench.cycles, iterations, 0.5),
            bench.sms * warps,
            "FLOP/clk/SM",
        )
    for inner in (1, 2, 4):
        kernel = CudaModule(sources.mma_source(8, 1, inner))["mma"]
        yield bench.cycle_rate(
            "mma_sync_bf16_same_warp_ex2",
            f"warps_an_sm=8;ex2_a_mma={inner}",
            float(mma_flop * 8 * iterations),
            lambda k=kernel: k(bench.sms, 256, bench.sink, bench.cycles, iterations, 0.5),
            bench.sms * 8,
            "FLOP/clk/SM",
        )
    kernel = CudaModule(sources.mma_source(8, 1))["mma"]
    yield bench.cycle_rate(
        "mma_sync_bf16_other_warps_ex2",
        "warps_an_sm=8+8;ex2_a_mma=1",
        float(mma_flop * 8 * iterations),
        lambda: kernel(bench.sms, 512, bench.sink, bench.cycles, iterations, 0.5),
        bench.sms * 16,
        "FLOP/clk/SM",
    )
    for columns in (64, 128, 176, 256):
        module = CudaModule(sources.wgmma_source(columns))["wgmma"]
        for groups in (1, 2):
            yield bench.cycle_rate(
                "wgmma_bf16",
                f"shape=m64n{columns}k16;warpgroups={groups}",
                float(2 * 64 * columns * 16 * 8 * 256 * groups),
                lambda m=module, g=groups: m(
                    bench.sms, 128 * g, bench.sink, bench.cycles, 256, 0.5, shared_bytes=98304
                ),
                bench.sms * groups,
                "FLOP/clk/SM",
            )


def gemms(bench: Bench) -> Iterator[Row]:
    """Library matrix products: TFLOP/s and clock, short (one cold launch) and sustained, by dtype."""
    torch = bench.torch
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for size in (2048, 4096, 8192):
            a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
            launch = lambda a=a, b=b: torch.mm(a, b)  # noqa: E731 - bound per shape
            times = bench.events(launch, 7, cold=True)
            clock = bench.timer.measure_clock(launch, 3, True)
            rate, best = (2 * size**3 / t / 1e6 for t in (quantile(times, 0.5), min(times)))
            yield Row("gemm_short", f"dtype={name};n={size}", "rate", "TFLOP/s", rate, best, len(times), clock)
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def fp8() -> None:
        torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    times = bench.events(fp8, 7, cold=True)
    clock = bench.timer.measure_clock(fp8, 3, True)
    rate, best = (2 * 8192**3 / t / 1e6 for t in (quantile(times, 0.5), min(times)))
    yield Row("gemm_short", "dtype=fp8;n=8192", "rate", "TFLOP/s", rate, best, len(times), clock)


def launches(bench: Bench) -> Iterator[Row]:
    """Launch costs: empty kernels in a stream and in a graph, by length of the chain; an empty event pair."""
    torch, timer = bench.torch, bench.timer
    empty = timer.module["iosim_empty"]
    with torch.cuda.stream(timer.stream):
        times = timer.time_events(lambda: None, 25, cold=False, hide=True)
        yield Row("event_pair", "between=nothing", "time", "us", quantile(times, 0.5), min(times), len(times))
        for count in (1, 2, 3, 4, 8, 32, 128):

            def chain(count: int = count) -> None:
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
    loads: dict[str, Launch] = {
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

            def burst(count: int = count, launch: Launch = launch) -> None:
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
