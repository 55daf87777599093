"""Ask PyTorch which attention backend it picks for random calls, and look which kernel really ran.

``python -m simulator.measure.probe_dispatch -o probe.csv`` on a machine with a CUDA GPU. The shapes are small: what is
recorded are choices and kernel names, not times. The file needs PyTorch and nothing else of this project, so that it
can also be copied to a machine alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

#: What a row asks; every name is also a column.
ASKED = (
    "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "dtype", "causal", "mask",
    "mask_requires_grad", "dropout", "requires_grad", "enable_gqa", "last_stride", "storage_offset", "rank",
    "deterministic",
)  # fmt: skip
ANSWERED = (
    "can_flash", "can_efficient", "can_cudnn", "reason_flash", "reason_efficient", "reason_cudnn", "choice", "ran",
    "kernels", "error", "backward_kernels", "backward_error",
)  # fmt: skip
VERSIONS = ("torch", "cuda", "cudnn", "device", "compute_capability")
COLUMNS = ("case", "cudnn_deprioritized", *ASKED, *ANSWERED, *VERSIONS)

PLAIN = {
    "batch": 2, "heads": 4, "kv_heads": 4, "seqlen_q": 256, "seqlen_k": 256, "head_dim": 64, "head_dim_v": 64,
    "dtype": "bf16", "causal": 0, "mask": "none", "mask_requires_grad": 0, "dropout": 0.0, "requires_grad": 0,
    "enable_gqa": 0, "last_stride": 1, "storage_offset": 0, "rank": 4, "deterministic": 0,
}  # fmt: skip

HEAD_DIMS = (1, 8, 16, 32, 40, 63, 64, 65, 72, 80, 96, 100, 120, 128, 136, 160, 192, 200, 224, 250, 256, 264, 320, 512)
LENGTHS = (1, 2, 7, 16, 64, 100, 128, 129, 200, 256, 384, 512, 777, 1024)

#: A call of scaled_dot_product_attention: what is varied, by name.
Call = dict[str, Any]


def draw_cases(count: int, seed: int) -> list[Call]:
    """``count`` calls: a plain one changed in zero to four random ways, some of which PyTorch refuses."""
    chance = random.Random(seed)
    changes = (
        _heads_grouped, _heads_grouped, _heads_wrong, _head_dim, _head_dim, _head_dim, _head_dim_v, _lengths, _lengths,
        _queries, _dtype, _dtype, _causal, _causal, _mask, _mask, _dropout, _grad, _grad, _stride, _offset, _rank,
        _deterministic, _empty,
    )  # fmt: skip
    cases = []
    for _ in range(count):
        case = dict(PLAIN)
        case["head_dim"] = case["head_dim_v"] = chance.choice((64, 64, 96, 128, 128, 192, 256))
        case["dtype"] = chance.choice(("bf16", "fp16"))
        case["batch"] = chance.choice((1, 2, 3))
        for change in chance.sample(changes, chance.choice((0, 1, 1, 2, 2, 3, 4))):
            change(case, chance)
        if case["mask"] != "none":
            case["causal"] = 0  # PyTorch raises on both together, before it chooses a backend
        cases.append(case)
    return cases


def _heads_grouped(case: Call, chance: random.Random) -> None:
    case["heads"], case["kv_heads"] = chance.choice(((8, 2), (8, 1), (6, 3), (16, 4)))
    case["enable_gqa"] = 1


def _heads_wrong(case: Call, chance: random.Random) -> None:
    case["heads"], case["kv_heads"], case["enable_gqa"] = chance.choice(((8, 2, 0), (6, 4, 1), (8, 1, 0)))


def _head_dim(case: Call, chance: random.Random) -> None:
    case["head_dim"] = case["head_dim_v"] = chance.choice(HEAD_DIMS)


def _head_dim_v(case: Call, chance: random.Random) -> None:
    case["head_dim"], case["head_dim_v"] = chance.choice(((192, 128), (64, 128), (128, 64), (96, 100), (64, 512)))


def _lengths(case: Call, chance: random.Random) -> None:
    case["seqlen_q"], case["seqlen_k"] = chance.choice(LENGTHS), chance.choice(LENGTHS)


def _queries(case: Call, chance: random.Random) -> None:
    case["seqlen_q"] = chance.choice((1, 1, 4, 128))


def _dtype(case: Call, chance: random.Random) -> None:
    case["dtype"] = chance.choice(("fp32", "fp32", "fp16", "bf16", "fp64"))


def _causal(case: Call, chance: random.Random) -> None:
    case["causal"] = 1


def _mask(case: Call, chance: random.Random) -> None:
    case["mask"] = chance.choice(("bool2d", "bool4d", "float2d", "float4d", "float3d", "expanded", "broadcast"))
    case["mask_requires_grad"] = int(case["mask"].startswith("float") and chance.random() < 0.3)


def _dropout(case: Call, chance: random.Random) -> None:
    case["dropout"] = chance.choice((0.1, 0.125, 0.25, 0.3))


def _grad(case: Call, chance: random.Random) -> None:
    case["requires_grad"] = 1


def _stride(case: Call, chance: random.Random) -> None:
    case["last_stride"] = 2


def _offset(case: Call, chance: random.Random) -> None:
    case["storage_offset"] = chance.choice((1, 4, 8))


def _rank(case: Call, chance: random.Random) -> None:
    case["rank"] = 3
    case["heads"] = case["kv_heads"] = 1
    case["enable_gqa"] = 0


def _deterministic(case: Call, chance: random.Random) -> None:
    case["deterministic"] = 1


def _empty(case: Call, chance: random.Random) -> None:
    case[chance.choice(("seqlen_q", "seqlen_k"))] = 0


def backend_of(kernels: list[str]) -> str:
    """The backend whose kernels these are, by the names that each library gives its own."""
    text = " ".join(kernels).lower()
    if "cudnn" in text and "sdpa" in text:
        return "cudnn"
    if "pytorch_flash" in text or "flash_fwd" in text:
        return "flash"
    if "fmha_cutlass" in text or "attentionkernel" in text:
        return "efficient"
    return "math" if "softmax" in text else "none"


def _tensor(torch: Any, case: Call, heads: int, rows: int, width: int) -> Any:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[case["dtype"]]
    step, offset = case["last_stride"], case["storage_offset"]
    elements = case["batch"] * heads * rows * width * step
    flat = torch.randn(elements + offset, device="cuda", dtype=torch.float32).to(dtype)
    x = flat[offset:].view(case["batch"], heads, rows, width * step)[..., ::step]
    x = x[:, 0] if case["rank"] == 3 else x
    return x.detach().requires_grad_(bool(case["requires_grad"]))


def _mask_of(torch: Any, case: Call, dtype: Any) -> Any:
    kind, q, k, batch, heads = (case[name] for name in ("mask", "seqlen_q", "seqlen_k", "batch", "heads"))
    if kind == "none":
        return None
    shapes = {
        "bool2d": (q, k), "float2d": (q, k), "bool4d": (1, 1, q, k), "float4d": (batch, heads, q, k),
        "float3d": (1, q, k), "expanded": (batch, 1, q, 1), "broadcast": (batch, 1, 1, k),
    }  # fmt: skip
    shape = shapes[kind][-3 if case["rank"] == 3 else -4 :]
    if kind.startswith("bool") or kind == "broadcast":
        return torch.rand(shape, device="cuda") > 0.2
    mask = torch.randn(shape, device="cuda").to(dtype)
    if kind == "expanded":
        return mask.expand(*shape[:-1], k)
    return mask.requires_grad_(bool(case["mask_requires_grad"]))


def _kernels(torch: Any, call: Any) -> Any:
    """Result of ``call`` and the names of the CUDA kernels that it launched, in order, each once."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        result = call()
        torch.cuda.synchronize()
    launched = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    launched.sort(key=lambda event: event.time_range.start)
    names = [event.name for event in launched if not event.name.startswith(("Memcpy", "Memset"))]
    return result, list(dict.fromkeys(names))


