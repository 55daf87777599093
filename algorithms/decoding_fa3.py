"""FlashDecoding as FlashAttention-3 runs it on Hopper: ``flash_attn_with_kvcache``.

Without ``cache_seqlens`` (``kv_capacity`` and ``seqlens_k`` not given) the splits are the launcher's and each work tile
is a CTA. With it a prepare kernel first gives every sequence its own number of splits (the launcher's is an upper
bound), a persistent kernel hands the tiles out, and sequences left with one split write O at once.
Splitting implies PackGQA: the query heads of a KV head are rows of one tile, so K and V are read once a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from algorithms import fa3, fa3_fp8, fa3_roles, mla_fa3
from algorithms.combine import Partials, combine_kernel, counter_fill, helper_kernel
from algorithms.common import ceil_div, compulsory_bytes, grid_indices, instruction_path, matrices, softmax_scale
from algorithms.decoding_common import (
    LoopTable,
    by_sequence,
    cache_bytes,
    check_capacity,
    end_at_last_row,
    keep_fp32,
    metadata,
    query_offsets,
    rewrite_roles,
    sequence_kinds,
    skip_empty_q,
    stores_nothing,
)
from algorithms.fa3_tiles import choice_of, fit_tile
from algorithms.heuristics import (
    fa3_dynamic_splits,
    fa3_key_loop,
    fa3_num_splits,
    fa3_pack_gqa,
    fa3_paged_by_tma,
    fa3_varlen_section_heads,
)
from algorithms.kernel_tables import Fa3Tile, fa3_combine_kernel, fa3_forward_tile
from algorithms.kernels_common import registers_at_launch
from algorithms.paged_kv import PagedCache, paged_capacity
from algorithms.tile_search import TileChoice, TileSpace, candidates, fa3_with
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Exchange, Kernel, Op, Program, Store, Tensor, tile, var, view

#: Sequences that one CTA of the prepare kernel serves (31 a warp, 32 warps).
_PREPARE_SEQUENCES_PER_CTA = 992


@dataclass(frozen=True)
class _Launch:
    """What the launcher decides: splits (an upper bound when ``varlen``), packing, tile, and each sequence's splits and
    row blocks (``row_blocks``: the most of any)."""

    varlen: bool
    causal: bool
    static_splits: int
    splits: tuple[int, ...]
    packed: bool
    heads: int
    group: int
    row_blocks: int
    own_row_blocks: tuple[int, ...]
    lengths: tuple[int, ...]
    t: Fa3Tile
    gather: bool


def _kernel_head_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Head dims of Q K^T and V as the launcher sees them: MLA's latent part of Q is an operand of its own (qv)."""
    return (mla_fa3.ROTARY, mla_fa3.LATENT) if mla_fa3.is_mla(problem) else (problem.head_dim, problem.head_dim_v)


def tile_space(problem: AttentionProblem, gpu: Profile) -> TileSpace | str:
    """What may be chosen for the main kernel of ``problem``."""
    seen = fa3.launched_problem(problem)
    if mla_fa3.is_mla(problem):
        return "MLA's kernel keeps O's 512 columns in the registers of two warpgroups; its tile is fixed at 64x64"
    own = choice_of(_launch(seen, gpu, None).t)

    def check(choice: TileChoice) -> Fa3Tile:
        return _launch(seen, gpu, [], choice).t

    return TileSpace(own, f"the shipped kernel's {own}", candidates("fa3"), check, problem)


