"""Which query blocks a key block's CTA walks in backward passes, and where sequences of different lengths stand.

Matrices end at their last row as in :mod:`algorithms.varlen`. What the kernels keep for themselves (rowsum(dO * O), dQ,
dK and dV in fp32) is padded to whole tiles for each sequence, so that it is never predicated; its sequences end at
its own last row, ``shift`` rows from where the matrices' stand.
Source: csrc/flash_attn/flash_api.cpp mha_varlen_bwd; flash_attn/cute/interface.py _flash_attn_bwd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from algorithms.common import ceil_div, grid_indices
from algorithms.kernel_tables import backward_row_blocks
from algorithms.varlen import is_varlen, live_trip, returns_at_once
from simulator.problem import AttentionProblem
from simulator.program import Index, Kernel, Tensor, var

#: Tensors whose rows are keys.
KEY_ROWS = frozenset({"K", "V", "dK", "dV", "dK_expanded", "dV_expanded"})


def padded_lengths(lengths: tuple[int, ...], tile: int) -> tuple[int, ...]:
    """Each length rounded up to whole tiles."""
    return tuple(ceil_div(n, tile) * tile for n in lengths)


def ragged(tensors: dict[str, Tensor], problem: AttentionProblem, accumulators: dict[str, int]) -> dict[str, Tensor]:
    """``tensors`` with the rows of each sequence's own length; ``accumulators``: name -> rows of their padding.

    Unchanged where all sequences are equal.
    """
    if not is_varlen(problem):
        return tensors
    queries, keys = zip(*problem.sequences(), strict=True)
    out = {}
    for name, tensor in tensors.items():
        of_keys = name in KEY_ROWS or name in ("dK_accum", "dV_accum")
        own = keys if of_keys else queries
        if name in accumulators:
            own = padded_lengths(own, accumulators[name])
        out[name] = replace(tensor, lengths=own)
    return out


def shifts(problem: AttentionProblem, pad: int, of_keys: bool = False) -> np.ndarray:
    """Rows from a sequence's place in its matrix to that in an accumulator padded to ``pad`` rows, ``[batch]``."""
    own = np.array([pair[of_keys] for pair in problem.sequences()], np.int64)
    longest = problem.seqlen_k if of_keys else problem.seqlen_q
    return (ceil_div(longest, pad) * pad - -(-own // pad) * pad) - (longest - own)


def shift_index(problem: AttentionProblem, name: str = "acc_shift") -> Index:
    """The coordinate ``name`` with lengths by sequence, else nothing to add."""
    return var(name) if is_varlen(problem) else Index(0)


def row_tiles(
    problem: AttentionProblem,
    tile: int,
    heads: int,
    head_name: str,
    pad: int,
    of_keys: bool = False,
    by_head: bool = False,
) -> dict[str, np.ndarray]:
    """Coordinates of CTAs that take ``tile`` rows of one head each: row block fastest, then batch and head (or head and
    batch: ``by_head``), and ``acc_shift``. CTAs behind the end of their sequence return at once: left out."""
    longest = problem.seqlen_k if of_keys else problem.seqlen_q
    blocks = ceil_div(longest, tile)
    if by_head:
        block, head, batch = grid_indices(blocks, heads, problem.batch)
    else:
        block, batch, head = grid_indices(blocks, problem.batch, heads)
    if not is_varlen(problem):
        return {head_name: batch * heads + head, "row0": block * tile}
    own = np.array([pair[of_keys] for pair in problem.sequences()], np.int64)
    live = block < -(-own[batch] // tile)
    block, batch, head = (x[live] for x in (block, batch, head))
    return {
        head_name: batch * heads + head,
        "row0": block * tile + longest - own[batch],
        "acc_shift": shifts(problem, pad, of_keys)[batch],
    }


@dataclass(frozen=True)
class Walk:
    """Where the row loops of a kernel stand: the trips that count them, their first rows, and whether masked."""

    count: Index
    first_row: Index
    masked: bool


@dataclass(frozen=True)
class Walks:
    """Query blocks of each CTA's key block: ``first`` to ``stop``, of which the last ``left`` and the first ``masked``
    test the mask; whether the CTA has keys at all; and where its sequence stands."""

    first: np.ndarray
    stop: np.ndarray
    left: np.ndarray
    masked: np.ndarray
    live: np.ndarray
    places: dict[str, np.ndarray]

    def of_live(self) -> Walks:
        """Those of the CTAs that have keys."""
        first, stop, left, masked, live = (
            x[self.live] for x in (self.first, self.stop, self.left, self.masked, self.live)
        )
        return Walks(first, stop, left, masked, live, {name: x[self.live] for name, x in self.places.items()})


def walks_of(
    problem: AttentionProblem, tile_m: int, tile_n: int, block: np.ndarray, batch: np.ndarray, even: bool
) -> Walks:
    """The walks of CTAs with key block ``block`` of sequence ``batch``. ``even``: the last key block needs no mask.

    ``places`` are the coordinates of :func:`algorithms.varlen.within_sequence`, and ``key0``.
    """
    p = problem
    lengths, which = np.unique(np.array(p.sequences(), np.int64), axis=0, return_inverse=True)
    key_blocks = -(-lengths[:, 1] // tile_n)
    parts = np.zeros((4, len(lengths), int(key_blocks.max())), np.int64)
    for i, (queries, keys) in enumerate(lengths.tolist()):
        for n in range(int(key_blocks[i])):
            parts[:, i, n] = _walk(p, tile_m, tile_n, n, queries, keys, even)
    of = which.reshape(-1)[batch]
    live = block < key_blocks[of]
    first, stop, left, masked = parts[:, of, np.where(live, block, 0)] * live
    queries, keys = lengths[of].T
    places = {
        "q_offset": p.seqlen_q - queries,
        "k_offset": p.seqlen_k - keys,
        "seqlen_k": keys,
        "shift": keys - queries,
        "key0": block * tile_n + p.seqlen_k - keys,
    }
    return Walks(first, stop, left, masked, live, places)


def _walk(
    p: AttentionProblem, tile_m: int, tile_n: int, n: int, queries: int, keys: int, even: bool
) -> tuple[int, int, int, int]:
    seen = backward_row_blocks(
        key_block=n, tile_m=tile_m, tile_n=tile_n, seqlen_q=queries, seqlen_k=keys, sides=p.sides
    )
    (left, right), shift, end = p.sides, queries - keys, (n + 1) * tile_n
    if not even and end >= keys:
        return seen.start, seen.stop, 0, len(seen)
    masked = sum(1 for m in seen if right >= 0 and m * tile_m < end + shift - right)
    at_left = sum(1 for m in seen if left >= 0 and (m + 1) * tile_m >= n * tile_n + shift + left)
    return seen.start, seen.stop, min(at_left, len(seen) - masked), masked


def walk_coordinates(seen: Walks, tile_m: int) -> tuple[dict[str, np.ndarray], list[Walk]]:
    """Trips ``n_*``, first rows ``*_row`` and the walks that they make, downwards: query blocks at a window's left edge
    (where there is one), those that need no mask, and those at the right edge or at the keys' end."""
    full = seen.stop - seen.first - seen.left - seen.masked
    rows = {"left": seen.stop - 1, "full": seen.stop - 1 - seen.left, "masked": seen.first + seen.masked - 1}
    counts = {"left": seen.left, "full": full, "masked": seen.masked}
    parts = [part for part in counts if part != "left" or seen.left.any()]
    coords: dict[str, np.ndarray] = {}
    for part in parts:
        coords |= {f"n_{part}": counts[part], f"{part}_row": rows[part] * tile_m + seen.places["q_offset"]}
    return coords, [Walk(var(f"n_{part}"), var(f"{part}_row"), part != "full") for part in parts]


def where_live(kernel: Kernel, live: np.ndarray) -> Kernel:
    """``kernel`` whose CTAs without keys return at once."""
    coords = dict(kernel.coords) | {"n_live": live.astype(np.int64)}
    if not live_trip(coords):
        return kernel
    return replace(
        kernel, roles=returns_at_once(kernel.roles), coords=coords, trips=(*kernel.trips, *live_trip(coords))
    )
