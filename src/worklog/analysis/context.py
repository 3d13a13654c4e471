"""The calling context of what the host launched: module, line, operator; and a backward operator's forward one.

Of torch.profiler these are its record_function ranges, `nn.Module: Linear_0` and Python frames, and operators. A Python
frame has the line at which its function begins, not that of the call. Of nsys they are NVTX push/pop ranges; those of
torch's emit_nvtx (`nsys --pytorch=autograd-nvtx`), `aten::addmm, seq = 12, op_id = 5, sizes = [...]`, are operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from worklog.analysis.labels import BACKWARD, INSTANCE, SIZE, labels
from worklog.analysis.nesting import Nesting, compress, depths, levels, nest
from worklog.traces.schema import ANNOTATION, MODULE, OPERATOR, PYTHON, Trace


@dataclass(frozen=True, eq=False)
class Contexts:
    """The frames of a trace by position in `nesting`, as a tree in which backward operators hang below forward ones."""

    nesting: Nesting
    kind: Any
    """Of labels.KINDS."""
    text: Any
    """Index into `texts`."""
    texts: Sequence[str]
    parent: Any
    """Of those kept: the nearest one kept around it; of a backward operator the nearest module, Python frame or range
    around its forward operator. -1: none."""
    kept: Any
    """Mask: without Python frames that say nothing of the program, unless those were asked for."""
    backward: tuple[int, int]
    """How many backward operators had a forward one, and how many of them are joined to it."""

    def around(self, thread: Any, start: Any, end: Any) -> Any:
        """For each interval on a thread the position of the innermost frame kept that encloses it, -1: none does."""
        return np.append(self.nearest, -1)[self.nesting.around(thread, start, end)]

    @cached_property
    def nearest(self) -> Any:
        """Of each the position of itself if it is kept, else of the nearest one kept around it, -1: none."""
        return np.where(self.kept, np.arange(len(self.kept)), compress(self.nesting.parent, self.kept))

    @cached_property
    def depth(self) -> Any:
        return depths(self.parent)


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
    """For each position the node, -1: not asked for."""


_known: WeakKeyDictionary[Trace, Contexts] = WeakKeyDictionary()


def contexts(trace: Trace, libraries: bool = False) -> Contexts:
    """With `libraries` every Python frame, else the program's own. O(n log n); kept as long as `trace` is."""
    if libraries:
        return _contexts(trace, True)
    if trace not in _known:
        _known[trace] = _contexts(trace, False)
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
    paths = intern(known, at)
    spent: dict[str, float] = {}
    for node, total in _sums(paths.node[at], weight):
        text = describe(chain(paths, known.texts, node))
        spent[text] = spent.get(text, 0.0) + total
    return sorted(spent, key=lambda text: -spent[text])[:limit]


def describe(path: Sequence[tuple[int, str]]) -> str:
    """`path` is (kind, text), outermost first; see `place`."""
    modules = ".".join(INSTANCE.sub("", text) for kind, text in path if kind == MODULE)
    lines = [text for kind, text in path if kind == PYTHON]
    ranges = [text for kind, text in path if kind == ANNOTATION]
    outer = [at for at, (kind, _) in enumerate(path) if kind not in (OPERATOR, BACKWARD)]
    below = path[outer[-1] + 1 if outer else 0 :]
    operator = [f"{text} (backward)" if kind == BACKWARD else text for kind, text in below[:1]]
    named = [modules] * bool(modules) + lines[-1:] or ranges[-1:]
    return ", ".join(named + operator)


def intern(known: Contexts, positions: Any) -> Paths:
    """The nodes of these positions (kept ones) and of all around them."""
    needed = np.zeros(len(known.parent) + 1, bool)
    front = positions
    while len(front := np.unique(front[(front >= 0) & ~needed[front]])):
        needed[front] = True
        front = known.parent[front]
    node = np.full(len(known.parent), -1, np.int64)
    columns: tuple[list[Any], ...] = ([], [], [])
    first = [0]
    for rows in levels(known.depth, needed[:-1]):
        above = np.append(node, -1)[known.parent[rows]]
        label = known.text[rows] * SIZE + known.kind[rows]
        one, which = distinct(above, label)
        node[rows] = first[-1] + which
        for column, values in zip(columns, (above, known.kind[rows], known.text[rows]), strict=True):
            column.append(values[one])
        first.append(first[-1] + len(one))
    parent, kind, text = (np.concatenate([np.zeros(0, np.int64), *column]) for column in columns)
    return Paths(parent, kind, text, first, node)


