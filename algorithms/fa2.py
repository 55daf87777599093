"""FlashAttention-2, forward (Dao 2023, Algorithm 1): Q outer, one CTA per row block, warps split over the rows.

The loops in the paper's order: a CTA owns row block ``i`` (``Br`` rows of Q), walks the key blocks ``j`` (``Bc``
rows of K and V) and keeps ``m`` (row maximum), ``l`` (row sum) and an unnormalised ``O`` in registers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from algorithms import varlen
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
)
from algorithms.fa2_backward import backward_tile_space, build_backward
from algorithms.fa2_code import has_whole_tiles
from algorithms.fa2_roles import roles, spill_slots, spill_tensor
from algorithms.heuristics import fa2_key_loop, fa2_launch
from algorithms.in_step import FA2_FORWARD
from algorithms.kernel_tables import Fa2Tile, fa2_forward_tile
from algorithms.passes import build_passes
from algorithms.tile_search import TileChoice, Tiles, TileSpace, TileSpaces, candidates, fa2_accumulators, fa2_with
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
    "torch_flash": Implementation(
        "torch_flash",
        "fa2",
        frozenset({"mma_sync", "cp_async"}),
        "pytorch aten/src/ATen/native/transformers/cuda/flash_attn; flash-attention csrc/flash_attn",
        features=frozenset({"deterministic", "dropout", "window", "softcap", "varlen"}),
        passes=("fwd", "bwd", "fwd_bwd"),
    ),
}
DEFAULT = "torch_flash"


def launched_problem(problem: AttentionProblem) -> AttentionProblem:
    """``problem`` with the mask that FA2's launcher makes of causal and window (flash_api.cpp mha_fwd).

    The launcher also drops a right bound of ``seqlen_k`` keys with more queries than keys, where it still hides some:
    not copied.
    """
    if problem.seqlen_q == 1:
        problem = problem.with_(causal=False)
    return effective_masks(problem, problem.seqlen_k, max(problem.seqlen_q, problem.seqlen_k))


def shipped_tile(problem: AttentionProblem, gpu: Profile) -> Fa2Tile:
    """The tile that the library launches, whether or not it fits."""
    major, minor = (int(x) for x in gpu.compute_capability.split("."))
    return fa2_forward_tile(
        problem.head_dim,
        problem.dtype,
        problem.causal,
        bool(problem.dropout),
        gpu.smem_bytes_per_cta_max,
        gpu.smem_bytes_per_sm,
        (major, minor),
    )


def holds_as_much(t: Fa2Tile, problem: AttentionProblem, gpu: Profile) -> bool:
    """Whether ``t`` keeps as many accumulators a thread as the shipped tile, whose spills were counted."""
    own = shipped_tile(problem, gpu)
    held, kept = (fa2_accumulators(x.tile_m, x.tile_n, x.num_warps, x.padded_head_dim) for x in (t, own))
    return held >= kept


def forward_tile(problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None) -> Fa2Tile:
    """The shipped kernel's tile for ``problem`` on ``gpu``, or the kernel with ``tiles``; :class:`UnsupportedError`
    when it does not fit."""
    t = shipped_tile(problem, gpu)
    if tiles is not None:
        return fa2_with(tiles, t, gpu)
    if t.smem_bytes > gpu.smem_bytes_per_cta_max:
        raise UnsupportedError(
            f"torch_flash's {t.tile_m}x{t.tile_n} tile needs {t.smem_bytes} bytes of SMEM; "
            f"{gpu.name} has {gpu.smem_bytes_per_cta_max} a CTA"
        )
    return t


def tile_spaces(problem: AttentionProblem, _implementation: str, gpu: Profile) -> TileSpaces:
    """What may be chosen for each pass of a call."""
    spaces: dict[str, TileSpace | str] = {}
    if problem.pass_ != "bwd":
        own = shipped_tile(problem, gpu)
        shipped = TileChoice(own.tile_m, own.tile_n, own.kv_stages, max(1, own.num_warps // 4))
        split = splits_itself(problem, gpu)
        spaces["fwd"] = TileSpace(
            None if split else shipped,
            "the shipped split-KV kernel" if split else f"the shipped kernel's {shipped}",
            candidates("fa2"),
            lambda choice: forward_tile(problem, gpu, choice),
            problem.with_(pass_="fwd"),
        )
    if problem.pass_ != "fwd":
        spaces["bwd"] = backward_tile_space(problem, gpu)
    return spaces


def forward_coordinates(problem: AttentionProblem, t: Fa2Tile) -> dict[str, np.ndarray]:
    """CTA coordinates of sequences of one length, in launch order."""
    row_blocks = ceil_div(problem.seqlen_q, t.tile_m)
    # grid (row block, batch, head), the first fastest: heads of a KV group run one after another
    block, batch, head = grid_indices(row_blocks, problem.batch, problem.heads)
    by_block = key_coordinates(
        row_blocks,
        t.tile_n,
        lambda i: fa2_key_loop(
            row_block=i,
            tile_m=t.tile_m,
            tile_n=t.tile_n,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            causal=problem.causal,
            even_head_dim=t.padded_head_dim == problem.head_dim,
            even_lengths=has_whole_tiles(problem, t),
            head_dim=problem.head_dim,
            window=problem.window,
        ),
    )
    return {
        "q_head": batch * problem.heads + head,
        "kv_head": batch * problem.kv_heads + head // problem.group,
        "row0": block * t.tile_m,
        **{name: values[block] for name, values in by_block.items()},
    }


def splits_itself(problem: AttentionProblem, gpu: Profile) -> bool:
    """Whether the library, left to choose (``num_splits`` blank), runs this forward pass on its split-KV kernel."""
    if problem.num_splits is not None or problem.dropout or varlen.is_varlen(problem):
        return False
    launch = fa2_launch(
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        seqlen_q=problem.seqlen_q,
        kv_capacity=problem.seqlen_k,
        head_dim=problem.head_dim,
        num_sms=gpu.num_sms,
        causal=problem.causal,
        window=problem.window is not None,
    )
    return launch.num_splits > 1 and problem.seqlen_q > 1


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: Tiles | None = None,
) -> Program:
    """The FA2 program for ``problem`` (its forward pass, backward pass, or both) on ``gpu``; ``tiles`` replaces the
    shipped kernels' tiles."""
    impl = IMPLEMENTATIONS[implementation]
    check_supported(problem, impl)
    tiles = tiles or {}
    return build_passes(
        problem,
        lambda p: build_forward(p, impl, gpu, hypothetical, tiles.get("fwd")),
        lambda p: build_backward(p, impl, gpu, hypothetical, tiles.get("bwd")),
    )


