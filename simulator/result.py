"""What a simulation says: plain data that prints itself, becomes a table row and serialises to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from simulator.problem import AttentionProblem

LIMITERS = ("tensor", "exp", "fp32", "smem", "l2", "hbm", "latency", "imbalance", "launch")


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes of one tensor in one kernel: SM<->L2 requests and what of them went to or came from HBM."""

    tensor: str
    l2_read_bytes: int = 0
    l2_write_bytes: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0


@dataclass(frozen=True)
class KernelResult:
    """One kernel launch. ``waits`` is the share of the launch's time by cause (sums to 1).

    ``empty`` is the share of the running time that CTA slots are without a CTA, whatever they wait for.
    """

    name: str
    start_us: float
    time_us: float
    cycles: float
    ctas: int
    ctas_per_sm: int
    waves: float
    traffic: tuple[TensorTraffic, ...]
    work: Mapping[str, float]
    waits: Mapping[str, float]
    limiter: str
    path: str
    busy: Mapping[str, float] = field(default_factory=dict)
    compute_dtype: str = "bf16"
    empty: float = 0.0
    launched_ctas: int = 0

    def _sum(self, name: str) -> int:
        return sum(getattr(t, name) for t in self.traffic)

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes read from HBM during the launch."""
        return self._sum("hbm_read_bytes")

    @property
    def hbm_write_bytes(self) -> int:
        """Bytes written to HBM during the launch (evictions of dirty lines)."""
        return self._sum("hbm_write_bytes")

    @property
    def l2_read_bytes(self) -> int:
        """Bytes that SMs read from L2."""
        return self._sum("l2_read_bytes")

    @property
    def l2_write_bytes(self) -> int:
        """Bytes that SMs wrote to L2."""
        return self._sum("l2_write_bytes")


@dataclass(frozen=True)
class Result:
    """One attention call on one GPU.

    ``time_us`` runs from the first kernel's start to the last kernel's end plus the launch cost of the chosen
    timing. ``work`` counts operations by unit: ``matmul`` in FLOP, ``exp``, ``fma``, ``alu`` and ``convert`` in
    lane-operations. ``waits`` is the share of time by cause over all kernels.
    """

    algorithm: str
    implementation: str
    gpu: str
    problem: AttentionProblem
    time_us: float
    cycles: float
    sm_clock_mhz: float
    dirty_bytes_at_end: int
    flops: int
    executed_flops: int
    work: Mapping[str, float]
    peak_memory_bytes: int
    limiter: str
    waits: Mapping[str, float]
    kernels: tuple[KernelResult, ...]
    unique_bytes: int = 0
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    substitutions: tuple[str, ...] = ()
    spec_tensor_flops: float = 0.0
    path_peak_flops: float = 0.0
    ridge_flop_per_byte: float = 0.0
    l2_state: str = "cold"
    timing: str = "kernel"
    time_low_us: float | None = None
    time_high_us: float | None = None
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def hbm_read_bytes(self) -> int:
        """Bytes read from HBM during the run."""
        return sum(k.hbm_read_bytes for k in self.kernels)

    @property
    def hbm_write_bytes(self) -> int:
        """Bytes written to HBM during the run; what stays dirty in L2 is ``dirty_bytes_at_end``."""
        return sum(k.hbm_write_bytes for k in self.kernels)

    @property
    def l2_read_bytes(self) -> int:
        """Bytes that SMs read from L2."""
        return sum(k.l2_read_bytes for k in self.kernels)

    @property
    def l2_write_bytes(self) -> int:
        """Bytes that SMs wrote to L2."""
        return sum(k.l2_write_bytes for k in self.kernels)

    @property
    def tflops(self) -> float:
        """Nominal TFLOP/s: unmasked FLOPs over time."""
        return self.flops / self.time_us / 1e6 if self.time_us > 0 else 0.0

    @property
    def arithmetic_intensity(self) -> float:
        """Nominal FLOPs per HBM byte (read, written or left dirty)."""
        moved = self.hbm_read_bytes + self.hbm_write_bytes + self.dirty_bytes_at_end
        return self.flops / moved if moved else float("inf")

    def traffic_by_tensor(self) -> dict[str, TensorTraffic]:
        """Bytes by tensor over all kernels."""
        total: dict[str, list[int]] = {}
        for kernel in self.kernels:
            for t in kernel.traffic:
                sums = total.setdefault(t.tensor, [0, 0, 0, 0])
                for i, name in enumerate(("l2_read_bytes", "l2_write_bytes", "hbm_read_bytes", "hbm_write_bytes")):
                    sums[i] += getattr(t, name)
        return {name: TensorTraffic(name, *sums) for name, sums in total.items()}

    def row(self) -> dict[str, object]:
        """The output columns of ``iosim predict``."""
        return {
            "time_us": self.time_us,
            "cycles": self.cycles,
            "sm_clock_mhz": self.sm_clock_mhz,
            "hbm_read_bytes": self.hbm_read_bytes,
            "hbm_write_bytes": self.hbm_write_bytes,
            "dirty_bytes_at_end": self.dirty_bytes_at_end,
            "l2_read_bytes": self.l2_read_bytes,
            "l2_write_bytes": self.l2_write_bytes,
            "flops": self.flops,
            "executed_flops": self.executed_flops,
            "peak_memory_bytes": self.peak_memory_bytes,
            "limiter": self.limiter,
            "warnings": "; ".join(self.warnings),
            "error": "",
            "time_low_us": self.time_low_us,
            "time_high_us": self.time_high_us,
        }

    def to_json(self) -> dict[str, object]:
        """Everything, as JSON-ready data."""
        data = asdict(self)
        data |= {k: v for k, v in self.row().items() if k not in ("warnings", "error")}
        data["warnings"] = list(self.warnings)
        data["tflops"] = self.tflops
        data["arithmetic_intensity"] = self.arithmetic_intensity
        return data

    def __str__(self) -> str:
        moved = (self.hbm_read_bytes + self.hbm_write_bytes) / 1e6
        return (
            f"{self.algorithm} ({self.implementation}) on {self.gpu}: {self.time_us:.1f} us, "
            f"{self.tflops:.0f} TFLOP/s, HBM {moved:.1f} MB, limited by {self.limiter}"
        )