def distinct(above: Any, label: Any) -> tuple[Any, Any]:
    """(index of one of each distinct pair, for each pair the number of its kind)."""
    if not len(above):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, one, which = np.unique((above + 1) * (int(label.max()) + 1) + label, return_index=True, return_inverse=True)
    return one, which


def chain(paths: Paths, texts: Sequence[str], node: int) -> list[tuple[int, str]]:
    """(kind, text) of a node and those around it, outermost first."""
    found = []
    while node >= 0:
        found.append((int(paths.kind[node]), texts[paths.text[node]]))
        node = int(paths.parent[node])
    return found[::-1]


def _contexts(trace: Trace, libraries: bool) -> Contexts:
    nesting = nest(trace.frames)
    frames = trace.frames.iloc[nesting.row]
    known = labels(frames)
    kind, text = known.kind, known.text
    same = (np.append(kind, -1)[nesting.parent] == BACKWARD) & (np.append(text, -1)[nesting.parent] == text)
    twice = (
        (kind == OPERATOR) | (kind == BACKWARD)
    ) & same  # evaluate_function: AddmmBackward0, and in it AddmmBackward0
    kept = ~twice & (libraries | ~known.plumbing)
    own = np.flatnonzero((kind == BACKWARD) & ~twice)
    sequence, forward_thread = known.sequence.copy(), frames["forward_thread"].to_numpy().copy()
    told = np.flatnonzero(twice & (sequence >= 0))  # either of the two may tell the number
    told = told[sequence[nesting.parent[told]] < 0]
    sequence[nesting.parent[told]], forward_thread[nesting.parent[told]] = sequence[told], forward_thread[told]
    forward = _forward(nesting, kind, sequence, forward_thread, own)
    parent = compress(nesting.parent, kept)
    if (forward >= 0).any():
        outside = compress(nesting.parent, kept & (kind != OPERATOR))
        parent = parent.copy()
        parent[own[forward >= 0]] = outside[forward[forward >= 0]]
    numbered = int((sequence[own] >= 0).sum())
    return Contexts(nesting, kind, text, known.texts, parent, kept, (numbered, int((forward >= 0).sum())))


def _forward(nesting: Nesting, kind: Any, sequence: Any, forward_thread: Any, own: Any) -> Any:
    """For each backward operator `own` the position of its forward operator, -1: unknown.

    A forward operator and the ones it calls carry the number that the next node of the graph will have; the last of
    them to begin made the node. Numbers are counted by thread. A backward operator knows its forward thread by
    another number than the system's: it is the thread that holds most of the numbers asked for. Without it, as in
    NVTX, one thread must hold all.
    """
    found = np.full(len(own), -1, np.int64)
    forward = np.flatnonzero((kind == OPERATOR) & (sequence >= 0))
    asked = np.flatnonzero(sequence[own] >= 0)
    if not len(forward) or not len(asked):
        return found
    codes, _ = pd.factorize(np.concatenate((sequence[forward], sequence[own[asked]])))
    mine, theirs = codes[: len(forward)], codes[len(forward) :]
    size = len(kind) + 1
    keys = np.sort(mine * size + forward)
    for known in np.unique(forward_thread[own[asked]]):
        rows = asked[forward_thread[own[asked]] == known]
        wanted = theirs[forward_thread[own[asked]] == known]
        holders = nesting.thread[forward[np.isin(mine, wanted)]]
        threads, votes = np.unique(holders, return_counts=True)
        best = votes == votes.max(initial=0)
        if best.sum() != 1 or (known < 0 and len(threads) > 1):
            continue
        low, high = np.searchsorted(nesting.thread, [threads[best][0], threads[best][0] + 1])
        before = low + np.searchsorted(nesting.start[low:high], nesting.start[own[rows]], side="left")
        at = np.searchsorted(keys, wanted * size + before) - 1
        last = keys[at]
        found[rows] = np.where((at >= 0) & (last // size == wanted) & (last % size >= low), last % size, -1)
    return found


def _sums(node: Any, weight: Any) -> list[tuple[int, float]]:
    nodes, which = np.unique(node, return_inverse=True)
    first = np.full(len(nodes), len(node))
    np.minimum.at(first, which, np.arange(len(node)))
    total = np.bincount(which, weight, len(nodes))
    return [(int(nodes[at]), float(total[at])) for at in np.argsort(first)]
