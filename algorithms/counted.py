"""Instructions that a compiled kernel executes beyond its tile operations, from counts on hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import fsum

from algorithms.instruction_counts import InstructionMix
from simulator.program import Compute, Exchange, Instructions, Matmul, Op, view, walk_ops
from simulator.sm_costs import SMEM_LINE_BYTES
from simulator.tile_ops import UNITS, work_of


def residual_instructions(ops: Iterable[Op], mix: InstructionMix, elements: int) -> tuple[tuple[str, float], ...]:
    """Lane-operations by unit that ``mix`` (per score element) counts and the :class:`Compute` operations of one
    iteration ``ops`` do not account for; tensor instructions are left out of ``issue``."""
    modelled = dict.fromkeys(UNITS, 0.0)
    for _loops, op in walk_ops(ops):
        if isinstance(op, Compute):
            for unit, amount in work_of(op.fn, op.rows, op.cols).items():
                modelled[unit] += amount
    fma = max(0.0, mix.fma * elements - modelled["fma"])
    alu = max(0.0, mix.alu * elements - modelled["alu"] - modelled["convert"])
    issue = (mix.issue - mix.tensor) * elements - fsum(modelled.values()) - fma - alu
    return tuple((unit, amount) for unit, amount in (("fma", fma), ("alu", alu), ("issue", max(0.0, issue))) if amount)


def instructions_around(lanes: float, ops: Iterable[Op]) -> tuple[tuple[str, float], ...]:
    """What ``lanes`` counted outside a kernel's loop leave beside half of the :class:`Compute` operations ``ops``."""
    modelled = sum(sum(work_of(op.fn, op.rows, op.cols).values()) for op in ops if isinstance(op, Compute))
    return (("issue", max(0.0, lanes - modelled / 2)),)


def wavefronts_of(ops: list[Op], warps: int) -> int:
    """Wavefronts that the operands in SMEM and the exchanges of ``ops`` account for: of a product split by columns,
    every warp reads all of the first operand."""
    size = sum(op.bytes_written + op.bytes_read for op in ops if isinstance(op, Exchange))
    for op in ops:
        if isinstance(op, Matmul):
            m, n, k = op.mnk
            size += 2 * k * n if view(op.b).space == "smem" else 0
            size += 2 * k * m * (warps if op.split == "cols" else 1) if view(op.a).space == "smem" else 0
    return size // SMEM_LINE_BYTES


def among_streams(
    ops: list[Op], modelled: list[Op], mix: InstructionMix, elements: int, wavefronts: float = 0.0
) -> list[Op]:
    """``ops`` of a backward block with what ``mix`` counts beyond ``modelled`` (:func:`residual_instructions`), half
    of it among the exponentials and half among the gradients of S: fragment loads, addresses, predicates, and
    ``wavefronts`` through SMEM and L1."""
    beyond = residual_instructions(modelled, mix, elements)
    beyond += (("wavefronts", wavefronts),) if wavefronts else ()
    half = Instructions("counted", tuple((unit, amount / 2) for unit, amount in beyond))
    out: list[Op] = []
    for op in ops:
        out.append(op)
        if isinstance(op, Compute) and op.fn.startswith(("exp_lse", "exp2_lse", "softmax_grad")):
            out.append(half)
    return out


def spread_over_matmuls(ops: list[Op], work: tuple[tuple[str, float], ...], tensor_instructions: float) -> list[Op]:
    """``ops`` with ``work`` and the issue slots of ``tensor_instructions`` shared equally by their matmuls."""
    matmuls = sum(isinstance(op, Matmul) for op in ops)
    lanes = dict(work)
    lanes["issue"] = lanes.get("issue", 0.0) + tensor_instructions
    share = tuple((unit, amount / matmuls) for unit, amount in lanes.items())
    return [replace(op, instructions=share) if isinstance(op, Matmul) else op for op in ops]
