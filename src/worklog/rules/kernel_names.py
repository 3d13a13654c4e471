"""What a kernel does, as far as its name says it.

Names of at::native are those of pytorch's aten/src/ATen/native/cuda (CUDALoops.cuh, Copy.cu), those of Inductor end its
pointwise kernels in the operators that it fused, those of cuDNN and cuBLAS are as profilers show them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from worklog.traces.schema import COMMUNICATION, Trace

_LENGTH = 4096
"""Letters of a name that are looked at; ours: the longest of the recorded captures has 483, others have no end."""
_ELEMENTWISE = re.compile(
    r"\b(elementwise_kernel|elementwise_kernel_manual_unroll|vectorized_elementwise_kernel"
    r"|vectorized_templated_elementwise_kernel|unrolled_elementwise_kernel\w*)\b"
)
_MATMUL = ("gemm", "gemv", "nvjet", "cijk_", "triton_tem", "triton_mm", "triton_bmm")
_NO_MATMUL = ("fprop", "dgrad", "wgrad", "splitkreduce")
"""Convolutions by implicit matrix products, and what follows one."""
_WIDENS = re.compile(r"(fp8|float8|int8|int4|fp4|nf4)\w*_to_(bf16|bfloat16|fp16|float|half)")
_FROM_ANY = re.compile(r"^(?=.*direct_copy_kernel_cuda).*(LoadWithCast|gpu_kernel_impl<)")
"""Copies that convert whatever type they find. A copy from float to bfloat16 or half, as of automatic
mixed precision, has a functor of its own (bfloat16_copy_kernel_cuda, converting_copy_kernel_cuda) and is none."""
_LAYOUT = ("nchwto", "nhwcto", "tensortransformgeneric", "transpose_copy_tiled_kernel")
_CONVERT_TENSOR = re.compile(r"\bconvertTensor_kernel<([\w:]+), *\1,")
"""From a type to itself: else it converts types."""
_POINTWISE = re.compile(r"^triton_poi_fused_(?P<operators>\w+?)_\d+(d\w*)?$")
_MOVES = ("clone", "permute", "transpose", "view", "_unsafe_view", "contiguous", "t")
_SCALES = ("mul", "sub", "expand", "unsqueeze", *_MOVES)
"""What Inductor fuses with a conversion of weights: scale, zero point, and their shapes."""


def elementwise(name: str) -> bool:
    """Computes each element of its output from the same elements of its inputs."""
    return name.startswith("triton_poi_") or ("elementwise_kernel" in name and bool(_ELEMENTWISE.search(name)))


def by_inductor(name: str) -> bool:
    return name.startswith("triton_")


def matmul(name: str) -> bool:
    return _any(_MATMUL, name) and not _any(_NO_MATMUL, name)


def dequantises(name: str) -> bool:
    """By a name of its own, and multiplies no matrices in the same kernel."""
    own = "dequant" in (low := name.lower()) and "dequant_mm" not in low
    return (own or ("_to_" in low and bool(_WIDENS.search(low)))) and not matmul(name)


def converts(name: str) -> bool:
    """Copies into another type, from which the name does not say, and does no more than scale."""
    fused = _POINTWISE.match(name)
    if fused is None:
        return bool(_FROM_ANY.search(name))
    return "_to_copy" in fused["operators"] and _only(fused["operators"], ("_to_copy", *_SCALES))


def layout(name: str) -> bool:
    """Does nothing but put the elements of a tensor into another order."""
    fused = _POINTWISE.match(name)
    if fused is not None:
        return _only(fused["operators"], _MOVES)
    return _any(_LAYOUT, name) or ("convertTensor" in name and bool(_CONVERT_TENSOR.search(name)))


def _any(words: Sequence[str], name: str) -> bool:
    low = name.lower()  # many times faster than an expression that ignores case, and a trace may have a million names
    return any(word in low for word in words)


def _only(operators: str, known: Sequence[str]) -> bool:
    """Whether names joined by underscores, which are in names too, are all among these."""
    choice = "|".join(sorted(known, key=len, reverse=True))
    return bool(re.fullmatch(rf"({choice})(_({choice}))*", operators))


_known: WeakKeyDictionary[Trace, dict[Callable[[str], bool], Any]] = WeakKeyDictionary()


def kernels(trace: Trace, what: Callable[[str], bool]) -> Any:
    """Mask over activities: kernels whose name is so. Kept as long as `trace`."""
    kept = _known.setdefault(trace, {})
    if what not in kept:
        names = trace.activities["name"].cat
        said = np.array([what(str(name)[:_LENGTH]) for name in names.categories] + [False])
        kept[what] = said[names.codes.to_numpy()] & (trace.activities["kind"].to_numpy() <= COMMUNICATION)
    return kept[what]
