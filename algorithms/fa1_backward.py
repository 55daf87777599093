"""FlashAttention-1, backward (Dao et al. 2022, Algorithm 4) as flash-attention 1.x runs it: K/V blocks outer.

A CTA of eight warps holds dK and dV of a key block in registers and walks 16-row steps of Q and dO; the warps split the
keys, so every step's partial dQ of all warps is summed through SMEM. Two launches exist, chosen by wave efficiency:

* one CTA a head, key blocks in sequence: dQ travels through HBM in fp32 from block to block (read, added, written),
  and the first block computes D = rowsum(dO * O) on its way;
* one CTA a key block: dQ is zeroed, D comes from a kernel before, dQ is added with atomics and converted by a copy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from algorithms import backward_walks, varlen
from algorithms.backward_helpers import convert, dot_do_o, gradient_tensors, group_sum, zero_fill
from algorithms.common import ceil_div, compulsory_bytes, dropout_op, fill, grid_indices, mask_op, row_vectors
from algorithms.counted import among_streams, wavefronts_of
from algorithms.fa1_counts import package_counts
from algorithms.fa1_schedule import KINDS, Schedule, in_place_of_others, work_tiles
from algorithms.fa1_tiles import Fa1BackwardTile, backward_with, fa1_backward_smem_bytes
from algorithms.kernel_tables import ctas_per_sm, round_head_dim
from algorithms.kernels_fa1 import FA1_HEAD_DIMS
from algorithms.standard import expand_heads
from algorithms.tile_search import TileChoice
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Acquire,
    Await,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Index,
    Kernel,
    Load,
    Loop,
    Matmul,
    Op,
    Pipe,
    Program,
    Release,
    Role,
    Signal,
    Store,
    Tensor,
    Trip,
    Wait,
    tile,
    var,
)

ROWS = 16
WARPS = 8
#: Row block of a CTA of the kernel that computes D, and threads and rows of the copies around the main kernel.
DOT_ROWS, COPY_ROWS, COPY_THREADS = 16, 64, 128
SUM_ROWS = 4


def backward_schedule(problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None) -> Schedule:
    """Tile and resources of the 1.x backward kernel, or of the kernel with ``tiles``.

    Source: v1.0.9 fmha_bwd_hdim*.cu, fmha_bwd_launch_template.h.
    """
    if problem.head_dim > 128:
        raise UnsupportedError(f"head_dim {problem.head_dim}: flash_attn_1 runs head dims up to 128")
    d = round_head_dim(problem.head_dim, FA1_HEAD_DIMS, "FlashAttention-1 backward")
    keys = 128 if d == 128 or problem.seqlen_k <= 128 else 256
    wavefronts = package_counts(d, problem.causal, backward=True).wavefronts
    if tiles is not None:
        t, resident = backward_with(tiles, Fa1BackwardTile(ROWS, keys, d, WARPS, 0), gpu)
        # like the instructions, counted per score element of the shipped tile
        scaled = wavefronts * (t.rows * t.keys) // (ROWS * keys)
        return Schedule(t.rows, t.keys, d, WARPS, 1, True, t.smem_bytes, 255, resident, wavefronts=scaled)
    smem = fa1_backward_smem_bytes(ROWS, keys, d, WARPS)
    if smem > gpu.smem_bytes_per_cta_max:
        raise UnsupportedError(f"flash_attn_1's backward needs {smem} bytes of SMEM a CTA; {gpu.name} has fewer")
    resident = ctas_per_sm(
        threads=32 * WARPS, registers_per_thread=255, smem_bytes=smem, smem_bytes_per_sm=gpu.smem_bytes_per_sm
    )
    return Schedule(ROWS, keys, d, WARPS, 1, True, smem, 255, resident, wavefronts=wavefronts)


def key_blocks_in_parallel(problem: AttentionProblem, s: Schedule, gpu: Profile) -> bool:
    """Whether every key block gets a CTA of its own (``num_splits_heuristic_bwd``): wave efficiency against the cost of
    zeroing and copying dQ. Never when the order of dQ's sum is to be fixed (1.x: ``num_splits=1``)."""
    if problem.deterministic:
        return False
    heads, slots = problem.batch * problem.heads, np.float32(gpu.num_sms * s.ctas_per_sm)
    padded = ceil_div(problem.seqlen_k, s.keys) * s.keys
    splits = padded // s.keys

    def efficiency(ctas: int) -> np.float32:
        waves: np.float32 = np.float32(ctas) / slots
        return np.float32(waves / np.ceil(waves))

    if problem.causal and splits >= 10:
        return True
    discount = 1.0 + (0.5 if problem.causal else 1.0) * s.keys / padded
    return splits > 1 and float(efficiency(heads)) < float(efficiency(heads * splits)) / discount


