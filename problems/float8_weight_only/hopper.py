"""The CUDA C++ kernels of this folder, compiled by nvcc on first use and called through ctypes.

Triton cannot say what these need (a producer warp, thread-block clusters, operands that stay in registers), so Hopper
GPUs take them where nvcc is present; everything else takes the Triton kernels of float8_linear.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import warnings
from pathlib import Path

import torch
from torch import Tensor

SOURCES = (Path(__file__).with_name("float8_gemm.cu"),)
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC")
# -gencode and not -arch: the shorthand also makes a plain sm_90 pass, which has no wgmma


def compile_sources() -> Path:
    """The shared library, from the user's cache if these sources were compiled before.

    Raises RuntimeError with nvcc's words, FileNotFoundError where there is no nvcc (PATH, CUDA_HOME, /usr/local/cuda).
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worklog"
    digest = hashlib.sha256("".join([*FLAGS, *(s.read_text() for s in SOURCES)]).encode()).hexdigest()[:16]
    library = cache / f"float8_{digest}.so"
    if library.exists():
        return library
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        raise FileNotFoundError("nvcc is not on PATH, nor in CUDA_HOME")
    cache.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run([nvcc, *FLAGS, "-o", str(part), *map(str, SOURCES)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed: {(done.stderr or done.stdout).strip()[:500]}")
    part.replace(library)
    return library


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: not a Hopper GPU (no words), or no working nvcc (one warning)."""
    if torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        return ctypes.CDLL(str(compile_sources()))
    except (OSError, RuntimeError) as error:
        warnings.warn(f"float8 linear falls back to Triton: {error}", stacklevel=2)
        return None


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def gemm(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, gated: bool) -> bool:
    """y [M, N] (gated: [M, N / 2]) = x [M, K] (weight * scale)^T on the current stream; all dense.

    False: this GPU, machine or shape is not covered (N % 128, K % 64, bfloat16), and nothing was done.
    Raises RuntimeError where the launch fails.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    if rows % 128 or columns % 64 or x.dtype != torch.bfloat16 or not (lib := library()):
        return False
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = lib.float8_gemm_launch(
        pointer(y), pointer(x), pointer(weight), pointer(scale), tokens, rows, columns, int(gated), stream
    )
    if code:
        raise RuntimeError(f"float8_gemm_launch: error {code} for M={tokens}, N={rows}, K={columns}")
    return True
