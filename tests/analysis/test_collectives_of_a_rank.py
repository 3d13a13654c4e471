"""What one rank keeps of its collectives: exposed time, and the parts of the time before each, by a slow count."""

from __future__ import annotations

from typing import Any

from hand_made import trace
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.analysis.collectives import BEFORE, of_trace
from worklog.analysis.timeline import account
from worklog.traces.schema import COMMUNICATION, COMPUTE, COPY, COPYING, GRAPH, LAUNCH, MEMSET, SYNC


@st.composite
def timelines(draw: st.DrawFn) -> Any:
    times = st.integers(0, 60)
    calls = draw(st.lists(st.tuples(times, times, st.sampled_from((LAUNCH, SYNC, COPYING))), min_size=1, max_size=6))
    known = st.integers(-1, len(calls) - 1)
    kinds = st.sampled_from((COMPUTE, COMMUNICATION, COMMUNICATION, COPY, MEMSET, GRAPH))
    work = draw(st.lists(st.tuples(times, times, kinds, known), min_size=1, max_size=10))
    return trace([(min(low, high), max(low, high), kind, call) for low, high, kind, call in work], calls)


@settings(max_examples=300, deadline=None)
@given(timelines())
def test_time_before_collectives_and_exposed_time_nanosecond_by_nanosecond(one: Any) -> None:
    chosen = one.select()
    lines = [account(one, device, window) for device, window in chosen.windows.items()]
    work = one.activities[["start_ns", "end_ns", "kind"]].to_numpy().tolist()
    talks = sorted(((s, e) for s, e, k in work if k == COMMUNICATION), key=lambda times: times[0])
    for line, rank in zip(lines, of_trace(one, chosen, lines, lines), strict=True):
        assert rank.exposed.length == line.accounting_ns["communication"]
        assert len(rank.collectives) == len(talks)
        begin = min([*chosen.windows[0].start.tolist(), *(s for s, _, _ in work)])
        for (start, end), row in zip(talks, rank.collectives.to_dict("records"), strict=True):
            assert (row["start_ns"], row["end_ns"]) == (start, end)
            found = dict.fromkeys(BEFORE, 0)
            for now in range(min(begin, start), start):
                running = [k for s, e, k in work if s <= now < e]
                if running:
                    found[{COMPUTE: "compute", COPY: "copy", MEMSET: "memset", GRAPH: "unexplained"}[min(running)]] += 1
            busy = sum(found.values())
            for part in ("compute", "copy", "memset"):
                assert row[part] == found[part]
            assert sum(row[part] for part in BEFORE) == max(start - begin, 0)
            assert sum(row[part] for part in ("launch", "host", "sync", "unexplained")) >= max(start - begin, 0) - busy
            begin = max(begin, end)
