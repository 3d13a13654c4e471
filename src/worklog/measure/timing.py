"""How long one call takes. Every sample is kept; nothing is called an outlier."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from worklog.problem import Case, Device
from worklog.record import Timing

if TYPE_CHECKING:
    from torch import Tensor

LEAD_CYCLES = 100_000


def prepare(case: Case, device: Device) -> Callable[[], Tensor]:
    """What one sample of `case` executes: `case.run`, or the replay of a CUDA graph of it where the case asks for one.

    The graph is captured after `case.warmup` runs (at least one) on a side stream, so that what compiles or allocates
    on its first call has done so. The replay returns the graph's own output tensor, which the next replay overwrites.
    """
    import torch

    if not case.graph or device == "cpu":
        return case.run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(max(case.warmup, 1)):
            case.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.run()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay


def sample(run: Callable[[], Tensor], case: Case, device: Device) -> Timing:
    """Time `run`, which `prepare` made from `case`: `case.warmup` untimed runs, then `case.samples` timed ones.

    On CUDA a sample is the time between two events around `case.repeat` runs; the device is synchronised after it.
    What precedes the first event keeps the GPU busy while the host enqueues the run: the L2 flush where the case asks
    for one; for a graph an untimed replay, which leaves in L2 what it leaves there, and a wait on the device. A plain
    run without a flush starts on an idle GPU, so its sample includes the launch of its first kernel, as a step of an
    application does. Events resolve about 0.5 us.
    On the CPU a sample is time.perf_counter around as many.

    Raises ValueError where a run is shorter than the clock can tell.
    """
    graph = case.graph and device == "cuda"
    calls = case.calls * case.repeat

    def repeated() -> Tensor:
        for _ in range(case.repeat):
            result = run()
        return result

    for _ in range(case.warmup):
        run()
    if device == "cpu":
        seconds = [_host_seconds(repeated) for _ in range(case.samples)]
        samples = [s * 1e6 / calls for s in seconds]
    else:
        before = _l2_flush() if case.flush_l2 else _lead(run) if graph else None
        samples = [us / calls for us in _event_times_us(repeated, before, case.samples)]
    if min(samples) <= 0:
        raise ValueError(f"case {case.name} is too short to be timed; make it do more calls in one run")
    method: Literal["cuda_events", "cuda_graph", "perf_counter"]
    method = "perf_counter" if device == "cpu" else "cuda_graph" if graph else "cuda_events"
    return Timing(
        method=method,
        samples_us=samples,
        warmup=case.warmup,
        calls=calls,
        flush_l2=case.flush_l2 and device == "cuda",
    )


def time_case(case: Case, device: Device) -> Timing:
    """`prepare` and `sample` in one."""
    return sample(prepare(case, device), case, device)


def _host_seconds(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _event_times_us(run: Callable[[], Tensor], before: Callable[[], object] | None, count: int) -> list[float]:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        if before:
            before()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def _lead(run: Callable[[], Tensor]) -> Callable[[], object]:
    """One untimed run, then some 50 us in which the device waits and the host enqueues the timed one.

    Without the wait a graph shorter than its own launch (5 to 10 us of host time) would be charged for the launch.
    """
    import torch

    def lead() -> None:
        run()
        torch.cuda._sleep(LEAD_CYCLES)

    return lead


def _l2_flush() -> Callable[[], object]:
    """Zero a buffer of twice the L2 cache, then read it.

    The zeroing evicts what the case would find in L2. The read replaces the dirty lines that the zeroing leaves by
    clean ones: otherwise their write-back to DRAM would fall into the timed run.
    """
    import torch

    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.zeros(max(size, 1 << 26) // 4, dtype=torch.int32, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")

    def flush() -> None:
        buffer.zero_()
        torch.sum(buffer, dim=0, dtype=torch.int64, out=total)

    return flush
