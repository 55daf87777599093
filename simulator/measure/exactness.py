"""Compare a kernel's output (and gradients) with float32 attention of the same inputs on the GPU."""

from __future__ import annotations

import importlib
from typing import Any

from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import Prepared


def reference_output(case: Case, prepared: Prepared) -> Any:
    """float32 attention of the prepared inputs, shaped like the kernel's output, and its Q, K, V gradients when
    backward.
    """
    torch = importlib.import_module("torch")
    q, k, v, *rest = prepared.inputs
    group = case.heads // case.kv_heads

    def standard_layout(x: Any, heads: int) -> Any:  # to (batch, heads, seqlen, d)
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
    scores = qf @ kf.repeat_interleave(group, 1).transpose(2, 3) * case.head_dim**-0.5
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

    def back(x: Any) -> Any:  # to the kernel's layout
        return x.flatten(0, 1) if q.dim() == 3 else x.transpose(1, 2)

    if case.pass_ == "fwd":
        return back(out)
    d_out = standard_layout(rest[0], case.heads)
    return tuple(back(grad) for grad in torch.autograd.grad(out, (qf, kf, vf), d_out))


def relative_error(case: Case, prepared: Prepared) -> float:
    """‖kernel − float32 reference‖ / ‖reference‖, the worst over the outputs."""
    torch = importlib.import_module("torch")
    got = prepared.run()
    torch.cuda.synchronize()
    want = reference_output(case, prepared)
    pairs = [(got, want)] if case.pass_ == "fwd" else list(zip(got, want, strict=True))
    return max(float((a.float().reshape(b.shape) - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
