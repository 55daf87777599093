"""The few physical parameters that neither a datasheet nor a schedule gives.

Each has a unit, a default, bounds and a meaning. ``iosim calibrate`` fits those that measurements identify
and writes them into a profile's ``calibration`` section; a sibling GPU carries them over unfitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _parameter(default: float, low: float, high: float, unit: str, meaning: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class Physics:
    """Parameters of the SM, memory, clock and launch models (fractions are of the profile's own rates)."""

    wgmma_efficiency: float = _parameter(
        0.98, 0.7, 1.0, "fraction", "sustained share of the wgmma/tcgen05 rate inside one batch of instructions"
    )
    mma_sync_efficiency: float = _parameter(
        0.95, 0.5, 1.0, "fraction", "sustained share of the profile's mma.sync rate in a dependent GEMM of one tile"
    )
    matmul_latency_cycles: float = _parameter(
        60.0, 0.0, 300.0, "cycles", "from the last tensor instruction of a batch to its result being usable"
    )
    mma_sync_latency_cycles: float = _parameter(
        120.0, 0.0, 400.0, "cycles", "the same for mma.sync, with its operands' way from shared memory"
    )
    warp_issue_rate: float = _parameter(
        0.57, 0.3, 1.0, "fraction", "instructions per cycle that one warp alone on its sub-partition sustains"
    )
    issue_efficiency: float = _parameter(
        0.95, 0.6, 1.0, "fraction", "sustained share of the issue slots when several warps mix instructions"
    )
    mixed_issue_efficiency: float = _parameter(
        0.87, 0.7, 1.0, "fraction", "the same without tensor instructions, where instructions of all pipes mix"
    )
    smem_efficiency: float = _parameter(0.97, 0.6, 1.0, "fraction", "sustained share of the shared-memory port's rate")
    wgmma_issue_share: float = _parameter(
        0.65, 0.0, 1.0, "fraction", "issue slots that wgmma's register traffic takes from other instructions"
    )
    mma_sync_issue_share: float = _parameter(
        1.0, 0.0, 1.0, "fraction", "issue slots that mma.sync's register traffic takes from other instructions"
    )
    exp_efficiency: float = _parameter(0.95, 0.6, 1.0, "fraction", "sustained share of the special-function rate")
    elementwise_latency_cycles: float = _parameter(
        80.0, 0.0, 250.0, "cycles", "dependent latency from one row-wise operation to the next"
    )
    barrier_latency_cycles: float = _parameter(
        30.0, 0.0, 200.0, "cycles", "from the last arrival at a named or memory barrier to the waiters going on"
    )
    atomic_bytes_per_cycle_per_sm: float = _parameter(
        12.5, 3.0, 64.0, "B/cycle", "rate at which L2 takes one SM's fp32 reductions when all SMs send them"
    )
    cta_launch_cycles: float = _parameter(
        1000.0, 0.0, 6000.0, "cycles", "from a CTA's exit to the first instruction of the next one on its slot"
    )
    persistent_fetch_cycles: float = _parameter(
        500.0, 0.0, 6000.0, "cycles", "scheduling of the next tile in a persistent kernel"
    )
    l2_capacity_fraction: float = _parameter(
        1.0, 0.4, 1.0, "fraction", "share of the L2, in all its partitions, that data can use"
    )
    l2_bandwidth_fraction: float = _parameter(
        0.95, 0.3, 1.2, "fraction", "sustained share of the profile's L2 bandwidth under a kernel's access pattern"
    )
    hbm_read_efficiency: float = _parameter(
        0.97, 0.6, 1.0, "fraction", "share of the profile's sustained HBM read bandwidth that a kernel's reads reach"
    )
    hbm_write_penalty: float = _parameter(
        0.3, 0.0, 0.6, "fraction", "extra HBM time per written byte relative to a read one (bus turnaround)"
    )
    memory_latency_factor: float = _parameter(
        1.35, 0.7, 2.5, "ratio", "loaded memory latency over the profile's idle latency"
    )
    kernel_ramp_us: float = _parameter(
        0.75, 0.0, 6.0, "us", "start and end of any kernel: what one without work takes on the GPU"
    )
    cold_code_us: float = _parameter(
        1.7, 0.0, 6.0, "us", "further start-up of a kernel of more than a few hundred instructions: fetched cold"
    )
    tma_setup_us: float = _parameter(
        1.0, 0.0, 6.0, "us", "further start-up of a kernel with TMA: descriptors, barriers, warp specialisation"
    )
    graph_gap_us: float = _parameter(0.3, 0.0, 5.0, "us", "gap between dependent kernels of one call on the GPU")
    graph_launch_us: float = _parameter(
        2.3, 0.0, 6.0, "us", "replay of a CUDA graph as events around it see it, beyond its kernels' span"
    )
    host_launch_us: float = _parameter(
        12.0, 0.0, 60.0, "us", "host time from one kernel launch of a framework to the next when the GPU is idle"
    )
    clock_idle_drop: float = _parameter(0.05, 0.0, 0.7, "headroom", "SM clock below its maximum with a few SMs at work")
    clock_load_step: float = _parameter(
        1.0, 0.0, 2.0, "headroom", "drop of the SM clock as soon as tensor cores or HBM are under load"
    )
    clock_hbm_load_share: float = _parameter(
        1.0, 0.1, 8.0, "fraction", "share of HBM bandwidth at which that drop is complete without tensor work"
    )
    clock_load_delay_us: float = _parameter(3.0, 0.0, 30.0, "us", "time from a launch's start to that drop")
    clock_heavy_slope: float = _parameter(
        2.8, 0.0, 8.0, "headroom", "further drop per tensor (and weighted exponential) activity beyond the threshold"
    )
    clock_heavy_threshold: float = _parameter(
        0.6, 0.2, 1.2, "fraction", "activity up to which the clock stays at the first drop"
    )
    clock_exp_weight: float = _parameter(
        0.4, 0.0, 2.0, "ratio", "what the exponential units' activity counts beside the tensor cores'"
    )
    clock_hbm_slope: float = _parameter(
        0.6, 0.0, 2.6, "headroom", "further drop at full HBM bandwidth, beside the first one"
    )
    clock_heavy_delay_us: float = _parameter(30.0, 0.0, 150.0, "us", "time from a launch's start to the further drops")
    clock_power_drop: float = _parameter(
        1.6, 0.0, 4.0, "headroom", "drop by the board's power limit in long runs, per root of activity"
    )

    @classmethod
    def names(cls) -> list[str]:
        """All parameter names in order."""
        return [f.name for f in fields(cls)]

    @classmethod
    def bounds(cls, name: str) -> tuple[float, float]:
        """Lower and upper bound of a parameter."""
        meta = cls.__dataclass_fields__[name].metadata
        return meta["low"], meta["high"]

    @classmethod
    def describe(cls, name: str) -> tuple[str, str]:
        """Unit and meaning of a parameter."""
        meta = cls.__dataclass_fields__[name].metadata
        return meta["unit"], meta["meaning"]

    @classmethod
    def from_calibration(cls, parameters: Mapping[str, float]) -> Physics:
        """Defaults, with the calibrated values in place (names that this version does not know are ignored)."""
        known = set(cls.names())
        return cls(**{k: float(v) for k, v in parameters.items() if k in known})
