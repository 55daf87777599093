"""Standard attention, forward: S = QK^T, softmax and PV as PyTorch runs them eagerly, S and P in HBM.

    S = scale * Q K^T           (batched GEMM; S rounded to the inputs' dtype)
    S = cap * tanh(S / cap)     (only with a soft cap: three kernels, :mod:`algorithms.standard_softcap`)
    S = S + mask                (only with a mask; a causal one is a [seqlen_q, seqlen_k] tensor like any other)
    P = softmax(S)              (row-wise kernel, chosen by row length)
    P = dropout(P)              (only with dropout)
    O = P V                     (batched GEMM)

With fewer KV heads than query heads, K and V are first copied to every query head. Nothing is skipped: a causal mask
makes the work larger, not smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from algorithms.common import (
    Implementation,
    check_capabilities,
    check_supported,
)
from algorithms.gemm_tiles import gemm_with, shipped_kernel
from algorithms.gemm_tiles import tile_spaces as tile_spaces  # what the search of tiles asks of an algorithm's module
from algorithms.kernel_tables import concatenation_kernel, softmax_forward_kernel, strided_copy_kernel
from algorithms.kernels_gemm import GemmKernel
from algorithms.passes import build_passes
from algorithms.standard_gemm import Product, batched_gemm, memset
from algorithms.standard_masks import apply_mask, drop, dropout_tensors, hides_by_position, mask_from_ones, mask_tensor
from algorithms.standard_rows import elementwise, softmax_forward
from algorithms.standard_softcap import cap_scores, tanh_tensor
from algorithms.tile_search import Tiles
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Kernel, Program, Tensor


@dataclass(frozen=True)
class Call:
    """How PyTorch is called: the release whose softmax kernels run, and whether Q, K, V, dO and the gradients lie as
    (batch, seqlen, heads, head_dim), so that each is copied to or from a matrix a head. ``matmul``: by ``torch.matmul``
    on expanded K and V, which copies them once more where batch and heads do not merge (S is scaled in the product)."""

    torch_release: str
    copies: bool
    matmul: bool = False


CALLS = {
    "torch_eager": Call("2.11", False),
    "torch_eager_bshd": Call("2.11", True),
    "torch_eager_2.1_bshd": Call("2.1", True),
    "torch_eager_2.0_bshd": Call("2.0", True),
    "torch_matmul_bshd": Call("2.11", False, True),
    "torch_matmul_2.1_bshd": Call("2.1", False, True),
}


def _implementation(name: str, source: str, training: bool = True) -> Implementation:
    return Implementation(
        name,
        "standard",
        frozenset({"mma_sync"}),
        source,
        # PyTorch's products and row kernels add in one order always
        features=frozenset({"deterministic", "mask", "head_dim_v", "window", "dropout", "softcap"}),
        passes=("fwd", "bwd", "fwd_bwd") if training else ("fwd",),
    )


_BENCHMARKS = "flash-attention:benchmarks/benchmark_flash_attention.py attention_pytorch; softmax kernels of PyTorch"
_DECODING = "xformers:xformers/benchmarks/benchmark_attn_decoding.py AttentionDecodingPyTorchRepeat; softmax of PyTorch"
IMPLEMENTATIONS = {
    "torch_eager": _implementation(
        "torch_eager",
        "torch.baddbmm, add, softmax, bmm (PyTorch 2.11); aten/src/ATen/native/cuda; cuBLAS of CUDA 13.0",
    ),
    "torch_eager_bshd": _implementation("torch_eager_bshd", f"{_BENCHMARKS} 2.11"),
    "torch_eager_2.1_bshd": _implementation("torch_eager_2.1_bshd", f"{_BENCHMARKS} 2.1 to 2.3"),
    "torch_eager_2.0_bshd": _implementation("torch_eager_2.0_bshd", f"{_BENCHMARKS} 2.0 and before"),
    "torch_matmul_bshd": _implementation("torch_matmul_bshd", f"{_DECODING} 2.11", training=False),
    "torch_matmul_2.1_bshd": _implementation("torch_matmul_2.1_bshd", f"{_DECODING} 2.1 to 2.3", training=False),
}
DEFAULT = "torch_eager"
#: Rows and columns of an L2 block of S and P: a C tile of QK^T. Wide ones are tracked by the engine's own rule.
SCORE_BLOCK_ROWS, SCORE_BLOCK_COLUMNS = 128, 256


def score_tensor(problem: AttentionProblem, name: str) -> Tensor:
    """An S-shaped matrix of every head."""
    p = problem
    block_cols = min(SCORE_BLOCK_COLUMNS, p.seqlen_k)
    return Tensor(name, p.batch * p.heads, p.seqlen_q, p.seqlen_k, p.dtype, "scratch", SCORE_BLOCK_ROWS, block_cols)


def io_tensors(problem: AttentionProblem) -> dict[str, Tensor]:
    """Q, K, V, O; a block is 64 rows, the finest that GEMM tiles step by."""
    p = problem
    q_heads, kv_heads = p.batch * p.heads, p.batch * p.kv_heads
    return {
        "Q": Tensor("Q", q_heads, p.seqlen_q, p.head_dim, p.dtype, "input", 64),
        "K": Tensor("K", kv_heads, p.seqlen_k, p.head_dim, p.dtype, "input", 64),
        "V": Tensor("V", kv_heads, p.seqlen_k, p.head_dim_v, p.dtype, "input", 64),
        "O": Tensor("O", q_heads, p.seqlen_q, p.head_dim_v, p.dtype, "output", 64),
    }


def expand_heads(source: Tensor, problem: AttentionProblem) -> tuple[Tensor, list[Kernel]]:
    """A copy of ``source`` (K or V) for every query head, and the kernels that make it; itself if heads are equal."""
    if problem.group == 1:
        return source, []
    p = problem
    copy = Tensor(f"{source.name}_expanded", p.batch * p.heads, source.rows, source.cols, p.dtype, "scratch", 64)
    k = strided_copy_kernel(copy.heads * copy.rows * copy.cols, p.dtype)
    kernels = elementwise(f"expand_{source.name}", "copy", ((source, "kv_head"),), copy, k)
    return copy, [
        replace(kernel, coords={**kernel.coords, "kv_head": kernel.coords["q_head"] // p.group}) for kernel in kernels
    ]


#: Bytes that L2 sends for one of a transposed copy: its threads read 2 bytes of a row of 32-byte sectors each, and L1
#: keeps few of them for the next column. 26.6 to 29.2 sectors for 32 elements, by ncu on an H200
#: (launches_published_run1.csv, unfused_bshd and decode_matmul).
TRANSPOSED_OVERFETCH = 13.5


def copied(
    name: str, source: Tensor, into: Tensor | None = None, transposed: bool = False, stacked: bool = False
) -> tuple[Tensor, list[Kernel]]:
    """``source`` in another layout, ``into`` or a scratch tensor, and the kernels that copy it. ``transposed``: what is
    written in order lies apart in memory where it is read. ``stacked``: by ``torch.stack``, with others."""
    copy = into or replace(source, name=f"{source.name}_copied", kind="scratch")
    elements = copy.heads * copy.rows * copy.cols
    k = (concatenation_kernel if stacked else strided_copy_kernel)(elements, copy.dtype)
    counted = "concatenation" if stacked else "strided_copy" if transposed else "layout_copy"
    overfetch = TRANSPOSED_OVERFETCH if transposed else 1.0
    return copy, elementwise(name, "copy", ((source, "q_head"),), copy, k, counted=counted, overfetch=overfetch)


def gemm(
    name: str, role: str, product: Product, problem: AttentionProblem, gpu: Profile, tiles: Tiles | None = None
) -> list[Kernel]:
    """The kernels of one batched product: cuBLAS's, or with the tile that ``tiles`` has for its role."""
    chosen = tiles.get(role) if tiles else None
    g = shipped_kernel(role, problem, gpu) if chosen is None else gemm_with(chosen, role, problem, gpu)
    if g.smem_bytes > gpu.smem_bytes_per_cta_max:
        g = _fewer_stages(g, gpu)
    kernels = list(batched_gemm(name, product, g, g.instruction_path.replace(".", "_")))
    if g.helper_memset and kernels[0].ctas > gpu.num_sms * g.ctas_per_sm:
        kernels.insert(0, memset(f"{name}_counter"))
    return kernels


