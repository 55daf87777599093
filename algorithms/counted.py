"""Instructions that a compiled kernel executes beyond its tile operations, from counts on hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import fsum

from algorithms.instruction_counts import InstructionMix
from simulator.program import Compute, Instructions, Matmul, Op, walk_ops
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


def among_streams(ops: list[Op], modelled: list[Op], mix: InstructionMix, elements: int) -> list[Op]:
    """``ops`` of a backward block with what ``mix`` counts beyond ``modelled`` (:func:`residual_instructions`), half
    of it among the exponentials and half among the gradients of S: fragment loads, addresses, predicates."""
    beyond = residual_instructions(modelled, mix, elements)
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
