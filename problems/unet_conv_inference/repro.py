"""Diffusion policy's 1-D U-Net reads 320 MB of weights a step; PyTorch takes many times longer than reading them takes.

This file declares what is measured; WORKLOG.md tells what it means.

    python problems/unet_conv_inference/repro.py               # the same run as: worklog repro unet_conv_inference
    python problems/unet_conv_inference/repro.py --variant eager --variant graph
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from unet_config import UnetConfig

from worklog.problem import Case, ProblemError, Variant, Workload
from worklog.record import Claim, Record

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
    Sampler = Callable[[Tensor, Tensor], Tensor]

TITLE = "A 1-D U-Net of 80 million weights takes many times longer than reading them once"
MODES = {"compile": None, "compile_cudagraph": "reduce-overhead", "compile_autotune": "max-autotune"}
HALVES = {"fp16": "float16", "bf16": "bfloat16"}
KERNELS = {
    "fused_triton": "Conv1d with all that follows it in few Triton kernels",
    "persistent": "one CUDA C++ kernel whose blocks stay for the whole step, or sampling",
}
"""Modules of kernels/."""
LIMITS = {"float32": 3e-3, "float16": 5e-3, "bfloat16": 3e-2}
"""Largest error: cuDNN multiplies float32 in TF32, with 11 significant bits as float16 has; bfloat16 has 8."""
WHOLE = ("eager", "graph", "fused_triton", "persistent")
"""Variants with a case from pictures to actions."""
EXACT_LIMIT = 1e-5  # float32 throughout: its rounding costs 1e-6


CONFIGS = (
    UnetConfig(name="push_t", device="cuda"),
    UnetConfig(name="push_t_batch_8", device="cuda", batch=8),
    UnetConfig(name="push_t_10_steps", device="cpu", steps=10, repeat=1, samples=10, sampling_samples=3),
    UnetConfig(name="tiny", device="cpu", widths=(32, 64, 128), cond_dim=20, step_dim=16, steps=3, repeat=1, samples=3,
               sampling_samples=2),
)  # fmt: skip


def _variants() -> Iterator[Variant]:
    cuda = ("cuda",)
    yield Variant(
        slug="eager_seed",
        summary="baseline: as the seed timed it, with autograd, fresh inputs and host tables in every step",
        options={"as_seed": True},
    )
    yield Variant(slug="eager", summary="inference mode, inputs and tables on the device")
    yield Variant(
        slug="eager_cudnn_benchmark",
        summary="the same, cuDNN tries its algorithms and keeps the fastest",
        devices=cuda,
        options={"cudnn_benchmark": True},
    )
    yield Variant(
        slug="eager_tf32_off",
        summary="the same, convolutions in float32 rather than TF32",
        devices=cuda,
        options={"tf32": False, "limit": EXACT_LIMIT},
    )
    for short, dtype in HALVES.items():
        yield Variant(slug=f"eager_{short}", summary=f"the same, {dtype} weights", options={"dtype": dtype})
    for slug, mode in MODES.items():
        both = ("cpu", "cuda") if slug == "compile" else cuda
        what = f"torch.compile, mode {mode or 'default'}"
        yield Variant(slug=slug, summary=what, devices=both, options={"compile": mode or "default"})
        for short, dtype in HALVES.items():
            yield Variant(
                slug=f"{slug}_{short}",
                summary=f"{what}, {dtype}",
                devices=cuda,
                options={"compile": mode or "default", "dtype": dtype},
            )
    yield Variant(slug="graph", summary="eager, recorded in a CUDA graph", devices=cuda, options={"graph": True})
    for short, dtype in HALVES.items():
        yield Variant(
            slug=f"graph_{short}",
            summary=f"the same, {dtype} weights",
            devices=cuda,
            options={"graph": True, "dtype": dtype},
        )
    yield Variant(
        slug="graph_film_once",
        summary="as graph; a sampling computes the scales and shifts of all steps in one product",
        options={"graph": True, "film_once": True},
    )
    for slug, how, limit, what in (
        ("conv2d_channels_last", "conv2d", LIMITS["float32"], "2-D, weights channels-last"),
        ("conv_gemm", "gemm", EXACT_LIMIT, "one matrix product over unfolded input"),
        ("conv_shifted", "shifted", EXACT_LIMIT, "one matrix product a tap"),
    ):
        yield Variant(
            slug=slug,
            summary=f"as graph, each convolution as {what}",
            options={"graph": True, "conv": how, "limit": limit},
        )
    for how in ("conv2d", "gemm"):
        yield Variant(
            slug=f"compile_autotune_{how}",
            summary=f"torch.compile, mode max-autotune, of the network with such layers ({how})",
            devices=cuda,
            options={"compile": "max-autotune", "conv": how},
        )
    yield Variant(
        slug="policy",
        summary="what the policy does besides the U-Net: vision, an update, simulation",
        options={"parts": True},
    )
    for name, what in KERNELS.items():
        for short, dtype in ({"": "float32"} | HALVES).items():
            yield Variant(
                slug=f"{name}_{short}".rstrip("_"),
                summary=f"ours: {what}, {dtype} weights",
                devices=cuda,
                options={"kernels": name, "dtype": dtype, "graph": True},
            )


VARIANTS = tuple(dataclasses.replace(variant, timeout_s=300.0) for variant in _variants())


def build(variant: Variant, config: UnetConfig) -> Workload:
    """One step, and all steps, as `variant` runs them, each beside float64."""
    import operators
    import push_t
    import torch

    from worklog.workloads import unet1d

    options = variant.options
    if options.get("parts"):
        reason = push_t.missing()
        return Workload(cases=push_t.part_cases(config), facts={"left_out": reason} if reason else {})
    model = network(variant, config)
    dtype = next(model.parameters()).dtype
    sample, timestep, cond = inputs(config, dtype)
    noise = starting_noise(config)
    table = unet1d.ddpm_coefficients(config.steps, device="cpu" if options.get("as_seed") else config.device)
    forward, sampler = callables(variant, model, sample, table)
    limit = options.get("limit", LIMITS[str(dtype).removeprefix("torch.")])

    def step() -> Tensor:
        return forward(sample, timestep, cond)

    facts: dict[str, object] = {}
    if forward is model:
        facts = operators.count(model, step)
        facts["film_unchanged_share"] = operators.unchanged_share(model, sample, cond)
    elif options.get("compile"):
        facts = operators.lowered(step)
    wide = torch.float64
    run = (lambda: step_as_seed(model, config, table)) if options.get("as_seed") else step
    settings = {"limit": limit, "graph": options.get("graph", False)}
    cases = [
        Case(
            name="step", run=run, reference=lambda: plain(config, wide)(*inputs(config, wide)),
            bytes=dtype.itemsize * config.parameters, flop=config.step_flop, repeat=config.repeat,
            samples=config.samples, memory=True, **settings,
        ),
        Case(
            name="sampling", run=lambda: sampler(noise, cond),
            reference=lambda: exact_actions(config, inputs(config, wide)[2]),
            bytes=dtype.itemsize * config.sampling_parameters, flop=config.sampling_flop,
            samples=config.sampling_samples, warmup=1, **settings,
        ),
    ]  # fmt: skip
    if variant.slug in WHOLE and push_t.fits(config):
        timed = {"samples": config.sampling_samples, "warmup": 1, **settings}
        cases.append(
            push_t.prediction_case(config, lambda c: sampler(noise, c), lambda c: exact_actions(config, c), timed)
        )
    return Workload(cases=cases, facts=facts)


def plain(config: UnetConfig, dtype: torch.dtype) -> nn.Module:
    """The U-Net of the config, unchanged."""
    from worklog.workloads import unet1d

    names = ("action_dim", "cond_dim", "step_dim", "widths", "kernel_size")
    shape = unet1d.UnetShape(**{name: getattr(config, name) for name in names})
    return unet1d.build(config.seed, dtype, config.device, shape)


def network(variant: Variant, config: UnetConfig) -> nn.Module:
    """The U-Net as the variant has it, and the backend's flags as it wants them."""
    import torch

    torch.backends.cudnn.benchmark = variant.options.get("cudnn_benchmark", False)
    torch.backends.cudnn.allow_tf32 = variant.options.get("tf32", True)
    model = plain(config, getattr(torch, variant.options.get("dtype", "float32")))
    if how := variant.options.get("conv"):
        import convolutions

        model = convolutions.swap(model, how)
    return model


