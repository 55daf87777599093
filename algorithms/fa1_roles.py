"""The roles of FA1's forward CTA, whose warps share the keys of a block."""

from __future__ import annotations

from dataclasses import replace

from algorithms.common import (
    dropout_op,
    fill,
    mask_op,
    row_vectors,
)
from algorithms.counted import wavefronts_of
from algorithms.fa1_schedule import (
    KINDS,
    Schedule,
    interleaved,
)
from algorithms.standard_ops import beyond
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
    Wait,
    tile,
    var,
)


def roles(problem: AttentionProblem, s: Schedule, t: dict[str, Tensor], kinds: list[str]) -> tuple[Role, ...]:
    """The loader (Q one row block ahead) and the warps, which share every tile."""
    br, bc, d, dtype = s.rows, s.keys, s.head_dim, problem.dtype
    scale = float(problem.head_dim**-0.5)
    head, key_row = var("q_head"), var("key_row")
    q_pipe = Pipe("q", br, d, dtype, 2, consumers=2 if s.packaged else 1)
    lse_pipe = Pipe("lse_in", br, 1, "fp32", 2)
    k_smem, v_smem = Buffer("k_smem", bc, d, dtype, "smem"), Buffer("v_smem", bc, d, dtype, "smem")
    # the package holds a key block in registers while the rows go by, the others read it from SMEM for every row block
    k, v = (Buffer("K", bc, d, dtype), Buffer("V", bc, d, dtype)) if s.packaged else (k_smem, v_smem)
    scores, p = Buffer("S", br, bc), Buffer("P", br, bc, dtype, "reg" if s.packaged else "smem")
    o, o_old, out = Buffer("O", br, d), Buffer("O_old", br, d), Buffer("O_out", br, d, t["O"].dtype)
    m, m_old, total, l_old, alpha, lse = row_vectors(br, "m", "m_old", "l", "l_old", "alpha", "lse")
    statistics_bytes = br * s.warps * 4
    parties = 3 if s.packaged else 2
    step_blocks = s.slices if interleaved(problem, s) else 1
    kept = 1.0 - problem.dropout

    def rows_of(kind: str) -> Index:
        return var(KINDS[kind][0]) + var("i") * (step_blocks * br)

    def fetch(kind: str) -> Loop:
        row, (_, first, _last) = rows_of(kind), KINDS[kind]
        ops: list[Op] = [Acquire(q_pipe), Load(tile(t["Q"], head, row, br, 0, d), q_pipe)]
        if s.packaged and not first:
            ops += [Acquire(lse_pipe), Load(tile(t["LSE"], head, row, br), lse_pipe)]
        if s.packaged:
            # registers hold what is on its way: the next rows are asked for once these are multiplied
            ops.append(Wait("multiplied"))
        return Loop("i", var(kind), ops)

    def across_warps(name: str) -> list[Op]:
        """A row statistic of all warps: written and read back through SMEM; Triton's code reduces it in one of the
        warps and sends the result round the same way, with a barrier before its buffer is used again."""
        once: list[Op] = [Exchange(name, statistics_bytes, statistics_bytes), Barrier(name)]
        return once if s.packaged else [Barrier(name), *once, *once]

    def through_smem(name: str, size: int) -> list[Op]:
        """``size`` bytes from one layout of Triton's to another, through a buffer of their own."""
        return [Exchange(name, size, 0), Barrier(name), Exchange(name, 0, size)]

    def drop(row: Index) -> list[Op]:
        """P is dropped after its row sum (Algorithm 2, line 14); the last key block scales what is left up."""
        return [dropout_op("dropout", scores, problem, row, key_row)] if problem.dropout else []

    def packaged_step(row: Index, first: bool) -> list[Op]:
        """1.x: P = exp(S - m); O = (exp(L - m) O + P V) / l, L = m + log l. The statistic L seeds the maximum."""
        old = (
            [
                Consume(lse_pipe),
                Compute("scale", m_old, (lse_pipe,), br, 1, (("factor", 1.0 / scale),)),
                Release(lse_pipe),
            ]
            if not first
            else [fill(m_old, float("-inf"))]
        )
        partial_bytes = br * d * 4 * s.warps
        next_rows: list[Op] = [Signal("multiplied")]
        # one scoreboard stands for the last statistic and for O, which is asked for just before the statistic's first
        # use: the warps wait for both there. At head dim 128 the next Q is asked for after that.
        old_output: list[Op] = [Load(tile(t["O_tmp"], head, row, br, 0, d), o_old)] if not first else []
        asked = [*next_rows, *old_output] if d <= 64 else [*old_output, *next_rows]
        return [
            *asked,
            mask_op(scores, problem, row, key_row),
            *old,
            Compute("row_max", m, (scores, m_old), br, bc),
            *across_warps("max"),
            Compute("exp", scores, (scores, m), br, bc, (("scale", scale),)),
            Compute("row_sum", total, (scores,), br, bc),
            *drop(row),
            Compute("convert", p, (scores,), br, bc),
            Matmul(o, p, v, split="inner"),
            # the next Q goes from registers to SMEM
            Wait("q_in"),
            # every warp holds a partial O of its keys: summed through SMEM
            Exchange("O", partial_bytes, partial_bytes),
            *across_warps("sum"),
            *(
                [
                    Compute("rescale_factor", alpha, (m_old, m), br, 1, (("scale", scale),)),
                    Compute("add", total, (total, alpha), br, 1),
                    Compute("rescale", o_old, (o_old, alpha), br, d),
                    Compute("add", o, (o, o_old), br, d),
                ]
                if not first
                else []
            ),
            Compute("normalise", o, (o, total), br, d),
            Compute("lse", lse, (m, total), br, 1, (("scale", scale),)),
            Store(lse, tile(t["LSE"], head, row, br)),
        ]

    def paper_step(row: Index, first: bool, final: bool) -> list[Op]:
        """Lines 9 to 13: m, l and O of the row block, O normalised at once."""
        state = [(m_old, "m"), (l_old, "l"), (o_old, "O_tmp")]
        load = (
            # the first block's zeros take the same way through SMEM as what later ones load
            [fill(m_old, float("-inf")), fill(l_old, 0.0), fill(o_old, 0.0), *through_smem("O_in", br * d * 4)]
            if first
            else [
                *(Load(tile(t[name], head, row, br, 0, b.cols), b, token="state") for b, name in state[:-1]),
                Load(tile(t["O_tmp"], head, row, br, 0, d), o_old),
                Await("state"),
                *through_smem("O_in", br * d * 4),
            ]
        )
        keep = []
        for statistic, name in () if final else ((m, "m"), (total, "l")):
            keep += [*through_smem(name, br * 4), Store(statistic, tile(t[name], head, row, br))]
        return [
            Compute("scale", scores, (scores,), br, bc, (("factor", scale),)),
            mask_op(scores, problem, row, key_row),
            *load,
            Compute("row_max", m, (scores, m_old), br, bc),
            *across_warps("max"),
            Compute("exp", scores, (scores, m), br, bc),
            Compute("rescale_factor", alpha, (m_old, m), br, 1),
            Compute("multiply", l_old, (l_old, alpha), br, 1),
            Compute("row_sum", total, (scores,), br, bc),
            *across_warps("sum"),
            Compute("add", total, (total, l_old), br, 1),
            *drop(row),
            Compute("convert", p, (scores,), br, bc),
            # P goes from the warps that made its columns to those that need its rows
            Exchange("P", br * bc * 2, 0),
            Barrier("P"),
            Matmul(o, p, v, split="cols"),
            *([Compute("rescale", o_old, (o_old, l_old), br, d)] if not first else []),
            *([Compute("add", o, (o, o_old), br, d)] if not first else []),
            Compute("normalise", o, (o, total), br, d),
            *through_smem("O_out", br * d * (2 if final else 4)),
            *keep,
        ]

    def walk(kind: str) -> Loop:
        row, (_, first, final) = rows_of(kind), KINDS[kind]
        step = packaged_step(row, first) if s.packaged else paper_step(row, first, final)
        scale_up = [Compute("scale", o, (o,), br, d, (("factor", 1.0 / kept),))] if problem.dropout else []
        store = (
            [*scale_up, Compute("convert", out, (o,), br, d), Store(out, tile(t["O"], head, row, br, 0, d))]
            if final
            else [Store(o, tile(t["O_tmp"], head, row, br, 0, d))]
        )
        body = [
            Consume(q_pipe),
            Matmul(scores, q_pipe, k, transpose_b=True, split="cols"),
            Release(q_pipe),
            *step,
            *store,
        ]
        if s.mix is not None:
            counted = [op for op in body if not (isinstance(op, Compute) and op.fn == "dropout")]
            mix = replace(s.mix, issue=s.mix.issue * s.first_share) if first else s.mix
            more = beyond("counted", counted, mix, br * bc, 2)
            more_wavefronts = float(max(0, s.wavefronts - wavefronts_of(body, s.warps)))
            if s.packaged:
                # loads and stores of what goes through HBM, in between
                half = (("wavefronts", more_wavefronts / 2),)
                more = [replace(part, work=(*part.work, *half)) for part in more]
            # addresses and predicates around the loads, and what follows the products
            products = [i for i, op in enumerate(body) if isinstance(op, Matmul)]
            for place, extra in zip(reversed(products), reversed(more), strict=True):
                body.insert(place + 1, extra)
            if s.wavefronts and not s.packaged:
                # bank conflicts and layouts that Triton changes on the way
                body.append(Instructions("counted", (("wavefronts", more_wavefronts),)))
        return Loop("i", var(kind), body)

    kv_tile = (key_row, bc, 0, d)
    warps = [
        Load(tile(t["K"], var("kv_head"), *kv_tile), k_smem, token="kv"),
        Load(tile(t["V"], var("kv_head"), *kv_tile), v_smem),
        Await("kv"),
        Barrier("kv"),
        *(
            [
                Exchange("kv", 0, 2 * bc * d * 2),
                Compute("copy", k, (k_smem,), bc, d),
                Compute("copy", v, (v_smem,), bc, d),
            ]
            if s.packaged
            else []
        ),
        *([Wait("q_in")] if s.packaged else []),
        *(walk(kind) for kind in kinds),
        # the next key block reads what these rows have stored
        Barrier("tile", parties),
    ]
    arrivals = [Consume(q_pipe), Release(q_pipe), Signal("q_in")]
    # whoever waits for the rows after the last does not wait long
    last: list[Op] = [Signal("q_in"), Barrier("tile", parties)]
    copies = [Role("arrivals", [*(Loop("i", var(kind), arrivals) for kind in kinds), *last], warps=0)]
    return (
        Role("loader", [*(fetch(kind) for kind in kinds), Barrier("tile", parties)], warps=0),
        *(copies if s.packaged else []),
        Role("warps0", warps, s.warps, s.mix.issue_interval_cycles if s.mix and s.wavefronts else 0.0),
    )
