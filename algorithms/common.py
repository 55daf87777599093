"""What the attention algorithms share: the problem's tensors, feature checks, instruction path, walks over keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from simulator.errors import UnsupportedError
from simulator.problem import AttentionProblem
from simulator.profile import Profile
from simulator.program import Buffer, Compute, Index, Tensor, as_index, var

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Implementation:
    """A real kernel that follows an algorithm's schedule.

    ``requires`` are the GPU capabilities its instructions need; ``features`` the optional parts of a problem that
    it runs (``window``, ``dropout``, ``fp8``, ``paged``, ``varlen``, ``mask``, ``softcap``, ``head_dim_v``) in every
    pass, ``forward_features`` those of its forward pass alone.
    """

    name: str
    algorithm: str
    requires: frozenset[str]
    source: str
    features: frozenset[str] = frozenset()
    passes: tuple[str, ...] = ("fwd",)
    forward_features: frozenset[str] = frozenset()

    def features_of(self, pass_: str) -> frozenset[str]:
        """The optional features that a call of this pass may use."""
        return self.features | (self.forward_features if pass_ == "fwd" else frozenset())


#: What a mask does to the fused kernels, and to a call of PyTorch's SDPA (sdp_utils.cpp: its filters and their order).
_NO_MASK = (
    "takes no mask; SDPA silently falls through flash to mem-efficient, then math (cuDNN first where it is preferred); "
    "algorithm 'standard' models unfused attention with a mask; give padding as seqlens instead"
)

#: Why an implementation lacks a feature, and what runs instead: (implementation, pass or "" for all, feature).
_REASONS = {
    ("flash_attn_1", "", "window"): "flash-attention took window_size in 2.3; use fa2 or fa3",
    ("flash_attn_1", "", "softcap"): "flash-attention took softcap in 2.6; use fa2 or fa3",
    ("torch_flash", "", "head_dim_v"): "FlashAttention-2 has one head dim; use fa3 or standard, or pad V",
    ("torch_flash", "", "paged"): "pages belong to the KV-cache entries; use algorithm flash_decoding",
    ("flash_attn_3", "", "paged"): "pages belong to the KV-cache entries; use algorithm flash_decoding",
    ("torch_eager", "", "varlen"): (
        "eager PyTorch has one length a call: use mask 'padding' (iosim compare shows it padded), or a row a sequence"
    ),
}


def _reasons(implementation: str, pass_: str, missing: list[str]) -> str:
    found = (_REASONS.get((implementation, key, name)) for name in missing for key in (pass_, ""))
    return "".join(f"; {name}" for name in dict.fromkeys(x for x in found if x))


def ceil_div(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def used_features(problem: AttentionProblem) -> set[str]:
    """The optional features that ``problem`` asks for."""
    used = set()
    if problem.window is not None:
        used.add("window")
    if problem.mask is not None:
        used.add("mask")
    if problem.dropout:
        used.add("dropout")
    if problem.softcap:
        used.add("softcap")
    if problem.page_size is not None:
        used.add("paged")
    if problem.dtype == "fp8":
        used.add("fp8")
    if problem.dtype == "fp32":
        used.add("fp32")
    if problem.head_dim_v != problem.head_dim:
        used.add("head_dim_v")
    if problem.seqlens_q is not None or problem.seqlens_k is not None:
        used.add("varlen")
    if problem.kv_capacity is not None and problem.kv_capacity != problem.seqlen_k:
        used.add("kv_capacity")
    if problem.num_splits is not None and problem.num_splits != 1:
        used.add("num_splits")
    if problem.deterministic and problem.pass_ != "fwd":
        used.add("deterministic")
    return used


def check_supported(problem: AttentionProblem, implementation: Implementation) -> None:
    """Raise :class:`UnsupportedError` for anything in ``problem`` that ``implementation`` does not honour."""
    if problem.pass_ not in implementation.passes:
        raise UnsupportedError(
            f"pass {problem.pass_!r} is not modelled for {implementation.name}; "
            f"it has {', '.join(implementation.passes)}"
        )
    missing = sorted(used_features(problem) - implementation.features_of(problem.pass_))
    if missing == ["mask"]:
        raise UnsupportedError(f"mask {problem.mask!r}: {implementation.name} {_NO_MASK}")
    if missing:
        raise UnsupportedError(
            f"{', '.join(missing)}: not modelled for {implementation.name} ({implementation.algorithm})"
            f"{_reasons(implementation.name, problem.pass_, missing)}"
        )


def check_capabilities(implementation: Implementation, gpu: Profile, hypothetical: bool) -> list[str]:
    """Substitutions (one line each) that let ``implementation`` run on ``gpu``; an error unless ``hypothetical``."""
    missing = sorted(implementation.requires - gpu.capabilities)
    if not missing:
        return []
    if not hypothetical:
        raise UnsupportedError(f"{implementation.name} needs {', '.join(missing)}, which {gpu.name} lacks")
    path = fastest_path(gpu)
    instead = {"wgmma": f"{path} instructions", "tma": "asynchronous copies by the loader's threads"}
    return [f"{name} -> {instead.get(name, 'nothing')} on {gpu.name}" for name in missing]


def fastest_path(gpu: Profile) -> str:
    """The tensor instruction path with the highest rate on ``gpu``."""
    return max(gpu.tensor_flop_per_cycle_per_sm, key=lambda p: max(gpu.tensor_flop_per_cycle_per_sm[p].values()))


def instruction_path(wanted: str, gpu: Profile) -> str:
    """``wanted`` if ``gpu`` has it, else its fastest path (hypothetical runs)."""
    return wanted if wanted in gpu.tensor_flop_per_cycle_per_sm else fastest_path(gpu)


def matrices(problem: AttentionProblem, block_q: int, block_k: int, packed: bool = False) -> dict[str, Tensor]:
    """Q, K, V, O and LSE of ``problem`` as tensors; ``packed`` interleaves the query heads of a KV head as rows.

    ``block_q``/``block_k`` are the rows of one L2 block (the tile rows, so that a tile is one block).
    """
    p = problem
    q_heads, q_rows, group = p.batch * p.heads, p.seqlen_q, 1
    if packed:
        q_heads, q_rows, group = p.batch * p.kv_heads, p.seqlen_q * p.group, p.group
    out_dtype = "bf16" if p.dtype == "fp8" else p.dtype
    kv_heads = p.batch * p.kv_heads
    return {
        "Q": Tensor("Q", q_heads, q_rows, p.head_dim, p.dtype, "input", block_q, packed_group=group),
        "K": Tensor("K", kv_heads, p.seqlen_k, p.head_dim, p.dtype, "input", block_k),
        "V": Tensor("V", kv_heads, p.seqlen_k, p.head_dim_v, p.dtype, "input", block_k),
        "O": Tensor("O", q_heads, q_rows, p.head_dim_v, out_dtype, "output", block_q, packed_group=group),
        "LSE": Tensor("LSE", q_heads, q_rows, 1, "fp32", "output", block_q, packed_group=group),
    }


def compulsory_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum of the sizes of ``tensors``."""
    return sum(t.bytes for t in tensors)


