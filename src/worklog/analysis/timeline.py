"""The accounting: every nanosecond of a device's window in exactly one of eight parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces.intervals import Intervals
from worklog.traces.schema import COMMUNICATION, COMPUTE, COPY, COPYING, GRAPH, LAUNCH, MEMSET, SYNC, Trace

PARTS = ("compute", "communication", "copy", "memset", "launch", "host", "sync", "unexplained")
BUSY = {COMPUTE: "compute", COMMUNICATION: "communication", COPY: "copy", MEMSET: "memset", GRAPH: "unexplained"}
IDLE = ("launch", "host", "sync", "unexplained")


@dataclass(frozen=True)
class Timeline:
    device: int
    span_ns: int
    busy_ns: int
    """Union of all activities; with replays of CUDA graphs that were traced as one piece, whose time is unexplained."""
    accounting_ns: dict[str, int]
    """The keys of PARTS; the sum is span_ns."""
    gaps: pd.DataFrame
    """Idle time: start_ns, end_ns, `next` (row of the activity that ended it, -1: none) and ns in each of IDLE.

    `launching` is how long of it the call that ended it had begun: all of `launch`, and the last stretch of a host's
    late gap.
    """


def account(trace: Trace, device: int, windows: Intervals) -> Timeline:
    """Split `windows` of one device. O(n log n) in activities and calls.

    Where activities overlap, time belongs to the first of compute, communication, copy, memset. A gap without any has
    its cause in the thread that launched the activity which ended it. `launch`: when the gap began, that call had
    begun too; the work was on its way. Else the host was late, and had it asked in time the gap would not be: `sync`
    while the thread sat in a synchronising call, or still in a copy's call whose copy was over (nothing ran on the
    device: it waited for work that had finished), `host` for the rest. `unexplained`: the trace does not know the
    call, nothing follows, a graph's replay has no rows for its nodes, or a graph was launched before that left no row
    at all.
    """
    rows = np.flatnonzero(trace.activities["device"].to_numpy() == device)
    rows = rows[np.argsort(trace.activities["start_ns"].to_numpy()[rows], kind="stable")]
    start, end, kind = (trace.activities[name].to_numpy()[rows] for name in ("start_ns", "end_ns", "kind"))
    parts, busy, united = dict.fromkeys(PARTS, 0), 0, Intervals.union([], [])
    for level, part in BUSY.items():
        if level == COMPUTE or (kind == level).any():
            united = Intervals.union(start[kind <= level], end[kind <= level])
            parts[part] += united.within(windows) - busy
            busy = united.within(windows)
    united = Intervals(united.start, united.end, rows[united.row])  # the last union was of all rows
    del rows, start, end, kind  # of ten million activities they are a third of a gigabyte
    gaps = _gaps(trace, united, windows)
    for part in IDLE:
        parts[part] += int(gaps[part].sum())
    return Timeline(device, windows.length, busy, parts, gaps)


def _gaps(trace: Trace, busy: Intervals, windows: Intervals) -> pd.DataFrame:
    idle = busy.gaps(windows)
    following = np.concatenate((busy.row, [-1]))[idle.row]
    call = np.where(following >= 0, _take(trace.activities["call"], following), -1)
    known = (call >= 0) & (idle.end <= _blind_from(trace))
    asked = np.clip(_take(trace.calls["start_ns"], call), idle.start, idle.end)
    late, length = known & (asked > idle.start), idle.end - idle.start
    waited = _waited(trace, _take(trace.calls["thread"], call), idle.start, np.where(late, asked, idle.start))
    return pd.DataFrame(
        {
            "start_ns": idle.start,
            "end_ns": idle.end,
            "next": following,
            "launch": np.where(known & ~late, length, 0),
            "host": np.where(late, length - waited, 0),
            "sync": waited,
            "unexplained": np.where(known, 0, length),
            "launching": np.where(known, idle.end - asked, 0),
        },
        copy=False,
    )


def _waited(trace: Trace, thread: Any, start: Any, end: Any) -> Any:
    """How much of each [start, end) its thread sat in a synchronising call, or in the return of a copy."""
    waits = _waits(trace)
    waited = np.zeros(len(start), np.int64)
    for one in pd.unique(thread[end > start]):
        own, mine = waits[waits["thread"] == one], thread == one
        waited[mine] = Intervals.union(own["start_ns"], own["end_ns"]).inside(start[mine], end[mine])
    return waited


def _waits(trace: Trace) -> pd.DataFrame:
    """start_ns and end_ns of every wait, by thread; a copy whose own rows are unknown is none."""
    kind, unknown = trace.calls["kind"].to_numpy(), np.iinfo(np.int64).min
    call, end = trace.activities["call"].to_numpy(), trace.activities["end_ns"].to_numpy()
    mine = np.flatnonzero(np.append(kind, -1)[call] == COPYING)
    over = np.full(len(kind), unknown)
    np.maximum.at(over, call[mine], end[mine])
    rows = np.flatnonzero((kind == SYNC) | (over > unknown))
    waits = trace.calls[["thread", "start_ns", "end_ns"]].iloc[rows]
    return waits.assign(start_ns=np.maximum(waits["start_ns"], over[rows]))


def _blind_from(trace: Trace) -> int:
    """Since when the device may have been busy without a row: the first graph launch that left none."""
    lost = trace.calls["start_ns"][trace.lost & trace.calls["graph"].to_numpy()]
    return int(lost.min()) if len(lost) else int(np.iinfo(np.int64).max)


def _take(column: Any, rows: Any) -> Any:
    """Values at `rows`; where a row is -1, or there are none, a value that the caller does not use."""
    values = column.to_numpy()
    return values[rows] if len(values) else np.zeros(len(rows), np.int64)


def launched_kernels(trace: Trace, launched: Any) -> Any:
    """Mask over activities: kernels (communication too) among `launched`."""
    return launched & (trace.activities["kind"].to_numpy() <= COMMUNICATION)


def join_rate(trace: Trace, launched: Any) -> float | None:
    """Of the kernels, how many are joined to the call that launched them; None: there are no kernels."""
    calls = trace.activities["call"].to_numpy()[launched_kernels(trace, launched)]
    return float((calls >= 0).mean()) if len(calls) else None


def lost_launches(trace: Trace, called: Any) -> tuple[int, int]:
    """Among these calls, launches that left no row: of kernels, of graphs."""
    graph = trace.calls["graph"].to_numpy()[trace.lost & called & (trace.calls["kind"].to_numpy() == LAUNCH)]
    return int((~graph).sum()), int(graph.sum())
