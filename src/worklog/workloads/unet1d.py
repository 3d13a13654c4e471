"""Diffusion policy's ConditionalUnet1D with seeded random weights, and its DDPM sampler.

Shapes and names follow the authors' Push-T example (Chi et al., Diffusion Policy, <https://arxiv.org/abs/2303.04137>):
an action has 2 numbers, 16 are predicted together, the condition is 2 observations of 512 image features and 2
positions. A published checkpoint's state_dict fits the
module.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class UnetShape:
    action_dim: int = 2
    cond_dim: int = 1028
    step_dim: int = 256
    widths: tuple[int, ...] = (256, 512, 1024)
    kernel_size: int = 5
    groups: int = 8


PUSH_T = UnetShape()
TINY = UnetShape(cond_dim=20, step_dim=16, widths=(32, 64, 128))
HORIZON = 16  # actions predicted together
STEPS = 100


class SinusoidalPosEmb(nn.Module):
    """Timesteps [B] -> [B, dim]: sines, then cosines, of geometric frequencies from 1 to 1e-4."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        half = self.dim // 2
        frequency = torch.exp(torch.arange(half, device=timesteps.device, dtype=wide) * (-math.log(10000) / (half - 1)))
        angle = timesteps[:, None].to(wide) * frequency
        return torch.cat((angle.sin(), angle.cos()), dim=-1).to(dtype)


class Conv1dBlock(nn.Module):
    """Conv1d, GroupNorm, Mish. x [B, in, T] -> [B, out, T]."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(in_channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(groups, out_channels),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


class ConditionalResidualBlock1D(nn.Module):
    """Two conv blocks, a scale and a shift from the condition (FiLM) between them, and a residual around both."""

    def __init__(self, in_channels: int, out_channels: int, cond_dim: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Conv1dBlock(channels, out_channels, kernel_size, groups) for channels in (in_channels, out_channels)
        )
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond_dim, 2 * out_channels))
        same = in_channels == out_channels
        self.residual_conv = nn.Identity() if same else nn.Conv1d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """x [B, in, T], cond [B, cond_dim] -> [B, out, T]."""
        scale, shift = self.cond_encoder(cond).unsqueeze(-1).chunk(2, dim=1)
        out: Tensor = self.blocks[1](scale * self.blocks[0](x) + shift) + self.residual_conv(x)
        return out


class Downsample1d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, T] -> [B, C, T / 2]."""
        out: Tensor = self.conv(x)
        return out


