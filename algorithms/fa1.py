"""FlashAttention-1, forward (Dao et al. 2022, Algorithm 1): K/V blocks outer, query rows inner, O through HBM.

A CTA owns a (batch, head), or a slice of its query rows. For every K/V block ``j`` (``Bc`` keys) it walks its row
blocks ``i`` (``Br`` rows): it loads Q_i, O_i and the statistics, makes S = Q_i K_j^T, rescales and normalises O_i at
once, and writes O_i and the statistics back. Its warps split the keys, so they meet in SMEM for every row block.

The outer loop is the CTA's sequence of work tiles (:func:`~algorithms.fa1_schedule.work_tiles`), the inner one the
text of a role.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms import varlen
from algorithms.common import (
    Implementation,
    ceil_div,
    check_capabilities,
    check_supported,
    compulsory_bytes,
)
from algorithms.fa1_backward import backward_schedule, build_backward
from algorithms.fa1_roles import roles
from algorithms.fa1_schedule import (
    KINDS,
    Schedule,
    in_place_of_others,
    package_tile,
    schedule_for,
    work_tiles,
)
from algorithms.fa1_tiles import Q_BUFFERS, candidates
from algorithms.passes import build_passes
from algorithms.standard import expand_heads
from algorithms.tile_search import TileChoice, Tiles, TileSpace, TileSpaces
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Kernel,
    Program,
    Tensor,
    Trip,
)

_V1 = "flash-attention@v1.0.9: csrc/flash_attn/src/fmha_fprop_kernel_1xN.h"
IMPLEMENTATIONS = {
    # the package as published timings ran it: the query rows of a head are shared by several CTAs
    "flash_attn_1": Implementation(
        "flash_attn_1",
        "fa1",
        frozenset({"mma_sync"}),
        _V1,
        # the package's only entry: cu_seqlens
        features=frozenset({"deterministic", "dropout", "varlen"}),
        passes=("fwd", "bwd", "fwd_bwd"),
    ),
    # the paper's grid, one CTA a head, with the tiles of the kernel that simulator/measure runs
    "flash_attn_1_paper": Implementation(
        "flash_attn_1_paper",
        "fa1",
        frozenset({"mma_sync"}),
        "simulator/measure/fa1_kernel.py; arXiv:2205.14135, Algorithm 1",
        features=frozenset({"deterministic", "dropout"}),
        passes=("fwd", "bwd", "fwd_bwd"),
    ),
    # the paper's grid and the paper's block sizes, which grow with the SM's SRAM: Bc = M / 4d, Br = min(Bc, d)
    "flash_attn_1_sram": Implementation(
        "flash_attn_1_sram", "fa1", frozenset({"mma_sync"}), "arXiv:2205.14135, Algorithm 1, line 1"
    ),
}
DEFAULT = "flash_attn_1"


def tensors_of(problem: AttentionProblem, s: Schedule) -> dict[str, Tensor]:
    """Inputs, output, and what travels through HBM between key blocks: fp32 O and the statistics."""
    p = problem
    heads, d, dv = p.batch * p.heads, p.head_dim, p.head_dim_v
    kv_heads, rows = p.batch * p.kv_heads, p.seqlen_q
    t = {
        "Q": Tensor("Q", heads, rows, d, p.dtype, "input", s.rows),
        "K": Tensor("K", kv_heads, p.seqlen_k, d, p.dtype, "input", s.keys),
        "V": Tensor("V", kv_heads, p.seqlen_k, dv, p.dtype, "input", s.keys),
        "O": Tensor("O", heads, rows, dv, p.dtype, "output", s.rows),
    }
    names = ("LSE",) if s.packaged else ("l", "m")
    kind = "output" if s.packaged else "scratch"
    t |= {name: Tensor(name, heads, rows, 1, "fp32", kind, s.rows) for name in names}
    if p.seqlen_k > s.keys:
        t["O_tmp"] = Tensor("O_tmp", heads, rows, dv, "fp32", "scratch", s.rows)
    elif not s.packaged:
        del t["l"], t["m"]
    return varlen.ragged(t, p) if varlen.is_varlen(p) else t


def forward_kernel(problem: AttentionProblem, s: Schedule, t: dict[str, Tensor], gpu: Profile) -> Kernel:
    """The kernel over all (CTA, key block) work tiles."""
    slots = gpu.num_sms * s.ctas_per_sm
    coords = work_tiles(problem, s, slots)
    kinds = [kind for kind in KINDS if coords[kind].any()]
    coords = {name: values for name, values in coords.items() if name not in KINDS or name in kinds}
    cta = roles(problem, s, t, kinds)
    return Kernel(
        "fmha_fwd",
        varlen.within_sequence(cta) if varlen.is_varlen(problem) else cta,
        coords,
        tuple(Trip(kind) for kind in kinds),
        threads=32 * s.warps,
        smem_bytes=s.smem_bytes,
        registers_per_thread=s.registers_per_thread,
        ctas_per_sm=s.ctas_per_sm,
        schedule="static",
        path="mma_sync",
        compute_dtype=problem.dtype,
        coord_order="slot, key block, wave; CTAs by batch, head, row slice",
        **in_place_of_others(problem, s, len(coords["key_row"]), slots),
    )


def tile_spaces(problem: AttentionProblem, implementation: str, gpu: Profile) -> TileSpaces:
    """What may be chosen for each pass of a call."""
    if implementation == "flash_attn_1_sram":
        s = schedule_for(problem.with_(pass_="fwd"), implementation, gpu)
        return {"fwd": f"the paper's rule, Bc = M/4d and Br = min(Bc, d), makes its tile {s.rows}x{s.keys} here"}
    spaces: dict[str, TileSpace | str] = {}
    if problem.pass_ != "bwd":
        own = package_tile(problem, gpu)
        shipped = TileChoice(own.tile_m, own.tile_n, Q_BUFFERS, own.num_warps // 4)
        spaces["fwd"] = TileSpace(
            shipped,
            f"the shipped kernel's {shipped} (fa1:flash_attn_1_sram takes the paper's blocks, which grow with SRAM)",
            candidates((1, 2)),
            lambda choice: package_tile(problem, gpu, choice),
            problem.with_(pass_="fwd"),
        )
        if implementation == "flash_attn_1_paper":
            s = schedule_for(problem.with_(pass_="fwd"), implementation, gpu)
            spaces["fwd"] = f"the kernel was counted at {s.rows}x{s.keys} only; fa1:flash_attn_1 can choose"
    if problem.pass_ != "fwd":
        kernel = backward_schedule(problem, gpu)
        shipped = TileChoice(kernel.rows, kernel.keys, Q_BUFFERS, kernel.warps // 4)
        spaces["bwd"] = TileSpace(
            shipped,
            f"the shipped kernel's {shipped}",
            candidates((2,)),
            lambda choice: backward_schedule(problem, gpu, choice),
            problem.with_(pass_="bwd"),
        )
    return spaces


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: Tiles | None = None,
) -> Program:
    """The FlashAttention-1 program for ``problem`` on ``gpu``, forward, backward or both; ``tiles`` replaces the 1.x
    kernels' own."""
    impl = IMPLEMENTATIONS[implementation]
    tiles = tiles or {}
    if problem.mask == "padding":
        program = build(problem.with_(mask=None), implementation, gpu, hypothetical, tiles)
        return replace(program, problem=problem, warnings=(*program.warnings, PADDING))
    check_supported(problem, impl)
    if varlen.is_varlen(problem) and problem.group > 1:
        raise UnsupportedError(
            f"{problem.kv_heads} KV heads with lengths by sequence: {implementation} has none but one a query head"
        )
    substitutions = check_capabilities(impl, gpu, hypothetical)
    return build_passes(
        problem,
        lambda p: build_forward(p, implementation, gpu, substitutions, tiles=tiles.get("fwd")),
        lambda p: build_backward(p, implementation, gpu, substitutions, tiles.get("bwd")),
        lambda p: build_forward(p, implementation, gpu, substitutions, packaged=True, tiles=tiles.get("fwd")),
    )


