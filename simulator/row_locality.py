"""What HBM reads cost beyond their bytes when they come in short pieces that lie anywhere: pages of a KV cache.

A DRAM row that is open serves the rest of a run at full rate; a run that begins elsewhere opens another row. The part
of a run's bytes that finds its row open grows with the run, and what does not costs a fixed share more.

Measured on an H200 without any mathematics (``measurements/h200_sxm/micro_pages.csv``: decode's access pattern, pages
of 1 to 4096 rows of 256 bytes in random order over 2 GB, 1 to 32 heads): pages of 1, 4, 16, 64, 128 rows take 4.1, 4.0,
2.4, 0.6, 0.1 % longer than large ones, and the same pages in order nothing. Permuted inside windows that are in flight
together (64 KB for one head, 1 MB for eight) they take nothing either, so it is no translation and no table read.
"""

from __future__ import annotations

from simulator.operands import Tile
from simulator.problem import DTYPE_BYTES

#: Extra time of bytes whose DRAM row was not open.
CLOSED_ROW_COST = 0.047
#: Bytes of a run of which half find their row open.
HALF_OPEN_RUN_BYTES = 4288


def read_cost(place: Tile) -> float:
    """HBM time of a read of ``place`` over that of its bytes in order (1: the rows lie in order)."""
    rows, tensor = place.tensor.page_rows, place.tensor
    if not rows:
        return 1.0
    run_bytes = rows * place.cols * DTYPE_BYTES[tensor.dtype]
    return 1.0 + CLOSED_ROW_COST / (1.0 + run_bytes / HALF_OPEN_RUN_BYTES)
