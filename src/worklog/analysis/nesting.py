"""Which frame of a host's thread lies in which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces.schema import SPAN

ROUNDING_NS = 2
"""How far an inner frame may outlive the one around it: begin and duration are rounded one by one."""


@dataclass(frozen=True)
class Nesting:
    """The frames that nest, by thread and start, outer ones first. Positions in this order are what `parent` holds.

    A frame lies in the innermost one of its thread that was open when it began and is so until it ends, give or take
    the rounding. So one that merely overlaps another lies beside it, in what encloses both; one that ends before it
    begins holds nothing; one whose thread is unknown, and a SPAN, is left out.
    """

    row: Any
    """Of the table of frames."""
    parent: Any
    """-1: none."""
    thread: Any
    start: Any
    end: Any
    rounding: int

    def around(self, thread: Any, start: Any, end: Any) -> Any:
        """For each interval on a thread the position of the innermost frame that encloses it, -1: none does."""
        before, order = np.zeros(len(start), np.int64), np.argsort(thread, kind="stable")
        threads, first = np.unique(thread[order], return_index=True)
        low, high = (np.searchsorted(self.thread, threads, side=side) for side in ("left", "right"))
        for mine, first_one, past in zip(np.split(order, first[1:]), low, high, strict=False):
            before[mine] = first_one + np.searchsorted(self.start[first_one:past], start[mine], side="right")
        return self._enclosing(before, thread, start, end)

    def _enclosing(self, before: Any, thread: Any, start: Any, end: Any) -> Any:
        """Among those before a position, the last that is open long enough; those of other threads are none."""
        found = last_at_least(self.end, before, np.maximum(end - self.rounding, start + 1))
        return np.where((found >= 0) & (np.append(self.thread, -1)[found] == thread), found, -1)


def nest(frames: pd.DataFrame) -> Nesting:
    """O(n log n) in the frames."""
    start, end, thread, kind = (frames[name].to_numpy() for name in ("start_ns", "end_ns", "thread", "kind"))
    rows = np.flatnonzero((thread != -1) & (kind != SPAN))
    rows = rows[np.lexsort((kind[rows], -end[rows], start[rows], thread[rows]))]
    start, end, thread = start[rows], end[rows], thread[rows]
    coarse = not (start % 1000).any() and not (end % 1000).any()  # torch.profiler before 2.1 wrote whole microseconds
    self = Nesting(rows, np.zeros(0, np.int64), thread, start, end, ROUNDING_NS * (1000 if coarse else 1))
    parent = self._enclosing(np.arange(len(rows)), thread, start, end)
    return Nesting(rows, parent, thread, start, end, self.rounding)


def last_at_least(values: Any, before: Any, least: Any) -> Any:
    """For each query the last position below `before` whose value is at least `least`, -1: none.

    Blocks of two, four, eight, ... values know their greatest one: up from block to block, and down into the one found.
    """
    found = np.full(len(before), -1, np.int64)
    if not len(values):
        return found
    levels = [values]
    while len(levels[-1]) > 1:
        below = levels[-1]
        odd = below if len(below) % 2 == 0 else np.append(below, np.iinfo(np.int64).min)
        levels.append(np.maximum(odd[::2], odd[1::2]))
    at, asking, hits = np.asarray(before, dtype=np.int64), np.arange(len(before)), []
    for level in levels:
        left = np.flatnonzero(at > 0)
        at, asking = at[left], asking[left]
        hit = (at % 2 == 1) & (level[np.maximum(at - 1, 0)] >= least[asking])
        hits.append((asking[hit], at[hit] - 1))
        at, asking = at[~hit] // 2, asking[~hit]
    query, block = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for depth in range(len(levels) - 1, -1, -1):
        query, block = np.concatenate((query, hits[depth][0])), np.concatenate((block, hits[depth][1]))
        if depth:
            below = levels[depth - 1]
            right = np.minimum(2 * block + 1, len(below) - 1)
            block = np.where(below[right] >= least[query], right, 2 * block)
    found[query] = block
    return found


def compress(parent: Any, keep: Any) -> Any:
    """The nearest ancestor of each that is among those to keep, -1: none."""
    parent = parent.copy()
    while len(dropped := np.flatnonzero((parent >= 0) & ~np.append(keep, True)[parent])):
        parent[dropped] = parent[parent[dropped]]
    return parent


def depths(parent: Any) -> Any:
    """How many stand around each."""
    depth, above = (parent >= 0).astype(np.int64), parent.copy()
    while len(far := np.flatnonzero(above >= 0)):  # depth counts the steps to `above`, which go twice as far each time
        depth[far] += depth[above[far]]
        above[far] = above[above[far]]
    return depth


def levels(depth: Any, needed: Any) -> Iterator[Any]:
    """The positions at depth 0, 1, ... of those needed; what is around one that is needed must be needed too."""
    rows = np.flatnonzero(needed)
    rows = rows[np.argsort(depth[rows], kind="stable")]
    for low, high in pairwise(np.searchsorted(depth[rows], np.arange(depth[rows].max(initial=-1) + 2))):
        yield rows[low:high]
