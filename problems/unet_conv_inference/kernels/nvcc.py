"""unet_step.cu, compiled by nvcc on first use and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("unet_step.cu")
HEADER = Path(__file__).with_name("hopper_ptx.cuh")
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC")


def find() -> str:
    """nvcc from PATH, CUDA_HOME or /usr/local/cuda. Raises FileNotFoundError."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise FileNotFoundError("nvcc is not on PATH, nor in CUDA_HOME")
    return found


def compile_source(*more: str) -> Path:
    """The shared library, from the user's cache if this source was compiled before. more: flags, such as -DUNET_TRACE.

    Raises RuntimeError with nvcc's words, FileNotFoundError where there is no nvcc.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worklog"
    text = "".join([*FLAGS, *more, SOURCE.read_text(), HEADER.read_text()])
    library = cache / f"unet_step_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    nvcc = find()
    cache.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run([nvcc, *FLAGS, *more, "-o", str(part), str(SOURCE)], capture_output=True, text=True)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise RuntimeError(f"nvcc failed: {(done.stderr or done.stdout).strip()[:500]}")
    part.replace(library)
    return library


@functools.cache
def library(*more: str) -> ctypes.CDLL:
    """The compiled kernel, its functions' types declared. Raises as `compile_source`; OSError if it does not load."""
    loaded = ctypes.CDLL(str(compile_source(*more)))
    loaded.unet_step_launch.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    loaded.unet_step_launch.restype = ctypes.c_int
    return loaded
