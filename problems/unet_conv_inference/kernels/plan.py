"""What each multiprocessor does in one denoising step, decided ahead of time: the program that unet_step.cu executes.

The network is a chain of 29 small matrix products (32 where the condition is computed too). A product has few columns
(the positions, 2 to 16), so its cost is reading its weights, and the chain's cost is the way from one product to the
next. Both decide the division of work. There are 16 x 8 blocks, one a multiprocessor:

    block (row r, slice s) computes rows r of 16 parts of the product, over input channels s of 8 parts
    slice s = the channels of group s of GroupNorm(8): what a block must normalise is what it multiplies

So a product leaves 8 partial sums of each output. Whoever reads them adds them up, adds the bias, normalises its own
group, and needs nobody for it: one exchange between blocks for each product, and residuals and skip connections
never leave the shared memory of the blocks that use them.

A phase is one product with what happens to its input before. All offsets are in float32 elements of the workspace (one
of two sets), in fragments of the weight stream (512 bytes: what a warp loads at once), or in words of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.phase import (
    BLOCKS,
    CHUNK,
    CONDITION,
    ELEMENTS,
    EMBEDDING,
    FIRST,
    LAST,
    OUTPUTS,
    PER_CHUNK,
    PHASE_WORDS,
    RESIDUAL_SLOT,
    ROW_PARTS,
    SHARED_BYTES,
    SLICES,
    SPLIT_WORDS,
    THREADS,
    Phase,
    ceil_div,
    first_width,
)
from worklog.workloads.unet1d import UnetShape


@dataclass(frozen=True)
class Weight:
    """One layer's place in the stream: from `fragment` on, taps x blocks x tiles x 2 fragments for a block (r, s)."""

    layer: str  # "film": rows film_first * 16 * BLOCKS onwards of all FiLM linears
    phase: Phase
    fragment: int
    taps: int
    tiles: int
    blocks: int
    film_tile: int = -1


@dataclass
class Source:
    """A layer's partial sums, and what turns them into the next operand."""

    layer: str
    channels: int
    columns: int
    offset: int
    norm: str | None = None
    film: str | None = None
    residual: bool = False


