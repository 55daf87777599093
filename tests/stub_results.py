"""Results with known numbers, for tests of what is printed and written rather than of what is predicted."""

from __future__ import annotations

from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.result import KernelResult, Result, TensorTraffic


def stub_result(
    algorithm: str = "fa2",
    problem: AttentionProblem | None = None,
    profile: Profile | None = None,
    *,
    time_us: float = 100.0,
    hbm_bytes: dict[str, tuple[int, int]] | None = None,
    matmul: float | None = None,
    waits: dict[str, float] | None = None,
    path: str = "mma_sync",
    **changes,
) -> Result:
    """One kernel that takes ``time_us``; ``hbm_bytes`` maps a tensor to its HBM bytes (read, written)."""
    problem = problem or AttentionProblem(batch=2, heads=16, seqlen_q=1024, head_dim=64)
    flops = problem.flops()
    matmul = float(flops) if matmul is None else matmul
    waits = waits or {"tensor": 0.75, "hbm": 0.25}
    limiter = max(waits, key=lambda cause: waits[cause])
    traffic = tuple(
        TensorTraffic(name, read, written, read, written)
        for name, (read, written) in (hbm_bytes or {"K": (1_000_000, 0), "O": (0, 500_000)}).items()
    )
    work = {"matmul": matmul, "exp": 1e6, "fma": 2e6, "alu": 1e6, "convert": 0.5e6}
    kernel = KernelResult(
        f"{algorithm}_kernel", 0.0, time_us, time_us * 1500, 64, 1, 1.0, traffic, work, waits, limiter, path
    )
    values = {
        "algorithm": algorithm,
        "implementation": f"{algorithm}_kernels",
        "gpu": profile.name if profile else "h100_sxm",
        "problem": problem,
        "time_low_us": 0.9 * time_us,
        "time_high_us": 1.1 * time_us,
        "time_us": time_us,
        "cycles": time_us * 1500,
        "sm_clock_mhz": 1500.0,
        "dirty_bytes_at_end": 0,
        "flops": flops,
        "executed_flops": int(matmul),
        "work": work,
        "peak_memory_bytes": 10_000_000,
        "limiter": limiter,
        "waits": waits,
        "kernels": (kernel,),
        "spec_tensor_flops": 989e12,
        "path_peak_flops": 500e12,
        "ridge_flop_per_byte": 295.0,
    }
    return Result(**values | changes)
