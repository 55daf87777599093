"""What both split-KV implementations share: lengths by sequence, loop tables, and rewriting of borrowed roles.

The main kernel of FlashDecoding is the library's forward kernel with a shorter key loop and another destination;
its roles are taken from :mod:`algorithms.fa2` and :mod:`algorithms.fa3` and adapted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from algorithms.common import walk_coordinates
from algorithms.heuristics import KeyLoop
from simulator.errors import InputError
from simulator.problem import DTYPE_BYTES, AttentionProblem
from simulator.program import Compute, Load, Loop, Op, Role, Store, Tensor, var


def sequence_kinds(problem: AttentionProblem) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """The distinct (queries, keys) of the batch, and which of them each sequence has."""
    distinct = sorted(set(problem.sequences()))
    number = {lengths: i for i, lengths in enumerate(distinct)}
    return distinct, tuple(number[lengths] for lengths in problem.sequences())


def query_offsets(problem: AttentionProblem, group: int) -> np.ndarray:
    """First row of each sequence's queries in Q and O, whose rows end at the last one; ``group`` rows a query."""
    return np.array([(problem.seqlen_q - queries) * group for queries, _keys in problem.sequences()], np.int64)


def end_at_last_row(tensors: dict[str, Tensor], problem: AttentionProblem) -> dict[str, Tensor]:
    """``tensors`` with Q, O and LSE holding each sequence's own queries, if their numbers differ."""
    if problem.seqlens_q is None:
        return tensors
    lengths = problem.seqlens_q

    def own(tensor: Tensor) -> Tensor:
        return replace(tensor, lengths=tuple(n * tensor.packed_group for n in lengths))

    return tensors | {name: own(tensors[name]) for name in ("Q", "O", "LSE")}


def check_capacity(problem: AttentionProblem) -> int:
    """Rows that the KV cache holds for each sequence (``kv_capacity``, by default the longest length)."""
    if problem.kv_capacity is None:
        return problem.seqlen_k
    if problem.kv_capacity < problem.seqlen_k:
        raise InputError(f"kv_capacity: {problem.kv_capacity} is below seqlen_k {problem.seqlen_k}")
    return problem.kv_capacity