class Plan:
    """The phases of one step, where each layer's weights lie in a block's stream, and where its results do.

    shape: the network. horizon: positions of a sample, 8 or 16. element: values in a 4-byte word, 1 for float32
    weights, 2 for 16 bits. sampling: scales and shifts come from a table, so the condition's phases are left out.
    """

    def __init__(self, shape: UnetShape, horizon: int, element: int, sampling: bool) -> None:
        self.shape, self.horizon, self.element, self.sampling = shape, horizon, element, sampling
        self.phases: list[Phase] = []
        self.weights: list[Weight] = []
        self.params: list[tuple[str, str | None, int]] = []  # (layer with the bias, norm, channels)
        self.outputs: dict[str, tuple[int, int, int]] = {}  # layer -> offset of its partial sums, channels, positions
        self.set_elements = self.fragments = 0
        self.film_row, rows = {}, 0
        for name, count in film_rows(shape):
            self.film_row[name] = rows
            rows += count
        self.film_rows, self.film_rounds = rows, 0 if sampling else ceil_div(rows, 16 * BLOCKS)
        self.film_offset = self.allocate(self.film_rounds * 16 * BLOCKS)
        if not sampling:
            self.condition()
        self.chain()
        self.eps_offset = self.allocate(SLICES * shape.action_dim * horizon)
        if not sampling:
            self.spread_film()
        for phase in self.phases:
            self.stream(phase)
        self.fragments = ceil_div(self.fragments, PER_CHUNK) * PER_CHUNK
        self.slots = len(shape.widths)

    @property
    def chunks(self) -> int:
        return self.fragments // PER_CHUNK

    @property
    def condition_blocks(self) -> int:
        return ceil_div(self.shape.step_dim + self.shape.cond_dim, SPLIT_WORDS * self.element)

    @property
    def shared(self) -> dict[str, int]:
        """Byte offsets in shared memory; `ring` is last and takes what is left, in whole chunks."""
        words = {
            "operand": max(2 * p.operand_rows * p.stride for p in self.phases),
            "condition": 0 if self.sampling else 2 * SPLIT_WORDS * self.condition_blocks,
            "kept": self.slots * ELEMENTS,
            "sums": 2 * (THREADS // 32) * OUTPUTS,
            "stats": 4 * THREADS // 32,
            "x": self.shape.action_dim * (self.horizon + self.shape.kernel_size - 1),
            "first": self.shape.widths[0] // SLICES * first_width(self.shape),
            "last": self.shape.widths[0] // SLICES * self.shape.action_dim,
            "phases": len(self.phases) * PHASE_WORDS,
            "flags": 4,
            "barriers": 4 * 32,
        }
        at, offsets = 0, {}
        for name, count in words.items():
            offsets[name] = at
            at += ceil_div(4 * count, 128) * 128
        offsets["ring"] = at
        offsets["ring_chunks"] = min(32, (SHARED_BYTES - at) // CHUNK)
        return offsets

    def allocate(self, count: int) -> int:
        at = self.set_elements
        self.set_elements += ceil_div(count, 64) * 64
        return at

    def add_params(self, layer: str, norm: str | None, channels: int) -> int:
        self.params.append((layer, norm, channels))
        return sum(count for *_, count in self.params[:-1])

    def begin(self, source: Source, **extra: int) -> Phase:
        """A phase that reads `source`; `product` then says what it multiplies it with."""
        phase = Phase(
            source.layer,
            in_offset=source.offset,
            in_channels=source.channels,
            in_columns=source.columns,
            params=self.add_params(source.layer, source.norm, source.channels),
            norm=int(source.norm is not None),
            mish=int(source.norm is not None),
            film=-1 if source.film is None else self.film_row[source.film],
            residual=int(source.residual),
            **extra,
        )
        self.phases.append(phase)
        return phase

    def product(
        self, phase: Phase, layer: str, channels: int, taps: int, pad: int, step: int = 1, up: int = 0
    ) -> Source:
        """The phase's product: `layer`, to so many channels. up: a transposed convolution of stride 2 and 4 taps, whose
        even and odd positions are two convolutions of 2 taps."""
        phase.name, phase.taps, phase.pad, phase.step, phase.transposed = layer, taps, pad, step, up
        phase.operand_rows = phase.in_columns + 2 * pad
        phase.blocks = ceil_div(phase.slice_channels, SPLIT_WORDS * self.element)
        phase.stride = SPLIT_WORDS * (phase.blocks | 1)  # odd: neighbouring rows lie in different halves of the banks
        phase.columns = phase.in_columns // step
        phase.out_channels, phase.out_columns = channels, phase.columns * (1 + up)
        phase.rows = channels * (1 + up)
        tiles = ceil_div(phase.rows, 16 * ROW_PARTS)
        phase.tiles = 4 if tiles == 3 else tiles
        phase.out_offset = self.allocate(SLICES * channels * phase.out_columns)
        self.outputs[layer] = (phase.out_offset, channels, phase.out_columns)
        return Source(layer, channels, phase.out_columns, phase.out_offset)

    def condition(self) -> None:
        """Three phases: the step's two linears, then the operand of all FiLM linears."""
        step = self.shape.step_dim
        first = Phase("", kind=EMBEDDING, in_channels=step)
        self.phases.append(first)
        second = self.begin(self.product(first, "diffusion_step_encoder.1", 4 * step, 1, 0))
        second.mish = 1
        embedded = self.product(second, "diffusion_step_encoder.3", step, 1, 0)
        self.begin(embedded, kind=CONDITION).name = "condition"

    def conv(self, phase: Phase, layer: str, channels: int) -> Source:
        return self.product(phase, layer, channels, self.shape.kernel_size, self.shape.kernel_size // 2)

    def resnet(self, name: str, source: Source, channels: int, **extra: int) -> Source:
        """Two conv blocks, FiLM between them, and the residual."""
        phase = self.begin(source, **extra)
        projected = phase.in_channels + phase.concat_channels != channels
        if not projected:
            phase.keep |= 1 << RESIDUAL_SLOT
        middle = self.conv(phase, f"{name}.blocks.0.block.0", channels)
        middle.norm, middle.film = f"{name}.blocks.0.block.1", name
        last = self.begin(middle)
        if projected:
            layer = f"{name}.residual_conv"
            phase.residual_out = last.residual_in = self.allocate(SLICES * channels * phase.columns)
            self.outputs[layer] = (phase.residual_out, channels, phase.columns)
            last.residual_params = self.add_params(layer, None, channels)
        return self.second(last, name, channels)

    def second(self, phase: Phase, name: str, channels: int) -> Source:
        end = self.conv(phase, f"{name}.blocks.1.block.0", channels)
        end.norm, end.residual = f"{name}.blocks.1.block.1", True
        return end

    def first_resnet(self) -> Source:
        """Its first conv has two input channels: every block computes what it needs of it from the sample itself."""
        name, channels = "down_modules.0.0", self.shape.widths[0]
        self.first_offset = self.allocate(channels * self.horizon)
        layer = f"{name}.blocks.0.block.0"
        middle = Source(layer, channels, self.horizon, self.first_offset, f"{name}.blocks.0.block.1", name)
        return self.second(self.begin(middle, kind=FIRST, keep=1 << RESIDUAL_SLOT), name, channels)

    def chain(self) -> None:
        """The convolutions in their order."""
        widths, final = self.shape.widths, "final_conv.0.block"
        source, keep = self.first_resnet(), 0
        for level, width in enumerate(widths):
            if level:
                source = self.resnet(f"down_modules.{level}.0", source, width)
            source = self.resnet(f"down_modules.{level}.1", source, width)
            keep = 1 << level if level else 0  # slot `level` holds the skip connection; the first is never used
            if level < len(widths) - 1:
                phase = self.begin(source, keep=keep)
                source = self.product(phase, f"down_modules.{level}.2.conv", width, 3, 1, step=2)
        source = self.resnet("mid_modules.0", source, widths[-1], keep=keep)
        source = self.resnet("mid_modules.1", source, widths[-1])
        for i, level in enumerate(range(len(widths) - 1, 0, -1)):
            name, width = f"up_modules.{i}", widths[level - 1]
            source = self.resnet(f"{name}.0", source, width, concat=level, concat_channels=widths[level])
            source = self.resnet(f"{name}.1", source, width)
            source = self.product(self.begin(source), f"{name}.2.conv", width, 2, 1, up=1)
        source = self.conv(self.begin(source), f"{final}.0", widths[0])
        source.norm = f"{final}.1"
        self.begin(source, kind=LAST).name = "final_conv.1"

    def spread_film(self) -> None:
        """One tile of FiLM rows for each block and phase from the condition's on: their weights fill the stream while
        the short phases wait for each other. A tile is ready one phase before its first row is used, at the latest."""
        start = next(i for i, p in enumerate(self.phases) if p.kind == CONDITION)
        slot = len(self.phases)
        for i in reversed(range(self.film_rounds)):
            ends = ((k, p.film + 2 * p.in_channels) for k, p in enumerate(self.phases) if p.film >= 0)
            slot = min(slot, start + i, min(k for k, end in ends if end > i * 16 * BLOCKS) - 1)
            self.phases[slot].film_tiles += 1
            self.phases[slot].film_first = i

    def stream(self, phase: Phase) -> None:
        """Place the phase's weights; what a warp loads together never crosses a chunk."""

        def place(layer: str, taps: int, tiles: int, blocks: int, film_tile: int = -1) -> int:
            at = self.fragments = ceil_div(self.fragments, 2 * tiles) * 2 * tiles
            self.weights.append(Weight(layer, phase, at, taps, tiles, blocks, film_tile))
            self.fragments += taps * blocks * tiles * 2
            return at

        if phase.taps:
            phase.fragment = place(phase.name, phase.taps, phase.tiles, phase.blocks)
        if phase.residual_out >= 0:
            layer = phase.name.replace("blocks.0.block.0", "residual_conv")
            phase.residual_fragment = place(layer, 1, phase.tiles, phase.blocks)
        for i in range(phase.film_tiles):
            at = place("film", 1, 1, self.condition_blocks, phase.film_first + i)
            phase.film_fragment = at if i == 0 else phase.film_fragment


def film_rows(shape: UnetShape) -> Iterator[tuple[str, int]]:
    """(residual block, rows of its FiLM linear), in the order in which the chain uses them."""
    for level, width in enumerate(shape.widths):
        yield from ((f"down_modules.{level}.{i}", 2 * width) for i in range(2))
    yield from ((f"mid_modules.{i}", 2 * shape.widths[-1]) for i in range(2))
    for i, level in enumerate(range(len(shape.widths) - 1, 0, -1)):
        yield from ((f"up_modules.{i}.{k}", 2 * shape.widths[level - 1]) for k in range(2))


def unsupported(shape: UnetShape, horizon: int) -> str | None:
    """Why there is no plan for this network and horizon, or None."""
    if shape.groups != SLICES:
        return f"GroupNorm has {shape.groups} groups, the plan is for {SLICES}"
    if horizon not in (8, 16):
        return f"horizon {horizon}, the plan is for 8 and 16"
    if len(shape.widths) != 3 or any(width % 16 for width in shape.widths) or shape.step_dim % 16:
        return "widths are not three multiples of 16"
    plan = Plan(shape, horizon, 1, sampling=False)
    for phase in plan.phases:
        if phase.in_channels * phase.in_columns > SLICES * ELEMENTS and phase.kind != CONDITION:
            return f"{phase.name} reads more than {ELEMENTS} activations a block"
        if phase.tiles > 4 or 16 * phase.tiles * phase.columns > OUTPUTS:
            return f"{phase.name} has more than {OUTPUTS} outputs a block"
    if shape.action_dim * horizon > THREADS or plan.shared["ring_chunks"] < 8:
        return "shared memory does not hold the plan"
    return None
