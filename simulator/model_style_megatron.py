"""Megatron-LM of 2022-2023: some element-wise kernels fused.

Fused are softmax with scale and mask, bias + GELU, bias + dropout + residual; the residual stream is 16-bit, the loss
fp32 by separate operations.
"""

from __future__ import annotations

from simulator.model_kernels import Stream
from simulator.model_shape import (
    F,
    H,
    M,
    Op,
    Shape,
    attention_dropout,
    attention_dropout_backward,
    dropout_mask,
    gated,
    rotary,
    stream,
    torch_softmax,
)

#: Longest row that Megatron's fused softmax took in 2022-2023 (``FusedScaleMaskSoftmax.is_kernel_available``); beyond
#: it the score matrix goes through PyTorch's operations in fp32 (query-key layer scaling is on by default).
MEGATRON_SOFTMAX_KEYS = 4096


def forward(s: Shape) -> list[Op]:
    norm = stream("layer_norm", "norm", s.residual, [H], [H], "norm")
    add = stream("bias_dropout_add", "elementwise", s.residual, [H, H], [H, *dropout_mask(s)], "dropout")
    if gated(s):
        act = stream("swiglu", "elementwise", s.inner, [H, H], [H], "activation")
    else:
        act = stream("bias_gelu", "elementwise", s.inner, [H], [H], "activation")
    return [norm, *rotary(s), add, norm, act, add]


def backward(s: Shape) -> list[Op]:
    r = s.residual
    dropout = stream("bias_dropout_backward", "elementwise", r, [H, *dropout_mask(s)], [H])
    bias = stream("bias_gradient", "elementwise", r, [H], [])
    norm = stream("layer_norm_backward", "norm", r, [H, H], [H], "norm")
    affine = stream("layer_norm_gradients", "norm", r, [H, H], [])
    add = stream("add_gradients", "elementwise", r, [H, H], [H])
    inner = [
        stream("swiglu_backward", "elementwise", s.inner, [H, H, H], [H, H], "activation")
        if gated(s)
        else stream("bias_gelu_backward", "elementwise", s.inner, [H, H], [H], "activation"),
        stream("bias_gradient", "elementwise", s.inner, [H], []),
    ]
    qkv_bias = stream("bias_gradient", "elementwise", s.qkv, [H], [])
    return [dropout, bias, *inner, norm, affine, add, dropout, bias, qkv_bias, *rotary(s), norm, affine, add]


def standard_forward(s: Shape) -> list[Op]:
    if s.seqlen > MEGATRON_SOFTMAX_KEYS:
        softmax = [
            stream("softmax_to_fp32", "attention", s.scores, [H], [F]),
            stream("scale", "attention", s.scores, [F], [F]),
            stream("masked_fill", "attention", s.scores, [F], [F], "broadcast"),
            Op("softmax", "attention", torch_softmax(s)),
            stream("softmax_to_16_bit", "attention", s.scores, [F], [H]),
        ]
    elif s.model.causal:
        # a warp a row reads and exponentiates the visible half, and writes all of it
        softmax = [
            Op("fused_causal_softmax", "attention", Stream(s.scores // 2, (H,), (H, H), "softmax")),
        ]
    else:
        softmax = [stream("fused_masked_softmax", "attention", s.scores, [H, M], [H], "softmax")]
    merge = stream("context_copy", "attention", s.attention_width, [H], [H], "strided")
    return [*softmax, *attention_dropout(s), merge]


def standard_backward(s: Shape) -> list[Op]:
    merge = stream("context_copy_backward", "attention", s.attention_width, [H], [H], "strided")
    if s.seqlen > MEGATRON_SOFTMAX_KEYS:
        softmax = [
            stream("gradient_to_fp32", "attention", s.scores, [H], [F]),
            stream("softmax_backward_product", "attention", s.scores, [F, F], [F]),
            Op("softmax_backward", "attention", torch_softmax(s, backward=True)),
            stream("masked_fill_backward", "attention", s.scores, [F], [F], "broadcast"),
            stream("scale_backward", "attention", s.scores, [F], [F]),
            stream("gradient_to_16_bit", "attention", s.scores, [F], [H]),
        ]
    elif s.model.causal:
        softmax = [
            Op("fused_causal_softmax_backward", "attention", Stream(s.scores // 2, (H, H), (H, H), "softmax_backward"))
        ]
    else:
        softmax = [stream("fused_masked_softmax_backward", "attention", s.scores, [H, H], [H], "softmax_backward")]
    joined = stream("join_qkv_gradients", "attention", s.qkv, [H], [H], "strided")
    return [merge, *attention_dropout_backward(s), *softmax, joined]


def loss(tokens: int, vocab: int) -> list[Op]:
    n = tokens * vocab
    steps = [
        ("logits_to_fp32", [H], [F], "vectorised"),
        ("row_maximum", [F], [], "vectorised"),
        ("subtract_maximum", [F], [F], "vectorised"),
        ("exponential", [F], [F], "vectorised"),
        ("row_sum", [F], [], "vectorised"),
        ("divide", [F], [F], "vectorised"),
        ("loss_backward", [F], [F], "vectorised"),
        ("logit_gradients_to_16_bit", [F], [H], "vectorised"),
    ]
    return [stream(name, "head", n, reads, writes, mix) for name, reads, writes, mix in steps]


def kept(s: Shape) -> float:
    """Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: 34 bytes a token and hidden unit without scores."""
    mask = M if s.dropout else 0.0
    return s.residual * (2 * H + 2 * mask + 2 * H) + s.qkv * H + s.inner * H * (3 if gated(s) else 2)
