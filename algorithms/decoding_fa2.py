"""FlashDecoding as FlashAttention-2 runs it: ``flash_fwd_splitkv_kernel`` and its combine kernel.

With a single split the library launches its ordinary forward kernel instead (unless the cache is paged), and so does
this program. Splits share out the *capacity* of the cache, so late splits of a half-filled one are empty: they write
O = 0 and LSE = -inf, and the combine kernel reads them all the same. Query counts that differ (``seqlens_q``) go
through ``flash_attn_varlen_func``: no splits, no packing of query heads, a CTA for every row block of the longest.
"""

from __future__ import annotations

import numpy as np

from algorithms import fa2, fa2_roles, varlen
from algorithms.combine import Partials, combine_kernel
from algorithms.common import ceil_div, compulsory_bytes, grid_indices, instruction_path, matrices
from algorithms.decoding_common import (
    LoopTable,
    by_sequence,
    cache_bytes,
    check_capacity,
    end_at_last_row,
    keep_fp32,
    query_offsets,
    rewrite_roles,
    sequence_kinds,
    skip_empty_q,
    stores_nothing,
)
from algorithms.heuristics import Fa2Launch, fa2_key_loop, fa2_launch
from algorithms.in_step import FA2_FORWARD
from algorithms.kernel_tables import Fa2Tile, fa2_combine_kernel, fa2_splitkv_tile
from algorithms.paged_kv import PagedCache, paged_capacity
from algorithms.tile_search import TileChoice, TileSpace, candidates, fa2_with
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Kernel, Op, Program, Tensor, Trip, tile, var

#: flash_api.cpp mha_fwd_kvcache: "Paged KV cache block size must be divisible by 256".
_PAGE_MULTIPLE = 256


def _tile(problem: AttentionProblem, launch: Fa2Launch, gpu: Profile, tiles: TileChoice | None = None) -> Fa2Tile:
    """The tile of the kernel that ``launch`` names, or the kernel with ``tiles``."""
    if launch.splitkv_kernel:
        t = fa2_splitkv_tile(problem.head_dim, problem.dtype, launch.num_splits, gpu.smem_bytes_per_sm)
    else:
        t = fa2.shipped_tile(problem.with_(causal=launch.causal, dropout=0.0), gpu)
    return t if tiles is None else fa2_with(tiles, t, gpu)


def _launch(problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None) -> Fa2Launch:
    """How the library launches ``problem`` (as :func:`algorithms.fa2.launched_problem` leaves it)."""
    return fa2_launch(
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        seqlen_q=problem.seqlen_q,
        kv_capacity=paged_capacity(problem, check_capacity(problem)),
        head_dim=problem.head_dim,
        num_sms=gpu.num_sms,
        causal=problem.causal,
        window=problem.window is not None,
        num_splits=1 if problem.seqlens_q is not None else problem.num_splits or 0,
        force_split_kernel=problem.page_size is not None,
        tile=(tiles.tile_m, tiles.tile_n) if tiles is not None else None,
    )


def _equal_counts(problem: AttentionProblem) -> AttentionProblem:
    """``problem``; one query each: mha_varlen_fwd packs the group and splits as for equal counts."""
    return problem.with_(seqlens_q=None) if problem.seqlens_q is not None and problem.seqlen_q == 1 else problem


