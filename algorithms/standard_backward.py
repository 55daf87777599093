"""Standard attention, backward, as autograd runs it: five S-sized matrices through HBM.

    dV  = P^T dO                       (batched GEMM)
    dP  = dO V^T                       (batched GEMM)
    dPP = dP * P                       (element-wise product, rounded)
    dS  = dPP - P * rowsum(dPP)        (row-wise kernel)
    dQ  = scale * dS K,  dK = scale * dS^T Q   (batched GEMMs)

P is what the forward pass kept. With dropout dP passes through ``dP * mask / (1 - dropout)``, and dV takes P dropped,
which was kept too; with a soft cap dS passes through :mod:`algorithms.standard_softcap`. With fewer KV heads than query
heads, dK and dV of every query head are summed afterwards; K and V are read by KV head, which the copies that autograd
keeps would only make larger.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms.backward_helpers import gradient_tensors, group_sum
from algorithms.common import compulsory_bytes
from algorithms.kernel_tables import contiguous_elementwise_kernel, softmax_backward_kernel
from algorithms.standard import CALLS, copied, gemm, score_tensor
from algorithms.standard_gemm import Product
from algorithms.standard_masks import drop_backward, dropout_tensors
from algorithms.standard_rows import elementwise, softmax_backward
from algorithms.standard_softcap import cap_backward
from algorithms.tile_search import Tiles
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Kernel, Program, Tensor

#: Rows and threads of the kernel that sums gradients over a group of query heads.
SUM_ROWS, SUM_THREADS = 4, 128


def build_backward(
    problem: AttentionProblem, implementation: str, gpu: Profile, substitutions: list[str], tiles: Tiles
) -> Program:
    """The backward program: inputs Q K V P dO, outputs dQ dK dV."""
    p, call = problem, CALLS[implementation]
    t = {name: x for name, x in gradient_tensors(p, 64, 64).items() if name not in ("O", "LSE")}
    weights, dp, dpp, ds = (score_tensor(p, name) for name in ("P", "dP", "dPP", "dS"))
    scale = p.head_dim**-0.5
    grads: dict[str, Tensor] = {"dK": t["dK"], "dV": t["dV"]}
    if p.group > 1:
        heads = p.batch * p.heads
        grads = {n: Tensor(f"{n}_expanded", heads, x.rows, x.cols, p.dtype, "scratch", 64) for n, x in grads.items()}
    dropped = dropout_tensors(p, weights)
    used, dp_raw = (dropped["P_dropped"], score_tensor(p, "dP_dropped")) if dropped else (weights, dp)
    uncapped, tanh, cap = cap_backward(ds, p)
    d_out = t["dO"]
    before: list[Kernel] = []
    after: list[Kernel] = []
    grads["dQ"] = t["dQ"]
    if call.copies:
        d_out, before = copied("copy_dO", d_out)
        for name in ("dQ", "dK", "dV") if p.group == 1 else ("dQ",):
            grads[name] = replace(t[name], name=f"{name}_product", kind="scratch")
            after += copied(f"stack_{name}", grads[name], t[name], transposed=name == "dK", stacked=True)[1]
    products = dict(grads)
    rescale: dict[str, list[Kernel]] = {"dQ": [], "dK": []}
    if call.copies:
        # autograd of baddbmm multiplies by alpha in kernels of their own
        for name in rescale:
            out = grads[name]
            products[name] = replace(out, name=f"{name}_unscaled", kind="scratch")
            k = contiguous_elementwise_kernel(out.heads * out.rows * out.cols, p.dtype)
            rescale[name] = elementwise(
                f"scale_{name}",
                "scale",
                ((products[name], "q_head"),),
                out,
                k,
                params=lambda _row, _col: (("factor", scale),),
            )
    alpha = 1.0 if call.copies else scale

    def product(name: str, role: str, of: Product) -> list[Kernel]:
        return gemm(name, role, of, p, gpu, tiles)

    kernels = [
        *before,
        *product("dv_gemm", "grad_value", Product(used, d_out, grads["dV"], p.seqlen_q, transpose_a=True)),
        *product("dp_gemm", "grad_scores", Product(d_out, t["V"], dp_raw, p.head_dim_v, transpose_b=True)),
        *(drop_backward(dp_raw, dropped["dropout_mask"], dp, p) if dropped else []),
        *elementwise(
            "dp_times_p",
            "multiply",
            ((dp, "q_head"), (weights, "q_head")),
            dpp,
            contiguous_elementwise_kernel(dp.heads * dp.rows * dp.cols, p.dtype),
        ),
        softmax_backward(dpp, weights, ds, softmax_backward_kernel(p.seqlen_k, p.dtype, call.torch_release), gpu),
        *cap,
        *product("dq_gemm", "grad_query", Product(uncapped, t["K"], products["dQ"], p.seqlen_k, scale=alpha)),
        *rescale["dQ"],
        *product("dk_gemm", "grad_key", Product(uncapped, t["Q"], products["dK"], p.seqlen_q, True, scale=alpha)),
        *rescale["dK"],
        *after,
    ]
    if p.group > 1:
        kernels += [
            group_sum(f"sum_{name}", grads[name], t[name], p.group, SUM_ROWS, SUM_THREADS, gpu) for name in ("dK", "dV")
        ]
    live = compulsory_bytes(t.values()) + weights.bytes + dp.bytes + dpp.bytes + ds.bytes
    live += sum(x.bytes for x in (*dropped.values(), *tanh.values()))
    return Program(
        "standard",
        implementation,
        p,
        tuple(kernels),
        {"Q": t["Q"], "K": t["K"], "V": t["V"], "P": weights, "dO": t["dO"], **dropped, **tanh},
        {name: t[name] for name in ("dQ", "dK", "dV")},
        live + sum(x.bytes for x in (d_out, *grads.values()) if x.kind == "scratch"),
        substitutions=tuple(substitutions),
        attributes={"kernels": tuple(kernel.name for kernel in kernels)},
    )
