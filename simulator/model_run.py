"""Whole models on one GPU: times of all kernels put together, attention's share, and what a faster attention buys.

``train``, ``prefill`` and ``decode`` return a :class:`ModelRun`. Each distinct kernel is simulated once, from an empty
L2, and counted as often as it runs; kernels follow each other with the gap that the GPU's profile gives. One GPU is
modelled: no gradient all-reduce, no data loading, no evaluation, no checkpoints.

FLOP convention (``tflops``, ``mfu``): the model's, not the hardware's. In training 6 FLOP a parameter and token plus
12 x layers x heads x head_dim x seqlen a token for attention, not halved for a causal mask and without what is
recomputed (Narayanan et al. 2021, arXiv:2104.04473, without checkpointing; as the FlashAttention papers count); a
masked-language loss counts the tokens that it looks at. In a forward pass 2 FLOP a weight that is multiplied by
(embeddings are not) plus 4 x layers x heads x head_dim x keys a query, the mask not halved. ``mfu`` divides by the
dense peak of the datasheet; ``hfu`` is what the tensor cores execute: without skipped tiles, with recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import fsum

from simulator.errors import InputError, unknown
from simulator.model_memory import Memory, inference_memory, least_recompute, training_memory
from simulator.model_programs import (
    MASKED_TOKENS_SHARE,
    Training,
    Work,
    decode_works,
    has_dropout,
    prefill_works,
    training_works,
)
from simulator.model_shape import Shape
from simulator.model_styles import style_of
from simulator.model_times import Line, Simulator
from simulator.model_zoo import TransformerModel
from simulator.problem import AttentionProblem

LAUNCHES = ("graph", "eager")


@dataclass(frozen=True)
class ModelRun:
    """One step of a model on one GPU.

    ``time_us``: of one micro-batch (training, its share of the optimiser included), one prefill or one decode step.
    ``held_clock_hz``: the SM clock to which the power limit holds a step that repeats (None: it does not bind).
    ``gpu_us`` is the GPU's work, ``host_us`` the launches' cost on the host: an eager framework's step takes the
    longer of the two. ``tokens``: tokens processed (training, prefill) or generated (decode).
    """

    model: TransformerModel
    gpu: str
    kind: str
    attention: str
    batch: int
    seqlen: int
    tokens: int
    style: str
    lines: tuple[Line, ...]
    gpu_us: float
    host_us: float
    memory: Memory
    memory_fits: bool
    model_flops: float
    spec_flops_per_s: float
    held_clock_hz: float | None
    recompute: str = "none"
    notes: tuple[str, ...] = field(default=())

    @property
    def time_us(self) -> float:
        """Time of the step."""
        return max(self.gpu_us, self.host_us)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.time_us * 1e6

    @property
    def tflops(self) -> float:
        """Model TFLOP/s (see the module's convention)."""
        return self.model_flops / self.time_us / 1e6

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: of the datasheet's dense peak."""
        return self.model_flops / (self.time_us * 1e-6) / self.spec_flops_per_s if self.spec_flops_per_s else 0.0

    @property
    def executed_flops(self) -> float:
        """FLOPs that the tensor cores execute (padded tiles included)."""
        return sum(line.work.count * line.each.flops for line in self.lines)

    @property
    def hfu(self) -> float:
        """Executed FLOPs over the datasheet's dense peak."""
        return self.executed_flops / (self.time_us * 1e-6) / self.spec_flops_per_s if self.spec_flops_per_s else 0.0

    @property
    def flop_convention(self) -> str:
        """How ``model_flops`` counts, in a few words (P parameters, W weights multiplied by, L layers, N keys)."""
        if self.kind == "training":
            return "6 P + 12 L H d N a token, mask not halved"
        return "2 W + 4 L H d N a query, mask not halved"

    @property
    def attention_us(self) -> float:
        """Time in attention (products, softmax, mask and dropout of scores, copies between layouts)."""
        return self.group_us("attention")

    @property
    def attention_share(self) -> float:
        """Attention's share of the GPU's time."""
        return self.attention_us / self.gpu_us

    @property
    def launches(self) -> float:
        """Kernels launched a step."""
        return sum(line.work.count * line.each.launches for line in self.lines)

    def group_us(self, group: str) -> float:
        """Time of one group of kernels."""
        return fsum(line.time_us for line in self.lines if line.work.group == group)

    def groups(self) -> dict[str, float]:
        """Time by group, the longest first."""
        names = dict.fromkeys(line.work.group for line in self.lines)
        return dict(sorted(((n, self.group_us(n)) for n in names), key=lambda item: -item[1]))

    def phases(self) -> dict[str, float]:
        """Time by phase."""
        total: dict[str, float] = {}
        for line in self.lines:
            total[line.work.phase] = total.get(line.work.phase, 0.0) + line.time_us
        return total


@dataclass(frozen=True)
class Swap:
    """Another attention in the same model.

    ``speedup`` is the ratio of whole steps, ``amdahl`` what Amdahl's law says of attention's share and its own
    speed-up, ``limit`` the speed-up by attention that takes no time.
    """

    slower: ModelRun
    faster: ModelRun

    @property
    def attention_speedup(self) -> float:
        """How much faster attention alone is."""
        return self.slower.attention_us / self.faster.attention_us

    @property
    def speedup(self) -> float:
        """How much faster the step is."""
        return self.slower.time_us / self.faster.time_us

    @property
    def amdahl(self) -> float:
        """1 / ((1 - share) + share / speed-up), on the GPU's time."""
        share = self.slower.attention_share
        return 1.0 / ((1.0 - share) + share / self.attention_speedup)

    @property
    def limit(self) -> float:
        """1 / (1 - share)."""
        return 1.0 / (1.0 - self.slower.attention_share)


def model_flops_per_token(model: TransformerModel, seqlen: int) -> float:
    """Model FLOPs of a training step by token: 6 x parameters + 12 x layers x heads x head_dim x seqlen."""
    return 6.0 * model.parameter_count() + 12.0 * model.layers * model.heads * model.head_dim * seqlen


def read_weights(model: TransformerModel) -> int:
    """Weights that a forward pass multiplies by: the layers' and the output projection's."""
    layers = model.layers * sum(m.in_features * m.out_features for m in model.layer_linears())
    return layers + model.hidden * model.vocab


def forward_flops(model: TransformerModel, tokens: int, outputs: int, keys: int) -> float:
    """Model FLOPs of a forward pass of ``tokens`` that each see ``keys`` keys, with logits of ``outputs`` of them."""
    layers = read_weights(model) - model.hidden * model.vocab
    attention = 4.0 * model.layers * model.heads * model.head_dim * keys
    return (2.0 * layers + attention) * tokens + 2.0 * model.hidden * model.vocab * outputs


def train(
    model: TransformerModel,
    simulator: Simulator,
    *,
    batch: int,
    seqlen: int,
    attention: str = "fa2",
    fusion: str = "fused",
    dropout: float = 0.1,
    recompute: str = "auto",
    accumulation: int = 1,
    optimizer_shards: int = 1,
    launch: str = "eager",
) -> ModelRun:
    """One micro-batch of a training step. ``recompute`` ``auto`` takes the least with which it fits the GPU."""
    check_lengths(model, batch, seqlen)
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"--dropout: {dropout} is outside [0, 1)")
    gpu = simulator.gpu
    loss_share = 1.0 if model.causal else MASKED_TOKENS_SHARE
    training = Training(
        Shape(model, batch, seqlen, dropout),
        style_of(fusion),
        attention,
        simulator.dtype,
        "none" if recompute == "auto" else recompute,
        accumulation,
        optimizer_shards,
        loss_share,
    )
    if recompute == "auto":
        training = least_recompute(training, gpu)
    memory = training_memory(training)
    notes = []
    problem = AttentionProblem(pass_="bwd", dtype=simulator.dtype)
    if dropout and attention != "standard" and not has_dropout(attention, gpu, problem):
        notes.append(f"dropout inside {attention}'s kernels is not modelled (its random numbers cost no time here)")
    if training.recompute != "none":
        notes.append(f"{training.recompute} is computed again in backward: what it would keep does not fit")
    lines, clock_hz = simulator.lines(training_works(training, gpu), checked_launch(launch))
    flops = model_flops_per_token(model, seqlen) * training.shape.tokens
    if loss_share < 1.0:
        flops -= 6.0 * model.vocab * model.hidden * (training.shape.tokens - training.loss_tokens)
    return _run(
        simulator, "training", model, attention, lines, batch, seqlen, training.shape.tokens, fusion, memory, flops,
        launch, clock_hz, training.recompute, notes,
    )  # fmt: skip


