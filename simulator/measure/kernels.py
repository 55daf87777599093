"""Registry of the real kernels that can be measured, each with the reason why not when it cannot run here.

Every forward/backward is called through the operator below autograd, so that a case launches the kernel and nothing else.
Layouts: flash kernels get (batch, seqlen, heads, head_dim) contiguous tensors, as models hold them; unfused attention gets
(batch·heads, seqlen, head_dim). Inputs are random normal (zeros draw less power and run faster).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.errors import InputError
from simulator.measure.cases import Case


@dataclass
class Prepared:
    """A case ready to run. ``run`` launches the case's kernels; ``result`` of the last run is what ``run`` returned."""

    run: Callable[[], Any]
    graph_safe: bool = True
    inputs: tuple = ()


@dataclass(frozen=True)
class Kernel:
    """One implementation: how to prepare a case on it, and what it needs.

    ``refuse`` returns the reason why a case cannot run, or None.
    """

    name: str
    algorithms: tuple[str, ...]
    describe: str
    needs: Callable[[], str | None]
    refuse: Callable[[Case], str | None]
    prepare: Callable[[Case], Prepared]


def _torch():
    return importlib.import_module("torch")


def _dtype(case: Case):
    torch = _torch()
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[case.dtype]


def random_tensor(case: Case, *shape: int):
    """Random-normal tensor of the case's dtype on the GPU (fp8 is drawn in bf16 and converted)."""
    torch = _torch()
    if case.dtype == "fp8":
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    return torch.randn(*shape, device="cuda", dtype=_dtype(case))


def qkv(case: Case):
    """Q, K, V as (batch, seqlen, heads, head_dim)."""
    q = random_tensor(case, case.batch, case.seqlen_q, case.heads, case.head_dim)
    k = random_tensor(case, case.batch, case.seqlen_k, case.kv_heads, case.head_dim)
    v = random_tensor(case, case.batch, case.seqlen_k, case.kv_heads, case.value_dim)
    return q, k, v


def _scale(case: Case) -> float:
    return case.head_dim**-0.5


# ---------------------------------------------------------------- what is installed


def need_cuda() -> str | None:
    """None when PyTorch sees a CUDA GPU, else the reason."""
    try:
        torch = _torch()
    except ImportError:
        return "PyTorch is not installed (pip install 'iosim[measure]')"
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA GPU"


def _need_module(name: str, hint: str, hopper: bool = False) -> Callable[[], str | None]:
    def check() -> str | None:
        if reason := need_cuda():
            return reason
        if hopper and _torch().cuda.get_device_capability() != (9, 0):
            return "needs a GPU of compute capability 9.0"
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken binary wheel raises OSError, a wrong version AttributeError
            return f"{name} cannot be imported ({type(error).__name__}: {str(error)[:80]}); {hint}"
        return None

    return check


def _need_cudnn() -> str | None:
    if reason := need_cuda():
        return reason
    return None if _torch().backends.cudnn.is_available() else "cuDNN is not available in this PyTorch"


# ---------------------------------------------------------------- unfused attention


def _eager_refuse(case: Case) -> str | None:
    if case.dtype == "fp8":
        return "unfused attention runs in bf16 or fp16 here"
    if case.window or case.page_size or case.kv_capacity or case.num_splits:
        return "unfused attention takes no window, pages, capacity or splits here"
    if case.pass_ == "bwd" and case.heads != case.kv_heads:
        return "unfused backward is measured with kv_heads = heads"
    return None


def _causal_mask(case: Case):
    torch = _torch()
    mask = torch.full((case.seqlen_q, case.seqlen_k), float("-inf"), device="cuda", dtype=_dtype(case))
    return torch.triu(mask, diagonal=1 + case.seqlen_k - case.seqlen_q)


def _expand(x, group: int):
    """(batch, kv_heads, seqlen, d) to (batch·heads, seqlen, d), copying K or V to every query head of its group."""
    batch, kv_heads, seqlen, dim = x.shape
    return x.unsqueeze(2).expand(batch, kv_heads, group, seqlen, dim).reshape(batch * kv_heads * group, seqlen, dim)


