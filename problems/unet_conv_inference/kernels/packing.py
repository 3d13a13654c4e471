"""The model's parameters in the order in which unet_step.cu reads them. Done once, at load time.

A block's stream is one run of fragments of 512 bytes. A fragment is what a warp hands to one tensor-core instruction:
16 rows and 8 float32 (16 of 16 bits) input channels, 16 bytes a thread. In NVIDIA's layout of mma.m16n8k8.tf32 (and,
with two values in each register, of m16n8k16), thread 4 g + t holds rows g and g + 8 at k = t and t + 4. The order of
k is free as long as both operands agree, so t's share of 16 words of channels is four neighbours: its operand is one
16-byte load for two instructions h = 0, 1.

    channel = ((4 t + 2 h + half) * element + part)    register = 2 * half + (0 for row g, 1 for row g + 8)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernels.phase import BLOCKS, FRAGMENT, PHASE_FIELDS, PHASE_WORDS, ROW_PARTS, SLICES, SPLIT_WORDS
from kernels.plan import Plan, Weight


def stream(model: nn.Module, plan: Plan, dtype: torch.dtype) -> Tensor:
    """All weights but those of the first and last convolution: [BLOCKS, fragments, 512] bytes, on the model's device.

    Block r * SLICES + s has its own row. dtype: float32, bfloat16 or float16; its size must be the plan's.
    """
    assert dtype.itemsize * plan.element == 4
    device = next(model.parameters()).device
    out = torch.zeros(BLOCKS, plan.fragments, FRAGMENT, dtype=torch.uint8, device=device)
    film = film_weight(model, plan).to(dtype) if plan.film_rounds else None
    for weight in plan.weights:
        if weight.layer == "film":
            assert film is not None
            rows = film[weight.film_tile * 16 * BLOCKS :][: 16 * BLOCKS]
            part = by_tile(rows, weight)
        else:
            part = by_block(dense(model.get_submodule(weight.layer)).to(dtype), weight)
        count = weight.taps * weight.blocks * weight.tiles * 2
        out[:, weight.fragment : weight.fragment + count] = part.view(torch.uint8).reshape(BLOCKS, count, FRAGMENT)
    return out


def dense(layer: nn.Module) -> Tensor:
    """A layer's weight as [rows, channels, taps]: one tap for a linear; for a transposed convolution (stride 2, padding
    1, kernel 4) the rows of the even positions, y[2n] = w[3] x[n-1] + w[1] x[n], then those of the odd ones,
    y[2n+1] = w[2] x[n] + w[0] x[n+1]."""
    weight = layer.weight.detach()
    if isinstance(layer, nn.ConvTranspose1d):
        weight = weight.transpose(0, 1)  # [out, in, 4]
        return torch.cat((weight[..., [3, 1]], weight[..., [2, 0]]))
    return weight[..., None] if isinstance(layer, nn.Linear) else weight


def by_block(weight: Tensor, entry: Weight) -> Tensor:
    """[rows, channels, taps] -> fragments [ROW_PARTS, SLICES, taps, blocks, tiles, h, 8, 4, 4, element]."""
    phase, (rows, channels, taps) = entry.phase, weight.shape
    own, other = phase.in_channels, phase.concat_channels
    assert channels == own + other
    parts = [weight[:, :own].reshape(rows, SLICES, -1, taps)]
    if other:  # a slice has its share of both
        parts.append(weight[:, own:].reshape(rows, SLICES, -1, taps))
    sliced = torch.cat(parts, dim=2)  # [rows, SLICES, channels of a slice, taps]
    element = 4 // weight.element_size()
    padded = weight.new_zeros(ROW_PARTS * entry.tiles * 16, SLICES, entry.blocks * SPLIT_WORDS * element, taps)
    padded[:rows, :, : sliced.shape[2]] = sliced
    # row = part, tile, upper (rows g + 8), g; channel = block, t, h, half, element
    axes = padded.reshape(ROW_PARTS, entry.tiles, 2, 8, SLICES, entry.blocks, 4, 2, 2, element, taps)
    return axes.permute(0, 4, 10, 5, 1, 7, 3, 6, 8, 2, 9).contiguous()


def by_tile(rows: Tensor, entry: Weight) -> Tensor:
    """Rows of FiLM, 16 for each block, and all their channels -> fragments [BLOCKS, blocks, h, 8, 4, 4, element]."""
    element = 4 // rows.element_size()
    padded = rows.new_zeros(BLOCKS * 16, entry.blocks * SPLIT_WORDS * element)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    axes = padded.reshape(BLOCKS, 2, 8, entry.blocks, 4, 2, 2, element)
    return axes.permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous()


def film_weight(model: nn.Module, plan: Plan) -> Tensor:
    """All FiLM linears as one, [film_rows, step_dim + cond_dim], in the chain's order."""
    return torch.cat([model.get_submodule(name).cond_encoder[1].weight.detach() for name in plan.film_row])


def film_bias(model: nn.Module, plan: Plan) -> Tensor:
    """Float32 [rows of all tiles]; the rows that pad the last tile are zero."""
    bias = torch.cat([model.get_submodule(name).cond_encoder[1].bias.detach().float() for name in plan.film_row])
    padded = bias.new_zeros(max(plan.film_rounds * 16 * BLOCKS, len(bias)))
    padded[: len(bias)] = bias
    return padded


def params(model: nn.Module, plan: Plan) -> Tensor:
    """Float32 [channels of all phases' inputs, 4]: bias of the layer before, norm weight, norm bias, 0."""
    runs = []
    for layer, norm, channels in plan.params:
        run = torch.zeros(channels, 4)
        run[:, 0] = model.get_submodule(layer).bias.detach()
        if norm is not None:
            group_norm = model.get_submodule(norm)
            run[:, 1], run[:, 2] = group_norm.weight.detach(), group_norm.bias.detach()
        runs.append(run)
    return torch.cat(runs)


def first(model: nn.Module) -> Tensor:
    """The first block's two convolutions on the sample, float32 [channels, action_dim * kernel + action_dim + 2]."""
    block = model.get_submodule("down_modules.0.0")
    conv, residual = block.blocks[0].block[0], block.residual_conv
    parts = (conv.weight.flatten(1), residual.weight.flatten(1), conv.bias[:, None], residual.bias[:, None])
    return torch.cat([part.detach().float() for part in parts], dim=1).contiguous()


def last(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The last convolution: float32 [action_dim, channels] and [action_dim]."""
    conv = model.get_submodule("final_conv.1")
    return conv.weight.detach().float().flatten(1).contiguous(), conv.bias.detach().float().contiguous()


def frequencies(plan: Plan) -> Tensor:
    """Of the sinusoidal embedding, over pi: float32 [step_dim / 2]. The kernel takes sin(pi x)."""
    half = plan.shape.step_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) * (-math.log(10000) / (half - 1))
    return (exponent.exp() / math.pi).float()


def phase_table(plan: Plan) -> Tensor:
    """int32 [phases, PHASE_WORDS], as `struct Phase` in unet_step.cu."""
    table = torch.zeros(len(plan.phases), PHASE_WORDS, dtype=torch.int32)
    table[:, : len(PHASE_FIELDS)] = torch.tensor([[getattr(p, name) for name in PHASE_FIELDS] for p in plan.phases])
    return table
