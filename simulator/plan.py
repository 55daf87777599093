"""How finely a kernel is replayed: every iteration where that is cheap, else coarser events or repeating parts.

A launch of a million-token attention has 10**9 iterations. Three shortcuts, each tested against the full replay:
several iterations an event (``chunk``), blocks of the L2 as large as a chunk, and launches that repeat themselves
head after head of which only the first heads are replayed (``simulate``, ``repeat``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.accesses import kernel_accesses
from simulator.program import Kernel

#: Events above which a replay is coarsened (several iterations an event) or extrapolated (repeating waves).
EVENT_BUDGET = 250_000
#: How much more may be spent where the L2 is crowded and misses depend on the CTAs' relative positions.
CROWDED_BUDGET_FACTOR = 6


@dataclass(frozen=True)
class Plan:
    """CTAs replayed, CTAs of one repeat (0: all are replayed), iterations an event."""

    simulate: int
    repeat: int
    chunk: int


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


def stream_bytes_per_head(kernel: Kernel) -> int:
    """Bytes of one head's tensors that CTAs read inside their loops (K and V): what reuse in L2 depends on."""
    streams = {a.tile.tensor.name: a.tile.tensor for a in kernel_accesses(kernel) if a.loops and not a.is_write}
    return sum(t.bytes // t.heads for t in streams.values())


def repeating(kernel: Kernel, slots: int, heads_share: bool) -> int:
    """The fewest CTAs (at least two waves) after which the launch repeats itself on other heads; all, if it does not.

    ``heads_share`` says that query heads of one KV head find each other's K and V in L2, so a repeat must also
    repeat the walk over KV heads.
    """
    n = kernel.ctas
    heads = kernel.coords.get("kv_head" if heads_share else "q_head", kernel.coords.get("q_head"))
    if heads is None or n < 6 * slots:
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


def plan_replay(kernel: Kernel, slots: int, capacity_bytes: int, budget: int, bundle: int = 1) -> Plan:
    """The plan for ``kernel`` on ``slots`` CTA slots and an L2 of ``capacity_bytes``; ``bundle`` CTAs count as one."""
    n = kernel.ctas
    iterations = int(iterations_of(kernel).sum())
    events = iterations // bundle + 2 * n // bundle
    if events <= budget or bundle > 1:
        return Plan(n, 0, max(1, iterations // bundle // max(1, budget)))
    per_head = stream_bytes_per_head(kernel)
    # where K and V of the heads in flight crowd the L2, misses depend on the CTAs' phases: replay finely
    heads = max(1, len(np.unique(kernel.coords.get("kv_head", np.zeros(1)))))
    in_flight = 1 + slots * heads // n
    crowded = per_head * in_flight > capacity_bytes // 2
    if crowded:
        budget *= CROWDED_BUDGET_FACTOR
    simulate, repeat = n, 0
    if events > budget:
        unit = repeating(kernel, slots, heads_share=per_head <= capacity_bytes)
        # nothing is left of one head for the next when its K and V exceed the L2: one head stands for all
        least = 1 if per_head > capacity_bytes and unit >= 3 * slots else 2
        keep = max(least, budget * unit // events, -(-3 * slots // unit))
        if keep * unit < n:
            simulate, repeat = keep * unit, unit
            iterations = iterations * simulate // n
    return Plan(simulate, repeat, max(1, -(-iterations // max(budget // 2, budget - 2 * simulate))))
