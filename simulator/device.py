"""The time reading across the GPU: one kernel's CTAs on its SMs, sharing L2 and HBM.

Prepares a kernel for :mod:`simulator.replay` (affine accesses as arrays, the SM reading's timing tables), chooses
how finely to replay it, and turns the outcome into cycles, bytes and waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator import replay as engine
from simulator.accesses import Access, kernel_accesses, lone_sector_bytes
from simulator.clock_share import clock_share, hidden_share
from simulator.l2_blocks import ACCUMULATE, HBM_WRITE, READ, SM_WRITE, WRITE
from simulator.launch import bundle_size, occupancy
from simulator.memory import L2
from simulator.physics import Physics
from simulator.plan import EVENT_BUDGET, Plan, plan_replay
from simulator.profile import Profile
from simulator.program import Index, Kernel, Load, Loop
from simulator.read_sharing import unseen_read_bytes
from simulator.row_locality import read_cost
from simulator.sm import TICKS_PER_CYCLE
from simulator.sm_costs import CAUSES, SmSpec
from simulator.sm_timing import SmTiming, reading_of

#: Latencies (cycles beyond the port's transfer) at which the SM reading is taken.
LATENCY_GRID_CYCLES = (200.0, 700.0, 1500.0, 4000.0, 20000.0)


@dataclass(frozen=True)
class KernelRun:
    """A kernel's replay: cycles from first start to last end, busy and waiting shares, and the CTA log if asked.

    ``empty`` is the share of all slot time without a CTA, whatever the slots wait for; ``clock_share`` the share of the
    cycles that grows with the clock.
    """

    cycles: float
    ctas_per_sm: int
    waves: float
    waits: dict[str, float]
    l2_busy_share: float
    hbm_busy_share: float
    traffic: np.ndarray
    cta_log: np.ndarray
    timings: tuple[SmTiming, ...]
    empty: float
    clock_share: float


def _loads_in_turn(kernel: Kernel) -> int:
    """Loads that a CTA without loops waits for one after another (at least 1)."""
    if kernel.trips:
        return 1
    return max(1, *(sum(isinstance(op, Load) and op.token is None for op in role.ops) for role in kernel.roles))


class _Prepared:
    """A kernel as the arrays that the replay takes."""

    def __init__(self, kernel: Kernel, l2: L2, bundle: int, plan: Plan) -> None:
        self.kernel, self.bundle = kernel, bundle
        #: CTAs of the hardware that one of the replay stands for.
        self.ctas_each = bundle * kernel.ctas_each
        self.outer = next((t.coord for t in kernel.trips if any(o.outer == t.coord for o in kernel.trips)), None)
        self.segments = [t for t in kernel.trips if t.coord != self.outer]
        first, coords = np.arange(kernel.ctas), kernel.coords
        if bundle > 1:
            first = self._bundle_starts()
        #: CTAs, or bundles of them, with those that are left out.
        self.all = len(first) if bundle > 1 else kernel.launched
        if plan.skip:
            first = np.delete(first, slice(plan.jump_at, plan.jump_at + plan.skip))
        if bundle > 1 or plan.skip:
            coords = {name: values[first] for name, values in coords.items()}
        self.coords = coords
        self.n = n = len(first)
        accesses = kernel_accesses(kernel)
        names = [t.coord for t in self.segments]
        longest: dict[str, int] = {}
        for access in accesses:
            for loop in access.loops:
                for name, _ in loop.count.terms:
                    if name in names:
                        longest[name] = max(longest.get(name, -(10**9)), loop.count.const)
        self.lost_trips = [-longest.get(name, 0) for name in names]
        self.seg_step = np.array([trip.outer_step for trip in self.segments], np.int64)
        self.outer_count = coords[self.outer] if self.outer else 1
        self.has_outer = self.outer is not None
        #: Columns of the table of CTAs, of which equal ones are kept once.
        self._columns: list[np.ndarray | int] = [0, self.outer_count, 0]
        self._columns += [np.maximum(coords[name] + longest.get(name, 0), 0) for name in names]
        self._column_of: dict[object, int] = {}
        rows = [self._row(access, l2, longest) for access in accesses]
        # position by position, in the text's order within each
        order = sorted(range(len(rows)), key=lambda a: rows[a][0])
        positions = np.array([rows[a][0] for a in order], np.int64)
        self.accesses = np.array([rows[a][1] for a in order], np.int64).reshape(len(rows), engine.ACCESS_COLUMNS)
        self.read_costs = np.array([read_cost(accesses[a].tile) for a in order], np.float64)
        bounds = np.arange(len(names) + engine.POSITIONS + 1) - engine.POSITIONS
        self.first_access = np.searchsorted(positions, bounds)
        self.ctas = np.empty((n, len(self._columns)), np.int64)
        for column, values in enumerate(self._columns):
            self.ctas[:, column] = values

    def _bundle_starts(self) -> np.ndarray:
        """First CTA of each bundle: runs of CTAs whose coordinates differ only by the next rows."""
        coords = self.kernel.coords
        step = max(a.tile.rows for a in kernel_accesses(self.kernel))
        new_run = np.diff(coords["row0"], prepend=coords["row0"][0] - 2 * step) != step
        for name, values in coords.items():
            if name != "row0":
                new_run |= np.diff(values, prepend=values[0] - 1) != 0
        starts = np.flatnonzero(new_run)
        index = np.arange(self.kernel.ctas)
        within = index - np.repeat(starts, np.diff(np.append(starts, self.kernel.ctas)))
        return np.flatnonzero(within % self.bundle == 0)

    def aligned(self, chunk: int, l2: L2) -> np.ndarray:
        """By segment, the access whose L2 blocks (``chunk`` tiles each) the chunks of iterations follow; -1: none."""
        found = np.full(len(self.segments), -1, np.int64)
        for segment in range(len(self.segments)):
            for index in range(*self.first_access[segment + engine.POSITIONS :][:2]):
                tensor, rows, step = self.accesses[index, [engine.TENSOR, engine.ROWS, engine.ROW_INNER]]
                if chunk > 1 and abs(step) == rows and l2.shape[tensor, 3] == chunk * rows:
                    found[segment] = index
        return found

    def _column(self, index: Index, loops: tuple[Loop, ...]) -> int:
        """The column of the table of CTAs that holds ``index`` at the first iterations of ``loops``."""
        zero = {loop.var for loop in loops}
        key = (index.const, tuple(term for term in index.terms if term[0] not in zero))
        if key not in self._column_of:
            self._column_of[key] = len(self._columns)
            self._columns.append(np.asarray(index.at({**self.coords, **dict.fromkeys(zero, 0)}), np.int64))
        return self._column_of[key]

    def _row(self, access: Access, l2: L2, longest: dict[str, int]) -> tuple[int, list[int]]:
        """Position and columns of ``access``, as :mod:`simulator.replay` has them."""
        place = access.tile
        position, lag, repeats, inner, outer = engine.PROLOGUE, 0, 1, None, None
        if access.position == "epilogue":
            position = engine.EPILOGUE
        names = [t.coord for t in self.segments]
        for loop in access.loops:
            trip = next((name for name, _ in loop.count.terms if name in names or name == self.outer), None)
            if trip is None:
                repeats *= max(1, loop.count.const)
            elif trip == self.outer:
                outer = loop.var
                position = engine.OUTER if position < 0 else position
            else:
                position, inner = names.index(trip), loop.var
                lag = loop.count.const - longest[trip]
        kind = ACCUMULATE if access.accumulate else WRITE if access.is_write else READ
        bundled = self.bundle > 1 and any(name == "row0" for name, _ in place.row.terms)
        row = [l2.names.index(place.tensor.name), kind, place.rows * (self.bundle if bundled else 1), place.cols]
        for index in (place.head, place.row, place.col):
            terms = dict(index.terms)
            row += [self._column(index, access.loops), *(terms.get(v, 0) if v else 0 for v in (inner, outer))]
        return position, [*row, lag, repeats, any(name == "cluster_rank" for name, _ in place.row.terms)]


def _tables(prepared: _Prepared, timings: tuple[SmTiming, ...], gap_cycles: float) -> tuple[np.ndarray, ...]:
    """Timing tables in ticks: overhead by class (length of its main loop, the last class for all longer ones), first
    extra, period by segment (last row: the outer loop's own cost). Gives each CTA its class."""
    trips = prepared.kernel.trips
    k = len(timings[0].latencies_cycles)
    scale = TICKS_PER_CYCLE * prepared.ctas_each
    n_seg = len(prepared.segments)
    classes = max(len(t.short_overhead_cycles) for t in timings) + 1
    main = timings[0].main
    if main is not None:
        prepared.ctas[:, engine.CLASS] = np.minimum(prepared.coords[trips[main].coord], classes - 1)
    overhead, first = np.zeros((2, classes, k)), np.zeros((2, k))
    period = np.zeros((2, n_seg + 1, k))
    for r in range(2):
        t = timings[min(r, len(timings) - 1)]
        overhead[r] = np.array(t.overhead_cycles) * scale
        if t.short_overhead_cycles:
            overhead[r, : len(t.short_overhead_cycles)] = np.array(t.short_overhead_cycles) * scale
        overhead[r] += gap_cycles * TICKS_PER_CYCLE * (prepared.ctas_each - 1)
        first[r] = np.array(t.first_extra_cycles) * TICKS_PER_CYCLE
        for i, trip in enumerate(trips):
            values = np.array(t.period_cycles[i]) * scale
            if trip.coord == prepared.outer:
                period[r, n_seg] = values
            else:
                s = prepared.segments.index(trip)
                period[r, s] = values
                # iterations that the text peels off its loops run in the overhead
                if trip.outer is None:
                    overhead[r] += prepared.lost_trips[s] * values
    # a longer latency never shortens anything; beyond its grid the replay extends the last slope, so it must not fall
    overhead, period = (np.maximum.accumulate(np.maximum(table, 0.0), axis=-1) for table in (overhead, period))
    return overhead, first, period


def run_kernel(
    kernel: Kernel,
    l2: L2,
    profile: Profile,
    physics: Physics,
    clock_hz: float,
    *,
    log: bool = False,
    budget: int = EVENT_BUDGET,
    flow: np.ndarray | None = None,
    flow_ticks: int = 1,
) -> KernelRun:
    """Replay ``kernel`` on ``profile`` at ``clock_hz`` with the cache state ``l2`` (which it changes).

    ``log`` replays every CTA and returns when each ran; ``flow`` ``[bins, 3]`` (zeros) then gets the bytes moved
    between SMs and L2, read from HBM and written to HBM in each bin of ``flow_ticks``.
    """
    spec = SmSpec.of(profile, physics, kernel.path, kernel.compute_dtype)
    residents = occupancy(kernel, profile)
    most = min(residents, -(-kernel.launched * kernel.ctas_each // profile.num_sms))
    counts = (1,) if residents == 1 or most == 1 else (1, residents)
    slots = profile.num_sms * residents
    persistent = kernel.schedule != "grid" and kernel.launched > slots
    gap = physics.persistent_fetch_cycles if kernel.schedule != "grid" else physics.cta_launch_cycles
    gap = gap if kernel.launch_gap_cycles is None else kernel.launch_gap_cycles
    readings = tuple(reading_of(kernel, spec, LATENCY_GRID_CYCLES, r, persistent, gap) for r in counts)
    bundle = bundle_size(kernel, slots) if not log else 1
    plan = Plan() if log else plan_replay(kernel, slots, l2.shared_capacity, budget, bundle)
    prepared = _Prepared(kernel, l2, bundle, plan)
    gap_ticks = int(gap * TICKS_PER_CYCLE)
    ticks_per_s = clock_hz * TICKS_PER_CYCLE
    hbm = profile.hbm_sustained_read_bytes_per_s * physics.hbm_read_efficiency
    hbm_write_ticks = ticks_per_s / hbm * (1.0 + physics.hbm_write_penalty)
    before = l2.snapshot()
    if kernel.repeated is not None:
        prepared.ctas[:, engine.APART] = kernel.repeated
    elif plan.unit:
        prepared.ctas[plan.jump_at - plan.unit : plan.jump_at, engine.APART] = 1
    flow = np.zeros((0, 3), np.int64) if flow is None else flow
    grid = np.array(LATENCY_GRID_CYCLES) * TICKS_PER_CYCLE
    factor = physics.memory_latency_factor
    l2_latency, hbm_latency = (s * factor * ticks_per_s for s in (profile.l2_latency_s, profile.hbm_latency_s))
    # every point of the grid is read once a launch needs it: a launch that turns out to is replayed from its start,
    # which costs more than to read a CTA without loops
    known = max(reading.points for reading in readings)
    points = max(known, _points_to(grid, hbm_latency)) if kernel.trips else len(grid)
    saved = l2.clone() if points < len(grid) else ()
    while True:
        timings = tuple(reading.timing(points) for reading in readings)
        overhead, first, period = _tables(prepared, timings, gap)
        log_rows = np.zeros((kernel.ctas if log or kernel.times > 1 else 0, 3), np.int64)
        # entry 0: everything else, entry 1: the unit that stands for those left out
        weights = np.zeros((2, 2, len(prepared.segments) + 2, points))
        stalls, busy, unit_traffic = np.zeros((2, 3)), np.zeros((2, 3)), np.zeros_like(l2.counters)
        leaves = 1 << (slots - 1).bit_length()
        end, l2_free, hbm_free = engine.replay(
            kernel.schedule == "static",
            slots,
            profile.num_sms,
            prepared.has_outer,
            prepared.ctas,
            prepared.seg_step,
            np.full(len(prepared.segments), plan.chunk, np.int64),
            prepared.aligned(plan.chunk, l2),
            prepared.accesses,
            prepared.read_costs,
            prepared.first_access,
            l2.shape,
            l2.capacity,
            l2.cache,
            l2.counters,
            unit_traffic,
            grid,
            overhead,
            first,
            period,
            residents,
            prepared.ctas_each * _loads_in_turn(kernel),
            gap_ticks,
            not persistent and not kernel.trips,
            ticks_per_s / (profile.l2_bandwidth_bytes_per_s * physics.l2_bandwidth_fraction),
            ticks_per_s / hbm,
            hbm_write_ticks,
            l2_latency,
            hbm_latency,
            TICKS_PER_CYCLE / profile.l2_to_sm_bandwidth_bytes_per_cycle_per_sm,
            log_rows,
            flow,
            flow_ticks,
            weights,
            stalls,
            busy,
            np.zeros((slots, engine.SLOT_COLUMNS), np.int64),
            np.zeros(profile.num_sms, np.int64),
            np.zeros(leaves, np.int64),
            np.zeros(2 * leaves, np.int64),
        )
        if end >= 0:
            break
        points = _points_to(grid, l2_free)
        l2.restore(saved)
        flow[...] = 0
    # what the CTAs left out did: as many times again what the unit before them did, or those that stand for them
    repeats = plan.skip // plan.unit if plan.unit else kernel.times - 1
    again = unit_traffic.copy()
    # what repeats cannot write back more than it writes, nor less where it writes every byte once; one unit also evicts
    # what the ones before it left, or leaves some to the next one
    again[HBM_WRITE] = np.minimum(again[HBM_WRITE], again[SM_WRITE])
    if plan.unit:
        once = again[SM_WRITE] * prepared.all <= l2.shape[:, [0, 1, 2, 8]].prod(axis=1) * plan.unit
        again[HBM_WRITE] = np.where(once, again[SM_WRITE], again[HBM_WRITE])
        busy[1, 1] += hbm_write_ticks * (again[HBM_WRITE] - unit_traffic[HBM_WRITE]).sum()
    l2.counters += unit_traffic + repeats * again
    l2_busy, hbm_busy, slot_busy = (busy[0] + (1 + repeats) * busy[1]).tolist()
    unit_ticks = np.array([(busy[1, 2] + plan.unit * gap_ticks) / slots, busy[1, 0], busy[1, 1]])
    steps = (repeats * unit_ticks).tolist()
    if kernel.times > 1:
        steps[0] = _later_end(log_rows, prepared.ctas[:, engine.APART], slots, gap_ticks, repeats) - end
    # the launch ends when its posted writes have reached L2 and what they displaced has reached HBM
    last_cta = float(end) + steps[0]
    end = max(last_cta, l2_free + steps[1], hbm_free + steps[2])
    drain = 1.0 - last_cta / end if end else 0.0
    between = max(0, prepared.all - slots) * gap_ticks / (slots * end) if end else 0.0
    outside = {"hbm" if hbm_free + steps[2] >= l2_free + steps[1] else "l2": drain, "latency": between}
    traffic = l2.snapshot() - before
    for name, unseen in unseen_read_bytes(kernel, profile).items():
        tensor = l2.names.index(name)
        traffic[0, tensor] -= unseen
        # without a cache what is asked once is fetched once
        traffic[2, tensor] = min(traffic[2, tensor], traffic[0, tensor])
    # a slice of L2 finds 64 bytes a cycle: a sector alone takes the time of two
    lone = 0
    for name, (sent, beyond) in lone_sector_bytes(kernel).items():
        traffic[0, l2.names.index(name)] += beyond
        lone += sent
    # a repeat may hold bytes whose transfer its time does not: no launch moves bytes faster than L2 and HBM do
    floor = ticks_per_s * max(
        float(traffic[:2].sum() + lone) / (profile.l2_bandwidth_bytes_per_s * physics.l2_bandwidth_fraction),
        float(traffic[2:].sum()) / profile.hbm_bandwidth_bytes_per_s,
    )
    replayed, end = end, max(end, floor)
    busy_shares = {name: ticks / replayed if end else 0.0 for name, ticks in (("hbm", hbm_busy), ("l2", l2_busy))}
    weights, stalls = (part[0] + (1 + repeats) * part[1] for part in (weights, stalls))
    waits = _waits(weights, stalls, timings, prepared, replayed * slots, slot_busy, outside)
    _count_behind(waits, busy_shares)
    latencies = np.array(LATENCY_GRID_CYCLES[:points])
    busiest = max(busy_shares.values()) if end == replayed else 1.0
    return KernelRun(
        end / TICKS_PER_CYCLE,
        residents,
        kernel.launched * kernel.ctas_each / slots,
        {cause: float(share) for cause, share in waits.items()},
        busy_shares["l2"],
        busy_shares["hbm"],
        traffic,
        log_rows,
        timings,
        max(0.0, 1.0 - slot_busy / (replayed * slots)) if end else 0.0,
        clock_share(weights, latencies, overhead, period, drain, between, busiest),
    )


def _points_to(grid: np.ndarray, latency_ticks: float) -> int:
    """Points of ``grid`` up to the one beyond ``latency_ticks`` (at least two), or all."""
    return min(len(grid), max(2, int(np.searchsorted(grid, latency_ticks)) + 1))


def _later_end(log_rows: np.ndarray, apart: np.ndarray, slots: int, gap_ticks: int, repeats: int) -> float:
    """Ticks at which the last slot ends when each takes its CTAs that are booked ``apart`` ``repeats`` more times."""
    slot, start, end = log_rows.T
    more = np.bincount(slot, apart * (end - start + gap_ticks), slots) * repeats
    ends = np.zeros(slots)
    np.maximum.at(ends, slot, end)
    return float((ends + more).max())


def _waits(
    weights: np.ndarray,
    stalls: np.ndarray,
    timings: tuple[SmTiming, ...],
    prepared: _Prepared,
    slot_ticks: float,
    slot_busy: float,
    outside: dict[str, float],
) -> dict[str, float]:
    """Share of all slot time by cause; ``imbalance`` is slots without a CTA that nothing else explains.

    ``outside`` is what slots without a CTA wait for, as far as it is known: the launch of their next one, and after the
    last one the drain of posted writes (no CTA waits for those here; on the hardware they would stand behind them).
    """
    by_cause = np.zeros(len(CAUSES))
    trips = prepared.kernel.trips
    for r in range(2):
        t = timings[min(r, len(timings) - 1)]
        for i, trip in enumerate(trips):
            row = len(prepared.segments) + 1 if trip.coord == prepared.outer else prepared.segments.index(trip)
            by_cause += _weighted(weights[r, row], t.waits[i])
        by_cause += _weighted(weights[r, len(prepared.segments)], t.overhead_waits)
    total = by_cause.sum()
    busy_share = min(1.0, slot_busy / slot_ticks) if slot_ticks else 0.0
    shares = dict(zip(CAUSES, by_cause / total * busy_share if total else by_cause, strict=True))
    memory = shares.pop("memory")
    stalled = stalls.sum() or 1.0
    out = {k: float(v) for k, v in shares.items()}
    out["hbm"] = float(memory * stalls[0] / stalled)
    out["l2"] = float(memory * stalls[1] / stalled)
    out["latency"] += float(memory * stalls[2] / stalled)
    left = max(0.0, 1.0 - busy_share)
    for cause, share in outside.items():
        out[cause] += min(share, left)
        left -= min(share, left)
    out["imbalance"] = float(left)
    return out


def _weighted(weights: np.ndarray, waits: tuple[tuple[float, ...], ...]) -> np.ndarray:
    """``waits`` (by grid point and cause) in sum: grid points beyond those that a launch needed change no bit of it."""
    total = np.zeros(len(CAUSES))
    for weight, row in zip(weights, waits, strict=True):
        total += weight * np.array(row)
    return total


def _count_behind(waits: dict[str, float], busy: dict[str, float]) -> None:
    """Count what CTAs do while a memory has no idle time as waiting for that memory: done faster, it would save nothing
    (``busy``: share of the launch's time by memory)."""
    memory = max(busy, key=lambda name: busy[name])
    hidden = hidden_share(busy[memory])
    if hidden == 0.0:
        return
    for cause in ("tensor", "exp", "fp32", "smem", "latency"):
        waits[memory] += hidden * waits[cause]
        waits[cause] *= 1.0 - hidden
