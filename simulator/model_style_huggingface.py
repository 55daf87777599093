"""HuggingFace's GPT-2 run eagerly under automatic mixed precision.

Every operator is a kernel, with casts around whatever runs in fp32.
"""

from __future__ import annotations

from simulator.model_shape import (
    F,
    H,
    M,
    Op,
    Shape,
    attention_dropout,
    attention_dropout_backward,
    gated,
    rotary,
    stream,
    torch_softmax,
)


def forward(s: Shape) -> list[Op]:
    r, f = s.residual, s.inner
    norm = [
        stream("layer_norm", "norm", r, [F], [F], "norm"),
        stream("norm_to_16_bit", "elementwise", r, [F], [H]),
    ]
    add = [
        *([stream("dropout", "elementwise", r, [H], [H, M], "dropout")] if s.dropout else []),
        stream("residual_add", "elementwise", r, [H, F], [F]),
    ]
    if gated(s):
        act = [
            stream("silu", "elementwise", f, [H], [H], "activation"),
            stream("gate", "elementwise", f, [H, H], [H]),
        ]
    else:
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * pow(x, 3)))), an operator a kernel, pow and what follows in fp32
        act = [
            stream("gelu_to_fp32", "elementwise", f, [H], [F]),
            stream("gelu_pow", "elementwise", f, [F], [F], "activation"),
            stream("gelu_times", "elementwise", f, [F], [F]),
            stream("gelu_plus_x", "elementwise", f, [H, F], [F]),
            stream("gelu_times", "elementwise", f, [F], [F]),
            stream("gelu_tanh", "elementwise", f, [F], [F], "activation"),
            stream("gelu_plus_1", "elementwise", f, [F], [F]),
            stream("gelu_half_x", "elementwise", f, [H], [H]),
            stream("gelu_product", "elementwise", f, [H, F], [F]),
            stream("gelu_to_16_bit", "elementwise", f, [F], [H]),
        ]
    return [*norm, *rotary(s), *add, *norm, *act, *add]


def backward(s: Shape) -> list[Op]:
    r, f = s.residual, s.inner
    norm = [
        stream("norm_gradient_to_fp32", "elementwise", r, [H], [F]),
        stream("layer_norm_backward", "norm", r, [F, F], [F], "norm"),
        stream("layer_norm_gradients", "norm", r, [F, F], []),
        stream("add_gradients", "elementwise", r, [F, F], [F]),
    ]
    add = [
        stream("residual_gradient_to_16_bit", "elementwise", r, [F], [H]),
        *([stream("dropout_backward", "elementwise", r, [H, M], [H])] if s.dropout else []),
        stream("bias_gradient", "elementwise", r, [H], []),
    ]
    if gated(s):
        act = [
            stream("gate_backward", "elementwise", f, [H, H, H], [H, H]),
            stream("silu_backward", "elementwise", f, [H, H], [H], "activation"),
        ]
    else:
        act = [
            stream("gelu_gradient_to_fp32", "elementwise", f, [H], [F]),
            stream("gelu_product_left", "elementwise", f, [F, F], [F]),
            stream("gelu_left_to_16_bit", "elementwise", f, [F], [H]),
            stream("gelu_product_right", "elementwise", f, [F, H], [F]),
            stream("gelu_half_x_backward", "elementwise", f, [H], [H]),
            stream("gelu_tanh_backward", "elementwise", f, [F, F], [F]),
            stream("gelu_times_backward", "elementwise", f, [F], [F]),
            stream("gelu_plus_x_to_16_bit", "elementwise", f, [F], [H]),
            stream("gelu_times_backward", "elementwise", f, [F], [F]),
            stream("gelu_pow_square", "elementwise", f, [F], [F], "activation"),
            stream("gelu_times_3", "elementwise", f, [F], [F]),
            stream("gelu_pow_backward", "elementwise", f, [F, F], [F]),
            stream("gelu_pow_to_16_bit", "elementwise", f, [F], [H]),
            stream("gelu_add_gradients", "elementwise", f, [H, H], [H]),
            stream("gelu_add_gradients", "elementwise", f, [H, H], [H]),
        ]
    inner_bias = stream("bias_gradient", "elementwise", f, [H], [])
    qkv_bias = stream("bias_gradient", "elementwise", s.qkv, [H], [])
    return [*add, *act, inner_bias, *norm, *add, *rotary(s), qkv_bias, *norm]


def standard_forward(s: Shape) -> list[Op]:
    n, causal = s.scores, s.model.causal
    return [
        stream("heads_copy", "attention", s.qkv, [H], [H], "strided"),
        # by sqrt(head dim), and by the layer's index (scale_attn_by_inverse_layer_idx, as the published runs set it)
        stream("scale", "attention", n, [H], [H]),
        stream("scale_by_layer", "attention", n, [H], [H]),
        stream("where_causal" if causal else "mask_add", "attention", n, [H], [H], "broadcast"),
        stream("softmax_to_fp32", "attention", n, [H], [F]),
        Op("softmax", "attention", torch_softmax(s)),
        stream("softmax_to_16_bit", "attention", n, [F], [H]),
        *attention_dropout(s),
        stream("merge_heads", "attention", s.attention_width, [H], [H], "strided"),
    ]


def standard_backward(s: Shape) -> list[Op]:
    n = s.scores
    mask = [stream("where_backward", "attention", n, [H], [H], "broadcast")] if s.model.causal else []
    return [
        stream("merge_heads_backward", "attention", s.attention_width, [H], [H], "strided"),
        *attention_dropout_backward(s),
        stream("gradient_to_fp32", "attention", n, [H], [F]),
        # PyTorch multiplies dP by P in a kernel of its own before the row-wise one
        stream("softmax_backward_product", "attention", n, [F, F], [F]),
        Op("softmax_backward", "attention", torch_softmax(s, backward=True)),
        stream("gradient_to_16_bit", "attention", n, [F], [H]),
        *mask,
        stream("scale_by_layer_backward", "attention", n, [H], [H]),
        stream("scale_backward", "attention", n, [H], [H]),
        stream("heads_copy_backward", "attention", s.qkv, [H], [H], "strided"),
        stream("join_qkv_gradients", "attention", s.qkv, [H], [H], "strided"),
    ]


def loss(tokens: int, vocab: int) -> list[Op]:
    n = tokens * vocab
    return [
        stream("logits_to_fp32", "head", n, [H], [F]),
        # a row of 50k fp32 exceeds a CTA's SMEM: three passes over it, the later ones mostly from L2
        stream("log_softmax", "head", n, [F], [F], "softmax"),
        stream("loss_gradient_fill", "head", n, [], [F]),
        stream("log_softmax_backward", "head", n, [F, F], [F], "softmax"),
        stream("logit_gradients_to_16_bit", "head", n, [F], [H]),
    ]


def kept(s: Shape) -> float:
    mask = M if s.dropout else 0.0
    norms = 2 * s.residual * (F + H + mask)
    # gelu_new keeps x, x in fp32, pow's and tanh's result, both factors of the product, and the product in 16 bits
    ffn = s.inner * (H * 3 if gated(s) else H + F + F + F + H + H)
    return norms + s.qkv * H * 2 + s.attention_width * H + ffn
