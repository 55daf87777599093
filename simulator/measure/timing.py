"""Time cases on the GPU: cold or warm L2, CUDA graph or queued launches, with the SM clock counted by the SMs
themselves.

Method. Cold: before each repetition a kernel *reads* a 512 MB buffer (writing would leave dirty lines that the timed
kernel pays for). ``graph``: events around one graph replay, queued behind the flush. ``kernel``: the kernels are
launched one by one behind a flush long enough to hide their launches, so the time holds no launch gap of the host.
``eager``: the GPU is idle when the first launch starts. The clock comes from two one-warp-a-SM kernels around the case
that read each SM's cycle counter and the global nanosecond timer: Δcycles/Δtime, median over the SMs (NVML reports the
boost clock even while the SMs run slower).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.errors import InputError
from simulator.measure import kernels
from simulator.measure.cases import Case
from simulator.measure.cuda_module import CudaModule
from simulator.measure.cuda_sources import TIMING_SOURCE

FLUSH_BYTES = 512_000_000
HIDE_LAUNCHES_CYCLES = 4_000_000  # about 2 ms: longer than any case takes to launch from Python
SECONDS_A_CASE = 0.04  # repetitions stop here: longer bursts run into the power cap's slow control loop
SETTLE_SECONDS = 0.10  # idle before a case, so that the one before it does not lower this one's clock
MAX_REPETITIONS = 25


#: Launches work on the current stream; called without arguments (it may have defaults).
Launch = Callable[..., object]


@dataclass(frozen=True)
class Timing:
    """Result of one case: times in µs over ``n`` repetitions, clock in MHz, power in W, temperature in °C."""

    median_us: float
    min_us: float
    p90_us: float
    n: int
    sm_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    method: str


class Board:
    """Power and temperature of GPU 0 through NVML; every reading is None when nvidia-ml-py or NVML is missing."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            self._nvml = None

    def power_w(self) -> float | None:
        """Board power in watts."""
        try:
            return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000 if self._nvml else None
        except self._nvml.NVMLError:
            return None

    def temperature_c(self) -> float | None:
        """GPU temperature in degrees Celsius."""
        try:
            sensor = self._nvml.NVML_TEMPERATURE_GPU if self._nvml else None
            return float(self._nvml.nvmlDeviceGetTemperature(self._handle, sensor)) if self._nvml else None
        except self._nvml.NVMLError:
            return None

    def driver(self) -> str:
        """Driver version, or an empty string."""
        try:
            return str(self._nvml.nvmlSystemGetDriverVersion()) if self._nvml else ""
        except self._nvml.NVMLError:
            return ""


