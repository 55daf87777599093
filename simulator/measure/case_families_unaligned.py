"""Unfused attention whose rows are no multiple of 16 bytes, and FA2's backward of few tiles.

cuBLAS and PyTorch take other kernels for such rows, small products split their inner dimension, and a random draw
showed that few of them had been measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator.measure.case_families import make_case
from simulator.measure.cases import Case

#: Score elements of a launch whose softmax is bound by more than its launch.
_ELEMENTS = 60_000_000


def unaligned() -> Iterator[Case]:
    """Long unaligned rows backward, small unaligned products, wide ones, and FA2's backward of short sequences."""
    marks: dict[str, Any] = {"counters": True, "mix": True}
    for seqlen in (1029, 1111, 1540, 2050, 2079, 2559, 3281, 4098, 5939):
        for dtype in ("bf16", "fp16") if seqlen == 2079 else ("bf16",):
            heads = max(1, _ELEMENTS // seqlen**2)
            yield make_case("unaligned_long", "standard", 1, heads, seqlen, 128, pass_="bwd", dtype=dtype, **marks)
    for heads in (1, 4, 16):
        for seqlen in (257, 509, 895, 1026, 2047):
            for head_dim in (64, 128):
                for pass_ in ("fwd", "bwd"):
                    family = f"unaligned_small_{pass_}"
                    yield make_case(family, "standard", 1, heads, seqlen, head_dim, pass_=pass_, **marks)
    for heads in (1, 8):
        for seqlen in (64, 139, 500):
            for keys in (5001, 14434):
                for head_dim in (64, 128):
                    more = marks | {"seqlen_k": keys}
                    yield make_case("unaligned_wide", "standard", 1, heads, seqlen, head_dim, **more)
    for batch, heads, seqlen, head_dim in (
        (32, 32, 94, 128),
        (3, 24, 320, 64),
        (8, 16, 128, 128),
        (8, 16, 256, 64),
        (2, 16, 512, 128),
        (1, 8, 1000, 64),
    ):
        for causal in (False, True):
            yield make_case("short_bwd_fa2", "fa2", batch, heads, seqlen, head_dim, pass_="bwd", causal=causal, **marks)
