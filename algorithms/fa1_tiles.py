"""Tiles that FlashAttention-1's kernels do not ship with but could have (see :mod:`algorithms.tile_search`).

A choice is rows of Q x keys x buffers of Q (two) x warpgroups. The warps split the keys, so every one of them makes a
partial O (or dQ) of all rows; K and V (backward: dK and dV) of the keys stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from algorithms.kernels_fa1 import Fa1Tile, fa1_smem_bytes
from algorithms.tile_search import (
    MOST_REGISTERS,
    TileChoice,
    check_registers,
    check_smem,
    check_threads,
    resident_ctas,
)
from simulator.errors import UnsupportedError
from simulator.profile import Profile

Q_BUFFERS = 2
#: Registers a thread that hold matrices: the most of a shipped kernel (16x128 at head dim 128, forward and backward).
FORWARD_REGISTERS, BACKWARD_REGISTERS = 224, 208
#: Rows, keys and warpgroups that are tried.
_ROWS, _KEYS = (16, 32, 48, 64), range(64, 513, 64)


@dataclass(frozen=True)
class Fa1BackwardTile:
    """The 1.x backward kernel: ``rows`` of Q against ``keys`` whose dK and dV its warps hold."""

    rows: int
    keys: int
    head_dim: int
    warps: int
    smem_bytes: int


def candidates(warpgroups: tuple[int, ...]) -> tuple[TileChoice, ...]:
    """Every choice worth a look on some GPU, legal there or not."""
    return tuple(TileChoice(m, n, Q_BUFFERS, w) for w in warpgroups for m in _ROWS for n in _KEYS)


def forward_with(choice: TileChoice, base: Fa1Tile, seqlen_k: int, gpu: Profile) -> Fa1Tile:
    """The forward kernel with another tile; :class:`UnsupportedError` says which limit of ``gpu`` it breaks."""
    m, n, d, warps = choice.tile_m, choice.tile_n, base.padded_head_dim, 4 * choice.warpgroups
    _check_shape(choice, warps)
    threads = 32 * warps
    held = {"K and V": n * d // threads, "S": m * n // threads, "O": m * d // 32 + m * d // threads}
    _check_registers(choice, held, FORWARD_REGISTERS)
    smem = fa1_smem_bytes(m, n, d, warps, looping=seqlen_k > n)
    check_smem(choice, smem, gpu)
    check_threads(choice, threads, gpu)
    check_registers(choice, threads, gpu)
    return replace(
        base,
        tile_m=m,
        tile_n=n,
        num_warps=warps,
        smem_bytes=smem,
        o_exchange_bytes=m * d * 4 * warps,
        ctas_per_sm=resident_ctas(threads, MOST_REGISTERS, smem, gpu),
        source=f"a choice, not a shipped kernel; otherwise {base.source}",
    )


def backward_with(choice: TileChoice, base: Fa1BackwardTile, gpu: Profile) -> tuple[Fa1BackwardTile, int]:
    """The backward kernel with another tile, and CTAs an SM; :class:`UnsupportedError` as :func:`forward_with`."""
    m, n, d, threads = choice.tile_m, choice.tile_n, base.head_dim, 32 * base.warps
    _check_shape(choice, base.warps)
    if 4 * choice.warpgroups != base.warps:
        raise UnsupportedError(f"tile {choice}: the backward kernel is written for {base.warps} warps")
    held = {"dK and dV": 2 * n * d // threads, "S and dP": 2 * m * n // threads, "dQ": m * d // 32}
    _check_registers(choice, held, BACKWARD_REGISTERS)
    smem = fa1_backward_smem_bytes(m, n, d, base.warps)
    check_smem(choice, smem, gpu)
    check_threads(choice, threads, gpu)
    check_registers(choice, threads, gpu)
    return replace(base, rows=m, keys=n, smem_bytes=smem), resident_ctas(threads, MOST_REGISTERS, smem, gpu)


def fa1_backward_smem_bytes(rows: int, keys: int, head_dim: int, warps: int) -> int:
    """Two buffers each of Q and dO, K and V, the warps' partial dQ in fp32, P and dS."""
    return 2 * (2 * rows * head_dim * 2) + 2 * keys * head_dim * 2 + rows * head_dim * 4 * warps + 2 * rows * keys * 2


def _check_shape(choice: TileChoice, warps: int) -> None:
    if choice.stages != Q_BUFFERS:
        raise UnsupportedError(f"tile {choice}: FlashAttention-1 has {Q_BUFFERS} buffers of Q")
    if choice.tile_m % 16 or choice.tile_n % (16 * warps):
        raise UnsupportedError(
            f"tile {choice}: mma.sync takes 16 rows and 16 keys a warp; {choice.tile_m} rows and {choice.tile_n} keys "
            f"over {warps} warps are no multiples"
        )


def _check_registers(choice: TileChoice, held: dict[str, int], most: int) -> None:
    if sum(held.values()) > most:
        said = ", ".join(f"{name} {count}" for name, count in held.items())
        raise UnsupportedError(
            f"tile {choice}: {said} are {sum(held.values())} registers a thread; FlashAttention-1's kernels hold {most}"
        )
