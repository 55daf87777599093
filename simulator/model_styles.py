"""How frameworks cut a transformer layer into kernels: the same mathematics, fused differently.

Each style lists what runs beside the matrix products: who reads and writes what, in which width, and which kernels a
framework merges. Sources are public code and papers, read for facts:

``huggingface``  HuggingFace ``modeling_gpt2.py`` and ``activations.py`` (``gelu_new``), run eagerly under PyTorch's
                 automatic mixed precision: layer norm, softmax, ``pow`` and the loss go to fp32 with a cast kernel on
                 either side, every arithmetic operator is a kernel, the residual stream is fp32, attention copies Q, K
                 and V into head order. Vocabulary as stored (50257 columns: unaligned products).
``megatron``     Megatron-LM (2022-2023): 16-bit model and residual stream, fp32 master copy; fused
                 scale + causal mask + softmax (to 4096 keys), bias + GELU, bias + dropout + residual, layer norm;
                 no bias in the projections that those follow; loss in fp32 by separate operations.
``fused``        the training code of the FlashAttention repository: bias, GELU and bias gradients in cuBLAS
                 epilogues (``fused_dense``), dropout + residual + norm in one kernel, one-kernel cross entropy in
                 place, fp32 residual, vocabulary padded to 8; weights cast from fp32 by mixed precision.

Widths are bytes per element: 2.0 for fp16/bf16, 4.0 for fp32, 1.0 for a dropout mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.errors import InputError
from simulator.model_kernels import Gemm, Stream, TorchSoftmax
from simulator.model_zoo import TransformerModel

H, F, M = 2.0, 4.0, 1.0  # 16-bit, fp32, mask
#: Longest row that Megatron's fused softmax took in 2022-2023 (``FusedScaleMaskSoftmax.is_kernel_available``); beyond
#: it the score matrix goes through PyTorch's operations in fp32 (query-key layer scaling is on by default).
MEGATRON_SOFTMAX_KEYS = 4096


@dataclass(frozen=True)
class Shape:
    """One micro-batch of a model: ``batch`` sequences of ``seqlen`` tokens."""

    model: TransformerModel
    batch: int
    seqlen: int
    dropout: float = 0.1

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.batch * self.seqlen

    @property
    def residual(self) -> int:
        """Elements of the residual stream."""
        return self.tokens * self.model.hidden

    @property
    def attention_width(self) -> int:
        """Elements of Q (and of O)."""
        return self.tokens * self.model.heads * self.model.head_dim

    @property
    def qkv(self) -> int:
        """Elements of Q, K and V together."""
        return self.attention_width + 2 * self.tokens * self.model.kv_heads * self.model.head_dim

    @property
    def inner(self) -> int:
        """Elements of the feed-forward block's activation (after the gate)."""
        return self.tokens * self.model.ffn_size

    @property
    def scores(self) -> int:
        """Elements of S and P of one layer."""
        return self.batch * self.model.heads * self.seqlen * self.seqlen


@dataclass(frozen=True)
class Op:
    """One kernel of a layer: its name, the group that its time is counted under, and its spec."""

    name: str
    group: str
    spec: Stream | Gemm | TorchSoftmax


@dataclass(frozen=True)
class Style:
    """What a framework does around attention's kernels and the products by weights.

    Functions give operations: ``forward``/``backward`` of a layer without its products and its attention,
    ``standard_forward``/``standard_backward`` around unfused attention's products, ``loss`` on the logits.
    ``kept_per_layer`` is what autograd keeps of a layer (bytes) without attention's own; ``kept_scores`` bytes per
    score element of unfused attention. ``weight_bytes``: of weights, gradients and optimiser state a parameter.
    """

    name: str
    vocab_multiple: int
    forward: Callable[[Shape], list[Op]]
    backward: Callable[[Shape], list[Op]]
    standard_forward: Callable[[Shape], list[Op]] | None
    standard_backward: Callable[[Shape], list[Op]] | None
    loss: Callable[[int, int], list[Op]]
    per_microbatch: Callable[[int, bool], list[Op]]
    per_step: Callable[[int, bool], list[Op]]
    kept_per_layer: Callable[[Shape], float]
    kept_scores: float
    kept_logits: float
    gradient_and_weight_bytes: float
    optimizer_bytes: float


