"""torchao 0.13.0 with one or both of the two upstream changes that 0.14 brought, applied in the running process.

scale: pull request 2950. The multiplication broadcasts a row's scale, which was copied to the weight's size before.
op:    pull request 2961. The dequantisation is an ordinary function that the compiler traces, no registered operator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def apply(fixes: Iterable[str]) -> None:
    from torchao.quantization import quant_primitives
    from torchao.quantization.quantize_.workflows.float8 import float8_tensor

    expand = quant_primitives._expand_scale_to_tensor_shape

    def keep_rowwise(scale: Tensor, target_shape: torch.Size) -> Tensor:
        rowwise = scale.shape[:-1] == target_shape[:-1] and scale.shape[-1] == 1
        return scale if rowwise else expand(scale, target_shape)

    def dequantize(tensor: Tensor, scale: Tensor, output_dtype: torch.dtype = torch.float32) -> Tensor:
        wide = tensor.to(torch.float32)
        return (wide * quant_primitives._expand_scale_to_tensor_shape(scale, tensor.shape)).to(output_dtype)

    if "scale" in fixes:
        quant_primitives._expand_scale_to_tensor_shape = keep_rowwise
    if "op" in fixes:
        float8_tensor._dequantize_affine_float8 = dequantize
