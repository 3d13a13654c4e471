"""The Triton kernels of float8_weight_only, run on the CPU by Triton's interpreter: what they compute, at small shapes.

test_float8_kernels.py runs this file with Triton on the path and TRITON_INTERPRET=1. x is float32 here, so that
rounding of the result hides nothing: the interpreter cuts bfloat16 off where a GPU rounds. tests/gpu has real sizes.
"""

from __future__ import annotations

import float8_linear
import fused_block
import hopper
import pytest
import repro
import torch
import triton.language as tl

from worklog.measure.correctness import relative_error
from worklog.workloads import llama

HALF = 1e-3  # from two tokens on, x is float16 on its way into the tensor cores
SHAPE = llama.LlamaShape(dim=256, layers=2, heads=8, kv_heads=2, hidden=256, vocab=32)
CACHE = 160  # more than the 128 positions that the attention takes at once


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    for module in (float8_linear, fused_block):
        monkeypatch.setattr(module, "gdc_wait", lambda: None)
        monkeypatch.setattr(module, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(fused_block, "range", plain_range, raising=False)
    monkeypatch.setattr(hopper, "library", lambda: None)
    with torch.inference_mode():
        yield


def plain_range(*bounds):
    """The interpreter hands a loop arrays of one number, which NumPy 2.4 takes for none."""
    return range(*(int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in bounds))


def drawn(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def weight_of(rows, columns):
    """Rows that differ in size by a factor of a hundred, so that a scale in the wrong place shows."""
    return (drawn(rows, columns, seed=1) * columns**-0.5 * torch.logspace(-1, 1, rows)[:, None]).bfloat16()


def call(x, values, scale, **extra):
    return torch.ops.float8_weight_only.linear(x, values, scale, **extra)


def truth(x, values, scale):
    return x.double() @ (values.double() * scale.double()[:, None]).T


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 33, 64, 65, 130, 256])
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (160, 192), (32, 4160), (128, 1024)])
def test_linear(tokens, rows, columns):
    x, (values, scale) = drawn(tokens, columns), float8_linear.quantize(weight_of(rows, columns))
    limit = 1e-5 if tokens == 1 else HALF
    assert relative_error(call(x, values, scale), truth(x, values, scale)) < limit


@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_norm_gate_and_residual(tokens):
    x, norm, residual = drawn(1, tokens, 256), 0.5 + torch.rand(256), drawn(1, tokens, 64, seed=5)
    gate, up = weight_of(64, 256), weight_of(64, 256).flip(0)
    pairs = float8_linear.quantize(gate), float8_linear.quantize(up)
    values, scale = (float8_linear.interleave(g, u) for g, u in zip(*pairs, strict=True))
    found = call(x, values, scale, norm=norm, eps=1e-5, gated=True, residual=residual)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    expected = torch.nn.functional.silu(truth(normed, *pairs[0])) * truth(normed, *pairs[1]) + residual.double()
    assert relative_error(found, expected) < (1e-5 if tokens == 1 else HALF)


@pytest.mark.parametrize("tokens", [1, 2, 70])
def test_some_columns_of_a_wider_weight(tokens):
    values, scale = float8_linear.quantize(weight_of(64, 256))
    x, residual = drawn(tokens, 256), drawn(tokens, 64, seed=5)
    for at, end in ((0, 128), (128, 192)):
        found = call(x[:, at:end], values[:, at:end], scale, residual=residual)
        assert relative_error(found, truth(x[:, at:end], values[:, at:end], scale) + residual.double()) < HALF


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_of_weights_that_is_not_finite_gives_nan(value):
    weight = weight_of(32, 256)
    weight[5, 9] = value
    for tokens in (1, 2, 65):
        found = call(drawn(tokens, 256), *float8_linear.quantize(weight))
        assert found[:, 5].isnan().all()
        assert found[:, torch.arange(32) != 5].isfinite().all()


def test_bf16_weights():
    x, weight = drawn(1, 1024), weight_of(64, 1024)
    assert relative_error(call(x, *float8_linear.keep(weight)), x.double() @ weight.double().T) < 1e-5


@pytest.mark.parametrize("tokens", [1, 2, 65])
def test_every_code_of_e4m3_is_read_exactly(tokens):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    values = codes.to(torch.float8_e4m3fn).expand(32, 256).contiguous()
    for k in range(0, 256, tokens if tokens > 1 else 17):
        at = (k + torch.arange(tokens)) % 256
        x = torch.nn.functional.one_hot(at, 256).float()
        assert torch.equal(call(x, values, torch.ones(32)), codes[at][:, None].expand(tokens, 32))


@pytest.mark.parametrize("tokens", [1, 2, 17, 65])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy speaks up where a GPU does not
def test_what_is_not_finite_stays_so_in_its_own_row(tokens, value):
    values, scale = float8_linear.quantize(weight_of(32, 256))
    x = drawn(tokens, 256)
    x[tokens // 2, 7] = value
    finite = call(x, values, scale).isfinite()
    assert not finite[tokens // 2].any()
    assert finite[torch.arange(tokens) != tokens // 2].all()


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_any_size_of_x(size):
    values, scale = float8_linear.quantize(weight_of(32, 256))
    for tokens in (1, 2, 65):
        x = drawn(tokens, 256) * size
        assert relative_error(call(x, values, scale), truth(x, values, scale)) < HALF


def tokens_of(*size):
    return torch.randint(SHAPE.vocab, size, generator=torch.Generator().manual_seed(0))


def fused():
    """In float32: the blocks' own arithmetic shows, not bfloat16's."""
    return fused_block.swap_blocks(llama.make(SHAPE, CACHE, "cpu", dtype=torch.float32))


def reference(tokens, position):
    return llama.reference(SHAPE, CACHE, tokens, position, repro.dequantized, drawn_as=torch.float32)


@pytest.mark.parametrize("position", [0, 127, 128, CACHE - 1])
def test_fused_decode_is_the_model(position):
    model, at = fused(), torch.tensor([position])
    before = {name: cache.clone() for name, cache in model.named_buffers() if name.endswith("_cache")}
    assert len(before) == 4
    assert relative_error(model(tokens_of(1, 1), at), reference(tokens_of(1, 1), at)) < 1e-4
    rest = torch.arange(CACHE) != position
    for name, cache in before.items():
        now = model.get_buffer(name)
        assert torch.equal(now[:, :, rest], cache[:, :, rest])
        assert not torch.equal(now[:, :, position], cache[:, :, position])


def test_fused_prefill_then_decode_is_the_model():
    model, tokens, where = fused(), tokens_of(1, 21), torch.arange(21)
    assert relative_error(model(tokens[:, :-1], where[:-1]), reference(tokens[:, :-1], where[:-1])) < 5 * HALF
    assert relative_error(model(tokens[:, -1:], where[-1:]), reference(tokens, where)) < 5 * HALF


def test_fused_prompt_in_chunks(monkeypatch):
    monkeypatch.setattr(fused_block, "CHUNK", 8)
    monkeypatch.setattr(fused_block, "PIECE", 192)  # of 256: the last piece is narrower
    tokens, where = tokens_of(1, 21), torch.arange(21)
    assert relative_error(fused()(tokens, where), reference(tokens, where)) < 5 * HALF


def test_fused_decode_with_a_cache_too_long_for_one_program(monkeypatch):
    monkeypatch.setattr(fused_block, "MAX_SEQ", CACHE - 1)
    at = torch.tensor([100])
    assert relative_error(fused()(tokens_of(1, 1), at), reference(tokens_of(1, 1), at)) < 1e-4