def _short(names: list[str]) -> str:
    return " | ".join(name.replace("void ", "")[:70] for name in names)[:600]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _may(torch: Any, params: Any, name: str) -> tuple[int, str]:
    """PyTorch's own answer for one backend, and the first reason that it gives for a no."""
    # the reason is a Python warning or a line on stderr, depending on how the binding was built
    with tempfile.TemporaryFile("w+") as lines, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(lines.fileno(), 2)
        try:
            allowed = getattr(torch.backends.cuda, f"can_use_{name}_attention")(params, True)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        lines.seek(0)
        reasons = [str(warning.message) for warning in said] + [line for line in lines if line.strip()]
    reason = "" if allowed or not reasons else reasons[0].split("(Triggered")[0].split("(function")[0]
    reason = reason.split("] Warning: ")[-1]
    return int(allowed), " ".join(reason.split())[:200]


def probe(torch: Any, case: Call) -> dict[str, Any]:
    """PyTorch's answers to one call, the kernels that it ran, and the errors it raised."""
    answer: dict[str, Any] = dict.fromkeys(ANSWERED, "")
    torch.use_deterministic_algorithms(bool(case["deterministic"]))
    try:
        q = _tensor(torch, case, case["heads"], case["seqlen_q"], case["head_dim"])
        k = _tensor(torch, case, case["kv_heads"], case["seqlen_k"], case["head_dim"])
        v = _tensor(torch, case, case["kv_heads"], case["seqlen_k"], case["head_dim_v"])
        mask, causal, gqa = _mask_of(torch, case, q.dtype), bool(case["causal"]), bool(case["enable_gqa"])
        params = torch.backends.cuda.SDPAParams(q, k, v, mask, case["dropout"], causal, gqa)
        for name in ("flash", "efficient", "cudnn"):
            answer[f"can_{name}"], answer[f"reason_{name}"] = _may(torch, params, name)
        options = {"attn_mask": mask, "dropout_p": case["dropout"], "is_causal": causal, "enable_gqa": gqa}
        chosen = torch._fused_sdp_choice(q, k, v, **options)
        answer["choice"] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(chosen, f"error {chosen}")
        attention = torch.nn.functional.scaled_dot_product_attention
        out, names = _kernels(torch, lambda: attention(q, k, v, **options))
        answer["kernels"], answer["ran"] = _short(names), backend_of(names)
    except Exception as error:  # the error is what the row records
        answer["error"] = _first_line(error)
        return answer
    finally:
        torch.use_deterministic_algorithms(False)
    if case["requires_grad"] and out.requires_grad:
        try:
            answer["backward_kernels"] = _short(_kernels(torch, out.float().sum().backward)[1])
        except Exception as error:  # likewise
            answer["backward_error"] = _first_line(error)
    return answer


