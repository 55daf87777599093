"""The hot loop of the device engine: CTAs on SM slots, an L2 of tiles, and shared bandwidth, event by event.

Compiled by numba. Time is integer ticks; simultaneous events are served in slot order, so a run is
reproducible. One event is one loop iteration of one CTA (or ``chunk`` of them): it touches the tiles that the
iteration loads, learns from the L2 what must come from HBM, queues for L2 and HBM bandwidth, and takes the time
that the SM reading gives for the latency so experienced.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# positions of an access relative to the loops of its CTA
PROLOGUE, EPILOGUE, OUTER = -1, -2, -3
# what an access does
READ, WRITE, ACCUMULATE = 0, 1, 2
# columns of the cache's blocks: neighbours in order of use, mask of parts present, bytes held, bytes modified, tensor,
# band of reuse distance
_PREV, _NEXT, _PRESENT, _HELD, _DIRTY, _OWNER, _BAND = 0, 1, 2, 3, 4, 5, 6
# indices into the scalar state of the cache: ends of the list of blocks, bytes written back, then by band the bytes
# in it, its oldest block and its hits in a million
_HEAD, _TAIL, _WRITTEN_BACK = 0, 1, 2
BANDS = 13
_BYTES, _OLDEST, _HITS = 3, 3 + BANDS, 3 + 2 * BANDS
#: The band that ends at the cache's capacity; band 0 ends at 0.4 of it, each further one 0.1 later.
LAST_INSIDE = 6
# rows of the byte counters
_SM_READ, _SM_WRITE, _HBM_READ, _HBM_WRITE = 0, 1, 2, 3


@njit(cache=True, inline="always")
def _popcount(x):
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(cache=True)
def _remove(block, blocks, scal):
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


@njit(cache=True)
def _push_front(block, blocks, scal):
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


@njit(cache=True)
def _age(from_band, capacity, blocks, scal, counters):
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
                counters[_HBM_WRITE, blocks[victim, _OWNER]] += blocks[victim, _DIRTY]
                scal[_WRITTEN_BACK] += blocks[victim, _DIRTY]
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


@njit(cache=True)
def touch(block, mask, size, is_write, limit, owner, capacity, blocks, scal, counters):
    """Access ``size`` bytes (the 64-part ``mask``) of ``block``; returns the bytes that miss (reads only).

    A range that no part stands for has an empty ``mask``: it counts as missing until all of the block is there.
    A block that holds bytes is in the list of blocks by use, which reaches beyond the capacity: how far back a block
    was used decides what share of it is still there.
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
    if held > 0:
        band = blocks[block, _BAND]
        again = size - new_bytes
        lost = again - again * scal[_HITS + band] // 1_000_000
    new_bytes = min(new_bytes, limit - held)
    # a block larger than the whole cache may be first in the list and beyond its capacity at once: it passes the
    # capacity again, so that what was modified is written back
    if held > 0 and scal[_HEAD] == block and band <= LAST_INSIDE:
        scal[_BYTES + band] += new_bytes
    else:
        if held > 0:
            _remove(block, blocks, scal)
        else:
            blocks[block, _OWNER] = owner
        _push_front(block, blocks, scal)
        scal[_BYTES] += held + new_bytes
    blocks[block, _HELD] = held + new_bytes
    blocks[block, _PRESENT] = np.int64(have | mask)
    if is_write:
        blocks[block, _DIRTY] = min(blocks[block, _DIRTY] + size, held + new_bytes)
    _age(band if new_bytes == 0 else BANDS, capacity, blocks, scal, counters)
    return new_bytes + lost


@njit(cache=True)
def _range_mask(low, high, extent):
    """Bits of a 64-part mask that begin in ``low .. high`` of ``extent`` elements: disjoint ranges share no bit, and
    ranges that cover a block cover its mask. A range within one part may get none."""
    if low == 0 and high == extent:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    first = (low * 64 + extent - 1) // extent
    n = (high * 64 + extent - 1) // extent - first
    if n >= 64:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    return ((np.uint64(1) << np.uint64(n)) - np.uint64(1)) << np.uint64(first)


