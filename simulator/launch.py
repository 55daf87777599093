"""What a launch is on a GPU before it runs: CTAs an SM holds, those replayed as one, and the L2 cut to its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from simulator.accesses import kernel_accesses
from simulator.errors import UnsupportedError
from simulator.memory import L2, WAYS, WIDE_BLOCK_ROWS, WIDE_COLS
from simulator.physics import Physics
from simulator.plan import iterations_of, plan_replay
from simulator.profile import Profile
from simulator.program import Kernel, Tensor, once_a_kernel


def occupancy(kernel: Kernel, profile: Profile) -> int:
    """CTAs of ``kernel`` that one SM holds: its own limit, registers, SMEM, threads and CTA slots.

    Raises :class:`~simulator.errors.UnsupportedError` when it holds not even one.
    """
    warps = -(-kernel.threads // 32)
    registers = -(-kernel.registers_per_thread * 32 // 256) * 256 * warps
    for what, needed, there in (
        ("registers", registers, profile.registers_per_sm),
        ("threads", kernel.threads, profile.max_threads_per_sm),
        ("bytes of SMEM", kernel.smem_bytes, profile.smem_bytes_per_cta_max),
    ):
        if needed > there:
            raise UnsupportedError(f"a CTA of {kernel.name} needs {needed} {what}; {profile.name} has {there}")
    limits = [
        profile.registers_per_sm // max(1, registers),
        profile.max_threads_per_sm // max(1, kernel.threads),
        profile.max_ctas_per_sm,
    ]
    if kernel.smem_bytes:
        limits.append(profile.smem_bytes_per_sm // (kernel.smem_bytes + 1024))
    if kernel.ctas_per_sm is not None:
        limits.append(kernel.ctas_per_sm)
    return max(1, min(limits))


@once_a_kernel
def bundle_size(kernel: Kernel, slots: int) -> int:
    """How many consecutive CTAs of a kernel with very many short CTAs are replayed as one (1: each its own)."""
    if kernel.ctas < 32 * slots or kernel.ctas_each > 1:
        return 1
    if kernel.trips:
        # passes over the same rows find them in L2, which a bundle's rows together would leave
        return 1
    rows = {a.tile.rows for a in kernel_accesses(kernel)}
    row_steps = np.unique(np.diff(kernel.coords["row0"])[: 4 * slots]) if "row0" in kernel.coords else None
    # CTAs that share a row each have some of its columns
    if row_steps is None or len(rows - {1}) > 1 or max(rows) not in row_steps or 0 in row_steps:
        return 1
    return int(max(1, min(32 // max(1, max(rows)), kernel.ctas // (24 * slots))))


def launched_ctas(kernel: Kernel, slots: int) -> int:
    """CTAs that share a launch's work: the slots that a static schedule uses, where it does not use all of them."""
    if kernel.schedule != "static":
        return kernel.launched
    used = np.unique(np.flatnonzero(iterations_of(kernel)) % slots).size
    return kernel.launched if used == slots else max(1, used)


def wide_block_rows(kernels: Iterable[Kernel], slots_of: Callable[[Kernel], int]) -> int:
    """Rows of a wide tensor's block: what one bundle of its row-wise kernels covers (at least 1)."""
    rows = WIDE_BLOCK_ROWS
    for kernel in kernels:
        if kernel.trips or kernel.ctas_each > 1:
            # they touch parts of rows
            continue
        bundle = bundle_size(kernel, slots_of(kernel))
        for access in kernel_accesses(kernel):
            if access.tile.tensor.cols > WIDE_COLS and access.tile.cols >= access.tile.tensor.cols:
                rows = min(rows, access.tile.rows * bundle)
    return max(1, rows)


def empty_cache(
    kernels: Sequence[Kernel], tensors: dict[str, Tensor], profile: Profile, physics: Physics, budget: int
) -> L2:
    """An empty L2 in blocks as large as the tiles or chunks of ``kernels``, which touch ``tensors``."""
    capacity, partitions = int(profile.l2_bytes * physics.l2_capacity_fraction), profile.l2_partitions
    wide_rows = wide_block_rows(kernels, lambda k: profile.num_sms * occupancy(k, profile))
    coarsen: dict[str, int] = {}
    for kernel in kernels:
        slots = profile.num_sms * occupancy(kernel, profile)
        chunk = plan_replay(kernel, slots, capacity // partitions, budget, bundle_size(kernel, slots)).chunk
        for access in kernel_accesses(kernel):
            if access.loops and not access.is_write:
                name = access.tile.tensor.name
                coarsen[name] = min(coarsen.get(name, chunk), chunk)
    return L2.of(tensors, capacity, coarsen, wide_rows, WAYS, partitions)
