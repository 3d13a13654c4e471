"""The Triton kernels of fused_triton.py: a convolution's partial sums, what follows it, and the last convolution.

Launches carry the attribute for programmatic dependent launch: a kernel starts while the one before it still runs, and
waits (griddepcontrol.wait) before it reads what others write. Only then does it write, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def conv(
    x_ptr, weight_ptr, part_ptr, x_batch, x_channel, x_position, channels, rows, length, out_length, columns, pad,
    STEP: tl.constexpr, TAPS: tl.constexpr, UP: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """part[s, row, column] = sum over the channels of part s and all taps of weight[tap, row, c] x[b, c, position].

    UP: rows are the even positions' channels, then the odd ones', whose taps lie one position further.
    """
    gdc_launch_dependents()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * SPLIT
    shift = -pad
    if UP:
        shift += (tl.program_id(0) * BLOCK_M >= rows // 2).to(tl.int32)
    sample, position = n // out_length, n % out_length
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gdc_wait()
    STEPS: tl.constexpr = SPLIT // BLOCK_K
    for i in range(TAPS * STEPS):
        tap = i // STEPS
        c = first + (i % STEPS) * BLOCK_K + k
        at = position * STEP + tap + shift
        weight = tl.load(
            weight_ptr + (tap * rows + m)[:, None] * channels + c[None, :],
            mask=(m < rows)[:, None] & (c < channels)[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        seen = (at >= 0) & (at < length) & (n < columns)
        x = tl.load(
            x_ptr + (sample * x_batch + at * x_position)[None, :] + (c * x_channel)[:, None],
            mask=seen[None, :] & (c < channels)[:, None], other=0.0,
        )  # fmt: skip
        acc = tl.dot(weight, x.to(weight.dtype), acc, input_precision=PRECISION)
    out = part_ptr + (tl.program_id(1) * rows + m)[:, None] * columns + n[None, :]
    tl.store(out, acc, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def _mish(v):
    e = tl.exp(tl.minimum(v, 20.0))  # beyond, the fraction is 1
    n = e * (e + 2.0)
    return v * (n / (n + 2.0))


@triton.jit
def finish(
    part_ptr, bias_ptr, gain_ptr, offset_ptr, film_ptr, residual_ptr, residual_bias_ptr, out_ptr, film_batch,
    residual_batch, out_batch, channels, length, batch, group_channels,
    SPLITS: tl.constexpr, RESIDUAL_SPLITS: tl.constexpr, NORM: tl.constexpr, FILM: tl.constexpr,
    RESIDUAL: tl.constexpr, UP: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """out[b, group, :] = what the next convolution reads."""
    gdc_launch_dependents()
    b = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)[:, None]
    position = tl.arange(0, BLOCK_L)[None, :]
    mine = (c < group_channels) & (position < length)
    channel = tl.program_id(1) * group_channels + c
    scale = tl.full((BLOCK_C, 1), 1.0, tl.float32)
    there = c < group_channels
    bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    plain = channel * batch * length + b * length + position
    if UP:
        at = (channel + position % 2 * channels) * batch * (length // 2) + b * (length // 2) + position // 2
    else:
        at = plain
    gdc_wait()
    v = tl.zeros((BLOCK_C, BLOCK_L), tl.float32)
    for s in tl.static_range(SPLITS):
        v += tl.load(part_ptr + s * channels * batch * length + at, mask=mine, other=0.0)
    v += bias
    if NORM:
        count = group_channels * length
        mean = tl.sum(tl.where(mine, v, 0.0)) / count
        off = tl.where(mine, v - mean, 0.0)
        scale = tl.rsqrt(tl.sum(off * off) / count + 1e-5)
        gain = tl.load(gain_ptr + channel, mask=there, other=0.0).to(tl.float32)
        offset = tl.load(offset_ptr + channel, mask=there, other=0.0).to(tl.float32)
        v = _mish(off * scale * gain + offset)
    if FILM:
        film = film_ptr + b * film_batch + channel
        v = v * tl.load(film, mask=there, other=0.0) + tl.load(film + channels, mask=there, other=0.0)
    if RESIDUAL == 1:
        v += tl.load(residual_ptr + b * residual_batch + channel * length + position, mask=mine, other=0.0)
    if RESIDUAL == 2:
        v += tl.load(residual_bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
        for s in tl.static_range(RESIDUAL_SPLITS):
            v += tl.load(residual_ptr + s * channels * batch * length + plain, mask=mine, other=0.0)
    tl.store(out_ptr + b * out_batch + channel * length + position, v, mask=mine)


@triton.jit
def last(
    x_ptr, weight_ptr, bias_ptr, sample_ptr, noise_ptr, row_ptr, out_ptr, channels, length, dim,
    DENOISE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """out[b, position, d]: the predicted noise, or with DENOISE the sample one step on (unet1d.denoise)."""
    gdc_launch_dependents()
    b, d = tl.program_id(0), tl.program_id(1)
    position = tl.arange(0, BLOCK_L)
    mine = position < length
    gdc_wait()
    eps = tl.zeros((BLOCK_L,), tl.float32) + tl.load(bias_ptr + d).to(tl.float32)
    for c0 in range(0, channels, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        weight = tl.load(weight_ptr + d * channels + c, mask=c < channels, other=0.0).to(tl.float32)
        at = (b * channels + c)[:, None] * length + position[None, :]
        x = tl.load(x_ptr + at, mask=(c < channels)[:, None] & mine[None, :], other=0.0)
        eps += tl.sum(weight[:, None] * x, 0)
    at = (b * length + position) * dim + d
    if DENOISE:
        x = tl.load(sample_ptr + at, mask=mine, other=0.0)
        start = (x - tl.load(row_ptr) * eps) / tl.load(row_ptr + 1)
        start = tl.where(start < -1.0, -1.0, tl.where(start > 1.0, 1.0, start))  # NaN stays
        fresh = tl.load(noise_ptr + at, mask=mine, other=0.0)
        eps = tl.load(row_ptr + 2) * start + tl.load(row_ptr + 3) * x + tl.load(row_ptr + 4) * fresh
    tl.store(out_ptr + at, eps.to(out_ptr.dtype.element_ty), mask=mine)
