"""A float8 weight-only linear whose weights cross the memory bus once, as float8.

The weight is e4m3 with one float32 scale per row, as torchao's `Float8WeightOnlyConfig` stores it. Nothing wider than
float8 ever exists in device memory: elements are widened in registers, and the row's scale is applied once, after the
sum over K, instead of once per element. One registered operator covers decode and prefill; torch.compile keeps it
whole and CUDA graphs capture it.

    swap_linears(model)                     # every nn.Linear of any model, in place
    y = torch.ops.float8_weight_only.linear(x, weight, scale)

What runs, by the number of tokens M, on Hopper with nvcc and elsewhere (`_name`: a Triton kernel of this file):
    M          Hopper           elsewhere
    1          float8_gemv.cu   `_gemv`: the kernel only streams weights; norm, gate and residual go into it
    2 to 8     float8_gemv.cu   `_skinny`
    9 to 64    `_skinny`        `_skinny`: tensor cores; K is split so that the loads of small layers fill the GPU
    above 64   float8_gemm.cu   `_gemm`: compute-bound; the weight is widened between shared memory and tensor cores
The CUDA kernels do what Triton cannot say: in float8_gemv.cu the weights of the next launch wait in shared memory while
this one computes; float8_gemm.cu has a producer warp and clusters. Weights that stay bfloat16 always take `_gemv`.

Launches carry the attribute for programmatic dependent launch: a kernel starts while the one before it still runs and
waits (griddepcontrol.wait) before it reads its input; `_gemv` has its weights, which no kernel writes, loaded by then.
"""

from __future__ import annotations

import hopper
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

