"""Batches of sequences of different lengths (``seqlens_q``/``seqlens_k``) for FA2's and FA3's forward kernels.

Sequences end at the last row of their matrix here (:class:`~simulator.program.Tensor` ``lengths``), so that a tile at a
sequence's end is cut off where the kernels predicate it. Both libraries hold sequences packed one after another; TMA
reads the next sequence's first rows with a tile that is not full, which other CTAs read anyway: not counted.

FA2 launches a CTA for every row block of the *longest* sequence; those behind the end of theirs return at once. FA3's
prepare kernel counts each sequence's row blocks, and its persistent CTAs take only tiles that exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from algorithms.combine import helper_kernel
from algorithms.common import ceil_div, grid_indices, walk_coordinates
from algorithms.decoding_common import metadata, rewrite_roles
from algorithms.heuristics import KeyLoop, fa2_key_loop, fa3_key_loop, fa3_varlen_section_heads
from algorithms.kernel_tables import Fa2Tile, Fa3Tile
from simulator.problem import AttentionProblem
from simulator.program import Compute, Kernel, Loop, Op, Role, Tensor, Trip, var

#: Sequences that one CTA of FA3's prepare kernel serves (31 a warp, 32 warps).
_PREPARE_SEQUENCES_PER_CTA = 992


def is_varlen(problem: AttentionProblem) -> bool:
    """Whether lengths are given by sequence."""
    return problem.seqlens_q is not None or problem.seqlens_k is not None


def ragged(tensors: dict[str, Tensor], problem: AttentionProblem) -> dict[str, Tensor]:
    """``tensors`` with the rows of each sequence's own length."""
    queries, keys = zip(*problem.sequences(), strict=True)

    def lengths(tensor: Tensor) -> tuple[int, ...]:
        own = keys if tensor.name in ("K", "V") else queries
        return tuple(n * tensor.packed_group for n in own)

    return {name: replace(t, lengths=lengths(t)) for name, t in tensors.items()}


