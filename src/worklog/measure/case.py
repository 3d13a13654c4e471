"""One case: is it right, what does it allocate, how long does it take, what energy does it use. In that order."""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from typing import TYPE_CHECKING, Any

from worklog.measure import correctness, energy, memory, timing
from worklog.problem import Case, Device
from worklog.record import CaseResult, Correctness, Status

if TYPE_CHECKING:
    from torch import Tensor

ENERGY_FROM_US = 1000.0
"""Shorter runs draw their power mostly between the runs."""


def measure(case: Case, device: Device) -> CaseResult:
    """Everything that the case asks for, under torch.inference_mode; what goes wrong is this case's status alone."""
    import torch

    try:
        with torch.inference_mode():
            return _measure(case, device)
    except Exception as error:
        status, message = explain(error)
    gc.collect()
    if device == "cuda":
        with contextlib.suppress(Exception):  # after a fault of the device each later call fails, and says so itself
            torch.cuda.empty_cache()
    return CaseResult(status=status, message=message, bytes=case.bytes, flop=case.flop)


def _measure(case: Case, device: Device) -> CaseResult:
    reference = case.reference().cpu() if case.reference else None
    errors: list[float | None] = []

    def wrong(output: Tensor) -> str | None:
        if reference is None:
            return None
        if output.shape != reference.shape:
            errors.append(None)
            return f"the result has shape {tuple(output.shape)}, the reference {tuple(reference.shape)}"
        errors.append(correctness.relative_error(output, reference))
        return correctness.verdict(errors[-1], case.limit)

    def outcome(status: Status, message: str | None = None, **measured: Any) -> CaseResult:
        finite = [error for error in errors if error is not None]
        worst = max(finite) if errors and len(finite) == len(errors) else None
        checked = Correctness(metric=correctness.METRIC, value=worst, limit=case.limit) if errors else None
        return CaseResult(
            status=status, message=message, correctness=checked, bytes=case.bytes, flop=case.flop, **measured
        )

    for _ in range(2):  # the second run of compiled or graphed code takes another path than the first
        if message := wrong(case.run()):
            return outcome("wrong_result", message)
    peak = memory.measure(case.run, device, besides=reference) if case.memory else None
    run = timing.prepare(case, device)
    timed = timing.sample(run, case, device)
    if message := wrong(run()):  # what was timed is what was checked
        return outcome("wrong_result", f"after it was timed, {message}")
    run_us = timed.median_us * case.calls
    spent = energy.measure(run, run_us, case.calls) if device == "cuda" and run_us >= ENERGY_FROM_US else None
    return outcome("ok", timing=timed, memory=peak, energy=spent)


def explain(error: Exception) -> tuple[Status, str]:
    """Status and one clause; the traceback goes to stderr."""
    traceback.print_exception(error)
    import torch

    text = str(error).strip()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        asked = re.search(r"allocate ([\d.]+ ?(?:GiB|MiB|KiB|bytes))", text)
        return "out_of_memory", f"out of memory{f' when it asked for {asked[1]}' if asked else ''}"
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "error", f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
