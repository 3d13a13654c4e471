"""Each busy nanosecond belongs to one activity: by hand, and against a count of single nanoseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hand_made import trace
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.analysis.exclusive import Occurrences, attribute
from worklog.analysis.timeline import BUSY, account
from worklog.traces import schema
from worklog.traces.intervals import Intervals
from worklog.traces.schema import ANNOTATION, COMMUNICATION, COMPUTE, COPY, FRAME, GRAPH, LAUNCH, MEMSET, Trace


def ranges(t: Trace, name: str, times: list[tuple[int, int]]) -> Trace:
    """The trace with occurrences of a range on its thread 0."""
    frames = schema.frame(
        FRAME,
        start_ns=[low for low, _ in times],
        end_ns=[high for _, high in times],
        thread=[0] * len(times),
        process=[0] * len(times),
        kind=[ANNOTATION] * len(times),
        name=schema.categories([0] * len(times), [name]),
    )
    return replace(t, frames=frames)


def given_to(t: Trace, *windows: tuple[int, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, occurrence) -> (ns, exclusive ns)."""
    apart = Intervals.apart([low for low, _ in windows], [high for _, high in windows])
    found = attribute(t, 0, Occurrences(len(windows), apart))
    return {(row, at): (ns, own) for row, at, ns, own in found.itertuples(index=False)}


def test_the_kind_that_comes_first_and_then_what_began_first_has_the_time() -> None:
    work = [
        (10, 50, COMPUTE, -1),
        (20, 40, COMPUTE, -1),  # inside of the first: nothing is its own
        (45, 70, COMPUTE, -1),  # [50, 70)
        (0, 90, COPY, -1),  # [0, 10) and what is left after the collective: [80, 90)
        (60, 80, COMMUNICATION, -1),  # [70, 80)
        (10, 50, COMPUTE, -1),  # as the first, which stands before it
        (85, 100, GRAPH, -1),  # [95, 100)
        (5, 95, MEMSET, -1),  # [90, 95)
    ]
    assert given_to(trace(work), (0, 100)) == {
        (0, 0): (40, 40),
        (1, 0): (20, 0),
        (2, 0): (25, 20),
        (3, 0): (90, 20),
        (4, 0): (20, 10),
        (5, 0): (40, 0),
        (6, 0): (15, 5),
        (7, 0): (90, 5),
    }


def test_an_activity_that_crosses_occurrences_is_cut_between_them() -> None:
    work = [(10, 60, COMPUTE, -1), (0, 100, COPY, -1), (70, 70, COMPUTE, -1), (90, 80, COMPUTE, -1)]
    assert given_to(trace(work), (0, 30), (30, 50), (80, 100)) == {
        (0, 0): (20, 20),
        (0, 1): (20, 20),
        (1, 0): (30, 10),
        (1, 1): (20, 0),
        (1, 2): (20, 20),
    }


def test_occurrences_that_overlap_are_cut_where_the_earlier_ends() -> None:
    # Two steps of which the second is asked for at 12, while the first runs until 40; the ranges touch at 10.
    calls = [(0, 5, LAUNCH), (12, 15, LAUNCH), (60, 65, LAUNCH)]
    t = ranges(
        trace([(7, 40, COMPUTE, 0), (40, 55, COMPUTE, 1), (70, 80, COMPUTE, 2)], calls), "s", [(0, 10), (10, 20)]
    )
    chosen = t.select("s")
    found = Occurrences.of(chosen, 0)
    assert found.count == 2
    assert (found.windows.start.tolist(), found.windows.end.tolist()) == ([0, 40], [40, 55])
    assert found.at([0, 39, 40, 54]).tolist() == [0, 0, 1, 1]
    assert found.windows.length == chosen.windows[0].length


times = st.integers(0, 40)
activity = st.tuples(times, times, st.integers(COMPUTE, GRAPH), st.just(-1))


@settings(max_examples=300, deadline=None)
@given(st.lists(activity, max_size=10), st.lists(st.tuples(times, times), max_size=4))
def test_any_timeline_is_the_definition_and_gives_the_accountings_parts(work: list[Any], windows: list[Any]) -> None:
    expected: dict[tuple[int, int], list[int]] = {}
    ordered = sorted(range(len(windows)), key=lambda at: windows[at][0])  # stable, as occurrences are numbered
    for now in range(41):
        within = [n for n, at in enumerate(ordered) if windows[at][0] <= now < windows[at][1]]
        running = [row for row, (low, high, *_) in enumerate(work) if low <= now < high]
        if not within:
            continue
        for row in running:
            expected.setdefault((row, within[0]), [0, 0])[0] += 1
        if running:
            owner = min(running, key=lambda row: (work[row][2], work[row][0], row))
            expected[owner, within[0]][1] += 1
    t = trace(work)
    assert given_to(t, *windows) == {key: tuple(value) for key, value in expected.items()}

    apart = Intervals.apart([low for low, _ in windows], [high for _, high in windows])
    united = Intervals.union(apart.start, apart.end)
    assert apart.length == united.length
    line, found = account(t, 0, united), attribute(t, 0, Occurrences(len(windows), apart))
    assert found["exclusive_ns"].sum() == line.busy_ns
    for kind, part in BUSY.items():
        if part != "unexplained":
            own = found.loc[t.activities["kind"].to_numpy()[found["row"]] == kind, "exclusive_ns"]
            assert own.sum() == line.accounting_ns[part]


@pytest.mark.parametrize("device", [0, 1])
def test_devices_are_apart(device: int) -> None:
    t = trace([(0, 10, COMPUTE, -1), (5, 30, COMPUTE, -1)], device=[0, 1])
    found = attribute(t, device, Occurrences(1, Intervals.apart([0], [40])))
    expected = pd.DataFrame(
        {"row": [device], "occurrence": [0], "ns": [[10, 25][device]], "exclusive_ns": [[10, 25][device]]}
    )
    pd.testing.assert_frame_equal(found, expected)
