"""What the device reaches at best in this run: the yardsticks for every fraction in a record."""

from __future__ import annotations

import statistics

from worklog.measure.timing import time_case
from worklog.problem import Case, Device
from worklog.record import Ceilings

COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


def measure(device: Device) -> Ceilings:
    """Medians of 20 samples each; empty on the CPU.

    Copy: 2 GiB from one buffer to another, or a quarter of the free memory where that is less; bytes read plus bytes
    written. Matmul: 8192^3 in bf16 on random data (constant data draws less power, so it clocks higher).
    """
    if device == "cpu":
        return Ceilings()
    import torch

    with torch.inference_mode():
        copied, copy_us = _copy()
        matmul_us = _matmul_us()
    return Ceilings(
        copy_bytes_per_s=2 * copied / (copy_us * 1e-6),
        matmul_flop_per_s=2 * MATMUL_SIZE**3 / (matmul_us * 1e-6),
    )


def _copy() -> tuple[int, float]:
    """(bytes of the buffer, median time).

    Not in a CUDA graph: there a device-to-device copy becomes a memcpy node, which on an H200 moves only two thirds of
    what the copy kernel moves, and a low ceiling flatters every fraction.
    """
    import torch

    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 4)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return size, _median_us(Case(name="copy", run=lambda: target.copy_(source), samples=20, warmup=5))


def _matmul_us() -> float:
    import torch

    left, right = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    return _median_us(Case(name="matmul", run=lambda: left @ right, graph=True, samples=20, warmup=5))


def _median_us(case: Case) -> float:
    return statistics.median(time_case(case, "cuda").samples_us)
