"""The calling context of what the host launched: module, line, operator; and a backward operator's forward one.

Of torch.profiler these are its record_function ranges, `nn.Module: Linear_0` and Python frames, and operators. A Python
frame has the line at which its function begins, not that of the call. Of nsys they are NVTX push/pop ranges; those of
torch's emit_nvtx (`nsys --pytorch=autograd-nvtx`), `aten::addmm, seq = 12, op_id = 5, sizes = [...]`, are operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from worklog.analysis.labels import BACKWARD, INSTANCE, SIZE, Labels, labels
from worklog.analysis.nesting import Nesting, levels, positions
from worklog.traces.schema import MODULE, OPERATOR, PYTHON, Trace


class Contexts:
    """The frames of a trace by position in `nesting`, as a tree in which backward operators hang below forward ones."""

    def __init__(self, trace: Trace, libraries: bool) -> None:
        self.nesting = nesting = Nesting(trace.frames)
        known = labels(trace.frames, nesting.row)
        self.kind = known.kind
        """Of labels.KINDS."""
        self.text, self.texts = known.text, known.texts
        """Of each position the index into `texts`."""
        twice = _twice(nesting, known)
        self.kept = ~twice & (libraries | ~known.plumbing)
        """Mask: without Python frames that say nothing of the program, unless those were asked for."""
        backward = np.flatnonzero((known.kind == BACKWARD) & ~twice)
        sequence, forward_thread = known.sequence.copy(), trace.frames["forward_thread"].to_numpy()[nesting.row]
        told = np.flatnonzero(twice & (sequence >= 0))  # either of the two may tell the number
        around = nesting.parent(told)
        told, around = told[sequence[around] < 0], around[sequence[around] < 0]
        sequence[around], forward_thread[around] = sequence[told], forward_thread[told]
        process = trace.frames["process"].to_numpy()[nesting.row]
        forward = _forward(nesting, known.kind, sequence, forward_thread, process, backward)
        self.joined = forward[forward >= 0]
        """The forward operators of `joining`."""
        self.joining = backward[forward >= 0]
        self.backward = (int((sequence[backward] >= 0).sum()), len(self.joined))
        """How many backward operators had a forward one, and how many of them are joined to it."""

    def parent(self, at: Any) -> Any:
        """Of those kept the nearest one kept around each; of a backward operator the nearest module, Python frame or
        range around its forward operator. -1: none."""
        found = self.nesting.around_among(at, self.kept)
        found[self._is_joining[at]] = self._outside[np.searchsorted(self.joining, at[self._is_joining[at]])]
        return found

    def around(self, thread: Any, start: Any, end: Any) -> Any:
        """For each interval on a thread the position of the innermost frame kept that encloses it, -1: none does."""
        return self.nearest(self.nesting.around(thread, start, end))

    def nearest(self, at: Any) -> Any:
        """Of each the position of itself if it is kept, else of the nearest one kept around it, -1: none."""
        found = at.copy()
        hidden = np.flatnonzero(at >= 0)
        hidden = hidden[~self.kept[at[hidden]]]
        found[hidden] = self.nesting.around_among(at[hidden], self.kept)
        return found

    def names(self, fold: bool) -> tuple[Any, Sequence[str]]:
        """Of each position the index of its text, and the texts; with `fold` modules are without instance numbers."""
        if not fold:
            return self.text, self.texts
        short, texts = pd.factorize(np.asarray([INSTANCE.sub("", text) for text in self.texts], dtype=object))
        return np.where(self.kind == MODULE, short[self.text] + len(self.texts), self.text), [*self.texts, *texts]

    @cached_property
    def _is_joining(self) -> Any:
        mask = np.zeros(len(self.kept), bool)
        mask[self.joining] = True
        return mask

    @cached_property
    def _outside(self) -> Any:
        return self.nesting.around_among(self.joined, self.kept & (self.kind != OPERATOR))


@dataclass(frozen=True)
class Paths:
    """Frames with equal kinds and texts, and so all around them, are one node; a node stands after its parent."""

    parent: Any
    """-1: none."""
    kind: Any
    text: Any
    levels: Sequence[int]
    """First node at each depth, and their number."""
    node: Any
    """For each position the node, -1: not asked for; and -1 at the end, for position -1."""


_known: WeakKeyDictionary[Trace, Contexts] = WeakKeyDictionary()


def contexts(trace: Trace, libraries: bool = False) -> Contexts:
    """With `libraries` every Python frame, else the program's own. O(n log n); kept as long as `trace` is."""
    if libraries:
        return Contexts(trace, True)
    if trace not in _known:
        _known[trace] = Contexts(trace, False)
    return _known[trace]


def place(trace: Trace, call_rows: Any, limit: int = 3, cost: Any = None) -> list[str]:
    """Where in the source these calls (rows of trace.calls) were made, as `Net.Block, train.py:8 forward, aten::add`.

    Modules without instance numbers, the innermost Python function of the program with the line at which it begins, the
    outermost operator below them; the innermost range where modules and lines are unknown. What is unknown is left out,
    and a call of which nothing is known altogether. The most frequent place first, or with `cost`, a number for each
    call, the most costly; at most `limit`.
    """
    rows = np.asarray(call_rows, dtype=np.int64)
    if not len(rows) or trace.frames.empty:
        return []
    known = contexts(trace)
    thread, start, end = (trace.calls[name].to_numpy()[rows] for name in ("thread", "start_ns", "end_ns"))
    at = known.around(thread, start, end)
    weight = np.ones(len(rows)) if cost is None else np.asarray(cost, dtype=np.float64)
    at, weight = at[at >= 0], weight[at >= 0]
    paths = intern(known, at, known.text)
    spent: dict[str, float] = {}
    places = {-1: Place()}
    for node, total in _sums(paths.node[at], weight):
        way = [node]
        while (around := int(paths.parent[way[-1]])) not in places:
            way.append(around)
        for inner in reversed(way):
            around, kind, text = (int(column[inner]) for column in (paths.parent, paths.kind, paths.text))
            places[inner] = places[around].inside(kind, known.texts[text])
        said = str(places[node])
        spent[said] = spent.get(said, 0.0) + total
    return sorted(spent, key=lambda said: -spent[said])[:limit]