def _launch(
    problem: AttentionProblem, gpu: Profile, substitutions: list[str] | None, tiles: TileChoice | None = None
) -> _Launch:
    """How the library launches ``problem``; ``substitutions`` ``None`` leaves a tile that does not fit as it is."""
    p, capacity = problem, paged_capacity(problem, check_capacity(problem))
    varlen = p.kv_capacity is not None or p.seqlens_k is not None or p.seqlens_q is not None
    causal, local = p.causal, p.window is not None
    queries, lengths = zip(*p.sequences(), strict=True)
    dtype = "e4m3" if p.dtype == "fp8" else p.dtype
    d, dv = _kernel_head_dims(p)

    def tile_for(gather: bool, **changes: Any) -> Fa3Tile:
        shape = {"causal": causal, "local": local, "softcap": bool(p.softcap), "varlen": varlen}
        t = fa3_forward_tile(d, dv, dtype, paged_gather=gather, **shape, **changes)
        if tiles is None:
            return t
        o_in_smem = varlen or not changes.get("split", False)
        return fa3_with(tiles, t, p.element_bytes, gpu, changes.get("row_blocks"), o_in_smem)

    t, gather = tile_for(False), False
    if p.page_size is not None:
        gather = not fa3_paged_by_tma(
            page_size=p.page_size, seqlen_q=p.seqlen_q, group=p.group, tile_m=t.tile_m, tile_n=t.tile_n
        )
        t = tile_for(gather)
    packed_blocks = ceil_div(p.seqlen_q * p.group, t.tile_m)
    loaded = capacity
    if local:
        assert p.window is not None
        left, right = p.window
        left, right = (left if left >= 0 else p.seqlen_k - 1), (right if right >= 0 else p.seqlen_q - 1)
        loaded = min(capacity, left + right + 1 + t.tile_m)
    static = p.num_splits or fa3_num_splits(
        total_row_blocks=(1 if varlen else p.batch) * p.kv_heads * packed_blocks,
        num_sms=gpu.num_sms,
        key_blocks=ceil_div(loaded, t.tile_n),
        row_blocks=packed_blocks,
        kv_head_bytes=loaded * (d + dv) * p.element_bytes,
        causal_or_local=causal or local,
    )
    if static > 256:
        raise UnsupportedError(f"num_splits {static}: flash_attn_3_kvcache takes at most 256")
    fills = fa3_pack_gqa(seqlen_q=p.seqlen_q, group=p.group, tile_m=t.tile_m, varlen_q=p.seqlens_q is not None)
    packed = static > 1 or gather or (p.group > 1 and fills)
    group, heads = (p.group, p.kv_heads) if packed else (1, p.heads)
    row_blocks = ceil_div(p.seqlen_q * group, t.tile_m)
    t = tile_for(gather, split=static > 1, pack_gqa=packed, row_blocks=row_blocks)
    if mla_fa3.is_mla(p):
        t = replace(t, smem_bytes=mla_fa3.smem_bytes(t))
    if substitutions is not None:
        t = fit_tile(t, p, gpu, substitutions)
    own = tuple(ceil_div(n * group, t.tile_m) for n in queries)
    splits = [static] * p.batch
    if varlen:
        blocks = [(rows, ceil_div(length, t.tile_n)) for rows, length in zip(own, lengths, strict=True)]
        splits = fa3_dynamic_splits(row_blocks_and_key_blocks=blocks, heads=heads, num_sms=gpu.num_sms, static=static)
    return _Launch(varlen, causal, static, tuple(splits), packed, heads, group, row_blocks, own, lengths, t, gather)


