"""Unfused attention as public benchmarks call it, on (batch, seqlen, heads, head_dim) tensors: with layout copies.

``torch_eager_bshd`` follows the baseline of FlashAttention's benchmarks (QKV packed), backward by autograd;
``torch_matmul_bshd`` that of xformers' decoding benchmark, whose expanded K and V ``torch.matmul`` copies once more.
"""

from __future__ import annotations

from typing import Any

from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import (
    Prepared,
    beyond_whole_tensors,
    qkv,
    random_tensor,
    softmax_scale,
    torch_module,
)


def eager_refuse(case: Case) -> str | None:
    """Why the benchmarks' baseline cannot run a case, or None."""
    if case.dtype == "fp8" or case.heads != case.kv_heads or case.seqlen_q != case.seqlen_k:
        return "the benchmarks' unfused baseline runs bf16 or fp16, kv_heads = heads and seqlen_q = seqlen_k"
    if beyond_whole_tensors(case):
        return "unfused attention takes no window, pages, capacity or splits here"
    return None


def matmul_refuse(case: Case) -> str | None:
    """Why the decoding benchmark's baseline cannot run a case, or None."""
    if case.dtype == "fp8" or case.pass_ != "fwd" or case.causal or case.heads % case.kv_heads:
        return "the decoding baseline runs bf16 or fp16 forward without a mask"
    if beyond_whole_tensors(case):
        return "unfused attention takes no window, pages, capacity or splits here"
    return None


def eager_prepare(case: Case) -> Prepared:
    """baddbmm of copied Q and transposed K, a mask made anew, softmax, einsum with V."""
    torch = torch_module()
    b, s, h, d = case.batch, case.seqlen_q, case.heads, case.head_dim
    scale, backward = softmax_scale(case), case.pass_ == "bwd"
    packed = random_tensor(case, b, s, 3, h, d).requires_grad_(backward)

    def forward() -> Any:
        q, k, v = packed.unbind(2)
        rows = q.permute(0, 2, 1, 3).reshape(b * h, s, d)
        columns = k.permute(0, 2, 3, 1).reshape(b * h, d, s)
        scores = torch.baddbmm(q.new_empty(b * h, s, s), rows, columns, beta=0, alpha=scale).view(b, h, s, s)
        if case.causal:
            mask = torch.triu(torch.full((s, s), -10000.0, device="cuda"), 1)
            scores = scores + mask.to(dtype=scores.dtype)
        weights = torch.softmax(scores, dim=-1)
        return torch.einsum("bhts,bshd->bthd", weights, v).to(q.dtype)

    inputs = packed.detach().unbind(2)
    if not backward:
        return Prepared(forward, inputs=inputs)
    with torch.enable_grad():  # measuring is otherwise done without
        out = forward()
    d_out = random_tensor(case, *out.shape)
    return Prepared(
        lambda: torch.autograd.grad(out, packed, d_out, retain_graph=True)[0].unbind(2), False, inputs=(*inputs, d_out)
    )


def matmul_prepare(case: Case) -> Prepared:
    """K and V expanded to the query heads, reshaped (a copy), permuted, and given to ``torch.matmul`` (another)."""
    torch = torch_module()
    q, k, v = qkv(case)
    b, m, kv, d = k.shape
    group = case.heads // case.kv_heads
    scale = softmax_scale(case)

    def forward() -> Any:
        keys, values = (
            x[:, :, :, None].expand(b, m, kv, group, d).reshape(b, m, kv * group, d).permute(0, 2, 1, 3) for x in (k, v)
        )
        weights = (torch.matmul(q.permute(0, 2, 1, 3), keys.transpose(-1, -2))).softmax(-1) * scale
        return torch.matmul(weights, values).permute(0, 2, 1, 3)

    return Prepared(forward, inputs=(q, k, v))
