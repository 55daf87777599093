"""Which tile FA3's forward kernel runs a problem with: the shipped one, another choice, or what still fits."""

from __future__ import annotations

from dataclasses import replace

from algorithms import kernels_cudnn, kernels_fa3_2024
from algorithms.common import ceil_div
from algorithms.fa3_backward import backward_tile_space
from algorithms.heuristics import fa3_pack_gqa
from algorithms.instruction_counts import InstructionMix
from algorithms.kernel_tables import Fa3Tile, fa3_forward_tile
from algorithms.tile_search import TileChoice, TileSpace, TileSpaces, candidates, fa3_with
from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile


def forward_kernel(
    implementation: str, problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None, may_pack: bool
) -> tuple[Fa3Tile, bool, InstructionMix | None, tuple[str, ...]]:
    """The tile of ``implementation``'s kernel for ``problem`` (as launched), whether query heads are packed into rows,
    its own counted instructions (``None``: FA3's) and notes on it."""
    if implementation in kernels_fa3_2024.NAMES:
        if implementation == kernels_fa3_2024.GRID_NAME and problem.dtype != "fp8":
            raise UnsupportedError(
                f"{implementation}: the paper's e4m3 kernel; {kernels_fa3_2024.NAME} is the 16-bit one"
            )
        return *_tile_of_2024(problem, tiles), ()
    if implementation != kernels_cudnn.NAME:
        return *forward_tile(problem, gpu, tiles, may_pack), None, ()
    if problem.head_dim > 128 or tiles is not None:
        raise UnsupportedError(f"{implementation}: modelled for head dims up to 128, with its own tile")
    tile = kernels_cudnn.cudnn_forward_tile(problem.head_dim, problem.dtype, problem.causal)
    mix = kernels_cudnn.cudnn_forward_mix(problem.head_dim, problem.causal)
    return tile, False, mix, (kernels_cudnn.ASSUMPTION,)


def _tile_of_2024(problem: AttentionProblem, tiles: TileChoice | None) -> tuple[Fa3Tile, bool, InstructionMix]:
    """The release's kernel for ``problem``, which packs no query heads, and its counted instructions."""
    if tiles is not None:
        raise UnsupportedError(f"{kernels_fa3_2024.NAME}: modelled with its own tiles; flash_attn_3 takes others")
    dtype = "e4m3" if problem.dtype == "fp8" else problem.dtype
    tile_m = kernels_fa3_2024.forward_tile(problem.head_dim, dtype, problem.causal, None).tile_m
    row_blocks = ceil_div(problem.seqlen_q, tile_m)
    tile = kernels_fa3_2024.forward_tile(problem.head_dim, dtype, problem.causal, row_blocks)
    return tile, False, kernels_fa3_2024.forward_mix(problem.head_dim, dtype, problem.causal)


def forward_tile(
    problem: AttentionProblem, gpu: Profile, tiles: TileChoice | None = None, may_pack: bool = True
) -> tuple[Fa3Tile, bool]:
    """The shipped kernel's tile for ``problem`` (as launched; whether or not it fits), or the kernel with ``tiles``
    (:class:`UnsupportedError` when that does not fit ``gpu``), and whether query heads are packed into rows."""
    local = problem.window is not None
    varlen = problem.seqlens_q is not None or problem.seqlens_k is not None
    causal = problem.causal and problem.seqlen_q > 1 and not local
    dtype = "e4m3" if problem.dtype == "fp8" else problem.dtype

    def tile_for(packed: bool, row_blocks: int | None = None) -> Fa3Tile:
        return fa3_forward_tile(
            problem.head_dim,
            problem.head_dim_v,
            dtype,
            causal=causal,
            local=local,
            softcap=bool(problem.softcap),
            varlen=varlen,
            pack_gqa=packed,
            row_blocks=row_blocks,
        )

    tile_m = tiles.tile_m if tiles is not None else tile_for(False).tile_m
    fills = fa3_pack_gqa(
        seqlen_q=problem.seqlen_q, group=problem.group, tile_m=tile_m, varlen_q=problem.seqlens_q is not None
    )
    packed = may_pack and problem.group > 1 and fills
    row_blocks = ceil_div(problem.seqlen_q * (problem.group if packed else 1), tile_m)
    t = tile_for(packed, row_blocks)
    return (fa3_with(tiles, t, problem.element_bytes, gpu, row_blocks) if tiles is not None else t), packed


def choice_of(t: Fa3Tile) -> TileChoice:
    """The tile of a kernel as a choice."""
    return TileChoice(t.tile_m, t.tile_n, t.kv_stages, t.num_mma_warpgroups)


def tile_spaces(problem: AttentionProblem, implementation: str, gpu: Profile) -> TileSpaces:
    """What may be chosen for each pass of a call."""
    passes = ("fwd", "bwd") if problem.pass_ == "fwd_bwd" else (problem.pass_,)
    if implementation == kernels_cudnn.NAME:
        return dict.fromkeys(passes, "cuDNN's kernels are closed and modelled with their own tile")
    if implementation in kernels_fa3_2024.NAMES:
        return dict.fromkeys(passes, f"{implementation} is modelled with the tiles of its release")
    spaces: dict[str, TileSpace | str] = {}
    if "fwd" in passes:
        may_pack = passes == ("fwd",)
        own = choice_of(forward_tile(problem, gpu, may_pack=may_pack)[0])
        spaces["fwd"] = TileSpace(
            own,
            f"the shipped kernel's {own}",
            candidates("fa3"),
            lambda choice: forward_tile(problem, gpu, choice, may_pack),
            problem.with_(pass_="fwd"),
            implementation="flash_attn_3",
        )
    if "bwd" in passes:
        spaces["bwd"] = backward_tile_space(problem, gpu)
    return spaces


def fit_tile(t: Fa3Tile, problem: AttentionProblem, gpu: Profile, substitutions: list[str]) -> Fa3Tile:
    """``t``, or on a hypothetical GPU with too little SMEM the largest ``tile_n`` (multiple of 16) that fits."""
    if t.smem_bytes <= gpu.smem_bytes_per_cta_max:
        return t
    if not substitutions:
        raise UnsupportedError(
            f"flash_attn_3's {t.tile_m}x{t.tile_n} tile needs {t.smem_bytes} bytes of SMEM; "
            f"{gpu.name} has {gpu.smem_bytes_per_cta_max} a CTA"
        )
    bytes_per_key = t.kv_stages * (t.padded_head_dim + t.padded_head_dim_v) * problem.element_bytes
    excess = t.smem_bytes - gpu.smem_bytes_per_cta_max
    tile_n = (t.tile_n - ceil_div(excess, bytes_per_key)) // 16 * 16
    if tile_n < 16:
        raise UnsupportedError(f"no flash_attn_3 tile fits {gpu.smem_bytes_per_cta_max} bytes of SMEM a CTA")
    substitutions.append(f"tile {t.tile_m}x{t.tile_n} -> {t.tile_m}x{tile_n} (SMEM of {gpu.name})")
    return replace(t, tile_n=tile_n, smem_bytes=t.smem_bytes - (t.tile_n - tile_n) * bytes_per_key)
