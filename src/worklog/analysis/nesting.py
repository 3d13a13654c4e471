"""Which frame of a host's thread lies in which."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces.schema import SPAN

ROUNDING_NS = 2
"""How far an inner frame may outlive the one around it: begin and duration are rounded one by one."""
STEPS = 64
"""After so many steps outwards, one by one, `around_among` goes on in doubled ones."""
UNKNOWN = -2


class Nesting:
    """The frames that nest, by thread and start, outer ones first: positions are those in this order.

    A frame lies in the innermost one of its thread that was open when it began and is so until it ends, give or take
    the rounding. So one that merely overlaps another lies beside it, in what encloses both; one that ends before it
    begins holds nothing; one whose thread is unknown, and a SPAN, is left out. O(n log n); what encloses a frame is
    searched for when it is asked for.
    """

    def __init__(self, frames: pd.DataFrame) -> None:
        self.row = _ordered(frames)
        """Of the table of frames."""
        self.thread, self.start, self.end = (
            frames[name].to_numpy()[self.row] for name in ("thread", "start_ns", "end_ns")
        )
        # torch.profiler before 2.1 wrote whole microseconds
        coarse = not (self.start % 1000).any() and not (self.end % 1000).any()
        self.rounding = ROUNDING_NS * (1000 if coarse else 1)
        self._parent = np.full(len(self.row), UNKNOWN, np.int64)

    def parent(self, at: Any) -> Any:
        """For each position that of the frame in which it lies, -1: in none."""
        unknown = at[self._parent[at] == UNKNOWN]
        if len(unknown):
            one = positions(unknown, len(self.row))
            self._parent[one] = self._enclosing(one, self.thread[one], self.start[one], self.end[one])
        return self._parent[at]

    def around(self, thread: Any, start: Any, end: Any) -> Any:
        """For each interval on a thread the position of the innermost frame that encloses it, -1: none does."""
        before, order = np.zeros(len(start), np.int64), np.argsort(thread, kind="stable")
        threads, first = np.unique(thread[order], return_index=True)
        low, high = (np.searchsorted(self.thread, threads, side=side) for side in ("left", "right"))
        for mine, first_one, past in zip(np.split(order, first[1:]), low, high, strict=False):
            before[mine] = first_one + np.searchsorted(self.start[first_one:past], start[mine], side="right")
        return self._enclosing(before, thread, start, end)

    def around_among(self, at: Any, among: Any) -> Any:
        """For each position that of the innermost frame around it that is in the mask `among`, -1: none."""
        found = self.parent(at)
        for _ in range(STEPS):
            further = np.flatnonzero(found >= 0)
            further = further[~among[found[further]]]
            if not len(further):
                return found
            found[further] = self.parent(found[further])
        return compress(self.parent(np.arange(len(self.row))), among)[at]

    def _enclosing(self, before: Any, thread: Any, start: Any, end: Any) -> Any:
        """Among those before a position, the last that is open long enough; those of other threads are none."""
        found = last_at_least(self._greatest, before, np.maximum(end - self.rounding, start + 1))
        return np.where((found >= 0) & (np.append(self.thread, -1)[found] == thread), found, -1)

    @cached_property
    def _greatest(self) -> list[Any]:
        return greatest(self.end)


def _ordered(frames: pd.DataFrame) -> Any:
    """Rows by thread, start, end (the last first) and kind; traces are almost so, and an exact sort is for ties."""
    start, end, thread, kind = (frames[name].to_numpy() for name in ("start_ns", "end_ns", "thread", "kind"))
    rows = np.flatnonzero((thread != -1) & (kind != SPAN))
    rows = rows[np.argsort(start[rows], kind="stable")]
    if len(rows) and (thread[rows] != thread[rows[0]]).any():
        rows = rows[np.argsort(thread[rows], kind="stable")]
    same = (start[rows[1:]] == start[rows[:-1]]) & (thread[rows[1:]] == thread[rows[:-1]])
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    group = np.cumsum(~np.append(False, same))[tied]
    rows[tied] = rows[tied[np.lexsort((kind[rows[tied]], -end[rows[tied]], group))]]
    return rows


def positions(at: Any, size: int) -> Any:
    """Each of these once, in order; `size` is that of what they are positions in."""
    if len(at) * 16 < size:
        return np.unique(at)
    mask = np.zeros(size, bool)
    mask[at] = True
    return np.flatnonzero(mask)


def greatest(values: Any) -> list[Any]:
    """The greatest value of every one, two, four, eight, ... neighbours."""
    found = [values]
    while len(found[-1]) > 1:
        below = found[-1]
        even = below if len(below) % 2 == 0 else np.append(below, np.iinfo(np.int64).min)
        found.append(np.maximum(even[::2], even[1::2]))
    return found


def last_at_least(blocks: list[Any], before: Any, least: Any) -> Any:
    """For each query the last position below `before` whose value is at least `least`, -1: none.

    `blocks` is what `greatest` makes of the values: up from block to larger block, then down into the one found.
    """
    found = np.full(len(before), -1, np.int64)
    at, asking, hits = np.asarray(before, dtype=np.int64), np.arange(len(before)), []
    for level in blocks:
        left = np.flatnonzero(at > 0)
        at, asking = at[left], asking[left]
        odd = np.flatnonzero(at & 1)
        hit = odd[level[at[odd] - 1] >= least[asking[odd]]]
        hits.append((asking[hit], at[hit] - 1))
        more = np.ones(len(at), bool)
        more[hit] = False
        at, asking = at[more] >> 1, asking[more]
    query, block = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for depth in range(len(blocks) - 1, -1, -1):
        query, block = np.concatenate((query, hits[depth][0])), np.concatenate((block, hits[depth][1]))
        if depth:
            below = blocks[depth - 1]
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


def levels(parent: Any) -> Iterator[Any]:
    """The positions at depth 0, 1, ..., where `parent` holds the position of what is around each, -1: nothing."""
    depth, above = (parent >= 0).astype(np.int64), parent.copy()
    while len(far := np.flatnonzero(above >= 0)):  # depth counts the steps to `above`, which go twice as far each time
        depth[far] += depth[above[far]]
        above[far] = above[above[far]]
    order = np.argsort(depth, kind="stable")
    for low, high in pairwise(np.searchsorted(depth[order], np.arange(depth.max(initial=-1) + 2))):
        yield order[low:high]