@dataclass(frozen=True)
class LoopTable:
    """Key loops by (kind of sequence, row block, split): ``first``, ``last``, ``masked`` and ``left`` blocks as arrays
    of that shape. A kind is a number that sequences of equal queries and keys share (:func:`sequence_kinds`)."""

    kinds: tuple[int, ...]
    first: np.ndarray
    last: np.ndarray
    masked: np.ndarray
    left: np.ndarray
    tile_n: int
    rows: int

    @classmethod
    def of(
        cls,
        kinds: tuple[int, ...],
        row_blocks: int,
        splits: Callable[[int], int],
        tile_n: int,
        rows: int,
        key_loop: Callable[[int, int, int, int], KeyLoop],
    ) -> LoopTable:
        """``key_loop(kind, row block, split, splits)`` for every distinct kind; ``rows``: rows of K in memory."""
        distinct = tuple(sorted(set(kinds)))
        most = max(splits(n) for n in distinct)
        shape = (len(distinct), row_blocks, most)
        parts = [np.zeros(shape, np.int64) for _ in range(4)]
        for i, kind in enumerate(distinct):
            for block in range(row_blocks):
                for split in range(splits(kind)):
                    loop = key_loop(kind, block, split, splits(kind))
                    for part, value in zip(parts, (loop.first, loop.last, loop.masked, loop.left), strict=True):
                        part[i, block, split] = value
        first, last, masked, left = parts
        return cls(distinct, first, last, masked, left, tile_n, rows)

    def coordinates(self, kind: np.ndarray, block: np.ndarray, split: np.ndarray) -> dict[str, np.ndarray]:
        """Loop coordinates of each CTA. An empty loop points behind the last row of K, where nothing is read."""
        at = np.searchsorted(np.array(self.kinds), kind), block, split
        first, last, n = self.first[at], self.last[at], self.tile_n
        walk = walk_coordinates(first, last, self.masked[at], self.left[at], n)
        behind = -(-self.rows // n) * n
        rows = {name: np.where(last > first, walk[name], behind) for name in walk if name.endswith("_row")}
        return walk | rows

    def live(self, kind: np.ndarray, block: np.ndarray, split: np.ndarray) -> np.ndarray:
        """Whether each CTA has any key to look at."""
        at = np.searchsorted(np.array(self.kinds), kind), block, split
        return np.asarray(self.last[at] > self.first[at])

    def live_splits(self, kind: int, block: int) -> int:
        """Leading splits of a sequence that hold a key for row block ``block``."""
        at = self.kinds.index(kind), block
        return int((self.last[at] > self.first[at]).sum())


def rewrite(ops: Iterable[Op], change: Callable[[Op], Iterable[Op]]) -> tuple[Op, ...]:
    """``ops`` with the operations ``change(op)`` (a sequence) in place of each."""
    out: list[Op] = []
    for op in ops:
        if isinstance(op, Loop):
            out.append(replace(op, body=rewrite(op.body, change)))
        else:
            out.extend(change(op))
    return tuple(out)


def rewrite_roles(roles: tuple[Role, ...], change: Callable[[Op], Iterable[Op]]) -> tuple[Role, ...]:
    """:func:`rewrite` on each of ``roles``."""
    return tuple(replace(role, ops=rewrite(role.ops, change)) for role in roles)


def by_sequence(op: Op, problem: AttentionProblem, seqlen_q: int) -> Op:
    """A mask operation whose number of keys is the CTA coordinate ``seqlen_k`` instead of a constant, and with
    ``seqlens_q`` its rows and shift those of the CTA's sequence (``q_offset``, ``shift``) instead of ``seqlen_q``'s."""
    if not (isinstance(op, Compute) and op.fn.startswith("mask")):
        return op
    params: dict[str, Any] = dict(op.params) | {"seqlen_k": var("seqlen_k"), "shift": var("seqlen_k") - seqlen_q}
    if problem.seqlens_q is not None:
        params |= {"shift": var("shift"), "row": params["row"] - var("q_offset")}
    return replace(op, params=tuple(params.items()))


def keep_fp32(op: Op) -> Op:
    """A conversion into an fp32 buffer is none."""
    if isinstance(op, Compute) and op.fn == "convert" and getattr(op.out, "dtype", "") == "fp32":
        return replace(op, fn="copy")
    return op


def skip_empty_q(op: Op) -> Op:
    """A load of Q that CTAs without keys leave out (coordinate ``q_load_head`` is -1 there)."""
    if isinstance(op, Load) and op.source.tensor.name == "Q":
        return replace(op, source=replace(op.source, head=var("q_load_head")))
    return op


def stores_nothing(op: Op) -> bool:
    """A store of a tile without rows (a warpgroup behind the end of the matrix)."""
    return isinstance(op, Store) and op.into.rows == 0


def cache_bytes(problem: AttentionProblem, capacity: int, v_cols: int) -> int:
    """Bytes of the K and V cache of ``capacity`` rows a sequence; ``v_cols`` of V lie beside K (MLA: none)."""
    width = (problem.head_dim + v_cols) * DTYPE_BYTES[problem.dtype]
    return problem.batch * problem.kv_heads * capacity * width


def metadata(name: str, rows: int, kind: str) -> Tensor:
    """A vector of int32 in HBM."""
    return Tensor(name, 1, rows, 1, "int32", kind, rows)


__all__ = [
    "LoopTable",
    "by_sequence",
    "cache_bytes",
    "check_capacity",
    "end_at_last_row",
    "keep_fp32",
    "metadata",
    "query_offsets",
    "rewrite",
    "rewrite_roles",
    "sequence_kinds",
    "skip_empty_q",
    "stores_nothing",
]