def _eager_prepare(case: Case) -> Prepared:
    torch = _torch()
    group = case.heads // case.kv_heads
    q = random_tensor(case, case.batch * case.heads, case.seqlen_q, case.head_dim)
    k = random_tensor(case, case.batch, case.kv_heads, case.seqlen_k, case.head_dim)
    v = random_tensor(case, case.batch, case.kv_heads, case.seqlen_k, case.value_dim)
    mask = _causal_mask(case) if case.causal else None
    blank = q.new_empty(1, 1, 1)
    scale = _scale(case)

    def forward():
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

    def backward():
        d_v = torch.bmm(p.transpose(1, 2), d_out)
        d_p = torch.bmm(d_out, values.transpose(1, 2))
        d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype)
        del d_p
        d_q = torch.baddbmm(blank, d_s, keys, beta=0, alpha=scale)
        d_k = torch.baddbmm(blank, d_s.transpose(1, 2), q, beta=0, alpha=scale)
        return d_q, d_k, d_v

    return Prepared(backward, inputs=(q, k, v, d_out))


# ---------------------------------------------------------------- FA1's schedule


def _fa1_refuse(case: Case) -> str | None:
    if case.pass_ != "fwd" or case.dtype == "fp8" or case.heads != case.kv_heads or case.head_dim not in (64, 128):
        return "the FA1 kernel here is forward, bf16 or fp16, kv_heads = heads, head dim 64 or 128"
    if case.window or case.page_size or case.kv_capacity or case.num_splits:
        return "the FA1 kernel takes no window, pages, capacity or splits"
    if case.causal and case.seqlen_q > case.seqlen_k:
        return "the FA1 kernel wants seqlen_q <= seqlen_k when causal"
    return None


def _fa1_prepare(case: Case) -> Prepared:
    from simulator.measure import fa1_triton

    q = random_tensor(case, case.batch * case.heads, case.seqlen_q, case.head_dim)
    k = random_tensor(case, case.batch * case.heads, case.seqlen_k, case.head_dim)
    v = random_tensor(case, case.batch * case.heads, case.seqlen_k, case.head_dim)
    workspace = fa1_triton.allocate(q)
    return Prepared(
        lambda: fa1_triton.forward(q, k, v, case.causal, _scale(case), workspace), inputs=(q, k, v)
    )


# ---------------------------------------------------------------- FA2 in PyTorch


def _fa2_refuse(case: Case) -> str | None:
    if case.dtype == "fp8" or case.head_dim > 256 or case.value_dim != case.head_dim:
        return "PyTorch's FA2 takes bf16 or fp16, head dim <= 256, one head dim"
    if case.page_size or case.kv_capacity:
        return "PyTorch's FA2 operator takes no pages or capacity"
    if case.num_splits not in (None, 1):
        return "PyTorch's FA2 operator chooses its splits; only 1 can be forced (through its varlen entry)"
    return None


def _windows(case: Case) -> tuple[int | None, int | None]:
    if case.window is None:
        return None, None
    left, right = case.window
    return (left if left >= 0 else None), (0 if case.causal else (right if right >= 0 else None))


def _fa2_prepare(case: Case) -> Prepared:
    torch = _torch()
    q, k, v = qkv(case)
    left, right = _windows(case)
    forward_op = torch.ops.aten._flash_attention_forward
    options = {"scale": _scale(case), "window_size_left": left, "window_size_right": right}
    lengths = (case.seqlen_q, case.seqlen_k)
    if case.pass_ == "bwd":
        out, lse, rng, unused, _ = forward_op(q, k, v, None, None, *lengths, 0.0, case.causal, False, **options)
        d_out = torch.randn_like(out)
        backward_op = torch.ops.aten._flash_attention_backward

        def backward():
            if case.deterministic:
                torch.use_deterministic_algorithms(True, warn_only=True)
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


# ---------------------------------------------------------------- FA3 (Hopper)


def _fa3_refuse(case: Case) -> str | None:
    if case.pass_ != "fwd":
        return "the FA3 wheels carry no backward; use flash_attn_4_sm90 or cudnn_sm90"
    if case.algorithm == "fa3" and (case.page_size or case.kv_capacity):
        return "pages and capacity belong to flash_attn_3_kvcache"
    return None


