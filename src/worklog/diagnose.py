"""`worklog diagnose`: a file's accounting, kernels and findings, as the JSON that the verb prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worklog.analysis import collectives, kernels, operators, queue, ranks, timeline
from worklog.problem import ProblemError
from worklog.rules import Abstained, Case, Finding, communication
from worklog.rules.coarse import RULES
from worklog.rules.memory import peak_memory
from worklog.traces import files, kineto, memory, ncu, nsys
from worklog.traces.schema import GRAPH, Selection, Trace

TOOLS = {"nsys": "nsys", "kineto": "torch.profiler", "memory": "torch.cuda.memory", "ncu": "ncu"}
DURATION = "gpu__time_duration.sum"


@dataclass(frozen=True)
class Examined:
    """What one file says, and what others need of it if it is one of several ranks."""

    diagnosis: dict[str, Any]
    rank: int | None
    members: Sequence[collectives.Rank] = ()
    """Of a timeline, each of its devices; `rank` zero where the trace does not say it."""


def diagnose(file: Path, range_name: str | None = None) -> dict[str, Any]:
    """Of any file that worklog.traces reads; of a timeline the range(s) `range_name` (schema.Trace.select).

    Keys: source {tool, tool_version, file, sha256}; devices [{device, span_ns, accounting_ns (timeline.PARTS, whose
    sum is span_ns), busy_ns, kernel_count, queue (analysis.queue)}]; kernels [{name, count, total_ns, share_of_span}]
    of all devices, the share being of the sum of their spans; findings, most costly first; coverage; abstained [{rule,
    reason}]. An ncu report has no timeline: devices is [] and share_of_span None. A memory snapshot has `memory`
    (traces.memory, without its curve) beside, a timeline of several devices whose kernels communicate `collectives`
    (analysis.ranks.summary). A timeline without work of a GPU has `operators` (analysis.operators) beside.
    Raises ProblemError for a file that no reader takes, or a range that is not there.
    """
    one = examine(file, range_name)
    talking = [member for member in one.members if len(member.collectives)]
    if len(talking) == 1:
        return with_rules(one.diagnosis, communication.alone(talking[0]))
    if not talking:
        return one.diagnosis
    together = ranks.together(talking)
    said = [rule(together) for rule in communication.RULES.values()]
    return {**with_rules(one.diagnosis, said), "collectives": ranks.summary(together)}


def examine(file: Path, range_name: str | None = None) -> Examined:
    """As `diagnose`, but without a word about communication between devices."""
    kind = files.kind(file)
    if range_name is not None and kind not in ("nsys", "kineto"):
        raise ProblemError(f"{file}: only timelines (nsys, torch.profiler) have ranges; leave --range out.")
    found: dict[str, Any]
    members: list[collectives.Rank] = []
    rank = None
    if kind == "memory":
        found = _snapshot(memory.read(file))
    elif kind == "ncu":
        found = {**_without_timeline("an ncu report"), "kernels": _counted(ncu.launches(file, [DURATION]))}
    else:
        trace = nsys.tables(file) if kind == "nsys" else kineto.tables(file)
        found, members = _timelines(trace, range_name)
        rank = trace.rank
    version, sha256 = found.pop("tool_version", None), files.sha256(file)
    source = {"tool": TOOLS[kind], "tool_version": version, "file": str(file), "sha256": sha256}
    return Examined({"source": source, **found}, rank, members)


def with_rules(diagnosis: dict[str, Any], said: Sequence[Finding | Abstained | None]) -> dict[str, Any]:
    """With what these rules say too; findings most costly first."""
    found = [asdict(one) for one in said if isinstance(one, Finding)]
    reasons = [asdict(one) for one in said if isinstance(one, Abstained)]
    return {
        **diagnosis,
        "findings": sorted([*diagnosis["findings"], *found], key=lambda finding: -finding["share"]),
        "abstained": [*diagnosis["abstained"], *reasons],
    }


def _timelines(trace: Trace, range_name: str | None) -> tuple[dict[str, Any], list[collectives.Rank]]:
    chosen = trace.select(range_name)
    lines = [timeline.account(trace, device, window) for device, window in chosen.windows.items()]
    findings, abstained = _rules(trace, chosen, lines)
    span = sum(line.span_ns for line in lines)
    of_device = trace.activities["device"].to_numpy()[timeline.launched_kernels(trace, chosen.launched)]
    found = {
        "tool_version": trace.tool_version,
        "devices": [
            {
                "device": line.device,
                "span_ns": line.span_ns,
                "accounting_ns": line.accounting_ns,
                "busy_ns": line.busy_ns,
                "kernel_count": int((of_device == line.device).sum()),
                "queue": asdict(queue.queue(trace, line.device, chosen.launched)),
            }
            for line in lines
        ],
        "kernels": [
            {"name": name, "count": count, "total_ns": ns, "share_of_span": ns / span if span else None}
            for name, count, ns in kernels.by_name(trace, chosen.launched)
        ],
        "findings": [asdict(finding) for finding in sorted(findings, key=lambda finding: -finding.share)],
        "coverage": _coverage(trace, chosen, lines),
        "abstained": [asdict(one) for one in dict.fromkeys(abstained)],
    }
    if trace.activities.empty and (own := operators.by_name(trace)):
        found["operators"] = own
    whole = lines if range_name is None else [timeline.account(trace, *one) for one in trace.select().windows.items()]
    return found, collectives.of_trace(trace, chosen, lines, whole)


def _rules(
    trace: Trace, chosen: Selection, lines: Sequence[timeline.Timeline]
) -> tuple[list[Finding], list[Abstained]]:
    if not lines:
        if trace.lost.any():
            return [], [
                Abstained(rule, "launches are in the trace, but no row of what they launched") for rule in RULES
            ]
        return [], [Abstained(rule, "the trace holds no work of a GPU") for rule in RULES]
    said = [rule(Case(trace, chosen, line)) for line in lines for rule in RULES.values()]
    return [one for one in said if isinstance(one, Finding)], [one for one in said if isinstance(one, Abstained)]


def _coverage(trace: Trace, chosen: Selection, lines: Sequence[timeline.Timeline]) -> dict[str, Any]:
    """What the numbers rest on: fractions, and counts of what is missing or odd."""
    act = trace.activities
    start, end, kind = (act[name].to_numpy() for name in ("start_ns", "end_ns", "kind"))
    lost, graphs = timeline.lost_launches(trace, chosen.called)
    span = sum(line.span_ns for line in lines)
    unexplained = sum(line.accounting_ns["unexplained"] for line in lines)
    return {
        "kernels_joined_to_launch": timeline.join_rate(trace, chosen.launched),
        "time_explained": 1 - unexplained / span if span else None,
        "launches_without_activity": lost,
        "graph_replays_without_activity": graphs,
        "graph_replays_as_one_piece": int(((kind == GRAPH) & chosen.launched).sum()),
        "negative_durations": int(((end < start) & chosen.launched).sum()),
        "activities_before_their_launch": int(((trace.called_at() > start) & chosen.launched).sum()),
        "notes": list(trace.notes),
    }


def _snapshot(taken: dict[str, Any]) -> dict[str, Any]:
    found, said = _without_timeline("a memory snapshot"), peak_memory(taken)
    if said is not None:
        found["findings" if isinstance(said, Finding) else "abstained"].append(asdict(said))
    return {**found, "memory": {name: value for name, value in taken.items() if name != "timeline"}}


def _without_timeline(what: str) -> dict[str, Any]:
    return {
        "devices": [],
        "kernels": [],
        "findings": [],
        "coverage": {},
        "abstained": [{"rule": rule, "reason": f"{what} has no timeline"} for rule in RULES],
    }


def _counted(launches: Sequence[ncu.Launch]) -> list[dict[str, Any]]:
    spent: dict[str, list[float]] = {}
    for launch in launches:
        ns = float(launch.metrics[DURATION]) * ncu.UNITS["ns"][launch.units[DURATION]]
        spent.setdefault(launch.demangled, []).append(ns)
    rows = [
        {"name": name, "count": len(ns), "total_ns": round(sum(ns)), "share_of_span": None}
        for name, ns in spent.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_ns"], row["name"]))
