"""Excess queue time: how long a kernel waited when its launch call was over and its stream was free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.streams import numbers
from worklog.traces.schema import COMMUNICATION, Trace


@dataclass(frozen=True)
class Waits:
    """Of a number of kernels. `median_ns` and `p90_ns` are times that occurred: half and nine in ten are no longer."""

    kernels: int
    median_ns: int | None
    p90_ns: int | None
    sum_ns: int


@dataclass(frozen=True)
class Queue:
    launched: Waits
    """Kernels that a call launched one by one, and the first of each replay of a CUDA graph."""
    in_graphs: Waits
    """The other kernels of the replays."""
    unjoined: int
    """Kernels whose call the trace does not hold: in neither."""


def queue(trace: Trace, device: int, launched: Any) -> Queue:
    """Excess queue time of those kernels of one device that the mask `launched` over activities holds.

    max(0, start - max(end of the launch call, end of what ran before on the stream)): before a kernel come kernels,
    copies, memsets and graphs alike, of its process and stream, those outside of `launched` too; where they overlap the
    last end counts. Raw queue time (start - end of the call) is mostly the stream's own work ahead of the kernel.

    Inside of a replay of a CUDA graph the edges say what a node waits for, and no trace holds them: there only the time
    counts in which no earlier node of the replay was still running, on any stream. What a kernel waits for another
    stream (cudaStreamWaitEvent) is in its excess. O(n log n) in the activities of the device.
    """
    rows = np.flatnonzero(trace.activities["device"].to_numpy() == device)
    start = trace.activities["start_ns"].to_numpy()[rows]
    if not (start[1:] >= start[:-1]).all():
        order = np.argsort(start, kind="stable")
        rows, start = rows[order], start[order]
    end, call = (trace.activities[name].to_numpy()[rows] for name in ("end_ns", "call"))
    kernel = launched[rows] & (trace.activities["kind"].to_numpy()[rows] <= COMMUNICATION)
    known, inside = kernel & (call >= 0), np.zeros(len(rows), bool)
    ready = _ended_before(numbers(trace, rows), end)
    if len(trace.calls):
        np.maximum(ready, trace.calls["end_ns"].to_numpy()[call], out=ready, where=known)
        nodes = np.flatnonzero((call >= 0) & trace.calls["graph"].to_numpy()[call])
        inside[nodes] = pd.Series(call[nodes]).duplicated().to_numpy()
        ready[nodes] = np.maximum(ready[nodes], _ended_before(call[nodes], end[nodes]))
    excess = np.maximum(np.subtract(start, ready, out=start), 0, out=start)
    return Queue(_waits(excess[known & ~inside]), _waits(excess[known & inside]), int((kernel & ~known).sum()))


def _ended_before(group: Any, end: Any) -> Any:
    """For each row, in the order of their starts, the last end among those before it in its group."""
    lowest = np.iinfo(np.int64).min
    if (group == group[:1]).all():
        before = np.full(len(end), lowest)
        np.maximum.accumulate(end[:-1], out=before[1:])
        return before
    reached = pd.Series(end).groupby(group).cummax()
    return reached.groupby(group).shift(fill_value=lowest).to_numpy(copy=True)


def _waits(excess: Any) -> Waits:
    if not len(excess):
        return Waits(0, None, None, 0)
    median, p90 = np.percentile(excess, (50, 90), method="inverted_cdf")
    return Waits(len(excess), int(median), int(p90), int(excess.sum()))
