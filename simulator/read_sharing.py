"""Reads that L2 never sees: SMs of a TPC that ask for the same lines in step send one request.

Counted on an H200 (``micro_read_sharing.csv``): two SMs of one TPC that read the same lines up to some 300 cycles apart
cost L2 one read each line, at 1,200 cycles apart three quarters of it is still shared; SMs of different TPCs share
only within a few tens of cycles, which no attention kernel keeps up. Consecutive CTAs land on the SMs of one TPC.
Loops that start in step drift apart like a random walk, so the share falls with the square root of their length.
"""

from __future__ import annotations

import numpy as np

from simulator.accesses import access_bytes, index_values, kernel_accesses
from simulator.program import Index, Kernel, once_a_kernel


@once_a_kernel
def unseen_read_bytes(kernel: Kernel, sharers: int) -> dict[str, int]:
    """Bytes of ``kernel``'s loads, by tensor, that a neighbouring SM's equal load already brings.

    ``sharers`` is the number of SMs whose equal reads L2 sees once (1: none do). Only loops count: a CTA's neighbour
    walks them in step when it starts at the same tile and makes as many iterations.
    """
    unseen: dict[str, int] = {}
    if sharers < 2 or kernel.in_step_iterations <= 0 or kernel.ctas < 2:
        return unseen
    # K and V are walked alike
    shares: dict[tuple[Index, ...], np.ndarray] = {}
    for access in kernel_accesses(kernel):
        if access.loops and not access.is_write:
            name, place = access.tile.tensor.name, access.tile
            walk = (place.head, place.row, place.col, *(loop.count for loop in access.loops))
            if walk not in shares:
                shares[walk] = _shared(walk, {loop.var: 0 for loop in access.loops}, kernel, sharers)
            unseen[name] = unseen.get(name, 0) + int((access_bytes(access, kernel) * shares[walk]).sum())
    return unseen


def _shared(walk: tuple[Index, ...], first: dict[str, int], kernel: Kernel, sharers: int) -> np.ndarray:
    """By CTA, the share of the reads along ``walk`` that a neighbour's equal ones bring; ``first`` are the loop
    variables at its start."""
    env = dict(kernel.coords) | first
    starts = np.stack([np.broadcast_to(index_values(index, env), (kernel.ctas,)) for index in walk])
    # of the sharers - 1 SMs beside it, how many run the same walk: a CTA is first, second ... of its TPC as often
    in_step = np.zeros(kernel.ctas)
    for distance in range(1, min(sharers, kernel.ctas)):
        equal = (starts[:, distance:] == starts[:, :-distance]).all(axis=0) * ((sharers - distance) / sharers)
        in_step[distance:] += equal
        in_step[:-distance] += equal
    drift = np.sqrt(np.maximum(starts[-1], 0) / kernel.in_step_iterations)
    share: np.ndarray = (in_step / sharers) / (1.0 + drift)
    return share
