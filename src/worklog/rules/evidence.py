"""What rules on a timeline have in common: when they cannot judge, what idle time a kernel has, where it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.context import place
from worklog.rules import Case
from worklog.rules.captures import NODES
from worklog.traces.intervals import Intervals
from worklog.traces.schema import ANNOTATION, GRAPH, OPERATOR, OTHER, Trace

PLACES = 3
MANY = 100_000
"""Calls whose place is looked up; ours: of a thousand times as many gaps, those that cost most."""


def unjoined(case: Case) -> str | None:
    """Why nothing is known about the calls that launched the device's work; None: something is."""
    own = case.trace.activities["device"].to_numpy() == case.timeline.device
    if case.trace.calls.empty:
        return "the trace holds no CUDA calls of the host; capture with them (nsys: --trace=cuda)"
    if (case.trace.activities["call"].to_numpy()[own] < 0).all():
        return "no activity is joined to the call that launched it"
    return None


def blind(case: Case) -> str | None:
    """Replays whose nodes left no rows hide what ran and what idled in them."""
    own = case.trace.activities["device"].to_numpy() == case.timeline.device
    pieces = own & (case.trace.activities["kind"].to_numpy() == GRAPH) & case.selection.launched
    graphs = case.trace.calls["graph"].to_numpy() & case.trace.lost & case.selection.called
    if not (count := int(pieces.sum()) + int(graphs.sum())):
        return None
    return f"CUDA graphs were replayed {count} times without rows for their kernels; capture with `{NODES}`"


def spared(case: Case, rows: Any) -> int:
    """ns that the window loses at most without these activities, if nothing takes their place.

    What ends a window last is a chain of device work, gaps and host work. Without the activities it loses their time
    and the idle time before them, and the host's work for them, which may have made later work late; but no more idle
    time than there is.
    """
    idle = case.timeline.span_ns - case.timeline.busy_ns
    return running(case, rows) + min(idle, idle_before(case, rows) + asking(case, rows))


def idle_before(case: Case, rows: Any) -> int:
    """ns for which the device idled until one of these activities began."""
    gaps, mask = case.timeline.gaps, np.zeros(len(case.trace.activities) + 1, bool)
    mask[rows] = True
    ended = mask[gaps["next"].to_numpy()]  # a gap that nothing ended has -1
    return int(gaps["end_ns"].to_numpy()[ended].sum() - gaps["start_ns"].to_numpy()[ended].sum())


def asking(case: Case, rows: Any) -> int:
    """ns of the host between the last call that launched, copied or waited, and the end of the call for an activity."""
    calls = case.trace.calls
    start, end, thread = (calls[name].to_numpy() for name in ("start_ns", "end_ns", "thread"))
    chosen = np.zeros(len(calls) + 1, bool)
    chosen[case.trace.activities["call"].to_numpy()[rows]] = True
    asked = np.flatnonzero(chosen[:-1])  # the last stands for -1
    spent = 0
    for one in pd.unique(thread[asked]):
        mine = asked[thread[asked] == one]
        others = np.flatnonzero((thread == one) & (calls["kind"].to_numpy() != OTHER))
        before = np.searchsorted(others, mine) - 1
        since = np.where(before >= 0, np.append(end[others], 0)[before], start[mine])
        spent += int(np.maximum(end[mine] - since, 0).sum())
    return spent


def running(case: Case, rows: Any) -> int:
    """ns of the window in which any of these activities ran."""
    start, end = (case.trace.activities[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    return Intervals.union(start, end).within(case.selection.windows[case.timeline.device])


def lengths(trace: Trace, rows: Any) -> Any:
    """ns of each of these activities; below zero counts as zero."""
    start, end = (trace.activities[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    return np.maximum(end - start, 0)


def launched_inside(trace: Trace, what: Callable[[str], bool]) -> Any:
    """Mask over activities: their call was made inside of an operator, or of a range, whose name is so.

    Not of a Python function: its name holds a path, which says little of what it does. emit_nvtx writes more behind an
    operator's name (`aten::mul, seq = 5, op_id = 7`).
    """
    names = trace.frames["name"].cat
    chosen = np.array([what(str(name).partition(",")[0]) for name in names.categories] + [False])
    frames = trace.frames[chosen[names.codes.to_numpy()]] if chosen.any() else trace.frames[:0]
    frames = frames[frames["kind"].isin((OPERATOR, ANNOTATION))]
    inside = np.zeros(len(trace.calls) + 1, bool)
    start, thread = trace.calls["start_ns"].to_numpy(), trace.calls["thread"].to_numpy()
    for one, own in frames.groupby("thread"):
        mine = np.flatnonzero(thread == one)
        around = Intervals.union(own["start_ns"], own["end_ns"])
        inside[mine] = around.inside(start[mine], start[mine] + 1) > 0
    return inside[trace.activities["call"].to_numpy()]


def places(case: Case, rows: Any, cost: Any) -> list[str]:
    """Where in the source the most costly of these activities were launched, as far as the trace tells; their names.

    `rows` are of activities, `cost` a number for each. Of very many the MANY most costly are looked up.
    """
    call = case.trace.activities["call"].to_numpy()[rows]
    return sources(case, call, cost) + names(case, rows, cost)


def sources(case: Case, calls: Any, cost: Any) -> list[str]:
    """Where the most costly of these calls (rows, -1: unknown) were made, as far as the trace tells."""
    if len(calls) > MANY:
        most = np.sort(np.argpartition(-cost, MANY)[:MANY])
        calls, cost = calls[most], cost[most]
    return place(case.trace, calls[calls >= 0], PLACES, cost[calls >= 0])


def names(case: Case, rows: Any, cost: Any) -> list[str]:
    """Full names of the most costly of these activities."""
    known = case.trace.activities["name"].cat
    codes, which = np.unique(known.codes.to_numpy()[rows], return_inverse=True)
    order = np.argsort(-np.bincount(which, cost, len(codes)), kind="stable")[:PLACES]
    return [str(known.categories[code]) for code in codes[order]]
