"""The L2's blocks in order of use: what an access finds there, what leaves for HBM. Compiled, part of the hot loop.

The list is that of the first partition, which stands for all of them (:mod:`simulator.memory` says why). There a block
takes the share that the partition is the home of and, once its SMs have read it, as many bytes as the whole block: the
others' shares are copied. Home and copies age apart, since what SMs of another partition ask for renews the home alone,
and that only while they have no copies of their own.

No function here allocates or keeps an array, so numba counts no references to them (``_nrt=False``): counting, atomic
and at every call, took three quarters of a replay's time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiled import compiled, inlined

#: Blocks, scalar state, order of use, tensor of each block, scratch for closing the order up.
Cache = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
# what an access does
READ, WRITE, ACCUMULATE = 0, 1, 2
# columns of the cache's blocks: mask of parts present, bytes held, bytes modified; one more than the places in the
# order of use of what the partition is the home of and, where they were used less lately, of its copies (0: none);
# millionths that were lost and fetched again since; for every other partition one more than where the order ended when
# it last read the block
PRESENT, HELD, DIRTY, HOME, COPIES, RENEWED, READ_BY = 0, 1, 2, 3, 4, 5, 6
# The order of use is a list in which a block is entered anew with every use (its former entry becomes -1) and which is
# closed up when it is full. Blocks do not know their band of reuse distance: it follows from where bands end. An entry
# is the bytes that it takes, in its high bits, the block, whether some of it may be modified and whether it is copies.
_LOW, _HALF = 0xFFFFFFFF, 32
_BLOCK, _MODIFIED, _COPY = 2, 2, 1
# indices into the scalar state of the cache: entries in the list, of its oldest used, bytes written back, bytes asked
# of blocks of which something missed, then by band the bytes in it, its first entry, where it ends (bytes of reuse
# distance) and its hits in a million; last, by how much the bands have grown since they ended where they should, how
# much they may, and the partitions
_NOW, WRITTEN_BACK, LATE = 0, 1, 2
BANDS = 13
_BYTES, FIRST, LIMITS, HITS = 3, 3 + BANDS, 3 + 2 * BANDS, 3 + 3 * BANDS
GROWN, QUANTUM, PARTITIONS = 3 + 4 * BANDS, 4 + 4 * BANDS, 5 + 4 * BANDS
STATE_SIZE = 6 + 4 * BANDS
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
def _close_up(cache: Cache) -> None:
    """Drop the empty entries of the list."""
    blocks, scal, order, _, scratch = cache
    end, oldest = 0, scal[FIRST + BANDS - 1]
    for k in range(BANDS):
        band = BANDS - 1 - k
        newer = scal[_NOW] if band == 0 else scal[FIRST + band - 1]
        first = scal[FIRST + band]
        scal[FIRST + band] = end
        for at in range(first, newer):
            scratch[at] = end
            entry = order[at]
            if entry >= 0:
                order[end] = entry
                end += 1
                blocks[(entry & _LOW) >> _BLOCK, COPIES if entry & _COPY else HOME] = end
    others = scal[PARTITIONS] - 1
    if others > 0:
        # what was before the oldest entry stays there
        now = scal[_NOW]
        for block in range(blocks.shape[0]):
            for other in range(others):
                at = blocks[block, READ_BY + other]
                if at > 0:
                    at -= 1
                    blocks[block, READ_BY + other] = 1 + end if at >= now else 1 + scratch[at] if at >= oldest else 0
    scal[_NOW] = end


@inlined
def _age(cache: Cache, counters: np.ndarray) -> None:
    """Move the bands' ends until every band ends where it should; the last one's overflow is forgotten.

    Modified bytes go to HBM when their block leaves the capacity.
    """
    blocks, scal, order, owners, _ = cache
    reach, newer = 0, scal[_NOW]
    for band in range(BANDS):
        reach += scal[_BYTES + band]
        limit, at = scal[LIMITS + band], scal[FIRST + band]
        moved = 0
        special = band == LAST_INSIDE or band == BANDS - 1
        while reach > limit and at < newer:
            entry = order[at]
            at += 1
            if entry < 0:
                continue
            reach -= entry >> _HALF
            moved += entry >> _HALF
            if special:
                victim = (entry & _LOW) >> _BLOCK
                if band == LAST_INSIDE:
                    if entry & _MODIFIED:
                        counters[HBM_WRITE, owners[victim]] += blocks[victim, DIRTY]
                        scal[WRITTEN_BACK] += blocks[victim, DIRTY]
                        blocks[victim, DIRTY] = 0
                else:
                    order[at - 1] = -1
                    if entry & _COPY:
                        blocks[victim, COPIES] = 0
                    else:
                        blocks[victim, HOME] = 0
                        blocks[victim, HELD] = 0
                        blocks[victim, PRESENT] = 0
        if moved > 0:
            scal[FIRST + band] = at
            scal[_BYTES + band] -= moved
            if band < BANDS - 1:
                scal[_BYTES + band + 1] += moved
        newer = at


@inlined
def _band(stamp: int, scal: np.ndarray) -> int:
    """Band of reuse distance of what was used when the list ended at ``stamp``."""
    band = 0
    while stamp < scal[FIRST + band]:
        band += 1
    return band


@inlined
def _has_copies(block: int, reader: int, cache: Cache) -> bool:
    """Whether the partition ``reader`` still has (more than half of) the copies of ``block`` that it once made."""
    blocks, scal, order, _, _ = cache
    if reader > 0:
        stamp = blocks[block, READ_BY + reader - 1]
    else:
        stamp = blocks[block, COPIES]
        if stamp == 0:
            stamp = blocks[block, HOME]
            if order[stamp - 1] >> _HALF < blocks[block, HELD]:
                return False
    there: bool = stamp > 0 and 2 * scal[HITS + _band(stamp - 1, scal)] > 1_000_000
    return there


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
    reader: int,
    limit: int,
    owner: int,
    cache: Cache,
    counters: np.ndarray,
) -> int:
    """Access ``size`` bytes (the 64-part ``mask``) of ``block`` from an SM of the partition ``reader``.

    Returns the bytes that miss (reads only).

    A range that no part stands for has an empty ``mask``: it counts as missing until all of the block is there.
    A block that holds bytes is in the list of blocks by use, which reaches beyond the capacity: how far back a block
    was used decides what share of it is still there, of what is asked for now and of the rest (which would otherwise
    come back to the front unfetched).
    """
    blocks, scal, order, _, _ = cache
    partitions = scal[PARTITIONS]
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
    hits = 0
    if held > 0:
        stamp = blocks[block, HOME] - 1
        band = _band(stamp, scal)
        hits = scal[HITS + band]
        asked = is_write or reader == 0 or new_bytes > 0 or 2 * hits <= 1_000_000
        if not asked:
            # a partition that has its copies asks their home for nothing
            asked = not _has_copies(block, reader, cache)
        if hits < 1_000_000:
            again = size - new_bytes
            share = 1_000_000 - hits
            # what was lost since the block was last used here has been fetched again since, as far as it was then
            renewed = blocks[block, RENEWED]
            if share > renewed:
                blocks[block, RENEWED] = share
                lost = again - _quotient(again * (hits + renewed), 1_000_000)
            if asked and held > again:
                # the same share of what is not asked for now is gone as well
                rest = have & ~mask
                kept = rest & _spread(hits)
                if rest != none:
                    gone = (held - again) - _quotient((held - again) * _popcount(kept), _popcount(rest))
                elif 2 * hits < 1_000_000:
                    gone = held - again
                have = kept | (have & mask)
        if not asked:
            blocks[block, READ_BY + reader - 1] = scal[_NOW] + 1
            return lost
    new_bytes = min(new_bytes, limit - held + gone)
    if gone > 0:
        held -= gone
        written = max(0, blocks[block, DIRTY] - held)
        blocks[block, DIRTY] -= written
        counters[HBM_WRITE, owner] += written
        scal[WRITTEN_BACK] += written
    held += new_bytes
    if is_write:
        blocks[block, DIRTY] = min(blocks[block, DIRTY] + size, held)
    space = held
    if partitions > 1:
        # a write goes to the home; of the copies only the writer's own, if it has any, are written as well
        here = reader == 0 and (not is_write or (stamp >= 0 and _has_copies(block, 0, cache)))
        if not here:
            space = _quotient(held + partitions - 1, partitions)
        if 2 * hits <= 1_000_000 or is_write:
            # copies of what has left its home, or was modified by others, are void
            for other in range(partitions - 1):
                if 2 * hits <= 1_000_000 or other != reader - 1 or not _has_copies(block, reader, cache):
                    blocks[block, READ_BY + other] = 0
        copies = blocks[block, COPIES]
        if copies > 0 and (here or is_write):
            scal[_BYTES + _band(copies - 1, scal)] -= order[copies - 1] >> _HALF
            order[copies - 1] = -1
            blocks[block, COPIES] = 0
        elif copies == 0 and stamp >= 0 and not here and not is_write:
            before = order[stamp] >> _HALF
            if before > space:
                # the copies stay where they are in the list
                order[stamp] = ((before - space) << _HALF) | (block << _BLOCK) | _COPY
                scal[_BYTES + band] -= space
                blocks[block, COPIES] = stamp + 1
                stamp, band = -1, 0
    before = order[stamp] >> _HALF if stamp >= 0 else 0
    entry = (space << _HALF) | (block << _BLOCK)
    if blocks[block, DIRTY] > 0:
        entry |= _MODIFIED
    # a block larger than the whole cache may be first in the list and beyond its capacity at once: it passes the
    # capacity again, so that what was modified is written back
    if stamp >= 0 and stamp == scal[_NOW] - 1 and band <= LAST_INSIDE and gone == 0:
        order[stamp] = entry
        scal[_BYTES + band] += space - before
    else:
        if stamp >= 0:
            order[stamp] = -1
            scal[_BYTES + band] -= before
        if scal[_NOW] == order.shape[0]:
            _close_up(cache)
        order[scal[_NOW]] = entry
        scal[_NOW] += 1
        blocks[block, HOME] = scal[_NOW]
        scal[_BYTES] += space
    blocks[block, HELD] = held
    blocks[block, PRESENT] = np.int64(have | mask)
    blocks[block, RENEWED] = 0
    if reader > 0 and (not is_write or blocks[block, READ_BY + reader - 1] > 0):
        blocks[block, READ_BY + reader - 1] = scal[_NOW] + 1
    grown = space if band > 0 else space - before
    if grown > 0:
        scal[GROWN] += grown
        if scal[GROWN] > scal[QUANTUM]:
            scal[GROWN] = 0
            _age(cache, counters)
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
    reader: int,
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
            miss = touch(block, mask, size, kind != READ, reader, limit, tensor, cache, counters)
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
    reader: int,
    shape: np.ndarray,
    cache: Cache,
    counters: np.ndarray,
) -> tuple[int, int]:
    """:func:`visit_tile` for callers in Python."""
    found: tuple[int, int] = visit_tile(tensor, head, row, rows, col, cols, kind, reader, shape, cache, counters)
    return found
