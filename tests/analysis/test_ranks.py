"""Several ranks: collectives matched, clocks aligned, waiting told from transfer, by hand and by property."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_traces import BEGIN, RankTrace, made, steps

from worklog.analysis import ranks
from worklog.analysis.collectives import BEFORE
from worklog.analysis.ranks import Ranks
from worklog.diagnose import examine


def together(folder: Path, traces: Sequence[RankTrace]) -> Ranks:
    return ranks.together([member for trace in traces for member in examine(trace.write(folder)).members])


def test_a_slow_rank_by_hand(tmp_path: Path) -> None:
    """Rank 0 computes 100 us and waits 300 for rank 1, which computes 400; both then transfer for 50. Three steps."""
    found = together(tmp_path, steps([(100, 400)] * 3, transfer=50, offsets=[0, 7000]))
    first, second = found.clocks
    assert (first.rank, first.offset_ns, first.uncertainty_ns) == (0, 0, 0)
    assert (second.rank, second.offset_ns, second.uncertainty_ns, second.collectives) == (1, -7_000_000, 0, 3)
    # Rank 1 ends no collective (450) before rank 0 began it (100); rank 0 ends none (450) before rank 1 began it (400).
    assert second.bounds_ns == (-7_000_000 - 350_000, -7_000_000 + 50_000)
    calls = found.calls
    assert calls[calls["member"] == 0]["waiting_ns"].tolist() == [300_000] * 3
    assert calls[calls["member"] == 1]["waiting_ns"].tolist() == [0] * 3
    assert calls["transfer_ns"].tolist() == [50_000] * 6
    assert set(calls["late"]) == {1}
    assert set(calls["lead_ns"]) == {300_000}
    assert sorted(calls["follows"].tolist()) == [False] * 2 + [True] * 4
    steady = calls[calls["follows"]]
    assert set(steady["behind_compute"]) == {300_000}
    assert {part: steady[f"behind_{part}"].abs().sum() for part in BEFORE if part != "compute"} == dict.fromkeys(
        [part for part in BEFORE if part != "compute"], 0
    )
    assert found.ranks[0].kernels == {"gemm": 2 * 100_000}  # before the first collective nothing is compared
    summary = ranks.summary(found)
    assert summary["ranks"][0] == {
        "label": "rank 0",
        "rank": 0,
        "device": 0,
        "kernels": 3,
        "communication_ns": 3 * 350_000,
        "waiting_ns": 3 * 300_000,
        "transfer_ns": 3 * 50_000,
        "unsplit_ns": 0,
        "exposed_ns": {"waiting": 3 * 300_000, "transfer": 3 * 50_000, "unsplit": 0},
        "arrived_last": 0,
    }
    assert summary["ranks"][1]["arrived_last"] == 3
    assert summary["waits"] == [{"waiting": "rank 0", "late": "rank 1", "count": 3, "waiting_ns": 900_000}]
    assert summary["calls"] == [
        {"name": "allreduce", "group": "0 [0, 1]", "count": 3, "median_transfer_ns": 50_000, "waiting_ns": 900_000}
    ]
    assert summary["partial"] == 0


def test_what_runs_beside_compute_is_not_exposed(tmp_path: Path) -> None:
    """After BEGIN rank 0's collective is [100, 450); it computes on another stream in [80, 200) and [420, 600)."""
    both = steps([(100, 400)], transfer=50)
    both[0].kernel("beside", BEGIN + 80, BEGIN + 200, 5, stream=9)
    both[0].kernel("beside", BEGIN + 420, BEGIN + 600, 6, stream=9)
    found = together(tmp_path, both)
    split = ranks.summary(found)["ranks"][0]
    assert (split["waiting_ns"], split["transfer_ns"]) == (300_000, 50_000)
    assert split["exposed_ns"] == {"waiting": 200_000, "transfer": 20_000, "unsplit": 0}


def test_time_before_a_collective_in_its_parts(tmp_path: Path) -> None:
    """Between the ends of collectives and their next starts rank 1 has 30 us of late launch beside its compute."""
    now, both = 0.0, [RankTrace(0), RankTrace(1)]
    for step in range(3):
        for rank, late in enumerate((0, 30)):
            both[rank].kernel("gemm", now + late, now + late + 50, now + late - 4)  # the call: 4 before its kernel
            both[rank].collective(now + 50 + late, now + 100, now - 4, step)
        now += 100
    calls = together(tmp_path, both).calls
    steady = calls[calls["follows"] & (calls["member"] == 0)]
    assert steady["waiting_ns"].tolist() == [30_000] * 2
    assert steady["behind_compute"].tolist() == [0] * 2
    assert steady["behind_host"].tolist() == [30_000] * 2  # its launch began 26 us after the device fell idle
    assert steady["behind_launch"].tolist() == [0] * 2


