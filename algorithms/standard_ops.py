"""What unfused attention's PyTorch kernels do beyond the shared tile operations, and their counted instructions.

PyTorch's row-wise and element-wise kernels spend most of their issue slots on what a fused kernel never does: index
arithmetic for broadcast operands, 2-byte accesses, an accurate ``expf`` and an IEEE division per element. Those
instructions were counted (:mod:`algorithms.instruction_counts`); what the tile operations do not account for is
carried by :func:`beyond`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

from algorithms.instruction_counts import InstructionMix
from simulator.program import Compute, Instructions, Op
from simulator.tile_ops import TILE_OPS, TileOp, work_of

_mask = TILE_OPS["mask"].compute


def _mask_add(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    """S + mask. A causal mask's content is known, so it is applied, not read; an additive one is added."""
    return _mask((args[0] + args[1] if p["additive"] else args[0],), p)


TILE_OPS.update(
    {
        "mask_add": TileOp(_mask_add, {"fma": 1.0}),
        # dS = dP * P - P * rowsum(dP * P), the product given
        "softmax_backward": TileOp(lambda a, p: a[0] - a[1] * a[2], {"fma": 1.0}),
    }
)


def beyond(
    name: str, ops: list[Op], mix: InstructionMix, elements: int, parts: int = 1, threads: float = 0.0
) -> list[Instructions]:
    """``parts`` equal shares of what ``mix`` counts for ``elements`` and ``threads`` (of each row) beyond the
    :class:`Compute` operations ``ops``."""
    modelled: dict[str, float] = {}
    for op in ops:
        if isinstance(op, Compute):
            for unit, amount in work_of(op.fn, op.rows, op.cols).items():
                modelled[unit] = modelled.get(unit, 0.0) + amount
    modelled["alu"] = modelled.get("alu", 0.0) + modelled.pop("convert", 0.0)
    lanes = {
        unit: max(0.0, counted * elements - modelled.get(unit, 0.0))
        for unit, counted in (("fma", mix.fma), ("alu", mix.alu), ("exp", mix.xu))
    }
    counted = mix.issue * elements + mix.issue_per_thread * threads
    lanes["issue"] = max(0.0, counted - fsum(modelled.values()) - fsum(lanes.values()))
    work = tuple((unit, amount / parts) for unit, amount in lanes.items() if amount)
    return [Instructions(name, work)] * parts
