"""PyTorch's softmax and element-wise kernels as data: what ``torch_eager`` runs between its two matrix products.

Launch shapes were seen on an H200 with PyTorch 2.11 (torch.profiler, 2026-11-29) and agree with the sources named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from algorithms.kernels_common import element_bytes, power_of_two_at_least
from simulator.errors import InputError

#: Default (not opt-in) SMEM of a CTA that PyTorch asks the driver for: 48 KiB on every GPU since sm70.
_DEFAULT_SMEM_BYTES = 48 * 1024
#: Largest span in bytes that PyTorch's 32-bit element-wise indexing covers in one launch.
_INDEXABLE_BYTES = 2**31

#: Warp softmax takes rows up to this long: (elements, bytes), by release.
_WARP_SOFTMAX_MAX = {"2.0": (1024, 4096), "2.1": (1024, 4096), "2.11": (2048, 8192)}


@dataclass(frozen=True)
class RowKernel:
    """A kernel in which one CTA (or warp) owns whole rows of a matrix.

    ``kind``: "warp" (rows in registers of one warp), "registers" (of a CTA), "smem", "global" (row re-read).
    ``global_reads``: times each element of each input is read from global memory; every output is written once.
    ``access_bytes``: bytes that one thread moves with one load or store. ``columns_in_flight``: columns of a row whose
    loads are under way at once (the rest is asked for when they have come), ``padded_columns``: columns that
    instructions are issued for. ``divisions_per_element``: full IEEE fp32
    divisions, which leave the fast path for a zero numerator: masked scores cost more than others.
    """

    name: str
    kind: str
    rows_per_cta: int
    threads: int
    registers_per_thread: int
    smem_bytes: int
    access_bytes: int
    columns_in_flight: int
    padded_columns: int
    global_reads: tuple[tuple[str, int], ...]
    exponentials_per_element: int
    divisions_per_element: int
    block_reductions: int
    accumulate_dtype: str
    source: str


#: Columns of each operand that the warp kernels have in flight, forward and backward. By ncu on an H200, a warp waits
#: 145 cycles for memory per load forward (rows of 512, 1024 and 2048 alike) and 119 backward (1024, two operands), a
#: quarter and a fifth of the latency of 590 cycles: four and five loads of a lane at once.
_WARP_COLUMNS_IN_FLIGHT = {"forward": 128, "backward": 80}
#: Instructions of an element beyond a row's end in the warp kernel over those of a real one: 2060 a warp for rows of
#: 1400 in registers for 2048, 2476 for 2048.
_BEYOND_ROW = 0.47
#: Registers a thread of cunn_SoftMaxForwardReg by elements that it holds (torch.profiler on an H200).
_IN_REGISTERS = {1: 26, 2: 28, 3: 28, 4: 30, 5: 30, 6: 29, 7: 34, 8: 37, 9: 40}


def _release(torch_release: str) -> tuple[int, int]:
    try:
        return _WARP_SOFTMAX_MAX[torch_release]
    except KeyError:
        raise InputError(
            f"torch_release {torch_release!r} has no softmax rules; expected one of {', '.join(_WARP_SOFTMAX_MAX)}"
        ) from None


def _warp_rows(row_length: int) -> tuple[int, int]:
    """(rows a CTA of 128 threads takes, elements of a row that one thread holds)."""
    padded = power_of_two_at_least(row_length)
    lanes = min(padded, 32)
    rows_per_warp = 2 if padded <= 128 else 1
    return 128 // lanes * rows_per_warp, padded // lanes


def _warp_columns(row_length: int) -> int:
    """Columns that a warp issues instructions for."""
    return row_length + round(_BEYOND_ROW * (power_of_two_at_least(row_length) - row_length))


def _halved_threads(row_length: int, vector: int) -> int:
    """Threads of a CTA a row that is halved so that most of the row is accessed ``vector`` elements at a time."""
    return max(32, power_of_two_at_least(max(min(row_length // vector, 1024) // 2, 1)))


def softmax_forward_kernel(row_length: int, dtype: str, torch_release: str = "2.11") -> RowKernel:
    """The kernel behind ``torch.softmax(x, -1)`` for contiguous 16-byte aligned rows.

    2.11: a warp a row to 2048 elements; then a CTA a row, in registers to 9 x 1024 elements (2-byte loads, not
    vectorised), in SMEM to 48 KiB if the length is a multiple of 16 bytes, else three passes over global memory.
    2.1 to 2.3: a warp to 1024, then SMEM, else three passes; 2.0: no SMEM kernel. Both halve the CTA so that most of a
    row is read 16 bytes at a time; from 2.4 on (pull request 122970) it has a thread an element, to 1024. Sums in fp32.
    Source: aten/src/ATen/native/cuda/SoftMax.cu host_softmax, PersistentSoftmax.cuh.
    """
    size = element_bytes(dtype)
    longest, longest_bytes = _release(torch_release)
    vector = 16 // size
    source = f"pytorch:aten/src/ATen/native/cuda/SoftMax.cu (rules of {torch_release})"
    common: dict[str, Any] = dict(
        exponentials_per_element=1, divisions_per_element=1, accumulate_dtype="fp32", source=source
    )
    if row_length <= longest and row_length * size <= longest_bytes:
        rows, per_thread = _warp_rows(row_length)
        registers = {16: 32, 32: 48, 64: 80}.get(per_thread, 32)
        return RowKernel(
            "softmax_warp_forward", "warp", rows, 128, registers, 0, size, _WARP_COLUMNS_IN_FLIGHT["forward"],
            _warp_columns(row_length), (("S", 1),), block_reductions=0, **common,
        )  # fmt: skip
    threads = min(-(-row_length // 32) * 32, 1024)
    if torch_release in ("2.0", "2.1"):
        threads = _halved_threads(row_length, vector)
    if torch_release == "2.0":
        return RowKernel(
            "cunn_SoftMaxForward", "global", 1, threads, 32, 4 * threads, 16, threads * vector, row_length, (("S", 3),),
            block_reductions=2, **common,
        )  # fmt: skip
    # old releases reduce through a word a thread, new ones through one a warp
    scratch = threads * 4 if torch_release == "2.1" else threads // 32 * 4
    in_registers = -(-row_length // threads)
    if torch_release != "2.1" and in_registers < 10:
        return RowKernel(
            "cunn_SoftMaxForwardReg", "registers", 1, threads, _IN_REGISTERS[in_registers], scratch, size, row_length,
            in_registers * threads, (("S", 1),), block_reductions=2, **common,
        )  # fmt: skip
    if row_length < (_DEFAULT_SMEM_BYTES - scratch) // size and row_length % vector == 0:
        return RowKernel(
            "cunn_SoftMaxForwardSmem", "smem", 1, threads, 32, row_length * size + scratch, 16, threads * vector,
            row_length, (("S", 1),), block_reductions=2, **common,
        )  # fmt: skip
    return RowKernel(
        "cunn_SoftMaxForward", "global", 1, threads, 32, scratch, 16, threads * vector, row_length, (("S", 3),),
        block_reductions=2, **common,
    )  # fmt: skip


def softmax_backward_kernel(row_length: int, dtype: str, torch_release: str = "2.11") -> RowKernel:
    """The reduction of softmax's backward, after an element-wise product dP*P: a warp a row to 1024 elements, else a
    CTA that keeps the row in SMEM (before 2.11, or beyond 48 KiB, reads it twice). No exponential, no division.
    Source: SoftMax.cu host_softmax_backward."""
    size = element_bytes(dtype)
    _release(torch_release)
    vector = 16 // size
    source = f"pytorch:aten/src/ATen/native/cuda/SoftMax.cu (rules of {torch_release})"
    common: dict[str, Any] = dict(
        exponentials_per_element=0, divisions_per_element=0, accumulate_dtype="fp32", source=source
    )
    once = (("dP*P", 1), ("P", 1))
    if row_length <= 1024 and row_length * size <= 4096:
        rows, per_thread = _warp_rows(row_length)
        return RowKernel(
            "softmax_warp_backward", "warp", rows, 128, {16: 55, 32: 96}.get(per_thread, 32), 0, size,
            _WARP_COLUMNS_IN_FLIGHT["backward"], _warp_columns(row_length), once, block_reductions=0, **common,
        )  # fmt: skip
    threads = _halved_threads(row_length, vector)
    scratch = threads // 32 * 4
    fits = row_length < (_DEFAULT_SMEM_BYTES - scratch) // size and row_length % vector == 0
    if fits and torch_release == "2.11":
        return RowKernel(
            "cunn_SoftMaxBackwardSmem", "smem", 1, threads, 29, row_length * size + scratch, 16, threads * vector,
            row_length, once, block_reductions=1, **common,
        )  # fmt: skip
    return RowKernel(
        "cunn_SoftMaxBackward", "global", 1, threads, 40, 4 * threads, 16, threads * vector, row_length,
        (("dP*P", 2), ("P", 1)), block_reductions=1, **common,
    )  # fmt: skip


@dataclass(frozen=True)
class ElementwiseKernel:
    """An element-wise kernel: ``threads`` x ``elements_per_thread`` outputs a CTA.

    ``vectorised``: 16-byte accesses and no index arithmetic; otherwise each element's offset in each operand is
    found by integer division (a multiply-high per dimension), one element an access, and a thread's next element is
    loaded after the one before was stored (they might overlap). ``launches``: PyTorch halves a tensor until one
    launch's bytes fit 32-bit offsets.
    """

    name: str
    threads: int
    elements_per_thread: int
    vectorised: bool
    launches: int
    registers_per_thread: int
    access_bytes: int
    source: str


def _elementwise(elements: int, dtype: str, vectorised: bool) -> ElementwiseKernel:
    size = element_bytes(dtype)
    launches = 1
    while elements * size > launches * _INDEXABLE_BYTES:
        launches *= 2
    return ElementwiseKernel(
        name="vectorized_elementwise_kernel" if vectorised else "elementwise_kernel",
        threads=128,
        elements_per_thread=16 // size if vectorised else (2 if size >= 4 else 4),
        vectorised=vectorised,
        launches=launches,
        registers_per_thread=40 if vectorised else 18,
        access_bytes=16 if vectorised else size,
        source="pytorch:aten/src/ATen/native/cuda/CUDALoops.cuh, MemoryAccess.cuh; seen with PyTorch 2.11 on an H200",
    )


def mask_add_kernel(matrices: int, rows: int, columns: int, dtype: str) -> ElementwiseKernel:
    """``S + mask`` with one (rows, columns) mask for ``matrices`` score matrices.

    The mask is broadcast, so the kernel is not vectorised, unless a launch is left with a single matrix (a matrix
    that alone fills 2 GiB, or no more than one of them).
    """
    launches = _elementwise(matrices * rows * columns, dtype, vectorised=False).launches
    return _elementwise(matrices * rows * columns, dtype, vectorised=matrices <= launches)


def contiguous_elementwise_kernel(elements: int, dtype: str) -> ElementwiseKernel:
    """A product, scale or add of equally shaped contiguous tensors: dP*P and the scaling of dQ and dK in backward."""
    return _elementwise(elements, dtype, vectorised=True)


def strided_copy_kernel(elements: int, dtype: str) -> ElementwiseKernel:
    """A copy between layouts: expanding K/V heads for GQA (``repeat_interleave``), contiguous() of a transpose."""
    return _elementwise(elements, dtype, vectorised=False)


def concatenation_kernel(elements: int, dtype: str) -> ElementwiseKernel:
    """``torch.stack``'s share of one tensor: CatArrayBatchedCopy, an index calculation an element, a launch for all."""
    return replace(_elementwise(elements, dtype, vectorised=False), name="CatArrayBatchedCopy", launches=1)
