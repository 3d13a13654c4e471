"""Diffusion policy on Push-T, from the simulator's picture to its next actions, with the time of each part.

    python problems/unet_conv_inference/policy.py --mode policy --episodes 1
    python problems/unet_conv_inference/policy.py --mode inference --evals 100 --variant eager --variant compile

The weights are random, so the policy plays badly; what takes how long does not depend on them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import push_t
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from worklog import child, problem, runner
from worklog.problem import ProblemError, Variant

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

PARTS = ("simulation", "vision", "U-Net", "denoising")


class Clock:
    """Seconds by part. A part ends when the device has done its work."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def __call__(self, part: str, work: Callable[..., Any], *args: Any) -> Any:
        import torch

        began = time.perf_counter()
        result = work(*args)
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - began
        return result


@dataclass(frozen=True)
class Policy:
    """The parts of one prediction."""

    vision: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    table: Tensor
    sampler: Callable[[Tensor, Tensor], Tensor] | None = None
    """All steps at once, where the variant has kernels for that; their denoising then counts as the U-Net's."""

    def predict(self, seen: Any, clock: Clock) -> np.ndarray:
        """The next actions [T, 2] in Push-T's units, from the last observations."""
        import torch

        from worklog.workloads import unet1d

        cond = clock("vision", self.condition, seen)
        noise = torch.randn(len(self.table) + 1, 1, unet1d.HORIZON, 2, device=self.table.device)
        if self.sampler:
            x = clock("U-Net", self.sampler, noise, cond)
        else:
            x, timesteps = noise[0], torch.arange(len(self.table), device=self.table.device)
            for fresh, step in zip(noise[1:], reversed(range(len(self.table))), strict=True):
                prediction = clock("U-Net", self.forward, x, timesteps[step], cond)
                x = clock("denoising", unet1d.denoise, x, prediction, fresh, self.table[step])
        actions: np.ndarray = ((x[0] + 1) * (push_t.FIELD / 2)).float().cpu().numpy()
        return actions

    def condition(self, seen: Any) -> Tensor:
        """Of the simulation's observations, [1, 1028]."""
        import numpy as np
        import torch

        device = self.table.device
        pictures = torch.from_numpy(np.stack([one["pixels"] for one in seen]).transpose(0, 3, 1, 2)).to(device)
        positions = torch.from_numpy(np.stack([one["agent_pos"] for one in seen])).to(device).float()
        return push_t.condition(self.vision, pictures.float() / 255, positions)


class Mode(enum.StrEnum):
    inference = "inference"
    policy = "policy"


def main(
    mode: Annotated[Mode, typer.Option(help="Forward passes alone, or whole episodes by part.")] = Mode.inference,
    variant: Annotated[list[str] | None, typer.Option(help="As `worklog list` names them. Default: eager.")] = None,
    config: Annotated[str | None, typer.Option(help="Default: the problem's first for this device.")] = None,
    evals: Annotated[int, typer.Option(min=1, help="Forward passes of each variant.")] = 100,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each variant.")] = 1,
    predictions: Annotated[int | None, typer.Option(min=1, help="End an episode after so many.")] = None,
) -> None:
    """Time forward passes, or episodes of Push-T by part. Example: policy.py --mode policy --episodes 1"""
    console = Console(stderr=True)
    try:
        here = problem.load(str(Path(__file__).parent))
        if mode is Mode.policy and (reason := push_t.missing()):
            raise ProblemError(reason)
        run = {Mode.inference: inference, Mode.policy: play}[mode]
        for slug in variant or ["eager"]:
            run(here, here.variant(slug), config, console, evals if mode is Mode.inference else episodes, predictions)
    except ProblemError as error:
        console.print(f"policy.py: {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


def prepared(here: problem.Problem, variant: Variant, name: str | None) -> Any:
    """The config to run with. Raises ProblemError where the variant does not run on its device."""
    config = here.config(name, runner.choose_device("auto"))
    if variant.options.get("parts"):
        raise ProblemError(f"{variant.slug} has no U-Net; choose another --variant.")
    if config.device not in variant.devices:
        raise ProblemError(f"{variant.slug} runs on {' and '.join(variant.devices)} only; choose another --variant.")
    if reason := child.unmet(variant, config):
        raise ProblemError(f"{variant.slug} {reason}.")
    return config


def inference(
    here: problem.Problem, variant: Variant, name: str | None, console: Console, evals: int, _: int | None
) -> None:
    """Mean time of `evals` steps, one after another: by the host's clock, from the first launch to the last result."""
    config = prepared(here, variant, name)
    import torch

    from worklog.measure import timing

    case = here.build(variant, config).cases[0]
    with torch.inference_mode():
        step = timing.prepare(case, config.device)
        clock = Clock(config.device)
        for _ in range(case.warmup):
            step()

        def passes() -> None:
            for _ in track(range(evals), variant.slug, console=console):
                step()

        clock("U-Net", passes)
    milliseconds = clock.seconds["U-Net"] / evals * 1e3
    print(f"{variant.slug}: {evals} forward passes, {milliseconds:.3f} ms each, config {config.name}")


def play(
    here: problem.Problem, variant: Variant, name: str | None, console: Console, episodes: int, limit: int | None
) -> None:
    """Episodes with this variant's U-Net, and a table of where their time went."""
    config = prepared(here, variant, name)
    ours = variant.options.get("kernels")
    step_alone = variant.options.get("graph") or variant.options.get("as_seed")
    if variant.options.get("dtype", "float32") != "float32" or (step_alone and not ours):
        raise ProblemError(f"policy mode calls a float32 U-Net step by step, which {variant.slug} is not for.")
    if not push_t.fits(config):
        raise ProblemError(f"config {config.name} has another condition than Push-T's; choose another --config.")
    import torch

    from worklog.workloads import resnet18, unet1d

    torch.manual_seed(config.seed)
    table = unet1d.ddpm_coefficients(config.steps, device=config.device)
    sample = torch.zeros(1, unet1d.HORIZON, 2, device=config.device)
    forward, sampler = here.module.callables(variant, here.module.network(variant, config), sample, table)
    policy = Policy(resnet18.build(config.seed, device=config.device), forward, table, sampler if ours else None)
    world, clock, made = push_t.PushT(config.seed), Clock(config.device), 0
    with torch.inference_mode():
        policy.predict(world.seen, Clock(config.device))  # compiles, allocates
        most = min(limit or push_t.EPISODE_STEPS, -(-push_t.EPISODE_STEPS // push_t.ACTIONS))
        for episode in range(episodes):
            world.restart()
            for _ in track(range(most), f"{variant.slug}, episode {episode + 1}", console=console):
                if world.done:  # solved before its time
                    break
                actions = policy.predict(world.seen, clock)
                clock("simulation", world.play, actions[push_t.OBSERVATIONS - 1 :][: push_t.ACTIONS])
                made += 1
    show(variant.slug, clock.seconds, made, config)


def show(slug: str, seconds: dict[str, float], predictions: int, config: Any) -> None:
    """Seconds and shares by part, and what the whole could gain if one part took no time (Amdahl's law)."""
    total = sum(seconds.values())
    table = Table(title=f"{slug}: {predictions} predictions of {config.steps} steps, config {config.name}")
    for column in ("part", "seconds", "share", "all else equal, without it"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, spent in seconds.items():
        table.add_row(part, f"{spent:.3f}", f"{spent / total:.1%}", f"{total / (total - spent):.2f}x faster")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
