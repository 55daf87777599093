"""L2 in partitions, each with copies of what its SMs read of the others: laws, and the microbenchmark of an H200."""

from pathlib import Path

import pandas
import pytest

from simulator.l2_blocks import BANDS, FIRST, HBM_READ, HBM_WRITE, HOME, READ, READ_BY, WRITE, access_tile
from simulator.memory import L2, WAYS
from simulator.profile import load_profile
from simulator.program import Tensor

GPU = load_profile("h200_sxm")
MEASURED = Path(__file__).parent.parent / "hardware_profiles/measurements/h200_sxm/micro_l2_partitions.csv"
MIB = 1 << 20
#: Rows of 256 bytes that are read at a time, and their bytes.
ROWS, TILE = 64, 64 * 256
#: Who reads tile ``i`` of a buffer, by the microbenchmark's modes: SMs of one half, or of both.
READERS = {"one": lambda i: (i % 2,), "near": lambda i: (i % 2,), "all": lambda i: (0, 1), "far": lambda i: (0, 1)}


class Buffers:
    """Named buffers of ``mib`` each behind an L2 of ``capacity`` bytes."""

    def __init__(self, capacity: int, ways: int | None = None, partitions: int = 2, **mib: int):
        tensors = {name: Tensor(name, 1, size * MIB // 256, 128, "bf16", block_rows=ROWS) for name, size in mib.items()}
        self.mib = mib
        self.l2 = L2.of(tensors, capacity, ways=ways, partitions=partitions)
        self.partitions = partitions

    def touch(self, name: str, tile: int, side: int, kind: int = READ) -> int:
        """Bytes that come from HBM."""
        at = self.l2.names.index(name), 0, tile * ROWS, ROWS, 0, 128, kind, side % self.partitions
        return access_tile(*at, self.l2.shape, self.l2.cache, self.l2.counters)[1]

    def read(self, name: str, mode: str) -> float:
        """Read a buffer once; the share of it that comes from HBM."""
        tiles = self.mib[name] * MIB // TILE
        return sum(self.touch(name, i, side) for i in range(tiles) for side in READERS[mode](i)) / (tiles * TILE)

    def write(self, name: str) -> None:
        for i in range(self.mib[name] * MIB // TILE):
            self.touch(name, i, i % 2, WRITE)


# Laws ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("mode", "fits"), [("all", 28), ("one", 36)])
def test_of_what_all_read_half_fits_and_of_what_one_reads_two_thirds(mode, fits):
    """60 MiB: 30 and 40, less what bands may grow before their ends move."""
    for size, again in ((fits, 0.0), (fits + 8, 1.0)):
        buffers = Buffers(60 * MIB, A=size)
        assert buffers.read("A", mode) == 1.0
        assert buffers.read("A", mode) == again


def test_what_is_written_has_no_copies():
    buffers = Buffers(60 * MIB, A=56)
    buffers.write("A")
    assert buffers.l2.counters[HBM_WRITE].sum() == 0
    assert buffers.read("A", "all") > 0, "reading makes copies, which displace the rest"


def test_a_writer_keeps_its_own_copies():
    """Of what one SM each reads and writes in turn (FA1's O) two thirds fit, as of what is only read."""
    for size, fits in ((36, True), (50, False)):
        buffers = Buffers(60 * MIB, A=size)
        for _ in range(3):
            for i in range(size * MIB // TILE):
                buffers.touch("A", i, i % 2)
                buffers.touch("A", i, i % 2, WRITE)
        assert (buffers.l2.counters[HBM_READ].sum() == size * MIB) == fits
        assert (buffers.l2.counters[HBM_WRITE].sum() == 0) == fits


def test_a_home_forgets_what_is_read_from_copies():
    """Tile 0 is in use all the time, but only SMs of the other half read it, from their copy: its home does not see
    that and forgets it, which voids the copy."""
    buffers = Buffers(60 * MIB, A=1, B=50)
    assert buffers.touch("A", 0, 1) == TILE
    fetched = 0
    for i in range(50 * MIB // TILE):
        buffers.touch("B", i, 0)
        fetched += buffers.touch("A", 0, 1)
    assert fetched == TILE
    # an SM of its own half keeps it there
    buffers = Buffers(60 * MIB, A=1, B=50)
    assert buffers.touch("A", 0, 0) == TILE
    for i in range(50 * MIB // TILE):
        buffers.touch("B", i, 0)
        assert buffers.touch("A", 0, 0) == 0


def test_copies_older_than_the_list_are_gone():
    """A home that its own SMs keep in use outlives what the list knows of the other half's last read."""
    buffers = Buffers(60 * MIB, A=1, B=300)
    buffers.touch("A", 0, 1)
    for i in range(300 * MIB // TILE):
        buffers.touch("B", i, 0)
        assert buffers.touch("A", 0, 0) in (0, TILE // 2)
    blocks, state, *_ = buffers.l2.cache
    assert 0 < blocks[0, READ_BY] <= state[FIRST + BANDS - 1]
    buffers.touch("B", 0, 0)
    buffers.touch("A", 0, 1)
    assert blocks[0, HOME] == blocks[:, HOME].max(), "it has to ask the home again"


@pytest.mark.parametrize("partitions", [1, 2, 3, 8])
def test_a_large_cache_reads_all_once_whatever_its_partitions(partitions):
    buffers = Buffers(1000 * MIB, partitions=partitions, A=10, B=10)
    buffers.write("B")
    for mode in ("one", "all", "far"):
        buffers.read("A", mode)
        buffers.read("B", mode)
    assert buffers.l2.counters[HBM_READ].tolist() == [10 * MIB, 0]
    assert buffers.l2.counters[HBM_WRITE].sum() + buffers.l2.dirty_bytes == 10 * MIB


# What the GPU does ---------------------------------------------------------------------------------------------------
def missing_again(mode: str) -> "pandas.Series[float]":
    """Share of a buffer that a pass over it misses after the first, by its MiB: counted."""
    table = pandas.read_csv(MEASURED, comment="#")
    table = table[table.probe.eq("repeat") & table.parameters.str.startswith(f"mode={mode};")]
    size = table.parameters.str.extract(r"mb=(\d+)")[0].astype(int)
    passes = table.parameters.str.extract(r"passes=(\d+)")[0].astype(int)
    share = (table.hbm_read_bytes / (size * MIB) - 1) / (passes - 1)
    return share.set_axis(size)


def modelled(mode: str, mib: int, partitions: int) -> float:
    buffers = Buffers(GPU.l2_bytes, WAYS, partitions, A=mib)
    buffers.read("A", mode)
    return sum(buffers.read("A", mode) for _ in range(4)) / 4


def test_what_all_sms_read_is_lost_at_sizes_at_which_the_same_lines_are_kept_for_one():
    counted_all, counted_one = missing_again("all"), missing_again("one")
    for mib in (32, 36, 40, 44):
        assert counted_all[mib] - counted_one[mib] > 0.7
        assert modelled("all", mib, 2) - modelled("one", mib, 2) > 0.25
        assert modelled("all", mib, 1) == modelled("one", mib, 1), "one cache does not know who reads"


@pytest.mark.parametrize("mode", ["one", "near", "all", "far"])
def test_the_microbenchmark_is_met_where_sets_do_not_matter(mode):
    """A buffer lies evenly in the sets, so less is missing of one that fits, and more of one that does not, than of
    heads that are strided in memory; far from the capacity that is the same."""
    counted = missing_again(mode)
    for mib in (16, 60, 64, 72):
        assert modelled(mode, mib, 2) == pytest.approx(counted[mib], abs=0.05)
