"""Inputs of a case on the GPU, and what a prepared case is.

Layouts: flash kernels get (batch, seqlen, heads, head_dim) contiguous tensors, as models hold them; unfused attention
gets (batch·heads, seqlen, head_dim). Inputs are random normal (zeros draw less power and run faster).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.measure.cases import Case


@dataclass
class Prepared:
    """A case ready to run: ``run`` launches its kernels and returns output or gradients; ``inputs`` are its tensors."""

    run: Callable[[], Any]
    graph_safe: bool = True
    inputs: tuple[Any, ...] = ()


def torch_module() -> Any:
    """PyTorch, imported on first use."""
    return importlib.import_module("torch")


def torch_dtype(case: Case) -> Any:
    """PyTorch's dtype of a case's Q, K and V."""
    torch = torch_module()
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[case.dtype]


def random_tensor(case: Case, *shape: int) -> Any:
    """Random-normal tensor of the case's dtype on the GPU (fp8 is drawn in bf16 and converted)."""
    torch = torch_module()
    if case.dtype == "fp8":
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return torch.randn(*shape, device="cuda", dtype=torch_dtype(case))


def qkv(case: Case) -> Any:
    """Q, K, V as (batch, seqlen, heads, head_dim)."""
    q = random_tensor(case, case.batch, case.seqlen_q, case.heads, case.head_dim)
    k = random_tensor(case, case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    v = random_tensor(case, case.batch, case.seqlen_k, case.kv_heads, case.value_dim)
    return q, k, v


def beyond_whole_tensors(case: Case) -> bool:
    """Whether a case has a window, pages, a cache capacity or splits, which only some kernels take."""
    return bool(case.window or case.page_size or case.kv_capacity or case.num_splits)


def softmax_scale(case: Case) -> float:
    """1/√head_dim."""
    scale: float = case.head_dim**-0.5
    return scale


def window_sides(case: Case) -> tuple[int | None, int | None]:
    """Window (left, right) as PyTorch's operators take it: None = unlimited; causal closes the right side."""
    if case.window is None:
        return None, None
    left, right = case.window
    return (left if left >= 0 else None), (0 if case.causal else (right if right >= 0 else None))
