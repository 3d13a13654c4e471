"""unet_step.cu as a shared library, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from worklog import nvcc

SOURCE = Path(__file__).with_name("unet_step.cu")
HEADER = Path(__file__).with_name("hopper_ptx.cuh")


def compile_source(*more: str) -> Path:
    """The library. more: flags, such as -DUNET_TRACE. Raises as nvcc.shared_library."""
    return nvcc.shared_library("unet_step", [SOURCE], [HEADER], (*nvcc.HOPPER, *more))


@functools.cache
def load(*more: str) -> ctypes.CDLL:
    """The compiled kernel, its functions' types declared. Raises as `compile_source`; OSError if it does not load."""
    loaded = ctypes.CDLL(str(compile_source(*more)))
    loaded.unet_step_launch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    loaded.unet_step_launch.restype = ctypes.c_int
    return loaded
