"""A model as work: every kernel of a training step, a prefill or a decode step, with how often it runs.

Layers of a model are equal, so one layer's kernels are listed once and counted ``layers`` times. Attention is the
simulator's own program of the chosen algorithm, in both passes; products by weights, normalisations, activations,
residual additions, the loss and the optimiser are the specs of :mod:`simulator.model_kernels` in the cut of a
:class:`~simulator.model_styles.Style`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from algorithms import algorithm_module, default_implementation
from algorithms.common import ceil_div
from simulator.errors import InputError, unknown
from simulator.model_kernels import Gemm, Stream, TorchSoftmax
from simulator.model_shape import F, H, Op, Shape, Style
from simulator.model_zoo import Linear, TransformerModel
from simulator.problem import AttentionProblem
from simulator.profile import Profile

RECOMPUTE = ("none", "attention", "full")
#: Share of an encoder's tokens that its masked-language loss looks at (Devlin et al. 2018: 15 %).
MASKED_TOKENS_SHARE = 0.15


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention; ``products_only`` leaves out what a style replaces (softmax, mask) of the unfused one."""

    algorithm: str
    problem: AttentionProblem
    products_only: bool = False


#: What a kernel of a model is described by.
Spec = Stream | Gemm | TorchSoftmax | AttentionCall


@dataclass(frozen=True)
class Work:
    """``count`` launches of ``spec``; ``group`` and ``phase`` (``forward``, ``backward``, ``step``) say where."""

    name: str
    group: str
    phase: str
    spec: Spec
    count: float = 1.0


@dataclass(frozen=True)
class Training:
    """How a training step runs.

    ``accumulation`` micro-batches share one optimiser step; ``optimizer_shards`` GPUs share its state (ZeRO-1).
    ``recompute``: what backward computes again instead of keeping it: ``none``, ``attention`` or ``full``.
    ``loss_share``: share of tokens with a loss.
    """

    shape: Shape
    style: Style
    attention: str
    dtype: str = "bf16"
    recompute: str = "none"
    accumulation: int = 1
    optimizer_shards: int = 1
    loss_share: float = 1.0

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise unknown("--recompute", self.recompute, (*RECOMPUTE, "auto"))
        if self.attention == "flash_decoding":
            raise InputError("--attention: flash_decoding is for one query at a time; train with fa1, fa2 or fa3")
        for name, value in (("accumulation", self.accumulation), ("optimizer_shards", self.optimizer_shards)):
            if value < 1:
                raise InputError(f"--{name.replace('_', '-')}: {value} is not a positive whole number")

    @property
    def loss_tokens(self) -> int:
        """Tokens whose logits are computed."""
        return max(1, round(self.shape.tokens * self.loss_share))

    @property
    def vocab(self) -> int:
        """Columns of the output projection as the style stores them."""
        multiple = self.style.vocab_multiple
        return ceil_div(self.shape.model.vocab, multiple) * multiple


def attention_problem(shape: Shape, algorithm: str, gpu: Profile, dtype: str, pass_: str) -> AttentionProblem:
    """The attention of one layer; with dropout only where the algorithm's kernel has it."""
    m = shape.model
    problem = AttentionProblem(
        batch=shape.batch,
        heads=m.heads,
        kv_heads=m.kv_heads,
        seqlen_q=shape.seqlen,
        head_dim=m.head_dim,
        dtype=dtype,
        causal=m.causal,
        pass_=pass_,
    )
    return problem.with_(dropout=shape.dropout) if has_dropout(algorithm, gpu, problem) else problem


def has_dropout(algorithm: str, gpu: Profile, problem: AttentionProblem) -> bool:
    """Whether the algorithm's kernel for ``problem`` on ``gpu`` applies dropout itself."""
    implementation = default_implementation(algorithm, gpu, problem)
    return "dropout" in algorithm_module(algorithm).IMPLEMENTATIONS[implementation].features


