"""Tiles of unfused attention's products: what cuBLAS's rule takes, and others that a GPU would hold.

cuBLAS picks one of many compiled kernels; ``--tiles`` asks which tile a kernel written for this GPU would have. A
choice is rows of C x columns of C x slices of K in flight x warpgroups that multiply.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms.common import ceil_div, fastest_path
from algorithms.kernels_gemm import GemmKernel, gemm_kernel, hopper_kernel_at, product_shape, tile_cost
from algorithms.tile_search import (
    TileChoice,
    TileSpace,
    TileSpaces,
    check_smem,
    check_threads,
    fa3_consumer_registers,
    resident_ctas,
)
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile

#: The products of a pass: role and the name of its launch.
PRODUCTS = {
    "fwd": {"scores": "qk_gemm", "output": "pv_gemm"},
    "bwd": {"grad_value": "dv_gemm", "grad_scores": "dp_gemm", "grad_query": "dq_gemm", "grad_key": "dk_gemm"},
}
#: Registers of a thread beside its part of C: what the seen kernels leave (160 of 240, wgmma; 128 of 234, mma.sync).
WGMMA_OTHER_REGISTERS, MMA_OTHER_REGISTERS = 80, 104
#: SMEM of wgmma kernels beside their slices (barriers, epilogue).
PIPE_OVERHEAD_BYTES = 16_580
MOST_STAGES = 16
_SIDES = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)
#: Tiles that are simulated: those that finish first by waves and area.
TRIED = 12


def shipped_kernel(role: str, problem: AttentionProblem, gpu: Profile) -> GemmKernel:
    """The kernel that cuBLAS takes for one product of ``problem`` on ``gpu``'s fastest tensor path (or the legacy one
    if rows are unaligned)."""
    return gemm_kernel(
        role,
        head_dim=max(problem.head_dim, problem.head_dim_v),
        queries=problem.seqlen_q,
        keys=problem.seqlen_k,
        instruction_path=fastest_path(gpu).replace("mma_sync", "mma.sync"),
        matrices=problem.batch * problem.heads,
        sms=gpu.num_sms,
    )


def choice_of(g: GemmKernel) -> TileChoice:
    """The tile of a kernel as a choice."""
    return TileChoice(g.tile_rows, g.tile_columns, g.stages, g.consumer_warpgroups or max(1, g.threads // 128))


def gemm_with(choice: TileChoice, role: str, problem: AttentionProblem, gpu: Profile) -> GemmKernel:
    """The product's kernel with another tile; :class:`UnsupportedError` says which limit of ``gpu`` it breaks."""
    base = shipped_kernel(role, problem, gpu)
    if choice == choice_of(base):
        return base
    by_wgmma = base.instruction_path == "wgmma"
    m, n, groups = choice.tile_m, choice.tile_n, choice.warpgroups
    sides = ((m, n), (n, m))
    granules = (64 * groups, 8) if by_wgmma else (32, 32)
    if not any(a % granules[0] == 0 and b % granules[1] == 0 for a, b in sides) or m % groups or n % groups:
        what = "one side in steps of 64 a warpgroup, the other of 8" if by_wgmma else "both sides in steps of 32"
        raise UnsupportedError(f"tile {choice}: {base.instruction_path} takes {what}")
    accumulators = m * n // (128 * groups)
    threads = 128 * (groups + 1) if by_wgmma else 128 * groups
    check_threads(choice, threads, gpu)
    if by_wgmma:
        has, others = fa3_consumer_registers(groups, gpu.registers_per_sm), WGMMA_OTHER_REGISTERS
    else:
        has, others = min(255, gpu.registers_per_sm // threads), MMA_OTHER_REGISTERS
    if accumulators + others > has:
        raise UnsupportedError(
            f"tile {choice}: a thread needs {accumulators + others} registers (C {accumulators}, others {others}); "
            f"it has {has} with {groups} warpgroups on {gpu.name}"
        )
    smem = 2 * choice.stages * base.tile_k * (m + n) + (PIPE_OVERHEAD_BYTES if by_wgmma else 0)
    check_smem(choice, smem, gpu)
    if choice.stages > MOST_STAGES:
        raise UnsupportedError(f"tile {choice}: at most {MOST_STAGES} slices in flight")
    if by_wgmma:
        g = hopper_kernel_at(role, *product_shape(role, problem), m, n, choice.stages)
        g = replace(g, threads=threads, consumer_warpgroups=groups, smem_bytes=smem)
    else:
        registers = ceil_div(accumulators + others, 8) * 8
        g = replace(
            base,
            tile_rows=m,
            tile_columns=n,
            stages=choice.stages,
            threads=threads,
            registers_per_thread=min(255, registers),
            smem_bytes=smem,
            ctas_per_sm=resident_ctas(threads, registers, smem, gpu),
        )
    return replace(g, name=f"gemm_{choice}", kind="assumed", source="a choice, not a shipped kernel")


def tile_spaces(problem: AttentionProblem, _implementation: str, gpu: Profile) -> TileSpaces:
    """What may be chosen for each product of a call."""
    passes = ("fwd", "bwd") if problem.pass_ == "fwd_bwd" else (problem.pass_,)
    return {role: _space(role, name, pass_, problem, gpu) for pass_ in passes for role, name in PRODUCTS[pass_].items()}


def _space(role: str, name: str, pass_: str, problem: AttentionProblem, gpu: Profile) -> TileSpace | str:
    base = shipped_kernel(role, problem, gpu)
    own = choice_of(base)
    if base.narrow is not None:
        return f"rows of no multiple of 16 bytes run a kernel that was counted at its own {own}"
    if base.instruction_path == "tcgen05":
        return f"Blackwell's kernels of two CTAs are modelled at one assumed tile, {own}"
    groups = (1, 2, 4)
    found = []
    for m in _SIDES:
        for n in _SIDES:
            per_stage = 2 * base.tile_k * (m + n)
            overhead = PIPE_OVERHEAD_BYTES if base.instruction_path == "wgmma" else 0
            fitting = min(MOST_STAGES, (gpu.smem_bytes_per_cta_max - overhead) // per_stage)
            # a kernel of mma.sync may share its SM: as few slices as the seen ones, or as many as fit
            stages = {fitting} if base.instruction_path == "wgmma" else {3, 5, fitting}
            found += [TileChoice(m, n, s, w) for s in sorted(stages) if 2 <= s <= fitting for w in groups]
    rows, columns = product_shape(role, problem)

    def most_promising(legal: list[TileChoice]) -> list[TileChoice]:
        def cost(choice: TileChoice) -> tuple[float, TileChoice]:
            g = gemm_with(choice, role, problem, gpu)
            slots = gpu.num_sms * g.ctas_per_sm
            tiles = problem.batch * problem.heads * ceil_div(rows, g.tile_rows) * ceil_div(columns, g.tile_columns)
            return ceil_div(tiles, slots) * g.ctas_per_sm * tile_cost(g.tile_rows, g.tile_columns), choice

        return sorted(legal, key=cost)[:TRIED]

    return TileSpace(
        own,
        f"cuBLAS's {own} ({base.name}{', assumed for every size' if base.kind == 'assumed' else ''})",
        tuple(found),
        lambda choice: gemm_with(choice, role, problem, gpu),
        problem.with_(pass_=pass_),
        (name,),
        first=most_promising,
        meaning="rows x columns x slices x warpgroups",
    )