def callables(variant: Variant, model: nn.Module, sample: Tensor, table: Tensor) -> tuple[Forward, Sampler]:
    """The model as the variant calls it: one step, and all steps from (noise, condition).

    sample: of the shape that will come. table [steps, 5]: of unet1d.ddpm_coefficients. Raises ProblemError where the
    variant's kernels, or the compiler, cannot run here.
    """
    import operators
    import torch

    from worklog.workloads import unet1d

    if name := variant.options.get("kernels"):
        try:
            kernels = importlib.import_module(f"kernels.{name}")
        except ImportError as missing:
            raise ProblemError(f"kernels/{name} cannot run here: {missing}, so there is no GPU code") from missing
        if reason := kernels.supported(model, sample):
            raise ProblemError(f"kernels/{name} cannot run here: {reason}")
        return kernels.build(model), kernels.build_sampler(model, table)
    mode = variant.options.get("compile")
    if mode and sample.device.type == "cpu" and (reason := operators.compiler_fault()):
        raise ProblemError(reason)
    forward = torch.compile(model, mode=mode) if mode else model

    if variant.options.get("film_once"):
        import film_once

        return model, film_once.sampler(model, table)

    def step(x: Tensor, timestep: Tensor, cond: Tensor) -> Tensor:
        return forward(x.to(sample.dtype), timestep, cond)

    return forward, lambda noise, cond: unet1d.sample_actions(step, noise, cond, table)


