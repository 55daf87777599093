"""How finely a kernel is replayed: every iteration where that is cheap, else coarser events or repeating parts.

A launch of a million-token attention has 10**9 iterations. Three shortcuts, each tested against the full replay:
several iterations an event (``chunk``), blocks of the L2 as large as a chunk, and launches that repeat themselves
head after head of which only the first and the last heads are replayed (``jump_at``, ``skip``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from simulator.accesses import Access, access_bytes, index_values, kernel_accesses, tensor_table
from simulator.memory import WIDE_BLOCK_ROWS, WIDE_COLS
from simulator.problem import DTYPE_BYTES
from simulator.program import Index, Kernel, once_a_kernel

#: Events above which a replay is coarsened (several iterations an event) or extrapolated (repeating waves).
EVENT_BUDGET = 250_000
#: How much more may be spent where the L2 is crowded and misses depend on the CTAs' relative positions.
CROWDED_BUDGET_FACTOR = 4
#: How much of it is enough elsewhere, where misses hardly depend on the iterations an event stands for as long as
#: those are few: up to so many.
UNCROWDED_BUDGET_SHARE, UNCROWDED_CHUNK = 0.2, 2
#: Share of the L2's capacity that an event may read there: far larger blocks leave the L2 before they are read again,
#: though their tiles would not (1M tokens: 70 times the HBM bytes).
CHUNK_SHARE = 0.125
#: Iterations an event from which on more of them lose hardly more misses of long streams.
COARSE_CHUNK = 24
#: Share of the budget above which repeating parts of a launch are left out.
JUMP_SHARE = 0.1
#: Capacities of the L2 that a launch touches before parts of it are left out.
FILL = 1.5
#: Waves that are taken as one unit: what happens once a wave falls on one side of a unit's end or the other.
UNIT_WAVES = 16
#: Iterations of a slot that are enough for a unit of fewer waves.
UNIT_ITERATIONS = 2000
#: The same for launches of which every CTA has its own bytes: of CTAs without loops, and of those whose passes over
#: their own bytes find them in L2 or not, as the phases have it that they drift to.
OWN_UNIT_WAVES, DRIFTING_UNIT_WAVES = 4, 64
#: Share of a unit that is too short a start to be told from the rest: it is part of the unit.
SHORT_START = 0.1
#: Waves at a launch's end that are not like the others.
END_WAVES = 2
#: Share of a launch that is worth leaving out, and where units are waves, which err less.
LEAST_SKIP, LEAST_SKIP_OF_WAVES = 0.5, 0.25
#: Share of a launch's waves by which what is left out may differ from a whole number of them.
PART_OF_WAVE = 0.003
#: Iterations of loops that keep one event each.
SHORT_LOOP = 16
#: Capacities of the L2 beyond which nothing is left of a stream.
FAR_BEYOND = 4
#: Share of the L2's capacity up to which a tensor that all CTAs read stays there.
STAYS = 0.1
#: A tensor is shared by the CTAs in flight when they read it more often than this.
ONCE = 1.1


@dataclass(frozen=True)
class Plan:
    """Iterations an event, and which CTAs are left out: ``skip`` of them from ``jump_at`` on, which do as often again
    what the ``unit`` CTAs before ``jump_at`` do (0: none)."""

    chunk: int = 1
    jump_at: int = 0
    unit: int = 0
    skip: int = 0


@once_a_kernel
def iterations_of(kernel: Kernel) -> np.ndarray:
    """Iterations of each CTA, all trips together (nested ones multiplied out)."""
    outer = next((t.coord for t in kernel.trips if any(o.outer == t.coord for o in kernel.trips)), None)
    rounds = kernel.coords[outer] if outer else 1
    total = np.zeros(kernel.ctas, np.int64)
    for trip in kernel.trips:
        if trip.coord == outer:
            continue
        inner = np.asarray(kernel.coords[trip.coord], np.int64)
        if trip.outer and trip.outer_step:
            # counts change by outer_step an outer iteration: an arithmetic series
            total += np.maximum(inner * rounds + trip.outer_step * (rounds * (rounds - 1) // 2), 0)
        else:
            total += inner * (rounds if trip.outer else 1)
    return total


def shared_streams(kernel: Kernel, first: int, last: int) -> tuple[int, int]:
    """Bytes of one head's tensors that CTAs ``first .. last`` share inside their loops (K and V): each part read by
    several of them; and of how many heads. That is what reuse in L2 depends on."""
    part = _part(kernel, first, last)
    heads = len(np.unique(part.coords.get("kv_head", part.coords.get("q_head", np.zeros(1)))))
    shared = {}
    for access in kernel_accesses(kernel):
        tensor = access.tile.tensor
        if access.loops and not access.is_write:
            once = heads * (tensor.bytes // tensor.heads)
            if access_bytes(access, part).sum() > ONCE * once:
                shared[tensor.name] = tensor
    return sum(t.bytes // t.heads for t in shared.values()), heads


@once_a_kernel
def crowding(kernel: Kernel, slots: int, capacity_bytes: int) -> tuple[int, bool]:
    """Bytes of one head that CTAs in flight share, and whether such streams crowd the L2.

    In flight are as many CTAs as there are slots, from the middle of the launch. Streams crowd the L2 when those in
    flight need half of it, or when those between a head's first and last use (the heads of other sequences and what
    the group's earlier heads left) come near its capacity: far beyond it nothing is left, whatever the CTAs' phases.
    """
    n = kernel.ctas
    first = max(0, (n - slots) // 2)
    per_head, heads = shared_streams(kernel, first, first + slots)
    if per_head * heads > capacity_bytes // 2:
        return per_head, True
    at = kernel.coords.get("kv_head", kernel.coords.get("q_head", np.zeros(n)))
    uses = np.flatnonzero(at == at[n // 2])
    between, heads = shared_streams(kernel, int(uses[0]), int(uses[-1]) + 1)
    return per_head, capacity_bytes // 2 < between * heads < FAR_BEYOND * capacity_bytes


@once_a_kernel
def repeating(kernel: Kernel, slots: int, heads_share: bool) -> int:
    """The fewest CTAs (at least two waves) after which the launch repeats itself on other heads; all, if it does not.

    ``heads_share`` says that query heads of one KV head find each other's K and V in L2, so a repeat must also
    repeat the walk over KV heads.
    """
    n = kernel.ctas
    heads = kernel.coords.get("kv_head" if heads_share else "q_head", kernel.coords.get("q_head"))
    if heads is None or n < 6 * slots or kernel.times > 1:
        return n
    # a kernel without loops does the same in every CTA
    signature = np.vstack([kernel.coords[t.coord] for t in kernel.trips] or [np.zeros(n, np.int64)])
    for parts in range(min(n // (2 * slots), 4096), 1, -1):
        if n % parts:
            continue
        period = n // parts
        shift = heads[period:] - heads[:-period]
        one_step = shift[0] != 0 and (shift == shift[0]).all()
        if one_step and np.array_equal(signature[:, period:], signature[:, :-period]):
            return period
    return n


@once_a_kernel
def own_unit(kernel: Kernel, slots: int, capacity_bytes: int) -> tuple[int, int]:
    """CTAs (whole waves) that stand for as many others where all do the same to bytes of their own, and after how many
    the L2 is full; (0, 0) where they don't.

    Bytes are a CTA's own if no other touches them before several capacities of the L2 have gone by, or if each reads so
    many itself; a small tensor that all read does not matter.
    """
    n = kernel.ctas
    if n < 6 * slots or kernel.times > 1 or not _all_equal(kernel):
        return 0, 0
    ranges = {name: (int(values.min()), int(values.max())) for name, values in kernel.coords.items()}
    if not all(_alike(access, ranges) for access in kernel_accesses(kernel)):
        return 0, 0
    seen = min(n, slots)
    middle = _part(kernel, (n - seen) // 2, (n + seen) // 2)
    each = max(1.0, sum(int(access_bytes(access, middle).sum()) for access in kernel_accesses(middle)) / seen)
    if each > FAR_BEYOND * capacity_bytes:
        # nothing that others left outlives a CTA
        iterations = int(iterations_of(kernel).sum())
        waves = ceil(UNIT_ITERATIONS * n / iterations) if iterations else 0
        return slots * max(OWN_UNIT_WAVES, waves), ceil(FILL * capacity_bytes / each)
    window = ceil(FAR_BEYOND * capacity_bytes / each)
    if kernel.schedule == "static" or window > n:
        return 0, 0
    part = _part(kernel, (n - window) // 2, (n - window) // 2 + window)
    env = dict(part.coords)
    for access in kernel_accesses(part):
        if not (kernel.trips or access.is_write) and access.tile.tensor.bytes <= STAYS * capacity_bytes:
            continue
        place, zero = access.tile, dict.fromkeys((loop.var for loop in access.loops), 0)
        head, row, col = (index_values(index, env | zero) for index in (place.head, place.row, place.col))
        starts = np.broadcast_to((head * place.tensor.rows + row) * place.tensor.cols + col, window)
        steps = np.diff(starts)
        if not ((steps > 0).all() or np.unique(starts).size == window):
            return 0, 0
    drifting = kernel.trips and slots * each > capacity_bytes // 2
    fill = _filling(kernel, capacity_bytes)
    return slots * max(DRIFTING_UNIT_WAVES if drifting else OWN_UNIT_WAVES, -(-fill // slots)), fill


def _filling(kernel: Kernel, capacity_bytes: int) -> int:
    """CTAs after which the L2 is full, each as good as another."""
    touched = sum(tensor.bytes for tensor in tensor_table([kernel]).values())
    return ceil(FILL * capacity_bytes * kernel.ctas / max(1, touched))


def _all_equal(kernel: Kernel) -> bool:
    """Whether all CTAs have the same iterations."""
    return all((kernel.coords[trip.coord] == kernel.coords[trip.coord][0]).all() for trip in kernel.trips)


def _alike(access: Access, ranges: dict[str, tuple[int, int]]) -> bool:
    """Whether a tensor's end cuts the tiles of ``access`` of no CTA or of all alike, with the CTAs' coordinates in
    ``ranges``."""
    place, env = access.tile, dict(ranges)
    for loop in access.loops:
        env[loop.var] = (0, max(0, _range(loop.count, env)[1] - 1))
    tensor = place.tensor
    # a cluster's CTAs are parts of one
    whole = {name for name, (least, most) in ranges.items() if least == most or name == "cluster_rank"}
    for index, size, limit in (
        (place.head, 1, tensor.heads),
        (place.row, place.rows, tensor.rows),
        (place.col, place.cols, tensor.cols),
    ):
        low, high = _range(index, env)
        varies = any(name in ranges and name not in whole for name, _ in index.terms)
        if varies and (low < 0 or high + size > limit):
            return False
    return True


def _range(index: Index, ranges: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """The least and the greatest value of ``index`` with its variables in ``ranges``."""
    low = high = index.const
    for name, factor in index.terms:
        ends = [factor * end for end in ranges[name]]
        low, high = low + min(ends), high + max(ends)
    return low, high


def _part(kernel: Kernel, first: int, last: int) -> Kernel:
    """``kernel`` with CTAs ``first .. last`` only."""
    coords = {name: values[first:last] for name, values in kernel.coords.items()}
    return replace(kernel, coords=coords, times=1, repeated=None)


def blocks_an_iteration(kernel: Kernel) -> float:
    """Blocks of the L2 that an iteration touches, in those of an iteration that loads one tile of K and V each."""
    reads = [a.tile for a in kernel_accesses(kernel) if a.loops and not a.is_write and a.tile.tensor.cols > WIDE_COLS]
    return float(max(1.0, *(place.rows / (2 * WIDE_BLOCK_ROWS) for place in reads), 1.0))


def _bytes_an_iteration(kernel: Kernel) -> int:
    """Bytes that an iteration reads, of tensors whose blocks in the L2 grow with what an event stands for."""
    most: dict[str, int] = {}
    for access in kernel_accesses(kernel):
        place = access.tile
        if access.loops and not access.is_write and place.tensor.cols <= WIDE_COLS:
            # a cluster's CTAs read a part of the tile each
            rows = max(place.rows, *(abs(step) for name, step in place.row.terms if name == access.loops[-1].var), 0)
            size = rows * place.cols * DTYPE_BYTES[place.tensor.dtype]
            most[place.tensor.name] = max(most.get(place.tensor.name, 1), size)
    return sum(most.values()) or 1


@once_a_kernel
def least_events(kernel: Kernel) -> int:
    """Events that a replay of ``kernel`` has however many iterations an event stands for."""
    if _short_loops(kernel):
        return int(iterations_of(kernel).sum()) + 2 * kernel.ctas
    outer = next((t.coord for t in kernel.trips if any(o.outer == t.coord for o in kernel.trips)), None)
    return 2 * kernel.ctas + (2 * int(kernel.coords[outer].sum()) if outer else 0)


def _short_loops(kernel: Kernel) -> bool:
    """Whether all loops (but those around others) are too short for events of several iterations."""
    inner = [t for t in kernel.trips if not any(o.outer == t.coord for o in kernel.trips)]
    return max((int(kernel.coords[t.coord].max()) for t in inner), default=0) <= SHORT_LOOP


@once_a_kernel
def plan_replay(kernel: Kernel, slots: int, capacity_bytes: int, budget: int, bundle: int = 1) -> Plan:
    """The plan for ``kernel`` on ``slots`` CTA slots and an L2 that holds ``capacity_bytes`` of what all SMs read;
    ``bundle`` CTAs count as one."""
    n = kernel.ctas
    iterations = int(iterations_of(kernel).sum())
    if bundle > 1:
        # no loops, and the CTAs of a bundle follow each other
        if 2 * n <= budget * JUMP_SHARE * bundle or not _even_bundles(kernel, bundle):
            return Plan()
        left_out = _waves_left_out(kernel, slots * bundle, capacity_bytes)
        return Plan(1, *(ctas // bundle for ctas in left_out))
    events = iterations + 2 * n
    if events <= budget * JUMP_SHARE:
        return Plan()
    # where streams crowd the L2, misses depend on the CTAs' phases: replay finely
    per_head, crowded = crowding(kernel, slots, capacity_bytes)
    share = UNCROWDED_BUDGET_SHARE if _all_equal(kernel) else 1
    fine = int(budget * (CROWDED_BUDGET_FACTOR if crowded else share))
    jump_at = unit = skip = 0
    # where phases matter they need time to drift apart: nothing is left out that can be afforded
    if events > (fine if crowded else budget * JUMP_SHARE):
        jump_at, unit, skip = _waves_left_out(kernel, slots, capacity_bytes)
        if not unit:
            jump_at, unit, skip = _heads_left_out(kernel, slots, capacity_bytes, per_head)
        iterations = iterations * (n - skip) // n
        n -= skip
    # iterations that touch many blocks take as long as several others
    cost = iterations * blocks_an_iteration(kernel)
    # two iterations an event lose misses where phases matter, and take almost as long as one
    affordable = cost + 2 * n <= fine or iterations + 2 * n <= min(fine, budget)
    # nor do loops that are short: a few passes over a row, of which the first misses (8 % of softmax's time)
    if affordable or _short_loops(kernel):
        return Plan(1, jump_at, unit, skip)
    chunk = _chunk(int(cost), n, fine)
    if crowded:
        most = max(1, int(CHUNK_SHARE * capacity_bytes / _bytes_an_iteration(kernel)))
        # a stream of several capacities leaves the L2 whole: what is found there says which CTAs are in step, not tiles
        coarse = per_head > FAR_BEYOND * capacity_bytes and (chunk >= COARSE_CHUNK or _all_equal(kernel))
        chunk = most if coarse else min(chunk, most)
    # who takes the last wave's CTAs depends on when others end, where those do not all do the same
    if not crowded and _all_equal(kernel):
        chunk = max(_chunk(int(cost), n, budget), min(chunk, UNCROWDED_CHUNK))
    return Plan(chunk, jump_at, unit, skip)


def _chunk(iterations: int, ctas: int, budget: int) -> int:
    """Iterations an event of which a launch of so many stays within ``budget``, starts and ends included."""
    return max(1, -(-iterations // max(budget // 2, budget - 2 * ctas)))


def _even_bundles(kernel: Kernel, bundle: int) -> bool:
    """Whether the rows of every head make the same number of whole bundles."""
    rows = kernel.coords["row0"]
    each = int(np.argmax(rows[1:] <= rows[:-1])) + 1
    return each % bundle == 0 and kernel.ctas % each == 0 and bool((rows.reshape(-1, each) == rows[:each]).all())


def _waves_left_out(kernel: Kernel, slots: int, capacity_bytes: int) -> tuple[int, int, int]:
    """Where to leave CTAs out of a launch whose waves are one like the other once they have drifted, what stands for
    them, and how many; zeros: nowhere."""
    n = kernel.ctas
    unit, fill = own_unit(kernel, slots, capacity_bytes)
    if not unit:
        return 0, 0, 0
    skip = _left_out(n, slots, unit, n - 2 * unit - max(slots * END_WAVES, fill))
    return (2 * unit, unit, skip) if skip >= LEAST_SKIP_OF_WAVES * n else (0, 0, 0)


def _heads_left_out(kernel: Kernel, slots: int, capacity_bytes: int, per_head: int) -> tuple[int, int, int]:
    """The same where it repeats itself on other heads."""
    n = kernel.ctas
    unit = repeating(kernel, slots, per_head <= capacity_bytes)
    waves = min(UNIT_WAVES * slots, ceil(UNIT_ITERATIONS * slots * n / max(1, int(iterations_of(kernel).sum()))))
    unit *= -(-waves // unit)
    fill = _filling(kernel, capacity_bytes)
    part_of_unit = fill < SHORT_START * unit and per_head > FAR_BEYOND * capacity_bytes
    start = 0 if part_of_unit else max(1, -(-fill // unit))
    before = unit * max(1 + start, -(-3 * slots // unit))
    skip = _left_out(n, slots, unit, n - before - unit)
    return (before, unit, skip) if skip >= LEAST_SKIP * n else (0, 0, 0)


def _left_out(n: int, slots: int, unit: int, most: int) -> int:
    """How many of ``n`` CTAs, in units and at most ``most``, to leave out; 0: none.

    The last wave is as full as it would be if what is left out is a number of whole waves.
    """
    for left_out in range(most // unit * unit, 0, -unit):
        waves = left_out / slots
        if abs(waves - round(waves)) <= PART_OF_WAVE * n / slots:
            return left_out
    return 0
