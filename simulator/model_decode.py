"""Why FlashAttention does little for decoding, in computed numbers: intensity, splits, and where attention takes over.

A decode step reads every weight and the whole KV cache once to make one token a sequence. A weight serves the whole
batch, so the products' intensity grows with it; a cached key serves only the query heads of its own group, so
attention's intensity is the group's size whatever the batch. There is no score matrix to save bytes on: the scores of
one query are a row. What helps is to keep all SMs reading (FlashDecoding's splits), and to store fewer bytes (GQA).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from simulator.errors import UnsupportedError
from simulator.model_programs import decode_attention
from simulator.model_run import ModelRun, decode, prefill, read_weights
from simulator.model_times import Simulator
from simulator.model_zoo import TransformerModel
from simulator.problem import DTYPE_BYTES


@dataclass(frozen=True)
class Intensity:
    """FLOP per byte of a decode step at one batch: of the products by weights, of attention, and of both together."""

    batch: int
    linear: float
    attention: float
    step: float
    ridge: float


@dataclass(frozen=True)
class GroupIntensity:
    """Attention of a decode step if ``group`` query heads shared a KV head: FLOP per byte, and the cache's bytes."""

    group: int
    attention: float
    cache_bytes: int
    ridge: float


@dataclass(frozen=True)
class SplitGain:
    """Attention of one layer without and with splits: times, and the bandwidth at which the cache is read."""

    batch: int
    context: int
    unsplit_us: float
    split_us: float
    cache_bytes: int

    @property
    def gain(self) -> float:
        """Unsplit over split time."""
        return self.unsplit_us / self.split_us

    def bandwidth(self, time_us: float) -> float:
        """Bytes a second at which the cache is read in ``time_us``."""
        return self.cache_bytes / time_us * 1e6


@dataclass(frozen=True)
class CacheFloor:
    """What bounds a decode step's attention: the KV cache's bytes over HBM's bandwidth, and how little scores add."""

    cache_bytes: int
    hbm_bytes_per_s: float
    attention_us: float
    score_bytes: int

    @property
    def floor_us(self) -> float:
        """Time in which the datasheet's bandwidth delivers the cache."""
        return self.cache_bytes / self.hbm_bytes_per_s * 1e6


@dataclass(frozen=True)
class Crossing:
    """One context length: a prefill of it, a decode step behind it."""

    context: int
    prefill: ModelRun
    decode: ModelRun

    @property
    def steps_as_long_as_prefill(self) -> float:
        """Decode steps that take as long as the prefill."""
        return self.prefill.time_us / self.decode.time_us


def cache_floor(run: ModelRun, simulator: Simulator) -> CacheFloor:
    """The :class:`CacheFloor` of a decode step ``run``. Unfused attention writes and reads S and P, a row a query."""
    m = run.model
    scores = m.layers * run.batch * m.heads * run.seqlen * DTYPE_BYTES[simulator.dtype]
    cache = m.kv_cache_bytes(run.batch, run.seqlen, simulator.dtype)
    return CacheFloor(cache, simulator.gpu.hbm_bandwidth_bytes_per_s, run.attention_us, 4 * scores)


def intensities(
    model: TransformerModel, simulator: Simulator, context: int, batches: tuple[int, ...]
) -> list[Intensity]:
    """:class:`Intensity` by batch: exact counts of FLOPs and compulsory bytes, no simulation."""
    size = DTYPE_BYTES[simulator.dtype]
    weights = read_weights(model)
    out = []
    for batch in batches:
        cache = model.kv_cache_bytes(batch, context, simulator.dtype)
        attention_flops = 4.0 * model.layers * batch * model.heads * model.head_dim * context
        linear_flops = 2.0 * weights * batch
        out.append(
            Intensity(
                batch,
                linear_flops / (weights * size),
                attention_flops / cache,
                (linear_flops + attention_flops) / (weights * size + cache),
                simulator.gpu.ridge_flop_per_byte(simulator.dtype),
            )
        )
    return out


def group_intensities(model: TransformerModel, simulator: Simulator, batch: int, context: int) -> list[GroupIntensity]:
    """:class:`GroupIntensity` from one KV head a query head to one for all, in powers of two (and the model's own)."""
    groups = [2**n for n in range(model.heads.bit_length()) if model.heads % 2**n == 0]
    groups = sorted({*groups, model.heads // model.kv_heads, model.heads})
    flops = 4.0 * model.layers * batch * model.heads * model.head_dim * context
    ridge = simulator.gpu.ridge_flop_per_byte(simulator.dtype)
    out = []
    for group in groups:
        other = model.model_copy(update={"kv_heads": model.heads // group})
        cache = other.kv_cache_bytes(batch, context, simulator.dtype)
        out.append(GroupIntensity(group, flops / cache, cache, ridge))
    return out


def split_gains(
    model: TransformerModel, simulator: Simulator, context: int, batches: tuple[int, ...]
) -> list[SplitGain]:
    """:class:`SplitGain` by batch: FlashDecoding's kernel with one split and with its own choice of splits."""
    out = []
    for batch in batches:
        times = []
        for splits in (1, None):
            work = decode_attention(model, batch, context, "flash_decoding", simulator.dtype, splits)
            times.append(simulator.time(work.spec).time_us)
        cache = model.kv_cache_bytes(batch, context, simulator.dtype) // model.layers
        out.append(SplitGain(batch, context, times[0], times[1], cache))
    return out


def crossings(
    model: TransformerModel, simulator: Simulator, batch: int, contexts: tuple[int, ...], attention: str
) -> list[Crossing]:
    """A prefill and a decode step at each context; contexts whose prefill is not modelled are left out."""
    out = []
    for context in contexts:
        try:
            first = prefill(model, simulator, batch=batch, seqlen=context, attention=attention)
        except UnsupportedError:
            continue
        out.append(Crossing(context, first, decode(model, simulator, batch=batch, context=context)))
    return out


def half_attention_context(points: list[tuple[int, float]]) -> float | None:
    """Context at which attention's share passes one half, on the line between the points around it; None if nowhere.

    ``points``: (context, share) by rising context.
    """
    for (low, a), (high, b) in pairwise(points):
        if a < 0.5 <= b:
            return low + (high - low) * (0.5 - a) / (b - a)
    return None
