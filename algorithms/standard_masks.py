"""Masks and dropout of unfused attention: PyTorch kernels of their own between the products and softmax.

A mask is a tensor like any other. Its kinds: ``additive`` (one ``[seqlen_q, seqlen_k]`` matrix of the inputs' dtype for
all heads), ``bool`` (the same in one byte an element; ``masked_fill``), ``padding`` (additive, one row of keys a
sequence, which every query reads; with a causal mask or window the two are one matrix a sequence). Causal masks and
windows are additive matrices too; their content follows from the position, so they are applied rather than given.

Dropout reads P and writes P with elements dropped and the others scaled up, and one byte an element that says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from algorithms.backward_helpers import zero_fill
from algorithms.common import dropout_op
from algorithms.kernel_tables import (
    ElementwiseKernel,
    contiguous_elementwise_kernel,
    mask_add_kernel,
    strided_copy_kernel,
)
from algorithms.standard_rows import elementwise
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Buffer, Compute, Index, Kernel, Store, Tensor, View, as_index, var
from simulator.tile_ops import TILE_OPS, TileOp

MASKS = ("additive", "bool", "padding")
#: Rows and threads of a CTA of the fill of a mask.
FILL_ROWS, FILL_THREADS = 1, 128
#: Rows of an L2 block of a mask.
MASK_BLOCK_ROWS = 128


def _positions(scores: np.ndarray, p: Mapping[str, Any]) -> np.ndarray:
    return TILE_OPS["mask"].compute((scores,), p)


def _keep(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    ones = np.ones_like(args[0])
    return TILE_OPS["dropout"].compute((ones,), p)


TILE_OPS.update(
    {
        # where(mask, S, -inf)
        "mask_select": TileOp(lambda a, p: _positions(np.where(a[1] != 0, a[0], np.float32(-np.inf)), p), {"alu": 1.0}),
        # one Philox of 10 rounds for 4 elements (fused_dropout_kernel_vec): a round is two wide multiplications at half
        # rate, two three-input xors and two key additions; then to float, scale and compare each
        "dropout_curand": TileOp(TILE_OPS["dropout"].compute, {"fma": 12.0, "alu": 10.5, "exp": 1.0}),
        "dropout_mask": TileOp(_keep, {"alu": 0.5}),
        # dP * mask * scale
        "masked_scale": TileOp(lambda a, p: a[0] * a[1] * np.float32(p["factor"]), {"fma": 2.0}),
    }
)


def hides_by_position(problem: AttentionProblem) -> bool:
    """Whether a causal mask or a window is among what the mask kernel applies."""
    return problem.causal or problem.window is not None


def mask_tensor(problem: AttentionProblem) -> Tensor | None:
    """The mask that the call reads, or ``None`` without any."""
    p = problem
    if p.mask not in (None, *MASKS):
        raise UnsupportedError(f"mask {p.mask!r}: torch_eager knows {', '.join(MASKS)}")
    if p.mask is None and not hides_by_position(p):
        return None
    heads = p.batch if p.mask == "padding" else 1
    rows = p.seqlen_q if p.mask != "padding" or hides_by_position(p) else 1
    dtype = "bool" if p.mask == "bool" else p.dtype
    return Tensor("mask", heads, rows, p.seqlen_k, dtype, "input", MASK_BLOCK_ROWS)


def mask_from_ones(mask: Tensor, gpu: Profile) -> list[Kernel]:
    """The benchmarks' causal mask, made in every call: a matrix of fp32 filled, its upper triangle, 16 bits of it."""
    elements = mask.rows * mask.cols
    ones, triangle = (replace(mask, name=f"mask_{name}", dtype="fp32", kind="scratch") for name in ("fp32", "upper"))
    return [
        zero_fill("fill_mask", ones, FILL_ROWS, FILL_THREADS, gpu),
        *elementwise("triangle", "copy", ((ones, "q_head"),), triangle, strided_copy_kernel(elements, "fp32")),
        *elementwise(
            "mask_to_16_bit", "copy", ((triangle, "q_head"),), mask, contiguous_elementwise_kernel(elements, mask.dtype)
        ),
    ]


