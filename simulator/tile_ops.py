"""The elementwise and row-wise operations of tile programs: what each computes and what it costs.

Numbers and work stand side by side so that neither can change without the other. ``work`` counts
lane-operations per element of the operation's ``rows x cols`` shape by execution unit:

``fma``      FP32 add, multiply, fused multiply-add
``alu``      minimum/maximum, compare, select, integer and logic
``exp``      special functions (``ex2``, reciprocal, logarithm)
``convert``  conversions to or from 16-bit types (a packed instruction converts two elements)
``issue``    instructions that need an issue slot and none of these units (control, addresses, memory)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

UNITS = ("fma", "alu", "exp", "convert", "issue")


@dataclass(frozen=True)
class TileOp:
    """``compute(args, params) -> array`` and the lane-operations per element and per row that it issues."""

    compute: Callable[[tuple[np.ndarray, ...], Mapping[str, Any]], np.ndarray]
    work: Mapping[str, float] = field(default_factory=dict)
    work_per_row: Mapping[str, float] = field(default_factory=dict)


def _mask(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    s = args[0].copy()
    group = p.get("group", 1)
    rows = (p["row"] + np.arange(s.shape[0])) // group
    cols = p["col"] + np.arange(s.shape[1])
    visible = np.broadcast_to(cols[None, :] < p["seqlen_k"], s.shape).copy()
    diagonal = rows[:, None] + p["shift"]
    if p["right"] >= 0:
        visible &= cols[None, :] <= diagonal + p["right"]
    if p["left"] >= 0:
        visible &= cols[None, :] >= diagonal - p["left"]
    s[~visible] = -np.inf
    return s


def _transposed_mask(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    return _mask((args[0].T,), p).T


def _finite(m: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(m), np.float32(0), m)


def _rescale_factor(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    old, new = args
    scale = np.float32(p.get("scale", 1.0))
    return np.where(np.isneginf(old), np.float32(0), np.exp(scale * (_finite(old) - _finite(new)))).astype(np.float32)


def _normalise(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    o, total = args
    quotient: np.ndarray = np.divide(o, total, out=np.zeros_like(o), where=total > 0)
    return quotient


def _lse(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    m, total = args
    with np.errstate(divide="ignore"):
        lse = np.float32(p.get("scale", 1.0)) * _finite(m) + np.log(total)
    return np.where(total > 0, lse, np.float32(-np.inf)).astype(np.float32)


def _exp(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    s, m = args
    scale = np.float32(p.get("scale", 1.0))
    return np.exp(scale * s - scale * _finite(m)).astype(np.float32)


def _exp2_lse(s: np.ndarray, lse_log2: np.ndarray, p: Mapping[str, Any]) -> np.ndarray:
    weights: np.ndarray = np.exp2(np.float32(p["scale_log2"]) * s - _finite(lse_log2)).astype(np.float32)
    return weights


def dropout_keep(head: int, rows: np.ndarray, cols: np.ndarray, dropout: float) -> np.ndarray:
    """Which (row, col) of ``head`` survive a dropout probability ``dropout``: 8 bits of a counter-based hash against
    ``floor((1 - dropout) * 255)``. Stands in for Philox: the same draw for every tile shape, forward and backward."""
    with np.errstate(over="ignore"):
        x = rows.astype(np.uint32)[:, None] * np.uint32(0x9E3779B1)
        x = x ^ (cols.astype(np.uint32)[None, :] * np.uint32(0x85EBCA77) + np.uint32(head) * np.uint32(0xC2B2AE3D))
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return (x >> np.uint32(24)) <= int((1.0 - dropout) * 255)


def _kept(s: np.ndarray, p: Mapping[str, Any]) -> np.ndarray:
    return dropout_keep(p["head"], p["row"] + np.arange(s.shape[0]), p["col"] + np.arange(s.shape[1]), p["dropout"])


def _row_sum(args: Sequence[np.ndarray], p: Mapping[str, Any]) -> np.ndarray:
    total: np.ndarray = args[0].sum(axis=1, keepdims=True, dtype=np.float32)
    return total


TILE_OPS: dict[str, TileOp] = {
    # S with the entries that the mask hides set to -inf; two compares and a select per element at the edge
    "mask": TileOp(_mask, {"alu": 2.0}),
    # the same with a bound on either side: FA2 compares twice, FA3 a third time for its sink tokens
    "mask_window": TileOp(_mask, {"alu": 3.0}),
    "mask_window_sink": TileOp(_mask, {"alu": 4.0}),
    # m = max(m_old, rowmax(S))
    "row_max": TileOp(lambda a, p: np.maximum(a[0].max(axis=1, keepdims=True), a[1]), {"alu": 1.0}, {"alu": 4.0}),
    # P = exp(scale * S - scale * m): the subtraction is one FMA, the exponential one ex2
    "exp": TileOp(_exp, {"fma": 1.0, "exp": 1.0}),
    # alpha = exp(scale * (m_old - m)), one per row
    "rescale_factor": TileOp(_rescale_factor, {}, {"fma": 1.0, "exp": 1.0, "alu": 1.0}),
    # l = alpha * l + rowsum(P)
    "accumulate_sum": TileOp(lambda a, p: a[0] * a[1] + _row_sum((a[2],), p), {"fma": 1.0}, {"fma": 1.0}),
    # O = alpha * O
    "rescale": TileOp(lambda a, p: a[0] * a[1], {"fma": 1.0}),
    # rounding to the output's type
    "convert": TileOp(lambda a, p: a[0], {"convert": 0.5}),
    "normalise": TileOp(_normalise, {"fma": 1.0}, {"exp": 1.0}),
    "lse": TileOp(_lse, {}, {"exp": 1.0, "fma": 1.0}),
    "row_sum": TileOp(_row_sum, {"fma": 1.0}, {"fma": 2.0}),
    "add": TileOp(lambda a, p: a[0] + a[1], {"fma": 1.0}),
    "subtract": TileOp(lambda a, p: a[0] - a[1], {"fma": 1.0}),
    "multiply": TileOp(lambda a, p: a[0] * a[1], {"fma": 1.0}),
    "maximum": TileOp(lambda a, p: np.maximum(a[0], a[1]), {"alu": 1.0}),
    "scale": TileOp(lambda a, p: a[0] * np.float32(p["factor"]), {"fma": 1.0}),
    # soft cap of scores: a multiplication and tanh.approx, which is one special function
    "softcap": TileOp(lambda a, p: np.tanh(a[0] * np.float32(p["factor"])), {"fma": 1.0, "exp": 1.0}),
    # its derivative, 1 - tanh^2
    "softcap_slope": TileOp(lambda a, p: 1 - a[0] * a[0], {"fma": 1.0}),
    "copy": TileOp(lambda a, p: a[0], {"alu": 0.0}),
    "fill": TileOp(lambda a, p: np.full((1, 1), p["value"], np.float32), {"alu": 0.0}),
    "transpose": TileOp(lambda a, p: a[0].T, {"alu": 1.0}),
    # backward: P = exp(scale * S - LSE); dS = P * (dP - D)
    "exp_lse": TileOp(
        lambda a, p: np.exp(np.float32(p["scale"]) * a[0] - _finite(a[1])).astype(np.float32),
        {"fma": 1.0, "exp": 1.0},
    ),
    "softmax_grad": TileOp(lambda a, p: a[0] * (a[1] - a[2]), {"fma": 2.0}),
    # Philox of 7 rounds for 16 elements (2 wide multiplications at half rate and 2 logic operations a round: 2.6 an
    # element), then forward unpack, compare and AND of two 16-bit values, or backward compare and select of each
    "dropout": TileOp(lambda a, p: np.where(_kept(a[0], p), a[0], np.float32(0)), {"alu": 4.1}),
    "dropout_sign": TileOp(lambda a, p: np.where(_kept(a[0], p), a[0], -a[0]), {"alu": 5.1}),
    "convert_positive": TileOp(lambda a, p: np.maximum(a[0], np.float32(0)), {"convert": 0.5}),
    # dS of a P whose sign says that it was dropped: its dP is zero
    "softmax_grad_dropout": TileOp(
        lambda a, p: a[0] * np.where(a[0] >= 0, a[1] - a[2], a[2]), {"fma": 2.0, "alu": 2.0}
    ),
    # the same with log2(e) folded into LSE beforehand, and on tiles that are held transposed (keys x queries)
    "exp2_lse": TileOp(lambda a, p: _exp2_lse(a[0], a[1], p), {"fma": 1.0, "exp": 1.0}),
    "exp2_lse_transposed": TileOp(lambda a, p: _exp2_lse(a[0], a[1].T, p), {"fma": 1.0, "exp": 1.0}),
    "softmax_grad_transposed": TileOp(lambda a, p: a[0] * (a[1] - a[2].T), {"fma": 2.0}),
    "mask_transposed": TileOp(_transposed_mask, {"alu": 2.0}),
    "mask_window_transposed": TileOp(_transposed_mask, {"alu": 3.0}),
    # only the end of the keys: one comparison a key, one select an element
    "mask_end": TileOp(_mask, {"alu": 1.0}),
    "mask_end_transposed": TileOp(_transposed_mask, {"alu": 1.0}),
    # limits turned into predicate bits (R2P sets seven predicates at once), one select an element
    "mask_bits": TileOp(_mask, {"alu": 1.15}),
    # a per-row value handed from the lane that holds it to those that need it: one warp shuffle for two elements, at
    # half the rate of the ALU
    "shuffle_statistic": TileOp(lambda a, p: a[0], {"alu": 1.0}),
    # a change of index order only: the layout in memory is that of the registers
    "relabel_transposed": TileOp(lambda a, p: a[0].T, {"alu": 0.0}),
    "row_dot": TileOp(lambda a, p: (a[0] * a[1]).sum(axis=1, keepdims=True), {"fma": 1.0}, {"alu": 4.0}),
}


def work_of(fn: str, rows: int, cols: int) -> dict[str, float]:
    """Lane-operations by unit of ``fn`` on a ``rows x cols`` tile."""
    op = TILE_OPS[fn]
    total = {unit: amount * rows * cols for unit, amount in op.work.items()}
    for unit, amount in op.work_per_row.items():
        total[unit] = total.get(unit, 0.0) + amount * rows
    return total


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """``values`` (float32) rounded to nearest even in ``dtype`` and returned as float32."""
    values = np.asarray(values, dtype=np.float32)
    if dtype in ("fp32", "int32"):
        return values
    if dtype == "bool":
        return np.asarray(values != 0, np.float32)
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = values.view(np.uint32) if values.flags.c_contiguous else np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return np.where(np.isfinite(values), rounded, values)
    if dtype == "fp8":
        return _round_e4m3(values)
    raise ValueError(f"no rounding rule for {dtype}")


def _round_e4m3(values: np.ndarray) -> np.ndarray:
    """Round to float8 e4m3 (largest finite 448, smallest subnormal 2**-9), saturating."""
    magnitude = np.abs(values)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.where(magnitude > 0, magnitude, 1)))
    step = np.exp2(np.maximum(exponent, -6) - 3)
    rounded = np.round(magnitude / step) * step
    return np.asarray(np.sign(values) * np.minimum(rounded, 448.0), np.float32)
