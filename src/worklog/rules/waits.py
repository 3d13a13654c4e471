"""Rules on a host that waits for its device, and lets it run dry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.rules import MATERIAL, Abstained, Case, Finding
from worklog.rules.captures import COPIES, PLAIN, WAITS
from worklog.rules.evidence import PLACES, blind, names, running, sources, unjoined
from worklog.traces.intervals import Intervals
from worklog.traces.schema import COMMUNICATION, COPY, COPYING, SYNC

STEPS = 3
"""Least number of steps in which something recurs; ours: of two the first may be special."""
WITHOUT = 0.1
"""Of the steps, so many may be without, and one at least; ours: after the wait of the last step nothing follows."""
REGULAR = 5
"""Without ranges: least number of waits, of which none is farther from the next than REACH times the mean."""
REACH = 3
RANGES = 50
"""Names of ranges that are tried; ours: a program names its steps, its phases and its layers."""
TO_HOST = "DtoH"


@dataclass(frozen=True)
class Drains:
    """Idle time that began while the launching thread waited in a call, and ended with what it launched after."""

    call: Any
    """Rows of the calls that waited, each once."""
    gap: Any
    """Rows of the timeline's gaps, one for each call."""


def sync_every_step(case: Case) -> Finding | Abstained | None:
    """In each step the host waits for the device (`.item()`, a copy to the host, synchronize) and so loses its lead.

    The cost is the idle time that begins while the host waits and ends with the work launched next. A step is a
    ProfilerStep, else an occurrence of any range that the program named; without either the waits must be regular.
    Gain at most: without the waits host and device work side by side, and a step takes as long as the slower of them;
    so no more than the device idles, or copies what is waited for, and no more than the host waits.
    """
    if reason := blind(case) or unjoined(case):
        return Abstained("sync_every_step", reason)
    calls, line, gaps = case.trace.calls, case.timeline, case.timeline.gaps
    waiting = case.selection.called & ((calls["kind"].to_numpy() == SYNC) | _returned_late(case, TO_HOST))
    drains = _drains(case, waiting)
    length = (gaps["end_ns"].to_numpy() - gaps["start_ns"].to_numpy())[drains.gap]
    share = case.share(int(length.sum()))
    waited = _within_calls(case, np.flatnonzero(waiting & np.isin(calls["thread"].to_numpy(), _threads(case, drains))))
    copied = np.flatnonzero(np.append(waiting, False)[case.trace.activities["call"].to_numpy()])
    gain = case.share(min(line.span_ns - line.busy_ns + running(case, copied), waited))
    if min(share, gain) < MATERIAL:
        return None
    steps = _recurrence(case, calls["start_ns"].to_numpy()[drains.call])
    if steps is None:
        if len(drains.call) >= STEPS:
            return None
        return Abstained(
            "sync_every_step",
            f"the GPU idles {share:.0%} of the time after the host waited for it, but {len(drains.call)} times are too "
            "few to call it a habit; capture more steps",
        )
    called = calls["name"].cat.categories[np.unique(calls["name"].cat.codes.to_numpy()[drains.call])]
    return Finding(
        rule="sync_every_step",
        level="coarse",
        title=f"The host waits for the GPU in every step, and the GPU then idles, {share:.0%} of the time",
        share=share,
        gain_upper_bound=gain,
        evidence={
            "device": line.device,
            "waits": len(drains.call),
            **steps,
            "idle_after_ns": int(length.sum()),
            "median_idle_after_ns": round(float(np.median(length))),
            "host_waited_ns": waited,
            "also_in_host_bound_ns": int(gaps["host"].to_numpy()[drains.gap].sum()),
        },
        where=sources(case, drains.call, length) + sorted(str(name) for name in called)[:PLACES],
        next=PLAIN if case.trace.stacks else WAITS,
    )


def blocking_copies(case: Case) -> Finding | Abstained | None:
    """Copies of pageable memory that nothing hides, and idle time in which the host sat in the return of a copy.

    Gain at most: those copies, and what the host spends in their calls, which may have made later work late, up to all
    idle time.
    """
    if reason := blind(case) or unjoined(case):
        return Abstained("blocking_copies", reason)
    act, line, gaps = case.trace.activities, case.timeline, case.timeline.gaps
    own = act["device"].to_numpy() == line.device
    copies = own & (act["kind"].to_numpy() == COPY) & case.selection.launched
    told = act["pageable"].to_numpy()[copies]
    if copies.any() and (told < 0).all():
        return Abstained("blocking_copies", "the trace does not say whether the host memory of its copies is pageable")
    pageable = copies & (act["pageable"].to_numpy() == 1)
    exposed = _exposed(case, own, pageable)
    drains = _drains(case, case.selection.called & _returned_late(case, ""))
    begun, ended = (gaps[name].to_numpy()[drains.gap] for name in ("start_ns", "end_ns"))
    back = np.minimum(case.trace.calls["end_ns"].to_numpy()[drains.call], ended) - begun
    share = case.share(exposed + int(back.sum()))
    if share < MATERIAL:
        return None
    rows = np.flatnonzero(pageable)
    ran = np.maximum((act["end_ns"].to_numpy() - act["start_ns"].to_numpy())[rows], 0)
    asked = np.concatenate((act["call"].to_numpy()[rows], drains.call))
    cost = np.concatenate((ran, back))
    blocked = _within_calls(case, np.unique(asked[asked >= 0]))
    return Finding(
        rule="blocking_copies",
        level="coarse",
        title=f"Blocking copies cost {share:.0%} of the time: the GPU does nothing else meanwhile",
        share=share,
        gain_upper_bound=case.share(exposed + min(line.span_ns - line.busy_ns, blocked)),
        evidence={
            "device": line.device,
            "pageable_copies": len(rows),
            "copies": int(copies.sum()),
            "pageable_bytes": int(np.maximum(act["bytes"].to_numpy()[rows], 0).sum()),
            "exposed_copy_ns": exposed,
            "idle_in_returns_ns": int(back.sum()),
            "host_in_their_calls_ns": blocked,
        },
        where=sources(case, asked, cost) + names(case, rows, ran),
        next=COPIES,
    )


