"""Several ranks: collectives matched, clocks aligned, waiting told from transfer: by hand, by property, on a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import trace as timeline
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_traces import BEGIN, RankTrace, steps

from worklog.analysis import ranks
from worklog.analysis.collectives import BEFORE, Rank, of_trace
from worklog.analysis.ranks import Ranks
from worklog.analysis.timeline import account
from worklog.diagnose import diagnose, examine
from worklog.traces import kineto
from worklog.traces.intervals import Intervals
from worklog.traces.schema import COMMUNICATION, COMPUTE, COPY, COPYING, GRAPH, LAUNCH, MEMSET, SYNC


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


def made(rank: int, start: Any, end: Any) -> Rank:
    """A rank of which only the times of its collectives are known."""
    size = len(start)
    rows = pd.DataFrame({"start_ns": start, "end_ns": end, "number": np.arange(size)})
    rows = rows.assign(group="0", name="allreduce", numbered=True, size=-1, every=True, follows=True)
    return Rank(rank, 0, 1, Intervals.union(start, end), rows.assign(**dict.fromkeys(BEFORE, 0)), {}, {})


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


@st.composite
def timelines(draw: st.DrawFn) -> Any:
    times = st.integers(0, 60)
    calls = draw(st.lists(st.tuples(times, times, st.sampled_from((LAUNCH, SYNC, COPYING))), min_size=1, max_size=6))
    known = st.integers(-1, len(calls) - 1)
    kinds = st.sampled_from((COMPUTE, COMMUNICATION, COMMUNICATION, COPY, MEMSET, GRAPH))
    work = draw(st.lists(st.tuples(times, times, kinds, known), min_size=1, max_size=10))
    return timeline([(min(low, high), max(low, high), kind, call) for low, high, kind, call in work], calls)


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


@pytest.mark.parametrize("shift", [0, 1_790_857_026_000_000_000])
def test_no_digit_is_lost_in_nanoseconds_since_1970(shift: int) -> None:
    start, end = np.array([1, 100]) + shift, np.array([50, 151]) + shift
    found = ranks.together([made(0, start, end), made(1, start + 7, end)])
    assert found.clocks[1].offset_ns == 0
    assert found.calls["waiting_ns"].tolist() == [7, 0, 7, 0]


SLOW_S = 0.1
STEPS = 4


def record_gloo(rank: int, folder: Path) -> None:
    """Rank 1 sleeps before each all-reduce. torch.profiler writes what happened, on this rank's clock."""
    import time

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            time.sleep(SLOW_S * rank)
            dist.all_reduce(torch.ones(1000))
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo outlive Python now and then, which then aborts


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("gloo")
    context = get_context("spawn")
    processes = [context.Process(target=record_gloo, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    return [folder / "rank0.json", folder / "rank1.json"]


def test_a_real_run_of_two_processes(gloo: list[Path]) -> None:
    """gloo moves data on the host, so its collectives are annotations and no kernels; their times are as real.

    Both have one clock, and rank 0 waits for about as long as rank 1 sleeps.
    """
    members = []
    for rank, file in enumerate(gloo):
        trace = kineto.tables(file)
        assert trace.rank == rank
        ran = trace.frames[trace.frames["name"] == "gloo:all_reduce"].sort_values("start_ns")
        assert len(ran) == STEPS
        members.append(made(rank, ran["start_ns"].to_numpy(), ran["end_ns"].to_numpy()))
    found = ranks.together(members)
    clock = found.clocks[1]
    assert clock.bounds_ns is not None
    assert clock.bounds_ns[0] <= 0 <= clock.bounds_ns[1]
    later = found.calls[found.calls["key"] > 0]  # in the first, one may wait for the other's profiler
    waited = later.groupby("member")["waiting_ns"].sum()
    assert waited[0] > 0.5 * (STEPS - 1) * SLOW_S * 1e9  # other work on this machine delays rank 0 too
    assert waited[0] > 3 * waited[1]


def test_what_diagnose_says_of_ranks_without_a_gpu(gloo: list[Path]) -> None:
    found = diagnose(gloo[0])
    assert found["devices"] == []
    assert {one["reason"] for one in found["abstained"]} == {"the trace holds no work of a GPU"}
