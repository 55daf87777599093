"""Times of a model's kernels on one GPU: each distinct one simulated once, from an empty L2.

A step repeats for hours, so that the board's power limit holds: kernels on the tensor cores are simulated again at the
clock that it leaves the step as a whole (:mod:`simulator.power`).

Products and softmaxes of very many equal waves are extended from two shorter ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from algorithms import build_program
from algorithms.common import ceil_div
from algorithms.kernels_gemm import GemmKernel
from simulator.model_gemms import choose_gemm
from simulator.model_kernels import Gemm, Stream, TorchSoftmax, gemm_program, softmax_program, stream_program
from simulator.model_programs import AttentionCall, Spec, Work
from simulator.physics import Physics
from simulator.power import Load, sustained_clock_hz
from simulator.profile import Profile
from simulator.program import Program
from simulator.simulation import Conditions, run_program

#: Events of one kernel's replay: a step has some forty distinct kernels.
EVENT_BUDGET = 30_000
ATTENTION_EVENT_BUDGET = 60_000
#: Waves of the shorter of two products from which a longer one's time is extended.
WAVES = 8
#: Inner length by split of the shorter of two products from which one with a longer sum is extended.
INNER = 2048
#: Kernels of unfused attention that a framework's own cut replaces; products and copies of K and V for GQA stay.
REPLACED = ("softmax", "mask", "dp_times_p")
#: Rows of the shorter of two softmaxes from which a longer one is extended: few enough that the replay takes each CTA
#: by itself (CTAs taken together would seem to lose their row from L2 between its passes).
SOFTMAX_ROWS = 6144


@dataclass(frozen=True)
class KernelTime:
    """One launch (or one attention call): time, kernels launched, FLOPs by tensor cores, HBM bytes, limiter,
    exponentials and mean SM clock."""

    time_us: float
    launches: int
    flops: float
    hbm_bytes: float
    limiter: str
    exponentials: float
    clock_hz: float


@dataclass(frozen=True)
class Line:
    """One kernel of a run with its share: ``count`` launches of ``each``."""

    work: Work
    each: KernelTime

    @property
    def time_us(self) -> float:
        """Time of all of them."""
        return self.each.time_us * self.work.count


class Simulator:
    """Simulates specs on one GPU, equal ones once."""

    def __init__(self, gpu: Profile, dtype: str = "bf16") -> None:
        self.gpu, self.dtype = gpu, dtype
        self.physics = _own_bandwidth(gpu, Physics.from_calibration(gpu.calibration_parameters))
        self._known: dict[tuple[Spec, float | None], KernelTime] = {}

    def time(self, spec: Spec, clock_hz: float | None = None) -> KernelTime:
        """What one launch of ``spec`` takes, the gap before it included; ``clock_hz`` bounds the SM clock."""
        key = (spec, clock_hz)
        if key not in self._known:
            parts = _long(spec, self.gpu)
            if parts is None:
                budget = ATTENTION_EVENT_BUDGET if isinstance(spec, AttentionCall) else EVENT_BUDGET
                self._known[key] = self._simulate(self._program(spec), budget, clock_hz)
            else:
                name, short, choice = parts
                lengths: list[dict[str, Any]] = [{name: short}, {name: 2 * short}]
                once, twice = (
                    self._simulate(self._program(replace(spec, **length), choice), EVENT_BUDGET, clock_hz)
                    for length in lengths
                )
                self._known[key] = _extended(once, twice, getattr(spec, name) / short - 2.0)
        return self._known[key]

    def _simulate(self, program: Program, budget: int, clock_hz: float | None) -> KernelTime:
        result = run_program(program, self.gpu, Conditions("cold", "kernel", clock_hz), self.physics, budget)
        return KernelTime(
            result.time_us + self.physics.graph_gap_us,
            len(program.kernels),
            result.work["matmul"],
            float(result.hbm_read_bytes + result.hbm_write_bytes + result.dirty_bytes_at_end),
            result.limiter,
            result.work["exp"],
            result.sm_clock_mhz * 1e6,
        )

    def host_us(self, launches: float, launch: str) -> float:
        """What launching costs the host: a captured graph is launched once, an eager framework prepares every kernel
        while the GPU works."""
        return launches * self.physics.host_launch_us if launch == "eager" else self.physics.graph_launch_us

    def lines(self, works: list[Work], launch: str) -> tuple[tuple[Line, ...], float | None]:
        """Every work of a step that repeats with its time, and the SM clock in Hz to which the power limit holds the
        step (None: it does not bind)."""
        free = tuple(Line(work, self.time(work.spec)) for work in works)
        host_us = self.host_us(sum(line.work.count * line.each.launches for line in free), launch)
        limit = sustained_clock_hz(self.gpu, [_load(line) for line in free], host_us * 1e-6)
        if limit is None:
            return free, None
        held = (self.time(e.work.spec, limit) if e.each.flops else e.each for e in free)
        return tuple(Line(e.work, each) for e, each in zip(free, held, strict=True)), limit

    def _program(self, spec: Spec, choice: tuple[GemmKernel, int] | None = None) -> Program:
        if isinstance(spec, Stream):
            return stream_program(spec, self.dtype)
        if isinstance(spec, Gemm):
            return gemm_program(spec, self.gpu, self.dtype, choice)
        if isinstance(spec, TorchSoftmax):
            return softmax_program(spec, self.gpu)
        program = build_program(spec.algorithm, spec.problem, self.gpu)
        if spec.products_only:
            kept = tuple(k for k in program.kernels if not k.name.startswith(REPLACED))
            program = replace(program, kernels=kept)
        return program


def _long(spec: Spec, gpu: Profile) -> tuple[str, int, tuple[GemmKernel, int] | None] | None:
    """For a product or softmax of very many equal waves, or a product of very long rows: the field of the spec that is
    long, a length of it which (with twice that) stands for all of it, and the kernel that the whole product gets."""
    if isinstance(spec, TorchSoftmax):
        short = ceil_div(SOFTMAX_ROWS, spec.rows)
        return ("matrices", short, None) if spec.matrices >= 4 * short else None
    if not isinstance(spec, Gemm):
        return None
    kernel, splits = choose_gemm(spec.rows, spec.columns, spec.inner, spec.batch, gpu)
    short = splits * INNER
    if spec.inner >= 4 * short:
        return "inner", short, (kernel, splits)
    slots = gpu.num_sms * kernel.ctas_per_sm
    tiles_per_row = ceil_div(spec.columns, kernel.tile_columns) * splits * spec.batch
    short = ceil_div(WAVES * slots, tiles_per_row * kernel.cluster_rows) * kernel.cluster_rows * kernel.tile_rows
    return ("rows", short, (kernel, splits)) if spec.rows >= 4 * short else None


def _extended(short: KernelTime, longer: KernelTime, steps: float) -> KernelTime:
    """``longer`` with ``steps`` more of what it has beyond ``short``."""

    def more(name: str) -> float:
        a: float = getattr(short, name)
        b: float = getattr(longer, name)
        return b + steps * (b - a)

    return KernelTime(
        more("time_us"),
        longer.launches,
        more("flops"),
        more("hbm_bytes"),
        longer.limiter,
        more("exponentials"),
        longer.clock_hz,
    )


def _load(line: Line) -> Load:
    n, each = line.work.count, line.each
    return Load(
        n * each.time_us * 1e-6,
        each.clock_hz,
        n * each.flops,
        n * each.exponentials,
        n * each.hbm_bytes,
        each.limiter not in ("hbm", "launch"),
    )


def _own_bandwidth(gpu: Profile, physics: Physics) -> Physics:
    """``physics`` with the sustained HBM bandwidth that was measured on this very GPU, where its profile has one.

    Most kernels beside attention and GEMMs are streams; a share carried over from another GPU would move them all.
    """
    read, copy = gpu.hbm_sustained_read_bytes_per_s, gpu.hbm_sustained_copy_bytes_per_s
    if not read or not copy:
        return physics
    # a copy alternates: its time a byte is the mean of a read's and a write's
    penalty = max(0.0, 2.0 * read / copy - 2.0)
    return replace(physics, hbm_read_efficiency=1.0, hbm_write_penalty=penalty)
