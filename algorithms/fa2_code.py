"""How much code FA2's forward kernels are, by the instructions that were counted in their launches.

The kernel repeats its first key blocks, which are masked, ahead of the loop; with bounds to check and a causal mask
there are two or three of them, each as long as the loop's body. A CTA runs them once, and where the SM's instruction
cache does not hold all of the code they have to be fetched again (``Fetch``).
"""

from __future__ import annotations

from algorithms.common import ceil_div
from algorithms.instruction_counts import fa2_forward_counts
from algorithms.kernel_tables import Fa2Tile
from simulator.problem import AttentionProblem

BYTES_OF_INSTRUCTION = 16
#: Lane instructions of a score element that a window's mask takes inside the loop.
_WINDOW_MASK = 3.0
#: With a window all CTAs walk about as many blocks, stay in step and share what they fetch: each misses a fifth to a
#: quarter of what does not fit (H200, stalls_more_run1.csv, fa2_window_more: 9 to 12 KB a warp of 48).
IN_STEP_SHARE = 4


def has_whole_tiles(problem: AttentionProblem, t: Fa2Tile) -> bool:
    """Whether every tile of Q, K and V is full: no sequence ends within one."""
    return problem.seqlen_q % t.tile_m == 0 and problem.seqlen_k % t.tile_n == 0 and problem.seqlens_k is None


def is_uneven(problem: AttentionProblem, t: Fa2Tile) -> bool:
    """Whether the kernel that checks bounds runs (flash_fwd_launch_template.h, IsEvenMNConst)."""
    padded = problem.head_dim != t.padded_head_dim
    return not has_whole_tiles(problem, t) or problem.window is not None or t.padded_head_dim > 128 or padded


def unrolled_blocks(problem: AttentionProblem, t: Fa2Tile) -> int:
    """Key blocks whose code the kernel repeats ahead of its loop, masked (flash_fwd_kernel.h, n_masking_steps), and
    that some CTA walks."""
    if not problem.causal and problem.window is None:
        return 1
    return min(longest_walk(problem, t), ceil_div(t.tile_m, t.tile_n) + is_uneven(problem, t))


def longest_walk(problem: AttentionProblem, t: Fa2Tile) -> int:
    """The most key blocks that a CTA walks."""
    keys = problem.seqlen_k
    if problem.window is not None:
        left, right = problem.sides
        seen = (keys if left < 0 else left) + (keys if right < 0 else right) + t.tile_m
        keys = min(keys, seen)
    return ceil_div(keys, t.tile_n)


def code_bytes(problem: AttentionProblem, t: Fa2Tile, split: bool) -> int:
    """Size of the code that a launch runs, by the instructions counted in its loop, masked blocks and around them."""
    counts = fa2_forward_counts(t.padded_head_dim, split)
    masked = counts.masked_uneven if is_uneven(problem, t) else counts.masked if problem.causal else 0.0
    elements = t.tile_m * t.tile_n / t.threads
    unrolled = unrolled_blocks(problem, t)
    blocks = unrolled * (counts.mix.issue + masked)
    if longest_walk(problem, t) > unrolled:
        blocks += counts.mix.issue + (_WINDOW_MASK if problem.window is not None else 0.0)
    return round(BYTES_OF_INSTRUCTION * (blocks * elements + counts.around))
