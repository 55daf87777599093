"""Shape families of the dense forward kernels: each varies one thing; and the shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from simulator.measure.cases import Case

IMPLEMENTATION = {"standard": "torch_eager", "fa1": "flash_attn_1_paper", "fa2": "torch_flash", "fa3": "flash_attn_3"}
FORWARD = ("fa2", "fa3")


def case_name(case: Case) -> str:
    """A readable id that holds every input that differs from its default."""
    parts = [case.family, f"b{case.batch}", f"h{case.heads}"]
    if case.kv_heads != case.heads:
        parts.append(f"kv{case.kv_heads}")
    parts.append(f"q{case.seqlen_q}" if case.seqlen_q == case.seqlen_k else f"q{case.seqlen_q}k{case.seqlen_k}")
    parts.append(f"d{case.head_dim}")
    if case.dtype != "bf16":
        parts.append(case.dtype)
    if case.causal:
        parts.append("causal")
    if case.window:
        parts.append("w" + "_".join(str(side).replace("-1", "inf") for side in case.window))
    for key, value in (("s", case.num_splits), ("page", case.page_size), ("cap", case.kv_capacity)):
        if value is not None:
            parts.append(f"{key}{value}")
    for flag, text in (
        (case.deterministic, "det"),
        (case.l2_state == "warm", "warm"),
        (case.timing == "eager", "eager"),
    ):
        if flag:
            parts.append(text)
    return "-".join(parts)


def make_case(family: str, algorithm: str, batch: int, heads: int, seqlen_q: int, head_dim: int, **more: Any) -> Case:
    more.setdefault("kv_heads", heads)
    more.setdefault("seqlen_k", seqlen_q)
    more.setdefault("implementation", IMPLEMENTATION.get(algorithm, ""))
    case = Case("", family, algorithm, batch=batch, heads=heads, seqlen_q=seqlen_q, head_dim=head_dim, **more)
    return replace(case, case_id=case_name(case))


def launch_series() -> Iterator[Case]:
    """One CTA, part of a wave, exactly one wave, one CTA more: per-iteration, per-CTA and per-wave costs."""
    for head_dim in (64, 96, 128, 256):
        for seqlen_k in (128, 1024, 8192, 32768):
            yield make_case(
                "fa2_cta",
                "fa2",
                1,
                1,
                64,
                head_dim,
                seqlen_k=seqlen_k,
                num_splits=1,
                mix=seqlen_k == 8192,
                counters=seqlen_k in (1024, 32768),
            )
            if head_dim != 96:
                yield make_case(
                    "fa3_cta",
                    "fa3",
                    1,
                    1,
                    128,
                    head_dim,
                    seqlen_k=seqlen_k,
                    mix=seqlen_k == 8192,
                    counters=seqlen_k in (1024, 32768),
                )
    for head_dim in (64, 128, 256):
        for heads in (16, 66, 128, 132, 133, 264, 265, 528):
            long = heads in (66, 132, 133, 264)
            for seqlen_k in (1024, 8192) if long else (8192,):
                yield make_case(
                    "fa3_wave",
                    "fa3",
                    1,
                    heads,
                    128,
                    head_dim,
                    seqlen_k=seqlen_k,
                    mix=heads == 132 and seqlen_k == 8192,
                    counters=heads in (16, 132, 264),
                )
                yield make_case(
                    "fa2_wave",
                    "fa2",
                    1,
                    heads,
                    64,
                    head_dim,
                    seqlen_k=seqlen_k,
                    num_splits=1,
                    mix=heads == 132 and seqlen_k == 8192,
                    counters=heads in (16, 132, 264),
                )
    for seqlen_q in (64, 128, 192, 256, 320, 384):  # query rows of a tile: where does a second CTA start
        for head_dim in (64, 128):
            yield make_case("fa3_rows", "fa3", 1, 132, seqlen_q, head_dim, seqlen_k=4096)
            yield make_case("fa2_rows", "fa2", 1, 132, seqlen_q, head_dim, seqlen_k=4096, num_splits=1)


def length_sweeps() -> Iterator[Case]:
    """16k tokens of a 2048-wide model, length swept, causal and not, by head dim."""
    for head_dim, lengths in ((128, None), (64, None), (96, (512, 2048, 8192)), (256, (512, 2048, 8192, 16384))):
        for seqlen in lengths or (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                for algorithm in FORWARD:
                    if head_dim == 96 and algorithm == "fa3":
                        continue
                    yield make_case(
                        f"{algorithm}_length_d{head_dim}",
                        algorithm,
                        16384 // seqlen,
                        2048 // head_dim,
                        seqlen,
                        head_dim,
                        causal=causal,
                        counters=seqlen in (512, 2048, 8192, 16384),
                        mix=seqlen == 4096,
                    )
    for seqlen in (512, 2048, 8192):
        for algorithm in FORWARD:
            yield make_case(f"{algorithm}_fp16", algorithm, 16384 // seqlen, 16, seqlen, 128, dtype="fp16")
    for head_dim in (64, 128, 256):
        for seqlen in (512, 2048, 8192):
            for causal in (False, True):
                yield make_case(
                    "fa3_fp8",
                    "fa3",
                    16384 // seqlen,
                    2048 // head_dim,
                    seqlen,
                    head_dim,
                    dtype="fp8",
                    causal=causal,
                    counters=seqlen != 512,
                )
    for seqlen in (1024, 4096):
        yield make_case("fa3_fp8_judge", "fa3", 4, 32, seqlen, 128, kv_heads=8, dtype="fp8", causal=True, counters=True)
        yield make_case("fa3_fp8_judge", "fa3", 2, 24, seqlen, 64, dtype="fp8", counters=True)


def long_rows() -> Iterator[Case]:
    """One sequence of 32k to 128k tokens: L2 capacity and the power cap."""
    for algorithm in FORWARD:
        yield make_case(f"{algorithm}_long", algorithm, 1, 16, 32768, 128, counters=True)
        yield make_case(f"{algorithm}_long", algorithm, 1, 16, 65536, 128, causal=True, counters=True)
        yield make_case(f"{algorithm}_long", algorithm, 1, 8, 65536, 64, causal=True, counters=True)
        yield make_case(f"{algorithm}_long_gqa", algorithm, 1, 32, 32768, 128, kv_heads=8, causal=True, counters=True)
        yield make_case(f"{algorithm}_long_gqa", algorithm, 1, 32, 65536, 128, kv_heads=8, causal=True, counters=True)
        yield make_case(f"{algorithm}_long_gqa", algorithm, 1, 32, 131072, 128, kv_heads=8, causal=True, counters=True)
        yield make_case(f"{algorithm}_long_gqa", algorithm, 1, 4, 131072, 128, kv_heads=1, counters=True)


def shape_sweeps() -> Iterator[Case]:
    """Batch × heads, GQA, odd lengths, windows, unequal lengths: one at a time."""
    for algorithm in FORWARD:
        for batch, heads in ((1, 1), (1, 4), (1, 8), (1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (64, 16), (128, 16)):
            for causal in (False, True):
                yield make_case(
                    f"{algorithm}_heads",
                    algorithm,
                    batch,
                    heads,
                    1024,
                    128,
                    causal=causal,
                    counters=batch in (1, 8, 64) and heads == 16,
                )
        for kv_heads in (32, 16, 8, 4, 2):
            for causal in (False, True):
                yield make_case(
                    f"{algorithm}_gqa",
                    algorithm,
                    2,
                    32,
                    4096,
                    128,
                    kv_heads=kv_heads,
                    causal=causal,
                    counters=kv_heads in (32, 8, 2),
                )
        for index, seqlen in enumerate((77, 197, 333, 577, 1000, 1500, 2049, 3000, 4097, 10007)):
            for head_dim in (64, 128):
                yield make_case(
                    f"{algorithm}_odd",
                    algorithm,
                    max(1, 16384 // seqlen),
                    2048 // head_dim,
                    seqlen,
                    head_dim,
                    causal=bool((index + head_dim // 64) % 2),
                    counters=seqlen in (1000, 4097),
                )
        for window in ((1024, 0), (4096, 0), (512, 512), (128, 0)):
            for seqlen in (4096, 16384):
                yield make_case(
                    f"{algorithm}_window",
                    algorithm,
                    16384 // seqlen,
                    16,
                    seqlen,
                    128,
                    window=window,
                    causal=window[1] == 0,
                    counters=seqlen == 16384,
                )
        for seqlen_q, seqlen_k, batch in ((512, 16384, 4), (4096, 77, 8), (16384, 256, 2), (300, 3000, 16)):
            yield make_case(
                f"{algorithm}_unequal", algorithm, batch, 16, seqlen_q, 128, seqlen_k=seqlen_k, counters=seqlen_q == 512
            )
        for seqlen_q, seqlen_k in ((512, 4096), (512, 16384), (2048, 32768)):
            yield make_case(
                f"{algorithm}_chunked",
                algorithm,
                2,
                32,
                seqlen_q,
                128,
                kv_heads=8,
                seqlen_k=seqlen_k,
                causal=True,
                counters=seqlen_k == 16384,
            )
        for seqlen in (512, 2048, 8192):
            yield make_case(f"{algorithm}_warm", algorithm, 1, 16, seqlen, 128, l2_state="warm")
        yield make_case(f"{algorithm}_eager", algorithm, 1, 16, 512, 128, timing="eager")
        yield make_case(f"{algorithm}_eager", algorithm, 4, 16, 2048, 128, timing="eager")


# (name, batch, heads, kv_heads, seqlen, head_dim, causal, dtype)
MODELS = (
    ("gpt2_medium", 64, 16, 16, 1024, 64, True, "fp16"),
    ("gpt2_medium_unmasked", 64, 16, 16, 1024, 64, False, "fp16"),
    ("gpt2_small", 16, 12, 12, 1024, 64, True, "bf16"),
    ("bert_large", 56, 16, 16, 512, 64, False, "fp16"),
    ("vit_large", 64, 16, 16, 197, 64, False, "bf16"),
    ("llama3_8b_8k", 1, 32, 8, 8192, 128, True, "bf16"),
    ("llama3_8b_2k", 4, 32, 8, 2048, 128, True, "bf16"),
    ("llama3_70b_4k", 1, 64, 8, 4096, 128, True, "bf16"),
    ("llama3_70b_tp8_8k", 2, 8, 1, 8192, 128, True, "bf16"),
    ("qwen25_7b_8k", 1, 28, 4, 8192, 128, True, "bf16"),
    ("qwen3_32b_4k", 1, 64, 8, 4096, 128, True, "bf16"),
    ("gemma2_9b_4k", 1, 16, 8, 4096, 256, True, "bf16"),
    ("phi3_mini_4k", 1, 32, 32, 4096, 96, True, "bf16"),
    ("gpt3_1b3_2k", 8, 16, 16, 2048, 128, True, "bf16"),
    ("whisper_large", 8, 20, 20, 1500, 64, False, "fp16"),
    ("check_4096", 4, 16, 16, 4096, 128, False, "bf16"),
)


def models() -> Iterator[Case]:
    """Shapes of real models, forward, on every kernel that takes them."""
    for name, batch, heads, kv_heads, seqlen, head_dim, causal, dtype in MODELS:
        for algorithm in ("standard", "fa2", "fa3"):
            if algorithm == "fa3" and head_dim == 96:
                continue
            case = make_case(
                f"{algorithm}_model",
                algorithm,
                batch,
                heads,
                seqlen,
                head_dim,
                kv_heads=kv_heads,
                causal=causal,
                dtype=dtype,
                counters=True,
            )
            yield replace(case, case_id=f"{algorithm}_model-{name}")
