"""Rules on a host that is too slow for its device, with an allowance for what the profiler itself costs the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from worklog.rules import MATERIAL, Abstained, Case, Finding
from worklog.rules.captures import OPERATORS, PLAIN, STACKS
from worklog.rules.evidence import asking, blind, idle_before, places, unjoined
from worklog.traces.schema import COMMUNICATION, OPERATOR, PYTHON

CALL_NS = 3500
"""What a traced CUDA call costs the host at most. Measured: one decoding step of problems/float8_weight_only takes
1.97 ms by CUDA events (bf16_eager of the run 20261120-h200-baseline-b77d34) and 3.35 ms with 392 calls under nsys
2025.3 (20261120-h200-profile_nsys-7369c9). torch.profiler is given the same allowance, without a measurement."""
FRAME_NS = 300
"""What a recorded operator or Python function costs: 170 to 290 ns, measured with torch 2.13 (with_stack or not,
record_shapes or not; 500 small modules on one core)."""
FEW = 10
"""Launches that say nothing yet; ours: the first ones of a program load modules."""


def host_bound(case: Case) -> Finding | Abstained | None:
    """The device waits because the host has not yet asked for its next work.

    Gain at most: a host that asks in time leaves no time in launches either, so the accounting's host and launch.
    Abstains if what is left without the profiler's own cost (CALL_NS, FRAME_NS) would not be material.
    """
    if reason := blind(case) or unjoined(case):
        return Abstained("host_bound", reason)
    gaps, line = case.timeline.gaps, case.timeline
    share = case.share(line.accounting_ns["host"])
    if share < MATERIAL:
        return None
    late = np.flatnonzero(gaps["host"].to_numpy())
    cost = gaps["host"].to_numpy()[late]
    profiler = int(np.minimum(_profiled(case, late), cost).sum())
    if (line.accounting_ns["host"] - profiler) < MATERIAL * (line.span_ns - profiler):
        return Abstained("host_bound", _artefact(case, f"the GPU waits for the host for {share:.0%} of the time"))
    once = 2 * int(cost.max()) > line.accounting_ns["host"]
    return Finding(
        rule="host_bound",
        level="coarse",
        title=f"The GPU waits for the host for {share:.0%} of the time: "
        + ("most of it once, in one gap" if once else "work is asked for too late"),
        share=share,
        gain_upper_bound=case.share(line.accounting_ns["host"] + line.accounting_ns["launch"]),
        evidence={
            "device": line.device,
            "host_ns": line.accounting_ns["host"],
            "of_it_the_profiler_at_most_ns": profiler,
            "without_the_profiler_at_least_share": (line.accounting_ns["host"] - profiler) / (line.span_ns - profiler),
            "gaps": len(late),
            "median_gap_ns": round(float(np.median(cost))),
            "largest_gap_ns": int(cost.max()),
            "host_slowed_by_recorded_stacks": case.trace.stacks,
        },
        where=places(case, gaps["next"].to_numpy()[late], cost),
        next=PLAIN if case.trace.stacks else STACKS,
    )


def launch_bound(case: Case) -> Finding | Abstained | None:
    """The device waits while kernels are being launched that run shorter than the call that launches them.

    This time is within the accounting's `launch`, and within `host` where the call began too late: what it shares with
    host_bound stands in the evidence. Gain at most: the idle time before these kernels and the host's work for them
    (evidence.asking), up to all idle time. Abstains if CALL_NS for each launch would leave nothing material.
    """
    if reason := blind(case) or unjoined(case):
        return Abstained("launch_bound", reason)
    act, calls, line = case.trace.activities, case.trace.calls, case.timeline
    call = act["call"].to_numpy()
    kernel = (act["kind"].to_numpy() <= COMMUNICATION) & (call >= 0) & (act["device"].to_numpy() == line.device)
    kernel &= case.selection.launched & ~calls["graph"].to_numpy()[call]
    ran = act["end_ns"].to_numpy() - act["start_ns"].to_numpy()
    call_ns = (calls["end_ns"].to_numpy() - calls["start_ns"].to_numpy())[call]
    small = kernel & (ran < call_ns)
    before = np.flatnonzero(np.append(small, False)[line.gaps["next"].to_numpy()])  # a gap that nothing ended has -1
    launching = line.gaps["launching"].to_numpy()[before]
    cost = int(launching.sum())
    if int(small.sum()) < FEW or (share := case.share(cost)) < MATERIAL:
        return None
    profiler = int(np.minimum(launching, CALL_NS).sum())
    if cost - profiler < MATERIAL * (line.span_ns - profiler):
        return Abstained("launch_bound", _artefact(case, f"the GPU idles {share:.0%} of the time in launches"))
    chosen = np.flatnonzero(small)
    return Finding(
        rule="launch_bound",
        level="coarse",
        title=f"The GPU idles {share:.0%} of the time in launches of kernels that run shorter than their launch call",
        share=share,
        gain_upper_bound=case.share(min(line.span_ns - line.busy_ns, idle_before(case, chosen) + asking(case, chosen))),
        evidence={
            "device": line.device,
            "waiting_during_launch_ns": cost,
            "of_it_the_profiler_at_most_ns": profiler,
            "without_the_profiler_at_least_share": (cost - profiler) / (line.span_ns - profiler),
            "also_in_host_bound_ns": int(launching[line.gaps["host"].to_numpy()[before] > 0].sum()),
            "small_kernels": int(small.sum()),
            "kernels_launched_one_by_one": int(kernel.sum()),
            "median_small_kernel_ns": round(float(np.median(ran[small]))),
            "median_launch_call_ns": round(float(np.median(call_ns[small]))),
        },
        where=places(case, line.gaps["next"].to_numpy()[before], launching),
        next=PLAIN if (case.trace.frames["kind"] == OPERATOR).any() else OPERATORS,
    )


def _profiled(case: Case, late: Any) -> Any:
    """For each of these gaps what recording cost the thread that ended it, since it ended the one before.

    All of that may have made it late, also what was recorded while the device still had work. Of a call that launches a
    graph it may be all: tracing the nodes inside slows the launch of each.
    """
    calls, frames, gaps = case.trace.calls, case.trace.frames, case.timeline.gaps
    windows = case.selection.windows[case.timeline.device]
    call = case.trace.activities["call"].to_numpy()[gaps["next"].to_numpy()[late]]
    thread, asked = calls["thread"].to_numpy()[call], calls["start_ns"].to_numpy()[call]
    since = windows.start[np.searchsorted(windows.start, gaps["start_ns"].to_numpy()[late], side="right") - 1]
    graphs = calls[calls["graph"].to_numpy()]
    longer = np.maximum((graphs["end_ns"] - graphs["start_ns"]).to_numpy() - CALL_NS, 0)
    spent = np.zeros(len(late), np.int64)
    for one in pd.unique(thread):
        mine = thread == one
        until = np.maximum.accumulate(asked[mine])
        after = np.minimum(np.maximum(np.append(since[mine][:1], until[:-1]), since[mine]), until)
        for table, cost in ((calls, CALL_NS), (frames, FRAME_NS), (graphs, longer)):
            spent[mine] += _begun(table, one, cost, after, until)
    return spent


def _begun(table: pd.DataFrame, thread: int, cost: Any, after: Any, until: Any) -> Any:
    """The cost of those rows of a thread that begin in each (after, until]; `cost`: of each row, or of any."""
    own, start = table["thread"].to_numpy() == thread, table["start_ns"].to_numpy()
    if not own.all():
        start, cost = start[own], cost if np.isscalar(cost) else cost[own]
    if not (start[1:] >= start[:-1]).all():
        order = np.argsort(start, kind="stable")
        start, cost = start[order], cost if np.isscalar(cost) else cost[order]
    first, last = np.searchsorted(start, after, side="right"), np.searchsorted(start, until, side="right")
    if np.isscalar(cost):
        return (last - first) * cost
    total = np.append(0, np.cumsum(cost))
    return total[last] - total[first]


def _artefact(case: Case, seen: str) -> str:
    recorded = "the calls and Python functions" if (case.trace.frames["kind"] == PYTHON).any() else "the calls"
    return (
        f"{seen}, but recording {recorded} may have cost the host as much; compare the program's own time with and "
        "without the profiler"
    )
