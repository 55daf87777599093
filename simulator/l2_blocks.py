"""The L2's blocks in order of use: what an access finds there, what leaves for HBM. Compiled, part of the hot loop.

No function here allocates or keeps an array, so numba counts no references to them (``_nrt=False``): counting, atomic
and at every call, took three quarters of a replay's time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiled import compiled, inlined

#: Blocks, scalar state, order of use by partition, tensor of each block.
Cache = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
# what an access does
READ, WRITE, ACCUMULATE = 0, 1, 2
# columns of the cache's blocks: mask of parts present, bytes held; then for every partition its places in the order of
# use, the modified bytes there, and how many millionths of what it is the home of were lost and fetched again since
PRESENT, HELD = 0, 1
PLACES, DIRTY, RENEWED = 2, 3, 4
#: Columns of a partition; those of a machine with two make a row one cache line of the machine that simulates.
SIDE_COLUMNS = 3
# A block's places are two numbers, each one more than an index of the list (0: none): in the low bits that of what its
# partition is the home of, in the high bits that of what it copied from the others, where that was used less lately.
_LOW, _HIGH, _HALF = 0xFFFFFFFF, -0x100000000, 32
# The order of use is a list in which a block is entered anew with every use (its former entry becomes -1) and which is
# closed up when it is full. Blocks do not know their band of reuse distance: it follows from where bands end. An entry
# is the bytes that it takes, in its high bits, the block, whether some of it may be modified and whether it is copies.
_BLOCK, _MODIFIED, _COPIES = 2, 2, 1
# indices into the scalar state of the cache: bytes written back, bytes asked of blocks of which something missed, the
# partitions, by how much bands may grow before their ends move; then by band where it ends (bytes of reuse distance)
# and its hits in a million
WRITTEN_BACK, LATE, PARTITIONS, QUANTUM = 0, 1, 2, 3
BANDS = 13
LIMITS, HITS = 4, 4 + BANDS
# for every partition: entries in its list, by how much its bands have grown since they ended where they should; then by
# band, of its oldest used, the bytes in it and its first entry
SIDES = 4 + 2 * BANDS
_NOW, _GROWN, _BYTES, FIRST = SIDES, SIDES + 1, SIDES + 2, SIDES + 2 + BANDS
SIDE_SIZE = 2 + 2 * BANDS
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
def _close_up(blocks: np.ndarray, scal: np.ndarray, order: np.ndarray, side: int) -> None:
    """Drop the empty entries of a partition's list."""
    end = 0
    at_side, column = side * SIDE_SIZE, side * SIDE_COLUMNS + PLACES
    for k in range(BANDS):
        band = BANDS - 1 - k
        newer = scal[at_side + _NOW] if band == 0 else scal[at_side + FIRST + band - 1]
        first = scal[at_side + FIRST + band]
        scal[at_side + FIRST + band] = end
        for at in range(first, newer):
            entry = order[side, at]
            if entry >= 0:
                order[side, end] = entry
                end += 1
                block = (entry & _LOW) >> _BLOCK
                places = blocks[block, column]
                if entry & _COPIES:
                    blocks[block, column] = (places & _LOW) | (end << _HALF)
                else:
                    blocks[block, column] = (places & _HIGH) | end
    scal[at_side + _NOW] = end


@inlined
def _age(
    blocks: np.ndarray, scal: np.ndarray, order: np.ndarray, owners: np.ndarray, side: int, counters: np.ndarray
) -> None:
    """Move the ends of a partition's bands until every band ends where it should; the last one's overflow is forgotten.

    Modified bytes go to HBM when their block leaves the capacity.
    """
    at_side, columns = side * SIDE_SIZE, side * SIDE_COLUMNS
    reach, newer = 0, scal[at_side + _NOW]
    for band in range(BANDS):
        reach += scal[at_side + _BYTES + band]
        limit, at = scal[LIMITS + band], scal[at_side + FIRST + band]
        moved = 0
        while reach > limit and at < newer:
            entry = order[side, at]
            at += 1
            if entry < 0:
                continue
            space = entry >> _HALF
            reach -= space
            moved += space
            if band == LAST_INSIDE:
                if entry & _MODIFIED:
                    victim = (entry & _LOW) >> _BLOCK
                    counters[HBM_WRITE, owners[victim]] += blocks[victim, columns + DIRTY]
                    scal[WRITTEN_BACK] += blocks[victim, columns + DIRTY]
                    blocks[victim, columns + DIRTY] = 0
            elif band == BANDS - 1:
                victim = (entry & _LOW) >> _BLOCK
                order[side, at - 1] = -1
                if entry & _COPIES:
                    blocks[victim, columns + PLACES] &= _LOW
                else:
                    blocks[victim, columns + PLACES] = 0
                    anywhere = 0
                    for other in range(scal[PARTITIONS]):
                        anywhere |= blocks[victim, other * SIDE_COLUMNS + PLACES]
                    if anywhere == 0:
                        blocks[victim, HELD] = 0
                        blocks[victim, PRESENT] = 0
        if moved > 0:
            scal[at_side + FIRST + band] = at
            scal[at_side + _BYTES + band] -= moved
            if band < BANDS - 1:
                scal[at_side + _BYTES + band + 1] += moved
        newer = at


