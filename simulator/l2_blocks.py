"""The L2's blocks in order of use: what an access finds there, what leaves for HBM. Compiled, part of the hot loop.

No function here allocates or keeps an array, so numba counts no references to them (``_nrt=False``): counting, atomic
and at every call, took three quarters of a replay's time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiled import compiled

# what an access does
READ, WRITE, ACCUMULATE = 0, 1, 2
# columns of the cache's blocks: neighbours in order of use, mask of parts present, bytes held, bytes modified, tensor,
# band of reuse distance
_PREV, _NEXT, _PRESENT, _HELD, _DIRTY, _OWNER, _BAND = 0, 1, 2, 3, 4, 5, 6
# indices into the scalar state of the cache: ends of the list of blocks, bytes written back, then by band the bytes
# in it, its oldest block and its hits in a million; last, bytes asked of blocks of which something missed
_HEAD, _TAIL, WRITTEN_BACK = 0, 1, 2
BANDS = 13
_BYTES, _OLDEST, _HITS = 3, 3 + BANDS, 3 + 2 * BANDS
LATE = 3 + 3 * BANDS
#: The band that ends at the cache's capacity; band 0 ends at 0.4 of it, each further one 0.1 later.
LAST_INSIDE = 6
# rows of the byte counters
SM_READ, SM_WRITE, HBM_READ, HBM_WRITE = 0, 1, 2, 3


@compiled
def _popcount(x: Any) -> Any:
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled
def _remove(block: int, blocks: np.ndarray, scal: np.ndarray) -> None:
    """Take ``block`` out of the list and out of its band."""
    before, after, band = blocks[block, _PREV], blocks[block, _NEXT], blocks[block, _BAND]
    if scal[_OLDEST + band] == block:
        scal[_OLDEST + band] = before if before >= 0 and blocks[before, _BAND] == band else -1
    scal[_BYTES + band] -= blocks[block, _HELD]
    if before >= 0:
        blocks[before, _NEXT] = after
    else:
        scal[_HEAD] = after
    if after >= 0:
        blocks[after, _PREV] = before
    else:
        scal[_TAIL] = before


@compiled
def _push_front(block: int, blocks: np.ndarray, scal: np.ndarray) -> None:
    head = scal[_HEAD]
    blocks[block, _PREV] = -1
    blocks[block, _NEXT] = head
    blocks[block, _BAND] = 0
    if head >= 0:
        blocks[head, _PREV] = block
    else:
        scal[_TAIL] = block
    scal[_HEAD] = block
    if scal[_OLDEST] < 0:
        scal[_OLDEST] = block


@compiled
def _age(from_band: int, capacity: int, blocks: np.ndarray, scal: np.ndarray, counters: np.ndarray) -> None:
    """Move blocks to later bands until every band ends where it should; the last one's overflow is forgotten.

    ``from_band`` and earlier bands may have grown. Modified bytes go to HBM when their block leaves the capacity.
    """
    reach = 0
    for band in range(BANDS):
        reach += scal[_BYTES + band]
        limit = capacity * (4 + band) // 10
        moved = False
        while reach > limit:
            victim = scal[_OLDEST + band]
            if victim < 0:
                break
            moved = True
            held = blocks[victim, _HELD]
            reach -= held
            if band == LAST_INSIDE:
                counters[HBM_WRITE, blocks[victim, _OWNER]] += blocks[victim, _DIRTY]
                scal[WRITTEN_BACK] += blocks[victim, _DIRTY]
                blocks[victim, _DIRTY] = 0
            if band == BANDS - 1:
                _remove(victim, blocks, scal)
                blocks[victim, _HELD] = 0
                blocks[victim, _PRESENT] = 0
                continue
            before = blocks[victim, _PREV]
            scal[_OLDEST + band] = before if before >= 0 and blocks[before, _BAND] == band else -1
            scal[_BYTES + band] -= held
            blocks[victim, _BAND] = band + 1
            scal[_BYTES + band + 1] += held
            if scal[_OLDEST + band + 1] < 0:
                scal[_OLDEST + band + 1] = victim
        if band >= from_band and not moved:
            break


@compiled
def _spread(millionths: int) -> Any:
    """As many of a mask's 64 bits, in eighths, as ``millionths`` say: the same ones of every byte, far from each other.

    Byte ``n`` of the constant has ``n`` bits, those of byte ``n - 1`` among them.
    """
    eighths = np.uint64((millionths * 8 + 500_000) // 1_000_000)
    if eighths >= np.uint64(8):
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    byte = (np.uint64(0x7F77575551110100) >> (eighths * np.uint64(8))) & np.uint64(0xFF)
    return byte * np.uint64(0x0101010101010101)


@compiled
def touch(
    block: int,
    mask: int,
    size: int,
    is_write: int,
    limit: int,
    owner: int,
    capacity: int,
    blocks: np.ndarray,
    scal: np.ndarray,
    counters: np.ndarray,
) -> tuple[int, int]:
    """Access ``size`` bytes (the 64-part ``mask``) of ``block``; returns the bytes that miss (reads only).

    A range that no part stands for has an empty ``mask``: it counts as missing until all of the block is there.
    A block that holds bytes is in the list of blocks by use, which reaches beyond the capacity: how far back a block
    was used decides what share of it is still there, of what is asked for now and of the rest (which would otherwise
    come back to the front unfetched).
    """
    none = np.uint64(0)
    have = np.uint64(blocks[block, _PRESENT])
    new_bytes = size
    held = blocks[block, _HELD]
    if mask == none:
        if held >= limit:
            new_bytes = 0
    elif have != none:
        overlap = mask & have
        if overlap == mask:
            new_bytes = 0
        elif overlap != none:
            new_bytes = size - size * _popcount(overlap) // _popcount(mask)
    band = 0
    lost = 0
    gone = 0
    if held > 0:
        band = blocks[block, _BAND]
        hits = scal[_HITS + band]
        if hits < 1_000_000:
            again = size - new_bytes
            lost = again - again * hits // 1_000_000
            if held > again:
                # the same share of what is not asked for now is gone as well
                rest = have & ~mask
                kept = rest & _spread(hits)
                if rest != none:
                    gone = (held - again) - (held - again) * _popcount(kept) // _popcount(rest)
                elif 2 * hits < 1_000_000:
                    gone = held - again
                have = kept | (have & mask)
    new_bytes = min(new_bytes, limit - held + gone)
    # a block larger than the whole cache may be first in the list and beyond its capacity at once: it passes the
    # capacity again, so that what was modified is written back
    if held > 0 and scal[_HEAD] == block and band <= LAST_INSIDE and gone == 0:
        scal[_BYTES + band] += new_bytes
    else:
        if held > 0:
            _remove(block, blocks, scal)
        else:
            blocks[block, _OWNER] = owner
        if gone > 0:
            held -= gone
            written = max(0, blocks[block, _DIRTY] - held)
            blocks[block, _DIRTY] -= written
            counters[HBM_WRITE, owner] += written
            scal[WRITTEN_BACK] += written
        _push_front(block, blocks, scal)
        scal[_BYTES] += held + new_bytes
    blocks[block, _HELD] = held + new_bytes
    blocks[block, _PRESENT] = np.int64(have | mask)
    if is_write:
        blocks[block, _DIRTY] = min(blocks[block, _DIRTY] + size, held + new_bytes)
    _age(band if new_bytes == 0 else BANDS, capacity, blocks, scal, counters)
    return new_bytes + lost


@compiled
def _range_mask(low: int, high: int, extent: int) -> Any:
    """Bits of a 64-part mask that begin in ``low .. high`` of ``extent`` elements: disjoint ranges share no bit, and
    ranges that cover a block cover its mask. A range within one part may get none."""
    if low == 0 and high == extent:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    first = (low * 64 + extent - 1) // extent
    n = (high * 64 + extent - 1) // extent - first
    if n >= 64:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    return ((np.uint64(1) << np.uint64(n)) - np.uint64(1)) << np.uint64(first)


@compiled
def access_tile(
    tensor: int,
    head: int,
    row: int,
    rows: int,
    col: int,
    cols: int,
    kind: int,
    shape: np.ndarray,
    capacity: int,
    cache: tuple[np.ndarray, np.ndarray],
    counters: np.ndarray,
) -> tuple[int, int]:
    """Touch every block under a clipped rectangle: read it, write it, or (accumulate) fetch what is not there and
    write it. Returns (bytes, bytes that must come from HBM)."""
    blocks, scal = cache
    n_heads, n_rows, n_cols, br, bc, per_row, per_head, base, esize = shape[tensor]
    if head < 0 or head >= n_heads:
        return 0, 0
    r0, r1 = max(row, 0), min(row + rows, n_rows)
    c0, c1 = max(col, 0), min(col + cols, n_cols)
    if r1 <= r0 or c1 <= c0:
        return 0, 0
    total, missed = 0, 0
    first_row, first_col = r0 // br, c0 // bc if c0 > 0 else 0
    for i in range(first_row, n_rows):
        if i * br >= r1:
            break
        rl, rh = max(r0, i * br), min(r1, (i + 1) * br)
        block_rows = min(br, n_rows - i * br)
        for j in range(first_col, n_cols):
            if j * bc >= c1:
                break
            cl, ch = max(c0, j * bc), min(c1, (j + 1) * bc)
            block_cols = min(bc, n_cols - j * bc)
            if ch - cl == block_cols:
                mask = _range_mask(rl - i * br, rh - i * br, block_rows)
            elif rh - rl == block_rows:
                mask = _range_mask(cl - j * bc, ch - j * bc, block_cols)
            else:
                # a corner: parts are rows or columns, not both
                mask = np.uint64(0)
            size = (rh - rl) * (ch - cl) * esize
            block = base + head * per_head + i * per_row + j
            limit = block_rows * block_cols * esize
            miss = touch(block, mask, size, kind != READ, limit, tensor, capacity, blocks, scal, counters)
            total += size
            if kind != WRITE and miss > 0:
                missed += miss
                scal[LATE] += size
    counters[SM_READ if kind == READ else SM_WRITE, tensor] += total
    counters[HBM_READ, tensor] += missed
    return total, missed
