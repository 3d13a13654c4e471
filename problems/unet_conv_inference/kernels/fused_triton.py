"""The first step of the fix, in Triton: two kernels for each convolution, no layout conversion, any batch and horizon.

    conv     a convolution as a product: rows are output channels, columns are positions of all samples. K (channels
             times taps) is split over programs, so that a layer's weights come from all multiprocessors at once; each
             leaves partial sums.
    finish   a program for each sample and group of GroupNorm adds the parts up, and does all that stands between two
             convolutions: bias, norm, Mish, FiLM, residual.
    last     the last convolution and, while sampling, the denoising update.

64 launches a step (the condition's own dozen come from PyTorch), 100 steps in one CUDA graph if the caller records
one: nothing here waits for the host. What remains above the time to read the weights is the launches, each of which
must wait for the one before: persistent.py does away with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from kernels import packing, triton_kernels
from kernels.plan import film_rows

PROGRAMS = 256  # that a convolution is cut into, about two a multiprocessor of an H200
NONE, TENSOR, PARTS = 0, 1, 2  # where a residual comes from
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Parts:
    """A convolution's partial sums [splits, rows, batch * positions] and the layer they are of."""

    values: Tensor
    name: str
    up: bool


class TritonUnet:
    """Called as the model: sample [B, T, action_dim], timestep, global_cond [B, cond_dim] -> [B, T, action_dim].

    Activations are float32 between the kernels, whatever the weights are. `seen`, if a dict, gets each convolution's
    result as [B, channels, positions].
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.dtype = model, next(model.parameters()).dtype
        self.weights = {
            name: packing.dense(layer).permute(2, 0, 1).contiguous()  # [taps, rows, channels]
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d)
        }
        blocks = [model.get_submodule(name).cond_encoder[1] for name, _ in film_rows(model.shape)]
        self.film_weight = torch.cat([layer.weight.detach() for layer in blocks])
        self.film_bias = torch.cat([layer.bias.detach() for layer in blocks])
        self.film_row, at = {}, 0
        for name, count in film_rows(model.shape):
            self.film_row[name] = at
            at += count
        self.seen: dict[str, Tensor] | None = None

    def scratch(self, like: Tensor, *size: int) -> Tensor:
        return torch.empty(size, device=like.device, dtype=torch.float32)

    def conv(self, name: str, x: Tensor) -> Parts:
        """x [B, channels, positions], of any strides."""
        layer, weight = self.model.get_submodule(name), self.weights[name]
        up = isinstance(layer, nn.ConvTranspose1d)
        taps, rows, channels = weight.shape
        step, pad = (1, 1) if up else (layer.stride[0], layer.padding[0])
        batch, _, length = x.shape
        out_length = length // step
        columns = batch * out_length
        block_m = 32 if rows // (1 + up) % 32 == 0 else 16
        block_n = min(64, max(16, triton.next_power_of_2(columns)))
        tiles = triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n)
        split = max(16, triton.next_power_of_2(triton.cdiv(channels * tiles, PROGRAMS)))  # channels a program
        splits = triton.cdiv(channels, split)
        parts = self.scratch(x, splits, rows, columns)
        grid = (triton.cdiv(rows, block_m), splits, triton.cdiv(columns, block_n))
        triton_kernels.conv[grid](
            x, weight, parts, *x.stride(), channels, rows, length, out_length, columns, pad, step, taps, up, split,
            "tf32x3" if weight.dtype == torch.float32 else "ieee", block_m, block_n, min(64, split),
            num_warps=4, num_stages=3, launch_pdl=True,
        )  # fmt: skip
        if self.seen is not None:
            summed = parts.sum(0).reshape(1 + up, -1, batch, out_length).permute(2, 1, 3, 0).flatten(2)
            self.seen[name] = summed + layer.bias.float()[:, None]
        return Parts(parts, name, up)

    def finish(
        self,
        parts: Parts,
        batch: int,
        norm: nn.GroupNorm | None = None,
        film: Tensor | None = None,
        residual: Tensor | Parts | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """film [B or 1, 2 * channels] scales, then shifts. out: [B, channels, positions], positions dense."""
        bias = self.model.get_submodule(parts.name).bias
        splits, rows, columns = parts.values.shape
        channels, length = rows // (1 + parts.up), columns * (1 + parts.up) // batch
        groups = self.model.shape.groups
        out = self.scratch(bias, batch, channels, length) if out is None else out
        given = residual.values if isinstance(residual, Parts) else residual
        kind = NONE if residual is None else PARTS if isinstance(residual, Parts) else TENSOR
        triton_kernels.finish[(batch, groups)](
            parts.values, bias,
            bias if norm is None else norm.weight, bias if norm is None else norm.bias,
            bias if film is None else film,
            bias if given is None else given,
            self.model.get_submodule(residual.name).bias if isinstance(residual, Parts) else bias,
            out, film.stride(0) if film is not None and len(film) > 1 else 0,
            given.stride(0) if kind == TENSOR else 0, out.stride(0), channels, length, batch, channels // groups,
            splits, len(given) if kind == PARTS else 0, norm is not None, film is not None, kind, parts.up,
            triton.next_power_of_2(channels // groups), triton.next_power_of_2(length), num_warps=4, launch_pdl=True,
        )  # fmt: skip
        return out

    def resnet(self, name: str, x: Tensor, films: Tensor, out: Tensor | None = None) -> Tensor:
        block = self.model.get_submodule(name)
        batch, row = len(x), self.film_row[name]
        first = self.conv(f"{name}.blocks.0.block.0", x)
        projected = isinstance(block.residual_conv, nn.Conv1d)
        residual = self.conv(f"{name}.residual_conv", x) if projected else x
        film = films[:, row : row + 2 * block.blocks[0].block[0].out_channels]
        x = self.finish(first, batch, block.blocks[0].block[1], film)
        second = self.conv(f"{name}.blocks.1.block.0", x)
        return self.finish(second, batch, block.blocks[1].block[1], residual=residual, out=out)

    def features(self, sample: Tensor, films: Tensor) -> Tensor:
        """All but the last convolution: sample [B, T, action_dim], films [B or 1, rows] -> [B, widths[0], T]."""
        batch, length, _ = sample.shape
        widths, x, skips = self.model.shape.widths, sample.transpose(1, 2), []
        for level, width in enumerate(widths):
            x = self.resnet(f"down_modules.{level}.0", x, films)
            # what comes up again and what went down lie side by side, so nobody needs to join them
            joined = self.scratch(sample, batch, 2 * width, length >> level)
            x = self.resnet(f"down_modules.{level}.1", x, films, out=joined[:, width:])
            skips.append(joined)
            if level < len(widths) - 1:
                x = self.finish(self.conv(f"down_modules.{level}.2.conv", x), batch)
        x = self.resnet("mid_modules.0", x, films)
        self.resnet("mid_modules.1", x, films, out=skips[-1][:, : widths[-1]])
        for i, level in enumerate(range(len(widths) - 1, 0, -1)):
            x = self.resnet(f"up_modules.{i}.0", skips[level], films)
            x = self.resnet(f"up_modules.{i}.1", x, films)
            above = skips[level - 1][:, : widths[level - 1]] if level > 1 else None
            x = self.finish(self.conv(f"up_modules.{i}.2.conv", x), batch, out=above)
        return self.finish(self.conv("final_conv.0.block.0", x), batch, self.model.final_conv[0].block[1])

    def last(self, x: Tensor, out: Tensor, sample: Tensor, update: tuple[Tensor, Tensor] | None = None) -> None:
        """update: fresh noise as `out`, and a row of unet1d.ddpm_coefficients."""
        conv = self.model.final_conv[1]
        batch, channels, length = x.shape
        noise, row = update or (sample, sample)
        triton_kernels.last[(batch, out.shape[2])](
            x, conv.weight, conv.bias, sample, noise, row, out, channels, length, out.shape[2], update is not None,
            64, triton.next_power_of_2(length), num_warps=4, launch_pdl=True,
        )  # fmt: skip

    def films(self, timesteps: Tensor, cond: Tensor) -> Tensor:
        """Scales and shifts of all blocks, float32 [N, rows]; timesteps [N], cond [N, cond_dim]: one product."""
        features = self.model.step_features(timesteps, cond)
        return F.linear(F.mish(torch.cat((features, cond), dim=-1)), self.film_weight, self.film_bias).float()

    @torch.inference_mode()
    def __call__(self, sample: Tensor, timestep: Tensor | float, global_cond: Tensor) -> Tensor:
        if reason := supported(self.model, sample):
            return self.fall_back(reason)(sample, timestep, global_cond)
        sample, cond = sample.contiguous(), global_cond.to(self.dtype)
        number = not isinstance(timestep, Tensor)
        step = torch.full((1,), timestep, device=sample.device) if number else timestep.to(sample.device)
        timesteps = step.reshape(-1).expand(len(sample))
        out = torch.empty_like(sample)
        self.last(self.features(sample, self.films(timesteps, cond)), out, sample)
        return out

    def fall_back(self, reason: str) -> nn.Module:
        if reason not in WARNED:
            WARNED.add(reason)
            warnings.warn(f"the Triton U-Net kernels fall back to eager: {reason}", stacklevel=3)
        return self.model

    def sampler(self, coefficients: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """unet1d.sample_actions with this model and these coefficients [steps, 5]."""
        from worklog.workloads import unet1d

        steps = len(coefficients)
        rows = coefficients.float().contiguous()
        timesteps = torch.arange(steps, device=coefficients.device)

        @torch.inference_mode()
        def sample_actions(noise: Tensor, global_cond: Tensor) -> Tensor:
            """noise [steps + 1, B, T, action_dim], global_cond [B, cond_dim] -> [B, T, action_dim]."""
            if reason := supported(self.model, noise[0]):
                return unet1d.sample_actions(self.fall_back(reason), noise, global_cond, coefficients)
            batch, cond = noise.shape[1], global_cond.to(self.dtype)
            each = timesteps.repeat_interleave(batch), cond.repeat(steps, 1)
            films = self.films(*each).reshape(steps, batch, -1)
            wide = noise.float().contiguous()
            x = wide[0]
            for fresh, step in zip(wide[1:], reversed(range(steps)), strict=True):
                out = torch.empty_like(x)
                self.last(self.features(x, films[step]), out, x, (fresh, rows[step]))
                x = out
            return x.to(noise.dtype)

        return sample_actions


WARNED: set[str] = set()


def supported(model: nn.Module, sample: Tensor) -> str | None:
    """Why these kernels cannot run the model on samples [B, T, action_dim] like this one, or None."""
    if not sample.is_cuda or torch.cuda.get_device_capability(sample.device) < (9, 0):
        return "the sample is not on a GPU of compute capability 9.0 or newer"
    if sample.device.index != torch.cuda.current_device():
        return "the sample is not on the current GPU"
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES) or sample.dtype not in (torch.float32, *dtypes):
        return "weights are not all of one type, or samples neither float32 nor of that type"
    if any(width % 16 for width in model.shape.widths) or model.shape.groups != 8:
        return "widths are not multiples of 16, or GroupNorm has other than 8 groups"
    return f"horizon {sample.shape[1]} does not divide by 4" if sample.shape[1] % 4 else None


def build(model: nn.Module) -> TritonUnet:
    """The model, called the same way; falls back to eager with one warning where `supported` says why."""
    return TritonUnet(model)


def build_sampler(model: nn.Module, coefficients: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """As unet1d.sample_actions(model, noise, global_cond, coefficients); coefficients: unet1d.ddpm_coefficients."""
    return TritonUnet(model).sampler(coefficients)
