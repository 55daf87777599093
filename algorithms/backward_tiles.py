"""Tiles that a backward kernel does not ship with but could have (see :mod:`algorithms.tile_search`).

A choice is rows of Q x keys x buffers of Q x warpgroups; both kernels are written for two sets of four warps, a set's
layout following its tile. The register rules are what the shipped tiles hold at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from algorithms.kernels_backward import BackwardTile, fa3_backward_smem_bytes
from algorithms.tile_search import (
    MOST_REGISTERS,
    WGMMA_MAX_N,
    TileChoice,
    TileSpace,
    check_smem,
    check_threads,
    fa3_consumer_registers,
    resident_ctas,
)
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile

WARPGROUPS = 2
#: fp32 accumulators a thread that live together (dK, dV and either S and dP or dQ): the most of a shipped FA2 kernel.
FA2_ACCUMULATORS = 192
#: FA2 pads its fp32 dQ to this many rows (flash_api.cpp).
DQ_ROWS = 128
#: Registers of a consumer thread of FA3's beside dK, dV, S and dP: what the largest shipped tile (80x128 at head dim
#: 128) leaves of 240.
FA3_OTHER_REGISTERS = 32


def fa2_warp_rows(tile_n: int, shipped: dict[int, tuple[int, int, int]]) -> tuple[int, int, int]:
    """Rows of warps for S and dP, dK and dV, dQ, given those of the head dim's ``shipped`` key blocks: a narrow key
    block has its warps on rows of Q, a wide one on keys."""
    if tile_n in shipped:
        return shipped[tile_n]
    if tile_n >= 128:
        return shipped.get(128, (2, 4, 2))
    return shipped.get(64, (4, 2, 2)) if tile_n >= 64 else (4, 1, 2)


def fa2_backward_with(
    choice: TileChoice, base: BackwardTile, warp_rows: tuple[int, int, int], gpu: Profile
) -> BackwardTile:
    """FA2's backward kernel with another tile, V in SMEM; :class:`UnsupportedError` says which limit it breaks."""
    m, n, d = choice.tile_m, choice.tile_n, base.padded_head_dim
    if choice == choice_of(base):
        return base
    _check_warpgroups(choice)
    if choice.stages > 2 or DQ_ROWS % m:
        raise UnsupportedError(
            f"tile {choice}: the kernel has one or two buffers of Q, and dQ's rows are padded to {DQ_ROWS}, a multiple "
            "of its rows"
        )
    for name, rows, cols, high in zip(("S", "dK", "dQ"), (m, n, m), (n, d, d), warp_rows, strict=True):
        if rows % (16 * high) or cols % (8 * (8 // high)):
            raise UnsupportedError(
                f"tile {choice}: mma.sync takes 16 rows and 8 columns a warp; {high} x {8 // high} warps on {name} of "
                f"{rows} x {cols}"
            )
    accumulators = (2 * n * d + max(2 * m * n, m * d)) // base.threads
    if accumulators > FA2_ACCUMULATORS:
        raise UnsupportedError(
            f"tile {choice}: dK, dV and S, dP or dQ take {accumulators} registers a thread; "
            f"FA2's kernels hold {FA2_ACCUMULATORS}"
        )
    smem = 2 * (m * d * (1 + choice.stages) + 2 * n * d + 2 * m * n)
    check_smem(choice, smem, gpu)
    check_threads(choice, base.threads, gpu)
    return replace(
        _resized(base, m, n),
        smem_bytes=smem,
        ctas_per_sm=resident_ctas(base.threads, MOST_REGISTERS, smem, gpu),
        q_stages=choice.stages,
        v_in_registers=False,
    )


def fa3_backward_with(choice: TileChoice, base: BackwardTile, gpu: Profile) -> BackwardTile:
    """The Hopper backward with another tile; dO and dS have as many buffers as Q up to head dim 128, one above.
    :class:`UnsupportedError` says which limit it breaks."""
    m, n, d = choice.tile_m, choice.tile_n, base.padded_head_dim
    if choice == choice_of(base):
        return base
    _check_warpgroups(choice)
    if choice.stages > 2:
        raise UnsupportedError(f"tile {choice}: the kernel has one or two buffers of Q")
    # S is transposed up to head dim 128: keys on wgmma's 64 rows, queries on its columns; above, the other way round
    swaps_dq = d == 128 and base.dq_warpgroups == 2
    key_granule, row_granule = (128, 16 if swaps_dq else 64) if d <= 128 else (16, 64)
    if n % key_granule or m % row_granule or m > WGMMA_MAX_N:
        raise UnsupportedError(
            f"tile {choice}: wgmma takes keys in steps of {key_granule} and rows in steps of {row_granule} up to "
            f"{WGMMA_MAX_N} at head dim {d}"
        )
    has = fa3_consumer_registers(WARPGROUPS, gpu.registers_per_sm) - FA3_OTHER_REGISTERS
    dq = m * d // (128 if base.dq_warpgroups == 1 else 256)
    accumulators = 2 * n * d // 256 + max(2 * m * n // 256, dq)
    if accumulators > has:
        raise UnsupportedError(
            f"tile {choice}: dK, dV and S, dP or dQ take {accumulators} registers a thread; it has {has} for them"
        )
    do_stages = pds_stages = choice.stages if d <= 128 else 1
    smem = fa3_backward_smem_bytes(m, n, d, choice.stages, do_stages, pds_stages, base.p_in_registers)
    check_smem(choice, smem, gpu)
    check_threads(choice, base.threads, gpu)
    return replace(
        _resized(base, m, n), smem_bytes=smem, q_stages=choice.stages, do_stages=do_stages, pds_stages=pds_stages
    )


def choice_of(t: BackwardTile) -> TileChoice:
    """The tile of a kernel as a choice."""
    return TileChoice(t.tile_m, t.tile_n, t.q_stages, WARPGROUPS)


def backward_space(
    problem: AttentionProblem, base: BackwardTile, check: Callable[[TileChoice], object], row_step: int
) -> TileSpace:
    """What may be chosen for the backward pass of ``problem`` whose shipped kernel is ``base``."""
    found = tuple(
        TileChoice(m, n, s, WARPGROUPS)
        for m in range(row_step, WGMMA_MAX_N + 1, row_step)
        for n in range(16, WGMMA_MAX_N + 1, 16)
        for s in (1, 2)
    )
    own = choice_of(base)
    return TileSpace(own, f"the shipped kernel's {own}", found, check, problem.with_(pass_="bwd"))


def _resized(base: BackwardTile, tile_m: int, tile_n: int) -> BackwardTile:
    """``base`` with other rows and keys, its helper kernels' rows too."""
    rows = {("queries", base.tile_m): tile_m, ("keys", base.tile_n): tile_n}
    helpers = tuple(replace(h, rows_per_cta=rows.get((h.per, h.rows_per_cta), h.rows_per_cta)) for h in base.helpers)
    source = f"a choice, not a shipped kernel; otherwise {base.source}"
    return replace(base, tile_m=tile_m, tile_n=tile_n, helpers=helpers, source=source)


def _check_warpgroups(choice: TileChoice) -> None:
    if choice.warpgroups != WARPGROUPS:
        raise UnsupportedError(f"tile {choice}: the backward kernels are written for {WARPGROUPS} warpgroups")
