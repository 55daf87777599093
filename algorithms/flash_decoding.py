"""FlashDecoding (Dao et al. 2023): few queries, a long KV cache; the keys are split over CTAs and the parts combined.

1. The cache is cut into splits. 2. One CTA a split runs the forward schedule on its keys and writes a normalised
O and the LSE in fp32. 3. A second kernel sums the parts, weighted by exp(LSE_s - LSE).

Two libraries do so, each with its own heuristic for the number of splits: :mod:`algorithms.decoding_fa2`
(FlashAttention-2's split-KV kernel) and :mod:`algorithms.decoding_fa3` (FlashAttention-3's KV-cache entry point).
"""

from __future__ import annotations

from algorithms import decoding_fa2, decoding_fa3
from algorithms.common import Implementation, check_capabilities, check_supported
from algorithms.tile_search import Tiles, TileSpaces
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Program

IMPLEMENTATIONS = {
    "torch_flash_splitkv": Implementation(
        "torch_flash_splitkv",
        "flash_decoding",
        frozenset({"mma_sync", "cp_async"}),
        "flash-attention csrc/flash_attn (0251105a) flash_api.cpp, flash_fwd_kernel.h; vendored by pytorch",
        frozenset({"num_splits", "kv_capacity", "varlen", "paged", "window", "softcap"}),
    ),
    "flash_attn_3_kvcache": Implementation(
        "flash_attn_3_kvcache",
        "flash_decoding",
        frozenset({"wgmma", "tma"}),
        "flash-attention hopper/ (0251105a) flash_attn_with_kvcache",
        frozenset({"num_splits", "kv_capacity", "varlen", "paged", "fp8", "head_dim_v", "window", "softcap"}),
    ),
}
DEFAULT = "torch_flash_splitkv"
_BUILD = {"torch_flash_splitkv": decoding_fa2.build, "flash_attn_3_kvcache": decoding_fa3.build}


def default_for(gpu: Profile) -> str:
    """FA3's entry point where its instructions exist, else FA2's."""
    return "flash_attn_3_kvcache" if IMPLEMENTATIONS["flash_attn_3_kvcache"].requires <= gpu.capabilities else DEFAULT


def tile_spaces(problem: AttentionProblem, implementation: str, gpu: Profile) -> TileSpaces:
    """What may be chosen for the main kernel."""
    decoding = decoding_fa2 if implementation == "torch_flash_splitkv" else decoding_fa3
    return {"fwd": decoding.tile_space(problem, gpu)}


def build(
    problem: AttentionProblem,
    implementation: str,
    gpu: Profile,
    hypothetical: bool = False,
    tiles: Tiles | None = None,
) -> Program:
    """The decode program for ``problem`` on ``gpu``; ``tiles`` replaces the main kernel's own."""
    impl = IMPLEMENTATIONS[implementation]
    check_supported(problem, impl)
    substitutions = check_capabilities(impl, gpu, hypothetical)
    return _BUILD[implementation](problem, implementation, gpu, substitutions, (tiles or {}).get("fwd"))