def _roles(
    problem: AttentionProblem,
    s: Schedule,
    t: dict[str, Tensor],
    kinds: dict[str, tuple[str, bool, bool]],
    parallel: bool,
) -> tuple[Role, ...]:
    """The loader (Q and dO one step ahead) and the eight warps."""
    br, bc, d, dtype = s.rows, s.keys, s.head_dim, problem.dtype
    mix = package_counts(d, problem.causal, backward=True).mix
    scale, rescale = float(problem.head_dim**-0.5), 1.0 / (1.0 - problem.dropout)
    head, kv_head, key_row = var("q_head"), var("kv_head"), var("key_row")
    pipes = {name: Pipe(name, br, d, dtype, 2) for name in ("Q", "dO", "O")}
    pipes |= {name: Pipe(name, br, 1, "fp32", 2) for name in ("LSE", "D")}
    k, v = Buffer("k_smem", bc, d, dtype, "smem"), Buffer("v_smem", bc, d, dtype, "smem")
    p, ds = Buffer("P", br, bc, dtype, "smem"), Buffer("dS", br, bc, dtype, "smem")
    scores, dp = Buffer("S", br, bc), Buffer("dP", br, bc)
    dq, dq_old, dq_out = Buffer("dQ", br, d), Buffer("dQ_old", br, d), Buffer("dQ_out", br, d, dtype)
    dk, dv, out = Buffer("dK", bc, d), Buffer("dV", bc, d), Buffer("dKV_out", bc, d, dtype)
    (rowsum,) = row_vectors(br, "rowsum")

    def scaled(buffer: Buffer, factor: float) -> list[Op]:
        size = buffer.rows, buffer.cols
        return [Compute("scale", buffer, (buffer,), *size, (("factor", factor),))] if factor != 1.0 else []

    def used(first: bool) -> tuple[str, ...]:
        """What a step reads beside Q, dO and the LSE: D, or O to make it."""
        return ("Q", "dO", "LSE", "O" if first and not parallel else "D")

    def row_of(coord: str) -> Index:
        return var(coord) + var("i") * br

    def fetch(trip: str) -> Loop:
        coord, first, _ = kinds[trip]
        ops: list[Op] = []
        for name in used(first):
            pipe = pipes[name]
            ops += [Acquire(pipe), Load(tile(t[name], head, row_of(coord), br, 0, pipe.cols), pipe)]
        # the next rows are asked for once these are multiplied
        return Loop("i", var(trip), [*ops, Wait("multiplied")])

    def step(trip: str) -> Loop:
        coord, first, final = kinds[trip]
        row = row_of(coord)
        make_d = first and not parallel
        drop = [dropout_op("dropout_sign", scores, problem, row, key_row)] if problem.dropout else []
        partial = br * d * 4 * s.warps
        if parallel:
            store: list[Op] = [Store(dq, tile(t["dQ_tmp"], head, row, br, 0, d), accumulate=True, via="atomic")]
        elif final:
            store = [Compute("convert", dq_out, (dq,), br, d), Store(dq_out, tile(t["dQ"], head, row, br, 0, d))]
        else:
            store = [Store(dq, tile(t["dQ_tmp"], head, row, br, 0, d))]
        add = [] if first or parallel else [Compute("add", dq, (dq, dq_old), br, d)]
        # asked for late: with the next Q and dO, for which the warps wait before the exchange, on the same scoreboard
        old: list[Op] = [Load(tile(t["dQ_tmp"], head, row, br, 0, d), dq_old, token="dQ_old")] if add else []
        body = [
            *(Consume(pipes[name]) for name in used(first)),
            Barrier("step"),
            *(
                [
                    Compute("row_dot", rowsum, (pipes["dO"], pipes["O"]), br, d),
                    # dP stays as it is until the end, so D is scaled down by the probability to keep
                    *scaled(rowsum, 1.0 - problem.dropout),
                    Store(rowsum, tile(t["D"], head, row, br)),
                ]
                if make_d
                else [Compute("copy", rowsum, (pipes["D"],), br, 1)]
            ),
            Matmul(scores, pipes["Q"], k, transpose_b=True, split="cols"),
            mask_op(scores, problem, row, key_row),
            Compute("exp_lse", scores, (scores, pipes["LSE"]), br, bc, (("scale", scale),)),
            # a dropped P keeps its size and loses its sign, so that dS knows both
            *drop,
            Compute("convert_positive" if drop else "convert", p, (scores,), br, bc),
            Exchange("P", br * bc * 2, 0),
            Matmul(dp, pipes["dO"], v, transpose_b=True, split="cols"),
            Signal("multiplied"),
            Compute("softmax_grad_dropout" if drop else "softmax_grad", dp, (scores, dp, rowsum), br, bc),
            Compute("convert", ds, (dp,), br, bc),
            Exchange("dS", br * bc * 2, 0),
            *old,
            # each warp multiplies its own keys: a partial dQ of every warp, summed through SMEM
            Matmul(dq, ds, k, split="inner"),
            *([Await("dQ_old")] if add else []),
            Exchange("dQ", partial, partial),
            Barrier("dQ"),
            *scaled(dq, scale * rescale),
            Matmul(dv, p, pipes["dO"], transpose_a=True, accumulate=True),
            *add,
            *store,
            Matmul(dk, ds, pipes["Q"], transpose_a=True, accumulate=True),
            *(Release(pipes[name]) for name in used(first)),
        ]
        counted = [op for op in body if not (isinstance(op, Compute) and op.fn in ("mask", "dropout_sign"))]
        more = max(0, s.wavefronts - wavefronts_of(body, s.warps))
        return Loop("i", var(trip), among_streams(body, counted, mix, br * bc, float(more)))

    kv = (key_row, bc, 0, d)
    through_smem = [Exchange("dKV", bc * d * 2, bc * d * 2), Barrier("dKV")]
    warps = [
        Load(tile(t["K"], kv_head, *kv), k, token="kv"),
        Load(tile(t["V"], kv_head, *kv), v),
        Await("kv"),
        Barrier("kv"),
        fill(dk, 0.0),
        fill(dv, 0.0),
        *(step(trip) for trip in kinds),
        *scaled(dk, scale * rescale),
        Compute("convert", out, (dk,), bc, d),
        *through_smem,
        Store(out, tile(t["dK"], kv_head, *kv)),
        *scaled(dv, rescale),
        Compute("convert", out, (dv,), bc, d),
        *through_smem,
        Store(out, tile(t["dV"], kv_head, *kv)),
        Barrier("tile", 2),
    ]
    return (
        Role("loader", [*(fetch(trip) for trip in kinds), Barrier("tile", 2)], warps=0),
        Role("warps0", warps, s.warps, mix.issue_interval_cycles),
    )


