"""Instructions that FA2's forward kernels execute, counted build by build.

A build of the kernel (head dim x mask x whether every tile is full) is code of its own: it unrolls its first, masked
key blocks ahead of the loop, and the compiler spills other registers in each. One warp's instructions are an affine
function of the masked and the looped blocks that it walks; an H200 counted it (ncu, ``smsp__inst_executed`` and its
pipes, local stores and loads) in launches of every build, exactly the same for one and for 132 CTAs, and these tables
repeat every launch of ``mix_launches_*_run1.csv`` within 4 % (``tests/test_fa2_counts.py``). Where all launches of a
build walk alike, what a block takes was set beside its neighbours; their sum is still the counted one.

Builds differ by compiler; those of PyTorch 2.11 for sm_90 stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.instruction_counts import InstructionMix

SOURCE = "ncu, one H200, PyTorch 2.11, mix_launches_{run1,more_run1,random_run1,builds_run1}.csv, 2026-11-29/30"


@dataclass(frozen=True)
class BlockCounts:
    """A warp's instructions for one key block, by pipe; of those, ``stores`` and ``loads`` of spilled registers."""

    issue: float
    fma: float
    alu: float
    stores: float = 0.0
    loads: float = 0.0


@dataclass(frozen=True)
class Fa2Build:
    """``around``: a warp's instructions outside all blocks. ``elements``: score elements of a lane and block in the
    counted tile, by which other tiles are scaled."""

    head_dim: int
    elements: int
    around: float
    masked: BlockCounts
    loop: BlockCounts

    def mix(self, masked: bool) -> InstructionMix:
        """Lane instructions per score element of a block, of a masked one ahead of the loop or of one in it."""
        block = self.masked if masked else self.loop
        # m16n8k16: 128 of a warp's score elements take head_dim / 16 + head_dim / 16 of them
        tensor = self.head_dim / 32
        issue, fma, alu = (value / self.elements for value in (block.issue, block.fma, block.alu))
        return InstructionMix(issue, fma, alu, 1.0, 0.0, tensor, source=SOURCE)


_PLAIN, _CAUSAL, _WINDOW = "none", "causal", "window"


def _build(head_dim: int, around: float, masked: tuple[float, ...], loop: tuple[float, ...]) -> Fa2Build:
    elements = {64: 128, 96: 64, 128: 64, 192: 32, 256: 32}[head_dim]
    return Fa2Build(head_dim, elements, around, BlockCounts(*masked), BlockCounts(*loop))


# (mask, whether every tile is full), then by head dim; beyond 128 only the build that checks bounds exists
_BUILDS = {
    (_PLAIN, True): (
        _build(64, 525, (1677, 737, 405, 24, 5), (1677, 737, 405, 6.1, 24.7)),
        _build(128, 817, (1220, 478, 271, 19, 22), (1220, 478, 271, 14, 14)),
    ),
    (_PLAIN, False): (
        _build(64, 1142, (1669.5, 741.3, 450, 18, 6), (1669.5, 741.3, 407.5, 6, 16)),
        _build(96, 500, (1438, 550, 540, 9, 8), (999.7, 446.9, 197.9)),
        _build(128, 700, (1783, 640, 650, 12, 10), (1191.6, 473.8, 246.1, 8, 8)),
        _build(192, 600, (1060, 390, 260), (740, 281, 121)),
        _build(256, 750, (1060, 380, 300), (916.2, 304, 112.9)),
    ),
    (_CAUSAL, True): (
        _build(64, 406, (2122, 728, 699, 27.6, 5), (1661, 737, 387, 6.1, 29.7)),
        _build(128, 400, (1723, 560, 600, 19.5, 17.5), (1217, 478, 269, 14, 13.3)),
    ),
    (_CAUSAL, False): (
        _build(64, 890, (2180, 769, 725, 25.8, 18.3), (1667, 736, 403, 5.1, 29.6)),
        _build(96, 400, (1302, 480, 390), (1000, 446.9, 197.9)),
        _build(128, 398, (1972.5, 649, 689, 43, 43), (1196.6, 477.8, 248.6, 8.1, 7.9)),
        _build(192, 400, (986, 310, 200), (740, 281, 121)),
        _build(256, 649, (1349, 411, 424, 2.5, 3), (912.5, 304, 111, 0, 3)),
    ),
    (_WINDOW, False): (
        _build(64, 1016, (2640, 968, 1064, 44, 46), (2323, 791, 909, 29, 25)),
        _build(96, 700, (1360, 460, 500, 10, 10), (1302, 469, 444, 9, 8)),
        _build(128, 700, (1805, 624, 560, 21.5, 22.5), (1520.5, 501, 498, 32, 33)),
        _build(192, 721, (900, 300, 210), (857, 290, 200)),
        _build(256, 718, (1143.6, 319, 296), (1007, 315, 186)),
    ),
}  # fmt: skip

# the split-KV kernel, whose first block is like the others (a causal mask's, 250 instructions more, is not kept apart)
_SPLIT = (
    _build(64, 1174, (1675, 693, 402), (1675, 693, 402)),
    _build(128, 876, (1122, 395, 211), (1122, 395, 211)),
    _build(256, 805, (923, 305, 117), (923, 305, 117)),
)


def fa2_build(head_dim: int, causal: bool, window: bool, even: bool, split: bool = False) -> Fa2Build:
    """The counted build nearest to this one in head dim (32 takes 64's counts); ``split``: the split-KV kernel."""
    mask = _WINDOW if window else _CAUSAL if causal else _PLAIN
    builds = _SPLIT if split else _BUILDS.get((mask, even)) or _BUILDS[mask, False]
    return min(builds, key=lambda b: (abs(b.head_dim - head_dim), -b.head_dim))
