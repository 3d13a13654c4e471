"""The Triton kernels of unet_conv_inference, run on the CPU by Triton's interpreter, at small widths.

test_unet_kernels.py runs this file with Triton on the path and TRITON_INTERPRET=1. tests/gpu has real sizes.
"""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from kernels import fused_triton, layers, triton_kernels

from worklog.measure.correctness import relative_error
from worklog.workloads import unet1d

SHAPE = unet1d.UnetShape(cond_dim=20, step_dim=16, widths=(16, 32, 48))
LIMITS = {torch.float32: 3e-6, torch.float16: 1e-2}  # the interpreter cuts float16 off, and cannot multiply bfloat16


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setattr(triton_kernels, "gdc_wait", lambda: None)
    monkeypatch.setattr(triton_kernels, "gdc_launch_dependents", lambda: None)
    monkeypatch.setattr(triton_kernels, "range", plain_range, raising=False)
    monkeypatch.setattr(fused_triton, "supported", lambda *_: None)
    monkeypatch.setattr(fused_triton.TritonUnet, "scratch", poisoned)
    monkeypatch.setattr(fused_triton, "PROGRAMS", 12)  # the interpreter takes milliseconds for each
    with torch.inference_mode():
        yield


def poisoned(_, like, *size):
    return torch.full(size, float("nan"), device=like.device)


def plain_range(*bounds):
    """The interpreter hands a loop arrays of one number, which NumPy 2.4 takes for none."""
    return range(*(int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in bounds))


@pytest.mark.parametrize(
    ("dtype", "batch", "horizon"),
    [(torch.float32, 1, 16), (torch.float32, 2, 8), (torch.float32, 2, 32), (torch.float16, 1, 16)],
)
def test_each_layer_is_the_models(dtype, batch, horizon):
    exact = unet1d.build(0, dtype, shape=SHAPE).double()
    unet = fused_triton.build(unet1d.build(0, dtype, shape=SHAPE))
    unet.seen = {}
    sample, timestep, cond = unet1d.inputs(SHAPE, batch, horizon, dtype=dtype)
    found = unet(sample, timestep, cond)
    assert found.dtype == dtype
    assert relative_error(found, exact(sample.double(), timestep, cond.double())) < LIMITS[dtype]
    for b in range(batch):
        expected = layers.outputs(exact, sample[b : b + 1].double(), timestep, cond[b : b + 1].double())
        convs = {name: y for name, y in expected.items() if name in unet.weights and name != "final_conv.1"}
        assert sum("block.0" in name for name in convs) == 25
        errors = layers.errors({name: y[b] for name, y in unet.seen.items()}, convs)
        assert all(e is not None and e < LIMITS[dtype] for e in errors.values()), errors


def test_sampling_is_the_models():
    steps, batch = 2, 1
    model, coefficients = unet1d.build(0, shape=SHAPE), unet1d.ddpm_coefficients(steps)
    noise, cond = torch.randn(steps + 1, batch, 8, 2), torch.randn(batch, SHAPE.cond_dim)
    found = fused_triton.build_sampler(model, coefficients)(noise, cond)
    exact = unet1d.build(0, shape=SHAPE).double()
    expected = unet1d.sample_actions(exact, noise.double(), cond.double(), coefficients.double())
    assert relative_error(found, expected) < 1e-4


def test_nan_comes_out_as_nan_for_its_own_sample():
    unet = fused_triton.build(unet1d.build(0, shape=SHAPE))
    sample, timestep, cond = unet1d.inputs(SHAPE, 3, 8)
    sample[1, 2, 0] = cond[2, 3] = float("nan")
    found = unet(sample, timestep, cond)
    assert found[1:].isnan().all()
    assert found[0].isfinite().all()


def test_steps_of_their_own_for_each_sample():
    unet, exact = fused_triton.build(unet1d.build(0, shape=SHAPE)), unet1d.build(0, shape=SHAPE).double()
    sample, _, cond = unet1d.inputs(SHAPE, 2, 8)
    timesteps = torch.tensor([3, 90])
    assert relative_error(unet(sample, timesteps, cond), exact(sample.double(), timesteps, cond.double())) < 3e-6
