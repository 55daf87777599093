"""The SM clock that a board's power limit leaves a load that lasts: an energy balance over all of its kernels.

A limiter averages over tens of milliseconds, more than a layer of a model takes, so that kernels which draw little
leave room for those which draw much: one clock for the whole step. The board draws its idle power, energy for each
HBM byte whatever the clock, and energy for each tensor FLOP and exponential that grows with the square of the voltage,
and so of the clock. Energies were measured on an H200 under one second of each load
(``measurements/h200_sxm/micro_run1.csv``, ``clock``) and are carried to other GPUs; what a tensor FLOP takes stands in
a GPU's profile, since each process and instruction path has its own. Nothing is fitted to a whole model.

Runs shorter than a second (benchmarks of one kernel) follow :mod:`simulator.clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from simulator.profile import Profile

#: Share of the power limit that a board draws with idle SMs at full clocks: 123 of 700 W.
IDLE_SHARE = 123.0 / 700.0
#: HBM reads that stream: (651 - 123) W at 4.54 TB/s, the way to the SMs included.
HBM_J_PER_BYTE = 116e-12
#: An exponential at the spec clock with what goes with it in a softmax, beyond the products: FlashAttention-2 at 343
#: TFLOP/s and 0.67 exponentials a picosecond draws 684 W at 1728 MHz.
EXP_J = 180e-12
#: NVIDIA's clocks go in steps.
CLOCK_STEP_HZ = 15e6
#: A board that draws too much at this share of its spec clock is not slowed further (no such load is known).
LEAST_SHARE = 0.3


@dataclass(frozen=True)
class Load:
    """Kernels of a step: their time in s at ``clock_hz``, work, and whether their time follows the clock."""

    seconds: float
    clock_hz: float
    tensor_flops: float
    exponentials: float
    hbm_bytes: float
    clock_bound: bool

    def seconds_at(self, clock_hz: float) -> float:
        """Time when the clock may not exceed ``clock_hz``."""
        return self.seconds * max(1.0, self.clock_hz / clock_hz) if self.clock_bound else self.seconds


def board_power_w(gpu: Profile, loads: Sequence[Load], clock_hz: float, least_seconds: float = 0.0) -> float:
    """Mean power in W of a step of ``loads`` whose clocks may not exceed ``clock_hz``.

    ``least_seconds``: the step's time when the host needs longer than the GPU.
    """

    def joules(load: Load) -> float:
        voltage = min(load.clock_hz, clock_hz) / gpu.spec_clock_hz
        switched = gpu.tensor_energy_j_per_flop * load.tensor_flops + EXP_J * load.exponentials
        return HBM_J_PER_BYTE * load.hbm_bytes + switched * voltage**2

    seconds = max(least_seconds, fsum(load.seconds_at(clock_hz) for load in loads))
    return IDLE_SHARE * gpu.power_cap_w + fsum(joules(load) for load in loads) / seconds


def sustained_clock_hz(gpu: Profile, loads: Sequence[Load], least_seconds: float = 0.0) -> float | None:
    """The highest clock, in steps of 15 MHz, at which ``loads`` stay within the power limit; None: all of them do."""
    steps = int(max((load.clock_hz for load in loads), default=0.0) // CLOCK_STEP_HZ)
    least = max(1, int(LEAST_SHARE * gpu.spec_clock_hz // CLOCK_STEP_HZ))

    def within(step: int) -> bool:
        return board_power_w(gpu, loads, step * CLOCK_STEP_HZ, least_seconds) <= gpu.power_cap_w

    if not loads or board_power_w(gpu, loads, gpu.max_clock_hz, least_seconds) <= gpu.power_cap_w:
        return None
    low, high = min(least, steps), steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if within(middle) else (low, middle - 1)
    return low * CLOCK_STEP_HZ
