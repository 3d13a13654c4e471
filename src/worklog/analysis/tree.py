"""The calling-context tree: what each place of the program cost the device, from the outermost frame to the kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.context import Contexts, Paths, contexts, distinct, intern
from worklog.analysis.labels import BACKWARD, KINDS, SIZE
from worklog.analysis.timeline import IDLE, Timeline
from worklog.traces.schema import COMMUNICATION, COPY, GRAPH, LAUNCH, MEMSET, OPERATOR, Selection, Trace

METRICS = ("kernel_ns", "copy_ns", "idle_ns", "launches", "activities")
"""Summed time of kernels, communication too, and of copies and memsets, each in full where they overlap; idle time of a
device before the activity that ended it, as far as it is `launch`, `host` or `sync`; calls that launch; what ran."""
CAUSED = tuple(part for part in IDLE if part != "unexplained")
CPU = "cpu_ns"
"""Time in operators on the host, without that of the operators they call."""
CALL, UNKNOWN, ROOT = SIZE + GRAPH + 1, SIZE + GRAPH + 2, SIZE + GRAPH + 3
"""Kinds of a node are those of frames, then SIZE + the kind of an activity, then these."""
NAMES = KINDS | dict(
    enumerate(("kernel", "communication", "copy", "memset", "graph", "call", "unknown", "root"), start=SIZE)
)
_VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d+)?(_ptsz|_ptds)?$")


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root; a node stands after its parent, and those of one level together."""

    parent: Any
    kind: Any
    """Keys of NAMES."""
    text: Any
    """Index into `texts`."""
    texts: Sequence[str]
    levels: Sequence[int]
    """First node of each level, and their number; a parent is of an earlier level."""
    own: dict[str, Any]
    """int64 for each node; the sum over all nodes is the total."""

    def inclusive(self) -> dict[str, Any]:
        """Own, and that of all below."""
        found = {}
        for metric, values in self.own.items():
            found[metric] = values.copy()
            for low, high in reversed(list(pairwise(self.levels[1:]))):
                np.add.at(found[metric], self.parent[low:high], found[metric][low:high])
        return found


def build(
    trace: Trace,
    chosen: Selection,
    lines: Sequence[Timeline],
    *,
    libraries: bool = False,
    fold: bool = False,
    operators: Any = None,
) -> Tree:
    """Top-down, with METRICS; of `lines`, one for each device of `chosen`, come the gaps.

    `libraries`: with every Python frame, not only the program's own. `fold`: modules of one class in one place are one.
    `operators`, a mask over frames: with CPU too, of these. What ran without a known call is below a node of its own,
    and so that the sum of idle time is that of the accounting, what ended a gap but was not launched in the range is a
    node without time. Kernels of a CUDA graph's replay hang below the call that launched the graph.
    """
    known = contexts(trace, libraries)
    following, idle = _caused(lines)
    ran, launches = chosen.launched.copy(), (trace.calls["kind"] == LAUNCH).to_numpy() & chosen.called
    ran[following] = True
    at, cpu = _host(known, operators) if operators is not None else (np.zeros(0, np.int64),) * 2
    tree, of_activity, of_call, of_frame = _grow(trace, known, fold, np.flatnonzero(ran), launches, at)

    act, launched = trace.activities, chosen.launched
    kind, spent = act["kind"].to_numpy(), np.maximum((act["end_ns"] - act["start_ns"]).to_numpy(), 0)
    kernels, copies = launched & (kind <= COMMUNICATION), launched & ((kind == COPY) | (kind == MEMSET))
    measured = {
        "kernel_ns": (of_activity[kernels], spent[kernels]),
        "copy_ns": (of_activity[copies], spent[copies]),
        "idle_ns": (of_activity[following], idle),
        "launches": (of_call[:-1][launches], 1),
        "activities": (of_activity[launched], 1),
    }
    if operators is not None:
        measured[CPU] = (of_frame, cpu)
    for metric, (nodes, values) in measured.items():
        tree.own[metric] = np.zeros(len(tree.parent), np.int64)
        np.add.at(tree.own[metric], nodes, values)
    return tree


def _caused(lines: Sequence[Timeline]) -> tuple[Any, Any]:
    """Of each gap that has a cause: the row of the activity that ended it, and how long it was."""
    none = np.zeros(0, np.int64)
    following = np.concatenate([none, *(line.gaps["next"].to_numpy() for line in lines)])
    idle = np.concatenate([none, *(line.gaps[list(CAUSED)].to_numpy().sum(axis=1) for line in lines)])
    return following[idle > 0], idle[idle > 0]


