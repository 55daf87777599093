"""The FlashAttention-3-class backward on Hopper: K and V outer, TMA, two warpgroups, dQ reduced in fp32 through L2.

A CTA owns a key block and walks the query blocks upwards (``algorithms.fa3_backward_roles``). Around it: the zero
fills that GQA's fp32 dK and dV need, rowsum(dO * O) with dQ's zero fill, and the conversions to 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from algorithms.backward_helpers import convert, dot_do_o, gradient_tensors, row_grid, zero_fill
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    compulsory_bytes,
    grid_indices,
    instruction_path,
)
from algorithms.fa3_backward_roles import roles
from algorithms.in_step import IN_STEP_ITERATIONS
from algorithms.kernel_tables import BackwardTile, backward_row_blocks, fa3_backward_tile
from algorithms.kernels_common import registers_at_launch
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Kernel, Program, Tensor, Trip

#: SingleTileLPTBwdScheduler's idea of the L2 (flash_attn/cute/tile_scheduler.py): sizes the sections of heads.
L2_BYTES_FOR_SECTIONS = 50 * 1024 * 1024
CUDNN = "cudnn_sm90"
CUDNN_ASSUMPTION = (
    "cudnn_sm90: closed source; assumed to follow flash_attn_4_sm90's schedule with 64 queries a block at head dim 128 "
    "with and without a mask (its kernel is named ..._flash_bprop_wgmma_f16_..._64x64x128) and the same helper kernels"
)


def _order(problem: AttentionProblem, t: BackwardTile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(key block, batch, head) of each CTA in launch order (tile_scheduler.py).

    Plain: key blocks ascending, then heads, then batch. Deterministic: sections of heads whose Q, dO and fp32 dQ fit
    50 MiB, heads fastest inside one; causal key blocks descend, so that those that add first start first.
    """
    p, blocks = problem, ceil_div(problem.seqlen_k, t.tile_n)
    if not p.deterministic:
        block, head, batch = grid_indices(blocks, p.heads, p.batch)
        return block, batch, head
    head_bytes = p.seqlen_q * ((p.head_dim + p.head_dim_v) * p.element_bytes + 4 * p.head_dim)
    fitting = max(1, L2_BYTES_FOR_SECTIONS // head_bytes)
    section, total = 1 << (fitting.bit_length() - 1), p.heads * p.batch
    parts = []
    for start in range(0, total, section):
        head, block = grid_indices(min(section, total - start), blocks)
        parts.append((start + head, blocks - 1 - block if p.causal else block))
    flat, block = (np.concatenate(x) for x in zip(*parts, strict=True))
    return block, flat // p.heads, flat % p.heads


def _main_kernel(problem: AttentionProblem, t: BackwardTile, tensors: dict[str, Tensor], gpu: Profile) -> Kernel:
    p = problem
    visits = [
        backward_row_blocks(
            key_block=n, tile_m=t.tile_m, tile_n=t.tile_n, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k, causal=p.causal
        )
        for n in range(ceil_div(p.seqlen_k, t.tile_n))
    ]
    rows = np.array([len(v) for v in visits], np.int64)
    first = np.array([v.start for v in visits], np.int64) * t.tile_m
    block, batch, head = _order(p, t)
    coords = {
        "q_head": batch * p.heads + head,
        "kv_head": batch * p.kv_heads + head // p.group,
        "key0": block * t.tile_n,
        "row0": first[block],
    }
    if t.pds_stages == 1:
        coords["n_rows"], trips = rows[block], (Trip("n_rows"),)
    else:
        coords |= {"n_pairs": rows[block] // 2, "n_odd": rows[block] % 2}
        coords["odd_row"] = coords["row0"] + coords["n_pairs"] * (2 * t.tile_m)
        trips = (Trip("n_pairs"), Trip("n_odd"))
    return Kernel(
        "flash_bwd_sm90",
        roles(p, t, tensors),
        coords,
        trips,
        threads=t.threads,
        smem_bytes=t.smem_bytes,
        registers_per_thread=registers_at_launch(t.threads),
        ctas_per_sm=t.ctas_per_sm,
        path=instruction_path("wgmma", gpu),
        compute_dtype=p.dtype,
        semaphores=(("dq_empty0", 1), ("dq_empty1", 1)),
    )


def build_backward(
    problem: AttentionProblem, impl: Implementation, gpu: Profile, hypothetical: bool = False
) -> Program:
    """The Hopper backward program for ``problem`` on ``gpu``: inputs Q K V O LSE dO, outputs dQ dK dV."""
    p = problem
    substitutions = check_capabilities(impl, gpu, hypothetical)
    if p.head_dim > 256 or p.head_dim % 8:
        raise UnsupportedError(f"head_dim {p.head_dim}: {impl.name}'s backward takes multiples of 8 up to 256")
    grouped = p.group > 1
    notes = []
    if impl.name == CUDNN:
        if p.head_dim > 128:
            raise UnsupportedError(f"head_dim {p.head_dim}: {impl.name}'s backward takes head dims up to 128")
        notes.append(CUDNN_ASSUMPTION)
    t = fa3_backward_tile(p.head_dim, p.dtype, p.causal or impl.name == CUDNN, gqa=grouped)
    if t.smem_bytes > gpu.smem_bytes_per_cta_max:
        raise UnsupportedError(
            f"{impl.name}'s backward {t.tile_m}x{t.tile_n} tile needs {t.smem_bytes} bytes of SMEM; "
            f"{gpu.name} has {gpu.smem_bytes_per_cta_max} a CTA"
        )
    heads, scale = p.batch * p.heads, p.head_dim**-0.5
    tensors = gradient_tensors(p, t.tile_m, t.tile_n)
    cols = ceil_div(p.head_dim, 32) * 32
    q_rows, k_rows = (ceil_div(n, b) * b for n, b in ((p.seqlen_q, t.tile_m), (p.seqlen_k, t.tile_n)))
    for name, width in (("D", 1), ("LSE_log2", 1), ("dQ_accum", cols)):
        tensors[name] = Tensor(name, heads, q_rows, width, "fp32", "scratch", t.tile_m)
    for name in ("dK_accum", "dV_accum") if grouped else ():
        tensors[name] = Tensor(name, p.batch * p.kv_heads, k_rows, cols, "fp32", "scratch", t.tile_n)

    helpers = {h.name: h for h in t.helpers}
    block, head, batch = row_grid(p.seqlen_q, t.tile_m, p.heads, p.batch)
    query_rows = {"row0": block * t.tile_m}
    q_head = batch * p.heads + head
    before = [
        zero_fill(f"fill_{name}_accum", tensors[f"{name}_accum"], t.tile_n, helpers[f"fill_{name}accum"].threads, gpu)
        for name in (("dK", "dV") if grouped else ())
    ]
    if p.deterministic:
        locks = [Tensor("dQ_locks", heads, q_rows // t.tile_m, 1, "int32", "scratch", 1024)]
        if grouped:
            locks += [
                Tensor(f"{name}_locks", p.batch * p.kv_heads, 2 * (k_rows // t.tile_n), 1, "int32", "scratch", 1024)
                for name in ("dK", "dV")
            ]
        tensors |= {lock.name: lock for lock in locks}
        before += [zero_fill(f"fill_{lock.name}", lock, lock.rows, 128, gpu) for lock in locks]
        notes.append("deterministic: CTAs' waits for their turn to add dQ are not modelled; time is a lower bound")
    pre, post = helpers["bwd_preprocess"], helpers["bwd_postprocess_dq"]
    before.append(
        dot_do_o(
            pre.name, tensors, {"q_head": q_head, **query_rows}, t.tile_m, pre.threads, cols, gpu,
            tensors["dQ_accum"], tensors["LSE_log2"],
        )
    )  # fmt: skip
    after = [
        convert(
            post.name, tensors["dQ_accum"], tensors["dQ"], {"head": q_head, **query_rows}, t.tile_m, post.threads,
            scale, gpu, 1, t.tile_m * cols * 4,
        )
    ]  # fmt: skip
    for name, factor in (("dK", scale), ("dV", 1.0)) if grouped else ():
        block, head, batch = row_grid(p.seqlen_k, t.tile_n, p.kv_heads, p.batch)
        coords = {"head": batch * p.kv_heads + head, "row0": block * t.tile_n}
        after.append(
            convert(
                f"bwd_postprocess_{name}", tensors[f"{name}_accum"], tensors[name], coords, t.tile_n,
                helpers[f"bwd_postprocess_{name}"].threads, factor, gpu, 1, t.tile_n * cols * 4,
            )
        )  # fmt: skip
    main = replace(_main_kernel(p, t, tensors, gpu), in_step_iterations=IN_STEP_ITERATIONS[impl.name, "bwd"])
    return Program(
        "fa3",
        impl.name,
        p,
        (*before, main, *after),
        {k: tensors[k] for k in ("Q", "K", "V", "O", "LSE", "dO")},
        {k: tensors[k] for k in ("dQ", "dK", "dV")},
        compulsory_bytes(tensors.values()),
        notes=tuple(notes),
        substitutions=tuple(substitutions),
        attributes={"backward_tile": (t.tile_m, t.tile_n)},
    )
