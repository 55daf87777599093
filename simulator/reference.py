"""Attention in float64: what every tile program must equal."""

from __future__ import annotations

import numpy as np

from simulator.numbers import run_program
from simulator.problem import AttentionProblem
from simulator.program import Program, Tensor
from simulator.tile_ops import dropout_keep, round_to


def visible(problem: AttentionProblem) -> np.ndarray:
    """Boolean ``[batch*heads or 1, seqlen_q, seqlen_k]``: which keys each query sees (bottom-right causal, window, and
    each sequence's own lengths)."""
    rows, cols = np.arange(problem.seqlen_q)[:, None], np.arange(problem.seqlen_k)[None, :]
    left, right = problem.sides

    def one(queries: int, keys: int) -> np.ndarray:
        diagonal = rows + keys - queries
        seen = np.broadcast_to((rows < queries) & (cols < keys), (problem.seqlen_q, problem.seqlen_k)).copy()
        if right >= 0:
            seen &= cols <= diagonal + right
        if left >= 0:
            seen &= cols >= diagonal - left
        return seen

    if problem.seqlens_q is None and problem.seqlens_k is None:
        return one(problem.seqlen_q, problem.seqlen_k)[None]
    return np.repeat(np.stack([one(*lengths) for lengths in problem.sequences()]), problem.heads, axis=0)


