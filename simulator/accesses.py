"""Where a kernel's CTAs touch HBM tensors: every load and store as an affine access over CTAs and loops.

Also the exact SM<->L2 byte counts of a kernel, which need no simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.problem import DTYPE_BYTES
from simulator.program import Index, Kernel, Load, Loop, Op, Role, Store, Tensor, Tile, once_a_kernel, var


@dataclass(frozen=True)
class Access:
    """One load or store of the program text: ``loops`` around it and where it stands relative to them."""

    tile: Tile
    is_write: bool
    accumulate: bool
    loops: tuple[Loop, ...]
    position: str  # prologue | loop | epilogue | outer
    overfetch: float = 1.0
    from_l1: float = 0.0


def _role_accesses(role: Role) -> list[Access]:
    found: list[Access] = []

    def walk(ops: Iterable[Op], loops: tuple[Loop, ...], seen_loop: list[bool]) -> None:
        for op in ops:
            if isinstance(op, Loop):
                walk(op.body, (*loops, op), [False])
                seen_loop[0] = True
            elif isinstance(op, Load | Store):
                place = op.source if isinstance(op, Load) else op.into
                outside = "epilogue" if seen_loop[0] else "prologue"
                position = "loop" if loops else outside
                if isinstance(op, Load) and op.multicast > 1:
                    share = -(-place.rows // op.multicast)
                    place = replace(place, row=place.row + var("cluster_rank") * share, rows=share)
                write = isinstance(op, Store)
                overfetch, from_l1 = (op.overfetch, op.from_l1) if isinstance(op, Load) else (1.0, 0.0)
                adds = isinstance(op, Store) and op.accumulate
                found.append(Access(place, write, adds, loops, position, overfetch, from_l1))

    walk(role.ops, (), [False])
    return found


@once_a_kernel
def kernel_accesses(kernel: Kernel) -> tuple[Access, ...]:
    """Every HBM access of ``kernel``'s text, role by role."""
    return tuple(access for role in kernel.roles for access in _role_accesses(role))


def index_values(index: Index, env: dict[str, Any]) -> np.ndarray:
    """``index`` at ``env``: an int64 array over the CTAs, or a scalar where no coordinate enters."""
    return np.asarray(index.at(env), dtype=np.int64)


def _clipped(start: np.ndarray, size: int, limit: int) -> np.ndarray:
    """Elements of ``start .. start+size`` that lie in ``0 .. limit``."""
    overlap: np.ndarray = np.clip(np.minimum(start + size, limit) - np.maximum(start, 0), 0, None)
    return overlap


def access_bytes(access: Access, kernel: Kernel) -> np.ndarray:
    """Bytes that each CTA, with those it stands for, moves through ``access`` (int64 array over CTAs), clipped at the
    tensor's edges."""
    place, tensor = access.tile, access.tile.tensor
    size = DTYPE_BYTES[tensor.dtype]
    env = dict(kernel.coords)
    n = kernel.ctas

    def rectangle(env: dict[str, Any]) -> np.ndarray:
        rows = _clipped(index_values(place.row, env), place.rows, tensor.rows)
        cols = _clipped(index_values(place.col, env), place.cols, tensor.cols)
        head = index_values(place.head, env)
        inside = (head >= 0) & (head < tensor.heads)
        return np.broadcast_to(rows * cols * inside * size, (n,))

    def repeat(loops: tuple[Loop, ...], env: dict[str, Any]) -> np.ndarray:
        if not loops:
            return rectangle(env)
        loop, rest = loops[0], loops[1:]
        count = np.broadcast_to(np.maximum(index_values(loop.count, env), 0), (n,))
        most = int(count.max(initial=0))
        if not rest:
            quick = _contiguous(loop, count, env)
            if quick is not None:
                return quick
        total = np.zeros(n, np.int64)
        for i in range(most):
            total += np.where(i < count, repeat(rest, env | {loop.var: i}), 0)
        return total

    def _contiguous(loop: Loop, count: np.ndarray, env: dict[str, Any]) -> np.ndarray | None:
        """Adjacent tiles along rows or columns add up to one rectangle: no iteration needed."""
        coefficient = {axis: dict(getattr(place, axis).terms).get(loop.var, 0) for axis in ("row", "col", "head")}
        at0 = env | {loop.var: 0}
        head = index_values(place.head, at0)
        inside = (head >= 0) & (head < tensor.heads)
        row, col = index_values(place.row, at0), index_values(place.col, at0)
        rows, cols = _clipped(row, place.rows, tensor.rows), _clipped(col, place.cols, tensor.cols)
        if coefficient["head"]:
            return None
        if coefficient["row"] == 0 and coefficient["col"] == 0:
            return np.broadcast_to(rows * cols * count * inside * size, (n,))
        if abs(coefficient["row"]) > place.rows and coefficient["col"] == 0:
            step = abs(coefficient["row"])
            low = row if coefficient["row"] > 0 else row - (count - 1) * step
            if low.min(initial=0) >= 0:
                # whole tiles, and one that the tensor's end may cut
                whole = np.clip((tensor.rows - place.rows - low) // step + 1, 0, count)
                cut = np.where(whole < count, _clipped(low + whole * step, place.rows, tensor.rows), 0)
                return np.broadcast_to((whole * place.rows + cut) * cols * inside * size, (n,))
            return None
        if abs(coefficient["row"]) == place.rows and coefficient["col"] == 0:
            low = row if coefficient["row"] > 0 else row - (count - 1) * place.rows
            span = np.clip(np.minimum(low + count * place.rows, tensor.rows) - np.maximum(low, 0), 0, None)
            return np.broadcast_to(span * cols * inside * size, (n,))
        if abs(coefficient["col"]) == place.cols and coefficient["row"] == 0:
            low = col if coefficient["col"] > 0 else col - (count - 1) * place.cols
            span = np.clip(np.minimum(low + count * place.cols, tensor.cols) - np.maximum(low, 0), 0, None)
            return np.broadcast_to(span * rows * inside * size, (n,))
        return None

    return repeat(access.loops, env) * kernel.multiplicity()


def sm_traffic(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """Exact bytes that SMs read from and write to L2 in ``kernel``, by tensor name."""
    total: dict[str, list[int]] = {}
    for access in kernel_accesses(kernel):
        sums = total.setdefault(access.tile.tensor.name, [0, 0])
        sums[access.is_write] += round(int(access_bytes(access, kernel).sum()) * access.overfetch)
    return {name: (read, write) for name, (read, write) in total.items()}


def lone_sector_bytes(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """By tensor, what L2 sends in 32-byte sectors of which ``kernel`` uses a part: all of it, and what is beyond the
    bytes of the tiles."""
    sums: dict[str, tuple[int, int]] = {}
    for access in kernel_accesses(kernel):
        if access.overfetch > 1.0:
            used = int(access_bytes(access, kernel).sum())
            sent = round(used * access.overfetch)
            before = sums.get(access.tile.tensor.name, (0, 0))
            sums[access.tile.tensor.name] = before[0] + sent, before[1] + sent - used
    return sums


def written_tensors(kernel: Kernel) -> set[str]:
    """Names of the tensors that ``kernel`` stores to."""
    return {a.tile.tensor.name for a in kernel_accesses(kernel) if a.is_write}


def tensor_table(kernels: Iterable[Kernel]) -> dict[str, Tensor]:
    """Every tensor the kernels touch, by name, in order of first use."""
    table: dict[str, Tensor] = {}
    for kernel in kernels:
        for access in kernel_accesses(kernel):
            table.setdefault(access.tile.tensor.name, access.tile.tensor)
    return table