def quantile(values: list[float], fraction: float) -> float:
    """Nearest-rank quantile of a non-empty list (the median of an even count is the mean of the middle two)."""
    ordered = sorted(values)
    if fraction == 0.5 and len(ordered) % 2 == 0:
        return (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class Timer:
    """Holds the flush buffer and the helper kernels; one a process."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.board = Board()
        self.module = CudaModule(TIMING_SOURCE)
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._flush_buffer = torch.randint(0, 2**31 - 1, (FLUSH_BYTES // 4,), device="cuda", dtype=torch.int32)
        self._sink = torch.zeros(4, device="cuda", dtype=torch.int32)
        self._stamps = torch.zeros(2 * MAX_REPETITIONS, self.sms * 3, device="cuda", dtype=torch.int64)
        self.stream = torch.cuda.Stream()

    def flush(self) -> None:
        """Queue the read of a buffer eight times the size of L2."""
        self.module["iosim_flush_l2"](self.sms * 4, 512, self._flush_buffer, FLUSH_BYTES // 16, self._sink)

    def stamp(self, which: int) -> None:
        """Queue a reading of every SM's cycle counter and of the global timer into a slot."""
        self.module["iosim_stamp"](self.sms, 32, self._stamps[which])

    def clock_mhz(self, before_slot: int = 0, after_slot: int = 1) -> float | None:
        """Median over the SMs of Δcycles/Δtime between two stamps (waits for the GPU)."""
        self.torch.cuda.synchronize()
        before, after = (
            {row[0]: (row[1], row[2]) for row in self._stamps[slot].view(-1, 3).tolist()}
            for slot in (before_slot, after_slot)
        )
        rates = [
            (after[sm][0] - before[sm][0]) * 1e3 / (after[sm][1] - before[sm][1])
            for sm in before
            if sm in after and after[sm][1] > before[sm][1]
        ]
        return quantile(rates, 0.5) if rates else None

    def measure_clock(self, run: Launch, repetitions: int = 3, cold: bool = True) -> float | None:
        """SM clock in MHz while ``run`` executes, median over ``repetitions``."""
        rates = []
        for _ in range(repetitions):
            self.torch.cuda._sleep(HIDE_LAUNCHES_CYCLES // 4)
            if cold:
                self.flush()
            self.stamp(0)
            run()
            self.stamp(1)
            if (rate := self.clock_mhz()) is not None:
                rates.append(rate)
        return quantile(rates, 0.5) if rates else None

    def capture(self, run: Launch) -> Any:
        """A CUDA graph of ``run``, which must have run once before on this stream."""
        graph = self.torch.cuda.CUDAGraph()
        self.torch.cuda.synchronize()
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
        return graph

    def time_events(
        self,
        launch: Launch,
        repetitions: int,
        *,
        cold: bool,
        hide: bool,
        idle: bool = False,
        stamps: bool = False,
    ) -> list[float]:
        """Event times in µs of ``launch``, one a repetition.

        ``hide`` queues a spin first, ``idle`` waits for the GPU first, ``stamps`` fills slots 2i and 2i+1 around the
        events.
        """
        torch = self.torch
        pairs = []
        for index in range(repetitions):
            if hide:
                torch.cuda._sleep(HIDE_LAUNCHES_CYCLES)
            if cold:
                self.flush()
            if stamps:
                self.stamp(2 * index)
            if idle:
                torch.cuda.synchronize()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            launch()
            pair[1].record()
            if stamps:
                self.stamp(2 * index + 1)
            pairs.append(pair)
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]

    def time_case(self, case: Case) -> Timing:
        """Prepare, warm up, time and clock one case. Raises :class:`InputError` when the kernel refuses it."""
        torch = self.torch
        kernel = kernels.kernel_of(case)
        if reason := kernel.needs() or kernel.refuse(case):
            raise InputError(reason)
        torch.manual_seed(0)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            prepared = kernel.prepare(case)
            prepared.run()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            prepared.run()
            torch.cuda.synchronize()
            estimate_s = time.perf_counter() - begin
            least = 3 if estimate_s > 0.01 else 7
            repetitions = max(least, min(MAX_REPETITIONS, int(SECONDS_A_CASE / estimate_s)))
            cold = case.l2_state == "cold"
            method = case.timing
            launch = prepared.run
            if case.timing == "graph":
                if not prepared.graph_safe:
                    raise InputError(f"{kernel.name} cannot be captured in a graph; ask for timing=kernel")
                graph = self.capture(prepared.run)
                graph.replay()
                launch = graph.replay
                torch.cuda.synchronize()
            time.sleep(SETTLE_SECONDS)
            hide = case.timing == "kernel" or (case.timing == "graph" and not cold)
            idle = case.timing == "eager"
            times = self.time_events(launch, repetitions, cold=cold, hide=hide, idle=idle, stamps=True)
            counted = [self.clock_mhz(2 * index, 2 * index + 1) for index in range(repetitions)]
            rates = [rate for rate in counted if rate is not None]
            clock = quantile(rates, 0.5) if rates else None
            power, temperature = self.board.power_w(), self.board.temperature_c()
        return Timing(
            quantile(times, 0.5), min(times), quantile(times, 0.9), len(times), clock, power, temperature, method
        )