def _parallel_tiles(problem: AttentionProblem, s: Schedule) -> dict[str, np.ndarray]:
    """A CTA a key block: batch fastest, then head, then key block; the walk begins at the diagonal (bottom right)."""
    p = problem
    batch, head, j = grid_indices(p.batch, p.heads, ceil_div(p.seqlen_k, s.keys))
    lengths = np.array(p.sequences(), np.int64)
    # CTAs behind the end of their sequence return at once: left out
    real = j * s.keys < lengths[batch, 1]
    batch, head, j = (x[real] for x in (batch, head, j))
    queries, keys = lengths[batch].T
    row_blocks = -(-queries // s.rows)
    first = (j * s.keys - (keys - queries)) // s.rows if p.causal else np.zeros_like(j)
    first = np.clip(first, 0, row_blocks)
    flat = batch * p.heads + head
    q_offset, k_offset = p.seqlen_q - queries, p.seqlen_k - keys
    coords = {
        "q_head": flat,
        "kv_head": flat,
        "key_row": j * s.keys + k_offset,
        "first_row": first * s.rows + q_offset,
        "n_rows": row_blocks - first,
    }
    if varlen.is_varlen(p):
        coords |= {"q_offset": q_offset, "k_offset": k_offset, "seqlen_k": keys, "shift": keys - queries}
    return coords


def _main_kernel(problem: AttentionProblem, s: Schedule, t: dict[str, Tensor], gpu: Profile, parallel: bool) -> Kernel:
    if parallel:
        coords, others = _parallel_tiles(problem, s), {}
        kinds = {"n_rows": ("first_row", False, False)}
    else:
        slots = gpu.num_sms * s.ctas_per_sm
        coords = work_tiles(problem, s, slots)
        others = in_place_of_others(problem, s, len(coords["key_row"]), slots)
        # every key block's dK and dV are stored, also where no row sees it
        coords["kv_head"] = _owner(problem, s, gpu)
        kinds = {trip: KINDS[trip] for trip in KINDS if coords[trip].any()}
        coords = {name: values for name, values in coords.items() if name not in KINDS or name in kinds}
    cta = _roles(problem, s, t, kinds, parallel)
    return Kernel(
        "fmha_bwd",
        varlen.within_sequence(cta) if varlen.is_varlen(problem) else cta,
        coords,
        tuple(Trip(trip) for trip in kinds),
        threads=32 * s.warps,
        smem_bytes=s.smem_bytes,
        registers_per_thread=s.registers_per_thread,
        ctas_per_sm=s.ctas_per_sm,
        schedule="grid" if parallel else "static",
        path="mma_sync",
        compute_dtype=problem.dtype,
        coord_order="batch, head, key block" if parallel else "slot, key block, wave; CTAs by batch, head",
        **others,
    )


def _owner(problem: AttentionProblem, s: Schedule, gpu: Profile) -> np.ndarray:
    """The head that each work tile of the sequential launch belongs to; -1 on slots without a CTA."""
    whole = work_tiles(problem.with_(causal=False), s, gpu.num_sms * s.ctas_per_sm)
    return whole["q_head"]


def build_backward(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    substitutions: list[str],
    tiles: TileChoice | None = None,
) -> Program:
    """The backward program: inputs Q K V O LSE dO, outputs dQ dK dV. The paper's kernels give a head one CTA."""
    p, s = problem, backward_schedule(problem, gpu, tiles)
    parallel = implementation == "flash_attn_1" and key_blocks_in_parallel(p, s, gpu)
    heads, d = p.batch * p.heads, p.head_dim
    if not parallel:
        s = replace(s, ctas_per_sm=min(s.ctas_per_sm, ceil_div(heads, gpu.num_sms)))
    t = gradient_tensors(p, s.rows, s.keys)
    t["D"] = Tensor("D", heads, p.seqlen_q, 1, "fp32", "scratch", s.rows)
    if parallel or p.seqlen_k > s.keys:
        t["dQ_tmp"] = Tensor("dQ_tmp", heads, p.seqlen_q, d, "fp32", "scratch", s.rows)
    t = backward_walks.ragged(t, p, {})
    inputs = {name: t[name] for name in ("Q", "K", "V", "O", "LSE", "dO")}
    outputs = {name: t[name] for name in ("dQ", "dK", "dV")}
    before, after, live = [], [], compulsory_bytes(t.values())
    if p.group > 1:
        for name in "KV":
            t[name], kernels = expand_heads(t[name], p)
            before += kernels
            full = Tensor(f"d{name}_expanded", heads, p.seqlen_k, t[name].cols, p.dtype, "scratch", s.keys)
            after.append(group_sum(f"sum_d{name}", full, t[f"d{name}"], p.group, SUM_ROWS, COPY_THREADS, gpu))
            t[f"d{name}"] = full
            live += t[name].bytes + full.bytes
    if parallel:
        copies = backward_walks.row_tiles(p, COPY_ROWS, p.heads, "head", 1)
        before.append(zero_fill("zero_dQ_tmp", t["dQ_tmp"], COPY_ROWS, COPY_THREADS, gpu, copies))
        coords = backward_walks.row_tiles(p, DOT_ROWS, p.heads, "q_head", 1)
        keep = 1.0 - p.dropout
        before.append(dot_do_o("fmha_bwd_dot_do_o", t, coords, DOT_ROWS, 32 * WARPS, s.head_dim, gpu, None, keep=keep))
        coords = copies
        after.insert(0, convert("copy_dQ", t["dQ_tmp"], t["dQ"], coords, COPY_ROWS, COPY_THREADS, 1.0, gpu))
    return Program(
        "fa1",
        implementation,
        p,
        (*before, _main_kernel(p, s, t, gpu, parallel), *after),
        inputs,
        outputs,
        live,
        substitutions=tuple(substitutions),
        attributes={"backward_tile": (s.rows, s.keys), "key_blocks_in_parallel": parallel},
    )