def _stream(name: str, group: str, elements: int, reads, writes, mix: str = "vectorised") -> Op:
    return Op(name, group, Stream(elements, tuple(reads), tuple(writes), mix))


def _gated(s: Shape) -> bool:
    return s.model.ffn_kind == "swiglu"


def _dropout_mask(s: Shape) -> tuple[float, ...]:
    return (M,) if s.dropout else ()


def _rotary(s: Shape) -> list[Op]:
    if s.model.position != "rotary":
        return []
    width = s.qkv - (s.qkv - s.attention_width) // 2
    return [_stream("rotary", "elementwise", width, [H], [H])]


# -- fused: the FlashAttention repository --------------------------------------------------------------------------


def _fused_forward(s: Shape) -> list[Op]:
    mask, mix = _dropout_mask(s), "norm"
    norm = _stream("dropout_add_norm", "norm", s.residual, [H, F], [H, F, *mask], mix)
    gate = [_stream("swiglu", "elementwise", s.inner, [H, H], [H], "activation")] if _gated(s) else []
    return [norm, *_rotary(s), norm, *gate]


def _fused_backward(s: Shape) -> list[Op]:
    # dx and the residual's gradient from dy, the saved residual and its gradient; then the sums of the affine part
    norm = _stream("dropout_add_norm_backward", "norm", s.residual, [H, F, F, *_dropout_mask(s)], [H, F], "norm")
    gate = [_stream("swiglu_backward", "elementwise", s.inner, [H, H, H], [H, H], "activation")] if _gated(s) else []
    return [norm, *_rotary(s), norm, *gate]


def _fused_loss(tokens: int, vocab: int) -> list[Op]:
    logits = tokens * vocab
    return [
        _stream("cross_entropy", "head", logits, [H], [], "softmax_backward"),
        _stream("cross_entropy_backward", "head", logits, [H], [H], "softmax_backward"),
    ]


def _fused_kept(s: Shape) -> float:
    norms = 2 * s.residual * (F + H + (M if s.dropout else 0.0))
    ffn = s.inner * H * (3 if _gated(s) else 2)
    return norms + s.qkv * H + ffn


# -- Megatron-LM ---------------------------------------------------------------------------------------------------


def _megatron_forward(s: Shape) -> list[Op]:
    norm = _stream("layer_norm", "norm", s.residual, [H], [H], "norm")
    add = _stream("bias_dropout_add", "elementwise", s.residual, [H, H], [H, *_dropout_mask(s)], "dropout")
    if _gated(s):
        act = _stream("swiglu", "elementwise", s.inner, [H, H], [H], "activation")
    else:
        act = _stream("bias_gelu", "elementwise", s.inner, [H], [H], "activation")
    return [norm, *_rotary(s), add, norm, act, add]


def _megatron_backward(s: Shape) -> list[Op]:
    r = s.residual
    dropout = _stream("bias_dropout_backward", "elementwise", r, [H, *_dropout_mask(s)], [H])
    bias = _stream("bias_gradient", "elementwise", r, [H], [])
    norm = _stream("layer_norm_backward", "norm", r, [H, H], [H], "norm")
    affine = _stream("layer_norm_gradients", "norm", r, [H, H], [])
    add = _stream("add_gradients", "elementwise", r, [H, H], [H])
    inner = [
        _stream("swiglu_backward", "elementwise", s.inner, [H, H, H], [H, H], "activation")
        if _gated(s)
        else _stream("bias_gelu_backward", "elementwise", s.inner, [H, H], [H], "activation"),
        _stream("bias_gradient", "elementwise", s.inner, [H], []),
    ]
    qkv_bias = _stream("bias_gradient", "elementwise", s.qkv, [H], [])
    return [dropout, bias, *inner, norm, affine, add, dropout, bias, qkv_bias, *_rotary(s), norm, affine, add]


