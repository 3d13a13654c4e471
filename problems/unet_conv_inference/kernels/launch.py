"""What one launch of unet_step.cu gets: its arguments, the tensors behind them, and what can be read out afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels import packing
from kernels.phase import CHUNK, SHARED_BYTES, SLICES
from kernels.plan import Plan

VALUES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ADDRESSES = (
    "stream", "phases", "workspace", "counters", "params", "first", "last", "last_bias", "film_bias", "frequencies",
    "film_table", "noise", "coefficients", "sample", "cond", "timestep", "out", "trace",
)  # fmt: skip
NUMBERS = (
    "values", "timestep_is_int64", "phase_count", "chunks", "steps", "sampling", "resident_chunks", "set_elements",
    "film_offset", "film_rows", "eps_offset", "action_dim", "horizon", "kernel_size", "cond_dim", "step_dim",
    "condition_blocks", "first_channels",
)  # fmt: skip
SHARED = (
    "operand", "condition", "kept", "sums", "stats", "x", "first", "last", "phases", "flags", "barriers", "ring",
    "ring_chunks",
)  # fmt: skip


class Shared(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in SHARED]


class Args(ctypes.Structure):
    """`struct Args` of unet_step.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, ctypes.c_int) for name in NUMBERS),
        ("shared", Shared),
    ]


Launch = Callable[[Args, int, int], int]
"""(arguments, kind of weights, bytes of shared memory) -> 0 or an error."""


class Launcher:
    """A model's packed weights and workspace for one plan. One launch at a time: the workspace is part of it.

    dtype: of the weights; samples, conditions and results have it too, or float32.
    """

    def __init__(self, model: nn.Module, plan: Plan, stream: Tensor, launch: Launch) -> None:
        self.plan, self.launch, self.model = plan, launch, model
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        last, last_bias = packing.last(model)
        self.tensors = {
            "stream": stream,
            "phases": packing.phase_table(plan),
            "params": packing.params(model, plan),
            "first": packing.first(model),
            "last": last,
            "last_bias": last_bias,
            "film_bias": packing.film_bias(model, plan),
            "frequencies": packing.frequencies(plan),
            "workspace": torch.full((2, plan.set_elements), -1, dtype=torch.int32).view(torch.float32),  # NOT_YET
            "counters": torch.zeros(4, dtype=torch.int32),
        }
        self.tensors = {name: tensor.to(self.device) for name, tensor in self.tensors.items()}
        self.args = Args(
            phase_count=len(plan.phases), chunks=plan.chunks, sampling=plan.sampling, set_elements=plan.set_elements,
            film_offset=plan.film_offset, film_rows=plan.film_rows, eps_offset=plan.eps_offset,
            action_dim=plan.shape.action_dim, horizon=plan.horizon, kernel_size=plan.shape.kernel_size,
            cond_dim=plan.shape.cond_dim, step_dim=plan.shape.step_dim, condition_blocks=plan.condition_blocks,
            first_channels=plan.shape.widths[0], shared=Shared(**plan.shared),
        )  # fmt: skip
        for name, tensor in self.tensors.items():
            setattr(self.args, name, tensor.data_ptr())
        used = plan.shared["ring"] + plan.shared["ring_chunks"] * CHUNK
        assert used <= SHARED_BYTES
        self.shared_bytes = used

    def run(self, out: Tensor, steps: int, **tensors: Tensor) -> None:
        """Launch with these inputs; out [T, action_dim]. Raises RuntimeError where the launch fails.

        The tensors stay the caller's: on a GPU the launch is asynchronous, on the current stream.
        """
        for name, tensor in tensors.items():
            assert tensor.is_contiguous(), name
            setattr(self.args, name, tensor.data_ptr())
        if "timestep" in tensors:
            self.args.timestep_is_int64 = tensors["timestep"].dtype == torch.int64
        self.args.out, self.args.steps, self.args.values = out.data_ptr(), steps, VALUES[out.dtype]
        if code := self.launch(self.args, VALUES[self.dtype], self.shared_bytes):
            raise RuntimeError(f"unet_step_launch: error {code}")

    def layers(self) -> dict[str, Tensor]:
        """What each layer made in the last step of the last launch, with its bias, float32 [channels, positions].

        Read from the partial sums that the blocks exchanged: a layer that never ran is NaN. Waits for the launch.
        """
        done = int(self.tensors["counters"][0].item())
        used = self.tensors["workspace"][(done - 1) % 2]
        found = {}
        for layer, (offset, channels, positions) in self.plan.outputs.items():
            parts = used[offset : offset + SLICES * channels * positions].reshape(SLICES, channels, positions)
            found[layer] = parts.sum(0) + self.model.get_submodule(layer).bias.float()[:, None]
        channels, positions = self.plan.shape.widths[0], self.plan.horizon
        at = self.plan.first_offset
        found["down_modules.0.0.blocks.0.block.0"] = used[at : at + channels * positions].reshape(channels, -1).clone()
        if not self.plan.sampling:
            at = self.plan.film_offset
            for name, row in self.plan.film_row.items():
                rows = self.model.get_submodule(name).cond_encoder[1].out_features
                found[f"{name}.cond_encoder.1"] = used[at + row : at + row + rows][:, None].clone()
        return found
