"""Tiles that a forward kernel does not ship with but could have: which fit, and what the kernel becomes with them.

A shipped kernel's tile answers the GPU it was written for. On other hardware (more shared memory, more registers)
its author would choose again; these are the rules of that choice: SMEM, registers, and the shapes of the tensor
instructions. The register rules are read off the shipped tiles, all of which are legal by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from algorithms.kernels_common import ctas_per_sm
from algorithms.kernels_fa2 import Fa2Tile
from algorithms.kernels_fa3 import Fa3Tile, fa3_smem_bytes
from simulator.errors import InputError, UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile

#: fp32 accumulators a thread of S and O together: no shipped FA2 kernel holds more (128x64 at head dim 128).
FA2_ACCUMULATORS = 192
#: Registers a consumer thread of FA3 needs beside S, O and P: the least that a shipped kernel leaves (192x160, e4m3).
FA3_OTHER_REGISTERS = 28
#: A thread addresses 255 registers; setmaxnreg hands out up to 256.
MOST_REGISTERS = 255
#: The widest instruction of wgmma (N) and the granules of both paths (mma.sync m16n8k16, wgmma k16 and k32 for fp8).
WGMMA_MAX_N = 256
MAX_THREADS_PER_CTA = 1024


@dataclass(frozen=True, order=True)
class TileChoice:
    """A CTA's tile: rows of Q, rows of K and V, K/V buffers, and sets of four warps that compute."""

    tile_m: int
    tile_n: int
    stages: int
    warpgroups: int

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n}x{self.stages}x{self.warpgroups}"

    @classmethod
    def parse(cls, text: str) -> TileChoice:
        """The choice that ``128x64x2x2`` (rows, keys, stages, warpgroups) says; :class:`InputError` otherwise."""
        parts = text.strip().lower().split("x")
        if len(parts) != 4 or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
            raise InputError(
                f"tiles: {text!r} is not a tile; write 'auto', or rows x keys x stages x warpgroups such as 128x64x2x2"
            )
        return cls(*(int(part) for part in parts))


#: A call's tiles by part: ``fwd``, ``bwd``, or the products of unfused attention (``scores``, ``output``, ...).
Tiles = Mapping[str, TileChoice]


@dataclass(frozen=True)
class TileSpace:
    """The tile of one part of a call that is open to choice.

    ``shipped``: what the hand-written kernel takes (``None``: another kernel, which ``shipped_says`` names).
    ``check`` raises :class:`UnsupportedError` where a choice breaks a limit of the GPU. ``problem`` and ``kernels``
    (all, if empty) are what the choice is judged by, on ``implementation`` (``None``: the call's). ``first``: the
    choices to begin with, before their neighbours. ``meaning``: what a choice's four numbers are.
    """

    shipped: TileChoice | None
    shipped_says: str
    candidates: tuple[TileChoice, ...]
    check: Callable[[TileChoice], object]
    problem: AttentionProblem
    kernels: tuple[str, ...] = ()
    implementation: str | None = None
    first: Callable[[list[TileChoice]], list[TileChoice]] | None = None
    meaning: str = "rows x keys x stages x warpgroups"

    def legal(self) -> list[TileChoice]:
        """The candidates that ``check`` lets pass, in order."""
        found = []
        for choice in self.candidates:
            try:
                self.check(choice)
            except UnsupportedError:
                continue
            found.append(choice)
        return found


#: By part: its :class:`TileSpace`, or in a few words why there is nothing to choose.
TileSpaces = Mapping[str, "TileSpace | str"]


def candidates(algorithm: str) -> tuple[TileChoice, ...]:
    """Every forward choice of ``fa2`` or ``fa3`` worth a look on some GPU, legal there or not."""
    if algorithm == "fa2":
        shapes = [(m, w) for w in (1, 2, 4) for m in (64 * w, 128 * w)]
        stages: tuple[int, ...] = (1, 2, 3)
    else:
        shapes = [(m, w) for w in (1, 2, 3, 4) for m in (64 * w, 128 * w)]
        stages = (1, 2, 3, 4)
    return tuple(TileChoice(m, n, s, w) for m, w in shapes for n in range(16, WGMMA_MAX_N + 1, 16) for s in stages)


def fa2_with(choice: TileChoice, base: Fa2Tile, gpu: Profile) -> Fa2Tile:
    """FA2's kernel with another tile; :class:`UnsupportedError` says which limit of ``gpu`` it breaks."""
    warps, d = 4 * choice.warpgroups, base.padded_head_dim
    if choice.tile_m % (16 * warps) or choice.tile_n % 16:
        raise UnsupportedError(
            f"tile {choice}: mma.sync takes 16 rows a warp and 16 keys; "
            f"{choice.tile_m} rows over {warps} warps and {choice.tile_n} keys are no multiples"
        )
    smem = 2 * d * (choice.tile_m + 2 * choice.stages * choice.tile_n)
    check_smem(choice, smem, gpu)
    accumulators = fa2_accumulators(choice.tile_m, choice.tile_n, warps, d)
    if accumulators > FA2_ACCUMULATORS:
        raise UnsupportedError(
            f"tile {choice}: S and O take {accumulators} registers a thread; FA2's kernels hold {FA2_ACCUMULATORS}"
        )
    check_threads(choice, 32 * warps, gpu)
    check_registers(choice, 32 * warps, gpu)
    return replace(
        base,
        tile_m=choice.tile_m,
        tile_n=choice.tile_n,
        num_warps=warps,
        kv_stages=choice.stages,
        smem_bytes=smem,
        registers_per_thread=MOST_REGISTERS,
        ctas_per_sm=resident_ctas(32 * warps, MOST_REGISTERS, smem, gpu),
        source=f"a choice, not a shipped kernel; otherwise {base.source}",
    )


