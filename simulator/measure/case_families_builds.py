"""One case for each build of the flash kernels: head dim, mask, whole or cut tiles, packed query heads, dtype.

A library compiles its kernel once for each of these, and the compilers' results differ by more than their sources do:
registers that spill, how a mask is tested, how Q and O are moved. Meant for instruction counts (``--metrics mix``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simulator.measure.case_families import make_case
from simulator.measure.cases import Case

#: (causal, window): no mask, causal, a causal window and a window of both sides.
MASKS: tuple[tuple[bool, tuple[int, int] | None], ...] = (
    (False, None),
    (True, None),
    (True, (256, 0)),
    (False, (128, 128)),
)


def builds() -> Iterator[Case]:
    """FA2 and FA3 forward."""
    marks: dict[str, Any] = {"counters": True, "mix": True}
    for head_dim in (64, 96, 128, 192, 256):
        for causal, window in MASKS:
            for seqlen in (1024, 1000):
                more = marks | {"causal": causal, "window": window}
                yield make_case("builds_fa2", "fa2", 8, 16, seqlen, head_dim, num_splits=1, **more)
                if head_dim in (64, 128, 256):
                    yield make_case("builds_fa3", "fa3", 8, 16, seqlen, head_dim, **more)
                    if seqlen == 1024:
                        yield make_case("builds_fa3", "fa3", 8, 16, seqlen, head_dim, dtype="fp8", **more)
    # query heads packed into rows, or not, with tiles of one key block and of several
    for head_dim in (64, 128, 256):
        for dtype in ("bf16", "fp8"):
            for causal in (False, True):
                for group, seqlen in ((1, 128), (2, 64), (4, 64), (8, 100)):
                    for keys in (seqlen, 1024):
                        heads = 16 * group
                        more = marks | {"causal": causal, "dtype": dtype, "kv_heads": 16, "seqlen_k": keys}
                        yield make_case("builds_packed", "fa3", 33, heads, seqlen, head_dim, **more)
