"""What the kernel tables of every algorithm share: dtypes, compiled head dims, occupancy, the combine kernel's row.

Facts in ``kernels_*.py`` are read from public repositories (``source``: repository:path, then the function), at the
snapshots named here; no code is taken. Sizes are in elements unless the name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulator.errors import InputError

#: The flash-attention snapshot that every ``flash-attention:`` source refers to.
FLASH_ATTENTION_SNAPSHOT = "0251105a (15 Aug 2026)"

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "e4m3": 1, "fp32": 4}

#: Registers of one SM, and the granularity in which a warp takes them; the same on sm80, sm90 and sm100.
_REGISTERS_PER_SM = 65_536
_REGISTER_GRANULE_PER_WARP = 256


def element_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype`` ("fp16", "bf16", "e4m3", "fp32"). InputError when unknown."""
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        raise InputError(f"dtype {dtype!r} is unknown; expected one of {', '.join(ELEMENT_BYTES)}") from None


def round_head_dim(head_dim: int, choices: tuple[int, ...], kernel: str) -> int:
    """The smallest compiled head dim that holds ``head_dim``. InputError when none does."""
    if head_dim < 1:
        raise InputError(f"head_dim {head_dim} must be at least 1")
    for choice in choices:
        if head_dim <= choice:
            return choice
    raise InputError(f"head_dim {head_dim}: {kernel} has kernels up to {choices[-1]}")


def ctas_per_sm(
    *,
    threads: int,
    registers_per_thread: int,
    smem_bytes: int,
    smem_bytes_per_sm: int,
    threads_per_sm_max: int = 2048,
    registers_per_sm: int = _REGISTERS_PER_SM,
) -> int:
    """CTAs that one SM holds at once: the tightest of registers, shared memory and threads, but at least 1 (that not
    even one fits is for the simulation to refuse: it knows the GPU).

    ``smem_bytes`` is what the kernel allocates; the hardware adds 1 KiB a CTA that it reserves for itself
    (CUDA programming guide, shared memory of compute capability 8.x and 9.0).
    """
    warps = -(-threads // 32)
    per_warp = -(-registers_per_thread * 32 // _REGISTER_GRANULE_PER_WARP) * _REGISTER_GRANULE_PER_WARP
    by_registers = registers_per_sm // (per_warp * warps)
    by_smem = smem_bytes_per_sm // (smem_bytes + 1024)
    return max(1, min(by_registers, by_smem, threads_per_sm_max // threads))


def registers_at_launch(threads: int, registers_per_sm: int = _REGISTERS_PER_SM) -> int:
    """Registers a thread of a kernel whose CTA has the SM to itself, before its warpgroups trade them (setmaxnreg)."""
    return min(255, registers_per_sm // threads // 8 * 8)


def require_16_bit(dtype: str, kernel: str) -> None:
    """InputError unless ``dtype`` is fp16 or bf16."""
    if element_bytes(dtype) != 2:
        raise InputError(f"dtype {dtype!r}: {kernel} takes fp16 or bf16")


@dataclass(frozen=True)
class CombineKernel:
    """The kernel that sums the partial outputs of the splits.

    ``rows_per_cta`` output rows (one row: one query of one head) and ``columns_per_cta`` of the head dim a CTA. Each
    thread holds 4 fp32 of O and walks the splits; ``splits_in_flight`` of its loads are outstanding at once.
    ``lse_rows_padded``: partial LSEs are reduced in a table of this many splits (a power of two; only the real
    splits are read).
    """

    rows_per_cta: int
    columns_per_cta: int
    threads: int
    bytes_per_load: int
    splits_in_flight: int
    lse_rows_padded: int
    smem_bytes: int
    partial_dtype: str
    source: str
    #: A warp's counted instructions outside the loop over the splits and in each of its iterations (0: not counted).
    instructions: int = 0
    instructions_per_split: int = 0


def power_of_two_at_least(value: int) -> int:
    """The smallest power of two >= ``value``."""
    return 1 << max(0, value - 1).bit_length()
