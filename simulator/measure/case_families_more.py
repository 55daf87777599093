"""Shape families of unfused attention, FA1's schedule, decode, backward and cuDNN."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from simulator.measure.case_families import make_case
from simulator.measure.cases import Case


def unfused() -> Iterator[Case]:
    """Standard attention: length by head dim, batch × heads, GQA, odd lengths, long rows with few heads."""
    for head_dim in (128, 64):
        for seqlen in (256, 512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                yield make_case(
                    f"standard_length_d{head_dim}",
                    "standard",
                    16384 // seqlen,
                    2048 // head_dim,
                    seqlen,
                    head_dim,
                    causal=causal,
                    counters=seqlen in (512, 1024, 4096, 16384),
                )
    for batch, heads in ((1, 1), (1, 4), (1, 16), (4, 16), (16, 16), (64, 16)):
        yield make_case("standard_heads", "standard", batch, heads, 1024, 128, counters=batch in (1, 16))
        yield make_case("standard_heads", "standard", batch, heads, 1024, 128, causal=True)
    for seqlen in (77, 333, 1000, 1500, 2049, 3000, 4097):
        for head_dim in (64, 128):
            yield make_case(
                "standard_odd",
                "standard",
                max(1, 8192 // seqlen),
                16,
                seqlen,
                head_dim,
                causal=seqlen % 2 == 0,
                counters=seqlen in (1000, 4097),
            )
    for heads, seqlen in ((1, 16384), (2, 32768), (4, 20000)):
        yield make_case("standard_long", "standard", 1, heads, seqlen, 128, counters=True)
    for kv_heads in (32, 8, 1):
        yield make_case(
            "standard_gqa", "standard", 1, 32, 2048, 128, kv_heads=kv_heads, causal=True, counters=kv_heads == 8
        )
    for seqlen_q, seqlen_k in ((1, 8192), (128, 8192), (8192, 128), (512, 4096)):
        yield make_case("standard_unequal", "standard", 4, 32, seqlen_q, 128, seqlen_k=seqlen_k, counters=seqlen_q == 1)
    for seqlen in (1024, 4096):
        yield make_case("standard_fp16", "standard", 4, 16, seqlen, 64, dtype="fp16")
    yield make_case("standard_warm", "standard", 1, 16, 512, 128, l2_state="warm")
    yield make_case("standard_eager", "standard", 1, 16, 512, 128, timing="eager")


def first_flash() -> Iterator[Case]:
    """FA1's schedule: length, batch × heads around a wave, causal, both head dims."""
    for head_dim in (64, 128):
        for seqlen in (512, 1024, 2048, 4096, 8192):
            for causal in (False, True):
                yield make_case(
                    f"fa1_length_d{head_dim}",
                    "fa1",
                    max(1, 16384 // seqlen),
                    2048 // head_dim,
                    seqlen,
                    head_dim,
                    causal=causal,
                    counters=seqlen in (512, 2048, 8192),
                    mix=seqlen == 2048,
                )
        for heads in (1, 16, 66, 132, 133, 264, 396, 397, 528):
            yield make_case("fa1_wave", "fa1", 1, heads, 1024, head_dim, counters=heads in (1, 132, 396))
        yield make_case("fa1_cta", "fa1", 1, 1, 4096, head_dim, counters=True)
        yield make_case("fa1_cta", "fa1", 1, 1, 256, head_dim, seqlen_k=256, counters=True)
        yield make_case("fa1_cta", "fa1", 1, 1, 4096, head_dim, seqlen_k=256)
        for seqlen in (333, 1000, 3000):
            yield make_case("fa1_odd", "fa1", 4, 16, seqlen, head_dim, causal=seqlen == 1000, counters=seqlen == 1000)
    for batch, heads, seqlen, head_dim, causal in (
        (64, 16, 1024, 64, True),
        (56, 16, 512, 64, False),
        (4, 16, 4096, 128, False),
        (8, 16, 2048, 128, True),
    ):
        yield make_case("fa1_model", "fa1", batch, heads, seqlen, head_dim, causal=causal, counters=True)


def decode() -> Iterator[Case]:
    """One to eight query tokens on a long KV: batch × length, GQA, splits, pages, capacity, fp8."""
    two = (("fa2", "torch_flash_splitkv"), ("fa3", "flash_attn_3_kvcache"))
    for short, implementation in two:

        def make(
            family: str,
            batch: int,
            heads: int,
            kv_heads: int,
            seqlen_k: int,
            head_dim: int = 128,
            seqlen_q: int = 1,
            short: str = short,
            impl: str = implementation,
            **kw: Any,
        ) -> Case:
            return make_case(
                f"decode_{short}_{family}",
                "flash_decoding",
                batch,
                heads,
                seqlen_q,
                head_dim,
                kv_heads=kv_heads,
                seqlen_k=seqlen_k,
                implementation=impl,
                **kw,
            )

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
        for batch, heads, kv_heads, seqlen_k in (
            (8, 32, 8, 3001),
            (24, 40, 8, 512),
            (25, 40, 8, 512),
            (33, 40, 8, 512),
            (34, 40, 8, 512),
            (64, 32, 8, 4096),
            (128, 28, 4, 4000),
            (3, 64, 8, 100000),
            (48, 64, 8, 1500),
        ):
            yield make("model", batch, heads, kv_heads, seqlen_k, counters=True)
        yield make("warm", 1, 32, 8, 4096, l2_state="warm")
        yield make("eager", 1, 32, 8, 4096, timing="eager")

    def fa3(
        family: str, batch: int, seqlen_k: int, kv_heads: int = 8, seqlen_q: int = 1, heads: int = 32, **kw: Any
    ) -> Case:
        return make_case(
            f"decode_fa3_{family}",
            "flash_decoding",
            batch,
            heads,
            seqlen_q,
            128,
            kv_heads=kv_heads,
            seqlen_k=seqlen_k,
            implementation="flash_attn_3_kvcache",
            **kw,
        )

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
    for batch, seqlen_k, capacity in (
        (1, 8192, 8192),
        (16, 8192, 8192),
        (64, 2048, 2048),
        (16, 4096, 8192),
        (16, 1024, 16384),
        (1, 1024, 131072),
    ):
        yield fa3("capacity", batch, seqlen_k, kv_capacity=capacity, counters=True)
    for batch in (1, 16, 64):
        for seqlen_k in (2048, 16384):
            yield fa3("fp8", batch, seqlen_k, dtype="fp8", counters=seqlen_k == 16384)


def backward() -> Iterator[Case]:
    """Backward: unfused, FA2, the CuTe Hopper kernel, cuDNN; length, GQA, heads, deterministic."""
    kernels = (
        ("standard", "torch_eager", "graph"),
        ("fa2", "torch_flash", "graph"),
        ("fa3", "flash_attn_4_sm90", "kernel"),
        ("fa3", "cudnn_sm90", "graph"),
    )
    for algorithm, implementation, timing in kernels:

        def make(
            family: str,
            batch: int,
            heads: int,
            seqlen: int,
            dim: int,
            a: str = algorithm,
            i: str = implementation,
            t: str = timing,
            **kw: Any,
        ) -> Case:
            return make_case(
                f"bwd_{i}_{family}", a, batch, heads, seqlen, dim, implementation=i, timing=t, pass_="bwd", **kw
            )

        for head_dim in (128, 64):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                if algorithm == "standard" and seqlen == 16384:
                    continue
                for causal in (False, True):
                    if algorithm == "standard" and causal and seqlen not in (1024, 4096):
                        continue
                    yield make(
                        f"length_d{head_dim}",
                        16384 // seqlen,
                        2048 // head_dim,
                        seqlen,
                        head_dim,
                        causal=causal,
                        counters=seqlen in (512, 2048, 8192),
                        mix=seqlen == 4096 and head_dim == 128,
                    )
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
                yield make_case(
                    "cudnn_length",
                    "fa3",
                    16384 // seqlen,
                    2048 // head_dim,
                    seqlen,
                    head_dim,
                    causal=causal,
                    implementation="cudnn_sm90",
                    counters=seqlen in (2048, 8192) and head_dim == 128,
                )
