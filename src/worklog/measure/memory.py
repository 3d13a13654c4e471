"""What one call allocates."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from worklog.problem import Device
from worklog.record import Memory

if TYPE_CHECKING:
    from torch import Tensor


def measure(run: Callable[[], Tensor], device: Device, besides: Tensor | None = None) -> Memory:
    """Peak over one `run` that has run before, its result included.

    `besides` is a CPU tensor that is alive but not the case's (its reference); it is not counted.
    A run that replays CUDA graphs allocates nothing: its temporaries lie in the graphs' private pool, which counts as
    reserved, not as allocated.
    """
    return _cuda(run) if device == "cuda" else _cpu(run, besides)


def _cuda(run: Callable[[], Tensor]) -> Memory:
    """From the caching allocator's peaks; the largest block from the allocator's history, in a second run."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, clear_history=True)
    try:
        run()
        torch.cuda.synchronize()
        history = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return Memory(
        baseline_bytes=baseline,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=total - free,
        largest_temporary_bytes=max((e["size"] for e in history if e["action"] == "alloc"), default=0),
    )


def _cpu(run: Callable[[], Tensor], besides: Tensor | None) -> Memory:
    """From the CPU allocator's own reports, which torch.profiler collects: compiled code is included.

    The CPU has no caching allocator, so reserved equals allocated, and the driver has no figure.
    """
    import torch

    gc.collect()
    baseline = live_tensor_bytes() - (besides.untyped_storage().nbytes() if besides is not None else 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    changes = [int(e.nbytes()) for e in events]
    del result
    peak = baseline + max(itertools.accumulate(changes, initial=0))
    return Memory(
        baseline_bytes=baseline,
        allocated_bytes=peak,
        reserved_bytes=peak,
        device_bytes=None,
        largest_temporary_bytes=max(changes, default=0),
    )


def live_tensor_bytes() -> int:
    """Bytes of the distinct CPU storages behind all tensors that Python can reach."""
    import torch
    from torch._subclasses import FakeTensor

    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), FakeTensor):
            continue
        try:
            if thing.device.type != "cpu":
                continue
            storage = thing.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError):  # a wrapper without storage; the tensors that it wraps are counted
            continue
        if address:
            storages[address] = max(storages.get(address, 0), storage.nbytes())
    return sum(storages.values())
