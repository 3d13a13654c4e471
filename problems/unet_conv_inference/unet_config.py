"""The network's shapes, and what follows from them alone: how many weights a step reads, how many operations it does.

Formulas are for worklog.workloads.unet1d.ConditionalUnet1D; a multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from worklog.problem import Config


@dataclass(frozen=True, kw_only=True)
class UnetConfig(Config):
    """The network, how it is sampled, and how often it is timed."""

    widths: tuple[int, ...] = (256, 512, 1024)
    cond_dim: int = 1028
    step_dim: int = 256
    action_dim: int = 2
    kernel_size: int = 5
    batch: int = 1
    horizon: int = 16
    steps: int = 100
    repeat: int = 10
    samples: int = 30
    sampling_samples: int = 10
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what the formulas below make of them."""
        counts = ("parameters", "conv_elements", "film_elements", "step_flop", "sampling_parameters", "sampling_flop")
        return super().as_dict() | {name: getattr(self, name) for name in counts}

    def residual_blocks(self) -> Iterator[tuple[int, int, int]]:
        """(channels in, channels out, length) of each, in the order in which they run."""
        levels = list(enumerate(zip((self.action_dim, *self.widths), self.widths, strict=False)))
        for level, (before, width) in levels:
            yield before, width, self.horizon >> level
            yield width, width, self.horizon >> level
        for _ in range(2):
            yield self.widths[-1], self.widths[-1], self.horizon >> levels[-1][0]
        for level, (before, width) in reversed(levels[1:]):
            yield 2 * width, before, self.horizon >> level
            yield before, before, self.horizon >> level

    def convolutions(self) -> Iterator[tuple[int, int, int, int]]:
        """(channels in, channels out, taps, positions at which each weight is used) of each convolution."""
        k = self.kernel_size
        for before, width, length in self.residual_blocks():
            yield before, width, k, length
            yield width, width, k, length
            if before != width:
                yield before, width, 1, length
        for level, width in enumerate(self.widths[:-1]):
            yield width, width, 3, self.horizon >> (level + 1)  # down, stride 2
            yield width, width, 4, self.horizon >> (level + 1)  # up, transposed, stride 2
        yield self.widths[0], self.widths[0], k, self.horizon
        yield self.widths[0], self.action_dim, 1, self.horizon

    @property
    def conv_elements(self) -> int:
        return sum(before * width * taps for before, width, taps, _ in self.convolutions())

    @property
    def conv_flop(self) -> int:
        return 2 * self.batch * sum(before * width * taps * n for before, width, taps, n in self.convolutions())

    @property
    def film_rows(self) -> int:
        """Outputs of the linears that turn the condition into scales and shifts: two a channel."""
        return sum(2 * width for _, width, _ in self.residual_blocks())

    @property
    def film_elements(self) -> int:
        return self.film_rows * (self.step_dim + self.cond_dim)

    @property
    def encoder_elements(self) -> int:
        """Weights of the two linears that encode the step's number."""
        return 8 * self.step_dim**2

    @property
    def vector_elements(self) -> int:
        """Biases of all layers, scales and shifts of the norms."""
        convs = sum(width for _, width, _, _ in self.convolutions())
        norms = 2 * (sum(2 * width for _, width, _ in self.residual_blocks()) + self.widths[0])
        return convs + norms + self.film_rows + 5 * self.step_dim

    @property
    def parameters(self) -> int:
        return self.conv_elements + self.film_elements + self.encoder_elements + self.vector_elements

    @property
    def step_flop(self) -> int:
        return self.conv_flop + 2 * self.batch * (self.film_elements + self.encoder_elements)

    @property
    def sampling_parameters(self) -> int:
        """Least parameters that all steps together read: what makes the scales and shifts of every step is read once,
        since neither the condition nor the steps depend on the sample."""
        once = self.film_elements + self.encoder_elements
        return self.steps * (self.parameters - once) + once

    @property
    def sampling_flop(self) -> int:
        """The condition's share of the scales and shifts is computed once, the step's share for every step."""
        film = self.film_rows * (self.cond_dim + self.steps * self.step_dim)
        return self.steps * self.conv_flop + 2 * self.batch * (film + self.steps * self.encoder_elements)
