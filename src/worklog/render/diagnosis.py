"""A diagnosis as text in a terminal: where the time went, on which kernels, what to do next, what is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worklog.render import collectives
from worklog.render.terminal import clean, microseconds, size
from worklog.traces.activity import short_name

PARTS = {
    "compute": ("█", "green", "kernels"),
    "communication": ("▓", "blue", "kernels of collectives, beside no other kernel"),
    "waiting": ("w", "cyan", "kernels of collectives that wait for another rank, beside no other kernel"),
    "copy": ("▒", "yellow", "copies, beside no kernel"),
    "memset": ("░", "yellow", "memsets, beside nothing else"),
    "launch": ("l", "magenta", "idle, work on its way: the call had begun when the gap did"),
    "host": ("h", "red", "idle, the host had not asked for the next work"),
    "sync": ("s", "bright_red", "idle, the host still waited for work that was over"),
    "unexplained": ("?", "dim", "the trace cannot tell"),
}
KERNELS = 8
BLOCKS = 5
NAMED = 4
"""Rules that cannot judge for one reason and are named."""
UNITS: dict[str, Callable[[Any], str]] = {
    "_ns": lambda ns: microseconds(ns / 1e3),
    "_us": microseconds,
    "_bytes": size,
    "_share": lambda share: f"{share:.0%}",
}
MISSING = {
    "launches_without_activity": "launches of kernels have no row of GPU activity",
    "graph_replays_without_activity": "replays of CUDA graphs have no row of GPU activity: later gaps are unexplained",
    "graph_replays_as_one_piece": "replays of CUDA graphs were traced as one piece: their time is unexplained",
    "negative_durations": "activities end before they begin, and count no time",
    "activities_before_their_launch": "activities begin before the call that launched them: the clocks do not agree",
}


def report(found: dict[str, Any], width: int = 120) -> Group:
    """What worklog.diagnose.diagnose returns."""
    source = found["source"]
    version = f" {source['tool_version']}" if source["tool_version"] else ""
    parts: list[RenderableType] = [
        Text.assemble((clean(source["file"]), "bold"), f": {source['tool']}{clean(version)}")
    ]
    for device in found["devices"]:
        parts += [Text(), *_device(device, width)]
    if "memory" in found:
        parts += [Text(), _memory(found["memory"])]
    if found["kernels"]:
        parts += [Text(), _kernels(found["kernels"])]
    if "operators" in found:
        parts += [Text(), _operators(found["operators"])]
    if "collectives" in found:
        parts += [Text(), collectives.table(found["collectives"])]
    names = {kernel["name"] for kernel in found["kernels"]}
    for finding in found["findings"]:
        parts += [Text(), *explained(finding, names)]
    parts += [Text(), *_unknown(found)]
    return Group(*parts)


def bar(accounting: dict[str, int], width: int) -> Text:
    """One cell for each `width`-th of the span; a part that is not nothing keeps its cells by largest remainder."""
    span = sum(accounting.values())
    line = Text()
    if not span:
        return line
    cells = {part: ns * width // span for part, ns in accounting.items()}
    left = width - sum(cells.values())
    for part in sorted(accounting, key=lambda part: -(accounting[part] * width % span))[:left]:
        cells[part] += 1
    for part, (letter, colour, _) in PARTS.items():
        line.append(letter * cells.get(part, 0), style=colour)
    return line


def _device(device: dict[str, Any], width: int) -> list[RenderableType]:
    span = device["span_ns"]
    table = Table.grid(padding=(0, 2))
    sides: tuple[Literal["left", "right"], ...] = ("left", "left", "right", "right", "left")
    for side in sides:
        table.add_column(justify=side)
    for part, (letter, colour, words) in PARTS.items():
        if ns := device["accounting_ns"].get(part):
            table.add_row(Text(letter, style=colour), part, microseconds(ns / 1e3), f"{ns / span:.1%}", words)
    busy = device["busy_ns"] / span if span else 0.0
    heading = f"GPU {device['device']}: {microseconds(span / 1e3)}, busy {busy:.1%}, {device['kernel_count']} kernels"
    return [
        Text(heading, style="bold"),
        bar(device["accounting_ns"], min(width, 100)),
        table,
        *_queue(device["queue"]),
    ]


def _queue(queue: dict[str, Any]) -> list[Text]:
    """How long kernels waited beyond their launch call and their stream's other work."""
    said = {"launched": "kernels began", "in_graphs": "later kernels of CUDA graphs began"}
    return [
        Text(
            f"{said[which]} {microseconds(waits['median_ns'] / 1e3)} after launch call and stream let them "
            f"(median of {waits['kernels']}; p90 {microseconds(waits['p90_ns'] / 1e3)}; "
            f"sum {microseconds(waits['sum_ns'] / 1e3)})",
            style="dim",
        )
        for which, waits in queue.items()
        if which in said and waits["kernels"]
    ]


