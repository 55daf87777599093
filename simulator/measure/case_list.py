"""The case list of the H200 campaign: shape families, each varying one thing, and the shapes of real models.

Families are the unit of the calibrate/judge split. ``python -m simulator.measure.case_list OUT.csv`` writes the list.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from simulator.measure.cases import Case, write_cases

IMPLEMENTATION = {"standard": "torch_eager", "fa1": "flash_attn_1_paper", "fa2": "torch_flash", "fa3": "flash_attn_3"}
FORWARD = ("fa2", "fa3")


def _name(case: Case) -> str:
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
    for flag, text in ((case.deterministic, "det"), (case.l2_state == "warm", "warm"), (case.timing == "eager", "eager")):
        if flag:
            parts.append(text)
    return "-".join(parts)


def _case(family: str, algorithm: str, batch: int, heads: int, seqlen_q: int, head_dim: int, **more) -> Case:
    more.setdefault("kv_heads", heads)
    more.setdefault("seqlen_k", seqlen_q)
    more.setdefault("implementation", IMPLEMENTATION.get(algorithm, ""))
    case = Case("", family, algorithm, batch=batch, heads=heads, seqlen_q=seqlen_q, head_dim=head_dim, **more)
    return replace(case, case_id=_name(case))


def launch_series() -> Iterator[Case]:
    """One CTA, part of a wave, exactly one wave, one CTA more: per-iteration, per-CTA and per-wave costs."""
    for head_dim in (64, 96, 128, 256):
        for seqlen_k in (128, 1024, 8192, 32768):
            yield _case("fa2_cta", "fa2", 1, 1, 64, head_dim, seqlen_k=seqlen_k, num_splits=1, mix=seqlen_k == 8192,
                        counters=seqlen_k in (1024, 32768))  # fmt: skip
            if head_dim != 96:
                yield _case("fa3_cta", "fa3", 1, 1, 128, head_dim, seqlen_k=seqlen_k, mix=seqlen_k == 8192,
                            counters=seqlen_k in (1024, 32768))  # fmt: skip
    for head_dim in (64, 128, 256):
        for heads in (16, 66, 128, 132, 133, 264, 265, 528):
            long = heads in (66, 132, 133, 264)
            for seqlen_k in (1024, 8192) if long else (8192,):
                yield _case("fa3_wave", "fa3", 1, heads, 128, head_dim, seqlen_k=seqlen_k,
                            mix=heads == 132 and seqlen_k == 8192, counters=heads in (16, 132, 264))  # fmt: skip
                yield _case("fa2_wave", "fa2", 1, heads, 64, head_dim, seqlen_k=seqlen_k, num_splits=1,
                            mix=heads == 132 and seqlen_k == 8192, counters=heads in (16, 132, 264))  # fmt: skip
    for seqlen_q in (64, 128, 192, 256, 320, 384):  # query rows of a tile: where does a second CTA start
        for head_dim in (64, 128):
            yield _case("fa3_rows", "fa3", 1, 132, seqlen_q, head_dim, seqlen_k=4096)
            yield _case("fa2_rows", "fa2", 1, 132, seqlen_q, head_dim, seqlen_k=4096, num_splits=1)


def length_sweeps() -> Iterator[Case]:
    """16k tokens of a 2048-wide model, length swept, causal and not, by head dim."""
    for head_dim, lengths in ((128, None), (64, None), (96, (512, 2048, 8192)), (256, (512, 2048, 8192, 16384))):
        for seqlen in lengths or (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                for algorithm in FORWARD:
                    if head_dim == 96 and algorithm == "fa3":
                        continue
                    yield _case(f"{algorithm}_length_d{head_dim}", algorithm, 16384 // seqlen, 2048 // head_dim, seqlen,
                                head_dim, causal=causal, counters=seqlen in (512, 2048, 8192, 16384),
                                mix=seqlen == 4096)  # fmt: skip
    for seqlen in (512, 2048, 8192):
        for algorithm in FORWARD:
            yield _case(f"{algorithm}_fp16", algorithm, 16384 // seqlen, 16, seqlen, 128, dtype="fp16")
    for head_dim in (64, 128, 256):
        for seqlen in (512, 2048, 8192):
            for causal in (False, True):
                yield _case("fa3_fp8", "fa3", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim, dtype="fp8",
                            causal=causal, counters=seqlen != 512)  # fmt: skip
    for seqlen in (1024, 4096):
        yield _case("fa3_fp8_judge", "fa3", 4, 32, seqlen, 128, kv_heads=8, dtype="fp8", causal=True, counters=True)
        yield _case("fa3_fp8_judge", "fa3", 2, 24, seqlen, 64, dtype="fp8", counters=True)


def long_rows() -> Iterator[Case]:
    """One sequence of 32k to 128k tokens: L2 capacity and the power cap."""
    for algorithm in FORWARD:
        yield _case(f"{algorithm}_long", algorithm, 1, 16, 32768, 128, counters=True)
        yield _case(f"{algorithm}_long", algorithm, 1, 16, 65536, 128, causal=True, counters=True)
        yield _case(f"{algorithm}_long", algorithm, 1, 8, 65536, 64, causal=True, counters=True)
        yield _case(f"{algorithm}_long_gqa", algorithm, 1, 32, 32768, 128, kv_heads=8, causal=True, counters=True)
        yield _case(f"{algorithm}_long_gqa", algorithm, 1, 32, 65536, 128, kv_heads=8, causal=True, counters=True)
        yield _case(f"{algorithm}_long_gqa", algorithm, 1, 32, 131072, 128, kv_heads=8, causal=True, counters=True)
        yield _case(f"{algorithm}_long_gqa", algorithm, 1, 4, 131072, 128, kv_heads=1, counters=True)


def shape_sweeps() -> Iterator[Case]:
    """Batch × heads, GQA, odd lengths, windows, unequal lengths: one at a time."""
    for algorithm in FORWARD:
        for batch, heads in ((1, 1), (1, 4), (1, 8), (1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (64, 16), (128, 16)):
            for causal in (False, True):
                yield _case(f"{algorithm}_heads", algorithm, batch, heads, 1024, 128, causal=causal,
                            counters=batch in (1, 8, 64) and heads == 16)  # fmt: skip
        for kv_heads in (32, 16, 8, 4, 2):
            for causal in (False, True):
                yield _case(f"{algorithm}_gqa", algorithm, 2, 32, 4096, 128, kv_heads=kv_heads, causal=causal,
                            counters=kv_heads in (32, 8, 2))  # fmt: skip
        for index, seqlen in enumerate((77, 197, 333, 577, 1000, 1500, 2049, 3000, 4097, 10007)):
            for head_dim in (64, 128):
                yield _case(f"{algorithm}_odd", algorithm, max(1, 16384 // seqlen), 2048 // head_dim, seqlen, head_dim,
                            causal=bool((index + head_dim // 64) % 2), counters=seqlen in (1000, 4097))  # fmt: skip
        for window in ((1024, 0), (4096, 0), (512, 512), (128, 0)):
            for seqlen in (4096, 16384):
                yield _case(f"{algorithm}_window", algorithm, 16384 // seqlen, 16, seqlen, 128, window=window,
                            causal=window[1] == 0, counters=seqlen == 16384)  # fmt: skip
        for seqlen_q, seqlen_k, batch in ((512, 16384, 4), (4096, 77, 8), (16384, 256, 2), (300, 3000, 16)):
            yield _case(f"{algorithm}_unequal", algorithm, batch, 16, seqlen_q, 128, seqlen_k=seqlen_k,
                        counters=seqlen_q == 512)  # fmt: skip
        for seqlen_q, seqlen_k in ((512, 4096), (512, 16384), (2048, 32768)):
            yield _case(f"{algorithm}_chunked", algorithm, 2, 32, seqlen_q, 128, kv_heads=8, seqlen_k=seqlen_k, causal=True,
                        counters=seqlen_k == 16384)  # fmt: skip
        for seqlen in (512, 2048, 8192):
            yield _case(f"{algorithm}_warm", algorithm, 1, 16, seqlen, 128, l2_state="warm")
        yield _case(f"{algorithm}_eager", algorithm, 1, 16, 512, 128, timing="eager")
        yield _case(f"{algorithm}_eager", algorithm, 4, 16, 2048, 128, timing="eager")


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
            case = _case(f"{algorithm}_model", algorithm, batch, heads, seqlen, head_dim, kv_heads=kv_heads, causal=causal,
                         dtype=dtype, counters=True)  # fmt: skip
            yield replace(case, case_id=f"{algorithm}_model-{name}")


def unfused() -> Iterator[Case]:
    """Standard attention: length by head dim, batch × heads, GQA, odd lengths, long rows with few heads."""
    for head_dim in (128, 64):
        for seqlen in (256, 512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield _case(f"standard_length_d{head_dim}", "standard", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim,
                            causal=causal, counters=seqlen in (512, 1024, 4096, 16384))  # fmt: skip
    for batch, heads in ((1, 1), (1, 4), (1, 16), (4, 16), (16, 16), (64, 16)):
        yield _case("standard_heads", "standard", batch, heads, 1024, 128, counters=batch in (1, 16))
        yield _case("standard_heads", "standard", batch, heads, 1024, 128, causal=True)
    for seqlen in (77, 333, 1000, 1500, 2049, 3000, 4097):
        for head_dim in (64, 128):
            yield _case("standard_odd", "standard", max(1, 8192 // seqlen), 16, seqlen, head_dim, causal=seqlen % 2 == 0,
                        counters=seqlen in (1000, 4097))  # fmt: skip
    for heads, seqlen in ((1, 16384), (2, 32768), (4, 20000)):
        yield _case("standard_long", "standard", 1, heads, seqlen, 128, counters=True)
    for kv_heads in (32, 8, 1):
        yield _case("standard_gqa", "standard", 1, 32, 2048, 128, kv_heads=kv_heads, causal=True, counters=kv_heads == 8)
    for seqlen_q, seqlen_k in ((1, 8192), (128, 8192), (8192, 128), (512, 4096)):
        yield _case("standard_unequal", "standard", 4, 32, seqlen_q, 128, seqlen_k=seqlen_k, counters=seqlen_q == 1)
    for seqlen in (1024, 4096):
        yield _case("standard_fp16", "standard", 4, 16, seqlen, 64, dtype="fp16")
    yield _case("standard_warm", "standard", 1, 16, 512, 128, l2_state="warm")
    yield _case("standard_eager", "standard", 1, 16, 512, 128, timing="eager")


def first_flash() -> Iterator[Case]:
    """FA1's schedule: length, batch × heads around a wave, causal, both head dims."""
    for head_dim in (64, 128):
        for seqlen in (512, 1024, 2048, 4096, 8192):
            for causal in (False, True):
                yield _case(f"fa1_length_d{head_dim}", "fa1", max(1, 16384 // seqlen), 2048 // head_dim, seqlen, head_dim,
                            causal=causal, counters=seqlen in (512, 2048, 8192), mix=seqlen == 2048)  # fmt: skip
        for heads in (1, 16, 66, 132, 133, 264, 396, 397, 528):
            yield _case("fa1_wave", "fa1", 1, heads, 1024, head_dim, counters=heads in (1, 132, 396))
        yield _case("fa1_cta", "fa1", 1, 1, 4096, head_dim, counters=True)
        yield _case("fa1_cta", "fa1", 1, 1, 256, head_dim, seqlen_k=256, counters=True)
        yield _case("fa1_cta", "fa1", 1, 1, 4096, head_dim, seqlen_k=256)
        for seqlen in (333, 1000, 3000):
            yield _case("fa1_odd", "fa1", 4, 16, seqlen, head_dim, causal=seqlen == 1000, counters=seqlen == 1000)
    for batch, heads, seqlen, head_dim, causal in ((64, 16, 1024, 64, True), (56, 16, 512, 64, False),
                                                   (4, 16, 4096, 128, False), (8, 16, 2048, 128, True)):  # fmt: skip
        yield _case("fa1_model", "fa1", batch, heads, seqlen, head_dim, causal=causal, counters=True)


def decode() -> Iterator[Case]:
    """One to eight query tokens on a long KV: batch × length, GQA, splits, pages, capacity, fp8."""
    two = (("fa2", "torch_flash_splitkv"), ("fa3", "flash_attn_3_kvcache"))
    for short, implementation in two:

        def make(family, batch, heads, kv_heads, seqlen_k, head_dim=128, seqlen_q=1, short=short, impl=implementation, **kw):
            return _case(f"decode_{short}_{family}", "flash_decoding", batch, heads, seqlen_q, head_dim, kv_heads=kv_heads,
                         seqlen_k=seqlen_k, implementation=impl, **kw)  # fmt: skip

        for batch in (1, 4, 16, 64, 256):
            for seqlen_k in (512, 2048, 8192, 32768, 131072):
                if batch * seqlen_k > 64 * 32768:
                    continue
                yield make("grid", batch, 32, 8, seqlen_k, counters=batch in (1, 16, 64) and seqlen_k in (2048, 32768))
        for heads, kv_heads in ((32, 32), (32, 16), (32, 4), (16, 1), (64, 8), (8, 1)):
            for batch in (1, 32):
                yield make("gqa", batch, heads, kv_heads, 8192, counters=kv_heads in (1, 32))
        for head_dim in (64, 256):
            for batch in (2, 32):
                yield make("dims", batch, 16, 4, 8192, head_dim=head_dim, counters=batch == 32)
        for seqlen_q in (2, 4, 8):
            for batch in (2, 32):
                yield make("queries", batch, 32, 8, 8192, seqlen_q=seqlen_q, causal=True, counters=batch == 32)
        for batch, heads, kv_heads, seqlen_k in ((8, 32, 8, 3001), (24, 40, 8, 512), (25, 40, 8, 512), (33, 40, 8, 512),
                                                 (34, 40, 8, 512), (64, 32, 8, 4096), (128, 28, 4, 4000),
                                                 (3, 64, 8, 100000), (48, 64, 8, 1500)):  # fmt: skip
            yield make("model", batch, heads, kv_heads, seqlen_k, counters=True)
        yield make("warm", 1, 32, 8, 4096, l2_state="warm")
        yield make("eager", 1, 32, 8, 4096, timing="eager")

    def fa3(family, batch, seqlen_k, kv_heads=8, seqlen_q=1, heads=32, **kw):
        return _case(f"decode_fa3_{family}", "flash_decoding", batch, heads, seqlen_q, 128, kv_heads=kv_heads,
                     seqlen_k=seqlen_k, implementation="flash_attn_3_kvcache", **kw)  # fmt: skip

    for splits in (1, 2, 4, 8, 16, 32, 64, 128):
        yield fa3("splits", 1, 16384, num_splits=splits, counters=splits in (1, 8, 64))
        yield fa3("splits", 1, 131072, num_splits=splits, counters=splits in (1, 8, 64))
    for splits in (1, 2, 3, 4, 8, 16):
        yield fa3("splits", 8, 8192, num_splits=splits, counters=splits in (1, 4))
        yield fa3("splits", 32, 2048, num_splits=splits)
    for page_size in (1, 16, 64, 128, 256):
        yield fa3("paged", 16, 8192, page_size=page_size, kv_capacity=8192, counters=page_size in (16, 128))
        wide = fa3("paged", 64, 4096, page_size=page_size, kv_capacity=4096)
        yield replace(wide, family="decode_fa3_paged_wide")
    for page_size in (64, 256):
        prefill = fa3("paged", 4, 8192, seqlen_q=512, page_size=page_size, kv_capacity=8192, causal=True)
        yield replace(prefill, family="decode_fa3_paged_prefill")
    for batch, seqlen_k, capacity in ((1, 8192, 8192), (16, 8192, 8192), (64, 2048, 2048), (16, 4096, 8192),
                                      (16, 1024, 16384), (1, 1024, 131072)):  # fmt: skip
        yield fa3("capacity", batch, seqlen_k, kv_capacity=capacity, counters=True)
    for batch in (1, 16, 64):
        for seqlen_k in (2048, 16384):
            yield fa3("fp8", batch, seqlen_k, dtype="fp8", counters=seqlen_k == 16384)


def backward() -> Iterator[Case]:
    """Backward: unfused, FA2, the CuTe Hopper kernel, cuDNN; length, GQA, heads, deterministic."""
    kernels = (("standard", "torch_eager", "graph"), ("fa2", "torch_flash", "graph"),
               ("fa3", "flash_attn_4_sm90", "kernel"), ("fa3", "cudnn_sm90", "graph"))  # fmt: skip
    for algorithm, implementation, timing in kernels:

        def make(family, batch, heads, seqlen, dim, a=algorithm, i=implementation, t=timing, **kw):
            return _case(f"bwd_{i}_{family}", a, batch, heads, seqlen, dim, implementation=i, timing=t, pass_="bwd", **kw)

        for head_dim in (128, 64):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                if algorithm == "standard" and seqlen == 16384:
                    continue
                for causal in (False, True):
                    if algorithm == "standard" and causal and seqlen not in (1024, 4096):
                        continue
                    yield make(f"length_d{head_dim}", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal=causal,
                               counters=seqlen in (512, 2048, 8192),
                               mix=seqlen == 4096 and head_dim == 128)  # fmt: skip
        for heads in (1, 16, 132):
            yield make("heads", 1, heads, 1024, 128, counters=heads == 16)
        yield make("model", 8, 16, 2048, 128, counters=True)
        yield make("model", 64, 16, 1024, 64, dtype="fp16", causal=True, counters=True)
        yield make("odd", 4, 16, 1000, 128, causal=algorithm != "standard", counters=True)
        yield make("odd", 2, 16, 3001, 64, counters=algorithm != "standard")
        if algorithm != "standard":
            yield make("gqa", 1, 32, 8192, 128, kv_heads=8, causal=True, counters=True)
            yield make("gqa", 2, 32, 2048, 128, kv_heads=4, counters=True)
        if implementation in ("torch_flash", "flash_attn_4_sm90"):
            yield make("deterministic", 4, 16, 2048, 128, deterministic=True, counters=True)
            yield make("d256", 2, 8, 4096, 256, causal=True, counters=True)


def other_forward() -> Iterator[Case]:
    """cuDNN forward, FA3-class, for comparison."""
    for head_dim in (128, 64):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield _case("cudnn_length", "fa3", 16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal=causal,
                            implementation="cudnn_sm90", counters=seqlen in (2048, 8192) and head_dim == 128)  # fmt: skip


def all_cases() -> list[Case]:
    """Every case once, ids unique."""
    builders = (launch_series, length_sweeps, long_rows, shape_sweeps, models, unfused, first_flash, decode, backward,
                other_forward)  # fmt: skip
    cases = [case for builder in builders for case in builder()]
    assert len({case.case_id for case in cases}) == len(cases), "two cases with one id"
    return cases


def check_cases() -> list[Case]:
    """Small cases that touch every kernel and option: for comparing each with float32 attention."""
    small = {"batch": 2, "heads": 4, "kv_heads": 4, "seqlen_q": 300, "seqlen_k": 300}
    base = Case("", "check", "fa2", "torch_flash", **small)
    gqa = {"kv_heads": 2}
    variants: list[Case] = []
    for algorithm, implementation in (("standard", "torch_eager"), ("fa1", "flash_attn_1_paper"), ("fa2", "torch_flash"),
                                      ("fa3", "flash_attn_3"), ("fa3", "cudnn_sm90")):  # fmt: skip
        for head_dim in (64, 128):
            for causal in (False, True):
                variants.append(replace(base, algorithm=algorithm, implementation=implementation, head_dim=head_dim,
                                        causal=causal))  # fmt: skip
    for algorithm, implementation in (("standard", "torch_eager"), ("fa2", "torch_flash"), ("fa3", "flash_attn_3"),
                                      ("fa3", "cudnn_sm90")):  # fmt: skip
        variants.append(replace(base, algorithm=algorithm, implementation=implementation, causal=True, **gqa))
    variants.append(replace(base, num_splits=1, causal=True))
    variants.append(replace(base, window=(64, 0), causal=True))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_3", window=(64, 0), causal=True))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_3", window=(50, 50)))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_3", dtype="fp8"))
    variants.append(replace(base, head_dim=256, algorithm="fa3", implementation="flash_attn_3", causal=True))
    for implementation in ("torch_flash_splitkv", "flash_attn_3_kvcache"):
        decode_base = replace(base, algorithm="flash_decoding", implementation=implementation, seqlen_q=1, seqlen_k=2000,
                              kv_heads=2)  # fmt: skip
        variants.append(decode_base)
        variants.append(replace(decode_base, seqlen_q=4, causal=True))
        if implementation == "flash_attn_3_kvcache":
            variants += [replace(decode_base, num_splits=7), replace(decode_base, kv_capacity=4096),
                         replace(decode_base, page_size=16, kv_capacity=2048), replace(decode_base, dtype="fp8")]  # fmt: skip
    for algorithm, implementation in (("standard", "torch_eager"), ("fa2", "torch_flash"), ("fa3", "cudnn_sm90"),
                                      ("fa3", "flash_attn_4_sm90")):  # fmt: skip
        for causal in (False, True):
            variants.append(replace(base, algorithm=algorithm, implementation=implementation, pass_="bwd", causal=causal))
    variants.append(replace(base, pass_="bwd", deterministic=True, causal=True))
    variants.append(replace(base, algorithm="fa3", implementation="flash_attn_4_sm90", pass_="bwd", **gqa))
    return [replace(case, case_id=f"{case.implementation}-{_name(case)}-{case.pass_}") for case in variants]


if __name__ == "__main__":
    write_cases(sys.argv[1], check_cases() if "--check" in sys.argv else all_cases())
