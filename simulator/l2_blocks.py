"""The L2's blocks in order of use: what an access finds there, what leaves for HBM. Compiled, part of the hot loop.

No function here allocates or keeps an array, so numba counts no references to them (``_nrt=False``): counting, atomic
and at every call, took three quarters of a replay's time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiled import compiled, inlined

#: Blocks, scalar state, order of use.
Cache = tuple[np.ndarray, np.ndarray, np.ndarray]
# what an access does
READ, WRITE, ACCUMULATE = 0, 1, 2
# columns of the cache's blocks: mask of parts present, bytes held, bytes modified, tensor, place in the order of use
PRESENT, HELD, DIRTY, OWNER, STAMP = 0, 1, 2, 3, 4
#: A row is a cache line of the machine that simulates.
BLOCK_COLUMNS = 8
# The order of use is a list in which a block is entered anew with every use (its former entry becomes -1) and which is
# closed up when it is full. Blocks do not know their band of reuse distance: it follows from where bands end.
# indices into the scalar state of the cache: entries in the list, of its oldest used, bytes written back, bytes asked
# of blocks of which something missed, then by band the bytes in it, its first entry, where it ends (bytes of reuse
# distance) and its hits in a million; last, by how much the bands have grown since they ended where they should, and
# how much they may
_NOW, WRITTEN_BACK, LATE = 0, 1, 2
BANDS = 13
_BYTES, FIRST, LIMITS, HITS = 3, 3 + BANDS, 3 + 2 * BANDS, 3 + 3 * BANDS
GROWN, QUANTUM = 3 + 4 * BANDS, 4 + 4 * BANDS
STATE_SIZE = 5 + 4 * BANDS
#: The band that ends at the cache's capacity; band 0 ends at 0.4 of it, each further one 0.1 later.
LAST_INSIDE = 6
# rows of the byte counters
SM_READ, SM_WRITE, HBM_READ, HBM_WRITE = 0, 1, 2, 3


@inlined
def _popcount(x: Any) -> Any:
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inlined
def _quotient(a: Any, b: Any) -> Any:
    """``a // b`` of numbers that are not negative: Python's rule for the others costs as much as the division."""
    return np.int64(np.uint64(a) // np.uint64(b))


@inlined
def _close_up(blocks: np.ndarray, scal: np.ndarray, order: np.ndarray) -> None:
    """Drop the empty entries of the list."""
    end = 0
    for k in range(BANDS):
        band = BANDS - 1 - k
        newer = scal[_NOW] if band == 0 else scal[FIRST + band - 1]
        first = scal[FIRST + band]
        scal[FIRST + band] = end
        for at in range(first, newer):
            block = order[at]
            if block >= 0:
                order[end] = block
                blocks[block, STAMP] = end
                end += 1
    scal[_NOW] = end


@inlined
def _age(blocks: np.ndarray, scal: np.ndarray, order: np.ndarray, counters: np.ndarray) -> None:
    """Move the bands' ends until every band ends where it should; the last one's overflow is forgotten.

    Modified bytes go to HBM when their block leaves the capacity.
    """
    reach, newer = 0, scal[_NOW]
    for band in range(BANDS):
        reach += scal[_BYTES + band]
        limit, at = scal[LIMITS + band], scal[FIRST + band]
        moved = 0
        while reach > limit and at < newer:
            victim = order[at]
            at += 1
            if victim < 0:
                continue
            held = blocks[victim, HELD]
            reach -= held
            moved += held
            if band == LAST_INSIDE:
                counters[HBM_WRITE, blocks[victim, OWNER]] += blocks[victim, DIRTY]
                scal[WRITTEN_BACK] += blocks[victim, DIRTY]
                blocks[victim, DIRTY] = 0
            elif band == BANDS - 1:
                order[at - 1] = -1
                blocks[victim, HELD] = 0
                blocks[victim, PRESENT] = 0
        if moved > 0:
            scal[FIRST + band] = at
            scal[_BYTES + band] -= moved
            if band < BANDS - 1:
                scal[_BYTES + band + 1] += moved
        newer = at


@inlined
def _spread(millionths: int) -> Any:
    """As many of a mask's 64 bits, in eighths, as ``millionths`` say: the same ones of every byte, far from each other.

    Byte ``n`` of the constant has ``n`` bits, those of byte ``n - 1`` among them.
    """
    eighths = np.uint64((millionths * 8 + 500_000) // 1_000_000)
    if eighths >= np.uint64(8):
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    byte = (np.uint64(0x7F77575551110100) >> (eighths * np.uint64(8))) & np.uint64(0xFF)
    return byte * np.uint64(0x0101010101010101)


@inlined
def touch(
    block: int,
    mask: int,
    size: int,
    is_write: int,
    limit: int,
    owner: int,
    cache: Cache,
    counters: np.ndarray,
) -> int:
    """Access ``size`` bytes (the 64-part ``mask``) of ``block``; returns the bytes that miss (reads only).

    A range that no part stands for has an empty ``mask``: it counts as missing until all of the block is there.
    A block that holds bytes is in the list of blocks by use, which reaches beyond the capacity: how far back a block
    was used decides what share of it is still there, of what is asked for now and of the rest (which would otherwise
    come back to the front unfetched).
    """
    blocks, scal, order = cache
    none = np.uint64(0)
    have = np.uint64(blocks[block, PRESENT])
    new_bytes = size
    held = blocks[block, HELD]
    if mask == none:
        if held >= limit:
            new_bytes = 0
    elif have != none:
        overlap = mask & have
        if overlap == mask:
            new_bytes = 0
        elif overlap != none:
            new_bytes = size - _quotient(size * _popcount(overlap), _popcount(mask))
    band = 0
    lost = 0
    gone = 0
    stamp = -1
    if held > 0:
        stamp = blocks[block, STAMP]
        while stamp < scal[FIRST + band]:
            band += 1
        hits = scal[HITS + band]
        if hits < 1_000_000:
            again = size - new_bytes
            lost = again - _quotient(again * hits, 1_000_000)
            if held > again:
                # the same share of what is not asked for now is gone as well
                rest = have & ~mask
                kept = rest & _spread(hits)
                if rest != none:
                    gone = (held - again) - _quotient((held - again) * _popcount(kept), _popcount(rest))
                elif 2 * hits < 1_000_000:
                    gone = held - again
                have = kept | (have & mask)
    new_bytes = min(new_bytes, limit - held + gone)
    # a block larger than the whole cache may be first in the list and beyond its capacity at once: it passes the
    # capacity again, so that what was modified is written back
    if held > 0 and stamp == scal[_NOW] - 1 and band <= LAST_INSIDE and gone == 0:
        scal[_BYTES + band] += new_bytes
    else:
        if held > 0:
            order[stamp] = -1
            scal[_BYTES + band] -= held
        else:
            blocks[block, OWNER] = owner
        if gone > 0:
            held -= gone
            written = max(0, blocks[block, DIRTY] - held)
            blocks[block, DIRTY] -= written
            counters[HBM_WRITE, owner] += written
            scal[WRITTEN_BACK] += written
        if scal[_NOW] == order.shape[0]:
            _close_up(blocks, scal, order)
        order[scal[_NOW]] = block
        blocks[block, STAMP] = scal[_NOW]
        scal[_NOW] += 1
        scal[_BYTES] += held + new_bytes
    blocks[block, HELD] = held + new_bytes
    blocks[block, PRESENT] = np.int64(have | mask)
    if is_write:
        blocks[block, DIRTY] = min(blocks[block, DIRTY] + size, held + new_bytes)
    if new_bytes > 0:
        scal[GROWN] += new_bytes
    if band > 0:
        scal[GROWN] += held
    if scal[GROWN] > scal[QUANTUM]:
        scal[GROWN] = 0
        _age(blocks, scal, order, counters)
    missing: int = new_bytes + lost
    return missing


@inlined
def _range_mask(low: int, high: int, extent: int) -> Any:
    """Bits of a 64-part mask that begin in ``low .. high`` of ``extent`` elements: disjoint ranges share no bit, and
    ranges that cover a block cover its mask. A range within one part may get none."""
    if low == 0 and high == extent:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    first = _quotient(low * 64 + extent - 1, extent)
    n = _quotient(high * 64 + extent - 1, extent) - first
    if n >= 64:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    return ((np.uint64(1) << np.uint64(n)) - np.uint64(1)) << np.uint64(first)


@inlined
def visit_tile(
    tensor: int,
    head: int,
    row: int,
    rows: int,
    col: int,
    cols: int,
    kind: int,
    shape: np.ndarray,
    cache: Cache,
    counters: np.ndarray,
) -> tuple[int, int]:
    """Touch every block under a clipped rectangle: read it, write it, or (accumulate) fetch what is not there and
    write it. Returns (bytes, bytes that must come from HBM)."""
    n_heads, n_rows, n_cols, br, bc, per_row, per_head, base, esize = shape[tensor]
    if head < 0 or head >= n_heads:
        return 0, 0
    r0, r1 = max(row, 0), min(row + rows, n_rows)
    c0, c1 = max(col, 0), min(col + cols, n_cols)
    if r1 <= r0 or c1 <= c0:
        return 0, 0
    total, missed = 0, 0
    first_row, first_col = _quotient(r0, br), _quotient(c0, bc) if c0 > 0 else 0
    for i in range(first_row, _quotient(r1 - 1, br) + 1):
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
            miss = touch(block, mask, size, kind != READ, limit, tensor, cache, counters)
            total += size
            if kind != WRITE and miss > 0:
                missed += miss
                cache[1][LATE] += size
    counters[SM_READ if kind == READ else SM_WRITE, tensor] += total
    counters[HBM_READ, tensor] += missed
    return total, missed


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
    cache: Cache,
    counters: np.ndarray,
) -> tuple[int, int]:
    """:func:`visit_tile` for callers in Python."""
    found: tuple[int, int] = visit_tile(tensor, head, row, rows, col, cols, kind, shape, cache, counters)
    return found
