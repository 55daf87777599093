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

from simulator import model_style_fused as fused
from simulator import model_style_huggingface as huggingface
from simulator import model_style_megatron as megatron
from simulator.errors import unknown
from simulator.model_shape import F, H, Op, Style, stream


def _amp_microbatch(parameters: int, accumulates: bool) -> list[Op]:
    """Weights to 16 bits once a forward pass, their gradients back to fp32, and into the sum of earlier ones."""
    ops = [
        stream("weights_to_16_bit", "optimizer", parameters, [F], [H]),
        stream("weight_gradients_to_fp32", "optimizer", parameters, [H], [F]),
    ]
    return ops + ([stream("accumulate_gradients", "optimizer", parameters, [F, F], [F])] if accumulates else [])


def _megatron_microbatch(parameters: int, accumulates: bool) -> list[Op]:
    return [stream("accumulate_gradients", "optimizer", parameters, [H, F], [F])]


def _adam(parameters: int) -> Op:
    return stream("adam", "optimizer", parameters, [F, F, F, F], [F, F, F])


def _amp_step(parameters: int, fp16: bool) -> list[Op]:
    unscale = [stream("unscale", "optimizer", parameters, [F], [F])] if fp16 else []
    return [
        *unscale,
        stream("gradient_norm", "optimizer", parameters, [F], []),
        stream("clip", "optimizer", parameters, [F], [F]),
        _adam(parameters),
    ]


def _megatron_step(parameters: int, fp16: bool) -> list[Op]:
    return [*_amp_step(parameters, fp16), stream("weights_to_16_bit", "optimizer", parameters, [F], [H])]


STYLES: dict[str, Style] = {
    "fused": Style(
        name="fused",
        vocab_multiple=8,
        forward=fused.forward,
        backward=fused.backward,
        standard_forward=None,
        standard_backward=None,
        loss=fused.loss,
        per_microbatch=_amp_microbatch,
        per_step=_amp_step,
        kept_per_layer=fused.kept,
        kept_scores=4.0,
        kept_logits=2.0,
        # fp32 weights, their 16-bit copy, fp32 gradients
        gradient_and_weight_bytes=10.0,
        optimizer_bytes=8.0,
    ),
    "megatron": Style(
        name="megatron",
        vocab_multiple=128,
        forward=megatron.forward,
        backward=megatron.backward,
        standard_forward=megatron.standard_forward,
        standard_backward=megatron.standard_backward,
        loss=megatron.loss,
        per_microbatch=_megatron_microbatch,
        per_step=_megatron_step,
        kept_per_layer=megatron.kept,
        kept_scores=5.0,
        kept_logits=6.0,
        # 16-bit weights, fp32 main gradients; the fp32 master copy is the optimiser's
        gradient_and_weight_bytes=6.0,
        optimizer_bytes=12.0,
    ),
    "huggingface": Style(
        name="huggingface",
        vocab_multiple=1,
        forward=huggingface.forward,
        backward=huggingface.backward,
        standard_forward=huggingface.standard_forward,
        standard_backward=huggingface.standard_backward,
        loss=huggingface.loss,
        per_microbatch=_amp_microbatch,
        per_step=_amp_step,
        kept_per_layer=huggingface.kept,
        kept_scores=9.0,
        kept_logits=10.0,
        gradient_and_weight_bytes=10.0,
        optimizer_bytes=8.0,
    ),
}


def style_of(name: str) -> Style:
    """The style ``name``; :class:`InputError` names the known ones."""
    if name not in STYLES:
        raise unknown("--fusion", name, STYLES)
    return STYLES[name]
