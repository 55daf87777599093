"""What unfused attention's PyTorch kernels do to an element, and the shapes in which they walk a matrix.

PyTorch's kernels spend most of their issue slots on things a fused kernel never does: index arithmetic for
broadcast operands, 2-byte accesses, an accurate ``expf`` and an IEEE division per element. The operations below
carry those costs; they join :data:`simulator.tile_ops.TILE_OPS` when this module is imported.

Instruction counts are read off the public sources (aten/src/ATen/native/cuda: SoftMax.cu, PersistentSoftmax.cuh,
CUDALoops.cuh, and c10's IntDivider) and the way nvcc expands ``expf`` and ``/``; they are counts, not fits.
"""

from __future__ import annotations

import numpy as np

from simulator.tile_ops import TILE_OPS, TileOp

_mask = TILE_OPS["mask"].compute
_normalise = TILE_OPS["normalise"].compute
_exp = TILE_OPS["exp"].compute

#: A load/store unit serves 32 lanes a cycle and SM, half of what the ALU pipe does: one access of a lane is two
#: ALU slots when every element is its own access, a quarter of one when an access carries eight 16-bit elements.
SCALAR_ACCESS = {"alu": 2.0, "convert": 0.5}
VECTOR_ACCESS = {"alu": 0.25, "convert": 0.5}
#: Offsets of one element in three operands: two divisions by multiply-high, remainders, address adds.
INDEX_ARITHMETIC = {"alu": 16.0, "fma": 6.0}
#: Instructions of the subroutine that a division takes when its numerator is zero or subnormal.
SLOW_DIVISION_INSTRUCTIONS = 40.0


def _sum_of(*costs: dict[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for cost in costs:
        for unit, amount in cost.items():
            total[unit] = total.get(unit, 0.0) + amount
    return total


def _mask_add(args, p):
    """S + mask. A causal mask's content is known, so it is applied, not read; an additive one is added."""
    s = args[0] + args[1] if p["additive"] else args[0]
    return _mask((s,), p)


def _identity(args, _p):
    return args[0]


TILE_OPS.update(
    {
        # one thread's access of one element
        "scalar_access": TileOp(_identity, SCALAR_ACCESS),
        "vector_access": TileOp(_identity, VECTOR_ACCESS),
        # expf(S - m): range reduction, ex2, scaling back
        "expf": TileOp(_exp, {"fma": 6.0, "alu": 1.0, "exp": 1.0}),
        # IEEE division by the row sum: its refined reciprocal is made once, quotient, remainders, check per element
        "divide": TileOp(_normalise, {"fma": 4.0, "alu": 2.0}, {"exp": 1.0, "fma": 2.0}),
        # what the same division costs more where the numerator is zero; counted on the masked columns only
        "slow_division": TileOp(
            _identity, {"fma": SLOW_DIVISION_INSTRUCTIONS / 2, "alu": SLOW_DIVISION_INSTRUCTIONS / 2}
        ),
        # scores + broadcast mask, element by element: three accesses and their offsets
        "mask_add": TileOp(_mask_add, _sum_of({"fma": 1.0}, INDEX_ARITHMETIC, *[SCALAR_ACCESS] * 3)),
        # the same where one matrix is left in a launch: contiguous, vectorised
        "mask_add_vectorised": TileOp(_mask_add, _sum_of({"fma": 1.0}, *[VECTOR_ACCESS] * 3)),
        # a copy between layouts
        "strided_copy": TileOp(_identity, _sum_of(INDEX_ARITHMETIC, *[SCALAR_ACCESS] * 2)),
        # elementwise product of equally shaped contiguous tensors
        "product": TileOp(lambda a, p: a[0] * a[1], _sum_of({"fma": 1.0}, *[VECTOR_ACCESS] * 3)),
        # P * (dP - D) from dP * P and P: grad_input = (dP * P) - P * sum(dP * P)
        "softmax_backward": TileOp(lambda a, p: a[0] - a[1] * a[2], {"fma": 1.0}),
        # sum of the copies of a KV head over its group, and zero-initialised adds of that kind
        "group_sum": TileOp(lambda a, p: np.add(a[0], a[1]), _sum_of({"fma": 1.0}, INDEX_ARITHMETIC, SCALAR_ACCESS)),
    }
)
