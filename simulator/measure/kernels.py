"""Registry of the real kernels that can be measured, each with the reason why not when it cannot run here.

Every forward and backward is called through the operator below autograd, so that a case launches the kernel and nothing
else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from simulator.errors import InputError
from simulator.measure import fa1_package, fa3_package
from simulator.measure import kernels_hopper as hopper
from simulator.measure import kernels_layout as layout
from simulator.measure import kernels_pytorch as own
from simulator.measure.cases import Case
from simulator.measure.kernel_inputs import Prepared, torch_module


@dataclass(frozen=True)
class Kernel:
    """One implementation: how to prepare a case on it, and what it needs.

    ``refuse`` returns the reason why a case cannot run, or None.
    """

    name: str
    algorithms: tuple[str, ...]
    describe: str
    needs: Callable[[], str | None]
    refuse: Callable[[Case], str | None]
    prepare: Callable[[Case], Prepared]


# ---------------------------------------------------------------- what is installed


def need_cuda() -> str | None:
    """None when PyTorch sees a CUDA GPU, else the reason."""
    try:
        torch = torch_module()
    except ImportError:
        return "PyTorch is not installed (pip install 'iosim[measure]')"
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA GPU"


def _need_module(name: str, hint: str, hopper: bool = False) -> Callable[[], str | None]:
    def check() -> str | None:
        if reason := need_cuda():
            return reason
        if hopper and torch_module().cuda.get_device_capability() != (9, 0):
            return "needs a GPU of compute capability 9.0"
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken binary wheel raises OSError, a wrong version AttributeError
            return f"{name} cannot be imported ({type(error).__name__}: {str(error)[:80]}); {hint}"
        return None

    return check


def _need_cudnn() -> str | None:
    if reason := need_cuda():
        return reason
    return None if torch_module().backends.cudnn.is_available() else "cuDNN is not available in this PyTorch"


_FA3_HINT = "install a FlashAttention-3 wheel (tokenspeed-fa3 or fa3-fwd)"
_CUTE_HINT = "install flash-attn-4 with nvidia-cutlass-dsl"

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "torch_eager",
            ("standard",),
            "unfused PyTorch: baddbmm, (mask), softmax, bmm",
            need_cuda,
            own.eager_refuse,
            own.eager_prepare,
        ),
        Kernel(
            "torch_eager_bshd",
            ("standard",),
            "unfused PyTorch on (batch, seqlen, heads, head_dim), as FlashAttention's benchmarks call it",
            need_cuda,
            layout.eager_refuse,
            layout.eager_prepare,
        ),
        Kernel(
            "torch_matmul_bshd",
            ("standard",),
            "unfused PyTorch by torch.matmul on expanded K and V, as xformers' decoding benchmark calls it",
            need_cuda,
            layout.matmul_refuse,
            layout.matmul_prepare,
        ),
        Kernel(
            "flash_attn_1",
            ("fa1",),
            "flash-attn 1.0.9's CUDA kernels from a library built with fa1_driver.cu",
            lambda: need_cuda() or fa1_package.need_library(),
            fa1_package.refuse,
            fa1_package.prepare,
        ),
        Kernel(
            "flash_attn_3_2024",
            ("fa3",),
            "FlashAttention-3 of July 2024 from libraries built with fa3_driver.cu",
            lambda: need_cuda() or fa3_package.need_library(),
            fa3_package.refuse,
            fa3_package.prepare,
        ),
        Kernel(
            "flash_attn_3_2024_grid",
            ("fa3",),
            "its e4m3 kernels with a CTA a tile, as the paper timed them",
            lambda: need_cuda() or fa3_package.need_library(),
            fa3_package.refuse,
            fa3_package.prepare,
        ),
        Kernel(
            "flash_attn_1_paper",
            ("fa1",),
            "FA1's schedule in Triton: K/V outer, O and statistics through HBM",
            _need_module("triton", "it comes with PyTorch on Linux"),
            own.fa1_refuse,
            own.fa1_prepare,
        ),
        Kernel("torch_flash", ("fa2",), "PyTorch's FlashAttention-2", need_cuda, own.fa2_refuse, own.fa2_prepare),
        Kernel(
            "torch_flash_splitkv",
            ("flash_decoding",),
            "PyTorch's FlashAttention-2, split-KV path",
            need_cuda,
            own.fa2_refuse,
            own.fa2_prepare,
        ),
        Kernel(
            "flash_attn_3",
            ("fa3",),
            "FlashAttention-3 forward",
            _need_module("flash_attn_interface", _FA3_HINT, True),
            hopper.fa3_refuse,
            hopper.fa3_prepare,
        ),
        Kernel(
            "flash_attn_3_kvcache",
            ("flash_decoding",),
            "FlashAttention-3 decode with a KV cache",
            _need_module("flash_attn_interface", _FA3_HINT, True),
            hopper.fa3_refuse,
            hopper.fa3_kvcache_prepare,
        ),
        Kernel(
            "flash_attn_4_sm90",
            ("fa3",),
            "CuTe-DSL FlashAttention, Hopper backward",
            _need_module("flash_attn.cute.interface", _CUTE_HINT, True),
            hopper.cute_refuse,
            hopper.cute_prepare,
        ),
        Kernel("cudnn_sm90", ("fa3",), "cuDNN fused attention", _need_cudnn, hopper.cudnn_refuse, hopper.cudnn_prepare),
    )
}

DEFAULT_IMPLEMENTATION = {
    "standard": "torch_eager",
    "fa1": "flash_attn_1_paper",
    "fa2": "torch_flash",
    "fa3": "flash_attn_3",
    "flash_decoding": "flash_attn_3_kvcache",
}


def kernel_of(case: Case) -> Kernel:
    """The registry entry of a case; :class:`InputError` names the known implementations of its algorithm."""
    name = case.implementation or DEFAULT_IMPLEMENTATION[case.algorithm]
    kernel = KERNELS.get(name)
    if kernel is None or case.algorithm not in kernel.algorithms:
        known = ", ".join(k.name for k in KERNELS.values() if case.algorithm in k.algorithms)
        raise InputError(f"{case.case_id}: implementation={name!r} does not run {case.algorithm}; known: {known}")
    return kernel
