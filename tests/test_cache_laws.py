"""The L2 model's own laws, over random traces: least recently used, stack property, conservation of bytes."""

from itertools import pairwise

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from law_settings import laws

from simulator.l2_blocks import DIRTY, HELD, LAST_INSIDE, READ, WRITE, access_tile
from simulator.memory import L2
from simulator.program import Tensor


def cache_of(capacity: int, rows: int = 4096, block_rows: int = 64, ways: int | None = None) -> L2:
    """An empty cache over one tensor of ``rows`` x 128 bf16, fully associative unless ``ways`` is given."""
    return L2.of({"X": Tensor("X", 2, rows, 128, "bf16", block_rows=block_rows)}, capacity, ways=ways)


def touch_rows(l2: L2, head: int, row: int, rows: int, write: bool = False) -> tuple[int, int]:
    """Access full-width rows; returns (bytes, bytes missing)."""
    return access_tile(0, head, row, rows, 0, 128, WRITE if write else READ, 0, l2.shape, l2.cache, l2.counters)


TRACES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 63)), min_size=1, max_size=300)


def reference_lru(trace, capacity_blocks: int) -> int:
    """Misses of a textbook LRU."""
    order: list = []
    misses = 0
    for block in trace:
        if block in order:
            order.remove(block)
        else:
            misses += 1
            if len(order) == capacity_blocks:
                order.pop(0)
        order.append(block)
    return misses


@laws(150)
@given(trace=TRACES, blocks=st.integers(1, 80))
def test_the_cache_is_least_recently_used(trace, blocks):
    size = 64 * 128 * 2
    l2 = cache_of(blocks * size)
    for head, block in trace:
        touch_rows(l2, head, 64 * block, 64)
    assert l2.counters[2, 0] == size * reference_lru(trace, blocks)
    assert l2.counters[0, 0] == size * len(trace)


@laws(150)
@given(trace=TRACES, small=st.integers(1, 60), more=st.integers(0, 60), ways=st.sampled_from([None, 4, 16]))
def test_a_larger_cache_never_misses_more(trace, small, more, ways):
    """LRU has the stack property: what a small cache holds, a larger one holds too. In sets likewise: a block's
    reuse distance is a smaller part of a larger cache."""
    misses = []
    for blocks in (small, small + more):
        l2 = cache_of(blocks * 64 * 128 * 2, ways=ways)
        for head, block in trace:
            touch_rows(l2, head, 64 * block, 64)
        misses.append(int(l2.counters[2, 0]))
    assert misses[1] <= misses[0]


ROW_RANGES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(-70, 600), st.integers(1, 200), st.booleans()), min_size=1, max_size=120
)


@laws(200)
@given(trace=ROW_RANGES, capacity=st.integers(0, 2_000_000), block_rows=st.sampled_from([1, 48, 64, 100, 176]))
# a block larger than the cache, written while it is first in the list
@example(trace=[(0, 0, 2, False), (0, 0, 1, True)], capacity=320, block_rows=48)
def test_bytes_are_conserved(trace, capacity, block_rows):
    """Held bytes fit the capacity; modified bytes are in memory or in the cache; nothing is negative."""
    rows = 517
    l2 = cache_of(capacity, rows, block_rows)
    written = np.zeros((2, rows), bool)
    asked = 0
    for head, row, count, write in trace:
        moved, missed = touch_rows(l2, head, row, count, write)
        low, high = max(row, 0), max(0, min(row + count, rows))
        asked += max(0, high - low) * 256
        assert moved == max(0, high - low) * 256
        assert 0 <= missed <= moved
        if write:
            written[head, low:high] = True
        held, dirty, band = l2.cache[0][:, HELD], l2.cache[0][:, DIRTY], l2.bands()
        # the list of blocks by use reaches beyond the capacity; what is modified does not
        assert 0 <= held[band <= LAST_INSIDE].sum() <= capacity
        assert ((dirty == 0) | ((dirty <= held) & (band <= LAST_INSIDE))).all()
    sm_read, sm_write, hbm_read, hbm_write = (int(x) for x in l2.counters[:, 0])
    assert sm_read + sm_write == asked
    assert hbm_read <= sm_read
    assert hbm_write + l2.dirty_bytes <= sm_write
    if capacity == 0:
        assert (hbm_read, hbm_write, l2.dirty_bytes) == (sm_read, sm_write, 0)


@laws(200)
@given(cuts=st.sets(st.integers(1, 516), max_size=40), block_rows=st.sampled_from([1, 48, 64, 100, 176, 517]))
def test_a_partition_of_a_tensor_is_read_exactly_once(cuts, block_rows):
    rows = 517
    l2 = cache_of(10**12, rows, block_rows)
    edges = [0, *sorted(cuts), rows]
    for low, high in pairwise(edges):
        touch_rows(l2, 0, low, high - low)
    assert l2.counters[2, 0] == rows * 256
    # all of it is there now
    for low, high in pairwise(edges):
        assert touch_rows(l2, 0, low, high - low)[1] == 0
