"""FlashAttention-1, forward (Dao et al. 2022, Algorithm 1): K/V blocks outer, query rows inner, O through HBM.

A CTA owns a (batch, head), or a slice of its query rows. For every K/V block ``j`` (``Bc`` keys) it walks its row
blocks ``i`` (``Br`` rows): it loads Q_i, O_i and the statistics, makes S = Q_i K_j^T, rescales and normalises O_i at
once, and writes O_i and the statistics back. Its warps split the keys, so they meet in SMEM for every row block.

The outer loop is the CTA's sequence of work tiles (:func:`work_tiles`), the inner one the text of a role.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    check_supported,
    compulsory_bytes,
    fill,
    grid_indices,
    mask_op,
    row_vectors,
)
from algorithms.counted import spread_over_matmuls
from algorithms.instruction_counts import InstructionMix
from algorithms.kernel_tables import ctas_per_sm, fa1_forward_tile, fa1_num_splits, fa1_paper_blocks
from algorithms.standard import expand_heads
from algorithms.standard_ops import beyond
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
    Kernel,
    Load,
    Loop,
    Matmul,
    Pipe,
    Program,
    Release,
    Role,
    Store,
    Tensor,
    Trip,
    tile,
    var,
)

_V1 = "flash-attention@v1.0.9: csrc/flash_attn/src/fmha_fprop_kernel_1xN.h"
IMPLEMENTATIONS = {
    # the package as published timings ran it: the query rows of a head are shared by several CTAs
    "flash_attn_1": Implementation(
        "flash_attn_1", "fa1", frozenset({"mma_sync"}), _V1, passes=("fwd", "bwd", "fwd_bwd")
    ),
    # the paper's grid, one CTA a head, with the tiles of the kernel that simulator/measure runs
    "flash_attn_1_paper": Implementation(
        "flash_attn_1_paper",
        "fa1",
        frozenset({"mma_sync"}),
        "simulator/measure/fa1_kernel.py; arXiv:2205.14135, Alg. 1",
    ),
    # the paper's grid and the paper's block sizes, which grow with the SM's SRAM: Bc = M / 4d, Br = min(Bc, d)
    "flash_attn_1_sram": Implementation(
        "flash_attn_1_sram", "fa1", frozenset({"mma_sync"}), "arXiv:2205.14135, Algorithm 1, line 1"
    ),
}
DEFAULT = "flash_attn_1"


#: Counted instructions per score element of the measured kernel by (head dim, causal): rows fa1_length_* of
#: hardware_profiles/measurements/h200_sxm/mix_launches.csv over their row steps.
_COUNTED_ON = "ncu, one H200, Triton 3.6, 2026-11-29"
MEASURED_MIX = {
    (64, False): InstructionMix(18.40, 5.51, 4.80, 1.12, 3.28, 2.0, source=_COUNTED_ON),
    (64, True): InstructionMix(20.24, 5.56, 6.68, 1.12, 3.24, 2.0, source=_COUNTED_ON),
    (128, False): InstructionMix(33.65, 11.56, 8.11, 1.25, 7.03, 4.0, source=_COUNTED_ON),
    (128, True): InstructionMix(35.67, 11.67, 10.20, 1.25, 6.98, 4.0, source=_COUNTED_ON),
}


@dataclass(frozen=True)
class Schedule:
    """One FA1 kernel: ``rows`` (Br) query rows against ``keys`` (Bc) keys.

    ``packaged``: the 1.x kernel keeps one statistic (the LSE) and sums the warps' partial O through SMEM; the other
    kernels keep ``m`` and ``l`` and hand P round instead. ``slices``: CTAs that share a head's row blocks in turn.
    """

    rows: int
    keys: int
    head_dim: int
    warps: int
    slices: int
    packaged: bool
    smem_bytes: int
    registers_per_thread: int
    ctas_per_sm: int
    mix: InstructionMix | None = None


def schedule_for(problem: AttentionProblem, implementation: str, gpu: Profile) -> Schedule:
    """Tiles and grid of ``implementation`` for ``problem`` on ``gpu``."""
    if implementation == "flash_attn_1":
        if problem.head_dim > 128:
            raise UnsupportedError(f"head_dim {problem.head_dim}: flash_attn_1 runs head dims up to 128")
        t = fa1_forward_tile(problem.head_dim, problem.seqlen_k, problem.dtype)
        slices = fa1_num_splits(
            batch_heads=problem.batch * problem.heads,
            num_sms=gpu.num_sms,
            ctas_per_sm=t.ctas_per_sm,
            seqlen_q=problem.seqlen_q,
        )
        # slices beyond the row blocks return at once
        slices = min(slices, ceil_div(problem.seqlen_q, t.tile_m))
        shape = (t.tile_m, t.tile_n, t.padded_head_dim, t.num_warps, slices, True, t.smem_bytes, t.registers_per_thread)
    elif implementation == "flash_attn_1_paper":
        d = ceil_div(problem.head_dim, 64) * 64
        rows, keys = 16, {64: 256, 128: 128}.get(d, 64)
        # P, and what Triton keeps of K and V in SMEM
        shape = (rows, keys, d, 4, 1, False, 2 * keys * d * 2 + 2 * rows * d * 2 + rows * keys * 2, 255)
    else:
        d = ceil_div(problem.head_dim, 16) * 16
        blocks = fa1_paper_blocks(gpu.smem_bytes_per_cta_max // problem.element_bytes, d)
        rows, keys = (max(16, size // 16 * 16) for size in (blocks.rows, blocks.columns))
        shape = (rows, keys, d, 8, 1, False, gpu.smem_bytes_per_cta_max, 255)
    resident = ctas_per_sm(
        threads=32 * shape[3],
        registers_per_thread=shape[7],
        smem_bytes=shape[6],
        smem_bytes_per_sm=gpu.smem_bytes_per_sm,
        threads_per_sm_max=gpu.max_threads_per_sm,
    )
    if resident < 1:
        raise UnsupportedError(f"{implementation}: {shape[6]} bytes of SMEM a CTA do not fit {gpu.name}")
    # no more slots than CTAs, so that an SM's CTAs are those that the launch has
    launched = problem.batch * problem.heads * shape[4]
    mix = MEASURED_MIX.get((shape[2], problem.causal)) if implementation == "flash_attn_1_paper" else None
    return Schedule(*shape, min(resident, ceil_div(launched, gpu.num_sms)), mix)


def work_tiles(problem: AttentionProblem, s: Schedule, slots: int) -> dict[str, np.ndarray]:
    """Coordinates of the work tiles (CTA, key block) such that slot ``x`` runs its CTA's key blocks one after another.

    CTAs come in launch order (batch fastest, then head, then slice) and take slots in turn. Row blocks ``z``,
    ``z + slices``, ... belong to slice ``z``. With a causal mask (bottom right) key block ``j`` begins at its diagonal,
    and a row block is final, stored in the output's dtype, at the last key block that it sees.
    """
    p = problem
    row_blocks, key_blocks = ceil_div(p.seqlen_q, s.rows), ceil_div(p.seqlen_k, s.keys)
    ctas = p.batch * p.heads * s.slices
    waves = ceil_div(ctas, slots)
    slot, j, wave = grid_indices(slots, key_blocks, waves)
    cta = wave * slots + slot
    real = cta < ctas
    last_real = int(np.flatnonzero(real)[-1]) + 1
    slot, j, cta, real = (a[:last_real] for a in (slot, j, cta, real))
    batch, head, z = cta % p.batch, cta // p.batch % p.heads, cta // (p.batch * p.heads)
    shift = p.seqlen_k - p.seqlen_q

    def first_row_block(block: np.ndarray) -> np.ndarray:
        """The first row block that sees key block ``block``; all see the first one, if only to write zeros."""
        if not p.causal:
            return np.zeros_like(block)
        return np.clip(np.where(block == 0, 0, (block * s.keys - shift) // s.rows), 0, row_blocks)

    def own(at: np.ndarray) -> np.ndarray:
        """The first row block of the slice at or after ``at``."""
        return at + (z - at) % s.slices

    start = first_row_block(j)
    end_final = first_row_block(j + 1) if p.causal else np.zeros_like(j)
    end_final = np.where(j == key_blocks - 1, row_blocks, end_final)

    def count(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.where(real, np.maximum(0, -((own(low) - high) // s.slices)), 0)

    final, below = count(start, end_final), count(end_final, np.full_like(j, row_blocks))
    busy = real & (final + below > 0)
    flat = np.where(busy, batch * p.heads + head, -1)
    return {
        "q_head": flat,
        "kv_head": flat,
        "key_row": j * s.keys,
        "final_row": own(start) * s.rows,
        "below_row": own(end_final) * s.rows,
        "n_only": np.where(j == 0, final, 0),
        "n_final": np.where(j == 0, 0, final),
        "n_first": np.where(j == 0, below, 0),
        "n_middle": np.where(j == 0, 0, below),
    }


#: Trip -> (first row coordinate, is the first key block, is the last one) of the rows' four kinds.
KINDS = {
    "n_only": ("final_row", True, True),
    "n_final": ("final_row", False, True),
    "n_first": ("below_row", True, False),
    "n_middle": ("below_row", False, False),
}


def roles(problem: AttentionProblem, s: Schedule, t: dict[str, Tensor], kinds: list[str]) -> tuple[Role, ...]:
    """The loader (Q one row block ahead) and the warps, which share every tile."""
    br, bc, d, dtype = s.rows, s.keys, s.head_dim, problem.dtype
    scale = float(problem.head_dim**-0.5)
    head, key_row = var("q_head"), var("key_row")
    q_pipe = Pipe("q", br, d, dtype, 2)
    lse_pipe = Pipe("lse_in", br, 1, "fp32", 2)
    k_smem, v_smem = Buffer("k_smem", bc, d, dtype, "smem"), Buffer("v_smem", bc, d, dtype, "smem")
    # the package holds a key block in registers while the rows go by, the others read it from SMEM for every row block
    k, v = (Buffer("K", bc, d, dtype), Buffer("V", bc, d, dtype)) if s.packaged else (k_smem, v_smem)
    scores, p = Buffer("S", br, bc), Buffer("P", br, bc, dtype, "reg" if s.packaged else "smem")
    o, o_old, out = Buffer("O", br, d), Buffer("O_old", br, d), Buffer("O_out", br, d, t["O"].dtype)
    m, m_old, total, l_old, alpha, lse = row_vectors(br, "m", "m_old", "l", "l_old", "alpha", "lse")
    statistics_bytes = br * s.warps * 4

    def rows_of(kind: str):
        return var(KINDS[kind][0]) + var("i") * (s.slices * br)

    def fetch(kind: str) -> Loop:
        row, (_, first, _last) = rows_of(kind), KINDS[kind]
        ops = [Acquire(q_pipe), Load(tile(t["Q"], head, row, br, 0, d), q_pipe)]
        if s.packaged and not first:
            ops += [Acquire(lse_pipe), Load(tile(t["LSE"], head, row, br), lse_pipe)]
        return Loop("i", var(kind), ops)

    def across_warps(name: str) -> list:
        """A row statistic of all warps: written and read back through SMEM."""
        return [Exchange(name, statistics_bytes, statistics_bytes), Barrier(name)]

    def packaged_step(row, first: bool) -> list:
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
        return [
            *([Load(tile(t["O_tmp"], head, row, br, 0, d), o_old, token="O_old")] if not first else []),
            mask_op(scores, problem, row, key_row),
            *old,
            Compute("row_max", m, (scores, m_old), br, bc),
            *across_warps("max"),
            Compute("exp", scores, (scores, m), br, bc, (("scale", scale),)),
            Compute("row_sum", total, (scores,), br, bc),
            Compute("convert", p, (scores,), br, bc),
            Matmul(o, p, v, split="inner"),
            # every warp holds a partial O of its keys: summed through SMEM
            Exchange("O", partial_bytes, partial_bytes),
            *across_warps("sum"),
            *(
                [
                    Compute("rescale_factor", alpha, (m_old, m), br, 1, (("scale", scale),)),
                    Compute("add", total, (total, alpha), br, 1),
                    Await("O_old"),
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

    def paper_step(row, first: bool, final: bool) -> list:
        """Lines 9 to 13: m, l and O of the row block, O normalised at once."""
        state = [(m_old, "m"), (l_old, "l"), (o_old, "O_tmp")]
        load = (
            [fill(m_old, float("-inf")), fill(l_old, 0.0), fill(o_old, 0.0)]
            if first
            else [
                *(Load(tile(t[name], head, row, br, 0, b.cols), b, token="state") for b, name in state[:-1]),
                Load(tile(t["O_tmp"], head, row, br, 0, d), o_old),
                Await("state"),
            ]
        )
        keep = [] if final else [Store(m, tile(t["m"], head, row, br)), Store(total, tile(t["l"], head, row, br))]
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
            Compute("convert", p, (scores,), br, bc),
            # P goes from the warps that made its columns to those that need its rows
            Exchange("P", br * bc * 2, 0),
            Barrier("P"),
            Matmul(o, p, v, split="cols"),
            *([Compute("rescale", o_old, (o_old, l_old), br, d)] if not first else []),
            *([Compute("add", o, (o, o_old), br, d)] if not first else []),
            Compute("normalise", o, (o, total), br, d),
            *keep,
        ]

    def walk(kind: str) -> Loop:
        row, (_, first, final) = rows_of(kind), KINDS[kind]
        step = packaged_step(row, first) if s.packaged else paper_step(row, first, final)
        store = (
            [Compute("convert", out, (o,), br, d), Store(out, tile(t["O"], head, row, br, 0, d))]
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
            (extra,) = beyond("counted", body, s.mix, br * bc)
            body = spread_over_matmuls(body, extra.work, 0.0)
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
        *(walk(kind) for kind in kinds),
        # the next key block reads what these rows have stored
        Barrier("tile", 2),
    ]
    return (
        Role("loader", [*(fetch(kind) for kind in kinds), Barrier("tile", 2)], warps=0),
        Role("warps0", warps, warps=s.warps),
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
    return t


def forward_kernel(problem: AttentionProblem, s: Schedule, t: dict[str, Tensor], gpu: Profile) -> Kernel:
    """The kernel over all (CTA, key block) work tiles."""
    coords = work_tiles(problem, s, gpu.num_sms * s.ctas_per_sm)
    kinds = [kind for kind in KINDS if coords[kind].any()]
    coords = {name: values for name, values in coords.items() if name not in KINDS or name in kinds}
    return Kernel(
        "fmha_fwd",
        roles(problem, s, t, kinds),
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
    )


def build(problem: AttentionProblem, implementation: str, gpu: Profile, hypothetical: bool = False) -> Program:
    """The FlashAttention-1 program for ``problem`` on ``gpu``."""
    impl = IMPLEMENTATIONS[implementation]
    check_supported(problem, impl)
    substitutions = check_capabilities(impl, gpu, hypothetical)
    if problem.pass_ != "fwd":
        from algorithms.fa1_backward import build_backward

        return build_backward(problem, implementation, gpu, substitutions)
    s = schedule_for(problem, implementation, gpu)
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
        notes=NOTES if problem.causal and problem.seqlen_q != problem.seqlen_k else (),
        substitutions=tuple(substitutions),
        attributes={"tile": (s.rows, s.keys), "row_slices": s.slices},
    )


NOTES = ("flash-attention 1.x aligns a causal mask to the top left; here it is aligned to the bottom right, as asked",)
