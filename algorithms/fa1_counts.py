"""Instructions and wavefronts that FlashAttention-1's kernels execute, counted on one H200.

The Triton kernel of :mod:`simulator.measure.fa1_kernel` and the kernels of flash-attn 1.0.9, compiled for sm_90 (see
``simulator/measure/cuda/fa1_driver.cu``): published timings ran the same sources, compiled for their GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.instruction_counts import InstructionMix

#: Counted instructions per score element of the measured kernel by (head dim, causal): rows fa1_length_* of
#: hardware_profiles/measurements/h200_sxm/mix_launches.csv over their row steps.
_COUNTED_ON = "ncu, one H200, Triton 3.6, 2026-11-29"
#: The interval between a warp's instructions leaves out what they wait for products (chains of 25 cycles), SMEM, HBM.
MEASURED_MIX = {
    (64, False): InstructionMix(18.40, 5.51, 4.80, 1.12, 3.28, 2.0, source=_COUNTED_ON, issue_interval_cycles=2.5),
    (64, True): InstructionMix(20.24, 5.56, 6.68, 1.12, 3.24, 2.0, source=_COUNTED_ON, issue_interval_cycles=2.5),
    (128, False): InstructionMix(33.65, 11.56, 8.11, 1.25, 7.03, 4.0, source=_COUNTED_ON, issue_interval_cycles=1.75),
    (128, True): InstructionMix(35.67, 11.67, 10.20, 1.25, 6.98, 4.0, source=_COUNTED_ON, issue_interval_cycles=1.75),
}
#: Wavefronts of a row step through SMEM and L1, by head dim, in the measured kernel (stalls_more_run1.csv, fa1_more).
MEASURED_WAVEFRONTS = {64: 1250, 128: 1400}
#: The same of flash-attn 1.0.9's kernel (mix_launches_layout_run1.csv and stalls_layout_run1.csv, fa1_package).
_PACKAGE_ON = "ncu, one H200, flash-attn 1.0.9 built for sm_90, 2026-11-30"
PACKAGE_MIX = {
    (64, False): InstructionMix(17.26, 5.70, 4.76, 1.28, 2.26, 2.0, source=_PACKAGE_ON, issue_interval_cycles=2.2),
    (64, True): InstructionMix(18.96, 6.27, 6.06, 1.27, 2.27, 2.0, source=_PACKAGE_ON, issue_interval_cycles=2.2),
    (128, False): InstructionMix(41.27, 14.43, 9.65, 1.93, 7.70, 4.0, source=_PACKAGE_ON, issue_interval_cycles=2.1),
    (128, True): InstructionMix(42.68, 14.52, 10.82, 1.92, 7.84, 4.0, source=_PACKAGE_ON, issue_interval_cycles=2.1),
}
PACKAGE_WAVEFRONTS = {64: 586, 128: 1077}
#: Instructions of a step of the first key block, which has no O to read and rescale, over those of the others: the
#: loops' lengths in machine code, weighed by the counts of launches with 2, 4, 16 and 32 key blocks.
PACKAGE_FIRST_SHARE = {64: 516 / 555, 128: 578 / 663}
#: Backward: per score element and per step of 16 rows. Launches of 512 to 4096 keys lie within 4 % (64) and 3 % (128).
BACKWARD_MIX = {
    (64, False): InstructionMix(34.7, 13.4, 7.5, 1.00, 6.0, 5.0, source=_PACKAGE_ON, issue_interval_cycles=2.1),
    (64, True): InstructionMix(37.0, 13.6, 8.2, 1.08, 6.1, 5.0, source=_PACKAGE_ON, issue_interval_cycles=2.1),
    (128, False): InstructionMix(74.3, 27.3, 14.7, 1.00, 16.3, 10.0, source=_PACKAGE_ON, issue_interval_cycles=2.0),
    (128, True): InstructionMix(76.0, 26.7, 16.0, 1.23, 16.4, 10.0, source=_PACKAGE_ON, issue_interval_cycles=2.0),
}
BACKWARD_WAVEFRONTS = {64: 2280, 128: 3410}


@dataclass(frozen=True)
class Fa1Counts:
    """What one pass of the package's kernel executes: per score element, and wavefronts a step of 16 rows.
    ``first_share``: instructions of a step of the first key block over those of the others."""

    mix: InstructionMix
    wavefronts: int
    first_share: float = 1.0


def package_counts(head_dim: int, causal: bool, backward: bool = False) -> Fa1Counts:
    """The counts of flash-attn 1.0.9 at the padded ``head_dim``; 32 was not counted and takes those of 64."""
    d = max(64, head_dim)
    if backward:
        return Fa1Counts(BACKWARD_MIX[d, causal], BACKWARD_WAVEFRONTS[d])
    return Fa1Counts(PACKAGE_MIX[d, causal], PACKAGE_WAVEFRONTS[d], PACKAGE_FIRST_SHARE[d])
