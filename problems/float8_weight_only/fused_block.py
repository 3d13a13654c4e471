"""The decoder around the float8 linear: what stands between two weight streams goes into the kernels that stream.

`swap_blocks(model)` replaces every block of a `worklog.workloads.llama.Llama`. Decode then runs five kernels a layer:

    wqkv (RMS norm inside) -> attention (rope, cache update) -> wo (+ residual)
    -> w1|w3 (RMS norm, silu, product inside) -> w2 (+ residual)

Prefill takes the same weights through the same operator and torch's attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from float8_linear import Float8Linear, interleave, keep, quantize, settle
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worklog.workloads.llama import Block, Llama

CHUNK = 2048  # tokens that go through the feed-forward together
PIECE = 6144  # columns of its activation that so many tokens have at a time: as wide as qkv, six waves of an H200's SMs
MAX_SEQ = 1024  # one program walks a head's cache; a longer one wants it split over programs, as torch's kernel does


@triton.jit
def _rope(ptr, rope_ptr, HALF: tl.constexpr):
    """The two rotated halves of one head, in float32."""
    i = tl.arange(0, HALF)
    a, b = tl.load(ptr + i).to(tl.float32), tl.load(ptr + HALF + i).to(tl.float32)
    cos, sin = tl.load(rope_ptr + 2 * i), tl.load(rope_ptr + 2 * i + 1)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _attention(
    qkv_ptr, position_ptr, rope_ptr, k_ptr, v_ptr, y_ptr, max_seq, softmax_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head over the cached positions and the new one. The first head of a group also writes the cache.

    No program reads the position that another writes: the new key and value come from qkv.
    """
    gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(0)
    group: tl.constexpr = HEADS // KV_HEADS
    kv = head // group
    i = tl.arange(0, HALF)
    s = tl.arange(0, BLOCK)
    gdc_wait()
    position = tl.load(position_ptr)
    rope_ptr += position * HEAD_DIM
    qa, qb = _rope(qkv_ptr + head * HEAD_DIM, rope_ptr, HALF)
    ka, kb = _rope(qkv_ptr + (HEADS + kv) * HEAD_DIM, rope_ptr, HALF)
    ka, kb = ka.to(k_ptr.dtype.element_ty), kb.to(k_ptr.dtype.element_ty)
    value_at = qkv_ptr + (HEADS + KV_HEADS + kv) * HEAD_DIM + i
    va, vb = tl.load(value_at), tl.load(value_at + HALF)
    cache = kv.to(tl.int64) * max_seq * HEAD_DIM
    if head % group == 0:
        new = cache + position * HEAD_DIM + i
        tl.store(k_ptr + new, ka)
        tl.store(k_ptr + new + HALF, kb)
        tl.store(v_ptr + new, va)
        tl.store(v_ptr + new + HALF, vb)
    top = (tl.sum(qa * ka.to(tl.float32)) + tl.sum(qb * kb.to(tl.float32))) * softmax_scale
    total = 1.0
    ya, yb = va.to(tl.float32), vb.to(tl.float32)
    for start in range(0, position, BLOCK):
        seen = start + s < position
        at = cache + (start + s)[:, None] * HEAD_DIM + i[None, :]
        keys_a = tl.load(k_ptr + at, mask=seen[:, None], other=0.0).to(tl.float32)
        keys_b = tl.load(k_ptr + at + HALF, mask=seen[:, None], other=0.0).to(tl.float32)
        values_a = tl.load(v_ptr + at, mask=seen[:, None], other=0.0).to(tl.float32)
        values_b = tl.load(v_ptr + at + HALF, mask=seen[:, None], other=0.0).to(tl.float32)
        score = tl.sum(keys_a * qa[None, :], 1) + tl.sum(keys_b * qb[None, :], 1)
        score = tl.where(seen, score * softmax_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 0))
        shrink, weight = tl.exp(top - new_top), tl.exp(score - new_top)
        total = total * shrink + tl.sum(weight, 0)
        ya = ya * shrink + tl.sum(weight[:, None] * values_a, 0)
        yb = yb * shrink + tl.sum(weight[:, None] * values_b, 0)
        top = new_top
    out = y_ptr + head * HEAD_DIM + i
    tl.store(out, (ya / total).to(y_ptr.dtype.element_ty))
    tl.store(out + HALF, (yb / total).to(y_ptr.dtype.element_ty))


