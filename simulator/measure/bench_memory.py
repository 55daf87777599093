"""Microbenchmarks of the memory side: HBM streams, L2 bandwidth and latency, what one CTA can stream."""

from __future__ import annotations

from collections.abc import Iterator

from simulator.measure import cuda_sources as sources
from simulator.measure.bench import MIB, Bench, Row
from simulator.measure.cuda_module import CudaModule
from simulator.measure.timing import quantile


def hbm_streams(bench: Bench) -> Iterator[Row]:
    """HBM bandwidth by direction, footprint and read/write mix."""
    memory, grid = bench.memory, bench.sms * 4
    big = bench.buffer(8 << 30)
    other = bench.buffer(8 << 30)
    for size in (256 * MIB, 1 << 30, 4 << 30, 8 << 30):
        label = f"bytes={size}"
        vectors = size // 16
        yield bench.bandwidth(
            "hbm_read", label, size, lambda v=vectors: memory["read_repeat"](grid, 512, big, v, 1, bench.sink)
        )
        yield bench.bandwidth(
            "hbm_write", label, size, lambda v=vectors: memory["write_stream"](grid, 512, other, v, bench.sink)
        )
        yield bench.bandwidth(
            "hbm_copy_chunked", label, 2 * size, lambda v=vectors: memory["copy_chunked"](grid, 512, big, other, v)
        )
        words = size // 4
        yield bench.bandwidth("hbm_copy_torch", label, 2 * size, lambda w=words: other[:w].copy_(big[:w]))
    vectors = (1 << 30) // 16
    for reads, writes in ((4, 1), (3, 1), (2, 1), (1, 1), (1, 2)):
        kernel = CudaModule(sources.mix_source(reads, writes))["mix_stream"]
        yield bench.bandwidth(
            "hbm_mix",
            f"reads={reads};writes={writes};bytes={1 << 30}",
            (reads + writes) * (1 << 30),
            lambda k=kernel: k(vectors // 1024, 256, big, other, vectors, 1),
        )
    for size in (MIB, 4 * MIB, 16 * MIB, 64 * MIB):
        yield bench.bandwidth(
            "hbm_read_cold_once",
            f"bytes={size}",
            size,
            lambda v=size // 16: memory["read_repeat"](grid, 512, big, v, 1, bench.sink),
            cold=True,
        )


def l2_bandwidth(bench: Bench) -> Iterator[Row]:
    """Read bandwidth of a footprint that is read again and again past L1: L2 below its knee, HBM above."""
    data = bench.buffer(256 * MIB)
    for mib in (1, 4, 8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 72, 80, 96, 120, 200):
        repeats = max(4, 2000 // mib)
        yield bench.bandwidth(
            "l2_read",
            f"bytes={mib * MIB}",
            mib * MIB * repeats,
            lambda m=mib, r=repeats: bench.memory["read_repeat"](
                bench.sms * 2, 1024, data, m * MIB // 16, r, bench.sink
            ),
            repetitions=5,
        )
    copy = CudaModule(sources.mix_source(1, 1))["mix_stream"]
    for mib in (4, 8, 12, 16, 20, 24):
        yield bench.bandwidth(
            "l2_copy",
            f"bytes={mib * MIB};counted=read+write",
            2 * mib * MIB * 50,
            lambda m=mib: copy(bench.sms * 4, 256, data, data[32 * MIB :], m * MIB // 16, 50),
        )
    floats = bench.torch.zeros(64 * MIB // 4, device="cuda")
    for mib in (1, 16, 48):
        words, repeats = mib * MIB // 4, max(2, 64 // mib)
        yield bench.bandwidth(
            "l2_atomic_add_fp32",
            f"bytes={mib * MIB}",
            words * 4 * repeats,
            lambda w=words, r=repeats: bench.memory["atomic_add"](bench.sms * 2, 1024, floats, w, r),
        )


def latency(bench: Bench) -> Iterator[Row]:
    """Dependent loads over a random cycle of 128-byte lines: L2 and HBM latency in cycles by footprint.

    Each repetition starts elsewhere in the cycle, behind a read of the footprint (up to 64 MiB) or an emptied L2
    (above).
    """
    torch = bench.torch
    for mib in (1, 4, 16, 24, 32, 40, 48, 56, 64, 96, 256, 1024, 4096, 16384):
        lines = mib * MIB // 128
        order = torch.randperm(lines, device="cuda")
        chain = torch.empty(lines * 16, device="cuda", dtype=torch.int64)
        chain[order * 16] = order.roll(-1) * 16
        steps = 8192
        values = []
        for repetition in range(5):
            if mib <= 64:  # brings the footprint into L2 as far as it fits
                bench.memory["read_repeat"](bench.sms * 2, 512, chain, lines * 8, 2, bench.sink)
            else:
                bench.timer.flush()
            start = int(order[(repetition * 7919 + 13) * 1000003 % lines]) * 16
            bench.memory["chase"](1, 1, chain, start, steps, bench.cycles)
            torch.cuda.synchronize()
            values.append(float(bench.cycles[0]) / steps)
        yield Row("latency_chase", f"bytes={mib * MIB}", "latency", "cycles", quantile(values, 0.5), min(values), 5)
        del chain, order


def cta_streams(bench: Bench) -> Iterator[Row]:
    """Bandwidth that n CTAs reach, one a SM, by bytes in flight and copy engine; from HBM and from L2."""
    memory = bench.memory
    data = bench.buffer(8 << 30)
    for ctas in (1, 2, 4, 8, 16, 32, 64, 132):
        for stages in (2, 4, 8):
            region = 16 * MIB if ctas <= 32 else 32 * MIB
            yield bench.bandwidth(
                "cta_stream_cp_async",
                f"ctas={ctas};in_flight_bytes={stages * 16384};source=hbm",
                region * ctas,
                lambda c=ctas, s=stages, r=region: memory["stream_cp_async"](
                    c, 256, data, r // 16, s, 1, shared_bytes=max(s * 16384, 120_000)
                ),
                cold=True,
                repetitions=3,
            )
        for stages, piece in ((2, 16384), (4, 16384), (8, 16384), (12, 16384), (4, 32768)):
            region = 16 * MIB if ctas <= 32 else 32 * MIB
            yield bench.bandwidth(
                "cta_stream_bulk",
                f"ctas={ctas};in_flight_bytes={stages * piece};piece_bytes={piece};source=hbm",
                region * ctas,
                lambda c=ctas, s=stages, p=piece, r=region: memory["stream_bulk"](
                    c, 32, data, r, p, s, 1, shared_bytes=max(s * p, 120_000)
                ),
                cold=True,
                repetitions=3,
            )
    for ctas in (1, 8, 132):
        region = 196_608
        for stages in (2, 4, 8):
            yield bench.bandwidth(
                "cta_stream_cp_async",
                f"ctas={ctas};in_flight_bytes={stages * 16384};source=l2",
                region * ctas * 32,
                lambda c=ctas, s=stages, region=region: memory["stream_cp_async"](
                    c, 256, data, region // 16, s, 32, shared_bytes=max(s * 16384, 120_000)
                ),
                repetitions=3,
            )
            yield bench.bandwidth(
                "cta_stream_bulk",
                f"ctas={ctas};in_flight_bytes={stages * 16384};piece_bytes=16384;source=l2",
                region * ctas * 32,
                lambda c=ctas, s=stages, region=region: memory["stream_bulk"](
                    c, 32, data, region, 16384, s, 32, shared_bytes=max(s * 16384, 120_000)
                ),
                repetitions=3,
            )
