"""Layer by layer beside the model itself: a layer that is skipped or wrong shows here, however little the end cares.

(The code that this problem starts from left out one of 25 convolutions, 3.6 % of the work, and no test saw it.)
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from worklog.measure.correctness import relative_error


@torch.inference_mode()
def outputs(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Results of all convolutions and linears of one call, in their order: batch 1, [channels, positions]."""
    found: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.ConvTranspose1d):

                def keep(_: nn.Module, __: Any, result: Tensor, name: str = name) -> None:
                    found[name] = result[0] if result.ndim == 3 else result[0][:, None]

                hooks.callback(layer.register_forward_hook(keep).remove)
        model(*inputs)
    return found


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float | None]:
    """Relative error of each expected layer; None where it is not finite. Raises KeyError for one that is missing."""
    return {name: relative_error(found[name], wanted.to(found[name].device)) for name, wanted in expected.items()}
