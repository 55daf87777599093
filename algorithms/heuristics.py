"""The decisions that real launchers take before a kernel starts: how many KV splits, packed GQA, which scheduler.

Own code after the public sources named beside each function (flash-attention snapshot 0251105a, PyTorch main 2026).
Constants that the sources hard-code (50 MB of L2, 32 MB sections, a factor 0.85) stay constants here: an imagined GPU
changes the number of SMs that a launcher sees, not what it assumes about L2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from algorithms.kernels_fa1 import fa1_num_splits as fa1_num_splits
from simulator.errors import InputError

_FA3_L2_BYTES_FOR_SPLITS = 50 * 1024 * 1024
_FA3_L2_BYTES_FOR_SECTIONS = 32 * 1024 * 1024
_FA3_L2_BYTES_FOR_VARLEN_SECTIONS = 8 * 1024 * 1024


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b, for b > 0."""
    return -(-a // b)


def _enough_work(blocks: int, slots: int) -> bool:
    """``blocks >= 0.8f * slots`` as C evaluates it: 0.8 is a float32, and so is the product."""
    return float(blocks) >= float(np.float32(0.8) * np.float32(slots))


def _wave_efficiency(blocks: int, slots: int) -> float:
    """Full waves over waves begun, in float32 as the launchers compute it."""
    waves = np.float32(blocks) / np.float32(slots)
    return float(waves / np.float32(math.ceil(waves)))


# ---------------------------------------------------------------------------------------------- split-KV


def fa2_num_splits(*, work_tiles: int, slots: int, key_blocks: int, max_splits: int = 128) -> int:
    """FA2's ``num_splits_heuristic``: the fewest splits within 85 % of the best wave efficiency.

    ``work_tiles`` = batch x heads x 64-row query blocks; ``slots`` = 2 x SMs; ``key_blocks`` of the split kernel.
    A split count that leaves the blocks a split unchanged is not eligible.
    Source: csrc/flash_attn/flash_api.cpp, identical in PyTorch's vendored flash_api.cpp.
    """
    if _enough_work(work_tiles, slots):
        return 1
    efficiency = {}
    for splits in range(1, min(max_splits, slots, key_blocks) + 1):
        if splits == 1 or ceil_div(key_blocks, splits) != ceil_div(key_blocks, splits - 1):
            efficiency[splits] = _wave_efficiency(work_tiles * splits, slots)
    best = max(efficiency.values(), default=0.0)
    return next((splits for splits, value in efficiency.items() if value >= 0.85 * best), 1)


def fa3_num_splits(
    *,
    total_row_blocks: int,
    num_sms: int,
    key_blocks: int,
    row_blocks: int,
    kv_head_bytes: int,
    causal_or_local: bool,
    max_splits: int = 128,
) -> int:
    """FA3's ``num_splits_heuristic`` (hopper/heuristics.h).

    ``total_row_blocks`` = batch x KV heads x ``row_blocks`` (batch counts as 1 when lengths vary);
    ``row_blocks`` = ceil(seqlen_q x group / tile_m); ``kv_head_bytes`` = seqlen_k x (d + dv) x element bytes.
    With the SMs nearly full it still splits a KV head beyond 50 MiB when queries pass over it at least twice.
    Only callers that ask get it: ``flash_attn_with_kvcache`` does (num_splits 0), ``flash_attn_func`` passes 1.
    """
    if _enough_work(total_row_blocks, num_sms):
        if kv_head_bytes > _FA3_L2_BYTES_FOR_SPLITS and row_blocks >= 2 * num_sms and not causal_or_local:
            return min(ceil_div(kv_head_bytes, _FA3_L2_BYTES_FOR_SPLITS), max_splits)
        return 1
    if key_blocks <= 4:
        return 1
    efficiency = [
        _wave_efficiency(total_row_blocks * splits, num_sms)
        for splits in range(1, min(max_splits, num_sms, key_blocks) + 1)
    ]
    best = max(efficiency)
    return next((i for i, value in enumerate(efficiency, start=1) if value >= 0.85 * best), 1)


@dataclass(frozen=True)
class Fa2Launch:
    """How FA2 runs one forward problem: which kernel, how many splits, and the problem it sees.

    ``seqlen_q``/``heads`` are what the kernel sees (GQA groups moved into rows when ``group_in_rows``).
    """

    splitkv_kernel: bool
    num_splits: int
    group_in_rows: bool
    seqlen_q: int
    heads: int
    causal: bool


def fa2_launch(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    kv_capacity: int,
    head_dim: int,
    num_sms: int,
    causal: bool = False,
    window: bool = False,
    dropout: bool = False,
    num_splits: int = 0,
    force_split_kernel: bool = False,
    tile: tuple[int, int] | None = None,
) -> Fa2Launch:
    """FA2's dense forward dispatch, the same for PyTorch's SDPA (which always passes ``num_splits`` 0).

    The heuristic runs for *every* dense forward without dropout, not only for one query token: a small grid of long
    sequences is split too. ``kv_capacity`` is the cache's allocated length. With a single split the ordinary kernel
    runs (128-row tile at most head dims) unless the cache is paged or appended to (``force_split_kernel``). ``tile``
    (rows, keys): of a split-KV kernel other than the shipped one.
    Source: flash_api.cpp mha_fwd, set_params_splitkv, mha_fwd_kvcache; PyTorch flash_attn/flash_api.cpp.
    """
    if seqlen_q == 1:
        causal = False
    swapped = seqlen_q == 1 and heads > kv_heads and not window and not dropout and head_dim % 8 == 0
    seen_q, seen_heads = (heads // kv_heads, kv_heads) if swapped else (seqlen_q, heads)
    tile_m, tile_n = tile or (64, 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64)
    if dropout:
        splits = 1
    elif num_splits >= 1:
        splits = num_splits
    else:
        splits = fa2_num_splits(
            work_tiles=batch * seen_heads * ceil_div(seen_q, tile_m),
            slots=2 * num_sms,
            key_blocks=ceil_div(kv_capacity, tile_n),
        )
    if splits > 128:
        raise InputError(f"num_splits {splits}: FlashAttention-2 takes at most 128")
    return Fa2Launch(splits > 1 or force_split_kernel, splits, swapped, seen_q, seen_heads, causal)


def fa3_pack_gqa(*, seqlen_q: int, group: int, tile_m: int, varlen_q: bool = False) -> bool:
    """Whether FA3 packs the query heads of a KV head into rows (``should_pack_gqa``): unpacked rows fill less than
    0.9 of what packed rows fill. Splits, gathered pages and sm8x pack regardless; a group of 1 never does."""
    if varlen_q:
        return True

    def efficiency(rows: int) -> np.float32:
        return np.float32(rows) / np.float32(ceil_div(rows, tile_m) * tile_m)

    return float(efficiency(seqlen_q)) < 0.9 * float(efficiency(seqlen_q * group))


def fa3_paged_by_tma(*, page_size: int, seqlen_q: int, group: int, tile_m: int, tile_n: int) -> bool:
    """Whether paged KV goes through TMA: pages of whole key blocks, and more packed query rows than one tile holds
    (no appended KV, no left padding). So decode always gathers. Source: hopper/flash_api.cpp get_pagedkv_tma."""
    return page_size % tile_n == 0 and seqlen_q * group > tile_m


def fa3_dynamic_splits(
    *, row_blocks_and_key_blocks: list[tuple[int, int]], heads: int, num_sms: int, static: int
) -> list[int]:
    """Splits of each sequence, as FA3's prepare kernel sets them on the device when lengths vary.

    ``row_blocks_and_key_blocks``: per sequence, (row blocks, key blocks of its real length); ``heads``: KV heads when
    packed; ``static``: the launcher's count, an upper bound. Returns a list of ints.
    Source: hopper/flash_prepare_scheduler.cu.
    """
    if len(row_blocks_and_key_blocks) > 992 or static == 1:
        return [1] * len(row_blocks_and_key_blocks)
    total = sum(rows * keys for rows, keys in row_blocks_and_key_blocks)
    wanted = np.float32(total) * np.float32(1.1) * np.float32(heads) / np.float32(num_sms)
    blocks_per_sm = math.ceil(wanted)
    if blocks_per_sm == 0:
        return [1] * len(row_blocks_and_key_blocks)
    return [max(1, min(ceil_div(keys, blocks_per_sm), static)) for _, keys in row_blocks_and_key_blocks]


def blocks_of_split(key_blocks: int, num_splits: int, split: int) -> range:
    """The key blocks that one split walks: equal shares rounded up, so the last ones may be short or empty."""
    share = ceil_div(key_blocks, num_splits)
    return range(min(split * share, key_blocks), min((split + 1) * share, key_blocks))


# ---------------------------------------------------------------------------------------------- FA3 schedulers


@dataclass(frozen=True)
class Fa3Schedule:
    """Which tile scheduler FA3 instantiates, what it launches, and the helper kernels around it.

    ``kind``: "static_persistent" | "dynamic_persistent" | "single_tile" | "varlen_dynamic_persistent".
    ``helper_kernels`` in launch order around "main".
    """

    kind: str
    persistent: bool
    helper_kernels: tuple[str, ...]
    source: str = "flash-attention:hopper/flash_fwd_launch_template.h, flash_api.cpp"


def fa3_schedule(*, causal: bool, local: bool, split: bool, varlen: bool) -> Fa3Schedule:
    """FA3's choice on sm90. The dynamic scheduler's counter is zeroed by a fill kernel; with varying lengths a
    prepare kernel zeroes it and sets the splits; a split launch is followed by the combine kernel."""
    combine = ("combine",) if split else ()
    if varlen:
        return Fa3Schedule("varlen_dynamic_persistent", True, ("prepare", "main", *combine))
    if split:
        return Fa3Schedule("single_tile", False, ("main", *combine))
    if causal or local:
        return Fa3Schedule("dynamic_persistent", True, ("fill", "main"))
    return Fa3Schedule("static_persistent", True, ("main",))


def fa3_section_heads(
    *, seqlen_k: int, head_dim: int, head_dim_v: int, element_bytes: int, group: int, pack_gqa: bool
) -> int:
    """Heads (query heads unless packed) of one L2 section of the dynamic persistent scheduler.

    32 MiB over the bytes of one KV head, floored to a power of two, at least 1; times the group unless packed.
    """
    kv_head_bytes = seqlen_k * (head_dim + head_dim_v) * element_bytes
    fitting = _FA3_L2_BYTES_FOR_SECTIONS // kv_head_bytes
    kv_heads = 1 if fitting < 1 else 1 << (fitting.bit_length() - 1)
    return kv_heads * (1 if pack_gqa else group)


def fa3_varlen_section_heads(
    *,
    key_blocks: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int,
    element_bytes: int,
    group: int,
    pack_gqa: bool,
    heads: int,
) -> int:
    """Heads of one section of the varlen scheduler (causal or local only): as many of 16, 8, 4, 2, 1 KV heads as fit
    in 8 MiB. ``heads``: KV heads when packed. Source: flash_prepare_scheduler.cu."""
    fitting_blocks = _FA3_L2_BYTES_FOR_VARLEN_SECTIONS // (tile_n * (head_dim + head_dim_v) * element_bytes)
    kv_heads = next((n for n in (16, 8, 4, 2) if key_blocks * n <= fitting_blocks), 1)
    return min(kv_heads * (1 if pack_gqa else group), heads)


def fa3_tile_order(
    *, kind: str, row_blocks: int, heads: int, batch: int, num_splits: int = 1, section_heads: int = 1
) -> Iterator[tuple[int, int, int, int]]:
    """Work tiles in the order FA3 hands them out: (row block, head, batch, split).

    ``heads``: KV heads when packed. "static_persistent": row blocks ascending, then heads, then batch; CTA i takes
    i, i + grid, ... "dynamic_persistent": sections of ``section_heads`` (batch-major) heads; inside one, heads vary
    fastest and row blocks descend (the longest first); an idle CTA takes the next. "single_tile": one CTA a tile,
    row block fastest, then split, head, batch. "varlen_dynamic_persistent" with equal lengths: batch slowest, then
    head, then split, row blocks ascending (causal: sections, descending, like the dynamic one but inside a batch).
    """
    if kind == "dynamic_persistent":
        for start in range(0, heads * batch, section_heads):
            section = range(start, min(start + section_heads, heads * batch))
            for block in reversed(range(row_blocks)):
                for index in section:
                    yield block, index % heads, index // heads, 0
        return
    if kind not in ("static_persistent", "single_tile", "varlen_dynamic_persistent"):
        raise InputError(f"scheduler {kind!r} is unknown")
    for b in range(batch):
        for head in range(heads):
            for split in range(num_splits):
                for block in range(row_blocks):
                    yield block, head, b, split


# ---------------------------------------------------------------------------------------------- loop lengths


@dataclass(frozen=True)
class KeyLoop:
    """The key blocks that one query block walks, from the last to the first, and how many of them apply a mask.

    ``blocks`` = ``range(first, last)``; the walk is ``reversed(blocks)``; the first ``masked`` of the walk test
    every score against the mask (their FP32 work is larger), the rest none but the last ``left``, at the left edge of
    a window.
    """

    first: int
    last: int
    masked: int
    left: int = 0

    @property
    def count(self) -> int:
        return self.last - self.first


def fa2_key_loop(
    *,
    row_block: int,
    tile_m: int,
    tile_n: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    even_head_dim: bool = True,
    even_lengths: bool = True,
    head_dim: int = 128,
    num_splits: int = 1,
    split: int = 0,
    kv_capacity: int = 0,
    window: tuple[int, int] | None = None,
) -> KeyLoop:
    """FA2 forward's loop (bottom-right causal). Masked, ahead of the loop: 1 without a mask; causal ceil(M/N), one more
    with a ``window`` (left, right), whose other blocks are masked too, or when a length is no multiple of its tile (or
    not known to be: not ``even_lengths``) or the head dim is padded or beyond 128. An empty loop writes zeros and leaves.

    Splits share out the blocks of ``kv_capacity`` (0: seqlen_k) before the mask and the used length cut them, so
    late splits of a half-filled cache are empty.
    Source: flash_fwd_kernel.h compute_attn_1rowblock and its splitkv twin; flash_fwd_launch_template.h is_even_MN.
    """
    first, last = 0, ceil_div(seqlen_k, tile_n)
    if num_splits > 1:
        share = ceil_div(ceil_div(max(kv_capacity, seqlen_k), tile_n), num_splits)
        first, last = split * share, min(last, (split + 1) * share)
    steps = 1
    if causal:
        last = min(last, ceil_div((row_block + 1) * tile_m + seqlen_k - seqlen_q, tile_n))
        even = even_lengths and seqlen_q % tile_m == 0 and seqlen_k % tile_n == 0 and even_head_dim and head_dim <= 128
        steps = ceil_div(tile_m, tile_n) + (0 if even else 1)
    if window is not None:
        left, right = (side if side >= 0 else max(seqlen_q, seqlen_k) for side in window)
        diagonal = row_block * tile_m + seqlen_k - seqlen_q
        first = max(first, (diagonal - left) // tile_n)
        last = min(last, ceil_div(diagonal + tile_m + right, tile_n))
        steps = ceil_div(tile_m, tile_n) + 1
    last = max(first, last)
    return KeyLoop(first, last, min(steps, last - first))


def fa3_key_loop(
    *,
    row_block: int,
    tile_m: int,
    tile_n: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    group: int = 1,
    num_splits: int = 1,
    split: int = 0,
    window: tuple[int, int] | None = None,
) -> KeyLoop:
    """FA3 forward's loop (bottom-right causal). ``group`` > 1: packed rows, ``group`` to one query position.

    Always masked: the walk's first block; causal or with a ``window`` (left, right) also every block that reaches past
    the right bound of the tile's first row, and with a window those before the left bound of its last row.
    With splits the shortened range is cut into equal shares. Source: hopper/block.h, mainloop mma().
    """
    left, right = (-1, 0) if causal else window if window is not None else (-1, -1)
    row_min, row_max = row_block * tile_m // group, ((row_block + 1) * tile_m - 1) // group + 1
    first, last, shift = 0, ceil_div(seqlen_k, tile_n), seqlen_k - seqlen_q
    right_stop, left_stop = last, 0
    if causal or window is not None:
        right = right if right >= 0 else seqlen_q - 1
        last = max(0, min(last, ceil_div(row_max + shift + right, tile_n)))
        right_stop = max(0, (row_min + shift + right) // tile_n)
    if window is not None:
        left = left if left >= 0 else seqlen_k - 1
        first = max(0, (row_min + shift - left) // tile_n)
        left_stop = max(0, ceil_div(row_max + shift - left, tile_n))
    last = max(first, last)
    share = ceil_div(last - first, num_splits)
    first, stop = min(first + split * share, last), last
    last = min(first + share, stop)
    if last == first:
        return KeyLoop(first, last, 0)
    masked = max(1, last - max(first, right_stop))
    return KeyLoop(first, last, masked, max(0, min(left_stop, last - masked) - first))
