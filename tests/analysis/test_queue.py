"""Excess queue time: worked out by hand, and against the definition kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
from hand_made import Call, Work, trace
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.analysis.queue import Queue, Waits, queue
from worklog.traces.schema import COMMUNICATION, COMPUTE, COPY, GRAPH, LAUNCH, MEMSET, Trace


def on_streams(
    work: Sequence[Work], calls: Sequence[Call], stream: Sequence[int], process: Sequence[int] = (), **more: Any
) -> Trace:
    made = trace(work, calls, **more)
    columns = {"stream": np.array(stream, np.int64), "process": np.array(process or [0] * len(work), np.int64)}
    return replace(made, activities=made.activities.assign(**columns))


def test_only_what_neither_the_call_nor_the_stream_explains_is_excess() -> None:
    work = [
        (12, 100, COMPUTE, 0),  # 2 after its call's end
        (103, 200, COMPUTE, 1),  # called at 20; 3 after its predecessor
        (205, 215, COPY, 2),  # no kernel
        (216, 220, COMPUTE, 3),  # 1 after a copy, 156 after its call's end
        (224, 225, MEMSET, 4),
        (225, 230, COMPUTE, 5),  # at once
        (232, 240, COMPUTE, 6),  # began before its call was back
        (290, 300, COMPUTE, 7),  # another stream: 10 after its call's end
    ]
    ends = [10, 20, 30, 60, 70, 80, 236, 280]
    t = on_streams(work, [(end - 8, end, LAUNCH) for end in ends], [7] * 7 + [8])
    # 2, 3, 1, 0, 0, 10
    assert queue(t, 0, t.select().launched).launched == Waits(6, 1, 10, 16)
    inside = np.array([False] * 3 + [True] * 5)  # what ran before the window still held the stream
    assert queue(t, 0, inside).launched == Waits(4, 0, 10, 11)


def test_the_last_end_counts_where_predecessors_overlap_and_processes_have_streams_of_their_own() -> None:
    work = [(10, 90, COMPUTE, 0), (20, 30, COMPUTE, 1), (100, 110, COMPUTE, 2)]
    calls = [(0, 1, LAUNCH), (2, 3, LAUNCH), (4, 5, LAUNCH)]
    t = on_streams(work, calls, [7, 7, 7])
    assert queue(t, 0, t.select().launched).launched == Waits(3, 9, 10, 9 + 0 + 10)
    apart = on_streams(work, calls, [7, 7, 7], [1, 2, 1])
    assert queue(apart, 0, apart.select().launched).launched == Waits(3, 10, 17, 9 + 17 + 10)


def test_nodes_of_a_replay_wait_for_all_of_it_that_began_before_and_the_unjoined_are_counted() -> None:
    work = [
        (20, 30, COMPUTE, 0),  # first of the replay: 8 after its call
        (31, 60, COMPUTE, 0),
        (33, 40, COMPUTE, 0),  # a branch beside it: something of the replay still ran
        (65, 70, COMPUTE, 0),  # 5 after the longer branch
        (80, 90, COMPUTE, 1),  # 10 after the stream's last, though its call was over at 50
        (95, 99, COMPUTE, -1),
    ]
    t = on_streams(work, [(2, 12, LAUNCH), (45, 50, LAUNCH)], [7, 7, 9, 9, 7, 7], graph=[0])
    # The kernel at 80 follows the one that ended at 60 on its stream.
    assert queue(t, 0, t.select().launched) == Queue(Waits(2, 8, 20, 28), Waits(3, 1, 5, 1 + 0 + 5), 1)


def test_without_kernels_or_calls() -> None:
    nothing = Waits(0, None, None, 0)
    for t in (trace([]), trace([(0, 5, COPY, 0)], [(0, 1, LAUNCH)]), trace([(0, 5, GRAPH, 0)], [(0, 1, LAUNCH)])):
        assert queue(t, 0, t.select().launched) == Queue(nothing, nothing, 0)
    t = trace([(0, 5, COMPUTE, -1)])
    assert queue(t, 0, t.select().launched) == Queue(nothing, nothing, 1)


@st.composite
def random_traces(draw: st.DrawFn) -> tuple[Trace, Any]:
    times = st.integers(0, 60)
    spans = draw(st.lists(st.tuples(times, st.integers(0, 20)), max_size=6))
    calls = [(start, start + length, LAUNCH) for start, length in spans]
    rows = draw(
        st.lists(
            st.tuples(times, st.integers(0, 30), st.integers(COMPUTE, GRAPH), st.integers(-1, len(calls) - 1)),
            max_size=12,
        )
    )
    size = len(rows)
    few = st.lists(st.integers(0, 1), min_size=size, max_size=size)
    t = on_streams(
        [(start, start + length, kind, call) for start, length, kind, call in rows],
        calls,
        draw(few),
        draw(few),
        device=draw(few),
        graph=draw(st.lists(st.integers(0, 5), max_size=3)),
    )
    return t, np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)


def summed(excess: Sequence[int]) -> Waits:
    ordered = sorted(excess)
    if not ordered:
        return Waits(0, None, None, 0)
    half, most = (ordered[ceil(len(ordered) * part / 10) - 1] for part in (5, 9))
    return Waits(len(ordered), half, most, sum(ordered))


def counted(t: Trace, device: int, launched: Any) -> Queue:
    """The definition, kernel by kernel. Of those that begin together the first row is the first."""
    names = ["start_ns", "end_ns", "kind", "call", "device", "stream", "process"]
    rows = [row for row in enumerate(t.activities[names].to_numpy().tolist()) if row[1][4] == device]
    rows.sort(key=lambda row: row[1][0])
    calls, graphs = t.calls[["start_ns", "end_ns"]].to_numpy().tolist(), t.calls["graph"].tolist()
    alone, nodes, unjoined = [], [], 0
    for place, (at, (start, _, kind, call, _, stream, process)) in enumerate(rows):
        if kind > COMMUNICATION or not launched[at]:
            continue
        if call < 0:
            unjoined += 1
            continue
        before = [row for _, row in rows[:place]]
        ready = [row[1] for row in before if row[5:] == [stream, process]]
        replay = [row[1] for row in before if graphs[call] and row[3] == call]
        excess = max(0, start - max([calls[call][1], *ready, *replay]))
        (nodes if replay else alone).append(excess)
    return Queue(summed(alone), summed(nodes), unjoined)


@settings(max_examples=300, deadline=None)
@given(random_traces())
def test_any_trace_is_the_definition(case: tuple[Trace, Any]) -> None:
    t, launched = case
    for device in (0, 1):
        assert queue(t, device, launched) == counted(t, device, launched)
