"""Multi-head latent attention on FA3's large-V kernel (``qv``): keys of 576, of which the first 512 are the values.

A cache row is a latent of 512 (read once, used as K and as V) and 64 rotary dimensions (K only). One warpgroup
computes S = Q_r K_r^T + Q_l V^T, softmax and the first half of O's columns; it hands P and the rescaling factors
through SMEM to a second one, which computes the other half. 64 x 64 tiles: one CTA an SM.
Source: flash-attention hopper/mainloop_fwd_sm90_tma_gmma_ws.hpp (0251105a), HasQv and LargeHeadDimV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from algorithms.common import fill, mask_op, row_vectors
from algorithms.fa2_roles import epilogue
from algorithms.kernel_tables import Fa3Tile
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
    Store,
    Tensor,
    Tile,
    View,
    tile,
    var,
)

LATENT, ROTARY = 512, 64


def is_mla(problem: AttentionProblem) -> bool:
    """Whether the head dims are those of MLA's absorbed form (576 with 512)."""
    return (problem.head_dim, problem.head_dim_v) == (LATENT + ROTARY, LATENT)


def smem_bytes(t: Fa3Tile) -> int:
    """Shared memory of one CTA: Q in both parts, rings of K and V, P, the rescaling factors, and the barriers.

    The barriers and their alignment are taken as 1 KiB: the kernel is known to fit the 227 KiB of a CTA.
    """
    q, p = t.tile_m * (LATENT + ROTARY), t.tile_m * t.tile_n
    ring = t.kv_stages * t.tile_n * (LATENT + ROTARY)
    return 2 * (q + p + ring) + 4 * t.tile_m * t.kv_stages + 1024


def roles(
    problem: AttentionProblem,
    t: Fa3Tile,
    tensors: dict[str, Tensor],
    group: int,
    o_tile: Callable[[Index, int], Tile],
    lse_tile: Callable[[Index, int], Tile],
) -> tuple[Role, ...]:
    """Loader and the two consumer warpgroups; ``o_tile``/``lse_tile`` as in :func:`algorithms.fa3_roles.roles`."""
    rows, bc, dtype, half = t.tile_m, t.tile_n, problem.dtype, LATENT // 2
    scale = problem.head_dim**-0.5
    factor = (("scale", float(scale)),)
    q_pipe = Pipe("q", rows, LATENT + ROTARY, dtype, 1, 1)
    k_pipe = Pipe("k", bc, ROTARY, dtype, t.kv_stages, 1)
    v_pipe = Pipe("v", bc, LATENT, dtype, t.kv_stages, 2)
    j, row0, cache = var("j"), var("row0"), tensors["K"]
    p_smem, alpha_smem = Buffer("P_smem", rows, bc, dtype, "smem"), Buffer("alpha_smem", rows, space="smem")
    l_smem = Buffer("l_smem", rows, space="smem")

    def fetch(first_row: str) -> list[Op]:
        row, head = var(first_row) - j * bc, var("kv_head")
        return [
            Acquire(k_pipe),
            Load(tile(cache, head, row, bc, LATENT, ROTARY), k_pipe, via="tma"),
            Acquire(v_pipe),
            Load(tile(cache, head, row, bc, 0, LATENT), v_pipe, via="tma"),
        ]

    def loops(body: Callable[[str, bool], list[Op]]) -> list[Op]:
        return [
            Loop("j", var("n_masked"), body("masked_row", True)),
            Loop("j", var("n_full"), body("full_row", False)),
        ]

    load_q = Load(tile(tensors["Q"], var("q_head"), row0, rows, 0, LATENT + ROTARY), q_pipe, via="tma")
    loader = Role("loader", [Acquire(q_pipe), load_q, *loops(lambda first, _masked: fetch(first))], warps=0)

    v = {b.name: b for b in row_vectors(rows, "m", "m_old", "l", "alpha", "lse")}
    out_dtype = tensors["O"].dtype

    def half_of_o(index: int) -> Tile:
        whole = o_tile(row0, rows)
        return replace(whole, col=whole.col + index * half, cols=half)

    def first_step(first_row: str, is_masked: bool) -> list[Op]:
        s, p, o = Buffer("S", rows, bc), Buffer("P", rows, bc, dtype), Buffer("O", rows, half)
        col = var(first_row) - j * bc
        return [
            Consume(k_pipe),
            Matmul(s, View(q_pipe, 0, rows, LATENT, ROTARY), k_pipe, transpose_b=True, token="S"),
            Consume(v_pipe),
            Matmul(s, View(q_pipe, 0, rows, 0, LATENT), v_pipe, transpose_b=True, accumulate=True, token="S"),
            Await("S"),
            Release(k_pipe),
            *([mask_op(s, problem, row0, col, group)] if is_masked else []),
            Compute("copy", v["m_old"], (v["m"],), rows, 1),
            Compute("row_max", v["m"], (s, v["m_old"]), rows, bc),
            Compute("rescale_factor", v["alpha"], (v["m_old"], v["m"]), rows, 1, factor),
            Compute("exp", s, (s, v["m"]), rows, bc, factor),
            Compute("accumulate_sum", v["l"], (v["l"], v["alpha"], s), rows, bc),
            Compute("convert", p, (s,), rows, bc),
            Barrier("P_empty", 2),
            Compute("copy", p_smem, (p,), rows, bc),
            Compute("copy", alpha_smem, (v["alpha"],), rows, 1),
            Exchange("P", rows * bc * 2 + rows * 4, 0),
            Compute("rescale", o, (o, v["alpha"]), rows, half),
            Matmul(o, p, View(v_pipe, 0, bc, 0, half), accumulate=True, token="O"),
            Barrier("P_full", 2),
            Await("O"),
            Release(v_pipe),
        ]

    def second_step(_first_row: str, _is_masked: bool) -> list[Op]:
        o = Buffer("O", rows, half)
        return [
            Consume(v_pipe),
            Barrier("P_empty", 2),
            Barrier("P_full", 2),
            Exchange("alpha", 0, rows * 4),
            Compute("rescale", o, (o, alpha_smem), rows, half),
            Matmul(o, p_smem, View(v_pipe, 0, bc, half, half), accumulate=True, token="O"),
            Await("O"),
            Release(v_pipe),
        ]

    o, out = Buffer("O", rows, half), Buffer("O_out", rows, half, out_dtype)
    staged = [Exchange("O", rows * half * 2, rows * half * 2), Barrier("epilogue", 2)]
    first = Role(
        "warpgroup0",
        [
            Consume(q_pipe),
            fill(o, 0.0),
            fill(v["l"], 0.0),
            fill(v["m"], float("-inf")),
            *loops(first_step),
            Release(q_pipe),
            Compute("copy", l_smem, (v["l"],), rows, 1),
            Exchange("l", rows * 4, 0),
            Barrier("l", 2),
            *epilogue(o, out, v, scale),
            *staged,
            Store(View(out), half_of_o(0), via="st"),
            Store(View(v["lse"]), lse_tile(row0, rows)),
        ],
    )
    second = Role(
        "warpgroup1",
        [
            fill(o, 0.0),
            *loops(second_step),
            Barrier("l", 2),
            Exchange("l", 0, rows * 4),
            Compute("normalise", o, (o, l_smem), rows, half),
            Compute("convert", out, (o,), rows, half),
            *staged,
            Store(View(out), half_of_o(1), via="st"),
        ],
    )
    return (loader, first, second)
