"""Instructions that real kernels execute, counted: the work of each pipe beyond what the mathematics asks for.

Counted once each on one H200 (ncu, smsp__inst_executed and its pipes; PyTorch 2.11, tokenspeed-fa3 2026-08-10;
2026-11-29). They are counts, not times: they depend on the compiled kernel and neither on clock nor on memory. A
score element in the first four columns costs this many instructions of one lane (a warp's instruction over 32).

Pipes of sm80 and sm90, lanes an SM and cycle: issue 128, fma 128 (FFMA/FADD/FMUL/IMAD), alu 64 (max, compare,
logic, moves, convert), xu 16 (exp2, reciprocal, some conversions), lsu 32; ``tensor`` counts mma.sync m16n8k16 or
wgmma instructions. ``issue`` holds everything, so its excess over the named pipes is control and uniform work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.errors import InputError

COUNTED_ON = "ncu, one H200, PyTorch 2.11 / tokenspeed-fa3 20260810, 2026-11-29"


@dataclass(frozen=True)
class InstructionMix:
    """Lane instructions per element, by pipe. ``masked_extra``: further ``alu``/``issue`` of an element whose
    softmax numerator is zero (IEEE division's slow path). ``issue_interval_cycles``: what one warp takes from an
    instruction to the next while it waits for neither memory nor other warps (ncu's stall reasons *wait*,
    *short scoreboard* and *dispatch* beside the issue itself; 0: not counted). ``issue_per_thread``: instructions of
    a thread for each row that it has a part in, beyond its elements'."""

    issue: float
    fma: float
    alu: float
    xu: float
    lsu: float
    tensor: float = 0.0
    masked_extra_issue: float = 0.0
    masked_extra_alu: float = 0.0
    source: str = COUNTED_ON
    issue_interval_cycles: float = 0.0
    issue_per_thread: float = 0.0

    def at_masked_fraction(self, masked_fraction: float) -> InstructionMix:
        """The mean mix of rows of which ``masked_fraction`` (0..1) is masked."""
        if not 0 <= masked_fraction <= 1:
            raise InputError(f"masked_fraction {masked_fraction} must lie in 0..1")
        return InstructionMix(
            self.issue + masked_fraction * self.masked_extra_issue, self.fma,
            self.alu + masked_fraction * self.masked_extra_alu, self.xu, self.lsu, self.tensor, source=self.source,
            issue_interval_cycles=self.issue_interval_cycles, issue_per_thread=self.issue_per_thread,
        )  # fmt: skip


@dataclass(frozen=True)
class TileCounts:
    """A tiled kernel's counts: ``mix`` per score element of the padded tile, and per CTA and key block walked:
    ``smem_wavefronts`` (cycles of the SMEM port for loads by threads; 0: operands go to wgmma directly),
    ``spill_store_bytes`` and ``spill_load_bytes`` (registers spilled to local memory; stores go through to L2).

    ``around``: a warp's instructions outside the loop, in the build for whole tiles and in the one that checks bounds;
    ``uneven``: the latter's instructions in the loop over the former's."""

    mix: InstructionMix
    smem_wavefronts: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    around: tuple[int, int] = (0, 0)
    uneven: float = 1.0


#: The last columns: launches of two to eight query blocks (mix_launches_unaligned_run1.csv, short_bwd_fa2); how much
#: more the loop of uneven rows takes was seen at head dim 64 only.
_FA2_BACKWARD = {
    64: TileCounts(InstructionMix(21.96, 7.06, 3.99, 1.00, 4.31, 5.0), 5351, 1216, 5056, (610, 1060), 1.105),
    128: TileCounts(InstructionMix(32.14, 7.47, 5.15, 1.00, 7.40, 10.0), 4964, 64, 64, (764, 1110), 1.105),
}
# (head dim, causal); wgmma instructions are few and long, so ``tensor`` says nothing of the tensor core's time. The
# intervals are those of one warp beside its exponentials: (serial_cycles_30 - 8 exponentials) / instructions of the
# unmasked loops of sass_fa3_loops.csv.
_FA3_FORWARD = {
    (64, False): InstructionMix(6.73, 2.52, 1.79, 1.02, 0.21, 0.17, issue_interval_cycles=1.67),
    (64, True): InstructionMix(7.17, 2.82, 2.10, 1.04, 0.10, 0.19, issue_interval_cycles=1.73),
    (128, False): InstructionMix(7.08, 2.97, 1.85, 1.02, 0.07, 0.22, issue_interval_cycles=1.73),
    (128, True): InstructionMix(7.97, 3.33, 2.02, 1.04, 0.10, 0.25, issue_interval_cycles=1.68),
    (192, False): InstructionMix(9.21, 4.09, 2.01, 1.04, 0.09, 0.34, issue_interval_cycles=1.79),
    (192, True): InstructionMix(9.65, 4.17, 2.27, 1.04, 0.10, 0.34, issue_interval_cycles=1.74),
    (256, False): InstructionMix(12.24, 5.63, 2.42, 1.05, 0.14, 0.53, issue_interval_cycles=1.78),
    (256, True): InstructionMix(12.62, 5.77, 2.69, 1.05, 0.13, 0.53, issue_interval_cycles=1.77),
}
# V's transposition by the producer included
_FA3_FP8_ON = "ncu, one H200, tokenspeed-fa3 20260810, 2026-11-30 (mix_launches_more_run1.csv, fa3_fp8_mix)"
_FA3_FP8_FORWARD = {
    (64, False): InstructionMix(6.52, 2.66, 1.92, 1.03, 0.13, 0.09, source=_FA3_FP8_ON, issue_interval_cycles=1.50),
    (64, True): InstructionMix(7.02, 2.71, 2.16, 1.03, 0.14, 0.09, source=_FA3_FP8_ON, issue_interval_cycles=1.52),
    (128, False): InstructionMix(7.01, 2.81, 2.10, 1.02, 0.22, 0.10, source=_FA3_FP8_ON, issue_interval_cycles=1.55),
    (128, True): InstructionMix(7.57, 2.89, 2.43, 1.02, 0.25, 0.10, source=_FA3_FP8_ON, issue_interval_cycles=1.49),
    (256, False): InstructionMix(10.03, 4.51, 2.58, 1.03, 0.45, 0.19, source=_FA3_FP8_ON, issue_interval_cycles=1.47),
    (256, True): InstructionMix(10.60, 4.62, 2.83, 1.04, 0.50, 0.19, source=_FA3_FP8_ON, issue_interval_cycles=1.46),
}


#: How much longer than in its loop an instruction outside it waits for the one before (fitted: timed_builds_run1.csv).
OUTSIDE_PACE = 2.1


@dataclass(frozen=True)
class AroundTile:
    """Warp instructions of a work tile outside its key loop, all warps of the CTA together; a warp's further ones when
    query heads are packed into rows, so that threads copy Q and O: ``packed_fixed`` (row pointers by division) and
    ``packed_per_copy`` for each 16 bytes that a thread moves."""

    instructions: int
    packed_fixed: float = 115.0
    packed_per_copy: float = 3.75


_FA3_AROUND_ON = "mix_launches_builds_run1.csv: tiles of several key blocks, less the loop's instructions"
_FA3_AROUND = {
    "16-bit": {64: AroundTile(3950), 128: AroundTile(3290), 256: AroundTile(4740)},
    "e4m3": {64: AroundTile(4840), 128: AroundTile(4555), 256: AroundTile(5970)},
}

# (head dim, masked) of flash_attn_4_sm90's main backward kernel, producer, dQ's writer, prologue and epilogue included,
# without the uniform pipe's instructions (1.2 to 11.9): descriptors of wgmma, made while the products before them run
_FA4_ON = "ncu, one H200, flash-attn-4 4.0.0b36, 2026-11-30 (mix_launches_fa4_run1.csv, stalls_fa4_run1.csv)"


def _fa4(issue: float, fma: float, alu: float, lsu: float, tensor: float, interval: float) -> InstructionMix:
    return InstructionMix(issue, fma, alu, 1.0, lsu, tensor, source=_FA4_ON, issue_interval_cycles=interval)


_FA4_BACKWARD = {
    (64, False): _fa4(9.36, 3.29, 2.42, 1.41, 0.50, 2.67),
    (64, True): _fa4(10.73, 3.48, 3.55, 1.42, 0.50, 2.45),
    (128, False): _fa4(9.78, 3.33, 2.38, 1.02, 0.85, 3.34),
    (128, True): _fa4(11.79, 3.59, 3.59, 1.08, 1.00, 2.59),
    (256, True): _fa4(24.69, 4.44, 5.49, 2.72, 4.25, 2.61),
}

# kind of kernels_softmax.RowKernel -> counts at row lengths 2048, 4096, 16384 and 32768
_SOFTMAX_FORWARD = {
    # 652, 1260 and 2476 instructions a warp for rows of 512, 1024 and 2048, 388 for two rows of 128
    "warp": InstructionMix(
        38.0, 13.9, 9.4, 3.0, 3.2, 0.0, 36.8, 24.9, issue_interval_cycles=4.4, issue_per_thread=43.0
    ),
    "registers": InstructionMix(79.5, 31.0, 18.8, 4.0, 6.8, 0.0, 34.3, 19.5, issue_interval_cycles=4.6),
    # 49.6 and 47.3 an element of rows of 12288 and 16384; 46.8 and 44.8 of 24576 and 32768
    "smem": InstructionMix(
        40.4, 22.6, 11.7, 4.0, 1.8, 0.0, 34.3, 21.2, issue_interval_cycles=4.5, issue_per_thread=110.0
    ),
    "global": InstructionMix(
        38.8, 23.0, 10.0, 4.2, 1.1, 0.0, 34.3, 20.9, issue_interval_cycles=4.6, issue_per_thread=191.0
    ),
}
_SOFTMAX_BACKWARD = {
    "warp": InstructionMix(13.9, 5.0, 5.3, 0.0, 3.25, issue_interval_cycles=2.8),
    "smem": InstructionMix(14.3, 5.4, 5.9, 0.0, 1.3, issue_interval_cycles=3.5),
    # of whole vectors: not counted
    "global": InstructionMix(12.4, 4.2, 3.4, 0.0, 1.1, issue_interval_cycles=2.8),
    # mix_launches_unaligned_run1.csv: 24 to 41 an element, of which a thread takes some two hundred whatever its row
    "shifted": InstructionMix(13.0, 6.0, 4.5, 0.0, 1.1, issue_interval_cycles=2.8, issue_per_thread=195.0),
}
_ELEMENTWISE = {
    "broadcast_add": InstructionMix(56.75, 11.0, 21.25, 0.0, 3.25, issue_interval_cycles=3.4),
    "strided_copy": InstructionMix(54.5, 12.75, 18.75, 0.0, 2.25, issue_interval_cycles=4.6),
    # (batch, seqlen, heads, head_dim) to a matrix a head: one dimension more to divide by; torch.stack
    "layout_copy": InstructionMix(66.5, 16.75, 22.5, 0.0, 2.25, issue_interval_cycles=4.6),
    "concatenation": InstructionMix(85.4, 40.1, 42.1, 0.0, 2.0, issue_interval_cycles=6.6),
    "vectorised": InstructionMix(7.4, 3.25, 2.4, 0.0, 0.5, issue_interval_cycles=3.4),
}


def _between(table: dict[int, InstructionMix], head_dim: int) -> InstructionMix:
    """The mix at ``head_dim``, on the line through the two counted head dims around it (or the last two): all work that
    depends on the head dim (fragments, tensor instructions, rescaling) is proportional to it."""
    counted = sorted(table)
    upper = next((i for i, d in enumerate(counted) if d >= head_dim), len(counted) - 1)
    if counted[upper] == head_dim or upper == 0:
        return table[counted[upper]]
    low, high = counted[upper - 1], counted[upper]
    t = (head_dim - low) / (high - low)
    names = ("issue", "fma", "alu", "xu", "lsu", "tensor", "issue_interval_cycles")
    values = {n: getattr(table[low], n) + t * (getattr(table[high], n) - getattr(table[low], n)) for n in names}
    return InstructionMix(**values, source=f"{table[low].source}; between head dims {low} and {high}")


def _nearest(table: dict[int, TileCounts], head_dim: int) -> TileCounts:
    """The counts of the counted head dim nearest to ``head_dim``; the larger of two equally near."""
    return table[min(table, key=lambda counted: (abs(counted - head_dim), -counted))]


def fa2_backward_counts(head_dim: int) -> TileCounts:
    """FA2 backward main kernel, counted at 64 and 128."""
    return _nearest(_FA2_BACKWARD, head_dim)


def fa4_backward_mix(head_dim: int, masked: bool = False) -> InstructionMix:
    """flash_attn_4_sm90's main backward kernel with (``masked``) and without a causal mask or window, per score element
    of the padded tile. 256 was counted with a mask only: without, it does not do what the mask costs at head dim 64,
    where both kernels have one tile."""
    if head_dim <= 128 or masked:
        return _between({d: mix for (d, m), mix in _FA4_BACKWARD.items() if m == masked}, max(head_dim, 64))
    plain, mask, wide = (_FA4_BACKWARD[k] for k in ((64, False), (64, True), (256, True)))
    less = {n: getattr(wide, n) - (getattr(mask, n) - getattr(plain, n)) for n in ("issue", "fma", "alu", "lsu")}
    return _between({128: _FA4_BACKWARD[128, False], 256: replace(wide, **less)}, head_dim)


def fa3_forward_mix(head_dim: int, causal: bool = False, dtype: str = "bf16") -> InstructionMix:
    """FA3 forward: softmax, rescaling of O and control per score element of the padded tile (prologue, epilogue and
    producer included). The rescale is head_dim / tile_n of ``fma``; the rest of it is 2.2 to 2.4 at every head dim."""
    counted = _FA3_FP8_FORWARD if dtype == "e4m3" else _FA3_FORWARD
    return _between({d: mix for (d, masked), mix in counted.items() if masked == causal}, head_dim)


def fa3_around(head_dim: int, dtype: str) -> AroundTile:
    """FA3 forward outside its key loop (H200, :data:`_FA3_AROUND_ON`), of the next larger head dim that was counted."""
    counted = _FA3_AROUND["e4m3" if dtype == "fp8" else "16-bit"]
    return counted[min((d for d in counted if d >= head_dim), default=max(counted))]


def softmax_mix(kind: str, backward: bool = False) -> InstructionMix:
    """``kind`` of a ``RowKernel``, per element of the padded row; "shifted": "global", of rows between vectors."""
    table = _SOFTMAX_BACKWARD if backward else _SOFTMAX_FORWARD
    try:
        return table[kind]
    except KeyError:
        raise InputError(f"softmax kernel kind {kind!r} was not counted; counted are {', '.join(table)}") from None


def elementwise_mix(kind: str) -> InstructionMix:
    """ "broadcast_add" (mask), "strided_copy" (GQA expansion, transposes), "layout_copy", "concatenation" (stack) and
    "vectorised" (equal shapes)."""
    try:
        return _ELEMENTWISE[kind]
    except KeyError:
        raise InputError(f"element-wise kind {kind!r} is unknown; expected {', '.join(_ELEMENTWISE)}") from None
