"""Kernels of a transformer beside attention, as tile programs: streams (element-wise, row-wise, optimiser) and GEMMs.

A *spec* (:class:`Stream`, :class:`Gemm`) says what a kernel computes on; :func:`stream_program` and
:func:`gemm_program` write it as a tile program for a GPU. Specs are hashable: equal ones are simulated once. These
programs carry bytes and instructions; unlike attention's they are not read by the numbers interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import fsum
from typing import Any

import numpy as np

from algorithms.common import ceil_div
from algorithms.instruction_counts import InstructionMix, elementwise_mix, softmax_mix
from algorithms.kernels_gemm import GemmKernel
from algorithms.kernels_softmax import softmax_backward_kernel, softmax_forward_kernel
from algorithms.standard_gemm import Product, batched_gemm, memset
from algorithms.standard_rows import softmax_backward, softmax_forward
from simulator.errors import InputError
from simulator.model_gemms import choose_gemm
from simulator.problem import DTYPE_BYTES, AttentionProblem
from simulator.profile import Profile
from simulator.program import (
    Await,
    Buffer,
    Compute,
    Instructions,
    Kernel,
    Load,
    Loop,
    Op,
    Program,
    Role,
    Store,
    Tensor,
    Trip,
    View,
    map_ops,
    tile,
    var,
)

#: An element-wise CTA of the program stands for eight real ones side by side (128 threads of 8 elements each).
STREAM_ELEMENTS, STREAM_COLUMNS, STREAM_THREADS = 8192, 256, 1024
#: CTAs from which a stream's length is rounded to 16 of them (at most 0.5 % of its bytes).
ROUNDED_FROM = 1600
#: Rules by which PyTorch chose its softmax kernel when the published runs were made (end of 2022).
TORCH_RELEASE = "2.0"
#: Lane instructions an element that an unaligned product (``*_align1``: 2-byte accesses, each with its own address and
#: predicate) issues for A, B and C. Two kernels of our H200 campaign say so (launches_run1.csv, 4097 queries, head dim
#: 128): at four a cycle and sub-partition, P V's 1775 cycles a slice of 8192 elements, and Q K^T's 19.2k cycles for
#: four slices of 12288 elements and 32768 results, are 28 to 33 each.
UNALIGNED_LANES_PER_ELEMENT = 28.0
#: Neighbouring column tiles that are walked together, so that both operands are found in L2 again (CUTLASS swizzles
#: its grid likewise; cuBLAS does not say how it walks).
BAND_TILES = 8

#: Lane instructions per element of a fused normalisation: two passes over a row held in registers, a warp reduction
#: and the affine part, vectorised. Assumed: twice PyTorch's counted vectorised element-wise kernel.
_NORM = InstructionMix(15.0, 6.5, 5.0, 0.1, 1.0, source="assumed: twice the counted vectorised element-wise kernel")
#: GELU by tanh or erf in one kernel: about ten FMA and one or two special functions an element beyond the access.
_ACTIVATION = InstructionMix(20.0, 13.0, 4.0, 2.0, 0.5, source="assumed: polynomial and tanh of GELU, vectorised")
#: Philox4x32 draws four 32-bit numbers a call; see ``dropout`` in simulator/tile_ops.py for its count.
_DROPOUT = InstructionMix(13.0, 4.0, 6.5, 0.0, 0.5, source="vectorised kernel, and Philox as in simulator/tile_ops.py")

MIXES: dict[str, InstructionMix] = {
    "vectorised": elementwise_mix("vectorised"),
    "broadcast": elementwise_mix("broadcast_add"),
    "strided": elementwise_mix("strided_copy"),
    "softmax": softmax_mix("warp"),
    "softmax_backward": softmax_mix("warp", backward=True),
    "norm": _NORM,
    "activation": _ACTIVATION,
    "dropout": _DROPOUT,
}


@dataclass(frozen=True)
class Stream:
    """A kernel that reads and writes each element once: ``reads``/``writes`` are bytes per element of each operand
    (1.0: a byte, or half of a 16-bit operand, as a causal softmax reads); ``mix`` names its instructions."""

    elements: int
    reads: tuple[float, ...]
    writes: tuple[float, ...]
    mix: str = "vectorised"

    @property
    def moved_bytes(self) -> float:
        """Bytes that the kernel has to move."""
        return self.elements * (sum(self.reads) + sum(self.writes))


@dataclass(frozen=True)
class Gemm:
    """``C[rows, columns] = A B`` over ``inner``, 16-bit operands, fp32 accumulation.

    ``transposed``: "" (A row-major, B [inner, columns]), "b" (B [columns, inner], ``x W^T``) or "a" (A [inner, rows],
    a weight gradient). ``aux_reads``/``aux_writes``: further bytes per element of C that a fused epilogue moves.
    ``activation``: the epilogue also evaluates GELU or its derivative. ``batch`` equal products side by side.
    """

    rows: int
    columns: int
    inner: int
    transposed: str = "b"
    aux_reads: float = 0.0
    aux_writes: float = 0.0
    activation: bool = False
    batch: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.columns * self.inner


@dataclass(frozen=True)
class TorchSoftmax:
    """PyTorch's softmax kernel (its backward's reduction, after the product dP * P) on ``matrices`` score matrices of
    ``rows`` x ``columns`` in ``dtype``, by the rules of an old release: what automatic mixed precision runs in fp32."""

    matrices: int
    rows: int
    columns: int
    dtype: str = "fp32"
    backward: bool = False
    masked_share: float = 0.0


def softmax_program(spec: TorchSoftmax, gpu: Profile) -> Program:
    """One launch of PyTorch's softmax, forward or backward."""

    def matrix(name: str, kind: str) -> Tensor:
        return Tensor(name, spec.matrices, spec.rows, spec.columns, spec.dtype, kind)

    first, last = matrix("dPP" if spec.backward else "S", "input"), matrix("dS" if spec.backward else "P", "output")
    kernels: tuple[Kernel, ...]
    if spec.backward:
        given = matrix("P", "input")
        kernel = softmax_backward_kernel(spec.columns, spec.dtype, TORCH_RELEASE)
        kernels, ins = (softmax_backward(first, given, last, kernel, gpu),), [first, given]
    else:
        kernel = softmax_forward_kernel(spec.columns, spec.dtype, TORCH_RELEASE)
        kernels, ins = (softmax_forward(first, last, kernel, gpu, spec.masked_share),), [first]
    # the tensor cores idle; the type only names their rate
    kernels = tuple(replace(k, compute_dtype="bf16") for k in kernels)
    return _program("softmax", kernels, ins, [last], "bf16")


