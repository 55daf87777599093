"""Kernels that come with PyTorch: unfused attention, FA1's schedule in Triton, FlashAttention-2."""

from __future__ import annotations

from typing import Any

from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import (
    Prepared,
    beyond_whole_tensors,
    qkv,
    random_tensor,
    softmax_scale,
    torch_dtype,
    torch_module,
    window_sides,
)

# ---------------------------------------------------------------- unfused attention


def eager_refuse(case: Case) -> str | None:
    """Why unfused attention cannot run a case, or None."""
    if case.dtype == "fp8":
        return "unfused attention runs in bf16 or fp16 here"
    if beyond_whole_tensors(case):
        return "unfused attention takes no window, pages, capacity or splits here"
    if case.pass_ == "bwd" and case.heads != case.kv_heads:
        return "unfused backward is measured with kv_heads = heads"
    return None


def _causal_mask(case: Case) -> Any:
    torch = torch_module()
    mask = torch.full((case.seqlen_q, case.seqlen_k), float("-inf"), device="cuda", dtype=torch_dtype(case))
    return torch.triu(mask, diagonal=1 + case.seqlen_k - case.seqlen_q)


def _expand(x: Any, group: int) -> Any:
    """(batch, kv_heads, seqlen, d) to (batch·heads, seqlen, d), copying K or V to every query head of its group."""
    batch, kv_heads, seqlen, dim = x.shape
    return x.unsqueeze(2).expand(batch, kv_heads, group, seqlen, dim).reshape(batch * kv_heads * group, seqlen, dim)


def eager_prepare(case: Case) -> Prepared:
    """Unfused attention: baddbmm (scale as alpha), mask, softmax, bmm; backward as autograd would launch it."""
    torch = torch_module()
    group = case.heads // case.kv_heads
    q = random_tensor(case, case.batch * case.heads, case.seqlen_q, case.head_dim)
    k = random_tensor(case, case.batch, case.kv_heads, case.seqlen_k, case.head_dim)
    v = random_tensor(case, case.batch, case.kv_heads, case.seqlen_k, case.value_dim)
    mask = _causal_mask(case) if case.causal else None
    blank = q.new_empty(1, 1, 1)
    scale = softmax_scale(case)

    def forward() -> Any:
        keys, values = (_expand(k, group), _expand(v, group)) if group > 1 else (k.flatten(0, 1), v.flatten(0, 1))
        scores = torch.baddbmm(blank, q, keys.transpose(1, 2), beta=0, alpha=scale)
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(weights, values), weights

    if case.pass_ == "fwd":
        return Prepared(lambda: forward()[0], inputs=(q, k, v))
    _, p = forward()
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    d_out = torch.randn_like(q)

    def backward() -> Any:
        d_v = torch.bmm(p.transpose(1, 2), d_out)
        d_p = torch.bmm(d_out, values.transpose(1, 2))
        d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype)
        del d_p
        d_q = torch.baddbmm(blank, d_s, keys, beta=0, alpha=scale)
        d_k = torch.baddbmm(blank, d_s.transpose(1, 2), q, beta=0, alpha=scale)
        return d_q, d_k, d_v

    return Prepared(backward, inputs=(q, k, v, d_out))


# ---------------------------------------------------------------- FA1's schedule


def fa1_refuse(case: Case) -> str | None:
    """Why the FA1 kernel cannot run a case, or None."""
    if case.pass_ != "fwd" or case.dtype == "fp8" or case.heads != case.kv_heads or case.head_dim not in (64, 128):
        return "the FA1 kernel here is forward, bf16 or fp16, kv_heads = heads, head dim 64 or 128"
    if beyond_whole_tensors(case):
        return "the FA1 kernel takes no window, pages, capacity or splits"
    if case.causal and case.seqlen_q > case.seqlen_k:
        return "the FA1 kernel wants seqlen_q <= seqlen_k when causal"
    return None


def fa1_prepare(case: Case) -> Prepared:
    """FA1's schedule, on (batch·heads, seqlen, head_dim) tensors."""
    from simulator.measure import fa1_triton

    q = random_tensor(case, case.batch * case.heads, case.seqlen_q, case.head_dim)
    k = random_tensor(case, case.batch * case.heads, case.seqlen_k, case.head_dim)
    v = random_tensor(case, case.batch * case.heads, case.seqlen_k, case.head_dim)
    workspace = fa1_triton.allocate(q)
    return Prepared(lambda: fa1_triton.forward(q, k, v, case.causal, softmax_scale(case), workspace), inputs=(q, k, v))


# ---------------------------------------------------------------- FA2 in PyTorch


def fa2_refuse(case: Case) -> str | None:
    """Why PyTorch's FA2 cannot run a case, or None."""
    if case.dtype == "fp8" or case.head_dim > 256 or case.value_dim != case.head_dim:
        return "PyTorch's FA2 takes bf16 or fp16, head dim <= 256, one head dim"
    if case.page_size or case.kv_capacity:
        return "PyTorch's FA2 operator takes no pages or capacity"
    if case.num_splits not in (None, 1):
        return "PyTorch's FA2 operator chooses its splits; only 1 can be forced (through its varlen entry)"
    return None


def fa2_prepare(case: Case) -> Prepared:
    """PyTorch's FA2; ``num_splits=1`` goes through its varlen entry, the only one that never splits."""
    torch = torch_module()
    q, k, v = qkv(case)
    left, right = window_sides(case)
    forward_op = torch.ops.aten._flash_attention_forward
    options = {"scale": softmax_scale(case), "window_size_left": left, "window_size_right": right}
    lengths = (case.seqlen_q, case.seqlen_k)
    if case.pass_ == "bwd":
        out, lse, rng, unused, _ = forward_op(q, k, v, None, None, *lengths, 0.0, case.causal, False, **options)
        d_out = torch.randn_like(out)
        backward_op = torch.ops.aten._flash_attention_backward

        def backward() -> Any:
            if case.deterministic:
                torch.use_deterministic_algorithms(True)
            try:
                return backward_op(
                    d_out, q, k, v, out, lse, None, None, *lengths, 0.0, case.causal, rng, unused, **options
                )
            finally:
                if case.deterministic:
                    torch.use_deterministic_algorithms(False)

        torch.utils.deterministic.fill_uninitialized_memory = False
        return Prepared(backward, inputs=(q, k, v, d_out))
    if case.num_splits == 1:
        cu_q = torch.arange(0, (case.batch + 1) * case.seqlen_q, case.seqlen_q, device="cuda", dtype=torch.int32)
        cu_k = torch.arange(0, (case.batch + 1) * case.seqlen_k, case.seqlen_k, device="cuda", dtype=torch.int32)
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        return Prepared(
            lambda: forward_op(*flat, cu_q, cu_k, *lengths, 0.0, case.causal, False, **options)[0].view_as(q),
            inputs=(q, k, v),
        )
    return Prepared(
        lambda: forward_op(q, k, v, None, None, *lengths, 0.0, case.causal, False, **options)[0], inputs=(q, k, v)
    )
