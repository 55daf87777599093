"""Device memory of a model: weights, optimiser, what autograd keeps, logits, KV cache. Bytes of one GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.model_programs import RECOMPUTE, Training
from simulator.model_shape import F, H
from simulator.model_zoo import TransformerModel
from simulator.problem import DTYPE_BYTES
from simulator.profile import Profile

#: A datasheet's GB of memory are binary ones: an H200 of "141 GB" reports 150.1e9 bytes (our campaign), an A100 of
#: "80 GB" 81920 MiB. Of these a context, libraries and fragmentation take about 3 %.
USABLE_SHARE = 150.1 / 141 * 0.97


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose."""

    weights_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    activation_bytes: float = 0.0
    attention_bytes: float = 0.0
    logits_bytes: float = 0.0
    kv_cache_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """All of them."""
        return (
            self.weights_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.attention_bytes
            + self.logits_bytes
            + self.kv_cache_bytes
        )

    def fits(self, gpu: Profile) -> bool:
        """Whether ``gpu`` holds it."""
        return self.total_bytes <= USABLE_SHARE * gpu.hbm_bytes


def training_memory(t: Training) -> Memory:
    """Peak of a training step, at the end of its forward pass.

    ``activation_bytes`` is what autograd keeps beside attention's own; ``attention_bytes`` what attention keeps: O and
    LSE, or P and its dropout for the unfused one (of one layer only where attention is computed again).
    """
    s, style = t.shape, t.style
    parameters = s.model.parameter_count()
    kept = style.kept_per_layer(s)
    output = s.attention_width * H
    lse = s.tokens * s.model.heads * F
    own = s.scores * style.kept_scores if t.attention == "standard" else lse
    layers = s.model.layers
    if t.recompute == "full":
        # a layer keeps its input; one layer's activations exist at a time
        activations, attention = layers * s.residual * H + kept, own + output
    elif t.recompute == "attention":
        activations, attention = layers * kept, own + layers * output
    else:
        activations, attention = layers * kept, layers * (own + output)
    return Memory(
        weights_bytes=parameters * style.gradient_and_weight_bytes,
        optimizer_bytes=parameters * style.optimizer_bytes / t.optimizer_shards,
        activation_bytes=activations,
        attention_bytes=attention,
        logits_bytes=t.loss_tokens * t.vocab * style.kept_logits,
    )


def inference_memory(model: TransformerModel, batch: int, tokens: int, context: int, dtype: str) -> Memory:
    """Weights in 16 bits, the KV cache of ``context`` tokens a sequence, and one layer's activations of ``tokens``."""
    widest = model.hidden * 2 + model.ffn_size * (3 if model.ffn_kind == "swiglu" else 2)
    return Memory(
        weights_bytes=model.parameter_count() * H,
        activation_bytes=tokens * widest * H,
        logits_bytes=batch * model.vocab * H,
        kv_cache_bytes=model.kv_cache_bytes(batch, context, dtype) if dtype in DTYPE_BYTES else 0.0,
    )


def least_recompute(t: Training, gpu: Profile) -> Training:
    """``t`` with the least recomputation with which it fits on ``gpu``; with all of it when nothing fits."""
    for recompute in RECOMPUTE:
        candidate = replace(t, recompute=recompute)
        if training_memory(candidate).fits(gpu):
            return candidate
    return replace(t, recompute=RECOMPUTE[-1])


def largest_batch(t: Training, gpu: Profile, most: int = 64) -> int:
    """The largest power of two of sequences that fits with ``t``'s recomputation; 1 when none does."""
    batch = most
    while batch > 1 and not training_memory(replace(t, shape=replace(t.shape, batch=batch))).fits(gpu):
        batch //= 2
    return batch