def _coordinates(
    problem: AttentionProblem,
    tile_m: int,
    tile_n: int,
    group: int,
    block: np.ndarray,
    batch: np.ndarray,
    key_loop: Callable[[int, int, int], KeyLoop],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Coordinates of the CTAs of row block ``block`` of sequence ``batch``, and which have rows at all.

    ``key_loop(queries, keys, row block)`` is asked once for each pair of lengths.
    """
    lengths, which = np.unique(np.array(problem.sequences(), np.int64), axis=0, return_inverse=True)
    row_blocks = -(-lengths[:, 0] * group // tile_m)
    parts = np.zeros((4, len(lengths), int(row_blocks.max())), np.int64)
    for i, (queries, keys) in enumerate(lengths.tolist()):
        for j in range(int(row_blocks[i])):
            loop = key_loop(queries, keys, j)
            parts[:, i, j] = loop.first, loop.last, loop.masked, loop.left
    of = which.reshape(-1)[batch]
    live = block < row_blocks[of]
    first, last, masked, left = parts[:, of, np.where(live, block, 0)] * live
    queries, keys = lengths[of].T
    k_offset, q_offset = problem.seqlen_k - keys, (problem.seqlen_q - queries) * group
    walk = walk_coordinates(first, last, masked, left, tile_n)
    behind = ceil_div(problem.seqlen_k, tile_n) * tile_n
    rows = {n: np.where(last > first, walk[n] + k_offset, behind) for n in walk if n.endswith("_row")}
    coords = walk | rows
    coords |= {
        "row0": block * tile_m + q_offset,
        "q_offset": q_offset,
        "k_offset": k_offset,
        "seqlen_k": keys,
        "shift": keys - queries,
    }
    return coords, live


def within_sequence(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """``roles`` with masks and dropout that count rows and keys from the beginning of their sequence."""

    def change(op: Op) -> tuple[Op, ...]:
        if not isinstance(op, Compute) or not op.fn.startswith(("mask", "dropout")):
            return (op,)
        params: dict[str, Any] = dict(op.params)
        params |= {"row": params["row"] - var("q_offset"), "col": params["col"] - var("k_offset")}
        if op.fn.startswith("mask"):
            params |= {"seqlen_k": var("seqlen_k"), "shift": var("shift")}
        return (replace(op, params=tuple(params.items())),)

    return rewrite_roles(roles, change)


# FA2 -----------------------------------------------------------------------------------------------------------------


def fa2_coordinates(problem: AttentionProblem, t: Fa2Tile) -> dict[str, np.ndarray]:
    """CTAs in launch order: row block of the longest sequence, batch, head. ``n_live`` is 0 for CTAs without rows."""
    block, batch, head = grid_indices(ceil_div(problem.seqlen_q, t.tile_m), problem.batch, problem.heads)
    coords, live = _coordinates(
        problem,
        t.tile_m,
        t.tile_n,
        1,
        block,
        batch,
        lambda queries, keys, row_block: fa2_key_loop(
            row_block=row_block,
            tile_m=t.tile_m,
            tile_n=t.tile_n,
            seqlen_q=queries,
            seqlen_k=keys,
            causal=problem.causal,
            # lengths by sequence: the kernel that tests every last block
            even_head_dim=False,
            head_dim=problem.head_dim,
            window=problem.window,
        ),
    )
    return coords | {
        "q_head": np.where(live, batch * problem.heads + head, -1),
        "kv_head": batch * problem.kv_heads + head // problem.group,
        "n_live": live.astype(np.int64),
    }


def returns_at_once(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """FA2's ``roles`` with what stands outside the key loops done only by CTAs that have rows (``n_live``)."""

    def guard(role: Role) -> Role:
        out: list[Op | list[Op]] = []
        for op in role.ops:
            if isinstance(op, Loop):
                out.append(op)
            elif out and isinstance(out[-1], list):
                out[-1].append(op)
            else:
                out.append([op])
        ops = [Loop("live", var("n_live"), x) if isinstance(x, list) else x for x in out]
        return replace(role, ops=tuple(ops))

    return tuple(guard(role) for role in roles)


def live_trip(coords: dict[str, np.ndarray]) -> tuple[Trip, ...]:
    """The trip of :func:`returns_at_once` where some CTA returns at once."""
    return () if coords["n_live"].all() else (Trip("n_live", condition=True),)


# FA3 -----------------------------------------------------------------------------------------------------------------


def fa3_coordinates(problem: AttentionProblem, t: Fa3Tile, packed: bool) -> dict[str, np.ndarray]:
    """Work tiles in the order of the varlen scheduler.

    Sequences with the most key blocks come first (causal: the most keys beyond their queries; a window: as given).
    Inside one, row blocks vary fastest, then heads; causal or with a window, sections of heads that share L2 walk the
    row blocks from the last. Source: hopper/flash_prepare_scheduler.cu, tile_scheduler.hpp.
    """
    p, group = problem, problem.group if packed else 1
    heads = p.kv_heads if packed else p.heads
    local = p.window is not None
    row_blocks = [ceil_div(q * group, t.tile_m) for q, _ in p.sequences()]
    key_blocks = [ceil_div(k, t.tile_n) for _, k in p.sequences()]
    weight = [k * t.tile_n - (m * t.tile_m if p.causal else 0) for m, k in zip(row_blocks, key_blocks, strict=True)]
    order = range(p.batch) if local else sorted(range(p.batch), key=lambda b: -weight[b])
    parts: list[tuple[np.ndarray, ...]] = []
    for b in order:
        if not (p.causal or local):
            block, head = grid_indices(row_blocks[b], heads)
            parts.append((block, head, np.full_like(block, b)))
            continue
        section = fa3_varlen_section_heads(
            key_blocks=key_blocks[b],
            tile_n=t.tile_n,
            head_dim=p.head_dim,
            head_dim_v=p.head_dim_v,
            element_bytes=p.element_bytes,
            group=p.group,
            pack_gqa=packed,
            heads=heads,
        )
        for start in range(0, heads, section):
            head, block = grid_indices(min(section, heads - start), row_blocks[b])
            parts.append((row_blocks[b] - 1 - block, start + head, np.full_like(block, b)))
    block, head, batch = (np.concatenate(axis) for axis in zip(*parts, strict=True))
    coords, _live = _coordinates(
        p,
        t.tile_m,
        t.tile_n,
        group,
        block,
        batch,
        lambda queries, keys, row_block: fa3_key_loop(
            row_block=row_block,
            tile_m=t.tile_m,
            tile_n=t.tile_n,
            seqlen_q=queries,
            seqlen_k=keys,
            causal=p.causal,
            group=group,
            window=p.window,
        ),
    )
    return coords | {
        "q_head": batch * heads + head,
        "kv_head": batch * p.kv_heads + head // (1 if packed else p.group),
        "cluster_rank": np.zeros_like(block),
    }


def prepare_kernel(problem: AttentionProblem) -> Kernel:
    """The kernel that counts each sequence's blocks, sorts the batch and clears the scheduler's counter."""
    local = problem.window is not None
    vectors = 2 + (not local) + (problem.causal or local)
    lengths = metadata("cu_seqlens", 2 * (problem.batch + 1), "input")
    written = metadata("scheduler_metadata", ceil_div(problem.batch, 4) * 4 * vectors + 1, "scratch")
    ctas = ceil_div(problem.batch, _PREPARE_SEQUENCES_PER_CTA)
    threads = 32 * min(32, ceil_div(problem.batch, 31))
    return helper_kernel("prepare_varlen_num_blocks", lengths, written, ctas, threads, problem.dtype)


def padded(problem: AttentionProblem) -> AttentionProblem:
    """The alternative to lengths by sequence: every sequence as long as the longest."""
    return problem.with_(seqlens_q=None, seqlens_k=None)


def padding_share(problem: AttentionProblem) -> float:
    """Share of the padded problem's (query, key) pairs that no sequence has."""
    whole = padded(problem).unmasked_pairs()
    return 1.0 - problem.unmasked_pairs() / whole if whole else 0.0
