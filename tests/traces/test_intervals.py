"""Interval arithmetic against sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worklog.traces.intervals import Intervals

SPANS = st.lists(st.tuples(st.integers(-20, 40), st.integers(-20, 40)), max_size=12)
"""(start, end); where end <= start it holds no time."""


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


def union(spans: list[tuple[int, int]]) -> Intervals:
    return Intervals.union([start for start, _ in spans], [end for _, end in spans])


def of(intervals: Intervals) -> set[int]:
    return points(list(zip(intervals.start.tolist(), intervals.end.tolist(), strict=True)))


@given(SPANS, SPANS)
def test_every_operation_is_that_of_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = union(first), union(second)
    assert of(a) == points(first)
    assert a.length == len(points(first))
    assert (a.start[1:] > a.end[:-1]).all()
    assert [first[row][0] for row in a.row] == a.start.tolist()
    pieces, gaps = a.pieces(b), a.gaps(b)
    assert of(pieces) == points(first) & points(second)
    assert pieces.length == a.within(b) == len(points(first) & points(second))
    assert of(gaps) == points(second) - points(first)
    assert gaps.length == len(of(gaps))
    for end, row in zip(gaps.end.tolist(), gaps.row.tolist(), strict=True):
        assert row == len(a.start) or a.start[row] >= end
        assert row == 0 or a.end[row - 1] < end
    at = np.arange(-25, 45)
    assert a.before(at).tolist() == [len({p for p in points(first) if p < t}) for t in at]
    starts, ends = [s for s, _ in second], [e for _, e in second]
    assert a.inside(starts, ends).tolist() == [len(points(first) & set(range(s, e))) for s, e in second]