def apply_mask(s: Tensor, mask: Tensor, out: Tensor, problem: AttentionProblem) -> list[Kernel]:
    """S + mask, or S where the mask says so."""
    p = problem
    k = mask_add_kernel(s.heads, s.rows, s.cols, p.dtype)
    left, right = p.sides

    def params(row: Index | int, col: Index | int) -> tuple[tuple[str, Any], ...]:
        return (
            ("additive", int(p.mask is not None)),
            ("row", as_index(row)),
            ("col", as_index(col)),
            ("seqlen_k", p.seqlen_k),
            ("shift", p.seqlen_k - p.seqlen_q),
            ("left", left),
            ("right", right),
        )

    name, op = ("mask_fill", "mask_select") if p.mask == "bool" else ("mask_add", "mask_add")
    head = "batch" if mask.heads > 1 else ""
    kernels = elementwise(name, op, ((s, "q_head"), (mask, head)), out, k, params=params)
    if not head:
        return kernels
    return [replace(x, coords={**x.coords, "batch": x.coords["q_head"] // p.heads}) for x in kernels]


def dropout_tensors(problem: AttentionProblem, weights: Tensor) -> dict[str, Tensor]:
    """What dropout leaves: P with elements dropped, and which were kept. Empty without dropout."""
    if not problem.dropout:
        return {}
    return {
        "P_dropped": replace(weights, name="P_dropped"),
        "dropout_mask": replace(weights, name="dropout_mask", dtype="bool"),
    }


def _counted_kernel(weights: Tensor) -> ElementwiseKernel:
    return contiguous_elementwise_kernel(weights.heads * weights.rows * weights.cols, weights.dtype)


def drop(weights: Tensor, t: dict[str, Tensor], problem: AttentionProblem) -> list[Kernel]:
    """``native_dropout``: P dropped and scaled, and its mask."""
    dropped, mask = t["P_dropped"], t["dropout_mask"]
    row = var("row0")

    def with_mask(kernel: Kernel) -> Kernel:
        (role,) = kernel.roles
        *before, compute, store = role.ops
        (weights_in,), rows, cols = compute.args, compute.rows, compute.cols
        kept, values = Buffer("kept", rows, cols, "bool"), Buffer("values", rows, cols)
        draw = dropout_op("dropout_curand", values, problem, row, store.into.col)
        factor = (("factor", 1.0 / (1.0 - problem.dropout)),)
        ops = [
            *before,
            replace(draw, args=(weights_in,)),
            Compute("dropout_mask", kept, (weights_in,), rows, cols, draw.params),
            Compute("scale", compute.out, (values,), rows, cols, factor),
            store,
            Store(View(kept), replace(store.into, tensor=mask)),
        ]
        return replace(kernel, roles=(replace(role, ops=tuple(ops)),))

    kernels = elementwise("dropout", "copy", ((weights, "q_head"),), dropped, _counted_kernel(weights))
    return [with_mask(kernel) for kernel in kernels]


def drop_backward(dropped: Tensor, mask: Tensor, out: Tensor, problem: AttentionProblem) -> list[Kernel]:
    """``native_dropout_backward``: dP = dP_dropped * mask / (1 - dropout)."""
    factor = 1.0 / (1.0 - problem.dropout)
    reads = ((dropped, "q_head"), (mask, "q_head"))
    k = _counted_kernel(out)
    return elementwise("dropout_backward", "masked_scale", reads, out, k, params=lambda _r, _c: (("factor", factor),))


__all__ = [
    "MASKS",
    "apply_mask",
    "drop",
    "drop_backward",
    "dropout_tensors",
    "hides_by_position",
    "mask_from_ones",
    "mask_tensor",
]