def tile_space(problem: AttentionProblem, gpu: Profile) -> TileSpace:
    """What may be chosen for the main kernel of ``problem``."""
    seen = fa2.launched_problem(_equal_counts(problem))
    own = _tile(seen, _launch(seen, gpu), gpu)
    shipped = TileChoice(own.tile_m, own.tile_n, own.kv_stages, max(1, own.num_warps // 4))

    def check(choice: TileChoice) -> Fa2Tile:
        return _tile(seen, _launch(seen, gpu, choice), gpu, choice)

    return TileSpace(shipped, f"the shipped kernel's {shipped}", candidates("fa2"), check, problem)


def _main_kernel(
    problem: AttentionProblem,
    launch: Fa2Launch,
    t: Fa2Tile,
    tensors: dict[str, Tensor],
    partials: Partials | None,
    pages: PagedCache | None,
    gpu: Profile,
    spills: bool,
) -> Kernel:
    distinct, kinds = sequence_kinds(problem)
    splits, heads = launch.num_splits, launch.heads
    row_blocks = ceil_div(launch.seqlen_q, t.tile_m)
    if splits > 1:
        block, split, matrix = grid_indices(row_blocks, splits, problem.batch * heads)
        batch, head = matrix // heads, matrix % heads
    else:
        block, batch, head = grid_indices(row_blocks, problem.batch, heads)
        split, matrix = np.zeros_like(block), batch * heads + head
    table = LoopTable.of(
        kinds,
        row_blocks,
        lambda _kind: splits,
        t.tile_n,
        problem.seqlen_k,
        lambda kind, row_block, part, parts: fa2_key_loop(
            row_block=row_block,
            tile_m=t.tile_m,
            tile_n=t.tile_n,
            seqlen_q=launch.seqlen_q if problem.seqlens_q is None else distinct[kind][0],
            seqlen_k=distinct[kind][1],
            causal=launch.causal,
            even_head_dim=t.padded_head_dim == problem.head_dim and not varlen.is_varlen(problem),
            head_dim=problem.head_dim,
            num_splits=parts,
            split=part,
            kv_capacity=paged_capacity(problem, check_capacity(problem)),
            window=problem.window,
        ),
    )
    kind, offset = np.array(kinds)[batch], query_offsets(problem, 1)[batch]
    length = np.array(distinct)[kind, 1]
    live = table.live(kind, block, split)
    # rows of this CTA's sequence, if it reaches so far (else the CTA returns at once)
    has_rows = block * t.tile_m + offset < launch.seqlen_q
    coords = {
        "q_head": np.where(has_rows, matrix, -1),
        "q_load_head": np.where(live, matrix, -1),
        "kv_head": batch * problem.kv_heads + (head if launch.group_in_rows else head // problem.group),
        "row0": block * t.tile_m + offset,
        "seqlen_k": length,
        "slot": np.arange(len(block), dtype=np.int64) % fa2_roles.spill_slots(t, gpu),
        **table.coordinates(kind, block, split),
    }
    if problem.seqlens_q is not None:
        coords |= {"q_offset": offset, "shift": length - launch.seqlen_q + offset, "n_live": has_rows.astype(np.int64)}
        coords |= {trip: coords[trip] * has_rows for trip in ("n_masked", "n_full")}
    if pages is not None:
        coords |= pages.coordinates(coords, batch)
    d, q_head = problem.head_dim, var("q_head")
    if partials is not None:
        coords |= partials.coordinates(matrix, split)
        targets = partials.o_tile, partials.lse_tile
    else:
        targets = (
            lambda row, rows: tile(tensors["O"], q_head, row, rows, 0, d),
            lambda row, rows: tile(tensors["LSE"], q_head, row, rows),
        )

    def adapt(op: Op) -> tuple[Op, ...]:
        return () if stores_nothing(op) else (by_sequence(keep_fp32(skip_empty_q(op)), problem, launch.seqlen_q),)

    out = dict(tensors) if partials is None else tensors | {"O": partials.o}
    # the split-KV kernel spills none (H200 counters)
    seen = problem.with_(causal=launch.causal)
    spill = fa2_roles.spill_tensor(t, gpu, seen) if spills and not launch.splitkv_kernel else None
    if spill is not None:
        out["spill"] = spill
    roles = rewrite_roles(fa2_roles.roles(seen, t, out, 1, *targets, split=launch.splitkv_kernel), adapt)
    trips: tuple[Trip, ...] = (Trip("n_masked"), Trip("n_full"))
    if pages is not None:
        roles = pages.roles(roles)
    if problem.seqlens_q is not None and varlen.live_trip(coords):
        roles, trips = varlen.returns_at_once(roles), (*trips, *varlen.live_trip(coords))
    return Kernel(
        "flash_fwd_splitkv" if launch.splitkv_kernel else "flash_fwd",
        roles,
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


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    substitutions: list[str],
    tiles: TileChoice | None = None,
) -> Program:
    """FA2's decode program for a checked ``problem`` on ``gpu``; ``tiles`` replaces the main kernel's own."""
    if problem.head_dim > 256:
        raise UnsupportedError(f"head_dim {problem.head_dim}: {implementation} runs head dims up to 256")
    if problem.page_size is not None and problem.page_size % _PAGE_MULTIPLE:
        raise UnsupportedError(
            f"page_size {problem.page_size}: {implementation} takes pages of a multiple of {_PAGE_MULTIPLE} rows"
        )
    asked = _equal_counts(problem)
    problem = fa2.launched_problem(asked)
    capacity = paged_capacity(problem, check_capacity(problem))
    by_query_counts = problem.seqlens_q is not None
    if by_query_counts and (problem.num_splits or 1) > 1:
        raise UnsupportedError(
            f"num_splits {problem.num_splits} with seqlens_q: {implementation} takes query counts that differ through "
            "flash_attn_varlen_func, which never splits them; leave num_splits blank"
        )
    launch = _launch(problem, gpu, tiles)
    t = _tile(problem, launch, gpu, tiles)
    if t.smem_bytes > gpu.smem_bytes_per_cta_max:
        raise UnsupportedError(
            f"{implementation}'s {t.tile_m}x{t.tile_n} tile needs {t.smem_bytes} bytes of SMEM; "
            f"{gpu.name} has {gpu.smem_bytes_per_cta_max} a CTA"
        )
    tensors = matrices(problem, t.tile_m, t.tile_n, launch.group_in_rows)
    tensors = end_at_last_row(tensors, problem)
    partials, pages, kernels, notes = None, None, [], []
    if problem.page_size is not None:
        pages = PagedCache.of(problem, t.tile_n, gather=False)
        tensors = pages.tensors(tensors)
    if launch.num_splits > 1:
        rows, total = launch.seqlen_q, problem.batch * launch.heads
        partials = Partials.of(1, total, rows, launch.num_splits, problem.head_dim, t.padded_head_dim, t.tile_m)
    spills = tiles is None or fa2.holds_as_much(t, problem, gpu)
    kernels.append(_main_kernel(problem, launch, t, tensors, partials, pages, gpu, spills))
    if partials is not None:
        splits = np.full(partials.stacks, launch.num_splits, np.int64)
        combine = fa2_combine_kernel(problem.head_dim, launch.num_splits)
        kernels.append(
            combine_kernel("flash_fwd_splitkv_combine", combine, partials, tensors["O"], tensors["LSE"], splits)
        )
    elif not launch.splitkv_kernel:
        notes.append("one split: the ordinary FA2 forward kernel runs, without a combine kernel")
    live = compulsory_bytes(tensors[k] for k in ("Q", "O", "LSE")) + cache_bytes(problem, capacity, problem.head_dim_v)
    if pages is not None:
        live += pages.table.bytes
    if partials is not None:
        live += partials.o.bytes + partials.lse.bytes
    return Program(
        "flash_decoding",
        implementation,
        asked,
        tuple(kernels),
        {k: tensors[k] for k in "QKV"},
        {k: tensors[k] for k in ("O", "LSE")},
        live,
        notes=tuple(notes),
        substitutions=tuple(substitutions),
        attributes={
            "num_splits": launch.num_splits,
            "pack_gqa": launch.group_in_rows,
            "tile": (t.tile_m, t.tile_n),
            "stages": t.kv_stages,
            "warpgroups": max(1, t.num_warps // 4),
        },
    )
