"""What e4m3 adds to FlashAttention-3's schedule (Shah et al. 2024, section 3.3), applied to the 16-bit roles.

* wgmma takes fp8 operands K-major only, so V is transposed in SMEM: the producer warpgroup, having issued a block's
  copies, waits for the block before it, reads it with LDSM.T, permutes bytes and writes it with STSM.
* exp's result is scaled by 2^8, so that P uses e4m3's range (up to 448); the row sum carries the same factor.
* Column permutations of S and O are register renamings: free.

Not in the numbers: the tensor core's own rounding of fp8 products (about 14 bits are kept in an accumulation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from algorithms.common import fill
from algorithms.kernel_tables import Fa3Tile
from simulator.program import (
    Acquire,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Load,
    Loop,
    Op,
    Pipe,
    Release,
    Role,
    Signal,
    View,
    Wait,
    walk_ops,
)
from simulator.tile_ops import TILE_OPS, TileOp

#: Power of two by which exp's result is scaled (softmax.h, Max_offset).
MAX_OFFSET = 8
# two byte permutations for each 8 bytes
TILE_OPS["byte_permute"] = TileOp(lambda a, p: a[0], {"alu": 0.25})


def _with_pipe(op: Op, pipe: Pipe) -> Op:
    """``op`` with ``pipe`` in place of the one of that name."""
    changes: dict[str, Any] = {}
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Pipe) and value.name == pipe.name:
            changes[f.name] = pipe
        elif isinstance(value, View) and isinstance(value.source, Pipe) and value.source.name == pipe.name:
            changes[f.name] = replace(value, source=pipe)
    return replace(op, **changes) if changes else op


def _map(ops: Iterable[Op], change: Callable[[Op], Iterable[Op]]) -> tuple[Op, ...]:
    out: list[Op] = []
    for op in ops:
        if isinstance(op, Loop):
            out.append(replace(op, body=_map(op.body, change)))
        else:
            out.extend(change(op))
    return tuple(out)


def _find_pipe(roles: tuple[Role, ...], name: str) -> Pipe:
    return next(op.pipe for _, op in walk_ops(roles[1].ops) if isinstance(op, Consume) and op.pipe.name == name)


def _loader(loader: Role, v_pipe: Pipe, groups: int) -> Role:
    """V of a block is fetched with its K, and transposed once the next block's copies are issued."""
    block = Buffer("permuted", 1)
    size = v_pipe.rows * v_pipe.cols
    transpose = [
        Consume(v_pipe),
        Compute("byte_permute", block, (block,), v_pipe.rows, v_pipe.cols),
        Exchange("V^T", size, size),
        *(Signal(f"v_ready{i}") for i in range(groups)),
        Release(v_pipe),
    ]
    any_v = next(
        op for loop in loader.ops if isinstance(loop, Loop) for op in loop.body
        if isinstance(op, Load) and op.source.tensor.name == "V"
    )  # fmt: skip

    def is_v(op: Op) -> bool:
        return (isinstance(op, Acquire) and op.pipe.name == "v") or (
            isinstance(op, Load) and op.source.tensor.name == "V"
        )

    def with_v(ops: Sequence[Op]) -> list[Op]:
        """``ops`` with V's own copies replaced by copies of the blocks that K's copies fetch."""
        out: list[Op] = []
        for i, op in enumerate(ops):
            if isinstance(op, Acquire) and op.pipe.name == "k":
                copy = ops[i + 1]
                assert isinstance(copy, Load), "a slot is acquired for the copy that follows"
                source = replace(any_v.source, row=copy.source.row)
                out += [Acquire(v_pipe), replace(any_v, source=source, into=v_pipe)]
            if not is_v(op):
                out.append(op)
        return out

    straight = with_v([op for op in loader.ops if not isinstance(op, Loop)])
    loops = [replace(op, body=tuple([*with_v(op.body), *transpose])) for op in loader.ops if isinstance(op, Loop)]
    return replace(loader, ops=(*straight, *loops, *transpose), warps=4)


def adapt(roles: tuple[Role, ...], t: Fa3Tile, softmax_scale: float) -> tuple[Role, ...]:
    """The 16-bit roles of :func:`algorithms.fa3_roles.roles` (loader first) as the e4m3 kernel runs them."""
    if not t.v_transposed_in_kernel:
        raise ValueError("e4m3 without V's transposition in the kernel (a column-major V) is not modelled")
    loader, *consumers = roles
    old = _find_pipe(roles, "v")
    # raw and transposed V have a ring each; the producer is one more consumer of the raw one
    v_pipe = replace(old, stages=2 * old.stages, consumers=old.consumers + 1)
    groups = len(consumers)

    def consumer(index: int, role: Role) -> Role:
        def change(op: Op) -> list[Op]:
            op = _with_pipe(op, v_pipe)
            if isinstance(op, Consume) and op.pipe.name == "v":
                return [Wait(f"v_ready{index}"), op]
            return _offset_exponent(op, softmax_scale)

        return replace(role, ops=_map(role.ops, change))

    return (_loader(loader, v_pipe, groups), *(consumer(i, role) for i, role in enumerate(consumers)))


def _offset_exponent(op: Op, softmax_scale: float) -> list[Op]:
    """exp and LSE relative to a maximum lowered by MAX_OFFSET powers of two: P and its sum are 2^8 as large."""
    if not isinstance(op, Compute):
        return [op]
    rows = op.rows
    lowered, offset = Buffer("m_lowered", rows), Buffer("m_offset", rows)
    if op.fn == "fill" and isinstance(op.out, Buffer) and op.out.name == "m":
        return [op, fill(offset, -MAX_OFFSET * math.log(2) / softmax_scale)]
    if op.fn == "row_max":
        return [op, Compute("add", lowered, (op.out, offset), rows, 1)]
    if op.fn == "exp":
        return [replace(op, args=(op.args[0], lowered))]
    if op.fn == "lse":
        return [replace(op, args=(lowered, op.args[1]))]
    return [op]