def _fa3_prepare(case: Case) -> Prepared:
    interface = importlib.import_module("flash_attn_interface")
    q, k, v = qkv(case)
    window = case.window or (-1, -1)
    splits = 1 if case.num_splits is None else case.num_splits

    def run():
        return interface.flash_attn_func(
            q, k, v, softmax_scale=_scale(case), causal=case.causal, window_size=window, num_splits=splits
        )

    return Prepared(run, inputs=(q, k, v))


def _fa3_kvcache_prepare(case: Case) -> Prepared:
    """Dense cache without ``cache_seqlens`` when ``kv_capacity`` is blank; with it (and the capacity allocated) when given."""
    torch = _torch()
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

    def run():
        return interface.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            page_table=table,
            softmax_scale=_scale(case),
            causal=case.causal,
            window_size=window,
            num_splits=case.num_splits or 0,
        )

    return Prepared(run, inputs=(q, k, v, table))


# ---------------------------------------------------------------- FA3-class kernels: cuDNN, CuTe


def _cudnn_refuse(case: Case) -> str | None:
    if case.dtype == "fp8" or case.head_dim > 128 or case.head_dim % 8:
        return "cuDNN attention here takes bf16 or fp16 and head dims up to 128"
    if case.window or case.page_size or case.kv_capacity or case.num_splits:
        return "cuDNN attention here takes no window, pages, capacity or splits"
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "cuDNN's causal mask is top-left in PyTorch; only seqlen_q = seqlen_k means the same"
    return None


def _cudnn_prepare(case: Case) -> Prepared:
    torch = _torch()
    q, k, v = (x.transpose(1, 2) for x in qkv(case))
    forward_op = torch.ops.aten._scaled_dot_product_cudnn_attention
    training = case.pass_ == "bwd"
    scale = _scale(case)
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

    def backward():
        grads = backward_op(
            d_out, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, case.causal, scale=scale
        )
        return tuple(grad.transpose(1, 2) for grad in grads)

    return Prepared(backward, inputs=tuple(x.transpose(1, 2) for x in (q, k, v, d_out)))


def _cute_refuse(case: Case) -> str | None:
    if case.pass_ != "bwd" or case.dtype == "fp8":
        return "flash_attn_4_sm90 is measured in backward, bf16 or fp16"
    return None


def _cute_prepare(case: Case) -> Prepared:
    torch = _torch()
    interface = importlib.import_module("flash_attn.cute.interface")
    q, k, v = qkv(case)
    left, right = _windows(case)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, case.seqlen_q, case.seqlen_k, 0.0, case.causal, False, scale=_scale(case),
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    d_out = torch.randn_like(out)

    def backward():
        return interface._flash_attn_bwd(
            q, k, v, out, d_out, lse, softmax_scale=_scale(case), causal=case.causal,
            window_size_left=left, window_size_right=right, deterministic=case.deterministic,
        )  # fmt: skip

    return Prepared(backward, graph_safe=False, inputs=(q, k, v, d_out))


_FA3_HINT = "install a FlashAttention-3 wheel (tokenspeed-fa3 or fa3-fwd)"
_CUTE_HINT = "install flash-attn-4 with nvidia-cutlass-dsl"

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("torch_eager", ("standard",), "unfused PyTorch: baddbmm, (mask), softmax, bmm", need_cuda,
               _eager_refuse, _eager_prepare),
        Kernel("flash_attn_1_paper", ("fa1",), "FA1's schedule in Triton: K/V outer, O and statistics through HBM",
               _need_module("triton", "it comes with PyTorch on Linux"), _fa1_refuse, _fa1_prepare),
        Kernel("torch_flash", ("fa2",), "PyTorch's FlashAttention-2", need_cuda, _fa2_refuse, _fa2_prepare),
        Kernel("torch_flash_splitkv", ("flash_decoding",), "PyTorch's FlashAttention-2, split-KV path", need_cuda,
               _fa2_refuse, _fa2_prepare),
        Kernel("flash_attn_3", ("fa3",), "FlashAttention-3 forward", _need_module("flash_attn_interface", _FA3_HINT, True),
               _fa3_refuse, _fa3_prepare),
        Kernel("flash_attn_3_kvcache", ("flash_decoding",), "FlashAttention-3 decode with a KV cache",
               _need_module("flash_attn_interface", _FA3_HINT, True), _fa3_refuse, _fa3_kvcache_prepare),
        Kernel("flash_attn_4_sm90", ("fa3",), "CuTe-DSL FlashAttention, Hopper backward",
               _need_module("flash_attn.cute.interface", _CUTE_HINT, True), _cute_refuse, _cute_prepare),
        Kernel("cudnn_sm90", ("fa3",), "cuDNN fused attention", _need_cudnn, _cudnn_refuse, _cudnn_prepare),
    )
}  # fmt: skip

