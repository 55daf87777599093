"""Random shapes: what no family varies on purpose, for judging only.

Shape families change one thing at a time, and a model may fit their grid. These cases draw everything at once, from
any length, with a seed; no fit may read them.
"""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import Any

from simulator.measure.case_families import make_case
from simulator.measure.cases import Case

#: Kernels drawn, as (family, algorithm, implementation, pass), and their shares of the cases.
KINDS: tuple[tuple[tuple[str, str, str, str], int], ...] = (
    (("random_fa2", "fa2", "torch_flash", "fwd"), 8),
    (("random_fa3", "fa3", "flash_attn_3", "fwd"), 9),
    (("random_standard", "standard", "torch_eager", "fwd"), 5),
    (("random_fa1", "fa1", "flash_attn_1_paper", "fwd"), 2),
    (("random_decode_fa2", "flash_decoding", "torch_flash_splitkv", "fwd"), 4),
    (("random_decode_fa3", "flash_decoding", "flash_attn_3_kvcache", "fwd"), 5),
    (("random_bwd_fa2", "fa2", "torch_flash", "bwd"), 4),
    (("random_bwd_standard", "standard", "torch_eager", "bwd"), 1),
)
#: Bounds of a case: unpadded work, and the memory that it allocates.
LEAST_FLOPS, MOST_FLOPS, MOST_BYTES = 1e8, 1.5e13, 24e9
DECODE_LEAST_FLOPS = 1e6


def random_cases(count: int, seed: int) -> list[Case]:
    """``count`` different cases, the same ones for the same ``seed``."""
    draw = Random(seed)
    cases: dict[str, Case] = {}
    kinds = [kind for kind, _ in KINDS]
    while len(cases) < count:
        case = _random_case(draw, *draw.choices(kinds, [share for _, share in KINDS])[0])
        least = DECODE_LEAST_FLOPS if case.algorithm == "flash_decoding" else LEAST_FLOPS
        if least <= case.flops() <= MOST_FLOPS and case.resident_bytes() <= MOST_BYTES:
            cases.setdefault(case.case_id, case)
    return list(cases.values())


def _length(draw: Random, low: int, high: int) -> int:
    """Log-uniform; every other one a multiple of 64, as models have them."""
    value = round(exp(draw.uniform(log(low), log(high))))
    return max(64, value // 64 * 64) if draw.random() < 0.5 else value


def _random_case(draw: Random, family: str, algorithm: str, implementation: str, pass_: str) -> Case:
    batch = draw.choice((1, 1, 2, 3, 4, 7, 8, 16, 32))
    kv_heads = draw.choice((1, 2, 3, 4, 6, 8, 12, 16, 25, 32))
    own_kv = algorithm == "fa1" or (algorithm == "standard" and pass_ == "bwd")
    group = 1 if own_kv else draw.choice((1, 1, 2, 4, 5, 8))
    more: dict[str, Any] = {"implementation": implementation, "pass_": pass_, "counters": True}
    more["dtype"] = draw.choice(("bf16", "bf16", "fp16"))
    head_dim = draw.choice(
        (64, 128, 128) if algorithm in ("standard", "fa1", "flash_decoding") else (64, 128, 128, 256)
    )
    if algorithm == "flash_decoding":
        keys = _length(draw, 256, 131072)
        return make_case(
            family, algorithm, batch, kv_heads * group, 1, head_dim, kv_heads=kv_heads, seqlen_k=keys, **more
        )
    queries = _length(draw, 64, 16384)
    keys = queries
    if draw.random() < 0.25 and not own_kv:
        keys = max(queries, _length(draw, 64, 16384))
    more["causal"] = draw.random() < 0.5
    if algorithm == "fa3" and draw.random() < 0.15:
        more["dtype"] = "fp8"
    if algorithm in ("fa2", "fa3") and pass_ == "fwd" and draw.random() < 0.12:
        more["window"] = (_length(draw, 64, 4096), 0 if more["causal"] else _length(draw, 64, 4096))
    return make_case(
        family, algorithm, batch, kv_heads * group, queries, head_dim, kv_heads=kv_heads, seqlen_k=keys, **more
    )
