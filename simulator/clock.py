"""The SM clock under load: it falls with what the tensor cores and the memory do, and further in long launches.

Counted on an H200 (cycles over time, single cold launches): 1978 MHz while a few SMs work; about 1800 within
microseconds of tensor cores running on an eighth of the SMs, or of HBM running at half its rate; lower again, some
30 us later, in proportion to tensor and exponential work beyond what FA2 does; and from about 25 ms on, the board's
power limit takes more.

What load takes away at once is measured in *headroom*: the maximum clock beyond the clock behind the datasheet's
tensor rate. The vendor promises the latter under tensor load (H100 whitepaper: 1830 of 1980 MHz; A100: all of
1410 MHz), so a GPU whose two clocks are one runs at it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

from simulator.physics import Physics
from simulator.profile import Profile

#: When the board's power limit takes hold (H200: FA3 launches of 1 to 24 ms run at 1620-1660 MHz, of 50 ms at 1430).
POWER_DELAY_S = 0.025
#: Share of the SMs that must run tensor instructions before the clock of all of them falls: one GPC of eight.
#: (H200: 1970 MHz with 1 and 8 CTAs at work, 1800 with 16, 66 and 132.)
LOADED_SM_SHARE = 0.125


@dataclass(frozen=True)
class Activity:
    """What a launch does to the power supply.

    ``tensor_share`` of the peak of its data type's fastest path per cycle, ``exp_share`` of the exponential units,
    ``hbm_share`` of spec bandwidth, ``loaded_share`` of its time with more than a few SMs at work, its length, and that
    of the run of calls which it is part of.
    """

    tensor_share: float
    exp_share: float
    hbm_share: float
    loaded_share: float
    seconds: float
    run_seconds: float


def loaded_share(active_share: float, ctas: int, slots: int, num_sms: int) -> float:
    """Share of a launch's time with more than a few SMs at work.

    A launch that fills no wave keeps its SMs for as long as it runs; of one with a remainder behind full waves, the
    mean ``active_share`` of its ``slots`` says how long the remainder runs alone.
    """
    if ctas <= slots:
        return min(1.0, min(ctas, num_sms) / num_sms / LOADED_SM_SHARE)
    rest = ctas % slots / slots
    if rest == 0.0 or ctas >= 4 * slots:
        return 1.0
    full = min(1.0, max(0.0, (active_share - rest) / (1.0 - rest)))
    return full + (1.0 - full) * min(1.0, rest / LOADED_SM_SHARE)


def loaded_clock_hz(profile: Profile, physics: Physics, activity: Activity) -> float:
    """Mean SM clock in Hz over a launch."""
    headroom = 1.0 - min(1.0, profile.spec_clock_hz / profile.max_clock_hz)
    tensor = activity.loaded_share if activity.tensor_share > 0 else 0.0
    load = max(tensor, min(1.0, activity.hbm_share / physics.clock_hbm_load_share))
    work = min(1.0, activity.tensor_share) + physics.clock_exp_weight * min(1.0, activity.exp_share)
    at_once = physics.clock_idle_drop + physics.clock_load_step * load * _after(
        physics.clock_load_delay_us * 1e-6, activity.seconds
    )
    heavy = physics.clock_heavy_slope * max(0.0, work - physics.clock_heavy_threshold)
    soon = (heavy + physics.clock_hbm_slope * min(1.0, activity.hbm_share)) * _after(
        physics.clock_heavy_delay_us * 1e-6, activity.seconds
    )
    late = physics.clock_power_drop * sqrt(work) * tensor * _after(POWER_DELAY_S, activity.run_seconds)
    return profile.max_clock_hz * max(0.3, 1.0 - headroom * (at_once + soon + late))


def with_held_clock(physics: Physics) -> Physics:
    """``physics`` under which no load lowers the clock: for launches whose clock was counted."""
    return replace(
        physics,
        clock_idle_drop=0.0,
        clock_load_step=0.0,
        clock_heavy_slope=0.0,
        clock_hbm_slope=0.0,
        clock_power_drop=0.0,
    )


def _after(delay_s: float, seconds: float) -> float:
    """Share of ``seconds`` that lies behind its first ``delay_s``."""
    return max(0.0, 1.0 - delay_s / seconds) if seconds > 0 else 0.0
