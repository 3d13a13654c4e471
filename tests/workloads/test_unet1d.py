"""Diffusion policy's networks: sizes, what each input does, and the sampler against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from worklog.workloads import resnet18, unet1d


@pytest.fixture(scope="module")
def tiny() -> unet1d.ConditionalUnet1D:
    return unet1d.build(shape=unet1d.TINY)


def relative(measured: torch.Tensor, reference: torch.Tensor) -> float:
    return ((measured - reference).norm() / reference.norm()).item()


def test_the_policys_unet_has_its_published_size() -> None:
    with torch.device("meta"):
        model = unet1d.ConditionalUnet1D()
    convs = [m for m in model.modules() if isinstance(m, unet1d.Conv1dBlock)]
    assert sum(p.numel() for p in model.parameters()) == 79_947_266
    assert len(convs) == 25
    assert model.up_modules[1][0].blocks[0].block[0].weight.shape == (256, 1024, 5)


@pytest.mark.parametrize(("batch", "horizon"), [(1, 16), (3, 8), (2, 32)])
def test_the_noise_has_the_actions_shape(tiny: nn.Module, batch: int, horizon: int) -> None:
    sample, timestep, cond = unet1d.inputs(unet1d.TINY, batch, horizon)
    assert tiny(sample, timestep, cond).shape == (batch, horizon, 2)


def test_a_step_may_be_a_number_a_scalar_or_one_for_each_sample(tiny: nn.Module) -> None:
    sample, _, cond = unet1d.inputs(unet1d.TINY, batch=2)
    by_number = tiny(sample, 7, cond)
    assert torch.equal(by_number, tiny(sample, torch.tensor(7), cond))
    assert torch.equal(by_number, tiny(sample, torch.tensor([7, 7]), cond))
    mixed = tiny(sample, torch.tensor([7, 90]), cond)
    assert relative(mixed[0], by_number[0]) < 1e-5
    assert relative(mixed[1], by_number[1]) > 0.1


def test_every_block_reads_the_condition_and_every_parameter_counts() -> None:
    sample, timestep, cond = unet1d.inputs(unet1d.TINY)
    model = unet1d.build(shape=unet1d.TINY).requires_grad_(True)
    model(sample, timestep, cond.requires_grad_(True)).square().sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert unused == []
    films = [m for m in model.modules() if isinstance(m, unet1d.ConditionalResidualBlock1D)]
    assert len(films) == 12
    for film in films:
        assert film.cond_encoder[1].weight.grad.abs().sum(0).min() > 0, "a column of the condition has no effect"


def test_film_is_a_scale_and_a_shift_between_the_two_blocks(tiny: unet1d.ConditionalUnet1D) -> None:
    block = tiny.down_modules[1][0]
    x, cond = torch.randn(2, 32, 8), torch.randn(2, 36)
    scale, shift = (nn.functional.mish(cond) @ block.cond_encoder[1].weight.T + block.cond_encoder[1].bias).split(64, 1)
    between = scale[:, :, None] * block.blocks[0](x) + shift[:, :, None]
    assert relative(block(x, cond), block.blocks[1](between) + block.residual_conv(x)) < 1e-6


def test_float32_is_near_float64_and_weights_depend_on_the_seed_alone() -> None:
    sample, timestep, cond = unet1d.inputs(unet1d.TINY)
    run = [
        unet1d.build(seed, dtype, shape=unet1d.TINY)(sample.to(dtype), timestep, cond.to(dtype))
        for seed, dtype in ((0, torch.float32), (0, torch.float64), (1, torch.float32))
    ]
    assert run[1].dtype == torch.float64
    assert 0 < relative(run[0], run[1]) < 1e-5
    assert relative(run[2], run[1]) > 0.1


def test_the_step_embedding_is_the_transformers() -> None:
    embedding = unet1d.SinusoidalPosEmb(8)(torch.tensor([3]), torch.float64)[0].numpy()
    angle = 3 * 10000.0 ** (-np.arange(4) / 3)
    np.testing.assert_allclose(embedding, np.concatenate((np.sin(angle), np.cos(angle))), rtol=1e-12)


def numpy_schedule(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """betas and their running product, one after another as the paper writes them."""

    def kept(t: float) -> float:
        return float(np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2)

    betas = np.array([min(1 - kept((i + 1) / steps) / kept(i / steps), 0.999) for i in range(steps)])
    return betas, np.array([np.prod(1 - betas[: i + 1]) for i in range(steps)])


def test_the_sampler_against_numpy() -> None:
    """Posterior from Bayes' rule on two Gaussians, not from the coefficients' formula."""
    steps = 100
    betas, a_bar = numpy_schedule(steps)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, 2))
    noise = rng.standard_normal((steps + 1, 1, 16, 2))

    x = noise[0]
    for i in range(steps):
        t = steps - 1 - i
        start = np.clip((x - np.sqrt(1 - a_bar[t]) * np.tanh(x @ weights + t / steps + 0.3)) / np.sqrt(a_bar[t]), -1, 1)
        if t == 0:
            x = start
            continue
        prior_variance = 1 - a_bar[t - 1]  # x_(t-1) given x_0: mean sqrt(a_bar) x_0
        precision = 1 / prior_variance + (1 - betas[t]) / betas[t]  # and given x_t = sqrt(1 - beta) x_(t-1) + noise
        mean = (np.sqrt(a_bar[t - 1]) * start / prior_variance + np.sqrt(1 - betas[t]) * x / betas[t]) / precision
        x = mean + np.sqrt(1 / precision) * noise[1 + i]

    def model(sample: torch.Tensor, timestep: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        return torch.tanh(sample @ torch.from_numpy(weights) + timestep.double() / steps + cond)

    table = unet1d.ddpm_coefficients(steps, torch.float64)
    sampled = unet1d.sample_actions(model, torch.from_numpy(noise), torch.tensor(0.3, dtype=torch.float64), table)
    np.testing.assert_allclose(sampled.numpy(), x, rtol=1e-9, atol=1e-12)


def test_the_last_step_adds_no_noise() -> None:
    row = unet1d.ddpm_coefficients()[0]
    x = torch.randn(1, 16, 2)
    assert torch.equal(unet1d.denoise(x, x, x, row), unet1d.denoise(x, x, 100 * x, row))


def test_the_vision_encoder_is_resnet18_without_its_classifier() -> None:
    model = resnet18.build()
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 513_000  # torchvision's count, its classifier's
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert sum(isinstance(m, nn.GroupNorm) for m in model.modules()) == 20
    images = torch.rand(2, 3, 96, 96)
    features = model(images)
    assert features.shape == (2, 512)
    wide = resnet18.build(dtype=torch.float64)(images.double())
    assert relative(features, wide) < 1e-5
