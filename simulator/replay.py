"""The hot loop of the device engine: CTAs on SM slots, an L2 of tiles, and shared bandwidth, event by event.

Compiled by numba. Time is integer ticks; simultaneous events are served in slot order, so a run is
reproducible. One event is one loop iteration of one CTA (or ``chunk`` of them): it touches the tiles that the
iteration loads, learns from the L2 what must come from HBM, queues for L2 and HBM bandwidth, and takes the time
that the SM reading gives for the latency so experienced.
"""

from __future__ import annotations

import numpy as np

from simulator.compiled import compiled
from simulator.l2_blocks import READ, SM_READ, SM_WRITE, WRITTEN_BACK, access_tile

# positions of an access relative to the loops of its CTA
PROLOGUE, EPILOGUE, OUTER = -1, -2, -3


@compiled
def _grid_point(grid, x):
    """Index and fraction of ``x`` on ``grid``: above 1 it extends the last interval, below the grid it is 0."""
    k = 0
    while k < grid.shape[0] - 2 and x > grid[k + 1]:
        k += 1
    return k, max(0.0, (x - grid[k]) / (grid[k + 1] - grid[k]))


@compiled
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


@compiled
def _heap_push(times, slots, size, time, slot):
    i = size
    while i > 0:
        p = (i - 1) >> 1
        if times[p] < time or (times[p] == time and slots[p] < slot):
            break
        times[i], slots[i] = times[p], slots[p]
        i = p
    times[i], slots[i] = time, slot


@compiled
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


@compiled
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
    requests,  # how many times in turn a CTA of the list asks for its bytes: CTAs it stands for x loads of each
    launch_gap,
    l2_ticks_per_byte,
    hbm_ticks_per_byte,
    hbm_write_ticks_per_byte,
    l2_latency,
    hbm_latency,
    port_ticks_per_byte,
    snapshots,  # cta indices whose dispatch is recorded
    cta_log,  # [cta or 0, 3] out: slot, start, end
    flow,  # [bin or 0, 3] bytes over time: moved between SMs and L2, read from HBM, written to HBM
    flow_ticks,  # ticks of one bin
    weights,  # [2, seg + 2, k] out: how often each entry of the timing tables was used
    stalls,  # [3] out: HBM, L2 and latency ticks in what CTAs waited for
    busy,  # [2] out: ticks that L2 and HBM were busy
    snap_time,  # [snapshot] out
    snap_bytes,  # [snapshot, 4, tensor] out
    slot_state,  # [6, slot] scratch
    active,  # [sm] scratch: CTAs on it
    times,  # [slot + 1] scratch: the heap of events, with slots
    slots,  # [slot + 1] scratch
):
    n_seg = seg_count.shape[0]
    n_acc = acc_int.shape[0]
    scal = cache[1]
    cta_of, phase, outer_i, seg_i, it, started = (
        slot_state[0], slot_state[1], slot_state[2], slot_state[3], slot_state[4], slot_state[5],
    )  # fmt: skip
    size = 0
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
                        for tensor in range(counters.shape[1]):
                            snap_bytes[q, j, tensor] = counters[j, tensor]
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
        before = scal[WRITTEN_BACK]
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
                    counters[SM_READ if acc_int[a, 1] == READ else SM_WRITE, acc_int[a, 0]] += b * extra
        # shared bandwidth: requests queue in order of arrival
        done = float(t)
        hbm_bound = False
        if got > 0:
            l2_free = max(l2_free, float(t)) + got * l2_ticks_per_byte
            busy[0] += got * l2_ticks_per_byte
            done = l2_free
        back = scal[WRITTEN_BACK] - before
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
        # what queues is spread over the iterations of a chunk and the requests that follow each other
        parts = chunk * requests
        queue = max(0.0, (done - t) / parts - got * port_ticks_per_byte / parts)
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
                for crowd, part in ((0, 1.0 - w), (1, w)):
                    duration += part * (first_extra[crowd, k] + f * (first_extra[crowd, k + 1] - first_extra[crowd, k]))
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
        stalls[0 if hbm_bound else 1] += queue * parts
        stalls[2] += latency * parts
        _heap_replace_root(times, slots, size, t + np.int64(duration + 0.5), slot)
    # with the drain of posted writes
    return end, slot_busy, l2_free, hbm_free
