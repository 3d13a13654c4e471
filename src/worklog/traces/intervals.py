"""Sets of time as disjoint intervals: union, length, intersection. Integer nanoseconds throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Times = NDArray[np.int64]


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [start, end), sorted and apart. `row` says which of the united ones began each."""

    start: Times
    end: Times
    row: NDArray[np.int64]

    @classmethod
    def union(cls, start: ArrayLike, end: ArrayLike) -> Intervals:
        """Overlap and touch make one; those with end <= start hold no time. O(n log n)."""
        low, high = np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64)
        rows = np.flatnonzero(high > low)
        if not (low[rows[1:]] >= low[rows[:-1]]).all():
            rows = rows[np.argsort(low[rows], kind="stable")]
        low, reached = low[rows], np.maximum.accumulate(high[rows])
        first = np.flatnonzero(np.concatenate((np.ones(min(len(low), 1), bool), low[1:] > reached[:-1])))
        last = np.concatenate((first[1:] - 1, [len(low) - 1]))[: len(first)]
        return cls(low[first], reached[last], rows[first])

    @classmethod
    def apart(cls, start: ArrayLike, end: ArrayLike) -> Intervals:
        """Each cut to what those that began earlier leave of it; they stay single, and may touch.

        `row` numbers them in the order of their starts; nothing is left of one inside of another. Their union is that
        of the intervals. O(n log n).
        """
        low, high = np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64)
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
        low = np.maximum(low, np.concatenate((low[:1], np.maximum.accumulate(high)[:-1])))
        kept = np.flatnonzero(high > low)
        return cls(low[kept], high[kept], kept)

    @property
    def length(self) -> int:
        return int((self.end - self.start).sum())

    def before(self, at: ArrayLike) -> Times:
        """How much of this lies before each time."""
        times = np.asarray(at, dtype=np.int64)
        if not len(self.start):
            return np.zeros(times.shape, np.int64)
        begun = np.searchsorted(self.start, times, side="right")
        lengths = np.concatenate((np.zeros(1, np.int64), np.cumsum(self.end - self.start)))
        ahead = np.where(begun > 0, self.end[begun - 1] - times, 0)
        return np.asarray(lengths[begun] - np.maximum(ahead, 0), dtype=np.int64)

    def inside(self, start: ArrayLike, end: ArrayLike) -> Times:
        """How much of this lies in each [start, end); zero where end <= start."""
        low = np.asarray(start, dtype=np.int64)
        return self.before(np.maximum(low, end)) - self.before(low)

    def within(self, windows: Intervals) -> int:
        return int(self.inside(windows.start, windows.end).sum())

    def pieces(self, other: Intervals) -> Intervals:
        """The intersection; a piece for each pair that meets, `row` the index of the interval here."""
        low = np.searchsorted(other.end, self.start, side="right")
        count = np.maximum(np.searchsorted(other.start, self.end, side="left") - low, 0)
        mine = np.repeat(np.arange(len(count)), count)
        theirs = np.arange(len(mine)) + np.repeat(low - (np.cumsum(count) - count), count)
        return Intervals(
            np.maximum(self.start[mine], other.start[theirs]), np.minimum(self.end[mine], other.end[theirs]), mine
        )

    def gaps(self, windows: Intervals) -> Intervals:
        """What of `windows` is not here; `row` is the index here of the interval that follows, or one past the last."""
        limits = np.iinfo(np.int64)
        between = Intervals(
            np.concatenate(([limits.min], self.end)), np.concatenate((self.start, [limits.max])), self.row
        )
        return between.pieces(windows)


def whole(start: int, end: int) -> Intervals:
    return Intervals.union([start], [end])


def union_ns(start: Any, end: Any, windows: Intervals | None = None) -> int:
    """Length of the union of the intervals [start, end), cut to `windows`; overlap counts once. Integer arrays."""
    united = Intervals.union(start, end)
    return united.length if windows is None else united.within(windows)
