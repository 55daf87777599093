"""FlashAttention-3, forward (Shah et al. 2024, Algorithms 1 and 2): TMA producer, ping-pong consumer warpgroups.

A loader fills two-stage rings of K and V. Each consumer warpgroup owns 64 rows; inside one, QK of block ``j`` is
issued before PV of block ``j-1``, so softmax of ``j`` runs while the tensor cores do PV. Warpgroups take turns to
issue their GEMM pair, which puts one's softmax under the other's GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from algorithms import kernels_cudnn, kernels_fa3_2024, varlen
from algorithms.combine import counter_fill
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    check_supported,
    compulsory_bytes,
    effective_masks,
    fill,
    grid_indices,
    instruction_path,
    key_coordinates,
    mask_op,
    matrices,
    row_vectors,
    softcap_ops,
    softmax_scale,
)
from algorithms.counted import residual_instructions
from algorithms.fa2 import epilogue
from algorithms.fa3_backward import build_backward
from algorithms.fa3_fp8 import adapt as adapt_to_fp8
from algorithms.fa3_tiles import fit_tile, forward_kernel
from algorithms.fa3_tiles import forward_tile as forward_tile  # what callers ask of an algorithm's module
from algorithms.fa3_tiles import tile_spaces as tile_spaces  # what the search of tiles asks of it
from algorithms.heuristics import fa3_key_loop, fa3_schedule, fa3_section_heads
from algorithms.in_step import IN_STEP_ITERATIONS
from algorithms.instruction_counts import InstructionMix, fa3_forward_mix
from algorithms.kernel_tables import Fa3Tile
from algorithms.kernels_common import registers_at_launch
from algorithms.passes import build_passes
from algorithms.tile_search import TileChoice, Tiles
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
    Tile,
    Trip,
    View,
    Wait,
    tile,
    var,
)

IMPLEMENTATIONS = {
    "flash_attn_3": Implementation(
        "flash_attn_3",
        "fa3",
        frozenset({"wgmma", "tma"}),
        "flash-attention hopper/ (0251105a)",
        features=frozenset({"fp8", "head_dim_v"}),
        forward_features=frozenset({"window", "softcap", "varlen"}),
    ),
    kernels_fa3_2024.NAME: Implementation(
        kernels_fa3_2024.NAME,
        "fa3",
        frozenset({"wgmma", "tma"}),
        kernels_fa3_2024.SOURCE,
        features=frozenset({"fp8"}),
    ),
    kernels_fa3_2024.GRID_NAME: Implementation(
        kernels_fa3_2024.GRID_NAME,
        "fa3",
        frozenset({"wgmma", "tma"}),
        kernels_fa3_2024.GRID_SOURCE,
        features=frozenset({"fp8"}),
    ),
    # its forward pass in fwd_bwd is flash_attn_3's schedule
    "flash_attn_4_sm90": Implementation(
        "flash_attn_4_sm90",
        "fa3",
        frozenset({"wgmma", "tma"}),
        "flash-attention flash_attn/cute (0251105a): flash_bwd_sm90.py, interface.py",
        features=frozenset({"deterministic", "head_dim_v", "window", "softcap", "varlen"}),
        passes=("bwd", "fwd_bwd"),
    ),
    "cudnn_sm90": Implementation(
        "cudnn_sm90",
        "fa3",
        frozenset({"wgmma", "tma"}),
        "cuDNN 9.19's launches on an H200 (algorithms/kernels_cudnn.py); schedule assumed",
        passes=("fwd", "bwd", "fwd_bwd"),
    ),
}
DEFAULT = "flash_attn_3"
#: flash_attn_3 has no backward in the wheels that exist for it.
BACKWARD_DEFAULT = "flash_attn_4_sm90"


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


def roles(
    problem: AttentionProblem,
    t: Fa3Tile,
    tensors: dict[str, Tensor],
    group: int,
    o_tile: Callable[[Index, int], Tile],
    lse_tile: Callable[[Index, int], Tile],
    mix: InstructionMix | None = None,
) -> tuple[Role, ...]:
    """Loader and consumer warpgroups; ``o_tile``/``lse_tile`` map (first row, rows) to where the results go. ``mix``:
    the kernel's counted instructions, if it is not FA3's."""
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

    loader = Role(
        "loader",
        [
            *load_k(masked),
            Acquire(q_pipe),
            Load(tile(tensors["Q"], head, var("row0"), t.tile_m, 0, d), q_pipe, via="tma"),
            Acquire(o_pipe),
            # K runs one block ahead of V, as the consumers ask for them
            Loop("j", var("n_masked") - 1, [*load_k(masked - (j + 1) * bc), *load_v(masked - j * bc)]),
            Loop("j", var("n_full"), [*load_k(full - j * bc), *load_v(full - (j - 1) * bc)]),
            *left_edge([*load_k(left - j * bc), *load_v(left - (j - 1) * bc)]),
            *load_v(var("last_row")),
        ],
        warps=0,
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
        return Role(
            f"warpgroup{index}",
            [
                Consume(q_pipe),
                fill(o, 0.0),
                fill(v["l"], 0.0),
                fill(v["m"], float("-inf")),
                *start,
                *loops,
                Release(q_pipe),
                *finish,
                *epilogue(o, out, v, scale),
                # O is staged through SMEM and stored by TMA
                Exchange("O", rows * dv * 2, rows * dv * 2),
                Barrier(f"epilogue{index}"),
                Store(View(out), o_tile(row0, rows), via="tma"),
                Release(o_pipe),
                Store(View(v["lse"]), lse_tile(row0, rows)),
            ],
            issue_interval_cycles=mix.issue_interval_cycles,
            paced=mix.issue_interval_cycles > 0,
        )

    return (loader, *(consumer(i) for i in range(groups)))


def key_trips(problem: AttentionProblem) -> tuple[Trip, ...]:
    """The parts of the walk over key blocks; only a window has the third."""
    return (Trip("n_masked"), Trip("n_full"), *((Trip("n_left"),) if problem.window is not None else ()))


def launched_problem(problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with the mask that FA3's launcher makes of causal and window (hopper/flash_api.cpp mha_fwd)."""
    if problem.seqlen_q == 1 and not 0 <= problem.sides[0] < problem.seqlen_k - 1:
        problem = problem.with_(causal=False)
    return effective_masks(problem, problem.seqlen_k - 1, problem.seqlen_q - 1)


