"""What all kernel cuts of a transformer share: the shapes of a micro-batch, operations, and those that none fuses.

Widths are bytes per element: ``H`` (fp16, bf16), ``F`` (fp32), ``M`` (a dropout mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.model_kernels import Gemm, Stream, TorchSoftmax
from simulator.model_zoo import TransformerModel

H, F, M = 2.0, 4.0, 1.0  # 16-bit, fp32, mask


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


def stream(
    name: str, group: str, elements: int, reads: Iterable[float], writes: Iterable[float], mix: str = "vectorised"
) -> Op:
    return Op(name, group, Stream(elements, tuple(reads), tuple(writes), mix))


def gated(s: Shape) -> bool:
    return s.model.ffn_kind == "swiglu"


def dropout_mask(s: Shape) -> tuple[float, ...]:
    return (M,) if s.dropout else ()


def rotary(s: Shape) -> list[Op]:
    if s.model.position != "rotary":
        return []
    width = s.qkv - (s.qkv - s.attention_width) // 2
    return [stream("rotary", "elementwise", width, [H], [H])]


def torch_softmax(s: Shape, backward: bool = False) -> TorchSoftmax:
    masked = 0.5 if s.model.causal and not backward else 0.0
    return TorchSoftmax(s.batch * s.model.heads, s.seqlen, s.seqlen, "fp32", backward, masked)


def attention_dropout(s: Shape) -> list[Op]:
    return [stream("attention_dropout", "attention", s.scores, [H], [H, M], "dropout")] if s.dropout else []


def attention_dropout_backward(s: Shape) -> list[Op]:
    return [stream("attention_dropout_backward", "attention", s.scores, [H, M], [H])] if s.dropout else []
