"""Where a step's time goes inside the persistent kernel: its own clock at six places of each phase.

A profiler sees one kernel. Compiled with -DUNET_TRACE, each block notes the cycle at which a phase begins, has the sums
of the product before, has its operand, has multiplied, has published, and ends: thread 0's view, in the last step. The
marks cost time themselves (a few stores a phase), so the traced kernel's times are for its proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launch import Args, Launch
from kernels.persistent import PersistentUnet, on_gpu
from kernels.phase import BLOCKS

PARTS = ("wait", "normalise", "multiply", "add up", "after")
"""Until the sums are there; until the operand is; until the warps' products are; until they are published; the rest:
residual convolution, FiLM rows, waiting for the residual."""


@dataclass
class Trace:
    """cycles int64 [BLOCKS, phases, 5], by PARTS; phases: their names. A phase without a product has zeros."""

    cycles: Tensor
    phases: list[str]

    def table(self) -> list[dict[str, object]]:
        """Each phase's cycles, medians over blocks."""
        medians = self.cycles.double().median(dim=0).values
        return [
            {"phase": name, **dict(zip(PARTS, row.tolist(), strict=True))}
            for name, row in zip(self.phases, medians, strict=True)
        ]


class Tracing:
    """A Launch that lets the kernel take notes; `last` holds them after a launch."""

    def __init__(self, device: torch.device, launch: Launch | None = None) -> None:
        self.device, self.launch = device, launch
        self.marks: Tensor | None = None

    def __call__(self, args: Args, weights: int, shared_bytes: int) -> int:
        self.marks = torch.zeros(BLOCKS, args.phase_count, len(PARTS) + 1, dtype=torch.int32, device=self.device)
        args.trace = self.marks.data_ptr()
        if self.launch is not None:
            return self.launch(args, weights, shared_bytes)
        return on_gpu(args, weights, shared_bytes, "-DUNET_TRACE")


def trace(
    unet: PersistentUnet, sample: Tensor, timestep: Tensor, cond: Tensor, warmup: int = 5, launch: Launch | None = None
) -> Trace:
    """One step of batch 1, traced, after some to warm up. The model is packed anew for it.

    launch: of a kernel that was compiled with -DUNET_TRACE, in place of the GPU's.
    """
    tracing = Tracing(sample.device, launch)
    traced = PersistentUnet(unet.model, tracing, unet.why_not)
    for _ in range(warmup + 1):
        traced(sample, timestep, cond)
    assert tracing.marks is not None
    marks = tracing.marks.long()
    cycles = (marks[..., 1:] - marks[..., :-1]) % (1 << 32)
    whole = (marks != 0).all(dim=2, keepdim=True)
    return Trace(torch.where(whole, cycles, 0), [p.name for p in traced.launcher(sample.shape[1]).plan.phases])
