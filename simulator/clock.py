"""The SM clock under load: it falls with what the tensor cores and the memory do, not only with the power cap."""

from __future__ import annotations

from simulator.physics import Physics
from simulator.profile import Profile


def loaded_clock_hz(profile: Profile, physics: Physics, tensor_share: float, hbm_share: float) -> float:
    """SM clock in Hz of a launch that uses ``tensor_share`` of the fastest tensor path's peak per cycle and
    ``hbm_share`` of the spec HBM bandwidth (both 0..1)."""
    drop = physics.clock_tensor_slope * min(1.0, tensor_share) + physics.clock_hbm_slope * min(1.0, hbm_share)
    return profile.max_clock_hz * max(0.5, 1.0 - drop)