DEFAULT_IMPLEMENTATION = {
    "standard": "torch_eager",
    "fa1": "flash_attn_1_paper",
    "fa2": "torch_flash",
    "fa3": "flash_attn_3",
    "flash_decoding": "flash_attn_3_kvcache",
}


def kernel_of(case: Case) -> Kernel:
    """The registry entry of a case; :class:`InputError` names the known implementations of its algorithm."""
    name = case.implementation or DEFAULT_IMPLEMENTATION[case.algorithm]
    kernel = KERNELS.get(name)
    if kernel is None or case.algorithm not in kernel.algorithms:
        known = ", ".join(k.name for k in KERNELS.values() if case.algorithm in k.algorithms)
        raise InputError(f"{case.case_id}: implementation={name!r} does not run {case.algorithm}; known: {known}")
    return kernel


def reference_output(case: Case, prepared: Prepared):
    """float32 attention of the prepared inputs, shaped like the kernel's output, and its Q, K, V gradients when backward."""
    torch = _torch()
    q, k, v, *rest = prepared.inputs
    group = case.heads // case.kv_heads

    def standard_layout(x, heads):  # to (batch, heads, seqlen, d)
        if x.dim() == 3:
            return x.view(case.batch, heads, *x.shape[1:]).float()
        if case.implementation == "torch_eager":
            return x.float()
        return x.transpose(1, 2).float()

    table = rest[0] if case.page_size else None
    if table is not None:
        k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
    qf = standard_layout(q, case.heads).requires_grad_(case.pass_ == "bwd")
    kf, vf = (standard_layout(x, case.kv_heads)[:, :, : case.seqlen_k] for x in (k, v))
    kf, vf = (x.contiguous().requires_grad_(case.pass_ == "bwd") for x in (kf, vf))
    scores = qf @ kf.repeat_interleave(group, 1).transpose(2, 3) * _scale(case)
    row = torch.arange(case.seqlen_q, device="cuda")[:, None] + case.seqlen_k - case.seqlen_q
    column = torch.arange(case.seqlen_k, device="cuda")[None]
    left, right = case.window or (-1, -1)
    right = 0 if case.causal else right
    hidden = torch.zeros(case.seqlen_q, case.seqlen_k, device="cuda", dtype=torch.bool)
    if left >= 0:
        hidden |= column < row - left
    if right >= 0:
        hidden |= column > row + right
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).nan_to_num(0.0)
    out = weights @ vf.repeat_interleave(group, 1)
    back = (lambda x: x.flatten(0, 1)) if q.dim() == 3 else (lambda x: x.transpose(1, 2))
    if case.pass_ == "fwd":
        return back(out)
    d_out = standard_layout(rest[0], case.heads)
    return tuple(back(grad) for grad in torch.autograd.grad(out, (qf, kf, vf), d_out))


def relative_error(case: Case, prepared: Prepared) -> float:
    """‖kernel − float32 reference‖ / ‖reference‖, the worst over the outputs."""
    torch = _torch()
    got = prepared.run()
    torch.cuda.synchronize()
    want = reference_output(case, prepared)
    pairs = [(got, want)] if case.pass_ == "fwd" else list(zip(got, want, strict=True))
    return max(
        float((a.float().reshape(b.shape) - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs
    )