def _write(output: str, cases: list[tuple[int, Call]], seconds: float) -> None:
    """Append a row for each case that starts within ``seconds``; ends early where a case broke the CUDA context."""
    import torch

    versions = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "device": torch.cuda.get_device_name(),
        "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability()),
    }  # fmt: skip
    torch.set_warn_always(True)
    shadowed = int(bool(os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")))
    end = time.monotonic() + seconds
    with open(output, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        for number, case in cases:
            if time.monotonic() > end:
                return
            row = {"case": number, "cudnn_deprioritized": shadowed, **case, **probe(torch, case), **versions}
            writer.writerow(row)
            file.flush()
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                # an illegal access ends this process's context: the rest needs a new process. Leaving it through the
                # interpreter's shutdown can crash, so no shutdown
                os._exit(0)


def _following(output: str, shadowed: str) -> int:
    """The case after the last one that the file has of this order."""
    with open(output, newline="") as file:
        asked = [int(row["case"]) for row in csv.DictReader(file) if row["cudnn_deprioritized"] == shadowed]
    return 1 + max(asked, default=-1)


def main() -> None:
    """Probe the default order, then the order without cuDNN first (a setting that PyTorch reads once a process)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True, help="CSV to append to; cases that it has are not asked again")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0, help="no new case after this, for each order")
    parser.add_argument("--orders", default="01", help="0: cuDNN first where PyTorch prefers it; 1: never")
    parser.add_argument("--start", type=int, help="only this process's order, from this case on")
    given = parser.parse_args()
    if given.start is not None:
        cases = list(enumerate(draw_cases(given.count, given.seed)))[given.start :]
        return _write(given.output, cases, given.seconds)
    if not os.path.exists(given.output):
        with open(given.output, "w", newline="") as file:
            csv.DictWriter(file, COLUMNS).writeheader()
    for shadowed in given.orders:
        extra = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"} if shadowed == "1" else {}
        # without the first variable strict determinism refuses every GEMM
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **extra}
        end = time.monotonic() + given.seconds
        crashed_at = -1
        while (following := _following(given.output, shadowed)) < given.count and time.monotonic() < end:
            if following == crashed_at:
                _record_crash(given.output, shadowed, following, draw_cases(given.count, given.seed)[following])
                continue
            arguments = ["-o", given.output, "--count", str(given.count), "--seed", str(given.seed)]
            arguments += ["--seconds", str(end - time.monotonic()), "--start", str(following)]
            child = subprocess.run([sys.executable, __file__, *arguments], env=environment)
            crashed_at = _following(given.output, shadowed) if child.returncode else -1


def _record_crash(output: str, shadowed: str, number: int, case: Call) -> None:
    with open(output, "a", newline="") as file:
        row = {"case": number, "cudnn_deprioritized": shadowed, **case, "error": "the process crashed twice"}
        csv.DictWriter(file, COLUMNS, restval="").writerow(row)


if __name__ == "__main__":
    main()
