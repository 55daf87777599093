"""What share of a launch's cycles grows with the SM clock: memory's rates and latencies are in seconds, all else in
cycles."""

from __future__ import annotations

from math import fsum

import numpy as np

#: Shares of busy time between which a memory begins to be, and is, what everything else hides behind.
NO_IDLE_TIME = (0.85, 0.95)


def hidden_share(busy: float) -> float:
    """How far everything else hides behind a memory that is busy for this share of the time: 0 to 1."""
    low, high = NO_IDLE_TIME
    return min(1.0, max(0.0, (busy - low) / (high - low)))


def clock_share(
    weights: np.ndarray,
    grid: np.ndarray,
    overhead: np.ndarray,
    period: np.ndarray,
    drain: float,
    between: float,
    busy: float,
) -> float:
    """By how much of its own change the clock changes a launch's cycles: 1 where a memory that is ``busy`` all the time
    sets the pace, else what a longer latency, in cycles, costs its CTAs.

    ``weights`` ``[crowd, row, k]`` say how often the replay used the entries of the timing tables (``overhead`` and
    ``period``, as :func:`simulator.replay.replay` has them, over the latencies ``grid``). ``drain`` is the share of the
    time that passes after the last CTA, for memory, ``between`` the share between CTAs, which is cycles.
    """
    last = period.shape[1] - 1
    values = np.concatenate([period[:, :last], overhead[:, -1:], period[:, last:]], axis=1)
    slopes = np.diff(values) / np.diff(grid)
    # what lies between two points uses both; most lies in the first interval, and has the slope there at either
    slopes = np.concatenate([slopes[..., :1], slopes], axis=-1)
    # exact sums: points of the grid that the launch did not need change no bit
    total = fsum((weights * values).flat)
    waiting = min(1.0, fsum((weights * grid * slopes).flat) / total) if total else 0.0
    grows = drain + max(0.0, 1.0 - drain - between) * waiting
    hidden = hidden_share(busy)
    return grows * (1.0 - hidden) + hidden
