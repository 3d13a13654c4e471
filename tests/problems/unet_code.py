"""Compiles the Triton kernels of unet_conv_inference for sm_90 as a step of the published network launches them.

    unet_code.py FOLDER

Needs Triton, no GPU: the network runs on meta tensors, and hopper_code.py's recorder stands in for each kernel. FOLDER
gets `<number>.ptx` and `<number>.sass` for each different launch; stdout gets a JSON list of them, with their counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from hopper_code import CUOBJDUMP, Recorder, compiled
from kernels import fused_triton, triton_kernels

from worklog.workloads import unet1d

NAMES = ("conv", "finish", "last")


def launches_of(dtype: torch.dtype, steps: int) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """One step, or with `steps` the sampling, at batch 1."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kernels = {name: getattr(triton_kernels, name) for name in NAMES}
    for name, kernel in kernels.items():
        setattr(triton_kernels, name, Recorder(kernel, launches))
    model = unet1d.build(0, dtype, "meta")
    sample, _, cond = unet1d.inputs(dtype=dtype, device="meta")
    if steps:
        noise = torch.empty(steps + 1, *sample.shape, dtype=dtype, device="meta")
        fused_triton.build_sampler(model, torch.empty(steps, 5, device="meta"))(noise, cond)
    else:
        fused_triton.build(model)(sample, torch.empty((), device="meta", dtype=torch.int64), cond)
    for name, kernel in kernels.items():
        setattr(triton_kernels, name, kernel)
    return launches


def specialisation(values: tuple[Any, ...], kernel: Any) -> str:
    """What makes a launch another program: constants, ones, multiples of 16, types."""
    parts: list[Any] = []
    for parameter, value in zip(kernel.params, values, strict=True):
        if parameter.is_constexpr or not isinstance(value, int | torch.Tensor):
            parts.append(value)
        else:
            parts.append(str(value.dtype) if isinstance(value, torch.Tensor) else (value == 1, value % 16 == 0))
    return repr((kernel.fn.__name__, parts))


def main(folder: Path) -> None:
    fused_triton.supported = lambda *_: None
    done: dict[str, dict[str, Any]] = {}
    for call, dtype, steps in (("step", torch.float32, 0), ("bf16", torch.bfloat16, 0), ("sampling", torch.float32, 2)):
        for kernel, values, options in launches_of(dtype, steps):
            key = specialisation(values, kernel)
            if key in done:
                done[key]["counts"][call] = done[key]["counts"].get(call, 0) + 1
                continue
            binary, number = compiled(kernel, values, options), len(done)
            cubin = folder / f"{number}.cubin"
            cubin.write_bytes(binary.asm["cubin"])
            (folder / f"{number}.ptx").write_text(binary.asm["ptx"])
            sass = subprocess.run([CUOBJDUMP, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout
            (folder / f"{number}.sass").write_text(sass)
            name, shared = kernel.fn.__name__, binary.metadata.shared
            done[key] = {"kernel": name, "shared_bytes": shared, "counts": {call: 1}, "pdl": options["launch_pdl"]}
    print(json.dumps(list(done.values())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
