"""FlashAttention-2, backward (Dao 2023, Algorithm 2): K and V outer, dQ added in fp32 through L2.

A CTA owns key block ``j`` (``Bc`` rows of K and V, and their dK, dV in registers) and walks the query blocks ``i``
from the last to the diagonal: S = Q K^T, P = exp(S - LSE), dV += P^T dO, dP = dO V^T, dS = P (dP - D),
dQ += dS K, dK += dS^T Q. P and dS go through SMEM, because each of the eight warps holds another part of them than
the next product needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from algorithms import backward_walks, varlen
from algorithms.backward_helpers import convert, dot_do_o, gradient_tensors, group_sum, zero_fill
from algorithms.backward_tiles import backward_space, fa2_backward_with, fa2_warp_rows
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    compulsory_bytes,
    dropout_op,
    effective_masks,
    fill,
    grid_indices,
    instruction_path,
    mask_op,
    softcap_backward_ops,
    softmax_scale,
)
from algorithms.counted import among_streams, instructions_around, spread_over_matmuls
from algorithms.in_step import fa2_backward
from algorithms.instruction_counts import fa2_backward_counts
from algorithms.kernel_tables import BackwardTile, fa2_backward_tile
from algorithms.tile_search import TileChoice, TileSpace
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Acquire,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Index,
    Instructions,
    Kernel,
    Load,
    Loop,
    Matmul,
    Op,
    Pipe,
    Program,
    Release,
    Role,
    Store,
    Tensor,
    Trip,
    View,
    tile,
    var,
)

#: Rows of warps (of 8) in the outputs of S and dP, of dK and dV, and of dQ; by padded head dim and key block.
#: Source: flash-attention csrc/flash_attn/src/flash_bwd_launch_template.h, AtomLayoutMSdP, -NdKV, -MdQ.
WARP_ROWS = {
    (32, 128): (4, 4, 4),
    (64, 128): (4, 4, 4),
    (96, 128): (2, 4, 4),
    (128, 128): (2, 4, 2),
    (128, 64): (4, 2, 2),
    (192, 64): (4, 2, 2),
    (256, 64): (4, 2, 2),
    (256, 32): (4, 1, 2),
}


def warp_rows(t: BackwardTile) -> tuple[int, int, int]:
    """:data:`WARP_ROWS` of ``t``, a shipped tile or another."""
    return fa2_warp_rows(t.tile_n, {n: rows for (d, n), rows in WARP_ROWS.items() if d == t.padded_head_dim})


WARP_SETS = 2
WARPS_PER_SET = 4
#: dQ's fp32 buffer and rowsum(dO * O) are padded to this many rows (flash_api.cpp).
PADDED_ROWS = 128
#: Operations that the counted kernel did not execute in (most of) its iterations.
_BESIDE_COUNTS = frozenset({"mask", "mask_window", "dropout_sign", "softcap", "softcap_slope", "multiply"})


@dataclass(frozen=True)
class Share:
    """What one set of four warps owns of a product's output, and how its warps split it.

    Eight warps in ``r`` rows and ``8 / r`` columns are two sets side by side: by columns when ``r`` is 4 or 1, else
    by rows. ``split`` is how the four warps of a set lie (see :class:`Matmul`): all down the rows, or all across.
    """

    by_rows: bool
    split: str

    @classmethod
    def of(cls, warp_rows: int) -> Share:
        by_rows = warp_rows in (2, 8)
        return cls(by_rows, "rows" if warp_rows in (4, 8) else "cols")

    def rows(self, total: int, index: int) -> tuple[int, int]:
        """First row and rows of set ``index``."""
        return (index * (total // WARP_SETS), total // WARP_SETS) if self.by_rows else (0, total)

    def cols(self, total: int, index: int) -> tuple[int, int]:
        """First column and columns of set ``index``."""
        return (0, total) if self.by_rows else (index * (total // WARP_SETS), total // WARP_SETS)


def _warp_set(
    index: int,
    problem: AttentionProblem,
    t: BackwardTile,
    tensors: dict[str, Tensor],
    pipes: dict[str, Pipe],
    walks: Sequence[backward_walks.Walk],
    key_loop: Callable[[Callable[[Index], list[Op]]], list[Op]],
) -> Role:
    """One set of four of the CTA's eight warps."""
    bm, bn, d, dtype = t.tile_m, t.tile_n, t.padded_head_dim, problem.dtype
    scale, rescale = problem.head_dim**-0.5, 1.0 / (1.0 - problem.dropout)
    acc_shift = backward_walks.shift_index(problem)
    counts = fa2_backward_counts(d)
    uneven = not _is_even(problem, t)
    mix = replace(counts.mix, issue=counts.mix.issue * counts.uneven) if uneven else counts.mix
    sdp, dkv, dq_share = (Share.of(r) for r in warp_rows(t))
    q, do, k, v = (pipes[name] for name in ("q", "dO", "k", "v"))
    p_smem, ds_smem = Buffer("P_smem", bm, bn, dtype, "smem"), Buffer("dS_smem", bm, bn, dtype, "smem")

    r0, rows = sdp.rows(bm, index)
    c0, cols = sdp.cols(bn, index)
    s, dp = Buffer("S", rows, cols), Buffer("dP", rows, cols)
    # what this set reads of each operand: its rows of Q and dO, its keys of K and V
    q_rows, do_rows, k_rows = View(q, r0, rows), View(do, r0, rows), View(k, c0, cols)
    v_rows: View | Buffer = View(v, c0, cols)
    lse, dsum = View(pipes["LSE"], r0, rows), View(pipes["D"], r0, rows)
    p_part, ds_part = (View(b, r0, rows, c0, cols) for b in (p_smem, ds_smem))

    n0, n_rows = dkv.rows(bn, index)
    e0, e_cols = dkv.cols(d, index)
    dk, dv = Buffer("dK", n_rows, e_cols), Buffer("dV", n_rows, e_cols)
    m0, m_rows = dq_share.rows(bm, index)
    f0, f_cols = dq_share.cols(d, index)
    dq = Buffer("dQ", m_rows, f_cols)

    load_v: list[Op] = []
    if t.v_in_registers:
        v_reg = Buffer("V_reg", cols, d, dtype)
        load_v = [Compute("copy", v_reg, (v_rows,), cols, d), Exchange("V", 0, cols * d * 2 * WARPS_PER_SET)]
        v_rows = v_reg

    def body(walk: backward_walks.Walk, row: Index, key0: Index) -> list[Op]:
        mask = [mask_op(s, problem, row + r0, key0 + c0)] if walk.masked else []
        dq_row = row + acc_shift + m0
        # a dropped P keeps its size and loses its sign, so that dS knows both
        drop = [dropout_op("dropout_sign", s, problem, row + r0, key0 + c0)] if problem.dropout else []
        cap, uncap = softcap_backward_ops(s, dp, problem)
        ops: list[Op] = [
            Consume(q),
            Consume(pipes["LSE"]),
            Consume(do),
            Consume(pipes["D"]),
            Barrier("block", WARP_SETS),
            Matmul(s, q_rows, k_rows, transpose_b=True, split=sdp.split),
            *cap,
            *mask,
            Compute("exp_lse", s, (s, lse), rows, cols, (("scale", softmax_scale(problem)),)),
            Release(pipes["LSE"]),
            *drop,
            Compute("convert_positive" if drop else "convert", p_part, (s,), rows, cols),
            Exchange("P", rows * cols * 2, 0),
            Matmul(dp, do_rows, v_rows, transpose_b=True, split=sdp.split),
            Compute("softmax_grad_dropout" if drop else "softmax_grad", dp, (s, dp, dsum), rows, cols),
            *uncap,
            Release(pipes["D"]),
            Compute("convert", ds_part, (dp,), rows, cols),
            Exchange("dS", rows * cols * 2, 0),
            Barrier("block", WARP_SETS),
            Matmul(
                dv, View(p_smem, 0, bm, n0, n_rows), View(do, 0, bm, e0, e_cols), transpose_a=True, accumulate=True,
                split=dkv.split,
            ),
            # dO has one buffer: every warp is done with it before the next block is fetched
            Barrier("block", WARP_SETS),
            Release(do),
            Matmul(dq, View(ds_smem, m0, m_rows), View(k, 0, bn, f0, f_cols), split=dq_share.split),
            Store(dq, tile(tensors["dQ_accum"], _dq_head(problem), dq_row, m_rows, f0, f_cols), True, via="atomic"),
            Matmul(
                dk, View(ds_smem, 0, bm, n0, n_rows), View(q, 0, bm, e0, e_cols), transpose_a=True, accumulate=True,
                split=dkv.split,
            ),
            Release(q),
        ]  # fmt: skip
        counted = [op for op in ops if not (isinstance(op, Compute) and op.fn in _BESIDE_COUNTS)]
        elements = rows * cols
        ops = among_streams(ops, counted, mix, elements)
        return spread_over_matmuls(ops, (), mix.tensor * elements)

    def block(key0: Index) -> list[Op]:
        """All of one key block."""
        expanded = problem.group > 1
        head = var("q_head") if expanded else var("kv_head")
        store: list[Op] = []
        for buffer, name, factor in ((dv, "dV", rescale), (dk, "dK", scale * rescale)):
            out = Buffer(f"{name}_out", n_rows, e_cols, dtype)
            target = tensors[f"{name}_expanded" if expanded else name]
            if factor != 1.0:
                store.append(Compute("scale", buffer, (buffer,), n_rows, e_cols, (("factor", factor),)))
            store += [
                Compute("convert", out, (buffer,), n_rows, e_cols),
                Exchange(name, n_rows * e_cols * 2, n_rows * e_cols * 2),
                Store(out, tile(target, head, key0 + n0, n_rows, e0, e_cols)),
            ]
        around = Instructions("around", instructions_around(counts.around[uneven] * 16 * WARPS_PER_SET, store))
        loops = [Loop("i", w.count, body(w, w.first_row + var("i") * -bm, key0)) for w in walks]
        return [
            Consume(k), Consume(v), Barrier("keys", WARP_SETS), *load_v, around, fill(dk, 0.0), fill(dv, 0.0), *loops,
            Barrier("keys", WARP_SETS), Release(k), Release(v), around, *store,
        ]  # fmt: skip

    return Role(f"warps{index}", key_loop(block), warps=WARPS_PER_SET)


