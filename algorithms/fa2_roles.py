"""The roles of FA2's forward CTA, with the registers that its compiled kernels spill."""

from __future__ import annotations

from collections.abc import Callable

from algorithms.common import (
    dropout_op,
    fill,
    mask_op,
    row_vectors,
    softcap_ops,
    softmax_scale,
)
from algorithms.counted import instructions_around, residual_instructions, spread_over_matmuls
from algorithms.fa2_code import build_of, fetches, is_uneven
from algorithms.fa2_counts import BlockCounts, Fa2Build
from algorithms.kernel_tables import Fa2Tile
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
    Tile,
    View,
    Wait,
    tile,
    var,
)

#: Operations that the counted kernels did not execute in (most of) their iterations.
_MASKS = frozenset({"mask", "mask_window"})
_BESIDE_COUNTS = _MASKS | {"dropout", "softcap"}


def softmax_step(s: Buffer, p: Buffer, vectors: dict[str, Buffer], o: Buffer, scale: float) -> list[Op]:
    """One block's online softmax (eq. in §3.1.1): m, P = exp(S - m), l, and O rescaled by exp(m_old - m)."""
    m, m_old, l, alpha = (vectors[name] for name in ("m", "m_old", "l", "alpha"))
    rows, cols = s.rows, s.cols
    factor = (("scale", float(scale)),)
    return [
        Compute("copy", m_old, (m,), rows, 1),
        Compute("row_max", m, (s, m_old), rows, cols),
        Compute("rescale_factor", alpha, (m_old, m), rows, 1, factor),
        Compute("rescale", o, (o, alpha), rows, o.cols),
        Compute("exp", s, (s, m), rows, cols, factor),
        Compute("accumulate_sum", l, (l, alpha, s), rows, cols),
        Compute("convert", p, (s,), rows, cols),
    ]


def epilogue(o: Buffer, out: Buffer, vectors: dict[str, Buffer], scale: float) -> list[Op]:
    """O / l and LSE = m + log l, once at the end: the rescaling that FA2 defers."""
    m, l, lse = vectors["m"], vectors["l"], vectors["lse"]
    return [
        Compute("normalise", o, (o, l), o.rows, o.cols),
        Compute("convert", out, (o,), o.rows, o.cols),
        Compute("lse", lse, (m, l), o.rows, 1, (("scale", float(scale)),)),
    ]


