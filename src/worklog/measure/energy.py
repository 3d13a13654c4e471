"""Energy of one call, from the GPU's own counter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from worklog.record import Energy

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SECONDS = 1.0
"""NVML's counter advances in steps of up to 100 ms, so one second bounds its error at a tenth."""


def measure(run: Callable[[], Tensor], run_us: float, calls: int) -> Energy | None:
    """Whole-GPU energy (idle power and memory included) of back-to-back runs, divided by the number of calls.

    `run_us` is how long one run takes; `calls` is how many calls it makes. None where the driver has no counter
    or nvidia-ml-py is missing.
    """
    try:
        import pynvml
    except ImportError:
        return None
    import torch

    repeats = max(1, math.ceil(LEAST_SECONDS * 1e6 / run_us))
    try:
        pynvml.nvmlInit()
        try:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            torch.cuda.synchronize()
            before, start = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.perf_counter()
            for _ in range(repeats):
                run()
            torch.cuda.synchronize()
            after, end = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.perf_counter()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return Energy(joules_per_call=(after - before) / 1e3 / (repeats * calls), seconds=end - start)