def test_matched_by_number_not_by_place(tmp_path: Path) -> None:
    """Rank 1's profiler began a step later: its first kernel is rank 0's second."""
    both = steps([(100, 400), (120, 300), (90, 500)], offsets=[0, -1e6])
    both[1].events = both[1].events[5:]
    found = together(tmp_path, both)
    assert found.clocks[1].offset_ns == 1_000_000_000
    assert found.calls[found.calls["member"] == 0]["waiting_ns"].tolist() == [180_000, 410_000]
    assert ranks.summary(found)["ranks"][0]["unsplit_ns"] == 350_000  # whom rank 0 waited for at first is not known


def test_without_numbers_the_order_counts_if_all_ranks_have_the_same(tmp_path: Path) -> None:
    both = steps([(100, 400), (120, 300)], offsets=[0, 55], numbered=False)
    found = together(tmp_path, both)
    assert found.calls[found.calls["member"] == 0]["waiting_ns"].tolist() == [300_000, 180_000]
    both[1].events = both[1].events[5:]
    lost = together(tmp_path, both)
    assert lost.calls.empty
    assert "does not number the collectives of 0 [0, 1]" in lost.reasons[0]
    assert "(2, 1)" in lost.reasons[0]
    assert [one["waiting_ns"] for one in ranks.summary(lost)["ranks"]] == [0, 0]
    assert [one["unsplit_ns"] for one in ranks.summary(lost)["ranks"]] == [350_000 + 230_000, 50_000]


def test_kernels_of_which_nothing_is_told_match_by_stream_and_name(tmp_path: Path) -> None:
    both = steps([(100, 400), (300, 120)])
    for trace in both:
        trace.events = [event for event in trace.events if event["cat"] != "cpu_op"]
    found = together(tmp_path, both)
    assert found.calls[found.calls["member"] == 0]["waiting_ns"].tolist() == [300_000, 0]
    assert set(found.calls["group"]) == {"stream 0"}
    assert set(found.calls["size"]) == {-1}


def test_a_broadcast_or_a_send_is_neither_waiting_nor_transfer(tmp_path: Path) -> None:
    """Its root may be done before the others begin, so nothing is known of the clocks from it either."""
    both = [RankTrace(0), RankTrace(1)]
    for rank, trace in enumerate(both):
        trace.collective(100 * rank, 100 * rank + 50, -5, 0, **{"Collective name": "broadcast"})
    found = together(tmp_path, both)
    assert found.calls.empty
    assert [one["unsplit_ns"] for one in ranks.summary(found)["ranks"]] == [50_000, 50_000]


def test_ranks_whose_traces_are_missing_are_counted(tmp_path: Path) -> None:
    both = steps([(100, 400, 700, 50)] * 2)[:2]
    found = ranks.summary(together(tmp_path, both))
    assert found["partial"] == 2  # waiting for rank 2 counts as transfer
    assert found["ranks"][1]["waiting_ns"] == 0


def test_clocks_over_a_rank_in_the_middle_and_a_rank_apart(tmp_path: Path) -> None:
    """Ranks 0 and 1 share one group, 1 and 2 another; rank 3 shares its collectives with nobody."""
    four = [RankTrace(rank, offset) for rank, offset in enumerate((0, 100, -300, 0))]
    for step in range(2):
        now = 1000 * step
        for group, members in (("a", (0, 1)), ("b", (1, 2)), ("c", (3,))):
            now += 200
            for rank in members:
                four[rank].collective(
                    now + 10 * rank, now + 100, now - 9, step, members, **{"Process Group Name": group}
                )
    found = together(tmp_path, four)
    assert [(clock.rank, clock.offset_ns) for clock in found.clocks] == [(0, 0), (1, -100_000), (2, 300_000)]
    assert set(found.calls["waiting_ns"]) == {10_000, 0}


def test_a_clock_that_jumped_is_said(tmp_path: Path) -> None:
    both = steps([(100, 400)] * 4)
    for event in both[1].events[10:]:
        event["ts"] += 5000
    clock = together(tmp_path, both).clocks[1]
    assert clock.bounds_ns is None
    assert clock.uncertainty_ns == 5_000_000