def _grow(
    trace: Trace, known: Contexts, fold: bool, rows: Any, launches: Any, frames: Any
) -> tuple[Tree, Any, Any, Any]:
    """The tree, yet without metrics; nodes of the activities at `rows`, of their calls and `launches`, of `frames`."""
    act, calls = trace.activities, trace.calls
    call, asked = act["call"].to_numpy()[rows], launches.copy()
    asked[call[call >= 0]] = True
    called = np.flatnonzero(asked)
    at = known.around(*(calls[name].to_numpy()[called] for name in ("thread", "start_ns", "end_ns")))
    of_frame, names = known.names(fold)
    paths = intern(known, np.concatenate((at, frames)), of_frame)
    node = paths.node + 1

    api = [_VERSION.sub("", str(name)) for name in calls["name"].cat.categories]
    texts = [*names, *api, *map(str, act["name"].cat.categories), "(launch unknown)", "all"]
    grown = _Growing(len(texts) - 1, paths)
    of_call, of_activity = np.full(len(calls) + 1, -1, np.int64), np.full(len(act), -1, np.int64)
    of_call[called] = grown.level(node[at], CALL, len(names) + _codes(calls, called))
    if (call < 0).any():
        of_call[-1:] = grown.level(np.zeros(1, np.int64), UNKNOWN, np.array([len(texts) - 2]))
    kind = SIZE + act["kind"].to_numpy()[rows].astype(np.int64)
    of_activity[rows] = grown.level(of_call[call], kind, len(names) + len(api) + _codes(act, rows))
    return grown.tree(texts), of_activity, of_call, node[frames]


def _codes(table: pd.DataFrame, rows: Any) -> Any:
    return table["name"].cat.codes.to_numpy()[rows].astype(np.int64)


class _Growing:
    """A tree, level by level; below the root stand the nodes of `paths`."""

    def __init__(self, text: int, paths: Paths | None = None) -> None:
        self.levels = [0, 1]
        self.columns = [[np.array([first], np.int64)] for first in (-1, ROOT, text)]
        if paths is not None:
            self.levels += [first + 1 for first in paths.levels[1:]]
            for column, values in zip(self.columns, (paths.parent + 1, paths.kind, paths.text), strict=True):
                column.append(values)

    def level(self, parent: Any, kind: Any, text: Any) -> Any:
        """A new node for each, but one for those that are equal."""
        kind = np.broadcast_to(np.asarray(kind, dtype=np.int64), parent.shape)
        one, which = distinct(parent, text * (ROOT + 1) + kind)
        first = self.levels[-1]
        for column, values in zip(self.columns, (parent, kind, text), strict=True):
            column.append(values[one])
        self.levels.append(first + len(one))
        return first + which

    def tree(self, texts: Sequence[str]) -> Tree:
        parent, kind, text = (np.concatenate(column) for column in self.columns)
        return Tree(parent, kind, text, texts, self.levels, {})


def bottom_up(tree: Tree) -> Tree:
    """What cost something first, its callers below; of each, own is what comes from no further caller."""
    costs = np.flatnonzero(np.any([values != 0 for values in tree.own.values()], axis=0))
    grown = _Growing(int(tree.text[0]))
    at, below, cost, ends = costs, np.zeros(len(costs), np.int64), costs, np.zeros(len(tree.parent), np.int64)
    while len(at):
        below = grown.level(below, tree.kind[at], tree.text[at])
        further = tree.parent[at] > 0
        ends[cost[~further]] = below[~further]
        at, below, cost = tree.parent[at[further]], below[further], cost[further]
    found = grown.tree(tree.texts)
    for metric, values in tree.own.items():
        found.own[metric] = np.zeros(len(found.parent), np.int64)
        np.add.at(found.own[metric], ends[costs], values[costs])
    return found


def _host(known: Contexts, operators: Any) -> tuple[Any, Any]:
    """Of the operators among these frames the position of the kept one, and the time without the operators inside."""
    nesting = known.nesting
    operator = (known.kind == OPERATOR) | (known.kind == BACKWARD)
    own, inner = np.maximum(nesting.end - nesting.start, 0), np.flatnonzero(operator)
    outer = nesting.around_among(inner, operator)
    inner, outer = inner[outer >= 0], outer[outer >= 0]
    start = nesting.start[inner]
    np.subtract.at(own, outer, np.clip(nesting.end[inner], start, nesting.end[outer]) - start)
    at = np.flatnonzero(operator & operators[nesting.row])
    return known.nearest(at), np.maximum(own[at], 0)