def prefill(
    model: TransformerModel,
    simulator: Simulator,
    *,
    batch: int,
    seqlen: int,
    attention: str = "fa2",
    launch: str = "eager",
) -> ModelRun:
    """The prompts of ``batch`` sequences, all tokens at once."""
    check_lengths(model, batch, seqlen)
    if attention == "flash_decoding":
        raise InputError("--attention: flash_decoding is for one query at a time; prefill with fa1, fa2 or fa3")
    works = prefill_works(Shape(model, batch, seqlen, 0.0), attention, simulator.gpu, simulator.dtype)
    return _inference("prefill", model, simulator, attention, works, batch, seqlen, batch * seqlen, launch)


def decode(
    model: TransformerModel,
    simulator: Simulator,
    *,
    batch: int,
    context: int,
    attention: str = "flash_decoding",
    launch: str = "graph",
) -> ModelRun:
    """One token of each of ``batch`` sequences with ``context`` tokens in the KV cache."""
    check_lengths(model, batch, context)
    works = decode_works(model, batch, context, attention, simulator.dtype)
    return _inference("decode", model, simulator, attention, works, batch, context, batch, launch)


def _inference(
    kind: str,
    model: TransformerModel,
    simulator: Simulator,
    attention: str,
    works: list[Work],
    batch: int,
    keys: int,
    tokens: int,
    launch: str,
) -> ModelRun:
    """``tokens`` of ``batch`` sequences that see ``keys`` keys, with logits of one token a sequence."""
    memory = inference_memory(model, batch, tokens, keys, simulator.dtype)
    flops = forward_flops(model, tokens, batch, keys)
    lines, clock_hz = simulator.lines(works, checked_launch(launch))
    return _run(simulator, kind, model, attention, lines, batch, keys, tokens, "fused", memory, flops, launch, clock_hz)