def build_forward(
    problem: AttentionProblem,
    impl: Implementation,
    gpu: Profile,
    hypothetical: bool,
    tiles: TileChoice | None = None,
) -> Program:
    """The FA2 forward program, or the split-KV one where the library splits a launch that would leave SMs idle."""
    implementation = impl.name
    substitutions = check_capabilities(impl, gpu, hypothetical)
    if problem.head_dim > 256:
        raise UnsupportedError(f"head_dim {problem.head_dim}: {implementation} runs head dims up to 256")
    if problem.softcap and problem.dropout:
        raise UnsupportedError(f"softcap with dropout: {implementation} runs one of them")
    if tiles is None and splits_itself(problem, gpu):
        # the same dispatch as for decode: too few CTAs for the GPU, so the keys are shared out
        from algorithms import decoding_fa2

        return replace(decoding_fa2.build(problem, implementation, gpu, substitutions), algorithm="fa2")
    asked, problem = problem, launched_problem(problem)
    t = forward_tile(problem, gpu, tiles)
    tensors = matrices(problem, t.tile_m, t.tile_n)
    by_sequence = varlen.is_varlen(problem)
    if by_sequence:
        tensors = varlen.ragged(tensors, problem)
    spill = spill_tensor(t, gpu, problem) if tiles is None or holds_as_much(t, problem, gpu) else None
    if spill is not None:
        tensors["spill"] = spill
    coords = varlen.fa2_coordinates(problem, t) if by_sequence else forward_coordinates(problem, t)
    coords["slot"] = np.arange(len(coords["row0"]), dtype=np.int64) % spill_slots(t, gpu)
    d = t.padded_head_dim
    q_head = var("q_head")
    ctas = roles(
        problem,
        t,
        tensors,
        1,
        lambda row, rows: tile(tensors["O"], q_head, row, rows, 0, d),
        lambda row, rows: tile(tensors["LSE"], q_head, row, rows),
        in_step=len(coords["row0"]) <= gpu.num_sms * t.ctas_per_sm,
    )
    trips: tuple[Trip, ...] = (Trip("n_masked"), Trip("n_full"))
    if by_sequence:
        ctas = varlen.within_sequence(ctas)
        if varlen.live_trip(coords):
            ctas, trips = varlen.returns_at_once(ctas), (*trips, *varlen.live_trip(coords))
    kernel = Kernel(
        "flash_fwd",
        ctas,
        coords,
        trips,
        threads=t.threads,
        smem_bytes=t.smem_bytes,
        registers_per_thread=t.registers_per_thread,
        ctas_per_sm=t.ctas_per_sm,
        path=instruction_path("mma_sync", gpu),
        compute_dtype=problem.dtype,
        in_step_iterations=FA2_FORWARD,
    )
    return Program(
        "fa2",
        implementation,
        asked,
        (kernel,),
        {k: tensors[k] for k in "QKV"},
        {k: tensors[k] for k in ("O", "LSE")},
        compulsory_bytes(t for t in tensors.values() if t.kind != "scratch"),
        substitutions=tuple(substitutions),
        attributes={"tile": (t.tile_m, t.tile_n), "stages": t.kv_stages, "warpgroups": max(1, t.num_warps // 4)},
    )