def fa2_accumulators(tile_m: int, tile_n: int, num_warps: int, padded_head_dim: int) -> int:
    """fp32 registers a thread that hold S and O."""
    return tile_m * (tile_n + padded_head_dim) // (32 * num_warps)


def fa3_with(
    choice: TileChoice,
    base: Fa3Tile,
    element_bytes: int,
    gpu: Profile,
    row_blocks: int | None = None,
    o_in_smem: bool = True,
) -> Fa3Tile:
    """FA3's kernel with another tile; :class:`UnsupportedError` says which limit of ``gpu`` it breaks.

    P stays in registers where they suffice, else it goes through SMEM. ``row_blocks`` decides multicast as it does for
    the shipped tile; ``o_in_smem`` is false where splits write their accumulators to HBM directly.
    """
    groups, d, dv = choice.warpgroups, base.padded_head_dim, base.padded_head_dim_v
    k_granule = 16 if element_bytes == 2 else 32
    if dv > 256:
        raise UnsupportedError(f"tile {choice}: V head dims above 256 have a kernel of their own with a fixed tile")
    if choice.tile_m % (64 * groups) or choice.tile_n % k_granule or choice.tile_n > WGMMA_MAX_N:
        raise UnsupportedError(
            f"tile {choice}: wgmma takes 64 rows a warpgroup and keys in steps of {k_granule} up to {WGMMA_MAX_N}"
        )
    threads = 128 * (groups + 1)
    check_threads(choice, threads, gpu)
    has = fa3_consumer_registers(groups, gpu.registers_per_sm, base.kv_by_tma)
    rows = choice.tile_m // groups
    s, o = rows * choice.tile_n // 128, rows * dv // 128
    needed = s + o + FA3_OTHER_REGISTERS
    if needed > has:
        raise UnsupportedError(
            f"tile {choice}: a consumer thread needs {needed} registers (S {s}, O {o}, others {FA3_OTHER_REGISTERS}); "
            f"it has {has} with {groups} warpgroups on {gpu.name}"
        )
    p_in_registers = needed + s * element_bytes // 4 <= has
    smem = fa3_smem_bytes(
        choice.tile_m,
        choice.tile_n,
        d,
        dv,
        element_bytes,
        choice.stages,
        pv_in_registers=p_in_registers,
        transpose_v=base.v_transposed_in_kernel,
        o_in_smem=o_in_smem,
    )
    check_smem(choice, smem, gpu)
    pays = d <= 128 if element_bytes == 2 else d >= 128
    turns = groups >= 2 and pays if base.intra_wg_overlap else groups == 2
    # the shipped rule: pairs of CTAs share K and V only where an even number of them walks the same keys
    cluster = base.cluster_m if row_blocks is None or row_blocks % base.cluster_m == 0 else 1
    return replace(
        base,
        tile_m=choice.tile_m,
        tile_n=choice.tile_n,
        kv_stages=choice.stages,
        num_mma_warpgroups=groups,
        threads=threads,
        consumer_registers=has,
        mma_pv_is_rs=p_in_registers,
        scheduler_barrier=turns,
        smem_bytes=smem,
        cluster_m=cluster,
        source=f"a choice, not a shipped kernel; otherwise {base.source}",
    )


def fa3_consumer_registers(warpgroups: int, registers_per_sm: int, by_tma: bool = True) -> int:
    """Registers that setmaxnreg gives a consumer thread (one CTA an SM); the producer warpgroup keeps 24 to 56, more
    where it gathers rows itself instead of by TMA."""
    producer = 56 if warpgroups == 1 else (24 if by_tma else 40) if warpgroups == 2 else 32
    each = (registers_per_sm - 128 * producer) // (128 * warpgroups)
    # the shipped two-warpgroup kernels take 240 of the 244 that the register file has
    return max(0, min(256 if warpgroups == 1 else 240 if by_tma else 232, each // 8 * 8))


def check_smem(choice: TileChoice, smem_bytes: int, gpu: Profile) -> None:
    if smem_bytes > gpu.smem_bytes_per_cta_max:
        raise UnsupportedError(
            f"tile {choice}: needs {smem_bytes} bytes of SMEM; {gpu.name} has {gpu.smem_bytes_per_cta_max} a CTA"
        )


def check_threads(choice: TileChoice, threads: int, gpu: Profile) -> None:
    most = min(MAX_THREADS_PER_CTA, gpu.max_threads_per_sm)
    if threads > most:
        raise UnsupportedError(f"tile {choice}: {threads} threads a CTA; {gpu.name} runs {most}")


def check_registers(choice: TileChoice, threads: int, gpu: Profile) -> None:
    # the register file hands out 256 to a thread that addresses 255
    if (MOST_REGISTERS + 1) * threads > gpu.registers_per_sm:
        raise UnsupportedError(
            f"tile {choice}: {threads} threads of {MOST_REGISTERS} registers; "
            f"{gpu.name} has {gpu.registers_per_sm} an SM"
        )


def resident_ctas(threads: int, registers_per_thread: int, smem_bytes: int, gpu: Profile) -> int:
    """:func:`ctas_per_sm` by the limits of ``gpu``."""
    resident = ctas_per_sm(
        threads=threads,
        registers_per_thread=registers_per_thread,
        smem_bytes=smem_bytes,
        smem_bytes_per_sm=gpu.smem_bytes_per_sm,
        threads_per_sm_max=gpu.max_threads_per_sm,
        registers_per_sm=gpu.registers_per_sm,
    )
    return min(resident, gpu.max_ctas_per_sm)
