"""The roles of FA3's forward CTA: a loader and the consumer warpgroups, which take turns at the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from algorithms.common import (
    fill,
    mask_op,
    row_vectors,
    softcap_ops,
    softmax_scale,
)
from algorithms.counted import instructions_around, residual_instructions
from algorithms.fa2_roles import epilogue
from algorithms.fa3_tiles import forward_tile as forward_tile  # what callers ask of an algorithm's module
from algorithms.fa3_tiles import tile_spaces as tile_spaces  # what the search of tiles asks of it
from algorithms.instruction_counts import OUTSIDE_PACE, AroundTile, InstructionMix, fa3_forward_mix
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


def _softmax(s: Buffer, v: dict[str, Buffer], scale: float) -> tuple[list[Op], list[Op]]:
    """m and alpha for the later rescale of O; exp(S - m) in place and l."""
    factor = (("scale", float(scale)),)
    return [
        Compute("copy", v["m_old"], (v["m"],), s.rows, 1),
        Compute("row_max", v["m"], (s, v["m_old"]), s.rows, s.cols),
        Compute("rescale_factor", v["alpha"], (v["m_old"], v["m"]), s.rows, 1, factor),
    ], [
        Compute("exp", s, (s, v["m"]), s.rows, s.cols, factor),
        Compute("accumulate_sum", v["l"], (v["l"], v["alpha"], s), s.rows, s.cols),
    ]


def _copied(name: str, copied_bytes: int, warps: int, around: AroundTile) -> Instructions:
    """What ``warps`` execute to copy ``copied_bytes`` row by row."""
    copies = copied_bytes / 16 / (32 * warps)
    lanes = 32.0 * warps * (around.packed_fixed + around.packed_per_copy * copies)
    return Instructions(name, (("issue", OUTSIDE_PACE * lanes),))


def roles(
    problem: AttentionProblem,
    t: Fa3Tile,
    tensors: dict[str, Tensor],
    group: int,
    o_tile: Callable[[Index, int], Tile],
    lse_tile: Callable[[Index, int], Tile],
    mix: InstructionMix | None = None,
    around: AroundTile | None = None,
) -> tuple[Role, ...]:
    """Loader and consumer warpgroups; ``o_tile``/``lse_tile`` map (first row, rows) to where the results go. ``mix``:
    the kernel's counted instructions, if it is not FA3's; ``around``: those outside the key loop, if they count.

    TMA moves Q and O, but for packed query heads (``group`` above 1): then the loader's warps copy Q row by row and
    the consumers O (hopper/pack_gqa.h).
    """
    groups, rows = t.num_mma_warpgroups, t.tile_m // t.num_mma_warpgroups
    d, dv, dtype, bc = t.padded_head_dim, t.padded_head_dim_v, problem.dtype, t.tile_n
    scale = softmax_scale(problem)
    local = problem.window is not None
    q_pipe = Pipe("q", t.tile_m, d, dtype, 1, groups)
    k_pipe = Pipe("k", bc, d, dtype, t.kv_stages, groups)
    v_pipe = Pipe("v", bc, dv, dtype, t.kv_stages, groups)
    # O is staged where V lies: the next tile's V (and the K behind it) waits until O has left SMEM
    o_pipe = Pipe("o", t.tile_m, dv, tensors["O"].dtype, 1, groups)
    head, kv_head, j = var("q_head"), var("kv_head"), var("j")

    def load_k(row: Index) -> list[Op]:
        source = tile(tensors["K"], kv_head, row, bc, 0, d)
        return [Acquire(k_pipe), Load(source, k_pipe, via="tma", multicast=t.cluster_m)]

    def load_v(row: Index) -> list[Op]:
        source = tile(tensors["V"], kv_head, row, bc, 0, dv)
        return [Acquire(v_pipe), Load(source, v_pipe, via="tma", multicast=t.cluster_m)]

    mix = mix or fa3_forward_mix(d, problem.causal or local, "e4m3" if dtype == "fp8" else dtype)
    masked, full, left = var("masked_row"), var("full_row"), var("left_row")

    def left_edge(body: list[Op]) -> list[Op]:
        """The blocks at a window's left edge, which test the mask once more."""
        return [Loop("j", var("n_left"), body)] if local else []

    packed = group > 1 and around is not None
    q_tile = tile(tensors["Q"], head, var("row0"), t.tile_m, 0, d)
    loader = Role(
        "loader",
        [
            *load_k(masked),
            Acquire(q_pipe),
            *([_copied("copy Q", q_tile.bytes, 4, around)] if packed and around else []),
            Load(q_tile, q_pipe, via="cp_async" if packed else "tma"),
            Acquire(o_pipe),
            # K runs one block ahead of V, as the consumers ask for them
            Loop("j", var("n_masked") - 1, [*load_k(masked - (j + 1) * bc), *load_v(masked - j * bc)]),
            Loop("j", var("n_full"), [*load_k(full - j * bc), *load_v(full - (j - 1) * bc)]),
            *left_edge([*load_k(left - j * bc), *load_v(left - (j - 1) * bc)]),
            *load_v(var("last_row")),
        ],
        warps=4 if packed else 0,
    )

    def consumer(index: int) -> Role:
        s, p = Buffer("S", rows, bc), Buffer("P", rows, bc, dtype)
        o, out = Buffer("O", rows, dv), Buffer("O_out", rows, dv, tensors["O"].dtype)
        v = {b.name: b for b in row_vectors(rows, "m", "m_old", "l", "alpha", "lse")}
        row0 = var("row0") + index * rows
        q = View(q_pipe, index * rows, rows)
        turn_in, turn_out = f"turn{index}", f"turn{(index + 1) % groups}"
        turns = t.scheduler_barrier and groups > 1
        # P goes to SMEM for PV unless it stays in registers
        spill_p = [] if t.mma_pv_is_rs else [Exchange("P", rows * bc * 2, 0)]
        p_operand = p if t.mma_pv_is_rs else replace(p, name="P_smem")

        def convert_p() -> list[Op]:
            return [Compute("convert", p_operand, (s,), rows, bc), *spill_p]

        def rescale() -> Compute:
            return Compute("rescale", o, (o, v["alpha"]), rows, dv)

        def hide(col: Index) -> Compute:
            return mask_op(s, problem, row0, col, group, sinks=True)

        scores, exponentials = _softmax(s, v, scale)
        modelled = [*scores, *exponentials, *convert_p(), rescale()]
        beyond = Instructions("softmax", residual_instructions(modelled, mix, rows * bc))
        end_pv: list[Op] = [Await("O"), Release(v_pipe)]
        if not mix.issue_interval_cycles:
            while_pv_runs: list[Op] = [*scores, *exponentials, beyond]
        else:
            # the compiler hoists the wait for PV
            while_pv_runs = [*scores, *([beyond] if t.exponentials_before_pv else [])]
        once_pv_is_done = [op for op in (*exponentials, beyond) if op not in while_pv_runs]

        def step(col: Index, is_masked: bool) -> list[Op]:
            mask = [*softcap_ops(s, problem), *([hide(col)] if is_masked else [])]
            first = [rescale()] if t.rescale_o_before_gemm else []
            last = [] if t.rescale_o_before_gemm else [rescale()]
            issue_s: list[Op] = [Consume(k_pipe), Matmul(s, q, k_pipe, transpose_b=True, token="S")]
            issue_o: list[Op] = [Consume(v_pipe), Matmul(o, p_operand, v_pipe, accumulate=True, token="O")]
            if not t.intra_wg_overlap:
                return [
                    issue_s[0],
                    *([Wait(turn_in)] if turns else []),
                    issue_s[1],
                    *([Signal(turn_out)] if turns else []),
                    Await("S"),
                    Release(k_pipe),
                    *mask,
                    *scores,
                    *exponentials,
                    beyond,
                    *convert_p(),
                    rescale(),
                    *issue_o,
                    Await("O"),
                    Release(v_pipe),
                ]
            return [
                issue_s[0],
                *([Wait(turn_in)] if turns else []),
                issue_s[1],
                *first,
                *issue_o,
                *([Signal(turn_out)] if turns else []),
                Await("S"),
                Release(k_pipe),
                *mask,
                *while_pv_runs,
                *end_pv,
                *once_pv_is_done,
                *convert_p(),
                *last,
            ]

        if t.intra_wg_overlap:
            start = [
                Consume(k_pipe),
                Matmul(s, q, k_pipe, transpose_b=True, token="S"),
                Await("S"),
                Release(k_pipe),
                *softcap_ops(s, problem),
                hide(masked),
                *scores,
                *exponentials,
                beyond,
                *convert_p(),
                fill(v["alpha"], 1.0),
            ]
            before_last = [rescale()] if t.rescale_o_before_gemm else []
            finish = [
                *before_last,
                Consume(v_pipe),
                Matmul(o, p_operand, v_pipe, accumulate=True, token="O"),
                Await("O"),
                Release(v_pipe),
            ]
            loops = [
                Loop("j", var("n_masked") - 1, step(masked - (j + 1) * bc, True)),
                Loop("j", var("n_full"), step(full - j * bc, False)),
                *left_edge(step(left - j * bc, True)),
            ]
        else:
            start, finish = [], []
            loops = [
                Loop("j", var("n_masked"), step(masked - j * bc, True)),
                Loop("j", var("n_full"), step(full - j * bc, False)),
                *left_edge(step(left - j * bc, True)),
            ]
        begin: list[Op] = [fill(o, 0.0), fill(v["l"], 0.0), fill(v["m"], float("-inf"))]
        end = epilogue(o, out, v, scale)
        outside: list[Op] = []
        if around:
            lanes = OUTSIDE_PACE * around.instructions * 32 / groups
            outside = [Instructions("around", instructions_around(lanes / 2, [*begin, *end]))]
        o_bytes = rows * dv * 2
        store: list[Op] = [Store(View(out), o_tile(row0, rows), via="tma"), Release(o_pipe)]
        if packed and around:
            copy = _copied("copy O", o_bytes, 4, around)
            store = [Release(o_pipe), copy, Store(View(out), o_tile(row0, rows))]
        return Role(
            f"warpgroup{index}",
            [
                Consume(q_pipe),
                *outside,
                *begin,
                *start,
                *loops,
                Release(q_pipe),
                *finish,
                *outside,
                *end,
                # O is staged through SMEM and stored by TMA
                Exchange("O", o_bytes, o_bytes),
                Barrier("epilogue", groups) if packed else Barrier(f"epilogue{index}"),
                *store,
                Store(View(v["lse"]), lse_tile(row0, rows)),
            ],
            issue_interval_cycles=mix.issue_interval_cycles,
            paced=mix.issue_interval_cycles > 0,
        )

    return (loader, *(consumer(i) for i in range(groups)))
