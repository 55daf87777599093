"""The roles of the Hopper backward kernel: a TMA loader, two MMA warpgroups, and the warp that adds dQ.

Up to head dim 128, S is computed transposed and the warpgroups share the keys, so that P^T and dS^T feed dV and dK
from registers and only dS, which dQ needs whole, goes through SMEM. S and dP are issued together; exp runs under dP;
dQ and dK under each other's tail. dQ leaves by SMEM and a bulk reduce-add in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from algorithms.backward_walks import shift_index
from algorithms.common import LOG2E, fill, softcap_backward_ops, softmax_scale
from algorithms.counted import among_streams
from algorithms.instruction_counts import InstructionMix
from algorithms.kernel_tables import BackwardTile
from simulator.problem import AttentionProblem
from simulator.program import (
    Acquire,
    Await,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Index,
    Load,
    Loop,
    Matmul,
    Op,
    Pipe,
    Release,
    Role,
    Signal,
    Store,
    Tensor,
    View,
    Wait,
    as_index,
    tile,
    var,
)

GROUPS = 2


@dataclass(frozen=True)
class Gemms:
    """How the two warpgroups share each product, as data (interface.py ``_tile_size_bwd_sm90``).

    ``transposed``: S, dP, P, dS are held keys x queries (SdP_swapAB), each warpgroup its keys. ``dkv``: warpgroups
    share dK and dV by ``keys``, or, held transposed, by keys (``keys_swapped``) or head dim (``head_dim_swapped``).
    ``dq``: they share dQ by ``rows``, ``head_dim``, ``head_dim_swapped`` (dQ held transposed) or ``one`` makes all.
    """

    transposed: bool
    dkv: str
    dq: str

    @classmethod
    def of(cls, t: BackwardTile) -> Gemms:
        d = t.padded_head_dim
        if d > 192:
            return cls(False, "head_dim_swapped", "head_dim")
        if d > 128:
            return cls(False, "keys_swapped", "head_dim")
        if t.dq_warpgroups == 1:
            return cls(True, "keys", "one")
        if t.tile_m == 128:
            return cls(True, "keys", "rows")
        return cls(True, "keys", "head_dim" if t.tile_m % 64 == 0 else "head_dim_swapped")


def _mask(s: Buffer, problem: AttentionProblem, transposed: bool, row: Index, key: Index) -> Compute:
    """The mask that every block applies: the end of the keys, and the diagonal if causal or the window's edges."""
    fn = ("mask_transposed" if problem.causal else "mask_end_transposed") if transposed else "mask_bits"
    if problem.window is not None:
        fn = "mask_window_transposed" if transposed else "mask_window"
    left, right = problem.sides
    params = (
        ("row", as_index(row)),
        ("col", as_index(key)),
        ("seqlen_k", problem.seqlen_k),
        ("shift", problem.seqlen_k - problem.seqlen_q),
        ("left", left),
        ("right", right),
    )
    return Compute(fn, s, (s,), s.rows, s.cols, params)


def _row_loops(t: BackwardTile, body: Callable[[Index, int], list[Op]]) -> list[Op]:
    """The walk over query blocks: two at a time where P and dS have two buffers, ``body(row, buffer)`` each."""
    i = var("i")
    if t.pds_stages == 1:
        return [Loop("i", var("n_rows"), body(var("row0") + i * t.tile_m, 0))]
    pair = [*body(var("row0") + i * (2 * t.tile_m), 0), *body(var("row0") + i * (2 * t.tile_m) + t.tile_m, 1)]
    return [Loop("i", var("n_pairs"), pair), Loop("i", var("n_odd"), body(var("odd_row") + i * t.tile_m, 0))]