@njit(cache=True)
def access_tile(tensor, head, row, rows, col, cols, kind, shape, capacity, cache, counters):
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
            if kind != WRITE:
                missed += miss
    counters[_SM_READ if kind == READ else _SM_WRITE, tensor] += total
    counters[_HBM_READ, tensor] += missed
    return total, missed


@njit(cache=True, inline="always")
def _grid_point(grid, x):
    """Index and fraction of ``x`` on ``grid``: above 1 it extends the last interval, below the grid it is 0."""
    k = 0
    while k < grid.shape[0] - 2 and x > grid[k + 1]:
        k += 1
    return k, max(0.0, (x - grid[k]) / (grid[k + 1] - grid[k]))


@njit(cache=True)
def _mixed(k, f, values, row, spread, into, w, times):
    """``values[crowd, row]`` at grid point ``k`` + ``f``, mixed between an SM alone (0) and a full one (1) by ``w``.

    Books ``times`` in ``spread[crowd, into]`` on the two grid points.
    """
    inside = min(f, 1.0)
    spread[0, into, k] += (1.0 - w) * times * (1.0 - inside)
    spread[0, into, k + 1] += (1.0 - w) * times * inside
    value = (1.0 - w) * (values[0, row, k] + f * (values[0, row, k + 1] - values[0, row, k]))
    if w > 0.0:
        spread[1, into, k] += w * times * (1.0 - inside)
        spread[1, into, k + 1] += w * times * inside
        value += w * (values[1, row, k] + f * (values[1, row, k + 1] - values[1, row, k]))
    return value


@njit(cache=True)
def _heap_push(times, slots, size, time, slot):
    i = size
    while i > 0:
        p = (i - 1) >> 1
        if times[p] < time or (times[p] == time and slots[p] < slot):
            break
        times[i], slots[i] = times[p], slots[p]
        i = p
    times[i], slots[i] = time, slot


@njit(cache=True)
def _heap_replace_root(times, slots, size, time, slot):
    """Put another entry in place of the root of a heap of ``size`` entries."""
    i = 0
    while True:
        c = 2 * i + 1
        if c >= size:
            break
        if c + 1 < size and (times[c + 1] < times[c] or (times[c + 1] == times[c] and slots[c + 1] < slots[c])):
            c += 1
        if time < times[c] or (time == times[c] and slot < slots[c]):
            break
        times[i], slots[i] = times[c], slots[c]
        i = c
    times[i], slots[i] = time, slot


