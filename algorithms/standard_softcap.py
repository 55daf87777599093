"""Soft cap of unfused attention: ``cap * tanh(S / cap)`` as PyTorch runs it, three kernels over S of their own.

    S_divided = S / cap;  S_tanh = tanh(S_divided);  S_capped = cap * S_tanh      (each rounded to the inputs' dtype)

Autograd keeps S_tanh; backward multiplies dS by cap, by 1 - S_tanh^2 (``tanh_backward``) and by 1 / cap, three kernels
again. Source: the eager attention of models with a cap (transformers' Gemma 2), PyTorch's UnaryGeometricTanhKernel.cu.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from algorithms.kernel_tables import contiguous_elementwise_kernel
from algorithms.standard_rows import elementwise
from simulator.problem import AttentionProblem
from simulator.program import Kernel, Tensor
from simulator.tile_ops import TILE_OPS, TileOp

TILE_OPS.update(
    {
        # CUDA's tanhf: 1 - 2 / (exp2(2 x log2 e) + 1) from 0.55 on, below a polynomial of x^2; a warp runs both
        "tanh_accurate": TileOp(lambda a, p: np.tanh(a[0]), {"fma": 8.0, "alu": 4.0, "exp": 2.0}),
        # dS (1 - tanh^2)
        "tanh_backward": TileOp(lambda a, p: a[0] * (1 - a[1] * a[1]), {"fma": 2.0}),
    }
)


def _step(name: str, op: str, reads: tuple[Tensor, ...], out: Tensor, factor: float | None = None) -> list[Kernel]:
    k = contiguous_elementwise_kernel(out.heads * out.rows * out.cols, out.dtype)
    params = None if factor is None else (lambda _row, _col: (("factor", factor),))
    return elementwise(name, op, tuple((x, "q_head") for x in reads), out, k, params=params)


def tanh_tensor(s: Tensor) -> Tensor:
    """What autograd keeps of a soft cap."""
    return replace(s, name="S_tanh")


def cap_scores(s: Tensor, problem: AttentionProblem) -> tuple[Tensor, list[Kernel]]:
    """S capped, and the kernels that cap it; S itself without a cap."""
    cap = problem.softcap
    if not cap:
        return s, []
    divided, tanh, capped = replace(s, name="S_divided"), tanh_tensor(s), replace(s, name="S_capped")
    return capped, [
        *_step("cap_divide", "scale", (s,), divided, 1.0 / cap),
        *_step("cap_tanh", "tanh_accurate", (divided,), tanh),
        *_step("cap_multiply", "scale", (tanh,), capped, cap),
    ]


def cap_backward(ds: Tensor, problem: AttentionProblem) -> tuple[Tensor, dict[str, Tensor], list[Kernel]]:
    """Gradient of the uncapped scores, what the forward pass kept for it, and the kernels that make it."""
    cap = problem.softcap
    if not cap:
        return ds, {}, []
    kept = tanh_tensor(ds)
    times, slope, out = (replace(ds, name=f"{ds.name}_{step}") for step in ("times_cap", "of_tanh", "uncapped"))
    return (
        out,
        {kept.name: kept},
        [
            *_step("cap_multiply_backward", "scale", (ds,), times, cap),
            *_step("cap_tanh_backward", "tanh_backward", (times, kept), slope),
            *_step("cap_divide_backward", "scale", (slope,), out, 1.0 / cap),
        ],
    )