def spill_slots(t: Fa2Tile, gpu: Profile) -> int:
    """Places for a CTA's local memory: a CTA takes the SM's next warp slots in turn, not those that were left last."""
    return gpu.num_sms * max(1, gpu.max_threads_per_sm // t.threads)


def spilled_bytes(block: BlockCounts, t: Fa2Tile) -> int:
    """Bytes that a CTA spills in a key block: four of each lane and store, in whole lines of each set of warps."""
    return 4 * round(block.stores) * t.threads


def spill_frame_bytes(build: Fa2Build, t: Fa2Tile) -> int:
    """Bytes of a CTA's local memory that a launch keeps writing: what a looped block stores, or a masked one where the
    loop keeps its registers. A masked block passes over the same lines (H200 counters: hardly any reaches HBM)."""
    return spilled_bytes(build.loop, t) or spilled_bytes(build.masked, t)


def frame_parts(build: Fa2Build, t: Fa2Tile) -> int:
    """Rows that a frame is stored in: one, or two where a masked block passes over it once and a half."""
    passes = spilled_bytes(build.masked, t) / max(1, spill_frame_bytes(build, t))
    return 2 if 0.4 < passes % 1 < 0.6 else 1


def spill_tensor(t: Fa2Tile, gpu: Profile, problem: AttentionProblem) -> Tensor | None:
    """Local memory for spilled registers: a row or two for each CTA that the GPU holds; ``None`` without spills.

    Spilled stores go through to L2; the same lines are reused by every iteration and by every later CTA.
    """
    build = build_of(problem, t)
    parts = frame_parts(build, t)
    words = spill_frame_bytes(build, t) // 4 // parts
    rows = parts * spill_slots(t, gpu)
    return Tensor("spill", 1, rows, words, "fp32", "scratch", 1, words) if words else None


def roles(
    problem: AttentionProblem,
    t: Fa2Tile,
    tensors: dict[str, Tensor],
    group: int,
    o_tile: Callable[[Index, int], Tile],
    lse_tile: Callable[[Index, int], Tile],
    *,
    split: bool = False,
    in_step: bool = False,
) -> tuple[Role, ...]:
    """The loader (cp.async issued by the compute warps, one K and one V buffer) and the compute warps.

    Warps are taken four at a time (one per SM sub-partition); each set owns ``Br * 4 / num_warps`` rows.
    ``o_tile``/``lse_tile`` map (first row, rows) to where the results go. ``split`` takes the counted instructions
    of the split-KV kernel. A tensor ``spill`` among ``tensors`` receives spilled registers (coordinate ``slot``).
    """
    build = build_of(problem, t, split)
    window = problem.window is not None
    sets = max(1, t.num_warps // 4)
    rows, d = t.tile_m // sets, t.padded_head_dim
    dtype = problem.dtype
    scale = softmax_scale(problem)
    q_smem = Buffer("q_smem", t.tile_m, d, dtype, "smem")
    k_pipe = Pipe("k", t.tile_n, d, dtype, t.kv_stages, sets)
    v_pipe = Pipe("v", t.tile_n, d, dtype, t.kv_stages, sets)
    head, kv_head = var("q_head"), var("kv_head")
    code, masked_code, loop_code = fetches(problem, t, split, in_step or window)
    # the kernel for whole tiles and no mask (IsEvenMNConst) looks for none
    unmasked = not (split or problem.causal or window or is_uneven(problem, t))

    def fetch(first_row: str) -> list[Op]:
        row = var(first_row) + var("j") * -t.tile_n
        return [
            Acquire(k_pipe),
            Load(tile(tensors["K"], kv_head, row, t.tile_n, 0, d), k_pipe),
            # V's copies are issued at the head of the iteration, once K has arrived (flash_fwd_kernel.h, cp_async_wait)
            Wait("begun"),
            Acquire(v_pipe),
            Load(tile(tensors["V"], kv_head, row, t.tile_n, 0, d), v_pipe),
        ]

    loader = Role(
        "loader",
        [Loop("j", var("n_masked"), fetch("masked_row")), Loop("j", var("n_full"), fetch("full_row"))],
        warps=0,
    )

    def compute(index: int) -> Role:
        s = Buffer("S", rows, t.tile_n)
        p = Buffer("P", rows, t.tile_n, dtype)
        o = Buffer("O", rows, d)
        out = Buffer("O_out", rows, d, tensors["O"].dtype if "O" in tensors else "fp32")
        vectors = {b.name: b for b in row_vectors(rows, "m", "m_old", "l", "alpha", "lse")}
        row0 = var("row0") + index * rows
        warps = min(4, t.num_warps)
        q = View(q_smem, index * rows, rows)

        def body(first_row: str, masked: bool) -> list[Op]:
            col: Index = var(first_row) + var("j") * -t.tile_n
            *softmax, to_16_bit = softmax_step(s, p, vectors, o, scale)
            # the row sum l takes P before dropout
            drop = [dropout_op("dropout", s, problem, row0, col)] if problem.dropout else []
            ops = [
                Consume(k_pipe),
                *([Signal("begun")] if index == 0 else []),
                Barrier("block", sets),
                Matmul(s, q, k_pipe, transpose_b=True),
                *softcap_ops(s, problem),
                # with a window every block is masked
                *([mask_op(s, problem, row0, col, group)] if (masked and not unmasked) or window else []),
                # V is waited for before softmax: one barrier both publishes it and frees K's buffer
                Consume(v_pipe),
                Barrier("block", sets),
                Release(k_pipe),
                *softmax,
                *drop,
                to_16_bit,
                Matmul(o, p, v_pipe, accumulate=True),
                Release(v_pipe),
            ]
            elements = rows * t.tile_n
            block, mix = build.masked if masked else build.loop, build.mix(masked)
            counted = [op for op in ops if not (isinstance(op, Compute) and op.fn in _BESIDE_COUNTS)]
            ops = spread_over_matmuls(ops, (), mix.tensor * elements)
            ops[0:0] = masked_code if masked else loop_code
            # fragment loads, addresses and predicates are issued between softmax and the products
            beyond = residual_instructions(counted, mix, elements)
            if block.stores + block.loads:
                # spilled registers pass through L1, a line of 128 bytes a warp
                beyond += (("wavefronts", (block.stores + block.loads) * warps),)
            ops.insert(len(ops) - 2, Instructions("softmax", beyond))
            if "spill" in tensors:
                words, parts = tensors["spill"].cols // sets, frame_parts(build, t)
                for part in range(round(spilled_bytes(block, t) / 4 / sets / words)):
                    row = var("slot") * parts + part % parts
                    where = tile(tensors["spill"], 0, row, 1, index * words, words)
                    ops.append(Store(View(Buffer("spilled", 1, words)), where))
            return ops

        load_q = Load(tile(tensors["Q"], head, row0, rows, 0, d), q)
        factor = (("factor", 1.0 / (1.0 - problem.dropout)),)
        rescale = [Compute("scale", o, (o,), rows, d, factor)] if problem.dropout else []
        begin = [fill(o, 0.0), fill(vectors["l"], 0.0), fill(vectors["m"], float("-inf"))]
        end = epilogue(o, out, vectors, scale)
        outside = Instructions("around", instructions_around(build.around * 32 * warps / 2, [*begin, *end]))
        return Role(
            f"warps{index}",
            [
                load_q,
                *([] if split else [outside]),
                *code,
                Barrier("q", sets),
                *begin,
                Loop("j", var("n_masked"), body("masked_row", True)),
                Loop("j", var("n_full"), body("full_row", False)),
                *rescale,
                outside,
                *end,
                # O leaves through Q's SMEM, so that whole rows are stored
                Exchange("O", rows * d * 2, rows * d * 2),
                Barrier("O", sets),
                Store(View(out), o_tile(row0, rows)),
                Store(View(vectors["lse"]), lse_tile(row0, rows)),
            ],
            warps=warps,
        )

    return (loader, *(compute(i) for i in range(sets)))