def _warpgroup(
    index: int,
    problem: AttentionProblem,
    t: BackwardTile,
    tensors: dict[str, Tensor],
    pipes: dict[str, Pipe],
    mix: InstructionMix,
) -> Role:
    """One of the two MMA warpgroups; ``mix``: its counted instructions."""
    g = Gemms.of(t)
    bm, bn, d, dtype = t.tile_m, t.tile_n, t.padded_head_dim, problem.dtype
    scale = problem.head_dim**-0.5
    q, do, k, v = (pipes[name] for name in ("q", "dO", "k", "v"))
    keys, first_key = bn // GROUPS, index * (bn // GROUPS)
    half = d // GROUPS
    key0 = var("key0")
    k_rows, v_rows = View(k, first_key, keys), View(v, first_key, keys)

    if g.transposed:
        s, dp = Buffer("S", keys, bm), Buffer("dP", keys, bm)
        scores = [
            Matmul(s, k_rows, q, transpose_b=True, token="S"),
            Matmul(dp, v_rows, do, transpose_b=True, token="dP"),
        ]
        suffix, smem_shape = "_transposed", (bn, bm)
    else:
        s, dp = Buffer("S", bm, keys), Buffer("dP", bm, keys)
        scores = [
            Matmul(s, q, k_rows, transpose_b=True, token="S"),
            Matmul(dp, do, v_rows, transpose_b=True, token="dP"),
        ]
        suffix, smem_shape = "", (bm, bn)
    p, ds = (Buffer(name, s.rows, s.cols, dtype) for name in ("P", "dS"))
    cap, uncap = softcap_backward_ops(s, dp, problem)
    scale_log2 = softmax_scale(problem) * LOG2E
    part_bytes = s.rows * s.cols * 2
    # up to head dim 64 a lane holds a part of LSE and D and gets the others by warp shuffles
    shuffled = g.transposed and d <= 64
    shuffle = [Compute("shuffle_statistic", s, (s,), s.rows, s.cols)] if shuffled else []

    if g.dkv == "keys_swapped":
        dk, dv = Buffer("dK", d, keys), Buffer("dV", d, keys)
    elif g.dkv == "keys":
        dk, dv = Buffer("dK", keys, d), Buffer("dV", keys, d)
    else:
        dk, dv = Buffer("dK", half, bn), Buffer("dV", half, bn)

    makes_dq = g.dq != "one" or index == 0
    dq_smem = Buffer("dQ_smem", bm, d, "fp32", "smem")
    if g.dq == "head_dim_swapped":
        dq, dq_part = Buffer("dQ", half, bm), View(dq_smem, 0, bm, index * half, half)
    elif g.dq == "head_dim":
        dq, dq_part = Buffer("dQ", bm, half), View(dq_smem, 0, bm, index * half, half)
    elif g.dq == "rows":
        dq, dq_part = Buffer("dQ", bm // GROUPS, d), View(dq_smem, index * (bm // GROUPS), bm // GROUPS)
    else:
        dq, dq_part = Buffer("dQ", bm, d), View(dq_smem)

    def body(row: Index, stage: int) -> list[Op]:
        p_smem, ds_smem = (Buffer(f"{n}_smem{stage}", *smem_shape, dtype, "smem") for n in ("P", "dS"))

        def own_part(buffer: Buffer) -> View:
            if g.transposed:
                return View(buffer, first_key, keys)
            return View(buffer, 0, bm, first_key, keys)

        def keys_product(out: Buffer, probabilities: Buffer, in_smem: Buffer, rows: Pipe, token: str) -> Matmul:
            """``out += probabilities^T @ rows`` or its transpose: dV with P and dO, dK with dS and Q."""
            if g.dkv == "keys":
                return Matmul(out, probabilities, rows, accumulate=True, token=token)
            if g.dkv == "keys_swapped":
                return Matmul(out, rows, own_part(in_smem), transpose_a=True, accumulate=True, token=token)
            columns = View(rows, 0, bm, index * half, half)
            return Matmul(out, columns, in_smem, transpose_a=True, accumulate=True, token=token)

        if g.dq == "head_dim_swapped":
            to_dq = Matmul(dq, View(k, 0, bn, index * half, half), ds_smem, transpose_a=True, token="dQ")
        elif g.dq == "rows":
            own_queries = View(ds_smem, 0, bn, index * (bm // GROUPS), bm // GROUPS)
            to_dq = Matmul(dq, own_queries, k, transpose_a=True, token="dQ")
        else:
            columns = View(k, 0, bn, index * half, half) if g.dq == "head_dim" else View(k)
            to_dq = Matmul(dq, ds_smem, columns, transpose_a=g.transposed, token="dQ")

        shared = not t.p_in_registers
        write_p: list[Op] = [Compute("copy", own_part(p_smem), (p,), p.rows, p.cols), Exchange("P", part_bytes, 0)]
        single = t.pds_stages == 1
        meet = Barrier("PdS", GROUPS)
        publish = "relabel_transposed" if g.dq == "head_dim_swapped" else "copy"
        hand_over: list[Op] = [
            Wait(f"dq_empty{index}"),
            Compute(publish, dq_part, (dq,), dq.rows, dq.cols),
            Exchange("dQ", dq.rows * dq.cols * 4, 0),
            Signal(f"dq_full{index}"),
        ]
        to_dk = keys_product(dk, ds, ds_smem, q, "dK")
        if makes_dq:
            tail: list[Op] = [
                to_dq,
                Await("dV"),
                Release(do),
                Release(pipes["D"]),
                to_dk,
                Await("dQ"),
                *hand_over,
                Await("dK"),
            ]
        else:
            tail = [to_dk, Await("dV"), Release(do), Release(pipes["D"]), Await("dK")]
        ops: list[Op] = [
            Consume(q),
            Consume(pipes["LSE"]),
            scores[0],
            Consume(do),
            Consume(pipes["D"]),
            scores[1],
            Await("S"),
            *cap,
            _mask(s, problem, g.transposed, row, key0 + first_key),
            *shuffle,
            Compute(f"exp2_lse{suffix}", s, (s, pipes["LSE"]), s.rows, s.cols, (("scale_log2", scale_log2),)),
            Compute("convert", p, (s,), s.rows, s.cols),
            # P of the last block may still be read by the other warpgroup's products
            *([meet] if shared and single else []),
            *(write_p if shared else []),
            Await("dP"),
            *shuffle,
            Compute(f"softmax_grad{suffix}", dp, (s, dp, pipes["D"]), s.rows, s.cols),
            *uncap,
            Compute("convert", ds, (dp,), s.rows, s.cols),
            *([meet] if shared or single else []),
            Compute("copy", own_part(ds_smem), (ds,), ds.rows, ds.cols),
            Exchange("dS", part_bytes, 0),
            keys_product(dv, p, p_smem, do, "dV"),
            meet,
            *tail,
            Release(q),
            Release(pipes["LSE"]),
        ]
        return among_streams(ops, ops, mix, s.rows * s.cols)

    return Role(
        f"warpgroup{index}",
        [
            Consume(k),
            Consume(v),
            fill(dk, 0.0),
            fill(dv, 0.0),
            *_row_loops(t, body),
            *_epilogue(index, problem, t, tensors, {"dV": dv, "dK": dk}, g, scale),
        ],
        issue_interval_cycles=mix.issue_interval_cycles,
    )


def _epilogue(
    index: int,
    problem: AttentionProblem,
    t: BackwardTile,
    tensors: dict[str, Tensor],
    results: dict[str, Buffer],
    g: Gemms,
    scale: float,
) -> list[Op]:
    """dV, then dK, through the SMEM of V and K: 16-bit by TMA, or (GQA) reduced in fp32 into the KV head's buffer."""
    keys, half = t.tile_n // GROUPS, t.padded_head_dim // GROUPS
    grouped = problem.group > 1
    dtype = "fp32" if grouped else problem.dtype
    ops: list[Op] = []
    for name, buffer in results.items():
        if g.dkv == "head_dim_swapped":
            rows, cols, row, col = t.tile_n, half, var("key0"), index * half
        else:
            rows, cols, row, col = keys, t.padded_head_dim, var("key0") + index * keys, 0
        out, source = Buffer(f"{name}_out", rows, cols, dtype), buffer
        if name == "dK" and not grouped:
            ops.append(Compute("scale", buffer, (buffer,), rows, cols, (("factor", scale),)))
        if not grouped:
            source = Buffer(f"{name}_16", buffer.rows, buffer.cols, dtype)
            ops.append(Compute("convert", source, (buffer,), rows, cols))
        fn = "copy" if g.dkv == "keys" else "relabel_transposed"
        if grouped:
            row = row + shift_index(problem, "acc_key_shift")
        place = tile(tensors[f"{name}_accum" if grouped else name], var("kv_head"), row, rows, col, cols)
        ops += [
            Compute(fn, out, (source,), rows, cols),
            Barrier("epilogue", GROUPS),
            Exchange(name, out.bytes, out.bytes),
            Store(out, place, accumulate=grouped, via="tma"),
        ]
    return ops


def _dq_writer(t: BackwardTile, tensors: dict[str, Tensor], acc_shift: Index) -> Role:
    """The warp that adds each block's dQ to the fp32 buffer in HBM: SMEM to L2 by bulk reduce."""
    g = Gemms.of(t)
    smem = Buffer("dQ_smem", t.tile_m, t.padded_head_dim, "fp32", "smem")
    chunks = 1 if g.dq == "one" else GROUPS

    def body(row: Index, _stage: int) -> list[Op]:
        ops: list[Op] = []
        for i in range(chunks):
            if g.dq == "rows":
                rows, cols, r0, c0 = t.tile_m // chunks, t.padded_head_dim, i * (t.tile_m // chunks), 0
            else:
                rows, cols, r0, c0 = t.tile_m, t.padded_head_dim // chunks, 0, i * (t.padded_head_dim // chunks)
            place = tile(tensors["dQ_accum"], var("q_head"), row + acc_shift + r0, rows, c0, cols)
            ops += [
                Wait(f"dq_full{i}"),
                Exchange("dQ", 0, rows * cols * 4),
                Store(View(smem, r0, rows, c0, cols), place, accumulate=True, via="tma"),
                Signal(f"dq_empty{i}"),
            ]
        return ops

    return Role("dq_writer", _row_loops(t, body), warps=1)


def _loader(t: BackwardTile, tensors: dict[str, Tensor], pipes: dict[str, Pipe], acc_shift: Index) -> Role:
    """The TMA warp: K and V once, then Q, LSE, dO and D of each query block as slots fall free."""
    bm, bn, d = t.tile_m, t.tile_n, t.padded_head_dim
    head = var("q_head")

    def body(row: Index, _stage: int) -> list[Op]:
        ops: list[Op] = []
        for pipe, tensor, cols in (("q", "Q", d), ("LSE", "LSE_log2", 1), ("dO", "dO", d), ("D", "D", 1)):
            first = row + acc_shift if cols == 1 else row
            place = tile(tensors[tensor], head, first, bm, 0, cols)
            ops += [Acquire(pipes[pipe]), Load(place, pipes[pipe], via="tma")]
        return ops

    once: list[Op] = []
    for pipe, tensor in (("k", "K"), ("v", "V")):
        place = tile(tensors[tensor], var("kv_head"), var("key0"), bn, 0, d)
        once += [Acquire(pipes[pipe]), Load(place, pipes[pipe], via="tma")]
    return Role("loader", [*once, *_row_loops(t, body)], warps=0)


def roles(
    problem: AttentionProblem, t: BackwardTile, tensors: dict[str, Tensor], mix: InstructionMix
) -> tuple[Role, ...]:
    """Loader, dQ writer and both warpgroups of one CTA.

    Coordinates: ``q_head``, ``kv_head``, first rows ``key0`` and ``row0`` and, with two buffers of dS, the trips
    ``n_pairs`` and ``n_odd`` with ``odd_row``, else ``n_rows``.
    """
    d, dtype = t.padded_head_dim, problem.dtype
    pipes = {
        "q": Pipe("q", t.tile_m, d, dtype, t.q_stages, GROUPS),
        "LSE": Pipe("LSE", t.tile_m, 1, "fp32", t.q_stages, GROUPS),
        "dO": Pipe("dO", t.tile_m, d, dtype, t.do_stages, GROUPS),
        "D": Pipe("D", t.tile_m, 1, "fp32", t.do_stages, GROUPS),
        "k": Pipe("k", t.tile_n, d, dtype, 1, GROUPS),
        "v": Pipe("v", t.tile_n, d, dtype, 1, GROUPS),
    }
    groups = (_warpgroup(i, problem, t, tensors, pipes, mix) for i in range(GROUPS))
    acc_shift = shift_index(problem)
    return (_loader(t, tensors, pipes, acc_shift), _dq_writer(t, tensors, acc_shift), *groups)