def _fewer_stages(g: GemmKernel, gpu: Profile) -> GemmKernel:
    """``g`` with as many stages as ``gpu``'s SMEM holds (imagined GPUs only: every real one holds all)."""
    per_stage = 2 * g.tile_k * (g.tile_rows + g.tile_columns)
    stages = min(g.stages, gpu.smem_bytes_per_cta_max // per_stage)
    if stages < 1:
        raise UnsupportedError(f"{g.name}: one stage needs {per_stage} bytes of SMEM a CTA")
    return replace(g, stages=stages, smem_bytes=stages * per_stage)


def masked_share(problem: AttentionProblem) -> float:
    """Share of S that a causal mask or a window hides (what else a mask hides is not known here)."""
    if not hides_by_position(problem):
        return 0.0
    return 1.0 - problem.unmasked_pairs_per_head() / (problem.seqlen_q * problem.seqlen_k)


def forward_kernels(
    problem: AttentionProblem, gpu: Profile, t: dict[str, Tensor], call: Call, tiles: Tiles
) -> tuple[list[Kernel], int, dict[str, Tensor]]:
    """The forward pass's kernels, the peak of device memory that it holds, and what autograd keeps: P, P dropped,
    the tanh of a soft cap."""
    p = problem
    # a single head in all needs no copy: a view of it with stride 0 stands for every head
    (k, expand_k), (v, expand_v) = ((x, []) if x.heads == 1 else expand_heads(x, p) for x in (t["K"], t["V"]))
    s, weights = score_tensor(p, "S"), score_tensor(p, "P")
    q, kernels = t["Q"], [*expand_k, *expand_v]
    copy_v: list[Kernel] = []
    if call.copies:
        q, before = copied("copy_Q", q)
        if p.group == 1:
            # K is copied as (head_dim, seqlen), V when it is needed
            (k, of_k), (v, copy_v) = copied("copy_K", k, transposed=True), copied("copy_V", v)
            before += of_k
        kernels = before + kernels
    if call.matmul and p.batch > 1:
        # K as (head_dim, seqlen) of every head; the rows of V stay whole
        (k, of_k), (v, copy_v) = copied("copy_K", k, transposed=True), copied("copy_V", v)
        kernels += of_k
    product = Product(q, k, s, p.head_dim, transpose_b=True, scale=p.head_dim**-0.5)
    kernels += gemm("qk_gemm", "scores", product, p, gpu, tiles)
    live = sum(x.bytes for x in t.values()) + sum(x.bytes for x in (q, k, v) if x.kind == "scratch")
    kept = {"S_tanh": tanh_tensor(s)} if p.softcap else {}
    s, cap = cap_scores(s, p)
    kernels += cap
    mask = mask_tensor(p)
    if mask is not None:
        masked = score_tensor(p, "S_masked")
        if call.copies and p.mask is None:
            kernels += mask_from_ones(mask, gpu)
        kernels += apply_mask(s, mask, masked, p)
        live += mask.bytes if "mask" not in t else 0
        s = masked
    softmax = softmax_forward_kernel(p.seqlen_k, p.dtype, call.torch_release)
    kernels.append(softmax_forward(s, weights, softmax, gpu, masked_share(p)))
    dropped = dropout_tensors(p, weights)
    if dropped:
        kernels += drop(weights, dropped, p)
    kernels += copy_v
    output = Product(dropped.get("P_dropped", weights), v, t["O"], p.seqlen_k)
    kernels += gemm("pv_gemm", "output", output, p, gpu, tiles)
    # the eager call holds two S-sized tensors at once: S and S + mask, then what softmax read and P, then P, P dropped
    # and which were dropped
    live += weights.bytes + max(s.bytes, sum(x.bytes for x in dropped.values()))
    return kernels, live, {"P": weights, **dropped, **kept}


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: Tiles | None = None,
) -> Program:
    """The program of unfused attention for ``problem`` on ``gpu``, forward, backward or both; ``tiles`` replaces those
    of its products."""
    tiles = tiles or {}
    impl = IMPLEMENTATIONS[implementation]
    check_supported(problem, impl)
    substitutions = check_capabilities(impl, gpu, hypothetical)
    scores = score_tensor(problem, "S").bytes
    if scores > gpu.hbm_bytes and not hypothetical:
        raise UnsupportedError(
            f"out of memory: the score matrix alone needs {scores / 1e9:.0f} GB, "
            f"{gpu.name} has {gpu.hbm_bytes / 1e9:.0f} GB"
        )
    # it imports this module
    from algorithms.standard_backward import build_backward

    return build_passes(
        problem,
        lambda p: build_forward(p, implementation, gpu, substitutions, tiles),
        lambda p: build_backward(p, implementation, gpu, substitutions, tiles),
        lambda p: build_forward(p, implementation, gpu, substitutions, tiles, keep_weights=True),
    )


def build_forward(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    substitutions: list[str],
    tiles: Tiles,
    keep_weights: bool = False,
) -> Program:
    """The forward pass; ``keep_weights`` leaves P (and what dropout made) among the outputs, as autograd does."""
    t = io_tensors(problem)
    if problem.mask is not None and (mask := mask_tensor(problem)) is not None:
        t["mask"] = mask
    kernels, live, kept = forward_kernels(problem, gpu, t, CALLS[implementation], tiles)
    return Program(
        "standard",
        implementation,
        problem,
        tuple(kernels),
        {name: tensor for name, tensor in t.items() if name != "O"},
        {"O": t["O"]} | (kept if keep_weights else {}),
        live,
        notes=NOTES,
        substitutions=tuple(substitutions),
        attributes={"kernels": tuple(kernel.name for kernel in kernels)},
    )


NOTES = ("a row that sees no key gives 0 (PyTorch gives NaN)",)