@njit(cache=True)
def replay(
    first_slot_of,  # 0 grid/dynamic, 1 static
    n_cta,
    n_slots,
    n_sms,
    has_outer,  # whether outer iterations cost or touch anything themselves
    outer_count,  # [cta]
    seg_count,  # [seg, cta]
    seg_step,  # [seg] change of the count per outer iteration
    seg_chunk,  # [seg]
    seg_align,  # [seg] access whose L2 blocks bound the chunks, or -1
    acc_int,  # [acc, 14]: tensor, write, segment, rows, cols, head/row/col inner and outer coefficients, lag, repeats
    acc_base,  # [acc, 3, cta] head, row, col
    shape,
    capacity,
    cache,
    counters,
    grid,  # latency grid in ticks
    cta_class,  # [cta] row of the overhead table: by length of the main loop
    overhead,  # [2, class, k]
    first_extra,  # [2, k]
    period,  # [2, seg, k]
    occupancy,
    launch_gap,
    l2_ticks_per_byte,
    hbm_ticks_per_byte,
    hbm_write_ticks_per_byte,
    l2_latency,
    hbm_latency,
    port_ticks_per_byte,
    snapshots,  # cta indices whose dispatch is recorded
    cta_log,  # [cta or 0, 3] slot, start, end
    flow,  # [bin or 0, 3] bytes over time: moved between SMs and L2, read from HBM, written to HBM
    flow_ticks,  # ticks of one bin
):
    n_seg = seg_count.shape[0]
    n_acc = acc_int.shape[0]
    scal = cache[1]
    weights = np.zeros((2, n_seg + 2, grid.shape[0]))
    stalls = np.zeros(3)  # hbm, l2, latency ticks in what CTAs waited for
    busy = np.zeros(2)  # L2 and HBM busy ticks
    snap_time = np.zeros(snapshots.shape[0], np.int64)
    snap_bytes = np.zeros((snapshots.shape[0], 4, counters.shape[1]), np.int64)

    cta_of = np.full(n_slots, -1, np.int64)
    phase = np.zeros(n_slots, np.int64)
    outer_i = np.zeros(n_slots, np.int64)
    seg_i = np.zeros(n_slots, np.int64)
    it = np.zeros(n_slots, np.int64)
    started = np.zeros(n_slots, np.int64)
    active = np.zeros(n_sms, np.int64)
    times = np.zeros(n_slots + 1, np.int64)
    slots = np.zeros(n_slots + 1, np.int64)
    size = 0
    next_cta = 0
    for s in range(min(n_slots, n_cta)):
        _heap_push(times, slots, size, 0, s)
        size += 1
        cta_of[s] = s
    next_cta = min(n_slots, n_cta)
    l2_free, hbm_free = 0.0, 0.0
    end, slot_busy = 0, 0

    while size > 0:
        t, slot = times[0], slots[0]
        cta = cta_of[slot]
        sm = slot % n_sms
        where = phase[slot]
        segment = PROLOGUE
        chunk = 1
        if where == 0:
            active[sm] += 1
            started[slot] = t
            for q in range(snapshots.shape[0]):
                if snapshots[q] == cta:
                    snap_time[q] = t
                    for j in range(4):
                        snap_bytes[q, j] = counters[j]
        elif where == 1:
            # find the next segment with iterations left, entering outer iterations on the way
            segment = -9
            while outer_i[slot] < outer_count[cta]:
                if seg_i[slot] < 0:
                    segment = OUTER
                    break
                if seg_i[slot] >= n_seg:
                    outer_i[slot] += 1
                    seg_i[slot] = -1 if has_outer else 0
                    continue
                total = seg_count[seg_i[slot], cta] + seg_step[seg_i[slot]] * outer_i[slot]
                if it[slot] < total:
                    segment = seg_i[slot]
                    chunk = min(seg_chunk[segment], total - it[slot])
                    a = seg_align[segment]
                    if a >= 0:
                        # a chunk ends where a block of that many tiles does
                        size_rows = acc_int[a, 3]
                        place = acc_base[a, 1, cta] + acc_int[a, 7] * it[slot] + acc_int[a, 8] * outer_i[slot]
                        within = (place // size_rows) % seg_chunk[segment]
                        chunk = min(chunk, within + 1 if acc_int[a, 7] < 0 else seg_chunk[segment] - within)
                    break
                seg_i[slot] += 1
                it[slot] = 0
            if segment == -9:
                segment = EPILOGUE
        got, missed = 0, 0
        before = scal[_WRITTEN_BACK]
        for a in range(n_acc):
            if acc_int[a, 2] != segment:
                continue
            o = outer_i[slot]
            i0 = it[slot] if segment >= 0 else 0
            n = chunk
            if segment >= 0:
                own = seg_count[segment, cta] + seg_step[segment] * o + acc_int[a, 11]
                n = min(chunk, own - i0)
                if n <= 0:
                    continue
            rows, cols = acc_int[a, 3], acc_int[a, 4]
            head = acc_base[a, 0, cta] + acc_int[a, 5] * i0 + acc_int[a, 6] * o
            row = acc_base[a, 1, cta] + acc_int[a, 7] * i0 + acc_int[a, 8] * o
            col = acc_base[a, 2, cta] + acc_int[a, 9] * i0 + acc_int[a, 10] * o
            again = acc_int[a, 12]
            visits, row_step, col_step = 1, acc_int[a, 7], acc_int[a, 9]
            if n > 1:
                if abs(row_step) > rows or abs(col_step) > cols:
                    # gaps between the tiles (FlashAttention-1's slices): one span would count what lies in them
                    visits = n
                elif row_step != 0:
                    if row_step < 0:
                        row += row_step * (n - 1)
                    rows = abs(row_step) * (n - 1) + rows if abs(row_step) >= rows else rows * n
                elif col_step != 0:
                    if col_step < 0:
                        col += col_step * (n - 1)
                    cols = abs(col_step) * (n - 1) + cols if abs(col_step) >= cols else cols * n
                else:
                    again = again * n
            extra = 0
            if again > 1 and visits == 1 and capacity > 1 << 20:
                # the same tile again: it is in the cache since the first time
                extra, again = again - 1, 1
            for visit in range(again * visits):
                i = visit % visits
                b, m = access_tile(
                    acc_int[a, 0], head, row + i * row_step, rows, col + i * col_step, cols, acc_int[a, 1], shape,
                    capacity, cache, counters,
                )  # fmt: skip
                got += b * (1 + extra)
                missed += m
                if extra > 0:
                    counters[_SM_READ if acc_int[a, 1] == READ else _SM_WRITE, acc_int[a, 0]] += b * extra
        # shared bandwidth: requests queue in order of arrival
        done = float(t)
        hbm_bound = False
        if got > 0:
            l2_free = max(l2_free, float(t)) + got * l2_ticks_per_byte
            busy[0] += got * l2_ticks_per_byte
            done = l2_free
        back = scal[_WRITTEN_BACK] - before
        if back > 0:
            hbm_free = max(hbm_free, float(t)) + back * hbm_write_ticks_per_byte
            busy[1] += back * hbm_write_ticks_per_byte
        latency = l2_latency
        if missed > 0:
            hbm_free = max(hbm_free, float(t)) + missed * hbm_ticks_per_byte
            busy[1] += missed * hbm_ticks_per_byte
            hbm_bound = hbm_free > done
            done = max(done, hbm_free)
            share = 1.0 if chunk == 1 else min(1.0, missed * 1.0 / got)
            latency = l2_latency + share * (hbm_latency - l2_latency)
        if flow.shape[0] > 0:
            b = min(np.int64(done) // flow_ticks, flow.shape[0] - 1)
            flow[b, 0] += got
            flow[b, 1] += missed
            flow[b, 2] += back
        queue = max(0.0, (done - t) / chunk - got * port_ticks_per_byte / chunk)
        x = latency + queue

        if segment == EPILOGUE:
            active[sm] -= 1
            slot_busy += t - started[slot]
            if t > end:
                end = t
            if cta_log.shape[0] > 0:
                cta_log[cta, 0], cta_log[cta, 1], cta_log[cta, 2] = slot, started[slot], t
            following = cta + n_slots if first_slot_of == 1 else next_cta
            if following < n_cta:
                if first_slot_of == 0:
                    next_cta += 1
                cta_of[slot] = following
                phase[slot] = 0
                _heap_replace_root(times, slots, size, t + launch_gap, slot)
            else:
                size -= 1
                _heap_replace_root(times, slots, size, times[size], slots[size])
            continue

        w = 0.0
        if occupancy > 1:
            w = (active[sm] - 1.0) / (occupancy - 1.0)
        k, f = _grid_point(grid, x)
        if segment == PROLOGUE:
            duration = _mixed(k, f, overhead, cta_class[cta], weights, n_seg, w, 1.0)
            if cta < n_slots:
                duration += first_extra[0, k] + f * (first_extra[0, k + 1] - first_extra[0, k])
            phase[slot] = 1
            outer_i[slot] = 0
            seg_i[slot] = -1 if has_outer else 0
            it[slot] = 0
        elif segment == OUTER:
            # the cost of an outer iteration itself is the last row of the period table
            duration = _mixed(k, f, period, n_seg, weights, n_seg + 1, w, 1.0)
            seg_i[slot] = 0
            it[slot] = 0
        else:
            duration = chunk * _mixed(k, f, period, segment, weights, segment, w, float(chunk))
            it[slot] += chunk
        stalls[0 if hbm_bound else 1] += queue * chunk
        stalls[2] += latency * chunk
        _heap_replace_root(times, slots, size, t + np.int64(duration + 0.5), slot)
    # the drain of posted writes
    return end, slot_busy, weights, stalls, busy, snap_time, snap_bytes, l2_free, hbm_free
