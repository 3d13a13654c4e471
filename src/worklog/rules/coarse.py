"""Rules on a timeline. Each says how much of a device's span its cause costs; below MATERIAL it is not worth a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from worklog.rules import Abstained, Case, Finding
from worklog.traces.schema import COMMUNICATION, COPY, GRAPH

MATERIAL = 0.05
"""A finding's least share of the span; ours: one in twenty is above the spread of repeated runs."""
PLACES = 3
STACKS = "nsys profile --trace=cuda,nvtx,osrt --python-backtrace=cuda --sample=none -o host python PROGRAM"
PLAIN = "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none -o launches python PROGRAM"
COPIES = "nsys profile --trace=cuda,nvtx --python-backtrace=cuda --cuda-memory-usage=true -o copies python PROGRAM"
NODES = "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node -o nodes python PROGRAM"


def host_bound(case: Case) -> Finding | Abstained | None:
    """The device waits because the host has not yet asked for its next work."""
    if reason := _blind(case) or _unjoined(case):
        return Abstained("host_bound", reason)
    gaps, line = case.timeline.gaps, case.timeline
    share = _share(line.accounting_ns["host"], line.span_ns)
    if share < MATERIAL:
        return None
    late = gaps[gaps["host"] > 0]
    evidence = {
        "device": line.device,
        "host_ns": line.accounting_ns["host"],
        "gaps": len(late),
        "median_gap_ns": round(float(late["host"].median())),
        "host_slowed_by_recorded_stacks": case.trace.stacks,
    }
    return Finding(
        rule="host_bound",
        level="coarse",
        title=f"The GPU waits for the host for {share:.0%} of the time: work is asked for too late",
        share=share,
        gain_upper_bound=share,
        evidence=evidence,
        where=_names(case, late, "host"),
        next=PLAIN if case.trace.stacks else STACKS,
    )


def launch_bound(case: Case) -> Finding | Abstained | None:
    """The device waits while kernels are being launched that run shorter than the call that launches them.

    This time is within `launch`, and within `host` where the call began too late: the findings overlap.
    """
    if reason := _blind(case) or _unjoined(case):
        return Abstained("launch_bound", reason)
    act, calls, line = case.trace.activities, case.trace.calls, case.timeline
    call = act["call"].to_numpy()
    kernel = (act["kind"].to_numpy() <= COMMUNICATION) & (call >= 0) & (act["device"].to_numpy() == line.device)
    kernel &= case.selection.launched & ~calls["graph"].to_numpy()[call]
    ran = (act["end_ns"] - act["start_ns"]).to_numpy()
    asking = (calls["end_ns"] - calls["start_ns"]).to_numpy()[call]
    small = kernel & (ran < asking)
    following = line.gaps["next"].to_numpy()
    before = line.gaps[(following >= 0) & small[following]]
    cost = int(before["launching"].sum())
    share = _share(cost, line.span_ns)
    if share < MATERIAL:
        return None
    evidence = {
        "device": line.device,
        "waiting_during_launch_ns": cost,
        "small_kernels": int(small.sum()),
        "kernels_launched_one_by_one": int(kernel.sum()),
        "median_small_kernel_ns": round(float(np.median(ran[small]))),
        "median_launch_call_ns": round(float(np.median(asking[small]))),
    }
    return Finding(
        rule="launch_bound",
        level="coarse",
        title=f"The GPU idles {share:.0%} of the time in launches of kernels that run shorter than their launch call",
        share=share,
        gain_upper_bound=share,
        evidence=evidence,
        where=_names(case, before, "launching"),
        next=PLAIN,
    )


def blocking_copies(case: Case) -> Finding | Abstained | None:
    """Time in copies of pageable memory that nothing hides, and idle time in which the host sat in a waiting call."""
    if reason := _blind(case) or _unjoined(case):
        return Abstained("blocking_copies", reason)
    act, line = case.trace.activities, case.timeline
    copies = act[(act["device"] == line.device) & (act["kind"] == COPY) & case.selection.launched]
    if len(copies) and (copies["pageable"] < 0).all():
        return Abstained("blocking_copies", "the trace does not say whether the host memory of its copies is pageable")
    pageable = copies[copies["pageable"] == 1]
    exposed = min(int((pageable["end_ns"] - pageable["start_ns"]).clip(lower=0).sum()), line.accounting_ns["copy"])
    cost = exposed + line.accounting_ns["sync"]
    share = _share(cost, line.span_ns)
    if share < MATERIAL:
        return None
    evidence = {
        "device": line.device,
        "pageable_copies": len(pageable),
        "copies": len(copies),
        "exposed_copy_at_most_ns": exposed,
        "sync_ns": line.accounting_ns["sync"],
    }
    return Finding(
        rule="blocking_copies",
        level="coarse",
        title=f"Blocking copies and waiting calls cost up to {share:.0%} of the time",
        share=share,
        gain_upper_bound=share,
        evidence=evidence,
        where=list(dict.fromkeys([*pageable["name"].astype(str), *_names(case, line.gaps, "sync")]))[:PLACES],
        next=COPIES,
    )


RULES: dict[str, Callable[[Case], Finding | Abstained | None]] = {
    "host_bound": host_bound,
    "launch_bound": launch_bound,
    "blocking_copies": blocking_copies,
}


def _share(part: int, span: int) -> float:
    return part / span if span else 0.0


def _unjoined(case: Case) -> str | None:
    own = case.trace.activities[case.trace.activities["device"] == case.timeline.device]
    if case.trace.calls.empty:
        return "the trace holds no CUDA calls of the host; capture with them (nsys: --trace=cuda)"
    if (own["call"] < 0).all():
        return "no activity is joined to the call that launched it"
    return None


def _blind(case: Case) -> str | None:
    """Replays whose nodes left no rows hide what ran and what idled in them."""
    own = case.trace.activities["device"] == case.timeline.device
    pieces = int((own & (case.trace.activities["kind"] == GRAPH) & case.selection.launched).sum())
    graphs = case.trace.calls["graph"].to_numpy() & case.trace.lost & case.selection.called
    if not (count := pieces + int(graphs.sum())):
        return None
    return f"CUDA graphs were replayed {count} times without rows for their kernels; capture with `{NODES}`"


def _names(case: Case, gaps: pd.DataFrame, part: str) -> list[str]:
    """The activities that most of this idle time came before."""
    after: Any = gaps[(gaps["next"] >= 0) & (gaps[part] > 0)]
    names = case.trace.activities["name"].cat
    codes = names.codes.to_numpy()[after["next"].to_numpy()]
    cost = after[part].groupby(codes).sum().sort_values(ascending=False, kind="stable")
    return [str(names.categories[code]) for code in cost.index[:PLACES]]
