"""Diffusion policy's vision encoder: ResNet-18 with GroupNorm for BatchNorm, with seeded random weights.

He et al., <https://arxiv.org/abs/1512.03385>; submodules have torchvision's names, norms included (`bn1`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worklog.workloads.unet1d import draw

GROUP = 16  # channels a norm group, as the policy has it


class BasicBlock(nn.Module):
    """Residual block of ResNet-18."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.GroupNorm(out_channels // GROUP, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.GroupNorm(out_channels // GROUP, out_channels)
        self.downsample = nn.Sequential()
        if stride > 1:
            self.downsample.extend(
                (
                    nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                    nn.GroupNorm(out_channels // GROUP, out_channels),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class VisionEncoder(nn.Module):
    """ResNet-18 without its last linear. Images [B, 3, H, W] -> [B, 512]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.GroupNorm(64 // GROUP, 64)
        for i, (before, width) in enumerate(((64, 64), (64, 128), (128, 256), (256, 512)), start=1):
            stages = nn.Sequential(BasicBlock(before, width, 1 if i == 1 else 2), BasicBlock(width, width, 1))
            self.add_module(f"layer{i}", stages)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return x.mean(dim=(2, 3))


def build(seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> VisionEncoder:
    """The encoder for inference: weights are drawn in float32, then rounded to `dtype`."""
    return draw(VisionEncoder(), seed).to(device, dtype)
