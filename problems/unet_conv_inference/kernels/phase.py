"""One phase of the plan, and the machine's sizes that unet_step.cu and plan.py share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from worklog.workloads.unet1d import UnetShape

ROW_PARTS, SLICES = 16, 8
BLOCKS = ROW_PARTS * SLICES  # 128 of the 132 multiprocessors of an H200: everything divides, 3 % stand idle
THREADS = 256  # that compute; two more warps fetch weights and clear the workspace
ELEMENTS = 2 * THREADS  # of a slice of activations, at most: two a thread
OUTPUTS = THREADS  # of a block's product, at most: one a thread
FRAGMENT, CHUNK = 512, 8192  # bytes
PER_CHUNK = CHUNK // FRAGMENT
SHARED_BYTES = 232_448  # that a block of sm_90 may have
SPLIT_WORDS = 16  # a block of channels in the operand: 16 float32, or 32 of 16 bits
EMBEDDING, CONDITION, FIRST, PARTS, LAST = range(5)  # where a phase's input comes from
RESIDUAL_SLOT = 0


@dataclass
class Phase:
    """The fields behind `name` are those of `struct Phase` in unet_step.cu, in its order."""

    name: str
    kind: int = PARTS
    # the input: partial sums of the product before
    in_offset: int = 0
    in_channels: int = 0
    in_columns: int = 1
    params: int = 0  # first of in_channels (bias, norm weight, norm bias, 0)
    norm: int = 0
    mish: int = 0
    film: int = -1  # first of in_channels scales, then as many shifts
    residual: int = 0
    keep: int = 0  # bit i: keep the input in slot i
    concat: int = -1  # slot whose channels follow the input's
    concat_channels: int = 0
    # the operand in shared memory: rows are positions, zero rows around them
    pad: int = 0
    operand_rows: int = 0
    stride: int = 0  # words from row to row
    blocks: int = 0  # of SPLIT_WORDS words a row
    # the product
    taps: int = 0  # 0: none
    step: int = 1  # rows from column to column
    transposed: int = 0
    rows: int = 0
    tiles: int = 0  # of 16 rows, a block
    columns: int = 1
    out_offset: int = 0
    out_channels: int = 0
    out_columns: int = 1
    fragment: int = 0
    # a second product of the same operand, centre tap only: the residual convolution
    residual_out: int = -1
    residual_fragment: int = 0
    # afterwards: partial sums of the residual convolution to take into RESIDUAL_SLOT, and FiLM rows to compute
    residual_in: int = -1
    residual_params: int = 0
    film_tiles: int = 0  # of 16 rows, a block
    film_first: int = 0
    film_fragment: int = 0

    @property
    def slice_channels(self) -> int:
        return (self.in_channels + self.concat_channels) // SLICES


PHASE_FIELDS = tuple(f.name for f in dataclasses.fields(Phase) if f.name != "name")
PHASE_WORDS = 36  # a multiple of 16 bytes: blocks copy phases in vectors


def first_width(shape: UnetShape) -> int:
    """Values a channel of the first block: weights of its conv, of its residual conv, and both biases."""
    return shape.action_dim * (shape.kernel_size + 1) + 2


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
