"""The scales and shifts of all steps of a sampling from one matrix product, in plain PyTorch: one idea of the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worklog.workloads import unet1d


class Part(nn.Module):
    """Stands where a block computed its scale and shift: takes them out of those of all blocks, [B, rows]."""

    def __init__(self, start: int, rows: int) -> None:
        super().__init__()
        self.start, self.rows = start, rows

    def forward(self, films: Tensor) -> Tensor:
        return films.narrow(1, self.start, self.rows)


def sampler(model: unet1d.ConditionalUnet1D, table: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """As unet1d.sample_actions with this model and these coefficients: (noise, condition) -> actions.

    The model stays as it is; its weights are shared, and those of its scale-and-shift linears stored once more, joined.
    """
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    blocks = [block for block in twin.modules() if isinstance(block, unet1d.ConditionalResidualBlock1D)]
    linears = [block.cond_encoder[1] for block in blocks]
    weight, bias = torch.cat([linear.weight for linear in linears]), torch.cat([linear.bias for linear in linears])
    start = 0
    for block, linear in zip(blocks, linears, strict=True):
        block.cond_encoder = Part(start, linear.out_features)
        start += linear.out_features
    timesteps = torch.arange(len(table), device=table.device)

    def sample_actions(noise: Tensor, cond: Tensor) -> Tensor:
        every = cond.repeat(len(table), 1)  # [steps * B, cond_dim]
        features = twin.step_features(timesteps.repeat_interleave(len(cond)), every)
        films = F.linear(F.mish(torch.cat((features, every), dim=-1)), weight, bias).unflatten(0, (len(table), -1))
        x = noise[0]
        for fresh, step in zip(noise[1:], reversed(range(len(table))), strict=True):
            x = unet1d.denoise(x, twin.predict(x.to(cond.dtype), films[step]), fresh, table[step])
        return x

    return sample_actions
