"""What every microbenchmark shares: the timer, buffers, and the two kinds of rows (bandwidth; work a clock and SM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.measure import cuda_sources as sources
from simulator.measure.cuda_module import CudaModule
from simulator.measure.timing import Launch, Timer, quantile

MIB = 2**20


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

    def buffer(self, size_bytes: int) -> Any:
        """Random int32 buffer of ``size_bytes`` (random data, as attention reads it)."""
        torch = self.torch
        out = torch.empty(size_bytes // 4, device="cuda", dtype=torch.int32)
        for start in range(0, out.numel(), 1 << 28):
            out[start : start + (1 << 28)].random_()
        return out

    def events(self, launch: Launch, repetitions: int = 7, cold: bool = False) -> list[float]:
        """Event times in µs after one warm-up."""
        launch()
        return self.timer.time_events(launch, repetitions, cold=cold, hide=True)

    def bandwidth(
        self,
        name: str,
        parameters: str,
        moved_bytes: float,
        launch: Launch,
        *,
        cold: bool = False,
        repetitions: int = 7,
    ) -> Row:
        """Row of a bandwidth in GB/s (10⁹ bytes a second of event time)."""
        times = self.events(launch, repetitions, cold)
        clock = self.timer.measure_clock(launch, 2, cold)
        rates = moved_bytes / quantile(times, 0.5) / 1e3, moved_bytes / min(times) / 1e3
        return Row(name, parameters, "bandwidth", "GB/s", *rates, len(times), clock)

    def cycle_rate(
        self,
        name: str,
        parameters: str,
        work_an_sm: float,
        launch: Launch,
        ctas: int,
        unit: str,
        repetitions: int = 3,
    ) -> Row:
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
