"""The accounting: eight numbers worked out by hand, and against a count of single nanoseconds."""

from __future__ import annotations

from typing import Any

import pytest
from hand_made import trace
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.analysis import kernels
from worklog.analysis.timeline import PARTS, Timeline, account, join_rate, lost_launches
from worklog.traces.intervals import Intervals, whole
from worklog.traces.schema import COMMUNICATION, COMPUTE, COPY, COPYING, GRAPH, LAUNCH, MEMSET, OTHER, SYNC, Trace


def parts(line: Timeline) -> dict[str, int]:
    """Those that are not zero; they must add up."""
    assert tuple(line.accounting_ns) == PARTS
    assert sum(line.accounting_ns.values()) == line.span_ns
    return {part: ns for part, ns in line.accounting_ns.items() if ns}


def test_what_overlaps_belongs_to_the_first_of_compute_communication_copy_memset() -> None:
    work = [
        (0, 100, COMPUTE, -1),
        (50, 150, COMPUTE, -1),  # another stream: together [0, 150)
        (120, 200, COMMUNICATION, -1),  # alone in [150, 200)
        (190, 260, COPY, -1),  # alone in [200, 260)
        (90, 300, MEMSET, -1),  # alone in [260, 300)
    ]
    line = account(trace(work), 0, whole(0, 300))
    assert parts(line) == {"compute": 150, "communication": 50, "copy": 60, "memset": 40}
    assert line.busy_ns == 300
    # Cut on both sides: compute [100, 150), communication [150, 170).
    assert parts(account(trace(work), 0, whole(100, 170))) == {"compute": 50, "communication": 20}


CALLS = [
    (0, 10, LAUNCH),  # 0: kernel [20, 100) starts 10 after its call returned
    (30, 40, LAUNCH),  # 1: begun while the first ran; its kernel starts at 103
    (110, 190, OTHER),  # 2: something that launches nothing
    (250, 260, LAUNCH),  # 3: asked for 50 after the device fell idle
    (300, 420, SYNC),  # 4: waits for the kernel that ends at 400, and 20 longer
    (450, 455, LAUNCH),  # 5
]
WORK = [
    (20, 100, COMPUTE, 0),
    (103, 200, COMPUTE, 1),
    (270, 400, COMPUTE, 3),
    (460, 500, COMPUTE, 5),
]


def test_each_gap_by_what_the_launching_thread_did() -> None:
    t = trace(WORK, CALLS)
    (window,) = t.select().windows.values()
    assert (window.start.tolist(), window.end.tolist()) == ([0], [500])
    line = account(t, 0, window)
    # [0, 20) and [100, 103): the call had begun. [200, 270): it had not. [400, 460): 20 in the sync, then 40 in Python.
    assert parts(line) == {"compute": 80 + 97 + 130 + 40, "launch": 20 + 3, "host": 70 + 40, "sync": 20}
    gaps = line.gaps
    assert gaps["next"].tolist() == [0, 1, 2, 3]
    assert gaps["launching"].tolist() == [20, 3, 270 - 250, 460 - 450]
    assert join_rate(t, t.select().launched) == 1.0
    assert lost_launches(t, t.select().called) == (0, 0)


def test_waiting_of_another_thread_is_not_that_of_the_launching_one() -> None:
    line = account(trace(WORK, CALLS, thread=[0, 0, 0, 0, 1, 0]), 0, whole(0, 500))
    assert parts(line) == {"compute": 347, "launch": 23, "host": 70 + 60}


def test_return_of_a_blocking_copy_is_sync_and_its_begin_is_not() -> None:
    calls = [(0, 95, COPYING), (120, 130, LAUNCH), (131, 140, COPYING), (300, 310, LAUNCH)]
    work = [
        (30, 60, COPY, 0),  # two pieces of one pageable copy: [60, 70) is on its way
        (70, 80, COPY, 0),  # the call returns 15 later
        (150, 200, COMPUTE, 1),
        (200, 250, COPY, 2),  # from pinned memory: its call was back before the copy ran
        (330, 340, COMPUTE, 3),
    ]
    line = account(trace(work, calls), 0, whole(0, 340))
    # [80, 150): 15 in the copy's return, then late; [250, 330): late, the call of the copy was over at 140.
    assert parts(line) == {"compute": 60, "copy": 90, "launch": 30 + 10, "sync": 15, "host": 55 + 80}


def test_without_a_known_call_or_a_successor_a_gap_is_unexplained() -> None:
    t = trace([(10, 20, COMPUTE, 0), (40, 50, COMPUTE, -1)], [(5, 8, LAUNCH)])
    line = account(t, 0, whole(0, 100))
    assert parts(line) == {"compute": 20, "host": 10, "unexplained": 20 + 50}
    assert line.gaps["next"].tolist() == [0, 1, -1]
    assert join_rate(t, t.select().launched) == 0.5


def test_graph_as_one_piece_is_busy_but_unexplained() -> None:
    work = [(10, 20, COMPUTE, 0), (15, 100, GRAPH, 1), (90, 110, COPY, 2)]
    t = trace(work, [(0, 5, LAUNCH), (6, 9, LAUNCH), (9, 10, COPYING)], graph=[1])
    line = account(t, 0, t.select().windows[0])
    assert parts(line) == {"compute": 10, "copy": 20, "launch": 10, "unexplained": 70}
    assert line.busy_ns == 100


def test_idle_after_a_graph_that_left_no_row_is_unexplained() -> None:
    calls = [(0, 5, LAUNCH), (30, 35, LAUNCH), (50, 55, LAUNCH)]
    t = trace([(10, 20, COMPUTE, 0), (60, 70, COMPUTE, 2)], calls, graph=[1])
    line = account(t, 0, whole(0, 70))
    assert parts(line) == {"compute": 20, "launch": 10, "unexplained": 40}
    assert lost_launches(t, t.select().called) == (0, 1)


