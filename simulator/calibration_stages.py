"""Which parameters are fitted to which measurements, small parts first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from simulator.calibration import Stage

#: Whether a stage is fitted to a row.
Select = Callable[[Mapping[str, str]], bool]
#: Parameters fixed by microbenchmarks (hardware_profiles/measurements/h200_sxm/micro_run1.csv) rather than by a fit.
FIXED_BY_MICROBENCHMARK = {
    "exp_efficiency": "pipe_softmax_like: 15.6 of 16 elements a cycle with several warps",
    "wgmma_efficiency": "wgmma_bf16: 4080 of 4096 FLOP a cycle",
    "hbm_write_penalty": "hbm_mix: 4.36, 4.31, 4.08 TB/s at 4, 2, 1 reads a write, hbm_copy_torch 4.31, hbm_write 4.34",
    "mixed_issue_efficiency": "ncu: PyTorch's softmax issues in 0.80 to 0.87 of the cycles with 4 to 7 eligible warps",
    "graph_launch_us": "one empty kernel in a graph behind a flush takes 3.2 µs; small calls beyond their kernels: 2.3",
    "kernel_ramp_us": "CUPTI: fills and memsets of one word take 0.74 to 0.77 µs",
    "l2_bandwidth_fraction": "l2_read: 8.8 TB/s at best, 8.0-8.3 at most sizes",
    "atomic_bytes_per_cycle_per_sm": "l2_atomic_add_fp32: 3.25 TB/s over 132 SMs at 1.97 GHz",
    "mma_sync_issue_share": "FA2 with one and with two CTAs an SM: products and other instructions never overlap",
    "graph_gap_us": "each further empty kernel of a graph takes 0.97 to 1.05 µs, 0.75 of them its own",
    "barrier_latency_cycles": "barrier of 256 threads: 28 cycles",
}


def _family(pattern: str, algorithms: str = "", passes: str = "fwd") -> Select:
    families, wanted = re.compile(pattern), set(filter(None, algorithms.split()))

    def select(row: Mapping[str, str]) -> bool:
        return (
            families.search(row.get("family", "")) is not None
            and (not wanted or row["algorithm"] in wanted)
            and (row.get("pass") or "fwd") in passes.split()
            and (row.get("timing") or "kernel") != "eager"
        )

    return select


def _shorter_than(microseconds: float, rows: Select) -> Select:
    def select(row: Mapping[str, str]) -> bool:
        return rows(row) and float(row.get("measured_time_us") or "inf") < microseconds

    return select


STAGES: tuple[Stage, ...] = (
    Stage(
        "clock",
        (
            "clock_idle_drop",
            "clock_load_step",
            "clock_hbm_load_share",
            "clock_load_delay_us",
            "clock_heavy_slope",
            "clock_heavy_threshold",
            "clock_exp_weight",
            "clock_hbm_slope",
            "clock_heavy_delay_us",
            "clock_power_drop",
        ),
        _family("", "", "fwd bwd"),
        "clock",
        "counted cycles over time of single launches",
        400,
    ),
    Stage(
        "launch",
        ("cold_code_us", "tma_setup_us"),
        _shorter_than(60.0, _family("host_call|fa2_cta|fa3_cta|decode|heads", "", "fwd bwd")),
        "time_at_clock",
        "calls of a few microseconds: beyond the work of their kernels",
        60,
    ),
    Stage(
        "latencies",
        ("elementwise_latency_cycles", "mma_sync_latency_cycles", "warp_issue_rate"),
        _family("fa1_cta|fa1_length|fa2_cta|fa2_wave", "fa1 fa2"),
        "time_at_clock",
        "FA1 and FA2 with one warp and with two on a sub-partition: chains of dependent steps",
        36,
    ),
    Stage(
        "sm, Ampere path",
        ("mma_sync_efficiency", "issue_efficiency", "cta_launch_cycles"),
        _family("cta|wave|length", "fa2"),
        "time_at_clock",
        "FA2 launches with one and two CTAs an SM, at their counted clock",
    ),
    Stage(
        "sm, Hopper path",
        (
            "wgmma_issue_share",
            "matmul_latency_cycles",
            "persistent_fetch_cycles",
        ),
        _family("cta|wave|length|builds|random", "fa3"),
        "time_at_clock",
        "FA3 launches from one CTA to many waves, at their counted clock",
        90,
    ),
    Stage(
        "memory",
        ("memory_latency_factor", "hbm_read_efficiency"),
        _family("decode|wave|standard|bwd_torch_eager", "flash_decoding fa3 standard", "fwd bwd"),
        "time_at_clock",
        "launches that HBM binds: decode, waves of one query tile, unfused attention's row kernels",
        48,
    ),
    Stage(
        "l2 capacity",
        ("l2_capacity_fraction",),
        _family("_long$|long_gqa", "fa2 fa3"),
        "hbm_read",
        "HBM reads where K and V in flight crowd the L2",
    ),
)
