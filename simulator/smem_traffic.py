"""The byte reading inside an SM: bytes that a kernel moves over the shared-memory ports, by the costs of its tiles."""

from __future__ import annotations

from math import fsum

from simulator.physics import Physics
from simulator.profile import Profile
from simulator.program import Kernel
from simulator.sm_costs import PIPE_INDEX, SmSpec, TimedLoop, compile_ops
from simulator.traffic import _repetitions as repetitions  # the same count that executed_work uses


def smem_bytes(kernel: Kernel, profile: Profile, physics: Physics | None = None) -> int:
    """Bytes read from or written to shared memory by all CTAs of ``kernel``, padding included."""
    physics = physics or Physics.from_calibration(profile.calibration_parameters)
    spec = SmSpec.of(profile, physics, kernel.path, kernel.compute_dtype)
    total = 0.0
    for role, loops, op in kernel.walk():
        for timed in compile_ops((op,), role.warps, spec):
            if isinstance(timed, TimedLoop):
                raise TypeError("walk() yields operations, not loops")
            cycles = fsum(work for pipe, work in timed.work if pipe == PIPE_INDEX["smem"])
            if cycles:
                total += cycles * spec.smem_bytes * repetitions(loops, kernel)
    return round(total)
