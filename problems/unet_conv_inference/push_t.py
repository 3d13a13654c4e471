"""What diffusion policy does besides its U-Net: Push-T's simulation, the condition made of what is seen, one update."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from worklog.problem import Case

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

OBSERVATIONS = 2  # pictures and positions that the condition is made of
ACTIONS = 8  # of the predicted actions, so many are carried out before the next prediction
EPISODE_STEPS = 200
FIELD = 512  # Push-T's side in its own units
PIXELS = 96
FEATURES = 512  # of a picture


def missing() -> str | None:
    """Why Push-T cannot be simulated here, in one sentence; None: it can."""
    os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"  # pygame prints a greeting to stdout
    try:
        import gym_pusht  # noqa: F401
    except ImportError as error:
        return (
            f"Push-T cannot be simulated here ({error}): it needs gym-pusht, which ./scripts/repro unet_conv_inference "
            "installs; --mode inference works without."
        )
    return None


class PushT:
    """One episode after another of gym-pusht, and the last observations."""

    def __init__(self, seed: int) -> None:
        import gym_pusht  # noqa: F401  (registers the environment)
        import gymnasium

        self.world = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos")
        self.seed = seed
        self.restart()

    def restart(self) -> None:
        seen, _ = self.world.reset(seed=self.seed)
        self.seen = collections.deque([seen] * OBSERVATIONS, maxlen=OBSERVATIONS)
        self.steps, self.reward, self.done = 0, 0.0, False

    def play(self, targets: np.ndarray) -> None:
        """Carry out actions [n, 2], positions to move to in Push-T's units; a new episode begins where one ended."""
        for target in targets:
            if self.done:
                self.restart()
            seen, reward, terminated, truncated, _ = self.world.step(target)
            self.seen.append(seen)
            self.steps += 1
            self.reward = max(self.reward, float(reward))
            self.done = terminated or truncated or self.steps >= EPISODE_STEPS


def condition(vision: Callable[[Tensor], Tensor], images: Tensor, positions: Tensor) -> Tensor:
    """Pictures [2, 3, H, W] from 0 to 1, positions [2, 2] in Push-T's units -> [1, 1028]: features, position, twice."""
    import torch

    return torch.cat((vision(images), positions / (FIELD / 2) - 1), dim=-1).reshape(1, -1)


def observed(config: Any) -> tuple[Tensor, Tensor]:
    """Seeded random pictures and positions, as `condition` takes them."""
    import torch

    generator = torch.Generator().manual_seed(config.seed)
    images = torch.rand(OBSERVATIONS, 3, PIXELS, PIXELS, generator=generator)
    positions = torch.rand(OBSERVATIONS, 2, generator=generator) * FIELD
    return images.to(config.device), positions.to(config.device)


def part_cases(config: Any) -> list[Case]:
    """One case each: the vision encoder, one denoising update, and the steps of the simulation between two predictions,
    which needs gym-pusht: without it there is no such case."""
    import torch

    from worklog.workloads import resnet18, unet1d

    images, _ = observed(config)
    vision = resnet18.build(config.seed, device=config.device)
    generator = torch.Generator().manual_seed(config.seed)
    size = (3, config.batch, config.horizon, config.action_dim)
    sample, prediction, noise = torch.randn(size, generator=generator).to(config.device)
    row = unet1d.ddpm_coefficients(config.steps, device=config.device)[config.steps // 2]
    settings = {"limit": 3e-3, "repeat": config.repeat, "samples": config.samples}

    def vision_reference() -> Tensor:
        return resnet18.build(config.seed, torch.float64, config.device)(images.double())

    def denoise_reference() -> Tensor:
        return unet1d.denoise(sample.double(), prediction.double(), noise.double(), row.double())

    parts = [
        Case(name="vision", run=lambda: vision(images), reference=vision_reference, **settings),
        Case(
            name="denoise",
            run=lambda: unet1d.denoise(sample, prediction, noise, row),
            reference=denoise_reference,
            **settings,
        ),
    ]
    if missing() is None:
        world = PushT(config.seed)
        targets = torch.rand(ACTIONS, 2, generator=generator).numpy() * FIELD

        def simulate() -> Tensor:
            world.play(targets)
            return torch.tensor(world.reward)

        parts.append(Case(name="simulation", run=simulate, samples=config.samples))
    return parts


def fits(config: Any) -> bool:
    """Whether the network's condition is that of `condition`."""
    return config.batch == 1 and config.cond_dim == OBSERVATIONS * (FEATURES + 2)


def prediction_case(
    config: Any, actions: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], timed: Mapping[str, Any]
) -> Case:
    """From pictures to actions in one piece: the vision encoder, then all steps.

    actions, exact: what sampling makes of a condition, as the variant does it and in float64. timed: of the Case.
    """
    from worklog.workloads import resnet18

    images, positions = observed(config)
    vision = resnet18.build(config.seed, device=config.device)

    def predict() -> Tensor:
        return actions(condition(vision, images, positions))

    def reference() -> Tensor:
        wide = resnet18.build(config.seed, images.double().dtype, config.device)
        return exact(condition(wide, images.double(), positions.double()))

    return Case(name="prediction", run=predict, reference=reference, **timed)
