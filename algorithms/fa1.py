"""FlashAttention-1, forward (Dao et al. 2022, Algorithm 1): K/V blocks outer, query rows inner, O through HBM.

A CTA owns a (batch, head), or a slice of its query rows. For every K/V block ``j`` (``Bc`` keys) it walks its row
blocks ``i`` (``Br`` rows): it loads Q_i, O_i and the statistics, makes S = Q_i K_j^T, rescales and normalises O_i at
once, and writes O_i and the statistics back. Its warps split the keys, so they meet in SMEM for every row block.

The outer loop is the CTA's sequence of work tiles (:func:`~algorithms.fa1_schedule.work_tiles`), the inner one the
text of a role.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms import varlen
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    check_supported,
    compulsory_bytes,
    dropout_op,
    fill,
    mask_op,
    row_vectors,
)
from algorithms.counted import wavefronts_of
from algorithms.fa1_backward import backward_schedule, build_backward
from algorithms.fa1_schedule import (
    KINDS,
    Schedule,
    in_place_of_others,
    interleaved,
    package_tile,
    schedule_for,
    work_tiles,
)
from algorithms.fa1_tiles import Q_BUFFERS, candidates
from algorithms.passes import build_passes
from algorithms.standard import expand_heads
from algorithms.standard_ops import beyond
from algorithms.tile_search import TileChoice, Tiles, TileSpace, TileSpaces
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
    Signal,
    Store,
    Tensor,
    Trip,
    Wait,
    tile,
    var,
)

_V1 = "flash-attention@v1.0.9: csrc/flash_attn/src/fmha_fprop_kernel_1xN.h"
IMPLEMENTATIONS = {
    # the package as published timings ran it: the query rows of a head are shared by several CTAs
    "flash_attn_1": Implementation(
        "flash_attn_1",
        "fa1",
        frozenset({"mma_sync"}),
        _V1,
        # the package's only entry: cu_seqlens
        features=frozenset({"deterministic", "dropout", "varlen"}),
        passes=("fwd", "bwd", "fwd_bwd"),
    ),
    # the paper's grid, one CTA a head, with the tiles of the kernel that simulator/measure runs
    "flash_attn_1_paper": Implementation(
        "flash_attn_1_paper",
        "fa1",
        frozenset({"mma_sync"}),
        "simulator/measure/fa1_kernel.py; arXiv:2205.14135, Algorithm 1",
        features=frozenset({"deterministic", "dropout"}),
        passes=("fwd", "bwd", "fwd_bwd"),
    ),
    # the paper's grid and the paper's block sizes, which grow with the SM's SRAM: Bc = M / 4d, Br = min(Bc, d)
    "flash_attn_1_sram": Implementation(
        "flash_attn_1_sram", "fa1", frozenset({"mma_sync"}), "arXiv:2205.14135, Algorithm 1, line 1"
    ),
}
DEFAULT = "flash_attn_1"


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


def tensors_of(problem: AttentionProblem, s: Schedule) -> dict[str, Tensor]:
    """Inputs, output, and what travels through HBM between key blocks: fp32 O and the statistics."""
    p = problem
    heads, d, dv = p.batch * p.heads, p.head_dim, p.head_dim_v
    kv_heads, rows = p.batch * p.kv_heads, p.seqlen_q
    t = {
        "Q": Tensor("Q", heads, rows, d, p.dtype, "input", s.rows),
        "K": Tensor("K", kv_heads, p.seqlen_k, d, p.dtype, "input", s.keys),
        "V": Tensor("V", kv_heads, p.seqlen_k, dv, p.dtype, "input", s.keys),
        "O": Tensor("O", heads, rows, dv, p.dtype, "output", s.rows),
    }
    names = ("LSE",) if s.packaged else ("l", "m")
    kind = "output" if s.packaged else "scratch"
    t |= {name: Tensor(name, heads, rows, 1, "fp32", kind, s.rows) for name in names}
    if p.seqlen_k > s.keys:
        t["O_tmp"] = Tensor("O_tmp", heads, rows, dv, "fp32", "scratch", s.rows)
    elif not s.packaged:
        del t["l"], t["m"]
    return varlen.ragged(t, p) if varlen.is_varlen(p) else t


def forward_kernel(problem: AttentionProblem, s: Schedule, t: dict[str, Tensor], gpu: Profile) -> Kernel:
    """The kernel over all (CTA, key block) work tiles."""
    slots = gpu.num_sms * s.ctas_per_sm
    coords = work_tiles(problem, s, slots)
    kinds = [kind for kind in KINDS if coords[kind].any()]
    coords = {name: values for name, values in coords.items() if name not in KINDS or name in kinds}
    cta = roles(problem, s, t, kinds)
    return Kernel(
        "fmha_fwd",
        varlen.within_sequence(cta) if varlen.is_varlen(problem) else cta,
        coords,
        tuple(Trip(kind) for kind in kinds),
        threads=32 * s.warps,
        smem_bytes=s.smem_bytes,
        registers_per_thread=s.registers_per_thread,
        ctas_per_sm=s.ctas_per_sm,
        schedule="static",
        path="mma_sync",
        compute_dtype=problem.dtype,
        coord_order="slot, key block, wave; CTAs by batch, head, row slice",
        **in_place_of_others(problem, s, len(coords["key_row"]), slots),
    )


def tile_spaces(problem: AttentionProblem, implementation: str, gpu: Profile) -> TileSpaces:
    """What may be chosen for each pass of a call."""
    if implementation == "flash_attn_1_sram":
        s = schedule_for(problem.with_(pass_="fwd"), implementation, gpu)
        return {"fwd": f"the paper's rule, Bc = M/4d and Br = min(Bc, d), makes its tile {s.rows}x{s.keys} here"}
    spaces: dict[str, TileSpace | str] = {}
    if problem.pass_ != "bwd":
        own = package_tile(problem, gpu)
        shipped = TileChoice(own.tile_m, own.tile_n, Q_BUFFERS, own.num_warps // 4)
        spaces["fwd"] = TileSpace(
            shipped,
            f"the shipped kernel's {shipped} (fa1:flash_attn_1_sram takes the paper's blocks, which grow with SRAM)",
            candidates((1, 2)),
            lambda choice: package_tile(problem, gpu, choice),
            problem.with_(pass_="fwd"),
        )
        if implementation == "flash_attn_1_paper":
            s = schedule_for(problem.with_(pass_="fwd"), implementation, gpu)
            spaces["fwd"] = f"the kernel was counted at {s.rows}x{s.keys} only; fa1:flash_attn_1 can choose"
    if problem.pass_ != "fwd":
        kernel = backward_schedule(problem, gpu)
        shipped = TileChoice(kernel.rows, kernel.keys, Q_BUFFERS, kernel.warps // 4)
        spaces["bwd"] = TileSpace(
            shipped,
            f"the shipped kernel's {shipped}",
            candidates((2,)),
            lambda choice: backward_schedule(problem, gpu, choice),
            problem.with_(pass_="bwd"),
        )
    return spaces


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: Tiles | None = None,
) -> Program:
    """The FlashAttention-1 program for ``problem`` on ``gpu``, forward, backward or both; ``tiles`` replaces the 1.x
    kernels' own."""
    impl = IMPLEMENTATIONS[implementation]
    tiles = tiles or {}
    if problem.mask == "padding":
        program = build(problem.with_(mask=None), implementation, gpu, hypothetical, tiles)
        return replace(program, problem=problem, warnings=(*program.warnings, PADDING))
    check_supported(problem, impl)
    if varlen.is_varlen(problem) and problem.group > 1:
        raise UnsupportedError(
            f"{problem.kv_heads} KV heads with lengths by sequence: {implementation} has none but one a query head"
        )
    substitutions = check_capabilities(impl, gpu, hypothetical)
    return build_passes(
        problem,
        lambda p: build_forward(p, implementation, gpu, substitutions, tiles=tiles.get("fwd")),
        lambda p: build_backward(p, implementation, gpu, substitutions, tiles.get("bwd")),
        lambda p: build_forward(p, implementation, gpu, substitutions, packaged=True, tiles=tiles.get("fwd")),
    )