def _kernels(kernels: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", overflow="fold")
    for name in ("count", "time", "of span"):
        table.add_column(name, justify="right", no_wrap=True)
    for kernel in kernels[:KERNELS]:
        share = kernel["share_of_span"]
        table.add_row(
            Text(clean(short_name(kernel["name"]))),
            str(kernel["count"]),
            microseconds(kernel["total_ns"] / 1e3),
            "-" if share is None else f"{share:.1%}",
        )
    if len(kernels) > KERNELS:
        rest = kernels[KERNELS:]
        ns, count = sum(k["total_ns"] for k in rest), sum(k["count"] for k in rest)
        table.add_row(Text(f"{len(rest)} others", style="dim"), str(count), microseconds(ns / 1e3), "")
    return table


def _operators(operators: list[dict[str, Any]]) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operator", overflow="fold")
    for name in ("count", "own time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in operators[:KERNELS]:
        table.add_row(Text(clean(row["name"])), str(row["count"]), microseconds(row["self_cpu_ns"] / 1e3))
    spent = sum(row["self_cpu_ns"] for row in operators)
    heading = f"CPU alone, no work of a GPU: {microseconds(spent / 1e3)} in {len(operators)} operators"
    return Group(Text(heading, style="bold"), table)


def explained(finding: dict[str, Any], kernels: set[str]) -> list[RenderableType]:
    """`kernels`: those names among a finding's places that are to be shortened."""
    evidence = [_evidence(name, value) for name, value in finding["evidence"].items() if value is not False]
    lines = [
        Text.assemble((clean(finding["title"]), "bold red"), f" (gain at most {finding['gain_upper_bound']:.0%})"),
        Text("  " + ", ".join(evidence)),
    ]
    where = dict.fromkeys(clean(short_name(name) if name in kernels else name) for name in finding["where"])
    lines += [Text("  where: " + "; ".join(where))] * bool(where)
    lines.append(Text("  next: " + finding["next"], style="cyan"))
    return list(lines)


def _evidence(name: str, value: Any) -> str:
    """A key's end gives its unit."""
    if value is True:
        return name.replace("_", " ")
    said = clean(str(value))
    for end, words in UNITS.items():
        if name.endswith(end):
            name, said = name.removesuffix(end), words(value)
    return f"{name.replace('_', ' ')} {said}"


def _memory(memory: dict[str, Any]) -> Group:
    lines = [
        Text(
            f"GPU {memory['device']}: at most {size(memory['peak_bytes'])} allocated, {size(memory['baseline_bytes'])} "
            "of it before the history began; at the peak:"
        )
    ]
    for block in memory["largest"][:BLOCKS]:
        frame = clean(block["frames"][0]) if block["frames"] else "(no stack)"
        lines.append(Text(f"  {size(block['bytes'])} in {block['count']} blocks: {frame}"))
    return Group(*lines)


def _unknown(found: dict[str, Any]) -> list[RenderableType]:
    """The join rate, what is missing, and the rules that could not judge."""
    coverage, lines = found["coverage"], []
    joined, explained = coverage.get("kernels_joined_to_launch"), coverage.get("time_explained")
    if joined is not None:
        lines.append(f"{joined:.1%} of the kernels are joined to the call that launched them.")
    if explained is not None and explained < 1:
        lines.append(f"{1 - explained:.1%} of the time is unexplained.")
    lines += [f"{coverage[name]} {words}." for name, words in MISSING.items() if coverage.get(name)]
    lines += [f"{clean(note)[0].upper()}{clean(note)[1:]}." for note in coverage.get("notes", [])]
    lines += not_judged(found["abstained"])
    if found["devices"] and not found["findings"] and not found["abstained"]:
        lines.append("None of the causes that the rules know costs a twentieth of the time.")
    if len(found["findings"]) > 1:
        lines.append("Findings overlap: their gains do not add up.")
    return [Text(line, style="dim") for line in lines]


def not_judged(abstained: list[dict[str, Any]]) -> list[str]:
    """A line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for one in abstained:
        by_reason.setdefault(one["reason"], []).append(one["rule"])
    return [
        f"Not judged by {', '.join(rules) if len(rules) <= NAMED else f'{len(rules)} rules'}: {clean(reason)}."
        for reason, rules in by_reason.items()
    ]