def tile_coordinates(
    problem: AttentionProblem, t: Fa3Tile, packed: bool, longest_first: bool = True
) -> tuple[dict[str, np.ndarray], str]:
    """CTA coordinates in the order the tile scheduler hands tiles out, and the engine's name of the schedule.

    ``longest_first``: the dynamic scheduler goes through sections of heads, each from its longest tiles; else through
    all tiles as they come, like the static one."""
    group = problem.group if packed else 1
    heads = problem.kv_heads if packed else problem.heads
    row_blocks = ceil_div(problem.seqlen_q * group, t.tile_m)
    schedule = fa3_schedule(causal=problem.causal, local=problem.window is not None, split=False, varlen=False)
    if schedule.kind == "dynamic_persistent" and longest_first:
        section = fa3_section_heads(
            seqlen_k=problem.seqlen_k,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            element_bytes=problem.element_bytes,
            group=problem.group,
            pack_gqa=packed,
        )
        blocks, heads_of = [], []
        for start in range(0, heads * problem.batch, section):
            index, block = grid_indices(min(section, heads * problem.batch - start), row_blocks)
            blocks.append(row_blocks - 1 - block)
            heads_of.append(start + index)
        block, flat = np.concatenate(blocks), np.concatenate(heads_of)
    else:
        block, head, batch = grid_indices(row_blocks, heads, problem.batch)
        flat = batch * heads + head
    by_block = key_coordinates(
        row_blocks,
        t.tile_n,
        lambda i: fa3_key_loop(
            row_block=i,
            tile_m=t.tile_m,
            tile_n=t.tile_n,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            causal=problem.causal,
            group=group,
            window=problem.window,
        ),
    )
    if problem.causal and not longest_first:
        # the release tests the mask in one block more than it touches
        more = (by_block["n_full"] > 0).astype(np.int64)
        by_block |= {
            "n_masked": by_block["n_masked"] + more,
            "n_full": by_block["n_full"] - more,
            "full_row": by_block["full_row"] - more * t.tile_n,
        }
    # rows that see no key: the loader's unconditional first K and V blocks lie behind the last key
    empty = by_block["n_masked"] == 0
    for name in ("masked_row", "full_row", "left_row", "last_row"):
        by_block[name] = np.where(empty, ceil_div(problem.seqlen_k, t.tile_n) * t.tile_n, by_block[name])
    batch, head = flat // heads, flat % heads
    coords = {
        "q_head": flat,
        "kv_head": batch * problem.kv_heads + head // (1 if packed else problem.group),
        "row0": block * t.tile_m,
        "cluster_rank": block % t.cluster_m,
        **{name: values[block] for name, values in by_block.items()},
    }
    return coords, {"static_persistent": "static", "dynamic_persistent": "dynamic"}[schedule.kind]


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: Tiles | None = None,
) -> Program:
    """The FA3 program for ``problem`` (its forward pass, backward pass, or both) on ``gpu``; ``tiles`` replaces the
    shipped kernels' tiles."""
    impl = IMPLEMENTATIONS[implementation]
    check_supported(problem, impl)
    tiles = tiles or {}
    forward_of_both = impl if impl.name == kernels_cudnn.NAME else IMPLEMENTATIONS["flash_attn_3"]
    return build_passes(
        problem,
        lambda p: build_forward(p, impl, gpu, hypothetical, tiles=tiles.get("fwd")),
        lambda p: build_backward(p, impl, gpu, hypothetical, tiles.get("bwd")),
        lambda p: build_forward(p, forward_of_both, gpu, hypothetical, may_pack=False, tiles=tiles.get("fwd")),
    )


