"""The CUDA C++ kernels of this folder, compiled by nvcc on first use and called through ctypes.

Triton cannot say what these need (a producer warp, thread-block clusters, rings of bulk copies that each warp fills for
itself), so Hopper GPUs take them where nvcc is present; everything else takes the Triton kernels of float8_linear.py.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

from worklog import nvcc

SOURCES = (Path(__file__).with_name("float8_gemm.cu"), Path(__file__).with_name("float8_gemv.cu"))
GEMV_TOKENS = 8  # at most

_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int
ARGUMENTS = {
    # y, x, weight, scale; tokens, rows, columns, pitch, gated, add; stream
    "float8_gemm_launch": (*(_ADDRESS,) * 4, *(_INT,) * 6, _ADDRESS),
    # y, x, weight, scale, norm; eps; residual; gated; scratch; tokens, rows, columns; stream
    "float8_gemv_launch": (
        *(_ADDRESS,) * 5, ctypes.c_float, _ADDRESS, _INT, _ADDRESS, *(_INT,) * 3, _ADDRESS,
    ),
}  # fmt: skip


def compile_sources() -> Path:
    """The shared library. Raises as nvcc.shared_library."""
    return nvcc.shared_library("float8", SOURCES)


def load(file: Path) -> ctypes.CDLL:
    """The library with its functions' types declared: a pointer can then not be cut to 32 bits, nor eps be a double."""
    loaded = ctypes.CDLL(str(file))
    for name, types in ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: not a Hopper GPU (no words), or no working nvcc (one warning)."""
    if torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        return load(compile_sources())
    except (AttributeError, OSError, RuntimeError) as error:
        warnings.warn(f"float8 linear falls back to Triton: {error}", stacklevel=2)
        return None


def fits(x: Tensor, weight: Tensor, row_multiple: int, *more: Tensor | None) -> bool:
    """On a GPU, weight e4m3 [N, K] with N % row_multiple == 0 and K % 64 == 0; x and `more` (those that are there)
    bfloat16; all dense, but that rows of the weight may be further apart, by a multiple of 16; all 16-byte aligned, as
    bulk copies and 16-byte loads need."""
    vectors = [x, *(tensor for tensor in more if tensor is not None)]
    return (
        x.is_cuda
        and weight.dtype == torch.float8_e4m3fn
        and weight.shape[0] % row_multiple == 0
        and weight.shape[1] % 64 == 0
        and all(tensor.dtype == torch.bfloat16 for tensor in vectors)
        and weight.stride(1) == 1
        and weight.stride(0) % 16 == 0
        and all(tensor.is_contiguous() for tensor in vectors)
        and all(tensor.data_ptr() % 16 == 0 for tensor in (weight, *vectors))
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def gemm(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, gated: bool, residual: Tensor | None = None) -> bool:
    """y [M, N] (gated: [M, N / 2]) = x [M, K] (weight * scale)^T (+ residual, not gated) on the current stream.

    All dense, but the weight may be some columns of a wider one.
    False: this GPU, machine or shape is not covered (N % 128, K % 64, bfloat16, e4m3), and nothing was done.
    Raises RuntimeError where the launch fails.
    """
    add = residual is not None
    if (gated and add) or not fits(x, weight, 128, residual) or not (lib := library()):
        return False
    if residual is not None:
        y.copy_(residual)
    (tokens, columns), rows = x.shape, weight.shape[0]
    code = lib.float8_gemm_launch(
        address(y), address(x), address(weight), address(scale),
        tokens, rows, columns, weight.stride(0), gated, add, stream(),
    )  # fmt: skip
    if code:
        raise RuntimeError(f"float8_gemm_launch: error {code} for M={tokens}, N={rows}, K={columns}")
    return True


def gemv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    y: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> bool:
    """y [M, N] = x [M, K] (weight * scale)^T on the current stream, M <= 8; all dense.

    With one token also, as in `float8_linear.linear`: norm, gated, norm and gated, or residual alone.
    False: not covered (another GPU, N % 16, K % 64, bfloat16, e4m3, another combination), and nothing was done.
    Raises RuntimeError where the launch fails.
    """
    rows, columns = weight.shape
    tokens = x.numel() // columns
    fused = norm is not None or gated
    if tokens > GEMV_TOKENS or (residual is not None and fused) or (tokens > 1 and (residual is not None or fused)):
        return False
    if not weight.is_contiguous() or not fits(x, weight, 16, norm, residual) or not (lib := library()):
        return False
    scratch = None  # x as float16 and a float32 for each token; torch's allocator gives it, so a CUDA graph owns it
    if tokens > 1:
        scratch = torch.empty(tokens * (2 * columns + 4), dtype=torch.uint8, device=x.device)
    code = lib.float8_gemv_launch(
        address(y), address(x), address(weight), address(scale), address(norm), eps, address(residual), gated,
        address(scratch), tokens, rows, columns, stream(),
    )  # fmt: skip
    if code:
        raise RuntimeError(f"float8_gemv_launch: error {code} for M={tokens}, N={rows}, K={columns}")
    return True
