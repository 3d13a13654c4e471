"""What `worklog tree` prints: the calling-context tree from above, from below, or flat, without what costs little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from worklog.analysis.context import contexts, distinct
from worklog.analysis.labels import BACKWARD, SIZE
from worklog.analysis.nesting import compress, levels
from worklog.analysis.timeline import account
from worklog.analysis.tree import CALL, CPU, NAMES, ROOT, Tree, bottom_up, build
from worklog.traces import timeline
from worklog.traces.schema import ANNOTATION, GRAPH, MODULE, OPERATOR, PYTHON, Selection, Trace

View = Literal["top-down", "bottom-up", "flat"]
Metric = Literal["kernel", "copy", "launches", "idle", "cpu"]
COLUMNS = {"kernel": "kernel_ns", "copy": "copy_ns", "idle": "idle_ns", "launches": "launches", "cpu": CPU}
TABLES = {
    "ranges": (ANNOTATION,),
    "modules": (MODULE,),
    "lines": (PYTHON,),
    "operators": (OPERATOR, BACKWARD),
    "calls": (CALL,),
    "activities": tuple(range(SIZE, SIZE + GRAPH + 1)),
}
LEVELS = 200
"""Deeper JSON than this, readers refuse."""


def tree(
    file: Path,
    view: View = "top-down",
    metric: Metric | None = None,
    range_name: str | None = None,
    depth: int | None = None,
    min_share: float = 0.01,
    *,
    fold: bool = False,
    libraries: bool = False,
) -> dict[str, Any]:
    """The calling-context tree of a trace of nsys or torch.profiler, or of the range(s) `range_name` in it.

    `metric` chooses what is shown and its order; default: kernel, of a trace of the CPU alone cpu. Keys: source {tool,
    tool_version, file}; view, metric, range, depth, min_share, fold, as asked for; devices [number]; span_ns, the sum
    of the devices' windows (without a GPU: None); total {of each of tree.METRICS, with the metric cpu of tree.CPU too};
    tree, a node, or of a flat view tables {each of TABLES: [node]}; coverage {activities_with_known_launch (fraction),
    backward_operators (that have a forward one), backward_operators_joined, graph_replays_as_one_piece,
    launches_without_activity, host_slowed_by_recorded_stacks}.

    A node: {name, kind, inclusive, own, children}. kind is one of tree.NAMES, or `others`: siblings below `min_share`
    of the metric's total in one, or `deeper`: all that is more than `depth` levels below the root (an only child is no
    level). inclusive and own have the keys of total, and own plus the children's inclusive is inclusive, to the
    nanosecond; what was folded is the own of the node that stands for it. Bottom-up, children are callers. In a table a
    node has no children, inclusive counts once where something calls itself, and own is what has no other row of the
    table inside; a module's name is its path. Children come most costly first, tables by own.
    Raises ProblemError for a file without a timeline, a range that is not there, or one in which nothing ran.
    """
    trace = timeline.load(file)
    empty = trace.activities.empty and not trace.lost.any()
    chosen_metric = metric or ("cpu" if empty else "kernel")
    chosen = trace.select(None if empty else range_name)
    lines = [account(trace, device, window) for device, window in chosen.windows.items()]
    operators = _operators(trace, range_name) if chosen_metric == "cpu" else None
    grown = build(trace, chosen, lines, libraries=libraries, fold=fold, operators=operators)
    if view == "bottom-up":
        grown = bottom_up(grown)
    column = COLUMNS[chosen_metric]
    shown: dict[str, Any]
    if view == "flat":
        shown = {"tables": {name: table(grown, kinds, column, min_share) for name, kinds in TABLES.items()}}
    else:
        shown = {"tree": nested(grown, column, min_share, depth or LEVELS)}
    return {
        "source": {"tool": trace.tool, "tool_version": trace.tool_version, "file": str(file)},
        "view": view,
        "metric": chosen_metric,
        "range": range_name,
        "depth": depth,
        "min_share": min_share,
        "fold": fold,
        "devices": [line.device for line in lines],
        "span_ns": sum(line.span_ns for line in lines) if lines else None,
        "total": {name: int(values.sum()) for name, values in grown.own.items()},
        **shown,
        "coverage": _coverage(trace, chosen, libraries),
    }


def nested(tree: Tree, column: str, min_share: float, depth: int) -> dict[str, Any]:
    """The root and what is below it; see `tree` above."""
    inclusive = tree.inclusive()
    cost, least = inclusive[column], _least(inclusive[column][0], min_share)
    order = np.lexsort((-cost, tree.parent))
    first = np.searchsorted(tree.parent[order], np.arange(len(order) + 1))

    def node(at: int, below: int, level: int) -> dict[str, Any]:
        inner = order[first[at] : first[at + 1]]
        below = below if level < LEVELS else 0
        shown = int((cost[inner] >= least).sum()) if below else 0
        left = below if len(inner) == 1 else below - 1
        children = [node(int(child), left, level + 1) for child in inner[:shown]]
        if len(rest := inner[shown:]):
            count = int((cost[rest] > 0).sum()) or len(rest)
            children.append(_rest("others" if below else "deeper", count, inclusive, rest))
        return _said(tree.texts[tree.text[at]], tree.kind[at], inclusive, tree.own, at, children)

    return node(0, depth, 0)


def table(tree: Tree, kinds: Sequence[int], column: str, min_share: float) -> list[dict[str, Any]]:
    """A node for each name among nodes of these kinds; see `tree` above."""
    mine, inclusive = np.isin(tree.kind, kinds), tree.inclusive()
    rows, outer = np.flatnonzero(mine), compress(tree.parent, mine)
    label, names = (_paths if MODULE in kinds else _names)(tree, mine, outer)
    innermost = np.append(label, -1)[np.where(mine, np.arange(len(mine)), outer)]
    first = rows[~_inside_itself(label, outer)[rows]]
    own = {name: _summed(innermost, values, len(names)) for name, values in tree.own.items()}
    whole = {name: _summed(label[first], values[first], len(names)) for name, values in inclusive.items()}
    kind = np.zeros(len(names), np.int64)
    kind[label[rows]] = tree.kind[rows]
    order = np.lexsort((-whole[column], -own[column]))
    small = whole[column][order] < _least(inclusive[column][0], min_share)
    found = [_said(names[at], kind[at], whole, own, at, []) for at in order[~small]]
    if small.any():
        found.append(_rest("others", int(small.sum()), own, order[small]))
    return found


def _names(tree: Tree, mine: Any, outer: Any) -> tuple[Any, list[str]]:  # noqa: ARG001
    """For each node a number of its text and kind, -1: it is none of mine; and the text of each number."""
    label = np.full(len(mine), -1, np.int64)
    pairs, label[mine] = np.unique(tree.text[mine] * (ROOT + 1) + tree.kind[mine], return_inverse=True)
    return label, [tree.texts[pair // (ROOT + 1)] for pair in pairs]


def _paths(tree: Tree, mine: Any, outer: Any) -> tuple[Any, list[str]]:
    """As _names, but of the texts of all of mine around it too, with dots between them."""
    label, at = np.full(len(mine), -1, np.int64), np.flatnonzero(mine)
    names: list[str] = []
    for rows in levels(np.where(outer[at] >= 0, np.searchsorted(at, outer[at]), -1)):
        above, text = np.append(label, -1)[outer[at[rows]]], tree.text[at[rows]]
        one, which = distinct(above, text)
        label[at[rows]] = len(names) + which
        prefixes = [f"{names[prefix]}." if prefix >= 0 else "" for prefix in above[one]]
        names += [prefix + tree.texts[last] for prefix, last in zip(prefixes, text[one], strict=True)]
    return label, names


def _inside_itself(label: Any, outer: Any) -> Any:
    """Mask: one of those around has the same label."""
    found, at = np.zeros(len(label), bool), outer
    while (at >= 0).any():
        found |= (at >= 0) & (label[at] == label)
        at = np.where(at >= 0, outer[at], -1)
    return found


def _summed(label: Any, values: Any, size: int) -> Any:
    found = np.zeros(size, np.int64)
    np.add.at(found, label[label >= 0], values[label >= 0])
    return found


def _least(total: int, min_share: float) -> float:
    return max(min_share * total, 1) if min_share else 0


def _said(name: str, kind: int, inclusive: Any, own: Any, at: int, children: list[dict[str, Any]]) -> dict[str, Any]:
    sums = ({metric: int(values[at]) for metric, values in of.items()} for of in (inclusive, own))
    return {
        "name": name,
        "kind": NAMES[int(kind)],
        **dict(zip(("inclusive", "own"), sums, strict=True)),
        "children": children,
    }


def _rest(kind: str, count: int, values: dict[str, Any], rows: Any) -> dict[str, Any]:
    sums = {metric: int(of[rows].sum()) for metric, of in values.items()}
    return {
        "name": f"{count} {kind if count != 1 else kind.removesuffix('s')}",
        "kind": kind,
        "inclusive": sums,
        "own": sums,
        "children": [],
    }


def _operators(trace: Trace, range_name: str | None) -> Any:
    """Mask over frames: in the range."""
    if range_name is None:
        return np.ones(len(trace.frames), bool)
    return trace.occurrence(range_name, trace.frames) >= 0


def _coverage(trace: Trace, chosen: Selection, libraries: bool) -> dict[str, Any]:
    launched = trace.activities[chosen.launched]
    backward, joined = contexts(trace, libraries).backward
    return {
        "activities_with_known_launch": float((launched["call"] >= 0).mean()) if len(launched) else None,
        "backward_operators": backward,
        "backward_operators_joined": joined,
        "graph_replays_as_one_piece": int((launched["kind"] == GRAPH).sum()),
        "launches_without_activity": int((trace.lost & chosen.called).sum()),
        "host_slowed_by_recorded_stacks": trace.stacks,
    }