def build_forward(
    problem: AttentionProblem,
    impl: Implementation,
    gpu: Profile,
    hypothetical: bool,
    may_pack: bool = True,
    tiles: TileChoice | None = None,
) -> Program:
    """The FA3 forward program. ``may_pack``: query heads of a KV head may be packed into rows (else O is laid out as
    the backward pass reads it)."""
    implementation = impl.name
    substitutions = check_capabilities(impl, gpu, hypothetical)
    if max(problem.head_dim, problem.head_dim_v) > 256:
        raise UnsupportedError(f"head_dim {problem.head_dim}: {implementation} runs head dims up to 256")
    problem_run = launched_problem(problem)
    t, packed, mix, notes = forward_kernel(implementation, problem_run, gpu, tiles, may_pack)
    t = fit_tile(t, problem, gpu, substitutions)
    tensors = matrices(problem_run, t.tile_m, t.tile_n, packed)
    before: list[Kernel] = []
    if varlen.is_varlen(problem):
        tensors = varlen.ragged(tensors, problem)
        coords, schedule = varlen.fa3_coordinates(problem_run, t, packed), "dynamic"
        before.append(varlen.prepare_kernel(problem_run))
    else:
        coords, schedule = tile_coordinates(problem_run, t, packed, implementation not in kernels_fa3_2024.NAMES)
        if implementation == "cudnn_sm90" or schedule == "dynamic":
            before.append(counter_fill("fill"))
        if implementation == kernels_fa3_2024.GRID_NAME:
            schedule = "grid"  # the call still zeroes the counter
    group, q_head = problem.group if packed else 1, var("q_head")
    cta = roles(
        problem_run,
        t,
        tensors,
        group,
        lambda row, rows: tile(tensors["O"], q_head, row, rows, 0, t.padded_head_dim_v),
        lambda row, rows: tile(tensors["LSE"], q_head, row, rows),
        mix,
    )
    if varlen.is_varlen(problem):
        cta = varlen.within_sequence(cta)
    kernel = Kernel(
        "flash_fwd_sm90",
        adapt_to_fp8(cta, t, softmax_scale(problem)) if problem.dtype == "fp8" else cta,
        coords,
        key_trips(problem_run),
        threads=t.threads,
        smem_bytes=t.smem_bytes,
        registers_per_thread=(
            registers_at_launch(t.threads) if tiles is None else registers_at_launch(t.threads, gpu.registers_per_sm)
        ),
        ctas_per_sm=t.ctas_per_sm,
        schedule=schedule,
        early_start=varlen.is_varlen(problem),
        path=instruction_path("wgmma", gpu),
        compute_dtype=problem.dtype,
        semaphores=(("turn0", 1),),
        in_step_iterations=IN_STEP_ITERATIONS["flash_attn_3", "fwd"],
    )
    return Program(
        "fa3",
        implementation,
        problem,
        (*before, kernel),
        {k: tensors[k] for k in "QKV"},
        {k: tensors[k] for k in ("O", "LSE")},
        compulsory_bytes(tensors.values()),
        notes=notes,
        substitutions=tuple(substitutions),
        attributes={
            "tile": (t.tile_m, t.tile_n),
            "stages": t.kv_stages,
            "warpgroups": t.num_mma_warpgroups,
            "pack_gqa": packed,
        },
    )
