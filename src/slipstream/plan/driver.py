"""The GPUs of this machine, as their driver's own library tells it: to load torch for that would take seconds."""

import ctypes
from collections.abc import Callable
from typing import Any

Gpu = tuple[str, tuple[int, int]]
"""Name and compute capability."""
_LONGEST_NAME = 96


def ask_driver() -> list[Gpu] | None:
    """All GPUs, or None if there is no such library or it cannot tell. What each function does is in NVIDIA's NVML
    reference."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        _call(library.nvmlInit_v2)
        try:
            count = ctypes.c_uint()
            _call(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
            return [_gpu(library, index) for index in range(count.value)]
        finally:
            library.nvmlShutdown()
    except OSError:
        return None


def _gpu(library: Any, index: int) -> Gpu:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_LONGEST_NAME)
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library.nvmlDeviceGetHandleByIndex_v2, index, ctypes.byref(handle))
    _call(library.nvmlDeviceGetName, handle, name, _LONGEST_NAME)
    _call(library.nvmlDeviceGetCudaComputeCapability, handle, ctypes.byref(major), ctypes.byref(minor))
    return name.value.decode(), (major.value, minor.value)


def _call(function: Callable[..., int], *words: Any) -> None:
    if code := function(*words):
        raise OSError(code, "the driver does not tell")
