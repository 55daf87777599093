"""What tile operations work on: positions, tensors in HBM, tiles of them, buffers and pipes on chip.

The operations themselves, roles, kernels and programs are in :mod:`simulator.program`, which also offers these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.problem import DTYPE_BYTES


@dataclass(frozen=True)
class Index:
    """An affine expression ``const + sum(coefficient * variable)`` of CTA coordinates and loop variables."""

    const: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Index | int) -> Index:
        other = as_index(other)
        merged = dict(self.terms)
        for name, coefficient in other.terms:
            merged[name] = merged.get(name, 0) + coefficient
        return Index(self.const + other.const, tuple(sorted((n, c) for n, c in merged.items() if c)))

    __radd__ = __add__

    def __mul__(self, factor: int) -> Index:
        return Index(self.const * factor, tuple((n, c * factor) for n, c in self.terms if c * factor))

    __rmul__ = __mul__

    def __neg__(self) -> Index:
        return self * -1

    def __sub__(self, other: Index | int) -> Index:
        return self + (-as_index(other))

    def at(self, env: Mapping[str, Any]) -> Any:
        """The value in ``env`` (numbers or NumPy arrays by variable name)."""
        value = self.const
        for name, coefficient in self.terms:
            value = value + coefficient * env[name]
        return value


def as_index(value: Index | int) -> Index:
    """``value`` as an :class:`Index`."""
    return value if isinstance(value, Index) else Index(int(value))


def var(name: str) -> Index:
    """The loop variable or CTA coordinate called ``name``."""
    return Index(0, ((name, 1),))


@dataclass(frozen=True)
class Tensor:
    """A stack of ``heads`` matrices ``[rows, cols]`` in HBM.

    ``heads`` counts every matrix (batch times heads). ``packed_group`` > 1 marks a view in which the
    query heads of one KV head are interleaved along the rows (row = query * group + head), as GQA packing
    reads Q and O. ``page_rows`` > 0 says that rows lie in pages that a table maps.
    ``block_rows`` x ``block_cols`` is the block by which the L2 model tracks the tensor. ``lengths``, where sequences
    differ, are the rows that each sequence's matrices hold, at their end; the rows before them do not exist.
    """

    name: str
    heads: int
    rows: int
    cols: int
    dtype: str
    kind: str = "input"
    block_rows: int = 128
    block_cols: int = 0
    packed_group: int = 1
    page_rows: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        rows = self.heads // len(self.lengths) * sum(self.lengths) if self.lengths else self.heads * self.rows
        return rows * self.cols * DTYPE_BYTES[self.dtype]

    @property
    def tracked_cols(self) -> int:
        """Columns of one L2 block."""
        return self.block_cols or self.cols


@dataclass(frozen=True)
class Tile:
    """A rectangle of one matrix: ``rows`` from ``row`` on, ``cols`` columns from ``col`` on; clipped to the matrix."""

    tensor: Tensor
    head: Index
    row: Index
    rows: int
    col: Index
    cols: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole, unclipped tile."""
        return self.rows * self.cols * DTYPE_BYTES[self.tensor.dtype]


def tile(
    tensor: Tensor, head: Index | int, row: Index | int, rows: int, col: Index | int = 0, cols: int | None = None
) -> Tile:
    """Shorthand for :class:`Tile`; ``cols`` defaults to the full width."""
    return Tile(tensor, as_index(head), as_index(row), rows, as_index(col), tensor.cols if cols is None else cols)


@dataclass(frozen=True)
class Buffer:
    """On-chip storage ``[rows, cols]``: ``space`` is ``smem`` (shared by the CTA) or ``reg`` (private to a role)."""

    name: str
    rows: int
    cols: int = 1
    dtype: str = "fp32"
    space: str = "reg"

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.rows * self.cols * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Pipe:
    """A ring of ``stages`` SMEM slots that a loader fills and ``consumers`` roles drain.

    ``acquire`` waits for a free slot, a load into the pipe fills it, ``consume`` waits for the next full
    slot, and a slot is free again once every consumer has released it.
    """

    name: str
    rows: int
    cols: int
    dtype: str
    stages: int = 1
    consumers: int = 1

    @property
    def bytes(self) -> int:
        """Size of all stages in bytes."""
        return self.rows * self.cols * DTYPE_BYTES[self.dtype] * self.stages


@dataclass(frozen=True)
class View:
    """Some rows (and columns) of a buffer or of the current slot of a pipe; ``None`` means to the end."""

    source: Buffer | Pipe
    row: int = 0
    rows: int | None = None
    col: int = 0
    cols: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the view."""
        rows = self.source.rows - self.row if self.rows is None else self.rows
        cols = self.source.cols - self.col if self.cols is None else self.cols
        return rows, cols

    @property
    def space(self) -> str:
        """Where the operand lives."""
        return "smem" if isinstance(self.source, Pipe) else self.source.space

    @property
    def dtype(self) -> str:
        """Element type."""
        return self.source.dtype


def view(operand: Buffer | Pipe | View) -> View:
    """``operand`` as a :class:`View`."""
    return operand if isinstance(operand, View) else View(operand)
