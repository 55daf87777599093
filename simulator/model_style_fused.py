"""The FlashAttention repository's training code, as few kernels as it has.

Bias, GELU and bias gradients sit in cuBLAS epilogues; dropout, residual and norm are one kernel, the cross entropy one
kernel in place; the residual stream is fp32.
"""

from __future__ import annotations

from simulator.model_shape import (
    F,
    H,
    M,
    Op,
    Shape,
    dropout_mask,
    gated,
    rotary,
    stream,
)


def forward(s: Shape) -> list[Op]:
    mask, mix = dropout_mask(s), "norm"
    norm = stream("dropout_add_norm", "norm", s.residual, [H, F], [H, F, *mask], mix)
    gate = [stream("swiglu", "elementwise", s.inner, [H, H], [H], "activation")] if gated(s) else []
    return [norm, *rotary(s), norm, *gate]


def backward(s: Shape) -> list[Op]:
    # dx and the residual's gradient from dy, the saved residual and its gradient; then the sums of the affine part
    norm = stream("dropout_add_norm_backward", "norm", s.residual, [H, F, F, *dropout_mask(s)], [H, F], "norm")
    gate = [stream("swiglu_backward", "elementwise", s.inner, [H, H, H], [H, H], "activation")] if gated(s) else []
    return [norm, *rotary(s), norm, *gate]


def loss(tokens: int, vocab: int) -> list[Op]:
    logits = tokens * vocab
    return [
        stream("cross_entropy", "head", logits, [H], [], "softmax_backward"),
        stream("cross_entropy_backward", "head", logits, [H], [H], "softmax_backward"),
    ]


def kept(s: Shape) -> float:
    norms = 2 * s.residual * (F + H + (M if s.dropout else 0.0))
    ffn = s.inner * H * (3 if gated(s) else 2)
    return norms + s.qkv * H + ffn
