"""FlashAttention-1's kernels as schedules: tiles, grids, and which work tile runs when."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from algorithms.common import ceil_div, grid_indices
from algorithms.fa1_counts import MEASURED_MIX, MEASURED_WAVEFRONTS, package_counts
from algorithms.fa1_tiles import forward_with
from algorithms.instruction_counts import InstructionMix
from algorithms.kernel_tables import Fa1Tile, ctas_per_sm, fa1_forward_tile, fa1_num_splits, fa1_paper_blocks
from algorithms.kernels_fa1 import FA1_HEAD_DIMS
from algorithms.tile_search import TileChoice
from algorithms.varlen import is_varlen
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile


@dataclass(frozen=True)
class Schedule:
    """One FA1 kernel: ``rows`` (Br) query rows against ``keys`` (Bc) keys.

    ``packaged``: the 1.x kernel keeps one statistic (the LSE) and sums the warps' partial O through SMEM; the other
    kernels keep ``m`` and ``l`` and hand P round instead. ``slices``: CTAs that share a head's row blocks in turn.
    """

    rows: int
    keys: int
    head_dim: int
    warps: int
    slices: int
    packaged: bool
    smem_bytes: int
    registers_per_thread: int
    ctas_per_sm: int
    mix: InstructionMix | None = None
    wavefronts: int = 0
    first_share: float = 1.0


def _runs_package(problem: AttentionProblem, implementation: str, gpu: Profile) -> bool:
    """Whether the package's CUDA kernel runs. With one CTA a head it did in May 2022, on Ampere and for head dims to
    128; elsewhere the paper's grid stands for the Triton kernel that was measured there."""
    ampere = set(gpu.tensor_flop_per_cycle_per_sm) == {"mma_sync"}
    return implementation == "flash_attn_1" or (
        implementation == "flash_attn_1_paper" and ampere and problem.head_dim <= FA1_HEAD_DIMS[-1]
    )


def package_tile(problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None) -> Fa1Tile:
    """The tile of the 1.x forward kernel for ``problem``, or the kernel with ``tiles`` (:class:`UnsupportedError` when
    that does not fit ``gpu``)."""
    if problem.head_dim > FA1_HEAD_DIMS[-1]:
        raise UnsupportedError(f"head_dim {problem.head_dim}: flash_attn_1 runs head dims up to 128")
    t = fa1_forward_tile(problem.head_dim, problem.seqlen_k, problem.dtype)
    return t if tiles is None else forward_with(tiles, t, problem.seqlen_k, gpu)