def build_forward(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    substitutions: list[str],
    packaged: bool = False,
    tiles: TileChoice | None = None,
) -> Program:
    """The forward pass; ``packaged`` takes the 1.x kernel, whose LSE a backward pass needs, whatever the grid."""
    s = schedule_for(problem, "flash_attn_1" if packaged else implementation, gpu, tiles)
    if packaged and implementation != "flash_attn_1":
        s = replace(s, slices=1, ctas_per_sm=min(2, ceil_div(problem.batch * problem.heads, gpu.num_sms)))
    t = tensors_of(problem, s)
    live = compulsory_bytes(t.values())
    inputs = {name: t[name] for name in "QKV"}
    expansions = []
    for name in "KV":
        t[name], kernels = expand_heads(t[name], problem)
        expansions += kernels
        live += t[name].bytes if kernels else 0
    kernel = forward_kernel(problem, s, t, gpu)
    return Program(
        "fa1",
        implementation,
        problem,
        (*expansions, kernel),
        inputs,
        {name: t[name] for name in ("O", "LSE") if name in t},
        live,
        notes=NOTES if problem.causal and any(q != k for q, k in problem.sequences()) else (),
        substitutions=tuple(substitutions),
        attributes={"tile": (s.rows, s.keys), "row_slices": s.slices},
    )


PADDING = (
    "mask=padding: flash-attention 1.x takes sequences without their padding and no mask; "
    "every sequence is taken to be as long as given"
)
NOTES = ("flash-attention 1.x aligns a causal mask to the top left; here it is aligned to the bottom right, as asked",)