def inputs(config: UnetConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Sample, timestep and condition of one step, drawn on the config's device as the seed's loop draws them."""
    import torch

    generator = torch.Generator(device=config.device).manual_seed(config.seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(config.batch, *size, generator=generator, device=config.device).to(dtype)

    timestep = torch.tensor(config.steps // 2, device=config.device)
    return draw(config.horizon, config.action_dim), timestep, draw(config.cond_dim)


def starting_noise(config: UnetConfig) -> Tensor:
    """[steps + 1, B, T, action_dim] float32: where sampling starts, and what each step adds."""
    import torch

    generator = torch.Generator(device=config.device).manual_seed(config.seed + 1)
    size = (config.steps + 1, config.batch, config.horizon, config.action_dim)
    return torch.randn(size, generator=generator, device=config.device)


def step_as_seed(model: nn.Module, config: UnetConfig, table: Tensor) -> Tensor:
    """One pass of the loop that the seed times: new inputs, a forward pass that autograd records, a scheduler step."""
    import torch

    from worklog.workloads import unet1d

    with torch.inference_mode(False), torch.enable_grad():
        sample, timestep, cond = inputs(config, torch.float32)
        prediction = model.requires_grad_(True)(sample, timestep, cond)
        unet1d.denoise(sample, prediction, torch.randn_like(sample), table[config.steps // 2])
    return prediction.detach()


def exact_actions(config: UnetConfig, cond: Tensor) -> Tensor:
    """What sampling gives in float64, for a condition in float64."""
    from worklog.workloads import unet1d

    table = unet1d.ddpm_coefficients(config.steps, cond.dtype, config.device)
    return unet1d.sample_actions(plain(config, cond.dtype), starting_noise(config).double(), cond, table)


def claims(record: Record) -> list[Claim]:
    """On a GPU: the symptom, what torch.compile leaves of it, what the fix must reach. On a CPU: what counts show."""
    from unet_claims import cpu_claims, gpu_claims

    return gpu_claims(record) if record.hardware.gpus else cpu_claims(record)


if __name__ == "__main__":
    from worklog.cli import problem_main

    problem_main(__file__)