def _dq_head(problem: AttentionProblem) -> Index:
    """The head of dQ's fp32 buffer; the deterministic kernel has a buffer per CTA of a head."""
    heads = problem.batch * problem.heads
    return var("q_head") + var("split") * heads if problem.deterministic else var("q_head")


def _loader(
    t: BackwardTile,
    problem: AttentionProblem,
    tensors: dict[str, Tensor],
    pipes: dict[str, Pipe],
    walks: Sequence[backward_walks.Walk],
    key_loop: Callable[[Callable[[Index], list[Op]]], list[Op]],
) -> Role:
    """cp.async by all threads: K and V once, then Q (two buffers), LSE, dO and D of each query block."""
    bm, bn, d = t.tile_m, t.tile_n, t.padded_head_dim
    head, kv_head, acc_shift = var("q_head"), var("kv_head"), backward_walks.shift_index(problem)

    def rows(row: Index) -> list[Op]:
        ops: list[Op] = []
        for name, tensor, cols in (("q", "Q", d), ("LSE", "LSE", 1), ("dO", "dO", d), ("D", "D", 1)):
            first = row + acc_shift if tensor == "D" else row
            ops += [Acquire(pipes[name]), Load(tile(tensors[tensor], head, first, bm, 0, cols), pipes[name])]
        return ops

    def block(key0: Index) -> list[Op]:
        ops: list[Op] = []
        for name, tensor in (("k", "K"), ("v", "V")):
            ops += [Acquire(pipes[name]), Load(tile(tensors[tensor], kv_head, key0, bn, 0, d), pipes[name])]
        return ops + [Loop("i", w.count, rows(w.first_row + var("i") * -bm)) for w in walks]

    return Role("loader", key_loop(block), warps=0)


