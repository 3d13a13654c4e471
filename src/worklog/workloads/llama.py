"""A Llama decoder at public shapes with seeded random weights and a static KV cache.

Shapes: the Llama 3.1 model card and its config.json (dim 4096, 32 layers, 32 query and 8 key/value heads, hidden 14336,
vocabulary 128256, rope theta 500000, no rope scaling). q, k and v are one projection, as inference code keeps them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    rope_theta: float = 500000.0
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def qkv_dim(self) -> int:
        """Rows of the joint projection: query heads, then key heads, then value heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """Name of each kind of linear -> (rows N, columns K) of its weight."""
        return {
            "wqkv": (self.qkv_dim, self.dim),
            "wo": (self.dim, self.dim),
            "w1": (self.hidden, self.dim),
            "w3": (self.hidden, self.dim),
            "w2": (self.dim, self.hidden),
            "output": (self.vocab, self.dim),
        }

    @property
    def linear_elements(self) -> int:
        """Weight elements that one decoded token must read: every linear, not the embedding table."""
        sizes = {name: rows * columns for name, (rows, columns) in self.linears().items()}
        output = sizes.pop("output")
        return self.layers * sum(sizes.values()) + output


LLAMA_3_1_8B = LlamaShape(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256)
TINY = LlamaShape(dim=256, layers=2, heads=8, kv_heads=2, hidden=512, vocab=1024)


class Attention(nn.Module):
    """Grouped-query attention over a static cache of `max_seq` positions, batch 1."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, shape: LlamaShape, max_seq: int) -> None:
        super().__init__()
        self.shape = shape
        self.wqkv = nn.Linear(shape.dim, shape.qkv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        cache = (1, shape.kv_heads, max_seq, shape.head_dim)
        self.register_buffer("k_cache", torch.zeros(cache))
        self.register_buffer("v_cache", torch.zeros(cache))

    def forward(self, x: Tensor, position: Tensor, rope: Tensor) -> Tensor:
        """x [1, T, dim], position [T] -> [1, T, dim]."""
        out: Tensor = self.wo(self.attend(self.wqkv(x), position, rope))
        return out

    def attend(self, qkv: Tensor, position: Tensor, rope: Tensor) -> Tensor:
        """qkv [1, T, qkv_dim], position [T] -> [1, T, dim], before the output projection; the cache is updated.

        T > 1 is a prefill from position 0.
        """
        s, tokens = self.shape, qkv.shape[1]
        heads = qkv.view(1, tokens, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q, k = rotate(q, rope[position]), rotate(k, rope[position])
        self.k_cache.index_copy_(2, position, k)
        self.v_cache.index_copy_(2, position, v)
        if tokens > 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            # The query heads of one key/value head stand as rows of one small matrix, so the cache is not repeated; on
            # one query row, plain products that the compiler can fuse take less time than a flash kernel.
            q = q.reshape(1, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
            seen = torch.arange(self.k_cache.shape[2], device=qkv.device) <= position
            score = (q @ self.k_cache.transpose(2, 3)).float() * s.head_dim**-0.5
            weight = torch.softmax(score.masked_fill(~seen, float("-inf")), dim=-1).type_as(qkv)
            y = (weight @ self.v_cache).reshape(1, s.heads, 1, s.head_dim)
        return y.transpose(1, 2).reshape(1, tokens, s.dim)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: LlamaShape, max_seq: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        self.attention = Attention(shape, max_seq)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, position: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), position, rope)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    rope: Tensor

    def __init__(self, shape: LlamaShape, max_seq: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, max_seq) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.eps)
        self.output = nn.Linear(shape.dim, shape.vocab, bias=False)
        self.register_buffer("rope", torch.zeros(max_seq, shape.head_dim // 2, 2))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens [1, T], position [T] -> logits of the last token, [1, vocab]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, position, self.rope)
        # The last token alone: logits of a whole prompt would be the largest temporary of a prefill.
        logits: Tensor = self.output(self.norm(x[:, -1]))
        return logits


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of x [1, heads, T, head_dim] by rope [T, head_dim / 2, (cos, sin)]; pairs are (i, i + half)."""
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = rope[..., 0], rope[..., 1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def rope_table(shape: LlamaShape, max_seq: int, device: torch.device | str) -> Tensor:
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(max_seq, device=device, dtype=torch.float64), frequency)
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float()


def parameter(
    name: str, size: torch.Size | tuple[int, ...], device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Tensor:
    """The seeded random tensor called `name`: the same on every call on one kind of device.

    Linear weights are normal with variance 1/K, so activations keep their size from layer to layer; norm weights lie
    between 0.5 and 1.5; embeddings and caches are standard normal.
    """
    generator = torch.Generator(device=device).manual_seed(seed + zlib.crc32(name.encode()))
    out = torch.empty(size, device=device, dtype=dtype)
    if "norm" in name:
        return out.uniform_(0.5, 1.5, generator=generator)
    unit = "embedding" in name or "cache" in name
    return out.normal_(0, 1.0 if unit else size[-1] ** -0.5, generator=generator)


def make(
    shape: LlamaShape,
    max_seq: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Llama:
    """The model with seeded random weights; its caches hold random keys and values, as after an earlier prompt."""
    with torch.device("meta"):
        model = Llama(shape, max_seq).to(dtype).eval().requires_grad_(False)
    tensors = {
        name: parameter(name, t.shape, device, dtype, seed) for name, t in model.state_dict().items() if name != "rope"
    }
    model.load_state_dict(tensors | {"rope": rope_table(shape, max_seq, device)}, assign=True)
    return model.requires_grad_(False)


def reference(
    shape: LlamaShape,
    max_seq: int,
    tokens: Tensor,
    position: Tensor,
    weight: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    *,
    dtype: torch.dtype = torch.float32,
    drawn_as: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Tensor:
    """Logits [1, vocab] of the model that `make` gives, in `dtype`, from the seed alone: no module of the model under
    test takes part. One block is held at a time.

    weight: (name, seeded tensor) -> the value that the model should compute with, as for a quantised weight.
    """
    device = tokens.device

    def widened(module: nn.Module, prefix: str, *args: Tensor) -> Tensor:
        state = {}
        for name, t in module.state_dict().items():
            value = parameter(prefix + name, t.shape, device, drawn_as, seed)
            state[name] = (value if "cache" in name else weight(prefix + name, value)).to(dtype)
        out: Tensor = torch.func.functional_call(module, state, args)
        return out

    with torch.device("meta"):
        model = Llama(shape, max_seq)
    rope = rope_table(shape, max_seq, device).to(dtype)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        x = widened(model.embedding, "embedding.", tokens)
        for i, block in enumerate(model.blocks):
            x = widened(block, f"blocks.{i}.", x, position, rope)
        return widened(model.output, "output.", widened(model.norm, "norm.", x[:, -1]))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