def _exposed(case: Case, own: Any, pageable: Any) -> int:
    """ns in which one of these copies ran and no kernel."""
    if not pageable.any():
        return 0
    act, windows = case.trace.activities, case.selection.windows[case.timeline.device]
    start, end = act["start_ns"].to_numpy(), act["end_ns"].to_numpy()
    kernels = own & (act["kind"].to_numpy() <= COMMUNICATION)
    both = kernels | pageable
    united = Intervals.union(start[both], end[both]).within(windows)
    return united - Intervals.union(start[kernels], end[kernels]).within(windows)


def _returned_late(case: Case, way: str) -> Any:
    """Mask over calls: those of copies (whose names contain `way`) that came back when their last copy was over."""
    act, calls = case.trace.activities, case.trace.calls
    known = np.array([way in str(name) for name in act["name"].cat.categories] + [False])
    call = act["call"].to_numpy()
    rows = np.flatnonzero((act["kind"].to_numpy() == COPY) & (call >= 0) & known[act["name"].cat.codes.to_numpy()])
    over = np.full(len(calls), np.iinfo(np.int64).max)
    over[call[rows]] = np.iinfo(np.int64).min
    np.maximum.at(over, call[rows], act["end_ns"].to_numpy()[rows])
    return (calls["kind"].to_numpy() == COPYING) & (over <= calls["end_ns"].to_numpy())


def _drains(case: Case, waiting: Any) -> Drains:
    """Of the gaps that the host ended late, those that began while its thread was in one of these calls (mask)."""
    calls, gaps = case.trace.calls, case.timeline.gaps
    late = np.flatnonzero((gaps["host"].to_numpy() > 0) | (gaps["sync"].to_numpy() > 0))
    begun = gaps["start_ns"].to_numpy()[late]
    start, end, thread = (calls[name].to_numpy() for name in ("start_ns", "end_ns", "thread"))
    whose = thread[case.trace.activities["call"].to_numpy()[gaps["next"].to_numpy()[late]]]
    found = np.full(len(late), -1)
    for one in pd.unique(whose):
        rows, mine = np.flatnonzero(waiting & (thread == one)), whose == one
        found[mine] = np.append(rows, -1)[np.searchsorted(start[rows], begun[mine], side="right") - 1]
    drained = (found >= 0) & (np.append(end, np.iinfo(np.int64).min)[found] >= begun)
    call, first = np.unique(found[drained], return_index=True)
    return Drains(call, late[drained][first])


def _threads(case: Case, drains: Drains) -> Any:
    return np.unique(case.trace.calls["thread"].to_numpy()[drains.call])


def _within_calls(case: Case, rows: Any) -> int:
    """ns of the windows in which a thread was in one of these calls."""
    start, end = (case.trace.calls[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
    return Intervals.union(start, end).within(case.selection.windows[case.timeline.device])


def _recurrence(case: Case, times: Any) -> dict[str, Any] | None:
    """In what these times recur, as evidence; None: they do not."""
    for name, own in _ranges(case):
        windows = Intervals.apart(own["start_ns"], own["end_ns"])
        at = np.searchsorted(windows.start, times, side="right") - 1
        inside = (at >= 0) & (times < np.append(windows.end, 0)[at])
        hit = len(np.unique(at[inside]))
        if hit >= max(STEPS, len(own) - max(1, WITHOUT * len(own))):
            return {"steps": len(own), "steps_with_a_wait": hit, "step": name}
        if name == "ProfilerStep" and len(own) >= STEPS:
            return None
    if len(times) < REGULAR:
        return None
    windows = case.selection.windows[case.timeline.device]
    ordered = np.sort(windows.before(times))
    apart = np.diff(np.concatenate(([0], ordered, [windows.length])))
    return {"mean_distance_ns": round(float(apart.mean()))} if apart.max() <= REACH * apart.mean() else None


def _ranges(case: Case) -> Iterator[tuple[str, pd.DataFrame]]:
    """The ranges that occur often enough in the selection to be steps, by name: torch.profiler's steps, the longest."""
    ranges = case.trace.ranges
    called = case.trace.calls["start_ns"].to_numpy()[case.selection.called]
    begun, over = (np.searchsorted(called, ranges[name].to_numpy()) for name in ("start_ns", "end_ns"))
    ranges = ranges[over > begun]
    codes, names = ranges["name"].cat.codes.to_numpy(), ranges["name"].cat.categories
    steps = np.array([str(name).startswith("ProfilerStep#") for name in names] + [False])[codes]
    if steps.sum() >= STEPS:
        yield "ProfilerStep", ranges[steps]
    count = np.bincount(codes, minlength=len(names))
    spent = np.bincount(codes, (ranges["end_ns"] - ranges["start_ns"]).to_numpy(), len(names))
    often = [code for code in np.argsort(-spent, kind="stable") if count[code] >= STEPS]
    for code in often[:RANGES]:
        yield str(names[code]), ranges[codes == code]