def row_vectors(rows: int, *names: str) -> tuple[Buffer, ...]:
    """fp32 registers with one value per row."""
    return tuple(Buffer(name, rows) for name in names)


def softmax_scale(problem: AttentionProblem) -> float:
    """What the exponent multiplies scores by: 1/sqrt(d), or the soft cap once ``softcap`` has applied 1/sqrt(d)."""
    return problem.softcap or problem.head_dim**-0.5


def softcap_ops(scores: Buffer, problem: AttentionProblem) -> list[Compute]:
    """S = tanh(S / (sqrt(d) * cap)), if there is a cap; the factor ``cap`` is left to the exponent."""
    if not problem.softcap:
        return []
    factor = problem.head_dim**-0.5 / problem.softcap
    return [Compute("softcap", scores, (scores,), scores.rows, scores.cols, (("factor", factor),))]


def softcap_backward_ops(
    scores: Buffer, gradients: Buffer, problem: AttentionProblem
) -> tuple[list[Compute], list[Compute]]:
    """What caps S and keeps the cap's slope, and what multiplies the gradients of S by it; empty without a cap."""
    cap = softcap_ops(scores, problem)
    if not cap:
        return [], []
    slope = Buffer("softcap_slope", scores.rows, scores.cols)
    return (
        [*cap, Compute("softcap_slope", slope, (scores,), scores.rows, scores.cols)],
        [Compute("multiply", gradients, (gradients, slope), scores.rows, scores.cols)],
    )