@triton.jit
def _rope_prompt(
    qkv_ptr, position_ptr, rope_ptr, q_ptr, k_ptr, v_ptr, max_seq,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """One token: its query heads, rotated, to q; its keys, rotated, and values to the cache."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    i = tl.arange(0, HALF)[None, :]
    cos, sin = tl.load(rope_ptr + position * HEAD_DIM + 2 * i), tl.load(rope_ptr + position * HEAD_DIM + 2 * i + 1)
    heads = tl.arange(0, HEADS)[:, None] * HEAD_DIM + i
    at = qkv_ptr + token * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    a, b = tl.load(at + heads).to(tl.float32), tl.load(at + heads + HALF).to(tl.float32)
    out = q_ptr + token * HEADS * HEAD_DIM + heads
    tl.store(out, (a * cos - b * sin).to(q_ptr.dtype.element_ty))
    tl.store(out + HALF, (b * cos + a * sin).to(q_ptr.dtype.element_ty))
    kv = tl.arange(0, KV_HEADS)[:, None]
    at += HEADS * HEAD_DIM + kv * HEAD_DIM + i
    a, b = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    cache = (kv * max_seq + position) * HEAD_DIM + i
    tl.store(k_ptr + cache, (a * cos - b * sin).to(k_ptr.dtype.element_ty))
    tl.store(k_ptr + cache + HALF, (b * cos + a * sin).to(k_ptr.dtype.element_ty))
    at += KV_HEADS * HEAD_DIM
    tl.store(v_ptr + cache, tl.load(at))
    tl.store(v_ptr + cache + HALF, tl.load(at + HALF))


@torch.library.custom_op("float8_weight_only::rope_prompt", mutates_args=("k_cache", "v_cache"))
def rope_prompt(qkv: Tensor, position: Tensor, rope: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int) -> Tensor:
    """qkv [1, T, (heads + 2 kv_heads) head_dim], position [T] -> rotated queries [1, T, heads, head_dim].

    Keys, rotated, and values go into the caches [1, kv_heads, max_seq, head_dim].
    """
    _, kv_heads, max_seq, head_dim = k_cache.shape
    tokens = qkv.shape[1]
    q = qkv.new_empty(1, tokens, heads, head_dim)
    _rope_prompt[(tokens,)](qkv, position, rope, q, k_cache, v_cache, max_seq, heads, kv_heads, head_dim, num_warps=4)
    return q


@rope_prompt.register_fake
def _(qkv: Tensor, position: Tensor, rope: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(1, qkv.shape[1], heads, k_cache.shape[3])


@torch.library.custom_op("float8_weight_only::decode_attention", mutates_args=("k_cache", "v_cache"))
def decode_attention(
    qkv: Tensor, position: Tensor, rope: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int
) -> Tensor:
    """qkv [1, 1, (heads + 2 kv_heads) head_dim] before rope, position [1] -> [1, 1, heads head_dim]; the caches
    [1, kv_heads, max_seq, head_dim] get the new key and value. rope float32 [max_seq, head_dim / 2, 2]."""
    _, kv_heads, max_seq, head_dim = k_cache.shape
    y = qkv.new_empty(1, 1, heads * head_dim)
    _attention[(heads,)](
        qkv, position, rope, k_cache, v_cache, y, max_seq, head_dim**-0.5, heads, kv_heads, head_dim, 128,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y


@decode_attention.register_fake
def _(qkv: Tensor, position: Tensor, rope: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(1, 1, heads * k_cache.shape[3])


class FusedBlock(nn.Module):
    """Takes over a Block's caches and norms, and its linears as float8 (or as they are, to tell fusion from bytes)."""

    def __init__(self, block: Block, float8: bool = True) -> None:
        super().__init__()
        split = quantize if float8 else keep
        self.attention_norm, self.feed_forward_norm = block.attention_norm, block.feed_forward_norm
        self.attention = block.attention
        self.attention.wqkv = Float8Linear(*split(block.attention.wqkv.weight))
        self.attention.wo = Float8Linear(*split(block.attention.wo.weight))
        ff = block.feed_forward
        gate, up = split(ff.w1.weight), split(ff.w3.weight)
        self.w13 = Float8Linear(*(interleave(g, u) for g, u in zip(gate, up, strict=True)))
        self.w2 = Float8Linear(*split(ff.w2.weight))

    def forward(self, x: Tensor, position: Tensor, rope: Tensor) -> Tensor:
        linear = torch.ops.float8_weight_only.linear
        a, eps = self.attention, self.attention.shape.eps
        qkv = linear(x, a.wqkv.weight, a.wqkv.scale, self.attention_norm.weight, eps)
        x = linear(self.attend(qkv, position, rope), a.wo.weight, a.wo.scale, residual=x)
        del qkv
        if x.shape[1] == 1:
            hidden = linear(x, self.w13.weight, self.w13.scale, self.feed_forward_norm.weight, eps, gated=True)
            y: Tensor = linear(hidden, self.w2.weight, self.w2.scale, residual=x)
            return y
        parts = [self.feed_forward(part) for part in x.split(CHUNK, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x + w2(silu(w1 x) * w3 x) of a prompt. The activation is the widest tensor of a prefill, so it exists in
        pieces, each through its own columns of w2."""
        linear, w13, w2 = torch.ops.float8_weight_only.linear, self.w13, self.w2
        normed = self.feed_forward_norm(x)
        width = w2.weight.shape[1]
        piece = width if x.shape[1] * width <= CHUNK * PIECE else PIECE
        for at in range(0, width, piece):
            rows = slice(2 * at, 2 * (at + piece))
            hidden = linear(normed, w13.weight[rows], w13.scale[rows], gated=True)
            x = linear(hidden, w2.weight[:, at : at + piece], w2.scale, residual=x)
            del hidden
        return x

    def attend(self, qkv: Tensor, position: Tensor, rope: Tensor) -> Tensor:
        a, heads, tokens = self.attention, self.attention.shape.heads, qkv.shape[1]
        if tokens == 1:
            if a.k_cache.shape[2] > MAX_SEQ:
                return a.attend(qkv, position, rope)
            y: Tensor = torch.ops.float8_weight_only.decode_attention(qkv, position, rope, a.k_cache, a.v_cache, heads)
            return y
        q = torch.ops.float8_weight_only.rope_prompt(qkv, position, rope, a.k_cache, a.v_cache, heads)
        k, v = a.k_cache[:, :, :tokens], a.v_cache[:, :, :tokens]
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(1, tokens, -1)


class FusedOutput(nn.Module):
    """The last norm and the output projection in one."""

    def __init__(self, norm: nn.RMSNorm, output: nn.Linear, float8: bool = True) -> None:
        super().__init__()
        self.norm = norm
        self.linear = Float8Linear(*(quantize if float8 else keep)(output.weight))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.float8_weight_only.linear(
            x, self.linear.weight, self.linear.scale, self.norm.weight, self.norm.eps
        )
        return y


def swap_blocks(model: Llama, float8: bool = True) -> Llama:
    """Replace every block by a FusedBlock, the last norm and projection by a FusedOutput, in place."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FusedBlock(block, float8)
    model.output = FusedOutput(model.norm, model.output, float8)
    model.norm = nn.Identity()
    settle()
    return model
