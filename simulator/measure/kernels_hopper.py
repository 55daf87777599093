"""Kernels for Hopper: FlashAttention-3 forward and decode, cuDNN attention, the CuTe-DSL backward."""

from __future__ import annotations

import importlib
from typing import Any

from simulator.errors import InputError
from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import (
    Prepared,
    beyond_whole_tensors,
    qkv,
    random_tensor,
    softmax_scale,
    torch_module,
    window_sides,
)

# ---------------------------------------------------------------- FA3 (Hopper)


def fa3_refuse(case: Case) -> str | None:
    """Why the FA3 wheels cannot run a case, or None."""
    if case.pass_ != "fwd":
        return "the FA3 wheels carry no backward; use flash_attn_4_sm90 or cudnn_sm90"
    if case.algorithm == "fa3" and (case.page_size or case.kv_capacity):
        return "pages and capacity belong to flash_attn_3_kvcache"
    return None


def fa3_prepare(case: Case) -> Prepared:
    """FA3 forward; a blank ``num_splits`` means 1, as in ``flash_attn_func``."""
    interface = importlib.import_module("flash_attn_interface")
    q, k, v = qkv(case)
    window = case.window or (-1, -1)
    splits = 1 if case.num_splits is None else case.num_splits

    def run() -> Any:
        return interface.flash_attn_func(
            q, k, v, softmax_scale=softmax_scale(case), causal=case.causal, window_size=window, num_splits=splits
        )

    return Prepared(run, inputs=(q, k, v))


def fa3_kvcache_prepare(case: Case) -> Prepared:
    """Dense cache without ``cache_seqlens`` when ``kv_capacity`` is blank; with it (and the capacity allocated) when
    given.
    """
    torch = torch_module()
    interface = importlib.import_module("flash_attn_interface")
    capacity = case.kv_capacity or case.seqlen_k
    q = random_tensor(case, case.batch, case.seqlen_q, case.heads, case.head_dim)
    lengths = table = None
    if case.kv_capacity is not None:
        lengths = torch.full((case.batch,), case.seqlen_k, device="cuda", dtype=torch.int32)
    if case.page_size:
        pages = -(-capacity // case.page_size)
        if pages * case.page_size != capacity:
            raise InputError(f"{case.case_id}: page_size={case.page_size} must divide the capacity {capacity}")
        order = torch.randperm(case.batch * pages, device="cuda")
        table = order.view(case.batch, pages).to(torch.int32)
        shape = (case.batch * pages, case.page_size, case.kv_heads)
    else:
        shape = (case.batch, capacity, case.kv_heads)
    k = random_tensor(case, *shape, case.head_dim)
    v = random_tensor(case, *shape, case.value_dim)
    window = case.window or (-1, -1)

    def run() -> Any:
        return interface.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            page_table=table,
            softmax_scale=softmax_scale(case),
            causal=case.causal,
            window_size=window,
            num_splits=case.num_splits or 0,
        )

    return Prepared(run, inputs=(q, k, v, table))


# ---------------------------------------------------------------- FA3-class kernels: cuDNN, CuTe


def cudnn_refuse(case: Case) -> str | None:
    """Why cuDNN attention cannot run a case, or None."""
    if case.dtype == "fp8" or case.head_dim > 128 or case.head_dim % 8:
        return "cuDNN attention here takes bf16 or fp16 and head dims up to 128"
    if beyond_whole_tensors(case):
        return "cuDNN attention here takes no window, pages, capacity or splits"
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "cuDNN's causal mask is top-left in PyTorch; only seqlen_q = seqlen_k means the same"
    return None


def cudnn_prepare(case: Case) -> Prepared:
    """cuDNN attention through PyTorch's operator."""
    torch = torch_module()
    q, k, v = (x.transpose(1, 2) for x in qkv(case))
    forward_op = torch.ops.aten._scaled_dot_product_cudnn_attention
    training = case.pass_ == "bwd"
    scale = softmax_scale(case)
    if not training:
        return Prepared(
            lambda: forward_op(q, k, v, None, False, 0.0, case.causal, False, scale=scale)[0].transpose(1, 2),
            inputs=tuple(x.transpose(1, 2) for x in (q, k, v)),
        )
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward_op(
        q, k, v, None, True, 0.0, case.causal, False, scale=scale
    )
    d_out = torch.randn_like(out)
    backward_op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward

    def backward() -> Any:
        grads = backward_op(
            d_out, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, case.causal, scale=scale
        )
        return tuple(grad.transpose(1, 2) for grad in grads)

    return Prepared(backward, inputs=tuple(x.transpose(1, 2) for x in (q, k, v, d_out)))


def cute_refuse(case: Case) -> str | None:
    """Why the CuTe kernel is not measured on a case, or None."""
    if case.pass_ != "bwd" or case.dtype == "fp8":
        return "flash_attn_4_sm90 is measured in backward, bf16 or fp16"
    return None


def cute_prepare(case: Case) -> Prepared:
    """The CuTe-DSL Hopper backward, fed with the output and LSE of an FA2 forward."""
    torch = torch_module()
    interface = importlib.import_module("flash_attn.cute.interface")
    q, k, v = qkv(case)
    left, right = window_sides(case)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        None,
        None,
        case.seqlen_q,
        case.seqlen_k,
        0.0,
        case.causal,
        False,
        scale=softmax_scale(case),
        window_size_left=left,
        window_size_right=right,
    )
    d_out = torch.randn_like(out)

    def backward() -> Any:
        return interface._flash_attn_bwd(
            q,
            k,
            v,
            out,
            d_out,
            lse,
            softmax_scale=softmax_scale(case),
            causal=case.causal,
            window_size_left=left,
            window_size_right=right,
            deterministic=case.deterministic,
        )

    return Prepared(backward, graph_safe=False, inputs=(q, k, v, d_out))