def checked_launch(launch: str) -> str:
    """``launch``; :class:`InputError` for one that is none."""
    if launch not in LAUNCHES:
        raise unknown("--launch", launch, LAUNCHES)
    return launch


def check_lengths(model: TransformerModel, batch: int, seqlen: int) -> None:
    """:class:`InputError` for sizes that are none."""
    for name, value in (("batch", batch), ("seqlen", seqlen)):
        if value < 1:
            raise InputError(f"--{name}: {value} is not a positive whole number")


def _run(
    simulator: Simulator,
    kind: str,
    model: TransformerModel,
    attention: str,
    lines: tuple[Line, ...],
    batch: int,
    seqlen: int,
    tokens: int,
    style: str,
    memory: Memory,
    flops: float,
    launch: str,
    held_clock_hz: float | None,
    recompute: str = "none",
    notes: list[str] | None = None,
) -> ModelRun:
    notes = [*([doubt] if (doubt := model.doubt()) else []), *(notes or ())]
    gpu, dtype = simulator.gpu, simulator.dtype
    gpu_us = fsum(line.time_us for line in lines)
    launches = sum(line.work.count * line.each.launches for line in lines)
    host_us = simulator.host_us(launches, launch)
    if host_us > gpu_us:
        notes.append(
            f"the host bounds it: {launches:.0f} launches of {simulator.physics.host_launch_us:.0f} us each take "
            "longer than the GPU's work"
        )
    fits = memory.fits(gpu)
    if not fits:
        notes.append(f"{memory.total_bytes / 1e9:.0f} GB do not fit in {gpu.hbm_bytes / 1e9:.0f} GB: it would not run")
    if seqlen > model.max_positions:
        notes.append(f"{seqlen} tokens are more than the model's {model.max_positions} positions")
    return ModelRun(
        model=model,
        gpu=gpu.name,
        kind=kind,
        attention=attention,
        batch=batch,
        seqlen=seqlen,
        tokens=tokens,
        style=style,
        lines=lines,
        gpu_us=gpu_us,
        host_us=host_us,
        memory=memory,
        memory_fits=fits,
        model_flops=flops,
        spec_flops_per_s=gpu.spec_flops(dtype),
        held_clock_hz=held_clock_hz,
        recompute=recompute,
        notes=tuple(notes),
    )