def _is_even(problem: AttentionProblem, t: BackwardTile) -> bool:
    """Whether the kernel without bounds checks runs (flash_bwd_launch_template.h, IsEvenMNConst); never for lengths by
    sequence."""
    p = problem
    whole = p.seqlen_q % t.tile_m == 0 and p.seqlen_k % t.tile_n == 0 and not varlen.is_varlen(p)
    return whole and p.head_dim == t.padded_head_dim and p.head_dim <= 128


def _main_kernel(
    problem: AttentionProblem, t: BackwardTile, tensors: dict[str, Tensor], gpu: Profile, splits: int
) -> Kernel:
    """``flash_bwd_dq_dk_dv_loop_seqk_parallel``: a CTA for each key block, or ``splits`` CTAs a head that stride."""
    p = problem
    key_blocks = ceil_div(p.seqlen_k, t.tile_n)
    by_sequence = varlen.is_varlen(p)
    even = _is_even(p, t)
    top_row = (ceil_div(p.seqlen_q, t.tile_m) - 1) * t.tile_m
    pipes = {
        "q": Pipe("q", t.tile_m, t.padded_head_dim, p.dtype, t.q_stages, WARP_SETS),
        "dO": Pipe("dO", t.tile_m, t.padded_head_dim, p.dtype, t.do_stages, WARP_SETS),
        "k": Pipe("k", t.tile_n, t.padded_head_dim, p.dtype, 1, WARP_SETS),
        "v": Pipe("v", t.tile_n, t.padded_head_dim, p.dtype, 1, WARP_SETS),
        "LSE": Pipe("LSE", t.tile_m, 1, "fp32", 1, WARP_SETS),
        "D": Pipe("D", t.tile_m, 1, "fp32", 1, WARP_SETS),
    }
    if p.deterministic:
        split, batch, head = grid_indices(splits, p.batch, p.heads)
        block = np.minimum(split, key_blocks - 1)
        seen = backward_walks.walks_of(p, t.tile_m, t.tile_n, block, batch, even)
        coords = {
            "split": split,
            "n_keys": np.maximum(0, -((split - key_blocks) // splits)),
            "n_rows": seen.stop - seen.first,
            "key0": split * t.tile_n,
        }
        step = splits * t.tile_n // t.tile_m if p.causal else 0
        # every block tests the mask: how many need it varies from key block to key block of one CTA
        needs_mask = p.causal or not even
        walks = [backward_walks.Walk(var("n_rows") - var("t") * step, Index(top_row), needs_mask)]
        trips: tuple[Trip, ...] = (Trip("n_keys"), Trip("n_rows", "n_keys", -step))

        def key_loop(block: Callable[[Index], list[Op]]) -> list[Op]:
            return [Loop("t", var("n_keys"), block(var("key0") + var("t") * (splits * t.tile_n)))]
    else:
        block, batch, head = grid_indices(key_blocks, p.batch, p.heads)
        seen = backward_walks.walks_of(p, t.tile_m, t.tile_n, block, batch, even)
        coords, walks = backward_walks.walk_coordinates(seen, t.tile_m)
        trips = tuple(Trip(name) for name in coords if name.startswith("n_"))
        coords["key0"] = seen.places["key0"]

        def key_loop(block: Callable[[Index], list[Op]]) -> list[Op]:
            return block(var("key0"))

    coords["q_head"] = batch * p.heads + head
    coords["kv_head"] = batch * p.kv_heads + head // p.group
    if by_sequence:
        coords |= seen.places
        coords["acc_shift"] = backward_walks.shifts(p, PADDED_ROWS)[batch]
    loader = _loader(t, p, tensors, pipes, walks, key_loop)
    sets = (_warp_set(i, p, t, tensors, pipes, walks, key_loop) for i in range(WARP_SETS))
    ctas = (loader, *sets)
    kernel = Kernel(
        "flash_bwd",
        varlen.within_sequence(ctas) if by_sequence else ctas,
        coords,
        trips,
        threads=t.threads,
        smem_bytes=t.smem_bytes,
        registers_per_thread=t.registers_per_thread,
        ctas_per_sm=t.ctas_per_sm,
        path=instruction_path("mma_sync", gpu),
        compute_dtype=p.dtype,
        in_step_iterations=fa2_backward(p.head_dim),
    )
    return backward_walks.where_live(kernel, seen.live) if by_sequence else kernel


def backward_tile(problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None) -> BackwardTile:
    """The shipped kernel's tile for ``problem`` (whether or not it fits), or the kernel with ``tiles``
    (:class:`UnsupportedError` when that does not fit ``gpu``)."""
    p = problem
    t = fa2_backward_tile(p.head_dim, p.dtype, bool(p.dropout), gpu.smem_bytes_per_cta_max, p.group > 1)
    if tiles is None:
        return t
    return fa2_backward_with(tiles, t, warp_rows(replace(t, tile_n=tiles.tile_n)), gpu)


def backward_tile_space(problem: AttentionProblem, gpu: Profile) -> TileSpace:
    """What may be chosen for the backward pass."""
    base = backward_tile(problem, gpu)
    return backward_space(problem, base, lambda choice: backward_tile(problem, gpu, choice), 32)


def build_backward(
    problem: AttentionProblem,
    impl: Implementation,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: TileChoice | None = None,
) -> Program:
    """The FA2 backward program for ``problem`` on ``gpu``: inputs Q K V O LSE dO, outputs dQ dK dV."""
    asked, p = problem, effective_masks(problem, problem.seqlen_k, max(problem.seqlen_q, problem.seqlen_k))
    substitutions = check_capabilities(impl, gpu, hypothetical)
    if p.head_dim > 256:
        raise UnsupportedError(f"head_dim {p.head_dim}: {impl.name} runs head dims up to 256")
    if p.softcap and p.dropout:
        raise UnsupportedError(f"softcap with dropout: {impl.name} runs one of them")
    if p.deterministic and (p.window is not None or varlen.is_varlen(p)):
        raise UnsupportedError(
            f"deterministic with a window or lengths by sequence: not modelled for {impl.name}; leave one of them out"
        )
    grouped = p.group > 1
    t = backward_tile(p, gpu, tiles)
    if t.smem_bytes > gpu.smem_bytes_per_cta_max:
        raise UnsupportedError(
            f"{impl.name}'s backward {t.tile_m}x{t.tile_n} tile needs {t.smem_bytes} bytes of SMEM; "
            f"{gpu.name} has {gpu.smem_bytes_per_cta_max} a CTA"
        )
    heads = p.batch * p.heads
    splits = ceil_div(gpu.num_sms, heads) if p.deterministic else 1
    if p.deterministic and p.causal and (p.seqlen_q < p.seqlen_k or splits * t.tile_n % t.tile_m):
        raise UnsupportedError(
            f"deterministic, causal: {impl.name} is modelled for seqlen_q >= seqlen_k and key blocks that hold whole "
            f"query blocks; here {p.seqlen_q} < {p.seqlen_k} or {t.tile_n} rows against {t.tile_m}"
        )
    tensors = gradient_tensors(p, t.tile_m, t.tile_n)
    d, padded_rows = t.padded_head_dim, ceil_div(p.seqlen_q, PADDED_ROWS) * PADDED_ROWS
    tensors["D"] = Tensor("D", heads, padded_rows, 1, "fp32", "scratch", t.tile_m)
    tensors["dQ_accum"] = Tensor("dQ_accum", splits * heads, padded_rows, d, "fp32", "scratch", t.tile_m)
    if grouped:
        for name in ("dK", "dV"):
            expanded = Tensor(f"{name}_expanded", heads, p.seqlen_k, p.head_dim, p.dtype, "scratch", t.tile_n)
            tensors[expanded.name] = expanded
    tensors = backward_walks.ragged(tensors, p, {"D": PADDED_ROWS, "dQ_accum": PADDED_ROWS})
    helpers = {h.name: h for h in t.helpers}
    rows = backward_walks.row_tiles(p, t.tile_m, p.heads, "q_head", PADDED_ROWS)
    acc_shift = backward_walks.shift_index(p)
    accumulator = tensors["dQ_accum"]
    before = []
    if p.deterministic:
        before.append(zero_fill("fill_dQ_accum", accumulator, t.tile_m, 128, gpu))
    pre, post = helpers["flash_bwd_dot_do_o"], helpers["flash_bwd_convert_dq"]
    before.append(
        dot_do_o(
            pre.name, tensors, rows, t.tile_m, pre.threads, d, gpu,
            None if p.deterministic else accumulator, keep=1.0 - p.dropout, shift=acc_shift,
        )
    )  # fmt: skip
    after = [
        convert(
            post.name, accumulator, tensors["dQ"], {"head" if n == "q_head" else n: x for n, x in rows.items()},
            t.tile_m, post.threads, p.head_dim**-0.5 / (1.0 - p.dropout), gpu, splits, t.tile_m * d * 2, acc_shift,
        )
    ]  # fmt: skip
    for name in ("dK", "dV") if grouped else ():
        h = helpers[f"sum_{name}"]
        expanded = tensors[f"{name}_expanded"]
        of_keys = backward_walks.row_tiles(p, h.rows_per_cta, p.kv_heads, "head", 1, of_keys=True)
        after.append(group_sum(h.name, expanded, tensors[name], p.group, h.rows_per_cta, h.threads, gpu, of_keys))
    return Program(
        "fa2",
        impl.name,
        asked,
        (*before, _main_kernel(p, t, tensors, gpu, splits), *after),
        {k: tensors[k] for k in ("Q", "K", "V", "O", "LSE", "dO")},
        {k: tensors[k] for k in ("dQ", "dK", "dV")},
        compulsory_bytes(tensors.values()),
        substitutions=tuple(substitutions),
        attributes={"backward_tile": (t.tile_m, t.tile_n), "dq_splits": splits},
    )
