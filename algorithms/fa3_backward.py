"""The FlashAttention-3-class backward on Hopper: K and V outer, TMA, two warpgroups, dQ reduced in fp32 through L2.

A CTA owns a key block and walks the query blocks upwards (``algorithms.fa3_backward_roles``). Around it: the zero
fills that GQA's fp32 dK and dV need, rowsum(dO * O) with dQ's zero fill, and the conversions to 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from algorithms import backward_walks, kernels_cudnn, varlen
from algorithms.backward_helpers import convert, dot_do_o, gradient_tensors, zero_fill
from algorithms.backward_tiles import backward_space, fa3_backward_with
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    compulsory_bytes,
    effective_masks,
    grid_indices,
    instruction_path,
)
from algorithms.fa3_backward_roles import roles
from algorithms.in_step import HOPPER_BACKWARD
from algorithms.instruction_counts import InstructionMix, fa4_backward_mix
from algorithms.kernel_tables import BackwardTile, fa3_backward_tile
from algorithms.kernels_common import registers_at_launch
from algorithms.tile_search import TileChoice, TileSpace
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Kernel, Program, Tensor, Trip

#: SingleTileLPTBwdScheduler's idea of the L2 (flash_attn/cute/tile_scheduler.py): sizes the sections of heads.
L2_BYTES_FOR_SECTIONS = 50 * 1024 * 1024


def _order(problem: AttentionProblem, t: BackwardTile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(key block, batch, head) of each CTA in launch order (tile_scheduler.py).

    Plain, and with lengths by sequence: key blocks ascending, then heads, then batch. Deterministic: sections of heads
    whose Q, dO and fp32 dQ fit 50 MiB, heads fastest inside one; causal key blocks descend, so that those that add
    first start first.
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


def _main_kernel(
    problem: AttentionProblem,
    t: BackwardTile,
    tensors: dict[str, Tensor],
    gpu: Profile,
    mix: InstructionMix,
) -> Kernel:
    p = problem
    by_sequence = varlen.is_varlen(p)
    block, batch, head = _order(p, t)
    seen = backward_walks.walks_of(p, t.tile_m, t.tile_n, block, batch, even=True)
    if by_sequence:
        # CTAs beyond the last sequence's last key block return at once: they are few and left out
        batch, head = batch[seen.live], head[seen.live]
        seen = seen.of_live()
    rows = seen.stop - seen.first
    coords = {
        "q_head": batch * p.heads + head,
        "kv_head": batch * p.kv_heads + head // p.group,
        "key0": seen.places["key0"],
        "row0": seen.first * t.tile_m + seen.places["q_offset"],
    }
    if by_sequence:
        coords |= seen.places
        coords["acc_shift"] = backward_walks.shifts(p, t.tile_m)[batch]
        coords["acc_key_shift"] = backward_walks.shifts(p, t.tile_n, of_keys=True)[batch]
    if t.pds_stages == 1:
        coords["n_rows"] = rows
        trips: tuple[Trip, ...] = (Trip("n_rows"),)
    else:
        coords |= {"n_pairs": rows // 2, "n_odd": rows % 2}
        coords["odd_row"] = coords["row0"] + coords["n_pairs"] * (2 * t.tile_m)
        trips = (Trip("n_pairs"), Trip("n_odd"))
    ctas = roles(p, t, tensors, mix)
    return Kernel(
        "flash_bwd_sm90",
        varlen.within_sequence(ctas) if by_sequence else ctas,
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


#: hopper/flash_api.cpp mha_bwd rounds both head dims to the larger one: its kernels have one.
NARROW_V = (
    "head_dim_v below head_dim: as in FlashAttention-3's own backward, V and dO fill tiles as wide as Q's; "
    "a kernel with a width of its own for them would do fewer products"
)


def backward_tile(problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None) -> BackwardTile:
    """The shipped kernel's tile for ``problem`` (whether or not it fits), or the kernel with ``tiles``
    (:class:`UnsupportedError` when that does not fit ``gpu``)."""
    p = effective_masks(problem, problem.seqlen_k, max(problem.seqlen_q, problem.seqlen_k))
    t = fa3_backward_tile(p.head_dim, p.dtype, p.causal, p.window is not None, p.group > 1)
    return t if tiles is None else fa3_backward_with(tiles, t, gpu)


def backward_tile_space(problem: AttentionProblem, gpu: Profile) -> TileSpace:
    """What may be chosen for the backward pass."""
    base = backward_tile(problem, gpu)
    return backward_space(problem, base, lambda choice: backward_tile(problem, gpu, choice), 16)


def build_backward(
    problem: AttentionProblem,
    impl: Implementation,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: TileChoice | None = None,
) -> Program:
    """The Hopper backward program for ``problem`` on ``gpu``: inputs Q K V O LSE dO, outputs dQ dK dV."""
    asked, p = problem, effective_masks(problem, problem.seqlen_k, max(problem.seqlen_q, problem.seqlen_k))
    substitutions = check_capabilities(impl, gpu, hypothetical)
    if p.deterministic and (p.window is not None or varlen.is_varlen(p)):
        raise UnsupportedError(
            f"deterministic with a window or lengths by sequence: not modelled for {impl.name}; leave one of them out"
        )
    if p.head_dim > 256 or p.head_dim % 8:
        raise UnsupportedError(f"head_dim {p.head_dim}: {impl.name}'s backward takes multiples of 8 up to 256")
    if p.head_dim_v > p.head_dim:
        raise UnsupportedError(
            f"head_dim_v {p.head_dim_v} above head_dim {p.head_dim}: {impl.name}'s backward tiles are head_dim wide"
        )
    grouped = p.group > 1
    notes = []
    if p.head_dim_v < p.head_dim:
        notes.append(NARROW_V)
    masked = p.causal or p.window is not None
    if impl.name == kernels_cudnn.NAME:
        if p.head_dim > 128:
            raise UnsupportedError(f"head_dim {p.head_dim}: {impl.name}'s backward takes head dims up to 128")
        notes.append(kernels_cudnn.ASSUMPTION)
        mix = kernels_cudnn.cudnn_backward_mix(p.head_dim, p.causal)
        t = kernels_cudnn.cudnn_backward_tile(p.head_dim, p.dtype, gqa=grouped)
    else:
        mix = fa4_backward_mix(p.head_dim, masked)
        t = backward_tile(p, gpu, tiles)
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

    padded = dict.fromkeys(("D", "LSE_log2", "dQ_accum"), t.tile_m) | dict.fromkeys(("dK_accum", "dV_accum"), t.tile_n)
    tensors = backward_walks.ragged(tensors, p, padded)
    helpers = {h.name: h for h in t.helpers}
    query_rows = backward_walks.row_tiles(p, t.tile_m, p.heads, "q_head", t.tile_m, by_head=True)
    key_rows = backward_walks.row_tiles(p, t.tile_n, p.kv_heads, "head", t.tile_n, of_keys=True, by_head=True)
    acc_shift = backward_walks.shift_index(p)
    before = [
        zero_fill(
            f"fill_{name}_accum", tensors[f"{name}_accum"], t.tile_n, helpers[f"fill_{name}accum"].threads, gpu,
            key_rows if varlen.is_varlen(p) else None,
        )
        for name in (("dK", "dV") if grouped else ())
    ]  # fmt: skip
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
            pre.name, tensors, query_rows, t.tile_m, pre.threads, cols, gpu, tensors["dQ_accum"],
            tensors["LSE_log2"], shift=acc_shift,
        )
    )  # fmt: skip
    after = [
        convert(
            post.name, tensors["dQ_accum"], tensors["dQ"],
            {"head" if name == "q_head" else name: x for name, x in query_rows.items()}, t.tile_m, post.threads,
            scale, gpu, 1, t.tile_m * cols * 4, acc_shift,
        )
    ]  # fmt: skip
    for name, factor in (("dK", scale), ("dV", 1.0)) if grouped else ():
        after.append(
            convert(
                f"bwd_postprocess_{name}", tensors[f"{name}_accum"], tensors[name], key_rows, t.tile_n,
                helpers[f"bwd_postprocess_{name}"].threads, factor, gpu, 1, t.tile_n * cols * 4, acc_shift,
            )
        )  # fmt: skip
    in_step = HOPPER_BACKWARD[impl.name]
    main = replace(_main_kernel(p, t, tensors, gpu, mix), in_step_iterations=in_step)
    return Program(
        "fa3",
        impl.name,
        asked,
        (*before, main, *after),
        {k: tensors[k] for k in ("Q", "K", "V", "O", "LSE", "dO")},
        {k: tensors[k] for k in ("dQ", "dK", "dV")},
        compulsory_bytes(tensors.values()),
        notes=tuple(notes),
        substitutions=tuple(substitutions),
        attributes={"backward_tile": (t.tile_m, t.tile_n)},
    )