@inlined
def _band(stamp: int, scal: np.ndarray, side: int) -> int:
    """Band of reuse distance of what has the index ``stamp`` in a partition's list."""
    band = 0
    while stamp < scal[side * SIDE_SIZE + FIRST + band]:
        band += 1
    return band


@inlined
def _share(amount: int, side: int, partitions: int) -> Any:
    """What a partition has of ``amount``: shares differ by one at most and add up."""
    if partitions == 1:
        return amount
    return _quotient(amount * (side + 1), partitions) - _quotient(amount * side, partitions)


@inlined
def _to_front(block: int, band: int, space: int, intact: int, side: int, cache: Cache, counters: np.ndarray) -> None:
    """Make ``block``, which is in ``band``, the last used of a partition, where it takes ``space`` bytes from now on."""
    blocks, scal, order, owners = cache
    at_side, columns = side * SIDE_SIZE, side * SIDE_COLUMNS
    stamp = (blocks[block, columns + PLACES] & _LOW) - 1
    now = scal[at_side + _NOW]
    before = order[side, stamp] >> _HALF if stamp >= 0 else 0
    entry = (space << _HALF) | (block << _BLOCK)
    if blocks[block, columns + DIRTY] > 0:
        entry |= _MODIFIED
    # a block larger than the whole cache may be first in the list and beyond its capacity at once: it passes the
    # capacity again, so that what was modified is written back
    if stamp >= 0 and stamp == now - 1 and band <= LAST_INSIDE and intact:
        order[side, stamp] = entry
        scal[at_side + _BYTES + band] += space - before
    else:
        if stamp >= 0:
            order[side, stamp] = -1
            scal[at_side + _BYTES + band] -= before
        if now == order.shape[1]:
            _close_up(blocks, scal, order, side)
            now = scal[at_side + _NOW]
        order[side, now] = entry
        now += 1
        blocks[block, columns + PLACES] = (blocks[block, columns + PLACES] & _HIGH) | now
        scal[at_side + _NOW] = now
        scal[at_side + _BYTES] += space
    blocks[block, columns + RENEWED] = 0
    grown = space if band > 0 else space - before
    if grown > 0:
        grown += scal[at_side + _GROWN]
        scal[at_side + _GROWN] = grown
        if grown > scal[QUANTUM]:
            scal[at_side + _GROWN] = 0
            _age(blocks, scal, order, owners, side, counters)


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
def _drop_copies(block: int, side: int, cache: Cache) -> None:
    """Forget the copies of ``block`` that a partition holds apart from what it is the home of."""
    blocks, scal, order, _ = cache
    columns = side * SIDE_COLUMNS
    stamp = blocks[block, columns + COPY_STAMP]
    if stamp >= 0:
        order[side, stamp] = -1
        scal[side * SIDE_SIZE + _BYTES + _band(stamp, scal, side)] -= blocks[block, columns + COPY_SPACE]
        blocks[block, columns + COPY_STAMP] = -1
        blocks[block, columns + COPY_SPACE] = 0


@inlined
def _leave_copies(block: int, band: int, share: int, side: int, cache: Cache) -> None:
    """Take the ``share`` that a partition is the home of from ``block``, whose copies stay where they are in its list."""
    blocks, scal, order, _ = cache
    columns = side * SIDE_COLUMNS
    stamp, space = blocks[block, columns + STAMP], blocks[block, columns + SPACE]
    order[side, stamp] = 2 * block + 1
    scal[side * SIDE_SIZE + _BYTES + band] -= share
    blocks[block, columns + COPY_STAMP] = stamp
    blocks[block, columns + COPY_SPACE] = space - share
    blocks[block, columns + STAMP] = -1
    blocks[block, columns + SPACE] = 0


@inlined
def _has_copies(block: int, held: int, side: int, cache: Cache) -> bool:
    """Whether a partition has (more than half of) ``block``, also of what others are the home of."""
    blocks, scal, order, _ = cache
    places = blocks[block, side * SIDE_COLUMNS + PLACES]
    stamp = (places >> _HALF) - 1
    if stamp < 0:
        stamp = places - 1
        if stamp < 0 or order[side, stamp] >> _HALF < held:
            return False
    if stamp >= scal[side * SIDE_SIZE + FIRST]:
        return True
    there: bool = 2 * scal[HITS + _band(stamp, scal, side)] > 1_000_000
    return there


