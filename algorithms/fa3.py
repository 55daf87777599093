"""FlashAttention-3, forward (Shah et al. 2024, Algorithms 1 and 2): TMA producer, ping-pong consumer warpgroups.

A loader fills two-stage rings of K and V. Each consumer warpgroup owns 64 rows; inside one, QK of block ``j`` is
issued before PV of block ``j-1``, so softmax of ``j`` runs while the tensor cores do PV. Warpgroups take turns to
issue their GEMM pair, which puts one's softmax under the other's GEMMs.
"""

from __future__ import annotations

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
    grid_indices,
    instruction_path,
    key_coordinates,
    matrices,
    softmax_scale,
)
from algorithms.fa3_backward import build_backward
from algorithms.fa3_fp8 import adapt as adapt_to_fp8
from algorithms.fa3_roles import roles
from algorithms.fa3_tiles import fit_tile, forward_kernel
from algorithms.fa3_tiles import forward_tile as forward_tile  # what callers ask of an algorithm's module
from algorithms.fa3_tiles import tile_spaces as tile_spaces  # what the search of tiles asks of it
from algorithms.heuristics import fa3_key_loop, fa3_schedule, fa3_section_heads
from algorithms.in_step import own_sm
from algorithms.instruction_counts import fa3_around
from algorithms.kernel_tables import Fa3Tile
from algorithms.kernels_common import registers_at_launch
from algorithms.passes import build_passes
from algorithms.tile_search import TileChoice, Tiles
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Kernel,
    Program,
    Trip,
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
        fa3_around(problem.head_dim, problem.dtype) if mix is None else None,
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
        in_step_iterations=own_sm(max(problem.head_dim, problem.head_dim_v)),
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
