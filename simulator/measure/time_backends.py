"""Time PyTorch's attention backends one by one: the one that it picks by itself, and each that can be forced.

``python -m simulator.measure.time_backends -o times.csv`` on a machine with a CUDA GPU. The file needs PyTorch and
nothing else of this project, so that it can also be copied to a machine alone. Times are medians of cold calls (a
buffer larger than L2 is written before each) between CUDA events.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
from typing import Any

REPETITIONS = 15
FLUSH_BYTES = 512 << 20

#: batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, causal, mask
SHAPES = (
    (4, 16, 16, 512, 512, 128, "bf16", 0, ""),
    (4, 16, 16, 2048, 2048, 128, "bf16", 0, ""),
    (4, 16, 16, 2048, 2048, 128, "bf16", 1, ""),
    (2, 16, 16, 8192, 8192, 128, "bf16", 0, ""),
    (2, 16, 16, 8192, 8192, 128, "bf16", 1, ""),
    (1, 16, 16, 16384, 16384, 128, "bf16", 1, ""),
    (4, 32, 8, 4096, 4096, 128, "bf16", 1, ""),
    (4, 32, 32, 4096, 4096, 64, "bf16", 1, ""),
    (4, 32, 32, 2048, 2048, 64, "fp16", 0, ""),
    (4, 16, 16, 4096, 4096, 96, "bf16", 1, ""),
    (2, 8, 8, 4096, 4096, 256, "bf16", 1, ""),
    (2, 8, 8, 4096, 4096, 192, "bf16", 0, ""),
    (2, 16, 16, 2048, 2048, 128, "fp32", 1, ""),
    (2, 16, 16, 2048, 2048, 128, "bf16", 0, "bool"),
    (2, 16, 16, 4096, 4096, 64, "bf16", 0, "additive"),
    (16, 32, 8, 1, 8192, 128, "bf16", 0, ""),
    (16, 32, 32, 1, 4096, 128, "bf16", 0, ""),
    (2, 16, 16, 1024, 4096, 128, "bf16", 0, ""),
    (1, 32, 32, 256, 256, 128, "bf16", 0, ""),
    (2, 16, 4, 2048, 2048, 512, "bf16", 0, ""),
)
COLUMNS = (
    "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal", "mask", "pass", "backend",
    "picked", "measured_time_us", "error", "torch", "cudnn", "device",
)  # fmt: skip


def _inputs(torch: Any, shape: Any) -> Any:
    batch, heads, kv_heads, queries, keys, width, dtype, _, mask = shape
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    rows = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    # as a model makes them: (batch, seqlen, heads, head_dim) seen as (batch, heads, seqlen, head_dim)
    q, k, v = (torch.randn(batch, n, h, width, device="cuda", dtype=kind).transpose(1, 2) for h, n in rows)
    given = None
    if mask == "bool":
        given = torch.rand(batch, 1, queries, keys, device="cuda") > 0.1
    elif mask:
        given = torch.randn(1, 1, queries, keys, device="cuda", dtype=kind)
    return q, k, v, given


def _median_us(torch: Any, call: Any, flush: Any) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(REPETITIONS):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host is ahead of the GPU when the call starts
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def main() -> None:
    """Write one row for each shape, pass and backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True, help="CSV to write")
    output = parser.parse_args().output
    attention = torch.nn.functional.scaled_dot_product_attention
    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
    }  # fmt: skip
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    versions["device"] = torch.cuda.get_device_name()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    with open(output, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for shape in SHAPES:
            q, k, v, mask = _inputs(torch, shape)
            options = {"attn_mask": mask, "is_causal": bool(shape[7]), "enable_gqa": shape[1] != shape[2]}
            picked = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}[torch._fused_sdp_choice(q, k, v, **options)]
            for name, backend in backends.items():
                row = dict(zip(COLUMNS[:9], shape, strict=True)) | {"pass": "fwd", "backend": name, **versions}
                row["picked"] = int(picked == name)
                try:
                    with torch.no_grad(), sdpa_kernel(backend):
                        call = functools.partial(attention, q, k, v, **options)
                        row["measured_time_us"] = round(_median_us(torch, call, flush), 3)
                except Exception as error:  # a backend that refuses says why in its row
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:120]
                writer.writerow(row)
                file.flush()
            del q, k, v, mask
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
