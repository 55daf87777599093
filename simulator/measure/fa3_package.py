"""Forward kernels of FlashAttention-3's first releases (July 2024), through shared libraries built from their sources.

The FA3 paper's figures are of these kernels, which no wheel carries. ``simulator/measure/cuda/fa3_driver.cu`` launches
them as their ``flash_api.cpp`` does, and its head says how to build it. ``IOSIM_FLASH_ATTN_3_2024`` names the library
with the fp16 kernels, ``IOSIM_FLASH_ATTN_3_2024_FP8`` the one with the e4m3 kernels and ``..._FP8_GRID`` one of them
that gives every tile a CTA, as the paper timed them.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import Prepared, beyond_whole_tensors, qkv, softmax_scale, torch_module

#: (implementation, dtype) -> the environment variable that names its library.
LIBRARY_VARIABLES = {
    ("flash_attn_3_2024", "fp16"): "IOSIM_FLASH_ATTN_3_2024",
    ("flash_attn_3_2024", "fp8"): "IOSIM_FLASH_ATTN_3_2024_FP8",
    ("flash_attn_3_2024_grid", "fp8"): "IOSIM_FLASH_ATTN_3_2024_FP8_GRID",
}


def need_library() -> str | None:
    """None when a library is named and there, else the reason."""
    paths = [os.environ[name] for name in LIBRARY_VARIABLES.values() if os.environ.get(name)]
    if not paths:
        names = " and ".join(LIBRARY_VARIABLES.values())
        return f"{names} name no library built with simulator/measure/cuda/fa3_driver.cu"
    return next((f"{path}: no such file" for path in paths if not os.path.exists(path)), None)


@cache
def _library(variable: str) -> ctypes.CDLL:
    return ctypes.CDLL(os.environ[variable])


def refuse(case: Case) -> str | None:
    """Why the kernels of July 2024 cannot run a case, or None."""
    variable = LIBRARY_VARIABLES.get((case.implementation, case.dtype))
    if case.pass_ != "fwd" or variable is None:
        held = " and ".join(dtype for name, dtype in LIBRARY_VARIABLES if name == case.implementation)
        return f"{case.implementation} has forward kernels in {held}"
    if not os.environ.get(variable):
        return f"{variable} names no library"
    if case.heads != case.kv_heads or case.seqlen_q != case.seqlen_k or case.value_dim != case.head_dim:
        return "FlashAttention-3 of July 2024 is measured with kv_heads = heads and seqlen_q = seqlen_k, one head dim"
    if beyond_whole_tensors(case):
        return "FlashAttention-3 of July 2024 takes no window, pages, capacity or splits"
    return None


def prepare(case: Case) -> Prepared:
    """Q, K and V of (batch, seqlen, heads, head_dim); e4m3 kernels write fp16."""
    torch = torch_module()
    library = _library(LIBRARY_VARIABLES[case.implementation, case.dtype])
    q, k, v = qkv(case)
    b, s, h, d = q.shape
    out = torch.empty(b, s, h, d, device="cuda", dtype=torch.float16)
    lse = torch.empty(b, h, s, device="cuda", dtype=torch.float32)
    counter = torch.zeros(1, device="cuda", dtype=torch.int32)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out, lse, counter)]

    def run() -> Any:
        if case.causal:
            counter.zero_()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        missing = library.fa3_fwd(*pointers, b, s, h, d, ctypes.c_float(softmax_scale(case)), int(case.causal), stream)
        if missing:
            raise RuntimeError(f"the library holds no kernel of head dim {d}")
        return out

    return Prepared(run, inputs=(q, k, v))
