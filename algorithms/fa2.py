"""FlashAttention-2, forward (Dao 2023, Algorithm 1): Q outer, one CTA per row block, warps split over the rows.

The loops in the paper's order: a CTA owns row block ``i`` (``Br`` rows of Q), walks the key blocks ``j`` (``Bc``
rows of K and V) and keeps ``m`` (row maximum), ``l`` (row sum) and an unnormalised ``O`` in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from algorithms import varlen
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    check_supported,
    compulsory_bytes,
    dropout_op,
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
from algorithms.counted import instructions_around, residual_instructions, spread_over_matmuls
from algorithms.fa2_backward import backward_tile_space, build_backward
from algorithms.fa2_code import IN_STEP_SHARE, code_bytes, has_whole_tiles, is_uneven, unrolled_blocks
from algorithms.heuristics import fa2_key_loop, fa2_launch
from algorithms.in_step import IN_STEP_ITERATIONS
from algorithms.instruction_counts import fa2_forward_counts
from algorithms.kernel_tables import Fa2Tile, fa2_forward_tile
from algorithms.passes import build_passes
from algorithms.tile_search import TileChoice, Tiles, TileSpace, TileSpaces, candidates, fa2_accumulators, fa2_with
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Acquire,
    Barrier,
    Buffer,
    Compute,
    Consume,
    Exchange,
    Fetch,
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
#: Operations that the counted kernels did not execute in (most of) their iterations.
_MASKS = frozenset({"mask", "mask_window"})
_BESIDE_COUNTS = _MASKS | {"dropout", "softcap"}
#: Registers that a thread spills a key block in instantiations of their own at head dim 128: with a window, and for row
#: counts that are no multiple of the tile (H200 counters: bytes written to L2 over CTAs and blocks).
_SPILLED_WINDOW_128 = 32
_SPILLED_CAUSAL_128 = 14
_SPILLED_UNEVEN_128 = {False: 8, True: 9}


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


def spill_tensor(t: Fa2Tile, gpu: Profile, problem: AttentionProblem) -> Tensor | None:
    """Local memory for spilled registers: one row for each CTA that the GPU holds at a time; ``None`` without spills.

    Spilled stores go through to L2; the same lines are reused by every iteration and by every later CTA.
    """
    size = fa2_forward_counts(t.padded_head_dim).spill_store_bytes
    if t.padded_head_dim == 128:
        if problem.window is not None:
            size = 4 * _SPILLED_WINDOW_128 * t.threads
        elif not has_whole_tiles(problem, t):
            size = 4 * _SPILLED_UNEVEN_128[problem.causal] * t.threads
    slots = spill_slots(t, gpu)
    return Tensor("spill", 1, slots, size // 4, "fp32", "scratch", 1, size // 4) if size else None


def holds_as_much(t: Fa2Tile, problem: AttentionProblem, gpu: Profile) -> bool:
    """Whether ``t`` keeps as many accumulators a thread as the shipped tile, whose spills were counted."""
    own = shipped_tile(problem, gpu)
    held, kept = (fa2_accumulators(x.tile_m, x.tile_n, x.num_warps, x.padded_head_dim) for x in (t, own))
    return held >= kept


def roles(
    problem: AttentionProblem,
    t: Fa2Tile,
    tensors: dict[str, Tensor],
    group: int,
    o_tile: Callable[[Index, int], Tile],
    lse_tile: Callable[[Index, int], Tile],
    *,
    split: bool = False,
) -> tuple[Role, ...]:
    """The loader (cp.async issued by the compute warps, one K and one V buffer) and the compute warps.

    Warps are taken four at a time (one per SM sub-partition); each set owns ``Br * 4 / num_warps`` rows.
    ``o_tile``/``lse_tile`` map (first row, rows) to where the results go. ``split`` takes the counted instructions
    of the split-KV kernel. A tensor ``spill`` among ``tensors`` receives spilled registers (coordinate ``slot``).
    """
    counts = fa2_forward_counts(t.padded_head_dim, split)
    sets = max(1, t.num_warps // 4)
    rows, d = t.tile_m // sets, t.padded_head_dim
    dtype = problem.dtype
    scale = softmax_scale(problem)
    q_smem = Buffer("q_smem", t.tile_m, d, dtype, "smem")
    k_pipe = Pipe("k", t.tile_n, d, dtype, t.kv_stages, sets)
    v_pipe = Pipe("v", t.tile_n, d, dtype, t.kv_stages, sets)
    head, kv_head = var("q_head"), var("kv_head")
    code, unrolled = code_bytes(problem, t, split), unrolled_blocks(problem, t)
    # the kernel for whole tiles and no mask (IsEvenMNConst) looks for none
    unmasked = not (split or problem.causal or problem.window is not None) and has_whole_tiles(problem, t)
    beyond_mask = max(0.0, (counts.masked_uneven if is_uneven(problem, t) else counts.masked) - 2.0)

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
                *([mask_op(s, problem, row0, col, group)] if masked and not unmasked else []),
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
            plain = [op for op in ops if not (isinstance(op, Compute) and op.fn in _BESIDE_COUNTS)]
            ops = spread_over_matmuls(ops, (), counts.mix.tensor * elements)
            if masked and problem.causal and problem.window is None and not split:
                ops[0:0] = [Fetch(code, unrolled), Instructions("mask", (("issue", beyond_mask * elements),))]
            # fragment loads, addresses and predicates are issued between softmax and the products
            beyond = Instructions("softmax", residual_instructions(plain, counts.mix, elements))
            ops.insert(len(ops) - 2, beyond)
            more = _SPILLED_WINDOW_128 - _SPILLED_CAUSAL_128 if problem.window is not None and d == 128 else 0
            if more and "spill" in tensors:
                # registers beyond those that the counted instructions spill: a store, later a load, both through L1
                lanes, moved = 2.0 * more * 128, 4 * more * 128
                ops.insert(len(ops) - 2, Instructions("spill", (("issue", lanes),)))
                ops.insert(len(ops) - 2, Exchange("spill", moved, moved))
            if "spill" in tensors:
                spilled = Buffer("spilled", 1, tensors["spill"].cols // sets)
                where = tile(tensors["spill"], 0, var("slot"), 1, index * spilled.cols, spilled.cols)
                ops.append(Store(View(spilled), where))
            return ops

        load_q = Load(tile(tensors["Q"], head, row0, rows, 0, d), q)
        factor = (("factor", 1.0 / (1.0 - problem.dropout)),)
        rescale = [Compute("scale", o, (o,), rows, d, factor)] if problem.dropout else []
        warps = min(4, t.num_warps)
        begin = [fill(o, 0.0), fill(vectors["l"], 0.0), fill(vectors["m"], float("-inf"))]
        end = epilogue(o, out, vectors, scale)
        outside = Instructions("around", instructions_around(counts.around * 32 * warps / 2, [*begin, *end]))
        return Role(
            f"warps{index}",
            [
                load_q,
                outside,
                # with a window every block is masked, and the blocks that are repeated ahead of the loop run once
                *(
                    [
                        Fetch(code, IN_STEP_SHARE),
                        Instructions("mask", (("issue", beyond_mask * rows * t.tile_n * unrolled),)),
                    ]
                    if problem.window is not None and not split
                    else []
                ),
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
        in_step_iterations=IN_STEP_ITERATIONS["torch_flash", "fwd"],
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