def effective_masks(problem: AttentionProblem, left_from: int, right_from: int) -> AttentionProblem:
    """``problem`` as a launcher sees it: bounds from ``left_from``/``right_from`` keys on are none, an unbounded left
    side with 0 right is causal, and any other bound a (local) window."""
    left, right = problem.sides
    left = -1 if left >= left_from else left
    right = -1 if right >= right_from and not problem.causal else right
    causal = left < 0 and right == 0
    window = (left, right) if (left >= 0 or right >= 0) and not causal else None
    return problem.with_(causal=causal, window=window)


def fill(buffer: Buffer, value: float) -> Compute:
    """Set a register buffer to a constant (free: the first product or compare overwrites it)."""
    return Compute("fill", buffer, (), buffer.rows, buffer.cols, (("value", float(value)),))


def mask_op(
    scores: Buffer, problem: AttentionProblem, row: Index, col: Index, group: int = 1, sinks: bool = False
) -> Compute:
    """Hide the scores that the mask (causal, window, end of the keys) excludes; ``sinks``: a window's left bound is
    tested together with a number of keys that every query sees (FA3; none here)."""
    left, right = problem.sides
    params = (
        ("row", as_index(row)),
        ("col", as_index(col)),
        ("seqlen_k", problem.seqlen_k),
        ("shift", problem.seqlen_k - problem.seqlen_q),
        ("left", left),
        ("right", right),
        ("group", group),
    )
    fn = "mask" if problem.window is None else "mask_window_sink" if sinks else "mask_window"
    return Compute(fn, scores, (scores,), scores.rows, scores.cols, params)


def dropout_op(fn: str, probabilities: Buffer, problem: AttentionProblem, row: Index, col: Index) -> Compute:
    """Drop (``dropout``) or mark (``dropout_sign``) the probabilities that the problem's dropout hits."""
    params = (("head", var("q_head")), ("row", as_index(row)), ("col", as_index(col)), ("dropout", problem.dropout))
    return Compute(fn, probabilities, (probabilities,), probabilities.rows, probabilities.cols, params)


def key_coordinates(row_blocks: int, tile_n: int, key_loop: Callable[[int], object]) -> dict[str, np.ndarray]:
    """Loop coordinates by row block (:func:`walk_coordinates`)."""
    loops = [key_loop(block) for block in range(row_blocks)]
    names = ("first", "last", "masked", "left")
    first, last, masked, left = (np.array([getattr(loop, name) for loop in loops], np.int64) for name in names)
    return walk_coordinates(first, last, masked, left, tile_n)


def walk_coordinates(
    first: np.ndarray, last: np.ndarray, masked: np.ndarray, left: np.ndarray, tile_n: int
) -> dict[str, np.ndarray]:
    """Trips of the three parts of a walk over key blocks and the first key row of each part.

    Blocks are walked from the last to the first: ``n_masked`` that test the mask, ``n_full`` that do not and, at a
    window's left edge, ``n_left`` that do. ``last_row`` is the first row of the last block walked.
    """
    full = last - first - masked - left
    return {
        "n_masked": masked,
        "n_full": full,
        "n_left": left,
        "masked_row": (last - 1) * tile_n,
        "full_row": (last - 1 - masked) * tile_n,
        "left_row": (last - 1 - masked - full) * tile_n,
        "last_row": first * tile_n,
    }


def grid_indices(*sizes: int) -> list[np.ndarray]:
    """Index arrays of a grid in launch order; the first size varies fastest."""
    total, each, out = int(np.prod(sizes)), 1, []
    for size in sizes:
        # laid out by repetition: a division and a remainder by element take ten times as long
        once = np.repeat(np.arange(size, dtype=np.int64), each)
        each *= size
        out.append(np.tile(once, total // each if each else 0))
    return out