@dataclass(frozen=True)
class Place:
    """What `place` says of a node, made of what it says of that around it: deep stacks cost but their nodes."""

    modules: str = ""
    line: str = ""
    named: str = ""
    operator: str = ""

    def inside(self, kind: int, text: str) -> Place:
        """Of a frame in this place."""
        if kind in (OPERATOR, BACKWARD):
            return replace(self, operator=self.operator or (f"{text} (backward)" if kind == BACKWARD else text))
        if kind == MODULE:
            name = INSTANCE.sub("", text)
            return replace(self, modules=f"{self.modules}.{name}" if self.modules else name, operator="")
        return replace(self, **{"line" if kind == PYTHON else "named": text}, operator="")

    def __str__(self) -> str:
        known = [text for text in (self.modules, self.line) if text] or [self.named]
        return ", ".join(text for text in (*known, self.operator) if text)


def intern(known: Contexts, at: Any, text: Any) -> Paths:
    """The nodes of these positions (of frames kept; -1: none) and of all around them; `text` is of known.names."""
    size = len(known.kept)
    node, needed, front = np.full(size + 1, -1, np.int64), np.zeros(size + 1, bool), at
    needed[-1] = True
    while len(front := positions(front[~needed[front]], size)):
        needed[front] = True
        front = known.parent(front)
    at = np.flatnonzero(needed[:-1])
    above, kind, text = known.parent(at), known.kind[at], text[at]
    columns: tuple[list[Any], ...] = ([], [], [])
    first = [0]
    for rows in levels(np.where(above >= 0, np.searchsorted(at, above), -1)):
        around = node[above[rows]]
        one, which = distinct(around, text[rows] * SIZE + kind[rows])
        node[at[rows]] = first[-1] + which
        for column, values in zip(columns, (around, kind[rows], text[rows]), strict=True):
            column.append(values[one])
        first.append(first[-1] + len(one))
    parents, kinds, names = (np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)
    return Paths(parents, kinds, names, first, node)


def distinct(above: Any, label: Any) -> tuple[Any, Any]:
    """(index of one of each distinct pair, for each pair the number of its kind)."""
    if not len(above):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, one, which = np.unique((above + 1) * (int(label.max()) + 1) + label, return_index=True, return_inverse=True)
    return one, which


def _twice(nesting: Nesting, known: Labels) -> Any:
    """Mask: `AddmmBackward0` just inside of `evaluate_function: AddmmBackward0`."""
    found = np.zeros(len(known.kind), bool)
    names = np.zeros(len(known.texts), bool)
    names[known.text[known.kind == BACKWARD]] = True
    maybe = np.flatnonzero(names[known.text] & ((known.kind == BACKWARD) | (known.kind == OPERATOR)))
    around = nesting.parent(maybe)
    maybe, around = maybe[around >= 0], around[around >= 0]
    found[maybe] = (known.kind[around] == BACKWARD) & (known.text[around] == known.text[maybe])
    return found


def _forward(nesting: Nesting, kind: Any, sequence: Any, forward_thread: Any, process: Any, own: Any) -> Any:
    """For each backward operator `own` the position of its forward operator, -1: unknown.

    A forward operator and the ones it calls carry the number that the next node of the graph will have; the last of
    them to begin made the node. Numbers are counted by thread. A backward operator knows its forward thread by
    another number than the system's: it is the thread of its process that holds most of the numbers asked for. Without
    it, as in NVTX, one thread must hold all.
    """
    found = np.full(len(own), -1, np.int64)
    forward, asked = np.flatnonzero((kind == OPERATOR) & (sequence >= 0)), np.flatnonzero(sequence[own] >= 0)
    codes, _ = pd.factorize(np.concatenate((sequence[forward], sequence[own[asked]])))
    held, size = codes[: len(forward)], len(kind) + 1
    keys = np.sort(held * size + forward)
    wanted = pd.DataFrame({"at": asked, "code": codes[len(forward) :], "thread": forward_thread[own[asked]]})
    for (thread, of), rows in wanted.groupby(["thread", process[own[asked]]]):
        threads, votes = np.unique(
            nesting.thread[forward[np.isin(held, rows["code"]) & (process[forward] == of)]], return_counts=True
        )
        best = votes == votes.max(initial=0)
        if best.sum() != 1 or (thread < 0 and len(threads) > 1):
            continue
        low, high = (int(np.searchsorted(nesting.thread, threads[best][0], side)) for side in ("left", "right"))
        begun = np.searchsorted(nesting.start[low:high], nesting.start[own[rows["at"]]], side="left")
        code = rows["code"].to_numpy()
        at = np.searchsorted(keys, code * size + low + begun) - 1
        last = keys[at]
        found[rows["at"]] = np.where((at >= 0) & (last // size == code) & (last % size >= low), last % size, -1)
    return found


def _sums(node: Any, weight: Any) -> list[tuple[int, float]]:
    nodes, which = np.unique(node, return_inverse=True)
    first = np.full(len(nodes), len(node))
    np.minimum.at(first, which, np.arange(len(node)))
    total = np.bincount(which, weight, len(nodes))
    return [(int(nodes[at]), float(total[at])) for at in np.argsort(first)]