class Upsample1d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(channels, channels, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, T] -> [B, C, 2 T]."""
        out: Tensor = self.conv(x)
        return out


class ConditionalUnet1D(nn.Module):
    """Predicts the noise in a sequence of actions. T must divide by 4: two levels halve it."""

    def __init__(self, shape: UnetShape = PUSH_T) -> None:
        super().__init__()
        self.shape = shape
        cond_dim = shape.step_dim + shape.cond_dim

        def resnet(in_channels: int, out_channels: int) -> ConditionalResidualBlock1D:
            return ConditionalResidualBlock1D(in_channels, out_channels, cond_dim, shape.kernel_size, shape.groups)

        levels = list(zip((shape.action_dim, *shape.widths), shape.widths, strict=False))
        bottom = shape.widths[-1]
        self.diffusion_step_encoder = nn.Sequential(
            SinusoidalPosEmb(shape.step_dim),
            nn.Linear(shape.step_dim, 4 * shape.step_dim),
            nn.Mish(),
            nn.Linear(4 * shape.step_dim, shape.step_dim),
        )
        self.mid_modules = nn.ModuleList(resnet(bottom, bottom) for _ in range(2))
        self.down_modules = nn.ModuleList(
            nn.ModuleList((resnet(a, b), resnet(b, b), nn.Identity() if b == bottom else Downsample1d(b)))
            for a, b in levels
        )
        self.up_modules = nn.ModuleList(
            nn.ModuleList((resnet(2 * b, a), resnet(a, a), Upsample1d(a))) for a, b in reversed(levels[1:])
        )
        self.final_conv = nn.Sequential(
            Conv1dBlock(shape.widths[0], shape.widths[0], shape.kernel_size, shape.groups),
            nn.Conv1d(shape.widths[0], shape.action_dim, 1),
        )

    def forward(self, sample: Tensor, timestep: Tensor | float, global_cond: Tensor) -> Tensor:
        """Actions [B, T, action_dim], step [B], [] or a number, condition [B, cond_dim] -> noise [B, T, action_dim].

        A number, or a tensor on the host, costs a copy to the device, as in the authors' code.
        """
        return self.predict(sample, torch.cat((self.step_features(timestep, sample), global_cond), dim=-1))

    def predict(self, sample: Tensor, cond: Tensor) -> Tensor:
        """As forward, from the whole condition: step features, then global_cond, [B, step_dim + cond_dim]."""
        x = sample.moveaxis(-1, -2)
        skips = []
        for first, second, down in self.down_modules:
            x = second(first(x, cond), cond)
            skips.append(x)
            x = down(x)
        for middle in self.mid_modules:
            x = middle(x, cond)
        for first, second, up in self.up_modules:
            x = up(second(first(torch.cat((x, skips.pop()), dim=1), cond), cond))
        out: Tensor = self.final_conv(x)
        return out.moveaxis(-1, -2)

    def step_features(self, timestep: Tensor | float, sample: Tensor) -> Tensor:
        """The part of the condition that changes from step to step, [B, step_dim]."""
        timesteps = torch.as_tensor(timestep, device=sample.device).reshape(-1).expand(sample.shape[0])
        embedding, *layers = self.diffusion_step_encoder
        x: Tensor = embedding(timesteps, sample.dtype)
        for layer in layers:
            x = layer(x)
        return x


def draw(module: Module, seed: int) -> Module:
    """The module, ready for inference, its parameters drawn in place from `seed` and each layer's name.

    They are drawn on the CPU, so that every device has the same. Weights are normal with variance 1 / (terms of one
    output), norm weights lie between 0.5 and 1.5, and biases are normal * 0.1, so that one left out shows.
    """
    module.requires_grad_(False).eval()
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d | nn.GroupNorm):
            continue
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        if isinstance(layer, nn.GroupNorm):
            layer.weight.uniform_(0.5, 1.5, generator=generator)
        elif isinstance(layer, nn.ConvTranspose1d):  # [in, out, k]: one output gets k / stride taps of each channel
            taps = layer.kernel_size[0] // layer.stride[0]
            layer.weight.normal_(0, (layer.in_channels * taps) ** -0.5, generator=generator)
        else:
            layer.weight.normal_(0, layer.weight[0].numel() ** -0.5, generator=generator)
        if layer.bias is not None:
            layer.bias.normal_(0, 0.1, generator=generator)
    return module


def build(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shape: UnetShape = PUSH_T,
) -> ConditionalUnet1D:
    """The U-Net for inference: weights are drawn in float32, then rounded to `dtype`."""
    return draw(ConditionalUnet1D(shape), seed).to(device, dtype)


def inputs(
    shape: UnetShape = PUSH_T,
    batch: int = 1,
    horizon: int = HORIZON,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal actions [B, T, action_dim], one step [] int64 on the device, and a normal condition [B, cond_dim]."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(batch, horizon, shape.action_dim, generator=generator)
    cond = torch.randn(batch, shape.cond_dim, generator=generator)
    return sample.to(device, dtype), torch.tensor(STEPS // 2, device=device), cond.to(device, dtype)


def ddpm_coefficients(
    steps: int = STEPS, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """[steps, 5] by timestep: what `denoise` needs, computed in float64.

    Cosine schedule squaredcos_cap_v2 (Nichol & Dhariwal, <https://arxiv.org/abs/2102.09672>, equation 17, beta at most
    0.999), posterior and variance "fixed small" (Ho et al., <https://arxiv.org/abs/2006.11239>, equation 7). Columns:
    sqrt(1 - a_bar), sqrt(a_bar), weight of x_0, weight of x_t, standard deviation of the fresh noise (0 at step 0).
    """
    time = torch.arange(steps + 1, dtype=torch.float64) / steps
    bar = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    beta = (1 - bar[1:] / bar[:-1]).clamp(max=0.999)
    a_bar = (1 - beta).cumprod(0)
    before = torch.cat((torch.ones(1, dtype=torch.float64), a_bar[:-1]))
    rest = 1 - a_bar
    columns = (
        rest.sqrt(),
        a_bar.sqrt(),
        before.sqrt() * beta / rest,
        (1 - beta).sqrt() * (1 - before) / rest,
        ((1 - before) / rest * beta).sqrt(),
    )
    return torch.stack(columns, dim=1).to(device, dtype)


def denoise(sample: Tensor, prediction: Tensor, noise: Tensor, row: Tensor) -> Tensor:
    """One DDPM step x_t -> x_(t-1), all [B, T, action_dim]; x_0 clipped to [-1, 1].

    row [5]: of ddpm_coefficients.
    """
    rest, kept, of_start, of_sample, deviation = row.unbind()
    start = ((sample - rest * prediction) / kept).clamp(-1, 1)
    return of_start * start + of_sample * sample + deviation * noise


def sample_actions(model: Any, noise: Tensor, global_cond: Tensor, coefficients: Tensor) -> Tensor:
    """All steps, last timestep first, [B, T, action_dim]; on CUDA nothing in it waits for the device.

    noise [steps + 1, B, T, action_dim]: the start, then each step's fresh noise. model: called as ConditionalUnet1D.
    coefficients [steps, 5]: of ddpm_coefficients. On the host, they put the timesteps there too: a copy each step.
    """
    timesteps = torch.arange(len(coefficients), device=coefficients.device)
    x = noise[0]
    for fresh, timestep in zip(noise[1:], reversed(range(len(coefficients))), strict=True):
        x = denoise(x, model(x, timesteps[timestep], global_cond), fresh, coefficients[timestep])
    return x
