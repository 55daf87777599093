"""flash-attn 1.0.9's own CUDA kernels, forward and backward, through a shared library built from its sources.

The package no longer builds with current PyTorch, its kernels do: ``simulator/measure/cuda/fa1_driver.cu`` launches
them as ``fmha_api.cpp`` does, and its head says how to build it. ``IOSIM_FLASH_ATTN_1`` is the library's path.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import Prepared, beyond_whole_tensors, random_tensor, softmax_scale, torch_module

LIBRARY_VARIABLE = "IOSIM_FLASH_ATTN_1"


def need_library() -> str | None:
    """None when the library is named and there, else the reason."""
    path = os.environ.get(LIBRARY_VARIABLE, "")
    if not path:
        return f"{LIBRARY_VARIABLE} does not name a library built with simulator/measure/cuda/fa1_driver.cu"
    return None if os.path.exists(path) else f"{LIBRARY_VARIABLE}={path}: no such file"


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ[LIBRARY_VARIABLE])


def refuse(case: Case) -> str | None:
    """Why flash-attn 1.x cannot run a case, or None."""
    if case.dtype != "fp16" or case.head_dim not in (64, 128) or case.value_dim != case.head_dim:
        return "the library here holds flash-attn 1.x in fp16 at head dims 64 and 128"
    if case.heads != case.kv_heads or case.seqlen_q != case.seqlen_k:
        return "flash-attn 1.x is measured with kv_heads = heads and seqlen_q = seqlen_k"
    if beyond_whole_tensors(case) or case.deterministic:
        return "flash-attn 1.x takes no window, pages, capacity, and its splits and order are its own here"
    return None


def _pointer(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def prepare(case: Case) -> Prepared:
    """Packed QKV of (batch, seqlen, 3, heads, head_dim), as the package's own benchmarks pass it."""
    torch = torch_module()
    library, b, s, h, d = _library(), case.batch, case.seqlen_q, case.heads, case.head_dim
    packed = random_tensor(case, b, s, 3, h, d)
    q, k, v = packed.unbind(2)
    lengths = torch.arange(0, (b + 1) * s, s, device="cuda", dtype=torch.int32)
    rng = torch.zeros(2, device="cuda", dtype=torch.int64)
    padded = -(-s // 16) * 16

    def scratch(*shape: int) -> Any:
        return torch.empty(*shape, device="cuda", dtype=torch.float32)

    out, lse = torch.empty(b, s, h, d, device="cuda", dtype=packed.dtype), scratch(b, h, padded)
    out_tmp = scratch(b, s, h, d)
    shape = (b, s, h, d, ctypes.c_float(softmax_scale(case)), int(case.causal), _pointer(rng))

    def stream() -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def forward() -> Any:
        tensors = (q, k, v, out, out_tmp, lse, lengths)
        library.fa1_fwd(*map(_pointer, tensors), *shape, stream())
        return out

    if case.pass_ == "fwd":
        return Prepared(forward, inputs=(q, k, v))
    forward()
    d_out = torch.randn_like(out)
    d_packed = torch.empty_like(packed)
    grads = d_packed.unbind(2)
    dq_tmp, d_sum = scratch(b, s, h, d), scratch(b, h, padded)

    def backward() -> Any:
        arguments = (*map(_pointer, (q, k, v, out, d_out, *grads, dq_tmp, lse, d_sum, lengths)), *shape, stream())
        splits = library.fa1_bwd(*arguments, 1, 0)
        if splits > 1:
            dq_tmp.zero_()
        library.fa1_bwd(*arguments, 0, splits)
        if splits > 1:
            grads[0].copy_(dq_tmp)
        return grads

    return Prepared(backward, inputs=(q, k, v, d_out))