def layer_forward(t: Training, gpu: Profile) -> list[Work]:
    """The kernels of one layer's forward pass."""
    s, works = t.shape, []
    for linear in s.model.layer_linears():
        epilogue = _fused_gelu(t, linear)
        works.append(
            _product(linear.name, "forward", Gemm(s.tokens, linear.out_features, linear.in_features, **epilogue))
        )
    works += _works(t.style.forward(s), "forward")
    return works + attention_forward(t, gpu)


def attention_forward(t: Training, gpu: Profile) -> list[Work]:
    """Attention of one layer, forward."""
    return _attention(t, gpu, "forward", "fwd", t.style.standard_forward)


def attention_backward(t: Training, gpu: Profile) -> list[Work]:
    """Attention of one layer, backward."""
    return _attention(t, gpu, "backward", "bwd", t.style.standard_backward)


def _attention(
    t: Training, gpu: Profile, phase: str, pass_: str, around: Callable[[Shape], list[Op]] | None
) -> list[Work]:
    s = t.shape
    problem = attention_problem(s, t.attention, gpu, t.dtype, pass_)
    if t.attention != "standard":
        return [Work(t.attention, "attention", phase, AttentionCall(t.attention, problem))]
    problem = problem.with_(dropout=0.0)
    call = Work("standard", "attention", phase, AttentionCall("standard", problem, around is not None))
    if around is not None:
        return [call, *_works(around(s), phase)]
    reads = [H] if phase == "forward" else [H, 1.0]
    writes = [H, 1.0] if phase == "forward" else [H]
    dropout = Op("attention_dropout", "attention", Stream(s.scores, tuple(reads), tuple(writes), "dropout"))
    return [call, *(_works([dropout], phase) if s.dropout else [])]


def layer_backward(t: Training, gpu: Profile) -> list[Work]:
    """The kernels of one layer's backward pass: two products by linear layer, attention, and the rest."""
    s, works = t.shape, []
    for linear in s.model.layer_linears():
        fused = linear.name == "ffn_out" and bool(_fused_gelu(t))
        data = Gemm(s.tokens, linear.in_features, linear.out_features, "")
        data = replace(data, aux_reads=H, activation=True) if fused else data
        works.append(_product(f"{linear.name} dX", "backward", data))
        works.append(_product(f"{linear.name} dW", "backward", _weight_gradient(linear, s.tokens)))
    return works + _works(t.style.backward(s), "backward") + attention_backward(t, gpu)


