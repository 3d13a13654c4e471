"""The plan, executed by NumPy in float64 exactly as unet_step.cu executes it: the same blocks, slices, fragments and
partial sums, the same exchange through a workspace that starts as NaN. Slow, readable, and checked against PyTorch.

`read_fragments` undoes the packing by the hardware's own rule (which thread's register holds which row and k), not by
the code that packed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernels import packing
from kernels.phase import BLOCKS, CONDITION, EMBEDDING, FIRST, LAST, SLICES, SPLIT_WORDS, Phase
from kernels.plan import Plan

Array = NDArray[np.float64]
EPS = 1e-5  # GroupNorm's


def mish(x: Array) -> Array:
    return x * np.tanh(np.logaddexp(0, x))


def read_fragments(fragments: Tensor, tiles: int) -> Array:
    """Bytes [..., steps * tiles * 2, 512] -> the weights a warp multiplies, [..., tiles * 16 rows, steps * channels].

    PTX ISA, mma.m16n8k8.tf32 and m16n8k16: thread 4 g + t, register i holds row g + 8 (i % 2); its k is the operand's,
    whose thread t reads 16 neighbouring bytes and uses words 0, 1 in the first instruction and 2, 3 in the second.
    """
    element = 1 if fragments.dtype == torch.float32 else 2
    values = fragments.double().numpy().reshape(*fragments.shape[:-2], -1, tiles, 2, 32, 4, element)
    steps = values.shape[-6]
    out = np.full((*values.shape[:-6], tiles * 16, steps, SPLIT_WORDS * element), np.nan)
    for thread in range(32):
        g, t = divmod(thread, 4)
        for h in range(2):
            for register in range(4):
                rows = np.arange(tiles) * 16 + g + 8 * (register % 2)
                word = 4 * t + 2 * h + register // 2
                for part in range(element):
                    taken = values[..., :, h, thread, register, part]  # [..., steps, tiles]
                    out[..., rows, :, word * element + part] = np.moveaxis(taken, -1, 0)
    return out.reshape(*out.shape[:-2], -1)


@dataclass
class Executor:
    """`step` is the model's forward for one sample, `workspace` holds all partial sums afterwards."""

    model: nn.Module
    plan: Plan
    dtype: torch.dtype
    workspace: Array = field(init=False)

    def __post_init__(self) -> None:
        plan, model = self.plan, self.model
        self.stream = packing.stream(model, plan, self.dtype).view(self.dtype)
        self.params = packing.params(model, plan).double().numpy()
        self.first = packing.first(model).double().numpy()
        self.last = [part.double().numpy() for part in packing.last(model)]
        self.film_bias = packing.film_bias(model, plan).double().numpy()
        self.frequencies = packing.frequencies(plan).double().numpy()

    def step(self, sample: Array, timestep: float, cond: Array, film: Array | None = None) -> Array:
        """sample [T, action_dim], cond [cond_dim], film: all scales and shifts where the plan is one for sampling."""
        self.workspace = np.full(self.plan.set_elements, np.nan)
        if film is not None:
            self.film = film
        self.slots: dict[tuple[int, int], Array] = {}  # (slice, slot) -> what shared memory keeps
        self.sample, self.timestep, self.cond = sample.T, timestep, cond
        for phase in self.plan.phases:
            self.run(phase)
        bias = self.last[1]
        eps = self.partial(self.plan.eps_offset, self.plan.shape.action_dim, self.plan.horizon)
        return (eps + bias[:, None]).T

    def partial(self, offset: int, channels: int, columns: int) -> Array:
        """The sum of the eight slices' results, [channels, columns]."""
        count = SLICES * channels * columns
        return self.workspace[offset : offset + count].reshape(SLICES, channels, columns).sum(0)

    def run(self, phase: Phase) -> None:
        if phase.kind == CONDITION:
            values = self.partial(phase.in_offset, phase.in_channels, 1)[:, 0]
            values = values + self.params[phase.params : phase.params + phase.in_channels, 0]
            self.condition = mish(np.concatenate((values, self.cond)))
        else:
            operands = [self.operand(phase, s) for s in range(SLICES)]
            if phase.kind == LAST:
                self.noise(phase, operands)
            else:
                self.products(phase, operands)
        if phase.residual_in >= 0:
            self.take_residual(phase)
        if phase.film_tiles:
            self.film_rows(phase)

    def source(self, phase: Phase, s: int) -> Array:
        """Slice s of the input before normalisation, [channels, columns]."""
        count = phase.in_channels // SLICES
        own = slice(s * count, (s + 1) * count)
        if phase.kind == EMBEDDING:
            angle = np.pi * self.timestep * self.frequencies
            return np.concatenate((np.sin(angle), np.cos(angle)))[own, None]
        if phase.kind == FIRST:
            return self.first_conv(phase, s)
        summed = self.partial(phase.in_offset, phase.in_channels, phase.in_columns)[own]
        return summed + self.params[phase.params :][own, :1]

    def first_conv(self, phase: Phase, s: int) -> Array:
        shape, count = self.plan.shape, phase.in_channels // SLICES
        mine = self.first[s * count : (s + 1) * count]
        taps, dim = shape.kernel_size, shape.action_dim
        padded = np.pad(self.sample, ((0, 0), (taps // 2, taps // 2)))
        windows = np.stack([padded[:, j : j + phase.in_columns] for j in range(taps)], 1).reshape(dim * taps, -1)
        out = mine[:, : dim * taps] @ windows + mine[:, -2:-1]
        self.slots[s, 0] = mine[:, dim * taps : -2] @ self.sample + mine[:, -1:]
        at = phase.in_offset + s * count * phase.in_columns
        self.workspace[at : at + out.size] = out.ravel()
        return out

    def operand(self, phase: Phase, s: int) -> Array:
        """What slice s multiplies, [channels and padding, positions with zero rows around]."""
        x, count = self.source(phase, s), phase.in_channels // SLICES
        own = slice(phase.params + s * count, phase.params + (s + 1) * count)
        if phase.norm:
            x = (x - x.mean()) / np.sqrt(x.var() + EPS)
            x = x * self.params[own, 1:2] + self.params[own, 2:3]
        if phase.mish:
            x = mish(x)
        if phase.film >= 0:
            at, film = phase.film + s * count, self.film_values()
            shift = at + phase.in_channels
            x = film[at : at + count, None] * x + film[shift : shift + count, None]
        if phase.residual:
            x = x + self.slots[s, 0]
        for slot in range(self.plan.slots):
            if phase.keep >> slot & 1 and phase.kind != FIRST:  # `first_conv` kept its own
                self.slots[s, slot] = x
        if phase.concat >= 0:
            x = np.concatenate((x, self.slots[s, phase.concat]))
        if not phase.taps:
            return x
        channels = phase.blocks * SPLIT_WORDS * self.plan.element
        return np.pad(x, ((0, channels - len(x)), (phase.pad, phase.pad)))

    def film_values(self) -> Array:
        if self.plan.sampling:
            return self.film
        return self.workspace[self.plan.film_offset :][: self.plan.film_rows]

    def weights(self, fragment: int, steps: int, tiles: int) -> Array:
        """[blocks of the grid, tiles * 16, steps * channels]."""
        return read_fragments(self.stream[:, fragment : fragment + steps * tiles * 2], tiles)

    def products(self, phase: Phase, operands: list[Array]) -> None:
        self.product(phase, operands, phase.fragment, phase.taps, phase.out_offset, phase.transposed)
        if phase.residual_out >= 0:
            centre = [x[:, phase.pad : x.shape[1] - phase.pad] for x in operands]
            self.product(phase, centre, phase.residual_fragment, 1, phase.residual_out, 0)

    def product(
        self, phase: Phase, operands: list[Array], fragment: int, taps: int, out_offset: int, transposed: int
    ) -> None:
        """Each block's partial sums, to where its slice's lie."""
        weights = self.weights(fragment, taps * phase.blocks, phase.tiles)
        count = phase.out_channels * phase.columns * (1 + transposed)
        out = self.workspace[out_offset : out_offset + SLICES * count]
        out = out.reshape(SLICES, phase.out_channels, phase.columns, 1 + transposed)
        for block in range(BLOCKS):
            r, s = divmod(block, SLICES)
            row = r * phase.tiles * 16
            if row >= phase.rows:
                continue
            odd, channel = divmod(row, phase.out_channels)
            columns = [operands[s][:, odd + j :: phase.step][:, : phase.columns] for j in range(taps)]
            sums = weights[block] @ np.concatenate(columns)
            end = min(channel + phase.tiles * 16, phase.out_channels)
            out[s, channel:end, :, odd] = sums[: end - channel]

    def take_residual(self, phase: Phase) -> None:
        count = phase.out_channels // SLICES
        summed = self.partial(phase.residual_in, phase.out_channels, phase.columns)
        summed = summed + self.params[phase.residual_params :][: phase.out_channels, :1]
        for s in range(SLICES):
            self.slots[s, 0] = summed[s * count : (s + 1) * count]

    def film_rows(self, phase: Phase) -> None:
        steps = self.plan.condition_blocks
        x = np.pad(self.condition, (0, steps * SPLIT_WORDS * self.plan.element - len(self.condition)))
        for i in range(phase.film_tiles):
            weights = self.weights(phase.film_fragment + i * 2 * steps, steps, 1)
            rows = (weights @ x).reshape(-1)
            at = (phase.film_first + i) * 16 * BLOCKS
            self.workspace[self.plan.film_offset + at :][: len(rows)] = rows + self.film_bias[at : at + len(rows)]

    def noise(self, phase: Phase, operands: list[Array]) -> None:
        """The last convolution: eight blocks (row 0 of each slice) leave their share of each output."""
        weight, count = self.last[0], phase.in_channels // SLICES
        size = self.plan.shape.action_dim * self.plan.horizon
        for s, x in enumerate(operands):
            at = self.plan.eps_offset + s * size
            self.workspace[at : at + size] = (weight[:, s * count : (s + 1) * count] @ x).ravel()