@inlined
def _drop_copies(block: int, side: int, cache: Cache) -> None:
    """Forget the copies of ``block`` that a partition holds apart from what it is the home of."""
    blocks, scal, order, _ = cache
    places = blocks[block, side * SIDE_COLUMNS + PLACES]
    stamp = (places >> _HALF) - 1
    if stamp >= 0:
        scal[side * SIDE_SIZE + _BYTES + _band(stamp, scal, side)] -= order[side, stamp] >> _HALF
        order[side, stamp] = -1
        blocks[block, side * SIDE_COLUMNS + PLACES] = places & _LOW


@inlined
def _leave_copies(block: int, band: int, share: int, side: int, cache: Cache) -> None:
    """Take the ``share`` that a partition is the home of from ``block`` in ``band``; its copies, if it has any, stay where
    they are in the list."""
    blocks, scal, order, _ = cache
    column = side * SIDE_COLUMNS + PLACES
    places = blocks[block, column]
    if places == 0 or places > _LOW:
        return
    space = order[side, places - 1] >> _HALF
    if space > share:
        order[side, places - 1] = ((space - share) << _HALF) | (block << _BLOCK) | _COPIES
        scal[side * SIDE_SIZE + _BYTES + band] -= share
        blocks[block, column] = places << _HALF


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
    """Access ``size`` bytes (the 64-part ``mask``) of ``block`` from the partition ``reader``; returns the bytes that
    miss (reads only).

    A range that no part stands for has an empty ``mask``: it counts as missing until all of the block is there.
    A block that holds bytes is in the list of blocks by use, which reaches beyond the capacity: how far back a block
    was used decides what share of it is still there, of what is asked for now and of the rest (which would otherwise
    come back to the front unfetched).
    """
    blocks, scal, order, owners = cache
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
    lost = 0
    gone = 0
    copied = False
    if held > 0:
        copied = partitions == 1 or _has_copies(block, held, reader, cache)
        again = size - new_bytes
        missing_share, gone_share = 0, 0
        for side in range(partitions):
            stamp = (blocks[block, side * SIDE_COLUMNS + PLACES] & _LOW) - 1
            if stamp >= scal[side * SIDE_SIZE + FIRST]:
                continue
            share = 1_000_000
            if stamp >= 0:
                share -= scal[HITS + _band(stamp, scal, side)]
            renewed = blocks[block, side * SIDE_COLUMNS + RENEWED]
            if share > renewed:
                missing_share += share - renewed
                blocks[block, side * SIDE_COLUMNS + RENEWED] = share
            if side == reader or is_write or new_bytes > 0 or not copied or 2 * share >= 1_000_000:
                gone_share += share
        if missing_share > 0:
            lost = again - _quotient(again * (1_000_000 - _quotient(missing_share, partitions)), 1_000_000)
        if gone_share > 0 and held > again:
            # the same share of what is not asked for now is gone as well
            hits = 1_000_000 - _quotient(gone_share, partitions)
            rest = have & ~mask
            kept = rest & _spread(hits)
            if rest != none:
                gone = (held - again) - _quotient((held - again) * _popcount(kept), _popcount(rest))
            elif 2 * hits < 1_000_000:
                gone = held - again
            have = kept | (have & mask)
    fetched = new_bytes > 0
    new_bytes = min(new_bytes, limit - held + gone)
    held += new_bytes - gone
    if gone > 0:
        for side in range(partitions):
            column = side * SIDE_COLUMNS + DIRTY
            written = max(0, blocks[block, column] - _share(held - new_bytes, side, partitions))
            blocks[block, column] -= written
            counters[HBM_WRITE, owner] += written
            scal[WRITTEN_BACK] += written
    blocks[block, HELD] = held
    blocks[block, PRESENT] = np.int64(have | mask)
    if is_write:
        dirty = size
        for side in range(partitions):
            dirty += blocks[block, side * SIDE_COLUMNS + DIRTY]
        dirty = min(dirty, held)
        for side in range(partitions):
            blocks[block, side * SIDE_COLUMNS + DIRTY] = _share(dirty, side, partitions)
    for side in range(partitions):
        stamp = (blocks[block, side * SIDE_COLUMNS + PLACES] & _LOW) - 1
        band = 0
        if stamp >= 0 and stamp < scal[side * SIDE_SIZE + FIRST]:
            band = _band(stamp, scal, side)
        space = held
        if side == reader and not is_write:
            _drop_copies(block, side, cache)
        elif is_write or fetched or not copied or stamp < 0 or 2 * scal[HITS + band] <= 1_000_000:
            space = _share(held, side, partitions)
            if is_write:
                _drop_copies(block, side, cache)
            else:
                _leave_copies(block, band, space, side, cache)
        else:
            continue
        _to_front(block, band, space, gone == 0, side, cache, counters)
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
