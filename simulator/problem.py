"""What is asked: one attention problem and the conditions under which it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.errors import InputError

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int32": 4, "bool": 1}
PASSES = ("fwd", "bwd", "fwd_bwd")
L2_STATES = ("cold", "warm")
TIMINGS = ("kernel", "graph", "eager")


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call: ``softmax(Q K^T / sqrt(head_dim)) V`` over ``batch`` sequences.

    Shapes: Q ``[batch, heads, seqlen_q, head_dim]``, K ``[batch, kv_heads, seqlen_k, head_dim]``,
    V ``[batch, kv_heads, seqlen_k, head_dim_v]``. ``causal`` aligns the mask to the bottom right
    corner (query ``i`` sees keys ``<= i + seqlen_k - seqlen_q``), as FlashAttention does.
    ``window`` is ``(left, right)`` in keys around the diagonal, ``-1`` meaning unbounded.
    ``num_splits`` ``None`` leaves the choice to the library's heuristic.
    """

    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None
    seqlen_q: int = 1024
    seqlen_k: int | None = None
    head_dim: int = 128
    head_dim_v: int | None = None
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
        if self.heads % self.kv_heads:
            raise InputError(f"heads: {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"dtype: {self.dtype!r} is unknown; use fp16, bf16, fp8 or fp32")
        if self.pass_ not in PASSES:
            raise InputError(f"pass: {self.pass_!r} is unknown; use {', '.join(PASSES)}")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"dropout: {self.dropout} is outside [0, 1)")
        for name in ("num_splits", "page_size", "kv_capacity"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}: {value} is not a positive whole number")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K and V."""
        return DTYPE_BYTES[self.dtype]

    def unmasked_pairs_per_head(self) -> int:
        """Number of (query, key) pairs of one head that the mask leaves, exactly."""
        sq, sk = self.seqlen_q, self.seqlen_k
        left, right = self.window if self.window is not None else (-1, -1)
        if self.causal:
            right = 0 if right < 0 else min(right, 0)
        if left < 0 and right < 0:
            return sq * sk
        total, shift = 0, sk - sq
        if left < 0 and right == 0:
            # rows see min(i + shift + 1, sk) keys: an arithmetic series without a loop over rows
            first = max(0, -shift)
            rows = sq - first
            return max(0, rows * (first + shift + 1) + rows * (rows - 1) // 2) if rows > 0 else 0
        for i in range(sq):
            lo = 0 if left < 0 else max(0, i + shift - left)
            hi = sk - 1 if right < 0 else min(sk - 1, i + shift + right)
            total += max(0, hi - lo + 1)
        return total

    def flops(self) -> int:
        """Nominal FLOPs: two GEMMs over the unmasked pairs; backward counts 2.5 times the forward pass."""
        forward = 2 * self.batch * self.heads * self.unmasked_pairs_per_head() * (self.head_dim + self.head_dim_v)
        return {"fwd": forward, "bwd": forward * 5 // 2, "fwd_bwd": forward * 7 // 2}[self.pass_]

    def with_(self, **changes) -> AttentionProblem:
        """A copy with some fields changed."""
        return replace(self, **changes)
