"""The hot loop of the device engine: CTAs on SM slots, an L2 of tiles, and shared bandwidth, event by event.

Compiled by numba. Time is integer ticks; simultaneous events are served in slot order, so a run is
reproducible. One event is one loop iteration of one CTA (or ``chunk`` of them): it touches the tiles that the
iteration loads, learns from the L2 what must come from HBM, queues for L2 and HBM bandwidth, and takes the time
that the SM reading gives for the latency so experienced.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.compiled import compiled, inlined
from simulator.l2_blocks import LATE, PARTITIONS, READ, SM_READ, SM_WRITE, WRITTEN_BACK, Cache, visit_tile

# positions of an access relative to the loops of its CTA; segments are 0 and up
PROLOGUE, EPILOGUE, OUTER = -1, -2, -3
#: Accesses are listed position by position, the least first: those of ``p`` begin at ``first[p + POSITIONS]``.
POSITIONS = 3
# columns of an access: its columns of head, row and column in the table of CTAs, what an iteration of the inner and of
# the outer loop adds to each, what its count of iterations differs by from its segment's, how often it is repeated, and
# whether the CTAs of a cluster share its tile
TENSOR, KIND, ROWS, COLS = 0, 1, 2, 3
HEAD, HEAD_INNER, HEAD_OUTER, ROW, ROW_INNER, ROW_OUTER, COL, COL_INNER, COL_OUTER = 4, 5, 6, 7, 8, 9, 10, 11, 12
LAG, REPEATS, SHARED = 13, 14, 15
ACCESS_COLUMNS = 16
# columns of the table of CTAs: row of the overhead table (by length of the main loop), outer iterations, whether the
# work is booked apart (as entry 1 of the outputs), iterations by segment, then the values that places start from
CLASS, ROUNDS, APART, COUNTS = 0, 1, 2, 3
# columns of a slot's state
_CTA, _PHASE, _ROUND, _SEGMENT, _ITERATION, _STARTED = 0, 1, 2, 3, 4, 5
SLOT_COLUMNS = 8
#: SMs of a GPC, as a power of two: consecutive CTAs land on all SMs of one before those of the next, whose L2 partition
#: is taken to be another (``micro_read_sharing.csv``: 16 or 18 on an H200).
_GPC_SMS_LOG2 = 4
#: Key of a slot that has no event to come.
NEVER = np.iinfo(np.int64).max


@inlined
def _grid_point(grid: np.ndarray, x: float) -> tuple[int, float]:
    """Index and fraction of ``x`` on ``grid``: above 1 it extends the last interval, below the grid it is 0."""
    k = 0
    while k < grid.shape[0] - 2 and x > grid[k + 1]:
        k += 1
    return k, max(0.0, (x - grid[k]) / (grid[k + 1] - grid[k]))


@inlined
def _mixed(
    k: int, f: float, values: np.ndarray, row: int, spread: np.ndarray, into: int, w: float, times: float
) -> Any:
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


@inlined
def _settle(tree: np.ndarray, leaves: int, slot: int, key: int) -> None:
    """Give ``slot`` another ``key`` in a tree of losers: ``tree[0]`` becomes the least key of all slots.

    A node keeps the greater key of the match that was played there, so a slot's way to the root is known beforehand
    (a heap's is not), and a key that changes plays only the matches on that way.
    """
    node = (slot + leaves) >> 1
    while node > 0:
        other = tree[node]
        tree[node] = max(key, other)
        key = min(key, other)
        node >>= 1
    tree[0] = key


@inlined
def _first_matches(tree: np.ndarray, keys: np.ndarray, leaves: int) -> None:
    """Play all matches of ``keys`` (a tree of winners: scratch, its leaves from ``leaves`` on)."""
    for node in range(leaves - 1, 0, -1):
        left, right = keys[2 * node], keys[2 * node + 1]
        keys[node] = min(left, right)
        tree[node] = max(left, right)
    tree[0] = keys[1]


@compiled
def replay(
    static: bool,  # CTA i runs on slot i modulo n_slots; else the next CTA goes to the first free slot
    n_slots: int,
    n_sms: int,
    has_outer: bool,  # whether outer iterations cost or touch anything themselves
    ctas: np.ndarray,  # [cta, column]
    seg_step: np.ndarray,  # [seg] change of the count per outer iteration
    seg_chunk: np.ndarray,  # [seg]
    seg_align: np.ndarray,  # [seg] access whose L2 blocks bound the chunks, or -1
    accesses: np.ndarray,  # [acc, column] by position
    read_costs: np.ndarray,  # [acc] HBM time of missed bytes over that of bytes in order
    first: np.ndarray,  # [seg + POSITIONS + 1] the first access of a position
    shape: np.ndarray,
    capacity: int,
    cache: Cache,
    counters: np.ndarray,
    counters_apart: np.ndarray,  # out: as counters
    grid: np.ndarray,  # latency grid in ticks
    overhead: np.ndarray,  # [2, class, k]: at the first k points of the grid, as the two that follow
    first_extra: np.ndarray,  # [2, k]
    period: np.ndarray,  # [2, seg + 1, k]
    occupancy: int,
    requests: int,  # how many times in turn a CTA of the list asks for its bytes: CTAs it stands for x loads of each
    launch_gap: int,
    gap_is_crowded: bool,  # whether a full SM's times include CTAs that are being launched, as a closed queue's do
    l2_ticks_per_byte: float,
    hbm_ticks_per_byte: float,
    hbm_write_ticks_per_byte: float,
    l2_latency: float,
    hbm_latency: float,
    port_ticks_per_byte: float,
    cta_log: np.ndarray,  # [cta or 0, 3] out: slot, start, end
    flow: np.ndarray,  # [bin or 0, 3] bytes over time: moved between SMs and L2, read from HBM, written to HBM
    flow_ticks: int,  # ticks of one bin
    weights: np.ndarray,  # [2, 2, seg + 2, k] out: how often each entry of the timing tables was used
    stalls: np.ndarray,  # [2, 3] out: HBM, L2 and latency ticks in what CTAs waited for
    busy: np.ndarray,  # [2, 3] out: ticks that L2 and HBM were busy, and CTAs
    state: np.ndarray,  # [slot, SLOT_COLUMNS] scratch
    active: np.ndarray,  # [sm] scratch: CTAs on it
    tree: np.ndarray,  # [leaves] scratch: the next event; leaves: the least power of two that is not below n_slots
    keys: np.ndarray,  # [2 * leaves] scratch
) -> tuple[int, float, float]:
    """The last CTA's end, and when L2 and HBM are done (ticks); or -1 and a latency (ticks) at which the tables have to
    be read before the launch can be replayed."""
    n_cta, n_seg = ctas.shape[0], seg_step.shape[0]
    leaves = tree.shape[0]
    scal = cache[1]
    # how far the timing tables have been read; a launch that goes on beyond that is given up
    read = period.shape[2]
    reach = grid[read - 1] if read < grid.shape[0] else np.inf
    # an event's key: its time, then its slot in the lowest bits
    shift = 0
    while leaves >> shift > 1:
        shift += 1
    for leaf in range(leaves):
        keys[leaves + leaf] = leaf if leaf < min(n_slots, n_cta) else NEVER
    _first_matches(tree, keys, leaves)
    for s in range(min(n_slots, n_cta)):
        state[s, _CTA] = s
    next_cta = min(n_slots, n_cta)
    l2_free, hbm_free = 0.0, 0.0
    end = 0

    while tree[0] != NEVER:
        t, slot = tree[0] >> shift, tree[0] & (leaves - 1)
        cta = state[slot, _CTA]
        sm = slot % n_sms
        side = (sm >> _GPC_SMS_LOG2) % scal[PARTITIONS]
        o = state[slot, _ROUND]
        inside = ctas[cta, APART]
        booked = counters_apart if inside == 1 else counters
        segment = PROLOGUE
        chunk = 1
        if state[slot, _PHASE] == 0:
            if cta < n_slots or not gap_is_crowded:
                active[sm] += 1
            state[slot, _STARTED] = t
            state[slot, _ROUND], state[slot, _ITERATION], o = 0, 0, 0
        else:
            # find the next segment with iterations left, entering outer iterations on the way
            segment = EPILOGUE
            while o < ctas[cta, ROUNDS]:
                current = state[slot, _SEGMENT]
                if current < 0:
                    segment = OUTER
                    break
                if current >= n_seg:
                    o += 1
                    state[slot, _ROUND] = o
                    state[slot, _SEGMENT] = -1 if has_outer else 0
                    continue
                total = ctas[cta, COUNTS + current] + seg_step[current] * o
                it = state[slot, _ITERATION]
                if it < total:
                    segment = current
                    chunk = min(seg_chunk[segment], total - it)
                    a = seg_align[segment]
                    if a >= 0:
                        # a chunk ends where a block of that many tiles does
                        step = accesses[a, ROW_INNER]
                        place = ctas[cta, accesses[a, ROW]] + step * it + accesses[a, ROW_OUTER] * o
                        within = (place // accesses[a, ROWS]) % seg_chunk[segment]
                        chunk = min(chunk, within + 1 if step < 0 else seg_chunk[segment] - within)
                    break
                state[slot, _SEGMENT] = current + 1
                state[slot, _ITERATION] = 0
        i0 = state[slot, _ITERATION] if segment >= 0 else 0
        got, missed, share, read_ticks = 0, 0, 0.0, 0.0
        before = scal[WRITTEN_BACK]
        for a in range(first[segment + POSITIONS], first[segment + POSITIONS + 1]):
            access = accesses[a]
            n = chunk
            if segment >= 0:
                own = ctas[cta, COUNTS + segment] + seg_step[segment] * o + access[LAG]
                n = min(chunk, own - i0)
                if n <= 0:
                    continue
            rows, cols = access[ROWS], access[COLS]
            row_step, col_step = access[ROW_INNER], access[COL_INNER]
            head = ctas[cta, access[HEAD]] + access[HEAD_INNER] * i0 + access[HEAD_OUTER] * o
            row = ctas[cta, access[ROW]] + row_step * i0 + access[ROW_OUTER] * o
            col = ctas[cta, access[COL]] + col_step * i0 + access[COL_OUTER] * o
            again, visits = access[REPEATS], 1
            if n > 1:
                between = abs(row_step)
                low = row + row_step * (n - 1) if row_step < 0 else row
                if access[SHARED] == 1 and between > rows and low % rows == 0 and between % rows == 0:
                    # of each tile one slice, the others are read by the cluster's other CTAs: as large a slice of all
                    # the tiles together
                    rank = (low % between) // rows
                    row = low - rank * rows + rank * rows * n
                    rows *= n
                elif between > rows or abs(col_step) > cols:
                    # gaps between the tiles: one span would count what lies in them
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
            tensor, kind = access[TENSOR], access[KIND]
            asked, late = 0, scal[LATE]
            for visit in range(again * visits):
                i = visit % visits
                b, m = visit_tile(
                    tensor, head, row + i * row_step, rows, col + i * col_step, cols, kind, side, shape, cache, booked
                )
                asked += b
                got += b * (1 + extra)
                missed += m
                read_ticks += m * read_costs[a] * hbm_ticks_per_byte
                if extra > 0:
                    booked[SM_READ if kind == READ else SM_WRITE, tensor] += b * extra
            if scal[LATE] > late:
                share = max(share, (scal[LATE] - late) / asked)
        # shared bandwidth: requests queue in order of arrival
        done = float(t)
        hbm_bound = False
        if got > 0:
            l2_free = max(l2_free, float(t)) + got * l2_ticks_per_byte
            busy[inside, 0] += got * l2_ticks_per_byte
            done = l2_free
        back = scal[WRITTEN_BACK] - before
        if back > 0:
            hbm_free = max(hbm_free, float(t)) + back * hbm_write_ticks_per_byte
            busy[inside, 1] += back * hbm_write_ticks_per_byte
        latency = l2_latency
        if missed > 0:
            hbm_free = max(hbm_free, float(t)) + read_ticks
            busy[inside, 1] += read_ticks
            hbm_bound = hbm_free > done
            done = max(done, hbm_free)
            # of several iterations those wait for HBM that miss some tensor's tile
            if chunk == 1:
                share = 1.0
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
            if not gap_is_crowded:
                active[sm] -= 1
            started = state[slot, _STARTED]
            busy[inside, 2] += t - started
            if t > end:
                end = t
            if cta_log.shape[0] > 0:
                cta_log[cta, 0], cta_log[cta, 1], cta_log[cta, 2] = slot, started, t
            following = cta + n_slots if static else next_cta
            if following < n_cta:
                if not static:
                    next_cta += 1
                state[slot, _CTA] = following
                state[slot, _PHASE] = 0
                _settle(tree, leaves, slot, ((t + launch_gap) << shift) | slot)
            else:
                if gap_is_crowded:
                    active[sm] -= 1
                _settle(tree, leaves, slot, NEVER)
            continue

        w = 0.0
        if occupancy > 1:
            w = (active[sm] - 1.0) / (occupancy - 1.0)
        farthest = hbm_latency + queue if 0.0 < share < 1.0 else x
        if farthest > reach:
            return -1, farthest, 0.0
        k, f = _grid_point(grid, x)
        if segment == PROLOGUE:
            duration = _mixed(k, f, overhead, ctas[cta, CLASS], weights[inside], n_seg, w, 1.0)
            if cta < n_slots:
                for crowd, part in ((0, 1.0 - w), (1, w)):
                    duration += part * (first_extra[crowd, k] + f * (first_extra[crowd, k + 1] - first_extra[crowd, k]))
            state[slot, _PHASE] = 1
            state[slot, _SEGMENT] = -1 if has_outer else 0
        elif segment == OUTER:
            # the cost of an outer iteration itself is the last row of the period table
            duration = _mixed(k, f, period, n_seg, weights[inside], n_seg + 1, w, 1.0)
            state[slot, _SEGMENT] = 0
            state[slot, _ITERATION] = 0
        else:
            if 0.0 < share < 1.0:
                # iterations that hit and iterations that miss take each their own time, which is no line in latency
                k, f = _grid_point(grid, l2_latency + queue)
                hits, misses = (1.0 - share) * chunk, share * chunk
                duration = hits * _mixed(k, f, period, segment, weights[inside], segment, w, hits)
                k, f = _grid_point(grid, hbm_latency + queue)
                duration += misses * _mixed(k, f, period, segment, weights[inside], segment, w, misses)
            else:
                duration = chunk * _mixed(k, f, period, segment, weights[inside], segment, w, float(chunk))
            state[slot, _ITERATION] += chunk
        stalls[inside, 0 if hbm_bound else 1] += queue * parts
        stalls[inside, 2] += latency * parts
        _settle(tree, leaves, slot, ((t + np.int64(duration + 0.5)) << shift) | slot)
    # with the drain of posted writes
    return end, l2_free, hbm_free