def _varlen_order(problem: AttentionProblem, launch: _Launch) -> tuple[np.ndarray, ...]:
    """(row block, split, head, batch) of the work tiles in the order of the varlen scheduler.

    Sequences with the longest share of keys come first; inside one, row blocks vary fastest (from the last when
    causal), then splits, then heads; an unsplit causal one walks sections of heads that share L2.
    """
    p, t, heads = problem, launch.t, launch.heads
    keys = [ceil_div(ceil_div(n, t.tile_n), s) for n, s in zip(launch.lengths, launch.splits, strict=True)]
    own = launch.own_row_blocks
    weight = [k * t.tile_n - (m * t.tile_m if launch.causal else 0) for k, m in zip(keys, own, strict=True)]
    d, dv = _kernel_head_dims(p)
    parts = []
    local = p.window is not None
    for b in range(p.batch) if local else sorted(range(p.batch), key=lambda i: -weight[i]):
        splits, blocks = launch.splits[b], own[b]
        if (launch.causal or local) and splits == 1:
            section = fa3_varlen_section_heads(
                key_blocks=keys[b],
                tile_n=t.tile_n,
                head_dim=d,
                head_dim_v=dv,
                element_bytes=p.element_bytes,
                group=p.group,
                pack_gqa=launch.packed,
                heads=heads,
            )
            for start in range(0, heads, section):
                head, block = grid_indices(min(section, heads - start), blocks)
                parts.append((blocks - 1 - block, np.zeros_like(block), start + head, np.full_like(block, b)))
        else:
            block, split, head = grid_indices(blocks, splits, heads)
            block = blocks - 1 - block if launch.causal or local else block
            parts.append((block, split, head, np.full_like(block, b)))
    return tuple(np.concatenate(axis) for axis in zip(*parts, strict=True))