def test_negative_durations_hold_no_time_and_clocks_may_disagree() -> None:
    work = [(10, 20, COMPUTE, 0), (30, 25, COMPUTE, 1), (40, 50, COMPUTE, 2)]
    t = trace(work, [(0, 5, LAUNCH), (1, 2, LAUNCH), (45, 46, LAUNCH)])  # the last was launched after it began
    line = account(t, 0, whole(0, 50))
    assert parts(line) == {"compute": 20, "launch": 10, "host": 20}
    assert kernels.by_name(t, t.select().launched) == [("kernel_0", 1, 10), ("kernel_2", 1, 10), ("kernel_1", 1, 0)]


def test_devices_are_apart_and_an_empty_trace_has_none() -> None:
    t = trace([(10, 20, COMPUTE, 0), (10, 90, COMPUTE, 1)], [(0, 1, LAUNCH), (5, 6, LAUNCH)], device=[0, 3])
    windows = t.select().windows
    assert {device: parts(account(t, device, w)) for device, w in windows.items()} == {
        0: {"compute": 10, "launch": 10},
        3: {"compute": 80, "launch": 5},
    }
    empty = trace([], [(0, 5, SYNC)])
    assert empty.select().windows == {}
    assert join_rate(empty, empty.select().launched) is None
    assert parts(account(empty, 0, whole(0, 7))) == {"unexplained": 7}
    assert parts(account(trace([]), 0, Intervals.union([], []))) == {}


@st.composite
def random_traces(draw: st.DrawFn) -> tuple[Trace, Any]:
    times = st.integers(0, 60)
    calls = draw(st.lists(st.tuples(times, times, st.sampled_from((LAUNCH, SYNC, COPYING, OTHER))), max_size=8))
    known = st.integers(-1, len(calls) - 1)
    work = draw(st.lists(st.tuples(times, times, st.integers(COMPUTE, GRAPH), known), max_size=10))
    devices = draw(st.lists(st.integers(0, 1), min_size=len(work), max_size=len(work)))
    threads = draw(st.lists(st.integers(0, 1), min_size=len(calls), max_size=len(calls)))
    graph = draw(st.lists(st.integers(0, 30), max_size=2))
    windows = draw(st.lists(st.tuples(times, times), max_size=3))
    t = trace(work, calls, device=devices, thread=threads, graph=graph)
    return t, Intervals.union([low for low, _ in windows], [high for _, high in windows])


def counted(t: Trace, device: int, windows: Intervals) -> dict[str, int]:
    """The definition, nanosecond by nanosecond."""
    names = {COMPUTE: "compute", COMMUNICATION: "communication", COPY: "copy", MEMSET: "memset", GRAPH: "unexplained"}
    every = [tuple(row) for row in t.activities[["start_ns", "end_ns", "kind", "call", "device"]].to_numpy().tolist()]
    own = [row for row in every if row[4] == device and row[1] > row[0]]
    calls = t.calls[["start_ns", "end_ns", "kind", "thread"]].to_numpy().tolist()
    graphs, launched = t.calls["graph"].tolist(), {row[3] for row in every}
    lost = [c[0] for at, c in enumerate(calls) if c[2] == LAUNCH and graphs[at] and at not in launched]
    found = dict.fromkeys(PARTS, 0)
    for low, high in zip(windows.start.tolist(), windows.end.tolist(), strict=True):
        for now in range(low, high):
            running = [row[2] for row in own if row[0] <= now < row[1]]
            if running:
                found[names[min(running)]] += 1
                continue
            begin = max([low, *(row[1] for row in own if row[1] <= now)])
            later = [row for row in own if row[0] > now]
            following = min(later, key=lambda row: row[0], default=None)
            end = min(high, following[0]) if following else high
            if following is None or following[3] < 0 or any(at < end for at in lost):
                found["unexplained"] += 1
                continue
            asked, _, _, thread = calls[following[3]]
            waiting = False
            for at, (start, over, kind, who) in enumerate(calls):
                copied = [row[1] for row in every if row[3] == at]
                since = start if kind == SYNC else max([start, *copied]) if kind == COPYING and copied else over
                waiting |= who == thread and since <= now < min(over, asked)
            found["launch" if asked <= begin else "sync" if waiting else "host"] += 1
    return found


@settings(max_examples=300, deadline=None)
@given(random_traces())
def test_any_timeline_adds_up_and_is_the_definition(case: tuple[Trace, Any]) -> None:
    t, windows = case
    for device in (0, 1):
        line = account(t, device, windows)
        assert all(isinstance(ns, int) and ns >= 0 for ns in line.accounting_ns.values())
        assert sum(line.accounting_ns.values()) == line.span_ns == windows.length
        assert line.accounting_ns == counted(t, device, windows)
    for device, window in t.select().windows.items():
        line = account(t, device, window)
        assert sum(line.accounting_ns.values()) == line.span_ns
        assert min(line.accounting_ns.values()) >= 0


@pytest.mark.parametrize("shift", [0, 1_790_857_026_000_000_001])
def test_no_digit_is_lost_in_nanoseconds_since_1970(shift: int) -> None:
    work = [(start + shift, end + shift, kind, call) for start, end, kind, call in WORK]
    calls = [(start + shift, end + shift, kind) for start, end, kind in CALLS]
    line = account(trace(work, calls), 0, whole(shift, shift + 500))
    assert parts(line) == {"compute": 347, "launch": 23, "host": 110, "sync": 20}
