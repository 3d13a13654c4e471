"""Rules on several ranks: traces of runs whose answer is known, and of runs in which nothing is to be found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rank_traces import BEGIN, RankTrace, steps

from worklog.analysis import ranks
from worklog.diagnose import diagnose, examine
from worklog.rules import Abstained, Finding
from worklog.rules.communication import communication_not_overlapped, straggler


def together(folder: Path, traces: Sequence[RankTrace]) -> ranks.Ranks:
    return ranks.together([member for trace in traces for member in examine(trace.write(folder)).members])


def test_one_late_rank_is_named_with_what_it_does_meanwhile(tmp_path: Path) -> None:
    """Rank 1's kernel takes 400 us in each of 5 steps, where others take 100; 50 us of a step's 450 are transfer."""
    three = steps([(100, 400, 110)] * 5, names=["gemm", "extra", "gemm"], offsets=[0, 123, -77])
    found = straggler(together(tmp_path, three))
    assert isinstance(found, Finding)
    assert found.title == (
        "Rank 0 waits 51% of the time in collectives for rank 1, which comes late: it has more compute before them"
    )
    span = BEGIN + 5 * 450
    assert found.share == 4 * 300 / span  # the first collective of a trace does not count
    assert found.gain_upper_bound == 4 * 290 / span  # then they would wait for rank 2
    evidence = found.evidence
    assert (evidence["late"], evidence["waiting"]) == ("rank 1", "rank 0")
    assert (evidence["arrived_last"], evidence["collectives"]) == (4, 4)
    assert evidence["exposed_waiting_ns"] == 4 * 300_000
    assert evidence["median_lead_ns"] == 290_000
    assert evidence["behind_in_compute_ns"] == 4 * (400 - 105) * 1000  # the median of the others
    assert found.where[:2] == ["rank 1", "extra"]
    assert "rank%q{RANK}" in found.next


def test_ranks_that_take_turns_are_no_straggler(tmp_path: Path) -> None:
    turns = [(100, 400) if step % 2 else (400, 100) for step in range(9)]
    found = straggler(together(tmp_path, steps(turns)))
    assert isinstance(found, Finding)
    assert found.title.endswith("the ranks take turns in being late")
    assert found.where == []


def test_waiting_beside_compute_costs_nothing(tmp_path: Path) -> None:
    both = steps([(100, 400)] * 5)
    both[0].kernel("beside", BEGIN, BEGIN + 5 * 450, 5, stream=9)
    found = together(tmp_path, both)
    assert ranks.summary(found)["ranks"][0]["waiting_ns"] == 5 * 300_000
    assert straggler(found) is None


def test_waiting_within_the_uncertainty_of_the_clocks_is_no_waiting(tmp_path: Path) -> None:
    """Ends of a collective differ by up to 80 us between the ranks, and rank 1 comes 60 us late."""
    both, now = [RankTrace(0), RankTrace(1)], 0.0
    for step in range(6):
        for rank, trace in enumerate(both):
            late = (0, 80)[step % 2] if rank else 0
            trace.collective(now + 60 * rank, now + 200 + late, now - 5, step)
        now += 300
    found = straggler(together(tmp_path, both))
    assert isinstance(found, Abstained)
    assert "uncertainty of the clocks" in found.reason


def test_transfer_is_a_finding_and_hidden_transfer_is_none(tmp_path: Path) -> None:
    both, now = [RankTrace(0), RankTrace(1)], 0.0
    for step in range(6):
        for trace in both:
            trace.kernel("gemm", now, now + 100, now - 20)
            trace.collective(now + 100, now + 150, now - 10, step)
        now += 150
    found = communication_not_overlapped(together(tmp_path, both))
    assert isinstance(found, Finding)
    assert found.share == found.gain_upper_bound == 6 * 50 / (6 * 150 + 20)
    assert found.evidence["transfer_ns"] == found.evidence["exposed_transfer_ns"] == 6 * 50_000
    assert found.evidence["exposed_waiting_ns"] == 0
    assert found.where  # the operator around the launch
    for trace in both:
        trace.kernel("beside", 0, now, 0, stream=9)
    assert communication_not_overlapped(together(tmp_path, both)) is None


def test_sends_beside_no_compute_are_neither_found_nor_forgotten(tmp_path: Path) -> None:
    """Of 250 us a step rank 0 spends 100 in a send; 2 are an all-reduce."""
    both, now = [RankTrace(0), RankTrace(1)], 0.0
    for step in range(6):
        for rank, trace in enumerate(both):
            trace.kernel("gemm", now, now + 148, now - 20)
            trace.collective(now + 148, now + 150, now - 15, step)
            name = {"Collective name": ("send", "recv")[rank]}
            trace.collective(now + 150, now + 250, now - 10, step, **name)
        now += 250
    found = communication_not_overlapped(together(tmp_path, both))
    assert isinstance(found, Abstained)
    assert "rank 0 spends 39% of the time, beside no compute, in sends" in found.reason


def test_one_rank_alone_abstains_only_if_its_communication_is_material(tmp_path: Path) -> None:
    both, now = [RankTrace(0), RankTrace(1)], 0.0
    for step in range(6):
        for rank, trace in enumerate(both):
            trace.kernel("gemm", now, now + 100 + 300 * rank, now - 20)
            trace.collective(now + 100 + 300 * rank, now + 420, now - 10, step)
        now += 420
    waits, late = (diagnose(trace.write(tmp_path))["abstained"] for trace in both)
    said = {one["rule"]: one["reason"] for one in waits if one["rule"] in ("straggler", "communication_not_overlapped")}
    assert len(said) == 2
    assert "76% of the time is in collectives" in said["straggler"]
    assert "worklog diagnose RANK0 RANK1" in said["straggler"]
    assert not {"straggler", "communication_not_overlapped"} & {one["rule"] for one in late}


def test_a_single_collective_says_nothing_of_a_straggler(tmp_path: Path) -> None:
    found = straggler(together(tmp_path, steps([(100, 400)])))
    assert isinstance(found, Abstained)
    assert "each trace holds one collective" in found.reason


@pytest.mark.parametrize("rule", [straggler, communication_not_overlapped])
def test_no_collective_in_common_abstains(tmp_path: Path, rule: object) -> None:
    both = [RankTrace(0), RankTrace(1)]
    for rank, trace in enumerate(both):
        trace.collective(100, 150, 90, 7, **{"Process Group Name": str(rank)})
    found = rule(together(tmp_path, both))  # type: ignore[operator]
    assert isinstance(found, Abstained)
    assert "common to two traces" in found.reason