def training_works(t: Training, gpu: Profile) -> list[Work]:
    """One micro-batch of a training step, with the optimiser's step shared over the accumulated micro-batches."""
    s, model = t.shape, t.shape.model
    works = []
    for work in [*layer_forward(t, gpu), *layer_backward(t, gpu)]:
        works.append(_times(work, model.layers))
    again = {"attention": attention_forward, "full": layer_forward}.get(t.recompute)
    if again is not None:
        works += [_times(w, model.layers, "backward", " again") for w in again(t, gpu)]
    head = (t.loss_tokens, t.vocab, model.hidden)
    works += [
        Work("lm_head", "head", "forward", Gemm(head[0], head[1], head[2])),
        Work("lm_head dX", "head", "backward", Gemm(head[0], head[2], head[1], "")),
        Work("lm_head dW", "head", "backward", Gemm(head[1], head[2], head[0], "a")),
    ]
    works += [Work(op.name, op.group, _loss_phase(op), op.spec) for op in t.style.loss(t.loss_tokens, t.vocab)]
    works += [
        Work("embedding", "embedding", "forward", Stream(s.residual, (F,), (F,))),
        Work("embedding fill", "embedding", "backward", Stream(model.vocab * model.hidden, (), (F,))),
        Work("embedding sums", "embedding", "backward", Stream(s.residual, (F, F), (F,), "strided")),
    ]
    parameters = model.parameter_count()
    works += _works(t.style.per_microbatch(parameters, t.accumulation > 1), "backward")
    own = max(1, parameters // t.optimizer_shards)
    works += [_times(w, 1 / t.accumulation) for w in _works(t.style.per_step(own, t.dtype == "fp16"), "step")]
    return works


def prefill_works(shape: Shape, attention: str, gpu: Profile, dtype: str = "bf16") -> list[Work]:
    """All tokens of the prompts at once; logits of the last token of each sequence."""
    m = shape.model
    problem = attention_problem(shape, attention, gpu, dtype, "fwd").with_(dropout=0.0)
    call = Work(attention, "attention", "forward", AttentionCall(attention, problem))
    return _inference_works(m, shape.tokens, shape.batch, call)


def decode_works(model: TransformerModel, batch: int, context: int, attention: str, dtype: str = "bf16") -> list[Work]:
    """One token of each of ``batch`` sequences that have ``context`` tokens in the KV cache."""
    if not model.causal:
        raise InputError(f"--decode: {model.name} is an encoder and generates nothing; use --prefill")
    return _inference_works(model, batch, batch, decode_attention(model, batch, context, attention, dtype))


def decode_attention(
    model: TransformerModel,
    batch: int,
    context: int,
    attention: str,
    dtype: str = "bf16",
    num_splits: int | None = None,
) -> Work:
    """Attention of one layer in a decode step: one query a head on ``context`` keys."""
    problem = AttentionProblem(
        batch=batch,
        heads=model.heads,
        kv_heads=model.kv_heads,
        seqlen_q=1,
        seqlen_k=context,
        head_dim=model.head_dim,
        dtype=dtype,
        num_splits=num_splits,
    )
    return Work(attention, "attention", "forward", AttentionCall(attention, problem))


def _inference_works(m: TransformerModel, tokens: int, sequences: int, attention: Work) -> list[Work]:
    """The fused cut of serving engines: add + norm, products, rotary with the cache's new rows, attention, gate."""
    gated = m.ffn_kind == "swiglu"
    residual = tokens * m.hidden
    qkv = tokens * (m.heads + 2 * m.kv_heads) * m.head_dim
    norm = Work("add_norm", "norm", "forward", Stream(residual, (H, H), (H, H), "norm"), 2.0)
    layer = [
        norm,
        Work(
            "rotary_and_cache" if m.position == "rotary" else "cache", "elementwise", "forward", Stream(qkv, (H,), (H,))
        ),
    ]
    for linear in m.layer_linears():
        activation = linear.name == "ffn_in" and not gated
        layer.append(
            _product(
                linear.name, "forward", Gemm(tokens, linear.out_features, linear.in_features, activation=activation)
            )
        )
    if gated:
        layer.append(Work("swiglu", "elementwise", "forward", Stream(tokens * m.ffn_size, (H, H), (H,), "activation")))
    works = [_times(w, m.layers) for w in [*layer, attention]]
    works.append(Work("embedding", "embedding", "forward", Stream(residual, (H,), (H,))))
    works.append(Work("lm_head", "head", "forward", Gemm(sequences, ceil_div(m.vocab, 8) * 8, m.hidden)))
    return works


def _fused_gelu(t: Training, linear: Linear | None = None) -> dict[str, Any]:
    """The epilogue of the first feed-forward product with bias and GELU fused into it: it also stores its input."""
    fused = t.style.name == "fused" and t.shape.model.ffn_kind == "gelu"
    if not fused or (linear is not None and linear.name != "ffn_in"):
        return {}
    return {"aux_writes": H, "activation": True}


def _weight_gradient(linear: Linear, tokens: int) -> Gemm:
    return Gemm(linear.out_features, linear.in_features, tokens, "a")


def _product(name: str, phase: str, spec: Gemm) -> Work:
    return Work(name, "linear", phase, spec)


def _works(ops: list[Op], phase: str) -> list[Work]:
    return [Work(op.name, op.group, phase, op.spec) for op in ops]


def _loss_phase(op: Op) -> str:
    return "backward" if "gradient" in op.name or "backward" in op.name else "forward"


def _times(work: Work, count: float, phase: str | None = None, suffix: str = "") -> Work:
    return Work(work.name + suffix, work.group, phase or work.phase, work.spec, work.count * count)