def schedule_for(
    problem: AttentionProblem, implementation: str, gpu: Profile, tiles: TileChoice | None = None
) -> Schedule:
    """Tiles and grid of ``implementation`` for ``problem`` on ``gpu``; ``tiles`` replaces the 1.x kernel's own."""
    package = _runs_package(problem, implementation, gpu)
    if package:
        t = package_tile(problem, gpu, tiles)
        slices = 1
        if implementation == "flash_attn_1":
            slices = fa1_num_splits(
                batch_heads=problem.batch * problem.heads,
                num_sms=gpu.num_sms,
                ctas_per_sm=t.ctas_per_sm,
                seqlen_q=problem.seqlen_q,
            )
            # slices beyond the row blocks return at once
            slices = min(slices, ceil_div(problem.seqlen_q, t.tile_m))
        shape = (t.tile_m, t.tile_n, t.padded_head_dim, t.num_warps, slices, True, t.smem_bytes, t.registers_per_thread)
    elif implementation == "flash_attn_1_paper":
        d = ceil_div(problem.head_dim, 64) * 64
        rows, keys = 16, {64: 256, 128: 128}.get(d, 64)
        # K, V and P in SMEM; registers by the CTAs that an H200's SM was seen to hold, three and two
        shape = (rows, keys, d, 4, 1, False, 2 * keys * d * 2 + rows * keys * 2, 168 if d == 64 else 255)
    else:
        d = ceil_div(problem.head_dim, 16) * 16
        blocks = fa1_paper_blocks(gpu.smem_bytes_per_cta_max // problem.element_bytes, d)
        rows, keys = (max(16, size // 16 * 16) for size in (blocks.rows, blocks.columns))
        shape = (rows, keys, d, 8, 1, False, gpu.smem_bytes_per_cta_max, 255)
    resident = ctas_per_sm(
        threads=32 * shape[3],
        registers_per_thread=shape[7],
        smem_bytes=shape[6],
        smem_bytes_per_sm=gpu.smem_bytes_per_sm,
        threads_per_sm_max=gpu.max_threads_per_sm,
    )
    if tiles is not None:
        resident = t.ctas_per_sm
    if resident < 1:
        raise UnsupportedError(f"{implementation}: {shape[6]} bytes of SMEM a CTA do not fit {gpu.name}")
    # no more slots than CTAs, so that an SM's CTAs are those that the launch has
    launched = problem.batch * problem.heads * shape[4]
    mix, wavefronts, first_share = None, 0, 1.0
    if package:
        counts = package_counts(shape[2], problem.causal)
        mix, wavefronts, first_share = counts.mix, counts.wavefronts, counts.first_share
        if tiles is not None:
            # like the instructions, counted per score element of the shipped tile
            own = package_tile(problem, gpu)
            wavefronts = wavefronts * (t.tile_m * t.tile_n) // (own.tile_m * own.tile_n)
    elif implementation == "flash_attn_1_paper":
        mix, wavefronts = MEASURED_MIX.get((shape[2], problem.causal)), MEASURED_WAVEFRONTS.get(shape[2], 0)
    return Schedule(*shape, min(resident, ceil_div(launched, gpu.num_sms)), mix, wavefronts, first_share)


#: Row steps of a launch (heads x row blocks x key blocks) up to which slices are interleaved as the kernel does it.
INTERLEAVED_STEPS = 100_000


def interleaved(problem: AttentionProblem, s: Schedule) -> bool:
    """Whether slice ``z`` takes row blocks ``z``, ``z + slices``, ... as the kernel does. In long launches it takes a
    run of as many neighbouring ones instead: the same counts and bytes, and no gaps to slow a coarse replay."""
    steps = ceil_div(problem.seqlen_q, s.rows) * ceil_div(problem.seqlen_k, s.keys)
    return s.slices == 1 or problem.batch * problem.heads * steps <= INTERLEAVED_STEPS


#: Row steps of a launch up to which every key block is listed, and key blocks of longer ones that are, at least.
LISTED_STEPS, LISTED_BLOCKS = 4_000_000, 96


def listed_blocks(problem: AttentionProblem, s: Schedule) -> tuple[np.ndarray, np.ndarray, int]:
    """Key blocks of equal sequences that are listed, which of them stand for several, and for how many.

    Key blocks differ by the rows that a causal mask leaves, a few at a time: in long launches the middle one of a few
    neighbours stands for them. The first and the last (no state to read, none to keep) stand for themselves, as do
    those that are left over. The number has no divisor in common with that of the slices, so that the few rows that
    are final at a key block are every slice's in turn.
    """
    blocks = ceil_div(problem.seqlen_k, s.keys)
    steps = problem.batch * problem.heads * ceil_div(problem.seqlen_q, s.rows) * blocks
    times = (blocks - 2) // LISTED_BLOCKS
    while times > 1 and (times % 2 == 0 or gcd(times, s.slices) > 1):
        times -= 1
    if steps <= LISTED_STEPS or times < 2 or is_varlen(problem):
        return np.arange(blocks), np.zeros(blocks, bool), 1
    alone = 1 + (blocks - 2) % times
    listed = np.array([*range(alone), *range(alone + times // 2, blocks - 1, times), blocks - 1])
    return listed, (listed >= alone) & (listed < blocks - 1), times


def in_place_of_others(problem: AttentionProblem, s: Schedule, tiles: int, slots: int) -> dict[str, Any]:
    """What a kernel of the ``tiles`` work tiles of :func:`work_tiles` says of those that stand for several."""
    _, repeated, times = listed_blocks(problem, s)
    return {"times": times, "repeated": repeated[np.arange(tiles) // slots % len(repeated)]} if times > 1 else {}


def _turns(problem: AttentionProblem, s: Schedule, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(key block, CTA, is there such a CTA) of the work tiles of equal sequences: CTAs take slots in turn."""
    p = problem
    ctas = p.batch * p.heads * s.slices
    listed = listed_blocks(p, s)[0]
    slot, place, wave = grid_indices(slots, len(listed), ceil_div(ctas, slots))
    j = listed[place]
    cta = wave * slots + slot
    real = cta < ctas
    last_real = int(np.flatnonzero(real)[-1]) + 1
    return j[:last_real], cta[:last_real], real[:last_real]


def _ragged_turns(problem: AttentionProblem, s: Schedule, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """:func:`_turns` of sequences of different lengths: a CTA walks the key blocks of its own sequence, and the next
    one takes the slot that is free first (by row steps; of equal ones the first)."""
    p = problem
    ctas = p.batch * p.heads * s.slices
    blocks = np.array([ceil_div(keys, s.keys) for _, keys in p.sequences()], np.int64)
    steps = blocks * np.array([ceil_div(ceil_div(queries, s.rows), s.slices) for queries, _ in p.sequences()])
    free = [(0, slot) for slot in range(min(slots, ctas))]
    runs: list[list[int]] = [[] for _ in free]
    for number in range(ctas):
        begin, slot = heapq.heappop(free)
        runs[slot].append(number)
        heapq.heappush(free, (begin + int(steps[number % p.batch]) + 1, slot))
    place = np.zeros(ctas, np.int64)
    slot_of = np.zeros(ctas, np.int64)
    for slot, run in enumerate(runs):
        own = blocks[np.array(run) % p.batch]
        place[run], slot_of[run] = np.cumsum(own) - own, slot
    each = blocks[np.arange(ctas) % p.batch]
    cta = np.repeat(np.arange(ctas), each)
    j = np.arange(len(cta)) - np.repeat(np.cumsum(each) - each, each)
    at = (np.repeat(place, each) + j) * slots + np.repeat(slot_of, each)
    size = int(at.max()) + 1
    out = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, bool)
    for array, values in zip(out, (j, cta, True), strict=True):
        array[at] = values
    return out


def work_tiles(problem: AttentionProblem, s: Schedule, slots: int) -> dict[str, np.ndarray]:
    """Coordinates of the work tiles (CTA, key block) such that slot ``x`` runs its CTA's key blocks one after another.

    CTAs come in launch order (batch fastest, then head, then slice) and take slots in turn. Row blocks ``z``,
    ``z + slices``, ... belong to slice ``z`` (but see :func:`interleaved`). With a causal mask (bottom right) key block
    ``j`` begins at its diagonal, and a row block is final, stored in the output's dtype, at the last key block it sees.
    """
    p = problem
    j, cta, real = _ragged_turns(p, s, slots) if is_varlen(p) else _turns(p, s, slots)
    batch, head, z = cta % p.batch, cta // p.batch % p.heads, cta // (p.batch * p.heads)
    queries, keys = np.array(p.sequences(), np.int64).T
    row_blocks, key_blocks = -(-queries // s.rows)[batch], -(-keys // s.keys)[batch]
    shift = (keys - queries)[batch]

    def first_row_block(block: np.ndarray) -> np.ndarray:
        """The first row block that sees key block ``block``; all see the first one, if only to write zeros."""
        if not p.causal:
            return np.zeros_like(block)
        return np.clip(np.where(block == 0, 0, (block * s.keys - shift) // s.rows), 0, row_blocks)

    start = first_row_block(j)
    middle = first_row_block(j + 1) if p.causal else np.zeros_like(j)
    middle = np.where(j == key_blocks - 1, row_blocks, middle)
    every_other = interleaved(p, s)

    def share(low: np.ndarray, high: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First row block and number of row blocks of the slice in ``low .. high``."""
        if every_other:
            first = low + (z - low) % s.slices
            count = -((first - high) // s.slices)
        else:
            first, end = (low + (high - low) * t // s.slices for t in (turn, turn + 1))
            count = end - first
        return first * s.rows, np.where(real, np.maximum(count, 0), 0)

    # few row blocks are final at a key block: runs of them go to the slices in turn
    final_row, final = share(start, middle, (z + j) % s.slices)
    below_row, below = share(middle, row_blocks, z)
    busy = real & (final + below > 0)
    flat = np.where(busy, batch * p.heads + head, -1)
    of_sequence, k_offset = {}, 0
    if is_varlen(p):
        # sequences end at the last row of their matrices
        q_offset, k_offset = (p.seqlen_q - queries)[batch], (p.seqlen_k - keys)[batch]
        final_row, below_row = final_row + q_offset, below_row + q_offset
        of_sequence = {"q_offset": q_offset, "k_offset": k_offset, "seqlen_k": keys[batch], "shift": shift}
    return {
        "q_head": flat,
        "kv_head": flat,
        "key_row": j * s.keys + k_offset,
        "final_row": final_row,
        "below_row": below_row,
        "n_only": np.where(j == 0, final, 0),
        "n_final": np.where(j == 0, 0, final),
        "n_first": np.where(j == 0, below, 0),
        "n_middle": np.where(j == 0, 0, below),
        **of_sequence,
    }


#: Trip -> (first row coordinate, is the first key block, is the last one) of the rows' four kinds.
KINDS = {
    "n_only": ("final_row", True, True),
    "n_final": ("final_row", False, True),
    "n_first": ("below_row", True, False),
    "n_middle": ("below_row", False, False),
}