def _order(problem: AttentionProblem, launch: _Launch) -> tuple[tuple[np.ndarray, ...], str]:
    """Work tiles (row block, split, head, batch) in launch order, and the engine's name of the schedule."""
    if launch.varlen:
        return _varlen_order(problem, launch), "dynamic"
    if launch.static_splits > 1:
        block, split, head, batch = grid_indices(launch.row_blocks, launch.static_splits, launch.heads, problem.batch)
        return (block, split, head, batch), "grid"
    coords, schedule = fa3.tile_coordinates(problem, launch.t, launch.packed)
    block = coords["row0"] // launch.t.tile_m
    return (block, np.zeros_like(block), coords["q_head"] % launch.heads, coords["q_head"] // launch.heads), schedule


def _main_kernel(
    problem: AttentionProblem,
    launch: _Launch,
    table: LoopTable,
    tensors: dict[str, Tensor],
    partials: Partials | None,
    pages: PagedCache | None,
    gpu: Profile,
) -> Kernel:
    t = launch.t
    (block, split, head, batch), schedule = _order(problem, launch)
    length = np.array(launch.lengths, np.int64)[batch]
    is_split = np.array(launch.splits, np.int64)[batch] > 1
    kind, offset = np.array(sequence_kinds(problem)[1])[batch], query_offsets(problem, launch.group)[batch]
    live = table.live(kind, block, split)
    matrix = batch * launch.heads + head
    coords = {
        "q_head": matrix,
        "q_load_head": np.where(live, matrix, -1),
        "kv_head": batch * problem.kv_heads + (head if launch.packed else head // problem.group),
        "row0": block * t.tile_m + offset,
        "cluster_rank": block % t.cluster_m,
        "seqlen_k": length,
        "o_head": np.where(is_split, -1, matrix),
        **table.coordinates(kind, block, split),
    }
    if problem.seqlens_q is not None:
        coords |= {"q_offset": offset, "shift": length - problem.seqlen_q + offset // launch.group}
    if pages is not None:
        coords |= pages.coordinates(coords, batch)
    o_head, dv = var("o_head"), problem.head_dim_v
    if partials is not None:
        coords |= partials.coordinates(matrix, split, writes_o=is_split & live, writes_lse=is_split)
        targets = partials.o_tile, partials.lse_tile
        tensors = tensors | {"O": partials.o, "O_final": tensors["O"]}
    else:
        targets = (
            lambda row, rows: tile(tensors["O"], o_head, row, rows, 0, dv),
            lambda row, rows: tile(tensors["LSE"], o_head, row, rows),
        )
    some_unsplit = partials is not None and not is_split.all()

    def unsplit_store(op: Store) -> Store:
        """The same rows in O or LSE themselves, for sequences that are not split."""
        row, rows = op.into.row - var("p_row"), view(op.source).shape[0]
        if op.into.tensor.name == "LSE_partial":
            return Store(op.source, tile(tensors["LSE"], o_head, row, rows))
        return Store(op.source, tile(tensors["O_final"], o_head, row, rows, op.into.col, op.into.cols), via="st")

    def adapt(op: Op) -> tuple[Op, ...]:
        if isinstance(op, Store) and partials is not None:
            kept = () if stores_nothing(op) else (op,)
            return (*kept, unsplit_store(op)) if some_unsplit else kept
        if isinstance(op, Exchange) and op.name == "O" and launch.static_splits > 1 and not launch.varlen:
            return ()  # the accumulators go to HBM directly
        return (by_sequence(keep_fp32(skip_empty_q(op)), problem, problem.seqlen_q),)

    schedule_of = mla_fa3.roles if mla_fa3.is_mla(problem) else fa3_roles.roles
    roles = rewrite_roles(schedule_of(problem, t, tensors, launch.group, *targets), adapt)
    if problem.dtype == "fp8":
        roles = fa3_fp8.adapt(roles, t, softmax_scale(problem))
    return Kernel(
        "flash_fwd_sm90",
        roles if pages is None else pages.roles(roles),
        coords,
        fa3.key_trips(problem),
        threads=t.threads,
        smem_bytes=t.smem_bytes,
        registers_per_thread=registers_at_launch(t.threads),
        ctas_per_sm=t.ctas_per_sm,
        schedule=schedule,
        path=instruction_path("wgmma", gpu),
        compute_dtype=problem.dtype,
        semaphores=(("turn0", 1),),
    )


def _before(problem: AttentionProblem, launch: _Launch) -> list[Kernel]:
    """The kernel that readies the scheduler: prepare (varying lengths) or fill (a dynamic one without)."""
    if launch.varlen:
        # splits, row blocks; the order of the batch unless a window; heads of a section if causal or a window
        vectors = 4 if launch.causal else 3
        queries = problem.batch + 1 if problem.seqlens_q is not None else 0
        lengths = metadata("cache_seqlens", problem.batch + queries, "input")
        written = metadata("scheduler_metadata", ceil_div(problem.batch, 4) * 4 * vectors + 1, "scratch")
        ctas = ceil_div(problem.batch, _PREPARE_SEQUENCES_PER_CTA)
        threads = 32 * min(32, ceil_div(problem.batch, 31))
        return [helper_kernel("prepare_varlen_num_blocks", lengths, written, ctas, threads, problem.dtype)]
    if (launch.causal or problem.window is not None) and launch.static_splits == 1:
        return [counter_fill("fill")]
    return []


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    substitutions: list[str],
    tiles: TileChoice | None = None,
) -> Program:
    """FA3's decode program for a checked ``problem`` on ``gpu``; ``tiles`` replaces the main kernel's own."""
    mla = mla_fa3.is_mla(problem)
    if max(problem.head_dim, problem.head_dim_v) > 256 and not mla:
        raise UnsupportedError(
            f"head_dim {problem.head_dim}: {implementation} runs head dims up to 256, or 576 with head_dim_v 512 (MLA)"
        )
    if mla and (problem.window is not None or problem.softcap):
        raise UnsupportedError("window or softcap with head dims 576/512: not modelled for MLA")
    if mla and problem.dtype == "fp8":
        raise UnsupportedError(f"fp8 with head dims 576/512: {implementation} takes fp16 or bf16 there")
    p = fa3.launched_problem(problem)
    launch = _launch(p, gpu, substitutions, tiles)
    t = launch.t
    tensors = matrices(p, t.tile_m, t.tile_n, launch.packed)
    if mla:
        del tensors["V"]  # its rows are the first 512 columns of K's
    if not launch.gather:
        # TMA copies whole tiles, as far as the cache reaches
        reach = min(paged_capacity(p, check_capacity(p)), ceil_div(p.seqlen_k, t.tile_n) * t.tile_n)
        tensors |= {name: replace(tensors[name], rows=reach) for name in "KV" if name in tensors}
    tensors = end_at_last_row(tensors, p)
    distinct, kinds = sequence_kinds(p)
    rows, pages = p.seqlen_q * launch.group, None
    if p.page_size is not None:
        pages = PagedCache.of(p, t.tile_n, launch.gather)
        tensors = pages.tensors(tensors)
    table = LoopTable.of(
        kinds,
        launch.row_blocks,
        dict(zip(kinds, launch.splits, strict=True)).__getitem__,
        t.tile_n,
        p.seqlen_k,
        lambda kind, block, split, splits: fa3_key_loop(
            row_block=block,
            tile_m=t.tile_m,
            tile_n=t.tile_n,
            seqlen_q=distinct[kind][0],
            seqlen_k=distinct[kind][1],
            causal=p.causal,
            group=launch.group,
            num_splits=splits,
            split=split,
            window=p.window,
        ),
    )
    partials, notes = None, []
    if max(launch.splits) > 1:
        shape = (p.batch, p.kv_heads, rows, max(launch.splits), p.head_dim_v, p.head_dim_v, t.tile_m)
        partials = Partials.of(*shape, tensors["O"].lengths)
    main = _main_kernel(p, launch, table, tensors, partials, pages, gpu)
    kernels = [*_before(p, launch), replace(main, early_start=launch.varlen)]
    if partials is not None:
        per_sequence, offsets = partials.stacks // p.batch, query_offsets(p, launch.group).tolist()

        def splits_to_read(stack: int, row: int) -> int:
            sequence = stack // per_sequence
            block = (row - offsets[sequence]) // t.tile_m if partials.matrices == 1 else 0
            return table.live_splits(kinds[sequence], block)

        kernels.append(
            combine_kernel(
                "flash_fwd_combine",
                fa3_combine_kernel(p.head_dim_v, max(2, launch.static_splits)),
                partials,
                tensors["O"],
                tensors["LSE"],
                np.repeat(np.array(launch.splits, np.int64), per_sequence),
                splits_to_read,
            )
        )
    elif launch.static_splits > 1:
        # every sequence is left with one split: the combine kernel's CTAs read that and leave
        blocks = ceil_div(p.seqlen_q * p.heads, fa3_combine_kernel(p.head_dim_v, 2).rows_per_cta) * p.batch
        notes.append("the prepare kernel leaves every sequence one split; the combine kernel returns at once")
        written = metadata("scheduler_metadata", blocks, "scratch")
        kernels.append(helper_kernel("flash_fwd_combine", written, None, blocks, 256, p.dtype))
    else:
        notes.append("one split: the main kernel writes O itself, without a combine kernel")
    if launch.static_splits > 1:
        kernels[-1] = replace(kernels[-1], early_start=True)
    if launch.varlen:
        notes.append("prepare, main and combine kernels overlap their launches (programmatic dependent launch)")
    capacity = paged_capacity(p, check_capacity(p))
    live = compulsory_bytes(tensors[k] for k in ("Q", "O", "LSE")) + cache_bytes(
        p, capacity, 0 if mla else p.head_dim_v
    )
    if pages is not None:
        live += pages.table.bytes
    if launch.static_splits > 1:
        live += launch.static_splits * p.heads * sum(q for q, _ in p.sequences()) * (p.head_dim_v + 1) * 4
    return Program(
        "flash_decoding",
        implementation,
        problem,
        tuple(kernels),
        {k: tensors[k] for k in "QKV" if k in tensors},
        {k: tensors[k] for k in ("O", "LSE")},
        live,
        notes=tuple(notes),
        substitutions=tuple(substitutions),
        attributes={
            "num_splits": launch.static_splits,
            "splits_per_sequence": launch.splits,
            "pack_gqa": launch.packed and launch.group > 1,
            "tile": (t.tile_m, t.tile_n),
            "stages": t.kv_stages,
            "warpgroups": t.num_mma_warpgroups,
            "kv_copies": "gather (cp.async)" if launch.gather else "TMA",
        },
    )
