"""The byte reading without a cache: what SMs ask of L2 (exact), and work by execution unit."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.accesses import sm_traffic
from simulator.program import Compute, Instructions, Kernel, Loop, Matmul, Program, once_a_kernel
from simulator.tile_ops import UNITS, work_of

__all__ = ["executed_work", "program_traffic", "sm_traffic"]


@once_a_kernel
def executed_work(kernel: Kernel) -> dict[str, float]:
    """Work that ``kernel`` executes, padding included: ``matmul`` in FLOP, the other units in lane-operations."""
    total = dict.fromkeys(("matmul", *UNITS), 0.0)
    # operations of one loop's body are counted once: by the loops themselves, which live as long as the kernel
    counted: dict[tuple[int, ...], int] = {}
    for _role, loops, op in kernel.walk():
        if not isinstance(op, Matmul | Compute | Instructions):
            continue
        around = tuple(id(loop) for loop in loops)
        if around not in counted:
            counted[around] = _repetitions(loops, kernel)
        times = counted[around]
        if isinstance(op, Matmul):
            m, n, k = op.mnk
            total["matmul"] += 2.0 * m * n * k * times
        if not isinstance(op, Compute):
            for unit, amount in op.instructions if isinstance(op, Matmul) else op.work:
                if unit in total:
                    total[unit] += amount * times
        else:
            for unit, amount in work_of(op.fn, op.rows, op.cols).items():
                total[unit] += amount * times
    return total


def _repetitions(loops: tuple[Loop, ...], kernel: Kernel) -> int:
    """How often the body inside ``loops`` runs over all CTAs."""
    n = kernel.ctas
    if not loops:
        return kernel.launched

    def count(loops: tuple[Loop, ...], env: dict[str, Any]) -> np.ndarray:
        loop, rest = loops[0], loops[1:]
        trips = np.broadcast_to(np.maximum(np.asarray(loop.count.at(env), np.int64), 0), (n,))
        if not rest:
            return trips
        if any(name == loop.var for name, _ in rest[0].count.terms):
            most = int(trips.max(initial=0))
            parts = (np.where(i < trips, count(rest, env | {loop.var: i}), 0) for i in range(most))
            return sum(parts, np.zeros(n, np.int64))
        total: np.ndarray = trips * count(rest, env)
        return total

    return int((count(loops, dict(kernel.coords)) * kernel.multiplicity()).sum())


def program_traffic(program: Program) -> dict[str, tuple[int, int]]:
    """SM<->L2 bytes of all kernels by tensor: (read, written)."""
    total: dict[str, list[int]] = {}
    for kernel in program.kernels:
        for name, (read, write) in sm_traffic(kernel).items():
            sums = total.setdefault(name, [0, 0])
            sums[0] += read
            sums[1] += write
    return {name: (r, w) for name, (r, w) in total.items()}
