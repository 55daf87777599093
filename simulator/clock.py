"""The SM clock under load: it falls with what the tensor cores and the memory do, and further in long launches.

Counted on an H200 (cycles over time, single cold launches): about 1957 MHz while one SM works, some 130 MHz less
as soon as tensor cores run on all SMs, then lower in proportion to their rate; launches of tens of milliseconds
meet the board's power limit on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from simulator.physics import Physics
from simulator.profile import Profile

#: Time constant of the power limiter's average.
POWER_WINDOW_S = 0.08


@dataclass(frozen=True)
class Activity:
    """What a launch does to the power supply: ``tensor_share`` of the peak of its instructions' fastest path per
    cycle, ``hbm_share`` of spec bandwidth, ``active_share`` of the SM slots that hold a CTA, and its length."""

    tensor_share: float
    hbm_share: float
    active_share: float
    seconds: float


def loaded_clock_hz(profile: Profile, physics: Physics, activity: Activity) -> float:
    """Mean SM clock in Hz over a launch."""
    running = activity.active_share if activity.tensor_share > 0 else 0.0
    drop = (
        physics.clock_idle_drop
        + physics.clock_tensor_step * running
        + physics.clock_tensor_slope * min(1.0, activity.tensor_share)
        + physics.clock_hbm_slope * min(1.0, activity.hbm_share)
    )
    clock = 1.0 - drop
    t = activity.seconds / POWER_WINDOW_S
    limited = 1.0 - (1.0 - exp(-t)) / t if t > 1e-3 else 0.0
    return profile.max_clock_hz * max(0.3, clock * (1.0 - physics.clock_power_drop * running * limited))