def stream_program(spec: Stream, dtype: str = "bf16") -> Program:
    """One launch of an element-wise kernel. Operands are 16-bit matrices as wide as their bytes per element."""
    if spec.elements < 1:
        raise InputError(f"elements: {spec.elements} is not a positive number")
    columns = STREAM_COLUMNS
    rows = STREAM_ELEMENTS // columns
    ctas = ceil_div(spec.elements, STREAM_ELEMENTS)
    if ctas > ROUNDED_FROM:
        # whole groups of CTAs repeat exactly, which makes the replay of a long stream short
        ctas = round(ctas / 16) * 16
    rows = min(rows, ceil_div(spec.elements, columns))

    def operand(name: str, bytes_per_element: float, kind: str) -> Tensor:
        width = max(1, round(columns * bytes_per_element / DTYPE_BYTES["bf16"]))
        return Tensor(name, ctas, rows, width, "bf16", kind, rows)

    # a head a CTA: the replay then sees that any number of waves repeats
    head = var("q_head")
    ins = [operand(f"in{i}", b, "input") for i, b in enumerate(spec.reads)]
    outs = [operand(f"out{i}", b, "output") for i, b in enumerate(spec.writes)]
    buffers = [Buffer(t.name, rows, t.cols) for t in ins]
    loads = [Load(tile(t, head, 0, rows), b, token="in") for t, b in zip(ins[:-1], buffers[:-1], strict=True)]
    if ins:
        loads.append(Load(tile(ins[-1], head, 0, rows), buffers[-1]))
    mix = MIXES[spec.mix]
    elements = rows * columns
    lanes = {"fma": mix.fma, "alu": mix.alu, "exp": mix.xu}
    work = tuple((unit, n * elements) for unit, n in lanes.items() if n)
    work += (("issue", max(0.0, mix.issue - fsum(lanes.values())) * elements),)
    stores = []
    for t in outs:
        result = Buffer(t.name, rows, t.cols, t.dtype)
        source = buffers[0] if buffers else result
        stores += [Compute("copy", result, (source,), rows, t.cols), Store(View(result), tile(t, head, 0, rows))]
    body = [*loads, *([Await("in")] if len(ins) > 1 else []), Instructions(spec.mix, work), *stores]
    # one trip: the replay looks for repeating waves in trips
    ops = [Loop("pass", var("n_passes"), body)]
    kernel = Kernel(
        f"stream_{spec.mix}",
        (Role("warps0", ops, warps=STREAM_THREADS // 32),),
        {"q_head": np.arange(ctas, dtype=np.int64), "n_passes": np.ones(ctas, np.int64)},
        (Trip("n_passes"),),
        threads=STREAM_THREADS,
        registers_per_thread=32,
        compute_dtype=dtype,
        coord_order="elements in order",
    )
    return _program("stream", (kernel,), ins, outs, dtype)


def gemm_program(
    spec: Gemm, gpu: Profile, dtype: str = "bf16", choice: tuple[GemmKernel, int] | None = None
) -> Program:
    """The kernels of one matrix product on ``gpu``: the product, and the sum of its splits where it has some.

    ``choice`` is a kernel and its splits; :func:`~simulator.model_gemms.choose_gemm` when None.
    """
    kernel, splits = choice or choose_gemm(spec.rows, spec.columns, spec.inner, spec.batch, gpu)
    heads = spec.batch * splits
    inner = ceil_div(spec.inner, splits)
    # a split works on a slice of the inner dimension: the bytes of a matrix of that slice alone
    a_shape = (inner, spec.rows) if spec.transposed == "a" else (spec.rows, inner)
    b_shape = (spec.columns, inner) if spec.transposed == "b" else (inner, spec.columns)
    a = Tensor("A", heads, *a_shape, dtype, "input", 64)
    b = Tensor("B", heads, *b_shape, dtype, "input", 64)
    c = Tensor("C", heads, spec.rows, spec.columns, "fp32" if splits > 1 else dtype, "output", 64)
    product = Product(a, b, c, inner, transpose_a=spec.transposed == "a", transpose_b=spec.transposed == "b")
    path = kernel.instruction_path.replace(".", "_")
    kernels = list(batched_gemm("gemm", product, kernel, path))
    kernels[0] = _walked_in_bands(kernels[0], kernel)
    if splits == 1 and (spec.aux_reads or spec.aux_writes or spec.activation):
        kernels[0] = _with_epilogue(kernels[0], spec, dtype)
    if kernel.name.endswith("align1"):
        kernels[0] = _with_scalar_accesses(kernels[0], kernel)
    if kernel.helper_memset and kernels[0].ctas > gpu.num_sms * kernel.ctas_per_sm:
        kernels.insert(0, memset("gemm_counter"))
    if splits > 1:
        mix = "activation" if spec.activation else "vectorised"
        sums = Stream(
            spec.batch * spec.rows * spec.columns,
            (4.0,) * splits + ((spec.aux_reads,) if spec.aux_reads else ()),
            (2.0,) + ((spec.aux_writes,) if spec.aux_writes else ()),
            mix,
        )
        reduction = stream_program(sums, dtype)
        kernels.append(replace(reduction.kernels[0], name="sum_of_splits"))
    return _program("gemm", tuple(kernels), [a, b], [c], dtype)


def _program(name: str, kernels: tuple[Kernel, ...], ins: list[Tensor], outs: list[Tensor], dtype: str) -> Program:
    tensors = [*ins, *outs]
    return Program(
        name,
        kernels[-1].name,
        AttentionProblem(dtype=dtype),
        kernels,
        {t.name: t for t in ins},
        {t.name: t for t in outs},
        sum(t.bytes for t in tensors),
    )


def _walked_in_bands(kernel: Kernel, g: GemmKernel) -> Kernel:
    """The same CTAs, ordered so that a band of :data:`BAND_TILES` column tiles is walked row by row."""
    if "n_tiles" in kernel.coords:
        return kernel
    row = kernel.coords["row0"] // g.tile_rows
    col = kernel.coords["col0"] // g.tile_columns
    # CTAs of a cluster stay neighbours
    keys = (
        row % g.cluster_rows,
        col % g.cluster_columns,
        col % BAND_TILES // g.cluster_columns,
        row // g.cluster_rows,
        col // BAND_TILES,
        kernel.coords["q_head"],
    )
    order = np.lexsort(keys)
    return replace(
        kernel,
        coords={name: values[order] for name, values in kernel.coords.items()},
        coord_order="bands of column tiles, rows in a band, batch",
    )


def _with_scalar_accesses(kernel: Kernel, g: GemmKernel) -> Kernel:
    """An unaligned product with all instructions of its 2-byte accesses (some may be in its text already)."""

    def full(op: Any) -> Any:
        if isinstance(op, Instructions) and op.name == "element_loads":
            return None
        return op

    roles = []
    consumers = sum(1 for role in kernel.roles if role.warps)
    per_slice = g.tile_k * (g.tile_rows + g.tile_columns) / consumers
    for role in kernel.roles:
        if not role.warps:
            roles.append(role)
            continue
        ops: list[Op] = []
        for op in map_ops(role.ops, full):
            if isinstance(op, Loop):
                work = (("issue", UNALIGNED_LANES_PER_ELEMENT * per_slice),)
                op = replace(op, body=(*op.body, Instructions("element_loads", work)))
            elif isinstance(op, Store):
                work = (("issue", UNALIGNED_LANES_PER_ELEMENT * op.into.rows * op.into.cols),)
                ops.append(Instructions("element_stores", work))
            ops.append(op)
        roles.append(Role(role.name, tuple(ops), role.warps))
    return replace(kernel, roles=tuple(roles))


def _with_epilogue(kernel: Kernel, spec: Gemm, dtype: str) -> Kernel:
    """The GEMM with a fused epilogue: reads and writes a further matrix of C's shape (pre-activations), computes."""
    roles = []
    for role in kernel.roles:
        last = role.ops[-1] if role.ops else None
        if not isinstance(last, Store):
            roles.append(role)
            continue
        place = last.into
        extra: list[Op] = []
        for name, bytes_per_element, write in (("aux_in", spec.aux_reads, False), ("aux_out", spec.aux_writes, True)):
            if not bytes_per_element:
                continue
            aux = Tensor(name, place.tensor.heads, place.tensor.rows, place.tensor.cols, dtype, "scratch", 64)
            buffer = Buffer(name, place.rows, place.cols, dtype)
            where = tile(aux, place.head, place.row, place.rows, place.col, place.cols)
            if write:
                stored = last.source
                source = stored.source if isinstance(stored, View) else stored
                extra += [Compute("copy", buffer, (source,), place.rows, place.cols), Store(View(buffer), where)]
            else:
                extra.append(Load(where, buffer))
        if spec.activation:
            mix, size = MIXES["activation"], place.rows * place.cols
            extra.append(
                Instructions("activation", (("fma", mix.fma * size), ("alu", mix.alu * size), ("exp", mix.xu * size)))
            )
        roles.append(Role(role.name, (*role.ops[:-1], *extra, last), role.warps))
    return replace(kernel, roles=tuple(roles))
