"""What is asked: one attention problem and the conditions under which it runs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from simulator.errors import InputError, unknown

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int32": 4, "bool": 1}
PASSES = ("fwd", "bwd", "fwd_bwd")
L2_STATES = ("cold", "warm")
#: Greatest size: kernels index with 32-bit integers.
MOST = 2**31 - 1
#: Launches with more CTAs are refused: each costs about 1.3 kB and 40 µs, and the GPU repeats itself long before.
MOST_CTAS = 2_000_000
TIMINGS = ("kernel", "graph", "eager")
#: Default of a size of K or V, replaced by the queries' own: a finished problem has whole numbers only.
_AS_QUERIES = cast(int, None)


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call: ``softmax(Q K^T / sqrt(head_dim)) V`` over ``batch`` sequences.

    Shapes: Q ``[batch, heads, seqlen_q, head_dim]``, K ``[batch, kv_heads, seqlen_k, head_dim]``,
    V ``[batch, kv_heads, seqlen_k, head_dim_v]``. ``causal`` aligns the mask to the bottom right
    corner (query ``i`` sees keys ``<= i + seqlen_k - seqlen_q``), as FlashAttention does.
    ``window`` is ``(left, right)`` in keys around the diagonal, ``-1`` meaning unbounded.
    ``num_splits`` ``None`` leaves the choice to the library's heuristic. ``seqlens_q``/``seqlens_k`` give each sequence
    its own length, the longest being at most ``seqlen_q``/``seqlen_k``.
    """

    batch: int = 1
    heads: int = 1
    kv_heads: int = _AS_QUERIES
    seqlen_q: int = 1024
    seqlen_k: int = _AS_QUERIES
    head_dim: int = 128
    head_dim_v: int = _AS_QUERIES
    dtype: str = "bf16"
    causal: bool = False
    pass_: str = "fwd"
    window: tuple[int, int] | None = None
    mask: str | None = None
    dropout: float = 0.0
    softcap: float = 0.0
    num_splits: int | None = None
    page_size: int | None = None
    kv_capacity: int | None = None
    deterministic: bool = False
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None

    if TYPE_CHECKING:
        # what the generated constructor takes: None where a size follows the queries'
        def __init__(
            self,
            batch: int = 1,
            heads: int = 1,
            kv_heads: int | None = None,
            seqlen_q: int = 1024,
            seqlen_k: int | None = None,
            head_dim: int = 128,
            head_dim_v: int | None = None,
            dtype: str = "bf16",
            causal: bool = False,
            pass_: str = "fwd",
            window: tuple[int, int] | None = None,
            mask: str | None = None,
            dropout: float = 0.0,
            softcap: float = 0.0,
            num_splits: int | None = None,
            page_size: int | None = None,
            kv_capacity: int | None = None,
            deterministic: bool = False,
            seqlens_q: tuple[int, ...] | None = None,
            seqlens_k: tuple[int, ...] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.seqlen_k is None:
            object.__setattr__(self, "seqlen_k", self.seqlen_q)
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}: {value!r} is not a positive whole number")
            if value > MOST:
                raise InputError(f"{name}: {value:.4g} is more than {MOST:,}; no kernel takes a longer index")
        if self.heads % self.kv_heads:
            raise InputError(f"heads: {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.dtype not in DTYPE_BYTES:
            raise unknown("dtype", self.dtype, ("fp16", "bf16", "fp8", "fp32"))
        if self.pass_ not in PASSES:
            raise unknown("pass", self.pass_, PASSES)
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout: {self.dropout} is outside [0, 1)")
        for name in ("num_splits", "page_size", "kv_capacity"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST:
                raise InputError(f"{name}: {value} is not a positive whole number up to {MOST:,}")
        if not 0.0 <= self.softcap < math.inf:
            raise InputError(f"softcap: {self.softcap} is not a number from 0 (none) up")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < -1):
            raise InputError(f"window: {self.window!r} is not (left, right) in keys, -1 meaning unbounded")
        for name in ("seqlens_q", "seqlens_k"):
            self._check_lengths(name, getattr(self, name), getattr(self, name.replace("lens", "len")))

    def _check_lengths(self, name: str, lengths: tuple[int, ...] | None, longest: int) -> None:
        if lengths is None:
            return
        object.__setattr__(self, name, tuple(lengths))
        if len(lengths) != self.batch:
            raise InputError(f"{name}: {len(lengths)} lengths for batch {self.batch}; give one a sequence")
        for length in lengths:
            if not 1 <= length <= longest:
                size = name.replace("lens", "len")
                raise InputError(f"{name}: {length} is outside 1 .. {size} ({longest})")

    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence of the batch."""
        q = self.seqlens_q if self.seqlens_q is not None else (self.seqlen_q,) * self.batch
        k = self.seqlens_k if self.seqlens_k is not None else (self.seqlen_k,) * self.batch
        return tuple(zip(q, k, strict=True))

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K and V."""
        return DTYPE_BYTES[self.dtype]

    @property
    def sides(self) -> tuple[int, int]:
        """Keys that a query sees left and right of its diagonal (-1: all), causal mask and window together."""
        left, right = self.window if self.window is not None else (-1, -1)
        return left, 0 if self.causal else right

    def unmasked_pairs_per_head(self) -> int:
        """(query, key) pairs of one head that causal mask and window leave in a sequence of ``seqlen_q`` queries and
        ``seqlen_k`` keys, exactly."""
        return unmasked_pairs(self.seqlen_q, self.seqlen_k, *self.sides)

    def unmasked_pairs(self) -> int:
        """The same summed over the sequences of the batch, each with its own lengths."""
        if self.seqlens_q is None and self.seqlens_k is None:
            return self.batch * self.unmasked_pairs_per_head()
        counts = Counter(self.sequences())
        return sum(times * unmasked_pairs(*lengths, *self.sides) for lengths, times in counts.items())

    def flops(self) -> int:
        """Nominal FLOPs: two GEMMs over the unmasked pairs; backward counts 2.5 times the forward pass."""
        forward = 2 * self.heads * self.unmasked_pairs() * (self.head_dim + self.head_dim_v)
        return {"fwd": forward, "bwd": forward * 5 // 2, "fwd_bwd": forward * 7 // 2}[self.pass_]

    def with_(self, **changes: Any) -> AttentionProblem:
        """A copy with some fields changed."""
        return replace(self, **changes)


def unmasked_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs with ``-left <= key - diagonal <= right`` (-1: no bound), the diagonal ending at the last key; no loop."""

    def below(offset: int) -> int:
        """Sum over queries ``i`` of the keys with an index below ``i + offset``."""
        first, full = max(0, 1 - offset), max(0, keys - offset)
        rising = range(min(first, queries), min(max(first, full), queries))
        return len(rising) * (rising.start + rising.stop - 1 + 2 * offset) // 2 + keys * (queries - rising.stop)

    shift = keys - queries
    seen = below(shift + right + 1) if right >= 0 else queries * keys
    return seen - (below(shift - left) if left >= 0 else 0)