E4M3_MAX = 448.0
SPLIT_K = (
    4  # parts of K in `_skinny`: 4 fill an H200 with the smallest layer (4096 rows) and cost little on the largest
)
GATE_ROWS = 8  # gate and up rows alternate in groups of 8, so that both lie in one thread of a tensor-core tile


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (e4m3 [N, K], scale float32 [N]); a row's largest magnitude becomes 448, or next to it.

    As torchao does it: the scale is taken in the weight's own type, so the values are the same to the bit. A row that
    is not finite gives NaN. Rows are converted in pieces; a temporary has at most 64 MiB.
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(rows, dtype=torch.float32, device=weight.device)
    step = max(1, (16 << 20) // columns)
    for start in range(0, rows, step):
        part = weight[start : start + step]
        largest = (part.abs().amax(dim=1) / E4M3_MAX).float().clamp(min=1e-12)
        scale[start : start + step] = largest.where(largest.isfinite(), torch.nan)
        scaled = part.float() / scale[start : start + step, None]
        values[start : start + step] = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values, scale


def keep(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] as it is, with scales of one: the kernels for one token take bfloat16 weights too."""
    return weight.detach(), torch.ones(weight.shape[0], device=weight.device)


@triton.jit
def _gemv(
    x_ptr, weight_ptr, scale_ptr, norm_ptr, residual_ptr, y_ptr, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y = W (x * norm) * scale / rms(x) (+ residual), or silu(gate) * up of two such sums. One program: ROWS of y."""
    gdc_launch_dependents()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (n // 8) * 16 + n % 8 if GATED else n
    k = tl.arange(0, BLOCK_K)
    at = weight_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    # All of a program's weights are on their way before it waits for x: these loads hide the wait.
    tiles = ()
    ups = ()
    for k0 in tl.static_range(0, K, BLOCK_K):
        tiles = tiles + (tl.load(at + k0, eviction_policy="evict_first"),)
        if GATED:
            ups = ups + (tl.load(at + 8 * K + k0, eviction_policy="evict_first"),)
    scale = tl.load(scale_ptr + row)
    if GATED:
        up_scale = tl.load(scale_ptr + row + 8)
    gdc_wait()
    acc = tl.zeros((ROWS, BLOCK_K // 16), tl.float32)
    up = tl.zeros((ROWS, BLOCK_K // 16), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range(0, K // BLOCK_K):
        x = tl.load(x_ptr + i * BLOCK_K + k).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + i * BLOCK_K + k).to(tl.float32)
        # A thread holds 16 neighbours of a row (one 16-byte load) and adds them up before threads meet.
        acc += tl.sum(tl.reshape(tiles[i].to(tl.float32) * x[None, :], (ROWS, BLOCK_K // 16, 16)), 2)
        if GATED:
            up += tl.sum(tl.reshape(ups[i].to(tl.float32) * x[None, :], (ROWS, BLOCK_K // 16, 16)), 2)
    y = tl.sum(acc, 1) * scale
    rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    y *= rstd
    if GATED:
        y = y / (1 + tl.exp(-y)) * (tl.sum(up, 1) * up_scale * rstd)
    if RESIDUAL:
        y += tl.load(residual_ptr + n).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty))


@triton.jit
def _to_half(x_ptr, half_ptr, scale_ptr, K, BLOCK: tl.constexpr):
    """One row of x as float16, scaled by a power of two to at most 1; the tensor cores then take e4m3 -> float16, which
    is one instruction for two elements, where e4m3 -> bfloat16 is four."""
    gdc_launch_dependents()
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    gdc_wait()
    x = tl.load(x_ptr + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    exponent = tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x), 0), 1e-30)))
    tl.store(half_ptr + m * K + k, (x * tl.exp2(-exponent)).to(tl.float16), mask=k < K)
    tl.store(scale_ptr + m, tl.exp2(exponent))


@triton.jit
def _skinny(
    x_ptr, weight_ptr, scale_ptr, parts_ptr, M, N,
    K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """parts[i] = (W x^T)^T over the i-th part of K, without the scale of x: float32 [SPLIT, M, N]."""
    gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    part: tl.constexpr = K // SPLIT
    k = tl.program_id(1) * part + tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + (m % M)[None, :] * K + k[:, None]  # rows past M repeat earlier ones and are not stored
    scale = tl.load(scale_ptr + n)
    gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k0 in tl.range(0, part, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(tl.load(weight_at + k0).to(tl.float16), tl.load(x_at + k0), acc)
    out = tl.program_id(1) * M * N + m[None, :] * N + n[:, None]
    tl.store(parts_ptr + out, acc * scale[:, None], mask=m[None, :] < M)


@triton.jit
def _add_parts(parts_ptr, x_scale_ptr, y_ptr, N, MN, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < MN
    gdc_wait()
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        acc += tl.load(parts_ptr + part * MN + i, mask=inside, other=0.0)
    acc *= tl.load(x_scale_ptr + i // N, mask=inside, other=0.0)
    tl.store(y_ptr + i, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gemm(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, y_ptr, M, N, pitch,
    K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """y^T = W x^T: the weight is the operand that tensor cores take from registers, where it was widened. Its rows
    begin `pitch` elements apart.

    K is a compile-time constant on purpose: with a loop that might not run, ptxas serialises the asynchronous wgmma.
    """
    pid = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * blocks_m) * GROUP
    width = min(blocks_n - first, GROUP)
    block_n = first + pid % width  # GROUP weight tiles go through all tokens together: their tiles meet in L2
    block_m = pid % (GROUP * blocks_m) // width
    n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    rows, tokens = (n, m) if WHOLE else (n % N, m % M)  # outside of the matrices: an inner row again, never stored
    weight_at = weight_ptr + rows.to(tl.int64)[:, None] * pitch + k[None, :]
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for _ in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(tl.load(weight_at).to(tl.float16), tl.load(x_at), acc)
        weight_at += BLOCK_K
        x_at += BLOCK_K
    acc *= tl.load(scale_ptr + rows)[:, None] * tl.load(x_scale_ptr + tokens)[None, :]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        acc = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (BLOCK_N // 2, BLOCK_M))
        n = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        N = N // 2
    out = y_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    if WHOLE:
        tl.store(out, acc.to(y_ptr.dtype.element_ty))
    else:
        tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


def _launch_gemv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    y: Tensor,
    norm: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
) -> None:
    if hopper.gemv(x, weight, scale, y, norm, eps, gated, residual):
        return
    columns = weight.shape[1]
    block_k = 2048 if columns % 2048 == 0 else columns & -columns  # the largest power of two that divides K
    rows = 2 if columns > 8192 or gated else 4
    _gemv[(y.numel() // rows,)](
        x, weight, scale, x if norm is None else norm, x if residual is None else residual, y, eps,
        columns, rows, min(block_k, 2048), norm is not None, gated, residual is not None, num_warps=4, launch_pdl=True,
    )  # fmt: skip


def _launch_matrix(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, gated: bool, residual: Tensor | None) -> None:
    tokens, columns = x.shape
    if tokens > 64 and hopper.gemm(x, weight, scale, y, gated, residual):
        return
    if tokens > hopper.GEMV_TOKENS or not hopper.gemv(x, weight, scale, y, gated=gated):
        half, x_scale = torch.empty_like(x, dtype=torch.float16), torch.empty(tokens, device=x.device)
        _to_half[(tokens,)](x, half, x_scale, columns, triton.next_power_of_2(columns), num_warps=8, launch_pdl=True)
        if tokens <= 64 and not gated:
            _launch_skinny(half, x_scale, weight.contiguous(), scale, y)
        else:
            _launch_gemm(half, x_scale, weight, scale, y, gated)
    if residual is not None:
        y.add_(residual)


def _launch_skinny(half: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, y: Tensor) -> None:
    (tokens, columns), rows = half.shape, weight.shape[0]
    block_k = 256 if columns % (256 * SPLIT_K) == 0 else 64
    split = SPLIT_K if columns % (block_k * SPLIT_K) == 0 else 1
    parts = torch.empty(split, tokens, rows, device=half.device)
    block_m = max(16, triton.next_power_of_2(tokens))
    _skinny[(rows // 32, split)](
        half, weight, scale, parts, tokens, rows, columns, split, block_m, 32, block_k, 3, num_warps=2, launch_pdl=True
    )
    _add_parts[(triton.cdiv(tokens * rows, 1024),)](
        parts, x_scale, y, rows, tokens * rows, split, 1024, num_warps=4, launch_pdl=True
    )


def _launch_gemm(half: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, y: Tensor, gated: bool) -> None:
    (tokens, columns), rows = half.shape, weight.shape[0]
    block_m = 256 if tokens > 128 else 128
    grid = (triton.cdiv(tokens, block_m) * triton.cdiv(rows, 128),)
    whole = tokens % block_m == 0 and rows % 128 == 0
    _gemm[grid](
        half, x_scale, weight, scale, y, tokens, rows, weight.stride(0), columns, gated, block_m, 128, 64, 8, 4, whole,
        num_warps=8,
    )  # fmt: skip


@torch.library.custom_op("float8_weight_only::linear", mutates_args=())
def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x [..., K] (bfloat16), weight e4m3 [N, K], scale float32 [N] -> [..., N] in x's dtype.

    norm [K]: x is RMS-normalised with this weight and `eps` first. gated: weight rows come from `interleave`, the
    result is silu(gate) * up, [..., N / 2]. residual: added to the result. N % 32 == 0 and K % 64 == 0. The weight may
    be some columns of a wider one; below 65 tokens it is then copied first.
    """
    rows = weight.shape[0]
    y = x.new_empty(*x.shape[:-1], rows // 2 if gated else rows)
    tokens = x.numel() // x.shape[-1]
    if tokens == 1:
        _launch_gemv(x.contiguous(), weight.contiguous(), scale, y, norm, eps, gated, residual)
        return y
    if norm is not None:
        x = F.rms_norm(x, (x.shape[-1],), norm, eps)
    if residual is not None:
        residual = residual.reshape(tokens, -1).contiguous()
    _launch_matrix(x.reshape(tokens, -1).contiguous(), weight, scale, y.view(tokens, -1), gated, residual)
    return y


@linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2 if gated else weight.shape[0])


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [H, ...] -> [2 H, ...]: 8 rows of gate, 8 of up, and so on."""
    groups = (t.view(-1, 1, GATE_ROWS, *t.shape[1:]) for t in (gate, up))
    return torch.cat(tuple(groups), dim=1).reshape(-1, *gate.shape[1:])


class Float8Linear(nn.Module):
    """Drop-in for a bias-free or biased nn.Linear; e4m3 weight and float32 row scales are buffers."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias

    @classmethod
    def from_linear(cls, module: nn.Linear) -> Float8Linear:
        return cls(*quantize(module.weight.detach()), module.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.float8_weight_only.linear(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


def swap_linears(model: nn.Module) -> nn.Module:
    """Replace every nn.Linear below `model` by a Float8Linear, in place, one at a time; returns the model."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, Float8Linear.from_linear(child))
        else:
            swap_linears(child)
    settle()
    return model


def settle() -> None:
    """Wait for the device: a kernel reads its weights before it waits for the kernel that may just be writing them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
