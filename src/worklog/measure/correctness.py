"""How far a result is from its reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

METRIC = "relative_frobenius"
CHUNK = 1 << 24


def relative_error(result: Tensor, reference: Tensor) -> float | None:
    """||result - reference||_F / ||reference||_F, accumulated in float64; None where it is not finite.

    Works in chunks of CHUNK elements on the result's device, so a reference that was moved to the CPU costs a few times
    128 MiB of device memory at most. A zero reference gives 0 for a zero result, None for any other.

    Raises ValueError if the shapes differ or the reference itself is not finite.
    """
    import torch

    if result.shape != reference.shape:
        raise ValueError(f"the result has shape {tuple(result.shape)}, the reference {tuple(reference.shape)}")
    ours, truth = result.reshape(-1), reference.reshape(-1)
    difference = norm = 0.0
    for at in range(0, truth.numel(), CHUNK):
        expected = truth[at : at + CHUNK].to(ours.device, torch.float64)
        got = ours[at : at + CHUNK].to(torch.float64)
        norm += float(expected.square().sum())
        difference += float((got - expected).square().sum())
    if not math.isfinite(norm):
        raise ValueError("the reference is not finite")
    if difference == 0.0:
        return 0.0
    error = math.sqrt(difference / norm) if norm else math.inf
    return error if math.isfinite(error) else None


def verdict(error: float | None, limit: float) -> str | None:
    """One clause if `error` is not within `limit`, else None."""
    if error is None:
        return "the result is not finite"
    return None if error <= limit else f"relative error {error:.2e} is above the limit {limit:.0e}"
