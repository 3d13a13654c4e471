"""Three ways around cuDNN's 1-D convolution, as layers that take the place of nn.Conv1d and nn.ConvTranspose1d.

    model = convolutions.swap(model, "gemm")

Each has the results of the layer that it replaces, with its weights laid out once, when it is made.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Conv2dChannelsLast(nn.Module):
    """The same convolution over images of height 1, weight and activations channels-last as cuDNN wants them."""

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        weight = conv.weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), conv.bias
        self.call = F.conv_transpose2d if isinstance(conv, nn.ConvTranspose1d) else F.conv2d
        self.stride, self.padding = (1, *conv.stride), (0, *conv.padding)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        return self.call(x, self.weight, self.bias, self.stride, self.padding).squeeze(2)


class ConvGemm(nn.Module):
    """One matrix product (im2col): a row for each output position, a column for each input channel and tap."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.flatten(1), requires_grad=False)  # [out, in * taps], as it is stored
        self.bias, self.taps = conv.bias, conv.kernel_size[0]
        self.stride, self.padding = conv.stride[0], conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (self.padding, self.padding)).unfold(2, self.taps, self.stride)  # [B, in, T, taps], a view
        return F.linear(windows.transpose(1, 2).flatten(2), self.weight, self.bias).transpose(1, 2)


class ConvShifted(nn.Module):
    """One matrix product a tap, added up: each reads the input shifted by one position, and nothing is unfolded."""

    def __init__(self, conv: nn.Conv1d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.permute(2, 1, 0).contiguous(), requires_grad=False)  # [taps, in, out]
        self.bias, self.taps = conv.bias, conv.kernel_size[0]
        self.stride, self.padding = conv.stride[0], conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (self.padding, self.padding)).transpose(1, 2)  # [B, T + 2 padding, in]
        last = x.shape[1] - self.taps
        out = self.bias
        for tap in range(self.taps):
            out = torch.addmm(out, x[:, tap : tap + last + 1 : self.stride].flatten(0, 1), self.weight[tap])
        return out.unflatten(0, (x.shape[0], -1)).transpose(1, 2)


class ConvTransposeGemm(nn.Module):
    """Stride 2: one matrix product gives each input position's taps, which are added where they fall."""

    def __init__(self, conv: nn.ConvTranspose1d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight.flatten(1), requires_grad=False)  # [in, out * taps], as it is stored
        self.bias, self.taps = conv.bias, conv.kernel_size[0]
        self.stride, self.padding = conv.stride[0], conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        columns = (x.transpose(1, 2) @ self.weight).transpose(1, 2)  # [B, out * taps, T]
        full = (length - 1) * self.stride + self.taps
        out = F.fold(columns, (1, full), (1, self.taps), stride=(1, self.stride)).squeeze(2)
        return out[:, :, self.padding : full - self.padding] + self.bias[:, None]


LAYERS = {
    "conv2d": (Conv2dChannelsLast, Conv2dChannelsLast),
    "gemm": (ConvGemm, ConvTransposeGemm),
    "shifted": (ConvShifted, ConvTransposeGemm),
}


def swap(model: nn.Module, how: str) -> nn.Module:
    """Replace every 1-D convolution of the model, in place, by the layer that `how` names in LAYERS."""
    plain, transposed = LAYERS[how]
    for name, layer in list(model.named_modules()):
        made = None
        if isinstance(layer, nn.Conv1d):
            made = plain(layer)
        elif isinstance(layer, nn.ConvTranspose1d):
            made = transposed(layer)
        if made is not None:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, made)
    return model
