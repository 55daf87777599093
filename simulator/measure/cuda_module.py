"""Compile a CUDA C++ string with NVRTC and launch its kernels on PyTorch's current stream, through ctypes.

Needs PyTorch with CUDA (for the context, the stream and the tensors) and the NVRTC library that comes with it; no nvcc.
"""

from __future__ import annotations

import ctypes
import glob
import os
from typing import Any

from simulator.errors import InputError

_OPT_IN_SHARED_BYTES = 48 * 1024  # a launch above this must raise the function's dynamic limit first
_MAX_DYNAMIC_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES in cuda.h


def _load_nvrtc() -> ctypes.CDLL:
    import torch

    beside_torch = os.path.join(os.path.dirname(torch.__file__), "..", "nvidia", "*", "lib", "libnvrtc.so.*")
    candidates = sorted(path for path in glob.glob(beside_torch) if "builtins" not in path and "alt" not in path)
    candidates += ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"]
    for name in candidates:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise InputError("NVRTC not found beside PyTorch or on the library path; expected libnvrtc.so (CUDA 12 or 13)")


def compile_cubin(source: str, architecture: str, options: tuple[str, ...] = ()) -> bytes:
    """Machine code of ``source`` for ``architecture`` (for example ``sm_90a``); works without a GPU.

    Raises ``RuntimeError`` with the compiler's log when the source does not compile.
    """
    nvrtc = _load_nvrtc()
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"iosim.cu", 0, None, None)
    if status:
        raise RuntimeError(f"nvrtcCreateProgram: error {status}")
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
    array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
    status = nvrtc.nvrtcCompileProgram(program, len(flags), array)
    if status:
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError("nvrtc: " + log.value.decode(errors="replace"))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: CUDA driver error {status}")


class CudaFunction:
    """One kernel. Arguments: tensors pass their address, ints pass as ``long long``, floats as ``float``."""

    def __init__(self, driver: ctypes.CDLL, handle: ctypes.c_void_p, name: str) -> None:
        self._driver = driver
        self._handle = handle
        self._name = name

    def __call__(self, grid: int, block: int, *arguments: Any, shared_bytes: int = 0) -> None:
        """Launch ``grid`` × ``block`` threads on the current stream with ``shared_bytes`` of dynamic shared memory."""
        import torch

        if shared_bytes > _OPT_IN_SHARED_BYTES:
            status = self._driver.cuFuncSetAttribute(self._handle, _MAX_DYNAMIC_SHARED_ATTRIBUTE, int(shared_bytes))
            _check(status, f"{self._name}: {shared_bytes} bytes of shared memory")
        values: list[ctypes.c_float | ctypes.c_longlong | ctypes.c_void_p] = []
        for argument in arguments:
            if isinstance(argument, float):
                values.append(ctypes.c_float(argument))
            elif isinstance(argument, int):
                values.append(ctypes.c_longlong(argument))
            else:
                values.append(ctypes.c_void_p(argument.data_ptr()))
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._driver.cuLaunchKernel(
            self._handle, grid, 1, 1, block, 1, 1, int(shared_bytes), stream, pointers, None
        )
        _check(status, f"launch of {self._name}")


class CudaModule:
    """A compiled source on the current device; ``module["name"]`` is a :class:`CudaFunction` (``extern "C"`` names)."""

    def __init__(self, source: str, options: tuple[str, ...] = ()) -> None:
        import torch

        torch.cuda.current_stream()
        torch.zeros(1, device="cuda")  # makes the primary context current
        major, minor = torch.cuda.get_device_capability()
        suffix = "a" if major >= 9 else ""
        code = compile_cubin(source, f"sm_{major}{minor}{suffix}", options)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module = ctypes.c_void_p()
        _check(self._driver.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
        self._functions: dict[str, CudaFunction] = {}

    def __getitem__(self, name: str) -> CudaFunction:
        if name not in self._functions:
            handle = ctypes.c_void_p()
            _check(self._driver.cuModuleGetFunction(ctypes.byref(handle), self._module, name.encode()), name)
            self._functions[name] = CudaFunction(self._driver, handle, name)
        return self._functions[name]
