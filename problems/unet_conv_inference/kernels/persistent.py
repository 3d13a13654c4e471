"""The whole step, or the whole sampling, in one launch of a kernel whose blocks stay: CUDA C++ for Hopper GPUs.

Triton cannot say what this needs: a warp that fetches weights for phases to come, words polled by other blocks, and a
program of phases. What the kernel does is drawn in unet_step.cu, who computes what stands in plan.py.

Why one kernel and not a chain with programmatic dependent launch: the weights of the next layer would wait in a
chain too, but only as many blocks of the next launch as fit beside this one's, and each of the 29 exchanges would be
the end of a grid and the start of the next. Blocks that stay hand over the words themselves.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import packing, plan, step_library
from kernels.launch import VALUES, Args, Launch, Launcher
from kernels.phase import BLOCKS
from kernels.plan import Plan

Step = Callable[[Tensor, "Tensor | float", Tensor], Tensor]
Sampler = Callable[[Tensor, Tensor], Tensor]


def on_gpu(args: Args, weights: int, shared_bytes: int, *flags: str) -> int:
    """Launch on the current stream. flags: for nvcc, such as -DUNET_TRACE."""
    stream = torch.cuda.current_stream().cuda_stream
    code: int = step_library.load(*flags).unet_step_launch(ctypes.byref(args), weights, shared_bytes, stream)
    return code


def supported(model: nn.Module, sample: Tensor) -> str | None:
    """Why this kernel cannot run the model on samples [B, T, action_dim] like this one, or None.

    Batches run sample after sample. The first call compiles the kernel: some 15 seconds.
    """
    if not sample.is_cuda:
        return "the sample is not on a CUDA GPU"
    if sample.device.index != torch.cuda.current_device():
        return "the sample is not on the current GPU"
    properties = torch.cuda.get_device_properties(sample.device)
    if (properties.major, properties.minor) != (9, 0) or properties.multi_processor_count < BLOCKS:
        return f"{properties.name} is not a Hopper GPU with {BLOCKS} multiprocessors"
    return not_planned(model, sample) or not_compiled()


def not_planned(model: nn.Module, sample: Tensor) -> str | None:
    parameters = list(model.parameters())
    if any(p.device != sample.device for p in parameters):
        return "the model and the sample are on different devices"
    dtypes = {p.dtype for p in parameters}
    if len(dtypes) != 1 or not dtypes <= VALUES.keys():
        return "the weights are not all float32, all bfloat16 or all float16"
    if sample.dtype not in (torch.float32, *dtypes):
        return f"samples are {sample.dtype}, neither float32 nor the weights' type"
    return plan.unsupported(model.shape, sample.shape[1])


@functools.cache
def not_compiled() -> str | None:
    try:
        step_library.load()
    except (AttributeError, OSError, RuntimeError) as error:
        return str(error)
    return None


class PersistentUnet:
    """Called as the model: sample [B, T, action_dim], timestep, global_cond [B, cond_dim] -> [B, T, action_dim].

    Where the kernel does not support a call, the model itself runs, with one warning. The model's weights are packed on
    the first call, once for steps and once for sampling; later changes of the model do not show. One stream at a time:
    launches share a workspace.
    """

    resident_chunks = 0
    """Of a block's stream, this many 8 KB are marked for L2 to keep until the next step; all else passes through."""

    def __init__(
        self, model: nn.Module, launch: Launch = on_gpu, why_not: Callable[..., str | None] = supported
    ) -> None:
        self.model, self.launch, self.why_not = model, launch, why_not
        self.launchers: dict[tuple[int, bool], Launcher] = {}
        self.streams: dict[bool, Tensor] = {}
        self.reasons: dict[tuple[int, torch.dtype, torch.device, int], str | None] = {}

    def launcher(self, horizon: int, sampling: bool = False) -> Launcher:
        """Made on first use; the packed weights do not depend on the horizon."""
        if (horizon, sampling) not in self.launchers:
            dtype = next(self.model.parameters()).dtype
            made = Plan(self.model.shape, horizon, 4 // dtype.itemsize, sampling)
            if sampling not in self.streams:
                self.streams[sampling] = packing.stream(self.model, made, dtype)
            self.launchers[horizon, sampling] = Launcher(self.model, made, self.streams[sampling], self.launch)
        launcher = self.launchers[horizon, sampling]
        launcher.args.resident_chunks = self.resident_chunks
        return launcher

    def falls_back(self, sample: Tensor) -> bool:
        """Looked into once for each horizon, type and device: the model's weights are packed once, too."""
        kind = sample.shape[1], sample.dtype, sample.device, torch.cuda.current_device() if sample.is_cuda else 0
        if kind not in self.reasons:
            reason = self.why_not(self.model, sample)
            if reason and reason not in self.reasons.values():
                warnings.warn(f"the persistent U-Net kernel falls back to eager: {reason}", stacklevel=3)
            self.reasons[kind] = reason
        return self.reasons[kind] is not None

    @torch.inference_mode()
    def __call__(self, sample: Tensor, timestep: Tensor | float, global_cond: Tensor) -> Tensor:
        if self.falls_back(sample):
            return self.model(sample, timestep, global_cond)
        launcher = self.launcher(sample.shape[1])
        sample, cond = sample.contiguous(), global_cond.to(sample.dtype).contiguous()
        steps = each_step(timestep, sample)
        out = torch.empty_like(sample)
        for b in range(len(sample)):
            launcher.run(out[b], 1, sample=sample[b], cond=cond[b], timestep=steps[b])
        return out

    def sampler(self, coefficients: Tensor) -> Sampler:
        """unet1d.sample_actions with this model and these coefficients [steps, 5], as one launch a sample."""
        steps, device = len(coefficients), coefficients.device
        backwards = coefficients.flip(0).float().contiguous()
        table, by_condition = film_tables(self.model, steps)

        @torch.inference_mode()
        def sample_actions(noise: Tensor, global_cond: Tensor) -> Tensor:
            """noise [steps + 1, B, T, action_dim], global_cond [B, cond_dim] -> [B, T, action_dim]."""
            from worklog.workloads import unet1d

            if self.falls_back(noise[0]):
                return unet1d.sample_actions(self.model, noise, global_cond, coefficients)
            launcher = self.launcher(noise.shape[2], sampling=True)
            out = torch.empty_like(noise[0])
            moved = noise.float()
            films = F.linear(F.mish(global_cond.float()), by_condition)
            for b in range(noise.shape[1]):
                launcher.run(
                    out[b], steps, sample=noise[0, b].contiguous(), film_table=table + films[b],
                    noise=moved[1:, b].contiguous(), coefficients=backwards,
                )  # fmt: skip
            return out

        assert next(self.model.parameters()).device == device
        return sample_actions


def each_step(timestep: Tensor | float, sample: Tensor) -> Tensor:
    """[B], int64 or float32. A number becomes a tensor without a copy from the host, so a CUDA graph can record it."""
    if not isinstance(timestep, Tensor):
        return torch.full((len(sample),), timestep, device=sample.device, dtype=torch.float32)
    steps = timestep.to(sample.device)
    return (steps if steps.dtype == torch.int64 else steps.float()).reshape(-1).expand(len(sample)).contiguous()


@torch.inference_mode()
def film_tables(model: nn.Module, steps: int) -> tuple[Tensor, Tensor]:
    """All scales and shifts of all timesteps, last first, without the condition's share: float32 [steps, rows]; and
    what gives that share, [rows, cond_dim]. FiLM is linear in mish(step features) and mish(condition), side by side, so
    the first half is known before the condition is."""
    blocks = [model.get_submodule(name).cond_encoder[1] for name, _ in plan.film_rows(model.shape)]
    weight = torch.cat([layer.weight.float() for layer in blocks])
    bias = torch.cat([layer.bias.float() for layer in blocks])
    embedding, *layers = model.diffusion_step_encoder
    x = embedding(torch.arange(steps - 1, -1, -1, device=weight.device), torch.float32)
    for layer in layers:
        x = F.linear(x, layer.weight.float(), layer.bias.float()) if isinstance(layer, nn.Linear) else layer(x)
    known, by_condition = weight.split((model.shape.step_dim, model.shape.cond_dim), dim=1)
    return F.linear(F.mish(x), known, bias), by_condition.contiguous()


def build(model: nn.Module) -> PersistentUnet:
    """The model, called the same way; falls back to eager with one warning where `supported` says why."""
    return PersistentUnet(model)


def build_sampler(model: nn.Module, coefficients: Tensor) -> Sampler:
    """As unet1d.sample_actions(model, noise, global_cond, coefficients); coefficients: unet1d.ddpm_coefficients."""
    return PersistentUnet(model).sampler(coefficients)
