"""A calling-context tree as text in a terminal: share, cost, a bar, and who called whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worklog.analysis.labels import INSTANCE
from worklog.analysis.views import LEVELS
from worklog.render.terminal import clean, microseconds
from worklog.traces.activity import short_name

WHAT = {
    "kernel": ("kernel_ns", "kernels", "kernel time"),
    "copy": ("copy_ns", "copies and memsets", "copy time"),
    "idle": ("idle_ns", "idle time with a cause", "idle time"),
    "launches": ("launches", "launches", "launches"),
    "cpu": ("cpu_ns", "operators on the CPU", "CPU time"),
}
STYLES = {
    "root": "bold",
    "range": "bold",
    "module": "bold cyan",
    "python": "yellow",
    "operator": "green",
    "backward": "magenta",
    "call": "dim",
    "others": "dim",
    "deeper": "dim",
    "unknown": "red",
}
ACTIVITIES = ("kernel", "communication", "copy", "memset", "graph")
CELLS = 10
EIGHTHS = " ▏▎▍▌▋▊▉█"
MARGIN = 30
"""Columns that stand before the tree."""
SAME_CLASS = 4
"""So many modules of one class in one place, and the reader is told how to make them one."""


def report(found: dict[str, Any], width: int = 120) -> Group:
    """What worklog.analysis.views.tree returns."""
    column, things, _ = WHAT[found["metric"]]
    version = f" {found['source']['tool_version']}" if found["source"]["tool_version"] else ""
    head = Text.assemble((clean(found["source"]["file"]), "bold"), f": {found['source']['tool']}{clean(version)}")
    parts: list[RenderableType] = [head, Text(_summary(found), style="bold")]
    if not found["total"][column]:
        hint = "" if found["devices"] else " The trace holds no work of a GPU; --metric cpu shows the host's operators."
        return Group(*parts, Text(f"No {things} here.{hint}"))
    if "tree" in found:
        parts += [Text(), _tree(found, width)]
    else:
        for name, nodes in found["tables"].items():
            if any(node["inclusive"][column] for node in nodes):
                parts += [Text(), _flat(name, nodes, found)]
    notes = list(_notes(found))
    return Group(*parts, *([Text()] if notes else []), *(Text(note, style="dim") for note in notes))


def _summary(found: dict[str, Any]) -> str:
    column, things, _ = WHAT[found["metric"]]
    total, span = found["total"][column], found["span_ns"]
    cost = _cost(total, column)
    order = {"top-down": "callers above", "bottom-up": "callers below", "flat": "flat"}[found["view"]]
    inside = f" in {clean(found['range'])}" if found["range"] else ""
    if span is None:
        return f"{things}{inside}: {cost}; {order}"
    devices = ", ".join(map(str, found["devices"]))
    share = f", {total / span:.1%} of the span" if column.endswith("_ns") and column != "cpu_ns" else ""
    return f"GPU {devices}{inside}: span {microseconds(span / 1e3)}; {things}: {cost}{share}; {order}"


def _tree(found: dict[str, Any], width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    columns: tuple[tuple[Literal["left", "right"], int], ...] = (("right", 6), ("right", 7), ("left", CELLS))
    for side, least_width in columns:
        table.add_column(justify=side, no_wrap=True, min_width=least_width)
    table.add_column(no_wrap=True, overflow="ellipsis")
    column, things, _ = WHAT[found["metric"]]
    least = found["min_share"] * found["total"][column]
    apart = " ← " if found["view"] == "bottom-up" else " → "
    for line in _lines(found["tree"], column, least, max(width - MARGIN, 20)):
        node, text = line.chain[-1], Text().append(line.guides, style="dim")
        for at, one in enumerate(line.chain):
            text.append(apart if at else apart.lstrip() * line.continued, style="dim")
            text.append(f"all {things}" if one["kind"] == "root" else _name(one), STYLES.get(one["kind"], ""))
        if node["kind"] in ACTIVITIES and node["inclusive"]["activities"] > 1:
            text.append(f" {node['inclusive']['activities']}x", style="dim")
        cost = ("", "", "") if line.continued else _columns(node["inclusive"][column], found)
        table.add_row(*cost, text)
    return table


class _Line(NamedTuple):
    guides: str
    chain: list[dict[str, Any]]
    continued: bool
    """Costs as much as the line above, which had no room for it."""


def _lines(
    node: dict[str, Any], column: str, least: float, width: int, guides: str = "", continued: bool = False
) -> Iterator[_Line]:
    """The tree, line by line; what costs as much as what is around it joins its line.

    Siblings that were folded into one are left out where together they are small too, or there is nothing but them.
    """
    chain, room = [node], width - len(guides) - len(_name(node)) - 2 * continued
    while node["kind"] != "root" and (one := _alone(node, column)) and (room := room - len(_name(one)) - 3) >= 0:
        chain.append(node := one)
    yield _Line(guides, chain, continued)
    stem, below = guides.replace("├─ ", "│  ").replace("└─ ", "   "), _shown(node, column, least)
    alone = node["kind"] != "root" and _alone(node, column) is not None
    for at, child in enumerate(below, start=1):
        branch = "" if alone else "└─ " if at == len(below) else "├─ "
        yield from _lines(child, column, least, width, stem + branch, alone)


def _alone(node: dict[str, Any], column: str) -> dict[str, Any] | None:
    """The one node inside that costs all of it."""
    return next((one for one in _named(node) if one["inclusive"][column] == node["inclusive"][column]), None)


def _shown(node: dict[str, Any], column: str, least: float) -> list[dict[str, Any]]:
    named = [child for child in _named(node) if child["inclusive"][column]]
    folded = [child for child in node["children"] if child["kind"] == "others" and child["inclusive"][column] >= least]
    return named + (folded if named else [])


def _named(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [child for child in node["children"] if child["kind"] not in ("others", "deeper")]


def _flat(name: str, nodes: list[dict[str, Any]], found: dict[str, Any]) -> Table:
    column, _, what = WHAT[found["metric"]]
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for header in ("own", what, "", "with inner"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    table.add_column(name, overflow="fold")
    for node in nodes:
        if node["inclusive"][column]:
            text = Text(_name(node), STYLES.get(node["kind"], ""))
            whole = _cost(node["inclusive"][column], column)
            table.add_row(*_columns(node["own"][column], found), whole, text)
    return table


def _columns(value: int, found: dict[str, Any]) -> tuple[Text, Text, Text]:
    """Share of the span, or of all where there is none; cost; a bar of which all is the whole."""
    column = WHAT[found["metric"]][0]
    total = found["total"][column]
    whole = found["span_ns"] if column.endswith("_ns") and column != "cpu_ns" else total
    return Text(f"{value / whole:.1%}"), Text(_cost(value, column)), Text(bar(value / total), style="cyan")


def bar(share: float) -> str:
    """CELLS wide, in eighths of a cell; what is not nothing shows."""
    eighths = min(max(round(share * CELLS * 8), share > 0), CELLS * 8)
    return (EIGHTHS[-1] * (eighths // 8) + EIGHTHS[eighths % 8]).ljust(CELLS)[:CELLS]


def _cost(value: int, column: str) -> str:
    return microseconds(value / 1e3) if column.endswith("_ns") else str(value)


def _name(node: dict[str, Any]) -> str:
    if node["kind"] in ("kernel", "communication"):
        return clean(short_name(node["name"]))
    return clean(node["name"]) + (" (backward)" if node["kind"] == "backward" else "")


def _notes(found: dict[str, Any]) -> Iterator[str]:
    coverage, kinds, classes = found["coverage"], set(), 0
    for node in _every(found):
        kinds.add(node["kind"])
        modules = Counter(INSTANCE.sub("", one["name"]) for one in node["children"] if one["kind"] == "module")
        classes = max(classes, *modules.values(), 0)
    if len(found["devices"]) > 1:
        yield "The span is the sum of the GPUs' spans."
    if found["metric"] in ("kernel", "copy"):
        yield "What overlaps counts each in full."
    if found["metric"] == "idle":
        yield "Idle time is charged to the call whose work ended it."
    if "python" in kinds:
        yield "The line is where a Python function begins, not where it made the call."
    if coverage["host_slowed_by_recorded_stacks"] and found["metric"] in ("idle", "cpu"):
        yield "Python stacks were recorded, which slows the host several times: read places here, not times."
    if backward := coverage["backward_operators"]:
        joined = coverage["backward_operators_joined"]
        yield f"Of {backward} backward operators {joined} stand in the place of their forward one."
    if (known := coverage["activities_with_known_launch"]) is not None and known < 1:
        yield f"Of {1 - known:.1%} of what ran the launching call is unknown."
    if count := coverage["graph_replays_as_one_piece"]:
        yield f"{count} replays of CUDA graphs were traced as one piece: their kernels are not here."
    if count := coverage["launches_without_activity"]:
        yield f"{count} launches have no row of what they launched."
    if any("GraphLaunch" in node["name"] for node in _every(found) if node["kind"] == "call"):
        yield "Kernels of a CUDA graph hang below its launch: the trace does not say which operators put them there."
    if "deeper" in kinds and found["depth"] is None:
        yield f"Deeper than {LEVELS} levels nothing is shown."
    if found["view"] == "top-down" and classes >= SAME_CLASS and not found["fold"]:
        yield f"{classes} modules of one class stand in one place: --fold makes them one."


def _every(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    left = [found["tree"]] if "tree" in found else [node for nodes in found["tables"].values() for node in nodes]
    while left:
        node = left.pop()
        yield node
        left += node["children"]