def attention(
    problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """O ``[batch*heads, seqlen_q, head_dim_v]`` and LSE ``[batch*heads, seqlen_q]`` in float64.

    Inputs are ``[batch*heads or batch*kv_heads, seqlen, head_dim]``. A row that sees no key gives O = 0, LSE = -inf.
    Dropout drops weights of O by :func:`simulator.tile_ops.dropout_keep` and scales the others up. ``mask`` is that of
    :func:`random_mask`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, problem.group, axis=0) for x in (k, v))
    s = np.einsum("hid,hjd->hij", q, k) * problem.head_dim**-0.5
    s = np.where(visible(problem), masked_scores(problem, s, mask), -np.inf)
    m = s.max(axis=2, keepdims=True)
    m = np.where(np.isneginf(m), 0.0, m)
    p = np.exp(s - m)
    total = p.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        o = np.where(total > 0, np.einsum("hij,hjd->hid", p * dropout_weights(problem), v) / total, 0.0)
        lse = np.where(total > 0, m + np.log(total), -np.inf)
    return {"O": o, "LSE": lse[..., 0]}


def masked_scores(problem: AttentionProblem, s: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Scores ``[batch*heads, ...]`` capped, and with the mask (``[1 or batch, 1 or seqlen_q, seqlen_k]``) applied."""
    if problem.softcap:
        s = problem.softcap * np.tanh(s / problem.softcap)
    if mask is None:
        return s
    mask = np.asarray(mask, np.float64)
    mask = np.repeat(mask, problem.heads, axis=0) if mask.shape[0] == problem.batch else mask
    return np.where(mask != 0, s, -np.inf) if problem.mask == "bool" else s + mask


def random_mask(problem: AttentionProblem, seed: int = 0) -> np.ndarray:
    """A mask of the problem's kind: normal numbers (``additive``), zeros and ones of which ones are kept (``bool``), or
    0 and -inf behind the end of each sequence (``padding``; without ``seqlens_k`` the ends are drawn)."""
    rng = np.random.default_rng(seed + 2)
    p = problem
    if p.mask != "padding":
        values = rng.standard_normal((1, p.seqlen_q, p.seqlen_k))
        return round_to((values > -0.5) if p.mask == "bool" else values, "fp32" if p.mask == "bool" else p.dtype)
    ends = np.array(p.seqlens_k if p.seqlens_k else rng.integers(max(1, p.seqlen_k - 20), p.seqlen_k + 1, p.batch))
    return np.where(np.arange(p.seqlen_k)[None, None] < ends[:, None, None], 0.0, -np.inf).astype(np.float32)


def dropout_weights(problem: AttentionProblem) -> np.ndarray:
    """What dropout multiplies P by, ``[batch*heads, seqlen_q, seqlen_k]``: 0 or 1 / (1 - dropout)."""
    heads, rows, cols = problem.batch * problem.heads, np.arange(problem.seqlen_q), np.arange(problem.seqlen_k)
    if not problem.dropout:
        return np.ones((1, 1, 1))
    keep = np.stack([dropout_keep(head, rows, cols, problem.dropout) for head in range(heads)])
    return keep / (1.0 - problem.dropout)


def attention_gradients(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    mask: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """dQ, dK and dV in float64 for the output gradient ``do`` (layout of :func:`attention`'s O).

    With P = softmax(scale * Q K^T + mask), without dropout: dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)),
    dQ = scale * dS K and dK = scale * dS^T Q; dK and dV are summed over the query heads of a KV head. A soft cap
    multiplies dS by its slope.
    """
    forward = attention(problem, q, k, v, mask)
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    k, v = (np.repeat(x, problem.group, axis=0) for x in (k, v))
    scale = problem.head_dim**-0.5
    lse = forward["LSE"][..., None]
    raw = np.einsum("hid,hjd->hij", q, k) * scale
    s = np.where(visible(problem), masked_scores(problem, raw, mask), -np.inf)
    p = np.exp(s - np.where(np.isneginf(lse), 0.0, lse))
    weights = dropout_weights(problem)
    dp = np.einsum("hid,hjd->hij", do, v) * weights
    ds = p * (dp - (do * forward["O"]).sum(axis=2, keepdims=True))
    if problem.softcap:
        ds *= 1.0 - np.tanh(raw / problem.softcap) ** 2

    def over_group(x: np.ndarray) -> np.ndarray:
        total: np.ndarray = x.reshape(-1, problem.group, *x.shape[1:]).sum(axis=1)
        return total

    return {
        "dQ": scale * np.einsum("hij,hjd->hid", ds, k),
        "dK": over_group(scale * np.einsum("hij,hid->hjd", ds, q)),
        "dV": over_group(np.einsum("hij,hid->hjd", p * weights, do)),
    }


def backward_inputs(problem: AttentionProblem, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """:func:`random_inputs` with a normal dO, and O (rounded to its dtype) and LSE ``[heads, rows, 1]`` of them."""
    inputs = random_inputs(problem, seed, scale)
    forward = attention(problem, inputs["Q"], inputs["K"], inputs["V"])
    rng = np.random.default_rng(seed + 1)
    return inputs | {
        "O": round_to(forward["O"], problem.dtype),
        "LSE": forward["LSE"][..., None].astype(np.float32),
        "dO": round_to(rng.standard_normal(forward["O"].shape).astype(np.float32), problem.dtype),
    }


def random_inputs(problem: AttentionProblem, seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Normal Q, K, V (``scale`` on Q and K), rounded to the problem's dtype."""
    rng = np.random.default_rng(seed)
    p = problem
    shapes = {
        "Q": (p.batch * p.heads, p.seqlen_q, p.head_dim, scale),
        "K": (p.batch * p.kv_heads, p.seqlen_k, p.head_dim, scale),
        "V": (p.batch * p.kv_heads, p.seqlen_k, p.head_dim_v, 1.0),
    }
    return {
        name: round_to((rng.standard_normal(s[:3]) * s[3]).astype(np.float32), p.dtype) for name, s in shapes.items()
    }


def _pack(x: np.ndarray, group: int) -> np.ndarray:
    """``[heads, rows, cols]`` to ``[heads/group, rows*group, cols]`` with row = query * group + head."""
    if group == 1:
        return x
    heads, rows, cols = x.shape
    return x.reshape(heads // group, group, rows, cols).transpose(0, 2, 1, 3).reshape(heads // group, -1, cols)


def _unpack(x: np.ndarray, group: int) -> np.ndarray:
    if group == 1:
        return x
    heads, rows, cols = x.shape
    return x.reshape(heads, rows // group, group, cols).transpose(0, 2, 1, 3).reshape(heads * group, -1, cols)


def _to_end(x: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Rows of each sequence moved from the beginning to the end of its matrices; what is not a row becomes NaN."""
    if not lengths:
        return x
    out, each = np.full_like(x, np.nan), len(x) // len(lengths)
    for b, n in enumerate(lengths):
        out[b * each : (b + 1) * each, x.shape[1] - n :] = x[b * each : (b + 1) * each, :n]
    return out


def _to_beginning(x: np.ndarray, lengths: tuple[int, ...], filling: float) -> np.ndarray:
    if not lengths:
        return x
    out, each = np.full_like(x, filling), len(x) // len(lengths)
    for b, n in enumerate(lengths):
        out[b * each : (b + 1) * each, :n] = x[b * each : (b + 1) * each, x.shape[1] - n :]
    return out


#: What stands in the rows of a cache behind its sequences: no kernel may let it into a result.
CACHE_GARBAGE = 300.0


def _to_capacity(x: np.ndarray, tensor: Tensor) -> np.ndarray:
    """K or V with rows of garbage up to the cache's last row."""
    more = max(0, tensor.rows - x.shape[1]) if tensor.name in ("K", "V") else 0
    return np.pad(x, ((0, 0), (0, more), (0, 0)), constant_values=CACHE_GARBAGE) if more else x


def run_attention(program: Program, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers reading of ``program`` on inputs in :func:`attention`'s layout; outputs likewise."""

    def group(tensor: Tensor) -> int:
        return tensor.packed_group

    packed = {
        name: _to_end(_to_capacity(_pack(inputs[name], group(tensor)), tensor), tensor.lengths)
        for name, tensor in program.inputs.items()
    }
    outputs = run_program(program, packed)
    result = {}
    for name, values in outputs.items():
        tensor = program.outputs[name]
        values = _to_beginning(values, tensor.lengths, -np.inf if name == "LSE" else 0.0)
        result[name] = _unpack(values, group(tensor))
    if "LSE" in result:
        result["LSE"] = result["LSE"][..., 0]
    return result
