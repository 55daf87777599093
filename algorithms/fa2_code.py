"""How much code FA2's forward kernels are, by the instructions that were counted in their launches.

The kernel repeats its first key blocks, which are masked, ahead of the loop; with bounds to check and a causal mask
there are two or three of them, each as long as the loop's body. A CTA runs them once, and where the SM's instruction
cache does not hold all of the code they have to be fetched again (``Fetch``).
"""

from __future__ import annotations

import numpy as np

from algorithms.common import ceil_div
from algorithms.fa2_counts import Fa2Build, fa2_build
from algorithms.kernel_tables import Fa2Tile
from simulator.problem import AttentionProblem
from simulator.program import Fetch

BYTES_OF_INSTRUCTION = 16
#: CTAs that begin together and walk about as many blocks (a window, or a grid of a single wave) stay in step and share
#: what they fetch: each misses a fifth to a quarter of what does not fit (H200, stalls_more_run1.csv, fa2_window_more:
#: 9 to 12 KB a warp of 48; builds of head dims 96 and 128 with windows: 2.7 and 5 to 7 thousand cycles a CTA).
IN_STEP_SHARE = 4


def has_whole_tiles(problem: AttentionProblem, t: Fa2Tile) -> bool:
    """Whether the kernel knows every tile of Q, K and V to be full (flash_fwd_launch_template.h, is_even_MN).

    Lengths by sequence hide it, and so does PyTorch's varlen entry, which is the one that never splits."""
    whole = problem.seqlen_q % t.tile_m == 0 and problem.seqlen_k % t.tile_n == 0
    return whole and problem.seqlens_k is None and problem.num_splits != 1


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


def build_of(problem: AttentionProblem, t: Fa2Tile, split: bool = False) -> Fa2Build:
    """The counted build that a launch runs."""
    even = not is_uneven(problem, t)
    return fa2_build(t.padded_head_dim, problem.causal, problem.window is not None, even, split)


def code_bytes(problem: AttentionProblem, t: Fa2Tile, split: bool) -> int:
    """Size of the code that a launch runs, by the instructions counted in its loop, masked blocks and around them."""
    build, unrolled = build_of(problem, t, split), unrolled_blocks(problem, t)
    blocks = unrolled * build.masked.issue
    if longest_walk(problem, t) > unrolled:
        blocks += build.loop.issue
    return round(BYTES_OF_INSTRUCTION * (blocks * t.tile_m * t.tile_n / t.threads / build.elements + build.around))


def fetches(problem: AttentionProblem, t: Fa2Tile, split: bool, in_step: bool) -> tuple[tuple[Fetch, ...], ...]:
    """What a CTA waits for its code: ahead of all blocks, in each masked block, and in each iteration of its loop.

    While one CTA of an SM fetches, the others compute, unless they fetch too: the wait that is not hidden is the share
    of its instructions that a CTA executes once (H200, fa2_length_d128 causal: 4.8, 4.4, 1.7, 0.9 and 0.4 thousand
    cycles a CTA at 256 to 4096 tokens, of 5.4 that a lone CTA would wait). Where no CTA loops, all of an SM follow one
    another through the same code, and only the first waits.
    """
    if split:
        return (), (), ()
    build, unrolled = build_of(problem, t), unrolled_blocks(problem, t)
    straight = build.around + unrolled * build.masked.issue
    looped = max(0.0, mean_walk(problem, t) - unrolled) * build.loop.issue
    hidden = (straight + looped) / straight if looped else float(t.ctas_per_sm)
    if in_step:
        hidden = 1.0 if problem.window is not None else IN_STEP_SHARE
    per_thread = t.tile_m * t.tile_n / t.threads / build.elements
    masked, loop = (round(BYTES_OF_INSTRUCTION * b.issue * per_thread) for b in (build.masked, build.loop))
    once = Fetch(code_bytes(problem, t, split), IN_STEP_SHARE if in_step else hidden)
    return (once,), (Fetch(masked, hidden, again=True),), (Fetch(loop, again=True),)


def mean_walk(problem: AttentionProblem, t: Fa2Tile) -> float:
    """Key blocks that a CTA walks on average."""
    row0 = np.arange(ceil_div(problem.seqlen_q, t.tile_m)) * t.tile_m + problem.seqlen_k - problem.seqlen_q
    left, right = (problem.seqlen_k if side < 0 else side for side in problem.sides)
    first = np.maximum(0, row0 - left) // t.tile_n
    last = np.minimum(ceil_div(problem.seqlen_k, t.tile_n), -(-(row0 + t.tile_m + right) // t.tile_n))
    return float(np.maximum(last - first, 0).mean())
