"""Compiles the Triton kernels of float8_weight_only for sm_90 as its operators launch them: hopper_code.py FOLDER.

Needs Triton, no GPU: the operators run on meta tensors and a recorder stands in for each kernel, so constants, warps
and the specialisation of arguments are those of a real call. FOLDER gets `<number>.ptx` and `<number>.sass`; stdout
gets a JSON list of the launches.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import float8_linear
import fused_block
import hopper
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
KERNELS = {
    float8_linear: ("_gemv", "_to_half", "_skinny", "_add_parts", "_gemm"),
    fused_block: ("_attention", "_rope_prompt"),
}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
}


class Recorder:
    """Takes a kernel's launches without a GPU."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *values, **options: self.launches.append((self.kernel, values, options))


def compiled(kernel: Any, values: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """As Triton's launcher specialises: 1 and constexpr parameters are constants, multiples of 16 are marked."""
    signature, constants, marks = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        name = parameter.name
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], marks[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                marks[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=marks)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def linear(tokens: int, rows: int, columns: int, *, wide: bool = False, **extra: Any) -> None:
    weight = empty(rows, columns, dtype=torch.bfloat16 if wide else torch.float8_e4m3fn)
    scale = empty(rows, dtype=torch.float32)
    float8_linear.linear._init_fn(empty(1, tokens, columns), weight, scale, **extra)


def attention() -> None:
    rope = empty(256, 64, 2, dtype=torch.float32)
    caches = empty(1, 8, 256, 128), empty(1, 8, 256, 128)
    fused_block.decode_attention._init_fn(empty(1, 1, 6144), empty(1, dtype=torch.int64), rope, *caches, 32)
    fused_block.rope_prompt._init_fn(empty(1, 32, 6144), empty(32, dtype=torch.int64), rope, *caches, 32)


NORM, RESIDUAL = {"norm": empty(4096), "eps": 1e-5}, {"residual": empty(1, 1, 4096)}
CALLS = {
    "wqkv": lambda: linear(1, 6144, 4096, **NORM),
    "wo": lambda: linear(1, 4096, 4096, **RESIDUAL),
    "w13": lambda: linear(1, 28672, 4096, gated=True, **NORM),
    "w2": lambda: linear(1, 4096, 14336, **RESIDUAL),
    "output": lambda: linear(1, 128256, 4096),
    "bf16 weights": lambda: linear(1, 4096, 4096, wide=True),
    "2 tokens": lambda: linear(2, 4096, 14336),
    "32 tokens": lambda: linear(32, 4096, 14336),
    "64 tokens": lambda: linear(64, 4096, 14336),
    "prefill": lambda: linear(2048, 4096, 4096),
    "gated prefill": lambda: linear(2048, 28672, 4096, gated=True),
    "ragged prefill": lambda: linear(200, 4096, 4096),
    "attention": attention,
}


def main(folder: Path) -> None:
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, Recorder(getattr(module, name), launches))
    hopper.gemm = lambda *_: False  # this is about the kernels that any GPU takes
    done: list[dict[str, Any]] = []
    for call, make in CALLS.items():
        make()
        while launches:
            kernel, values, options = launches.pop(0)
            binary, number = compiled(kernel, values, options), len(done)
            cubin = folder / f"{number}.cubin"
            cubin.write_bytes(binary.asm["cubin"])
            (folder / f"{number}.ptx").write_text(binary.asm["ptx"])
            sass = subprocess.run([CUOBJDUMP, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout
            (folder / f"{number}.sass").write_text(sass)
            done.append({"call": call, "kernel": kernel.fn.__name__, "shared_bytes": binary.metadata.shared})
    print(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