def test_offset_is_the_median_of_the_ends_and_lies_where_causes_come_first() -> None:
    """Ends differ by 0, 0 and 9; then by -30, 50 and 50, but rank 1 began the first at 99, when rank 0 ended at 100."""
    first = made(0, np.array([0, 200, 400]), np.array([100, 300, 500]))
    clock = ranks.together([first, made(1, np.array([50, 210, 410]), np.array([100, 300, 491]))]).clocks[1]
    assert (clock.offset_ns, clock.uncertainty_ns, clock.bounds_ns) == (0, 9, (-91, 50))
    clock = ranks.together([first, made(1, np.array([99, 210, 410]), np.array([130, 250, 450]))]).clocks[1]
    assert (clock.offset_ns, clock.uncertainty_ns, clock.bounds_ns) == (1, 49, (-50, 1))


def test_several_kernels_of_one_call_match_one_by_one(tmp_path: Path) -> None:
    """As a call on many tensors launches them: rank 1 is late at the first, rank 0 at the second."""
    both = [RankTrace(0), RankTrace(1)]
    for rank, trace in enumerate(both):
        for part, (arrival, end) in enumerate((((100, 200), (260, 300)), ((180, 200), (210, 300)))[rank]):
            trace.collective(arrival, end, 10 * part, 7)
    calls = together(tmp_path, both).calls
    assert calls["key"].nunique() == 2
    assert calls[calls["member"] == 0]["waiting_ns"].tolist() == [80_000, 0]
    assert calls[calls["member"] == 1]["waiting_ns"].tolist() == [0, 50_000]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[tuple[Any, Any]], list[int], int]:
    """True times of each rank's collectives, the ranks' clock offsets, and how far ends of one collective differ."""
    count, size = draw(st.integers(2, 4)), draw(st.integers(1, 8))
    small, jitter = st.integers(0, 1000), draw(st.integers(0, 20))
    now, times = 0, [([], []) for _ in range(count)]
    for _ in range(size):
        arrivals = [now + draw(small) for _ in range(count)]
        done = max(arrivals) + draw(st.integers(0, 100))
        for (start, end), arrival in zip(times, arrivals, strict=True):
            start.append(arrival)
            end.append(done + draw(st.integers(0, jitter)))
        now = done + jitter
    offsets = [draw(st.integers(-(10**15), 10**15)) for _ in range(count)]
    return [(np.array(start), np.array(end)) for start, end in times], offsets, jitter


@settings(max_examples=300, deadline=None)
@given(runs())
def test_any_offsets_are_recovered_and_change_no_waiting(run: tuple[list[tuple[Any, Any]], list[int], int]) -> None:
    times, offsets, jitter = run
    found = ranks.together(
        [made(at, start + o, end + o) for at, ((start, end), o) in enumerate(zip(times, offsets, strict=True))]
    )
    for clock, offset in zip(found.clocks, offsets, strict=True):
        truth = offsets[0] - offset
        assert clock.bounds_ns is not None
        assert clock.bounds_ns[0] <= truth <= clock.bounds_ns[1]  # whatever the ends do
        assert clock.bounds_ns[0] <= clock.offset_ns <= clock.bounds_ns[1]
        assert abs(clock.offset_ns - truth) <= jitter
        ends = times[0][1] - times[clock.rank][1]
        if ends.min() <= 0 <= ends.max():  # the truth is among the differences of the ends
            assert abs(clock.offset_ns - truth) <= clock.uncertainty_ns
    calls = found.calls
    assert len(calls) == sum(len(start) for start, _ in times)
    assert (calls["waiting_ns"] + calls["transfer_ns"] == calls["end_ns"] - calls["start_ns"]).all()
    assert (calls["waiting_ns"] >= 0).all()
    assert (calls["transfer_ns"] >= 0).all()
    plain = ranks.together([made(at, start, end) for at, (start, end) in enumerate(times)])
    for column in ("waiting_ns", "transfer_ns", "late", "lead_ns"):
        assert plain.calls[column].tolist() == calls[column].tolist()
    if jitter == 0:
        last = np.max([start for start, _ in times], axis=0)
        for member, (start, _) in enumerate(times):
            assert calls[calls["member"] == member]["waiting_ns"].tolist() == (last - start).tolist()


@pytest.mark.parametrize("shift", [0, 1_790_857_026_000_000_000])
def test_no_digit_is_lost_in_nanoseconds_since_1970(shift: int) -> None:
    start, end = np.array([1, 100]) + shift, np.array([50, 151]) + shift
    found = ranks.together([made(0, start, end), made(1, start + 7, end)])
    assert found.clocks[1].offset_ns == 0
    assert found.calls["waiting_ns"].tolist() == [7, 0, 7, 0]