def _megatron_standard_forward(s: Shape) -> list[Op]:
    if s.seqlen > MEGATRON_SOFTMAX_KEYS:
        softmax = [
            _stream("softmax_to_fp32", "attention", s.scores, [H], [F]),
            _stream("scale", "attention", s.scores, [F], [F]),
            _stream("masked_fill", "attention", s.scores, [F], [F], "broadcast"),
            Op("softmax", "attention", _torch_softmax(s)),
            _stream("softmax_to_16_bit", "attention", s.scores, [F], [H]),
        ]
    elif s.model.causal:
        # a warp a row reads and exponentiates the visible half, and writes all of it
        softmax = [
            Op("fused_causal_softmax", "attention", Stream(s.scores // 2, (H,), (H, H), "softmax")),
        ]
    else:
        softmax = [_stream("fused_masked_softmax", "attention", s.scores, [H, M], [H], "softmax")]
    merge = _stream("context_copy", "attention", s.attention_width, [H], [H], "strided")
    return [*softmax, *_attention_dropout(s), merge]


def _torch_softmax(s: Shape, backward: bool = False) -> TorchSoftmax:
    masked = 0.5 if s.model.causal and not backward else 0.0
    return TorchSoftmax(s.batch * s.model.heads, s.seqlen, s.seqlen, "fp32", backward, masked)


def _attention_dropout(s: Shape) -> list[Op]:
    return [_stream("attention_dropout", "attention", s.scores, [H], [H, M], "dropout")] if s.dropout else []


def _attention_dropout_backward(s: Shape) -> list[Op]:
    return [_stream("attention_dropout_backward", "attention", s.scores, [H, M], [H])] if s.dropout else []


def _megatron_standard_backward(s: Shape) -> list[Op]:
    merge = _stream("context_copy_backward", "attention", s.attention_width, [H], [H], "strided")
    if s.seqlen > MEGATRON_SOFTMAX_KEYS:
        softmax = [
            _stream("gradient_to_fp32", "attention", s.scores, [H], [F]),
            _stream("softmax_backward_product", "attention", s.scores, [F, F], [F]),
            Op("softmax_backward", "attention", _torch_softmax(s, backward=True)),
            _stream("masked_fill_backward", "attention", s.scores, [F], [F], "broadcast"),
            _stream("scale_backward", "attention", s.scores, [F], [F]),
            _stream("gradient_to_16_bit", "attention", s.scores, [F], [H]),
        ]
    elif s.model.causal:
        softmax = [
            Op("fused_causal_softmax_backward", "attention", Stream(s.scores // 2, (H, H), (H, H), "softmax_backward"))
        ]
    else:
        softmax = [_stream("fused_masked_softmax_backward", "attention", s.scores, [H, H], [H], "softmax_backward")]
    joined = _stream("join_qkv_gradients", "attention", s.qkv, [H], [H], "strided")
    return [merge, *_attention_dropout_backward(s), *softmax, joined]


def _megatron_loss(tokens: int, vocab: int) -> list[Op]:
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
    return [_stream(name, "head", n, reads, writes, mix) for name, reads, writes, mix in steps]


def _megatron_kept(s: Shape) -> float:
    """Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: 34 bytes a token and hidden unit without scores."""
    mask = M if s.dropout else 0.0
    return s.residual * (2 * H + 2 * mask + 2 * H) + s.qkv * H + s.inner * H * (3 if _gated(s) else 2)


# -- HuggingFace, eager, automatic mixed precision -----------------------------------------------------------------


def _huggingface_forward(s: Shape) -> list[Op]:
    r, f = s.residual, s.inner
    norm = [
        _stream("layer_norm", "norm", r, [F], [F], "norm"),
        _stream("norm_to_16_bit", "elementwise", r, [F], [H]),
    ]
    add = [
        *([_stream("dropout", "elementwise", r, [H], [H, M], "dropout")] if s.dropout else []),
        _stream("residual_add", "elementwise", r, [H, F], [F]),
    ]
    if _gated(s):
        act = [
            _stream("silu", "elementwise", f, [H], [H], "activation"),
            _stream("gate", "elementwise", f, [H, H], [H]),
        ]
    else:
        # 0.5 * x * (1 + tanh(c * (x + 0.044715 * pow(x, 3)))), an operator a kernel, pow and what follows in fp32
        act = [
            _stream("gelu_to_fp32", "elementwise", f, [H], [F]),
            _stream("gelu_pow", "elementwise", f, [F], [F], "activation"),
            _stream("gelu_times", "elementwise", f, [F], [F]),
            _stream("gelu_plus_x", "elementwise", f, [H, F], [F]),
            _stream("gelu_times", "elementwise", f, [F], [F]),
            _stream("gelu_tanh", "elementwise", f, [F], [F], "activation"),
            _stream("gelu_plus_1", "elementwise", f, [F], [F]),
            _stream("gelu_half_x", "elementwise", f, [H], [H]),
            _stream("gelu_product", "elementwise", f, [H, F], [F]),
            _stream("gelu_to_16_bit", "elementwise", f, [F], [H]),
        ]
    return [*norm, *_rotary(s), *add, *norm, *act, *add]


def _huggingface_backward(s: Shape) -> list[Op]:
    r, f = s.residual, s.inner
    norm = [
        _stream("norm_gradient_to_fp32", "elementwise", r, [H], [F]),
        _stream("layer_norm_backward", "norm", r, [F, F], [F], "norm"),
        _stream("layer_norm_gradients", "norm", r, [F, F], []),
        _stream("add_gradients", "elementwise", r, [F, F], [F]),
    ]
    add = [
        _stream("residual_gradient_to_16_bit", "elementwise", r, [F], [H]),
        *([_stream("dropout_backward", "elementwise", r, [H, M], [H])] if s.dropout else []),
        _stream("bias_gradient", "elementwise", r, [H], []),
    ]
    if _gated(s):
        act = [
            _stream("gate_backward", "elementwise", f, [H, H, H], [H, H]),
            _stream("silu_backward", "elementwise", f, [H, H], [H], "activation"),
        ]
    else:
        act = [
            _stream("gelu_gradient_to_fp32", "elementwise", f, [H], [F]),
            _stream("gelu_product_left", "elementwise", f, [F, F], [F]),
            _stream("gelu_left_to_16_bit", "elementwise", f, [F], [H]),
            _stream("gelu_product_right", "elementwise", f, [F, H], [F]),
            _stream("gelu_half_x_backward", "elementwise", f, [H], [H]),
            _stream("gelu_tanh_backward", "elementwise", f, [F, F], [F]),
            _stream("gelu_times_backward", "elementwise", f, [F], [F]),
            _stream("gelu_plus_x_to_16_bit", "elementwise", f, [F], [H]),
            _stream("gelu_times_backward", "elementwise", f, [F], [F]),
            _stream("gelu_pow_square", "elementwise", f, [F], [F], "activation"),
            _stream("gelu_times_3", "elementwise", f, [F], [F]),
            _stream("gelu_pow_backward", "elementwise", f, [F, F], [F]),
            _stream("gelu_pow_to_16_bit", "elementwise", f, [F], [H]),
            _stream("gelu_add_gradients", "elementwise", f, [H, H], [H]),
            _stream("gelu_add_gradients", "elementwise", f, [H, H], [H]),
        ]
    inner_bias = _stream("bias_gradient", "elementwise", f, [H], [])
    qkv_bias = _stream("bias_gradient", "elementwise", s.qkv, [H], [])
    return [*add, *act, inner_bias, *norm, *add, *_rotary(s), qkv_bias, *norm]


def _huggingface_standard_forward(s: Shape) -> list[Op]:
    n, causal = s.scores, s.model.causal
    return [
        _stream("heads_copy", "attention", s.qkv, [H], [H], "strided"),
        # by sqrt(head dim), and by the layer's index (scale_attn_by_inverse_layer_idx, as the published runs set it)
        _stream("scale", "attention", n, [H], [H]),
        _stream("scale_by_layer", "attention", n, [H], [H]),
        _stream("where_causal" if causal else "mask_add", "attention", n, [H], [H], "broadcast"),
        _stream("softmax_to_fp32", "attention", n, [H], [F]),
        Op("softmax", "attention", _torch_softmax(s)),
        _stream("softmax_to_16_bit", "attention", n, [F], [H]),
        *_attention_dropout(s),
        _stream("merge_heads", "attention", s.attention_width, [H], [H], "strided"),
    ]


def _huggingface_standard_backward(s: Shape) -> list[Op]:
    n = s.scores
    mask = [_stream("where_backward", "attention", n, [H], [H], "broadcast")] if s.model.causal else []
    return [
        _stream("merge_heads_backward", "attention", s.attention_width, [H], [H], "strided"),
        *_attention_dropout_backward(s),
        _stream("gradient_to_fp32", "attention", n, [H], [F]),
        # PyTorch multiplies dP by P in a kernel of its own before the row-wise one
        _stream("softmax_backward_product", "attention", n, [F, F], [F]),
        Op("softmax_backward", "attention", _torch_softmax(s, backward=True)),
        _stream("gradient_to_16_bit", "attention", n, [F], [H]),
        *mask,
        _stream("scale_by_layer_backward", "attention", n, [H], [H]),
        _stream("scale_backward", "attention", n, [H], [H]),
        _stream("heads_copy_backward", "attention", s.qkv, [H], [H], "strided"),
        _stream("join_qkv_gradients", "attention", s.qkv, [H], [H], "strided"),
    ]


def _huggingface_loss(tokens: int, vocab: int) -> list[Op]:
    n = tokens * vocab
    return [
        _stream("logits_to_fp32", "head", n, [H], [F]),
        # a row of 50k fp32 exceeds a CTA's SMEM: three passes over it, the later ones mostly from L2
        _stream("log_softmax", "head", n, [F], [F], "softmax"),
        _stream("loss_gradient_fill", "head", n, [], [F]),
        _stream("log_softmax_backward", "head", n, [F, F], [F], "softmax"),
        _stream("logit_gradients_to_16_bit", "head", n, [F], [H]),
    ]


def _huggingface_kept(s: Shape) -> float:
    mask = M if s.dropout else 0.0
    norms = 2 * s.residual * (F + H + mask)
    # gelu_new keeps x, x in fp32, pow's and tanh's result, both factors of the product, and the product in 16 bits
    ffn = s.inner * (H * 3 if _gated(s) else H + F + F + F + H + H)
    return norms + s.qkv * H * 2 + s.attention_width * H + ffn


# -- weights, gradients, optimiser ---------------------------------------------------------------------------------


def _amp_microbatch(parameters: int, accumulates: bool) -> list[Op]:
    """Weights to 16 bits once a forward pass, their gradients back to fp32, and into the sum of earlier ones."""
    ops = [
        _stream("weights_to_16_bit", "optimizer", parameters, [F], [H]),
        _stream("weight_gradients_to_fp32", "optimizer", parameters, [H], [F]),
    ]
    return ops + ([_stream("accumulate_gradients", "optimizer", parameters, [F, F], [F])] if accumulates else [])


def _megatron_microbatch(parameters: int, accumulates: bool) -> list[Op]:
    return [_stream("accumulate_gradients", "optimizer", parameters, [H, F], [F])]


def _adam(parameters: int) -> Op:
    return _stream("adam", "optimizer", parameters, [F, F, F, F], [F, F, F])


def _amp_step(parameters: int, fp16: bool) -> list[Op]:
    unscale = [_stream("unscale", "optimizer", parameters, [F], [F])] if fp16 else []
    return [
        *unscale,
        _stream("gradient_norm", "optimizer", parameters, [F], []),
        _stream("clip", "optimizer", parameters, [F], [F]),
        _adam(parameters),
    ]


def _megatron_step(parameters: int, fp16: bool) -> list[Op]:
    return [*_amp_step(parameters, fp16), _stream("weights_to_16_bit", "optimizer", parameters, [F], [H])]


STYLES: dict[str, Style] = {
    "fused": Style(
        "fused", 8, _fused_forward, _fused_backward, None, None, _fused_loss, _amp_microbatch, _amp_step,
        _fused_kept, 4.0, 2.0, 10.0, 8.0,
    ),
    "megatron": Style(
        "megatron", 128, _megatron_forward, _megatron_backward, _megatron_standard_forward,
        _megatron_standard_backward, _megatron_loss, _megatron_microbatch, _megatron_step, _megatron_kept, 5.0, 6.0,
        6.0, 12.0,
    ),
    "huggingface": Style(
        "huggingface", 1, _huggingface_forward, _huggingface_backward, _huggingface_standard_forward,
        _huggingface_standard_backward, _huggingface_loss, _amp_microbatch, _amp_step, _huggingface_kept, 9.0, 10.0,
        10.0, 8.0,
    ),
}  # fmt: skip


def style_of(name: str) -> Style:
    """The style ``name``; :class:`InputError` names the known ones."""
    if name not in STYLES:
        raise InputError(f"--fusion: {name!r} is unknown; use {', '.join(STYLES)}")
    return STYLES[name]