def build_forward(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    substitutions: list[str],
    packaged: bool = False,
    tiles: TileChoice | None = None,
) -> Program:
    """The forward pass; ``packaged`` takes the 1.x kernel, whose LSE a backward pass needs, whatever the grid."""
    s = schedule_for(problem, "flash_attn_1" if packaged else implementation, gpu, tiles)
    if packaged and implementation != "flash_attn_1":
        s = replace(s, slices=1, ctas_per_sm=min(2, ceil_div(problem.batch * problem.heads, gpu.num_sms)))
    t = tensors_of(problem, s)
    live = compulsory_bytes(t.values())
    inputs = {name: t[name] for name in "QKV"}
    expansions = []
    for name in "KV":
        t[name], kernels = expand_heads(t[name], problem)
        expansions += kernels
        live += t[name].bytes if kernels else 0
    kernel = forward_kernel(problem, s, t, gpu)
    return Program(
        "fa1",
        implementation,
        problem,
        (*expansions, kernel),
        inputs,
        {name: t[name] for name in ("O", "LSE") if name in t},
        live,
        notes=NOTES if problem.causal and any(q != k for q, k in problem.sequences()) else (),
        substitutions=tuple(substitutions),
        attributes={"tile": (s.rows, s.keys), "row_slices": s.slices},
    )


PADDING = (
    "mask=padding: flash-attention 1.x takes sequences without their padding and no mask; "
    "every sequence is taken to be as long as given"
)
NOTES = ("flash-attention 1.x aligns a causal mask to the top left; here it is aligned to the bottom right, as asked",)
