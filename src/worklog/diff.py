"""`worklog diff`: before -> after of two timelines as terms that add up, as the JSON that the verb prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worklog.analysis.diff import Difference
from worklog.analysis.diff import diff as difference
from worklog.analysis.ledger import ledger
from worklog.analysis.modules import of_calls
from worklog.analysis.timeline import lost_launches
from worklog.problem import ProblemError
from worklog.traces import hardware, timeline
from worklog.traces.schema import GRAPH, Selection, Trace

STEP = "ProfilerStep"
RANGES = 4
"""Named at most."""


def diff(before: Path, after: Path, range_name: str | None = None, range_after: str | None = None) -> dict[str, Any]:
    """Of two timelines of nsys or torch.profiler: one occurrence of a range in each, or the whole traces.

    `range_after` is the range's name in the second trace where it has another. Without a name the steps of
    torch.profiler are the occurrences if both traces have some. A range that occurs several times counts with its mean
    (analysis.diff), and its occurrences give the spread.

    Keys: before, after {file, tool, tool_version, gpu, range, occurrences}; devices [{before_device, after_device,
    before_ns, after_ns, delta_ns, spread_ns, within_noise, terms}], the fields of analysis.diff.Difference and Term;
    device, before_ns, after_ns, delta_ns, spread_ns, within_noise, terms: those of the device whose window is longest,
    for this is what the wall time waits for; warnings, sentences; abstained [{terms, reason}]. Terms of each device
    add up to its delta_ns.
    Raises ProblemError for a file without a timeline or without work of a GPU, and for a range that is not there.
    """
    traces = [timeline.load(before, geometry=True), timeline.load(after, geometry=True)]
    if range_name is None and all(_has_steps(trace) for trace in traces):
        range_name = STEP
    old, new = _Side.of(traces[0], range_name), _Side.of(traces[1], range_after or range_name)
    pairs, left_out = _pairs(old, new)
    reason = _incomparable(old, new)
    devices = [
        {"before_device": one, "after_device": two, **asdict(_difference(old, new, one, two, reason is None))}
        for one, two in pairs
    ]
    longest = max(devices, key=lambda device: max(device["before_ns"], device["after_ns"]))
    return {
        "before": old.describe(longest["before_device"]),
        "after": new.describe(longest["after_device"]),
        "device": longest["after_device"],
        **{key: value for key, value in longest.items() if not key.endswith("_device")},
        "devices": devices,
        "warnings": left_out + _warnings(old, new),
        "abstained": [{"terms": "kernels, copies", "reason": reason}] if reason else [],
    }


@dataclass(frozen=True)
class _Side:
    trace: Trace
    range_name: str | None
    selection: Selection
    gpus: Mapping[int, str]

    @classmethod
    def of(cls, trace: Trace, range_name: str | None) -> _Side:
        selection = trace.select(range_name)
        if not selection.windows:
            why = "launches, but no row of what they launched" if trace.lost.any() else "no work of a GPU"
            raise ProblemError(f"{trace.file}: holds {why}; there is nothing to compare.")
        return cls(trace, range_name, selection, hardware.gpus(trace.file))

    def describe(self, device: int) -> dict[str, Any]:
        return {
            "file": str(self.trace.file),
            "tool": self.trace.tool,
            "tool_version": self.trace.tool_version,
            "gpu": self.gpus.get(device),
            "range": self.range_name,
            "occurrences": int((self.selection.spans["device"] == device).sum()),
        }

    @property
    def in_one_piece(self) -> bool:
        return bool((self.trace.activities["kind"].to_numpy()[self.selection.launched] == GRAPH).any())

    @property
    def replays_lost(self) -> int:
        return lost_launches(self.trace, self.selection.called)[1]


def _difference(before: _Side, after: _Side, one: int, two: int, apart: bool) -> Difference:
    modules = [of_calls(side.trace) if apart else None for side in (before, after)]
    return difference(
        ledger(before.trace, before.selection, one, modules[0], apart),
        ledger(after.trace, after.selection, two, modules[1], apart),
        spelled_alike=before.trace.tool == after.trace.tool,
    )


def _both(before: _Side, after: _Side) -> str:
    """What could be given with --range."""
    one, two = ({str(name) for name in side.trace.ranges["name"].unique()} for side in (before, after))
    common = sorted(name for name in one & two if "::" not in name)[:RANGES]  # operators, as emit_nvtx names them
    return f" of both with --range: {', '.join(common)}" if common else " of one with --range (and --range-after)"


def _has_steps(trace: Trace) -> bool:
    ranges = trace.ranges
    if not any(str(name).startswith(f"{STEP}#") for name in ranges["name"].cat.categories):
        return False
    try:
        return bool(trace.select(STEP).windows)
    except ProblemError:
        return False


def _pairs(before: _Side, after: _Side) -> tuple[list[tuple[int, int]], list[str]]:
    """Devices by number; as many of other numbers in the order of these; what has no counterpart is named."""
    one, two = sorted(before.selection.windows), sorted(after.selection.windows)
    if len(one) == len(two):
        return list(zip(one, two, strict=True)), []
    if not (both := sorted({*one} & {*two})):
        raise ProblemError(
            f"{before.trace.file} has GPUs {one} and {after.trace.file} GPUs {two}: "
            "which are to be compared is unclear."
        )
    alone = [
        f"GPU {device} is in the trace {side} alone"
        for side, own, other in (("before", one, two), ("after", two, one))
        for device in own
        if device not in other
    ]
    return [(device, device) for device in both], [f"{', '.join(alone)}: it is left out."]


def _incomparable(before: _Side, after: _Side) -> str | None:
    """Why what ran cannot be told apart alike on both sides."""
    node = "capture both with `nsys profile --cuda-graph-trace=node`"
    for word, side in (("before", before), ("after", after)):
        if count := side.replays_lost:
            return f"{count} replays of CUDA graphs {word} left no row of GPU activity; {node}"
    if before.in_one_piece != after.in_one_piece:
        word, other = ("before", "after") if before.in_one_piece else ("after", "before")
        return f"replays of CUDA graphs {word} were traced as one piece, {other} kernels one by one; {node}"
    return None


def _warnings(before: _Side, after: _Side) -> list[str]:
    """Why the difference may be of something else than the program."""
    found = []
    one, two = (" and ".join(sorted({*side.gpus.values()})) for side in (before, after))
    if one and two and one != two:
        found.append(f"Before ran on {one}, after on {two}: the difference is one of machines too.")
    if before.trace.tool != after.trace.tool:
        found.append(
            f"Before was traced by {before.trace.tool}, after by {after.trace.tool}: each slows the host in its own "
            "way, so idle time may differ for that reason alone; and spells kernels in its own way, so they go by "
            "the words of their names."
        )
    if before.trace.stacks != after.trace.stacks:
        word = "before" if before.trace.stacks else "after"
        found.append(
            f"Stacks were recorded {word} alone, which slows the host there: idle time may differ for it alone."
        )
    for word, side in (("before", before), ("after", after)):
        if count := lost_launches(side.trace, side.selection.called)[0]:
            found.append(f"{count} launches of kernels {word} have no row of GPU activity.")
    if before.range_name is None or after.range_name is None:
        found.append(
            f"Whole traces are compared: if they hold other numbers of steps, name a range{_both(before, after)}."
        )
    return found
