"""`worklog diagnose` of several files: which rank each is; neither processes nor a cluster change a number."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_traces import export, steps
from typer.testing import CliRunner

from worklog import cli, distributed
from worklog.distributed import diagnose, expand
from worklog.problem import ProblemError


@pytest.fixture
def slow(tmp_path: Path) -> list[Path]:
    """Three ranks of eight steps; rank 1 computes 300 us longer than the others."""
    three = steps([(100, 400, 110)] * 8, names=["gemm", "extra", "gemm"], offsets=[0, 123, -77])
    return [trace.write(tmp_path) for trace in three]


def test_ranks_alignment_collectives_and_findings(slow: list[Path]) -> None:
    found = diagnose(slow)
    assert list(found) == ["ranks", "rank_from", "alignment", "collectives", "findings", "abstained"]
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert [one["source"]["file"] for one in found["ranks"]] == [str(file) for file in slow]
    assert [(one["rank"], one["offset_ns"]) for one in found["alignment"]] == [(0, 0), (1, -123_000), (2, 77_000)]
    for one, split in zip(found["ranks"], found["collectives"]["ranks"], strict=True):
        (device,) = one["devices"]
        assert sum(split["exposed_ns"].values()) == device["accounting_ns"]["communication"]
        assert sum(device["accounting_ns"].values()) == device["span_ns"]
    assert [finding["rule"] for finding in found["findings"]] == ["straggler", "communication_not_overlapped"]
    assert found["abstained"] == []
    assert json.loads(json.dumps(found))["findings"][0]["where"] == found["findings"][0]["where"]


def test_a_range_on_every_rank(tmp_path: Path) -> None:
    """The third of three steps, by its annotation around the launches."""
    both = steps([(100, 400)] * 3)
    for trace in both:
        at = trace.offset + 4 - 0.5
        trace.events.append(
            {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": at, "dur": 3, "args": {}}
        )
    found = diagnose([trace.write(tmp_path) for trace in both], "step")
    first = found["collectives"]["ranks"][0]
    assert (first["kernels"], first["waiting_ns"], first["transfer_ns"]) == (1, 300_000, 50_000)
    assert found["findings"][0]["rule"] == "straggler"  # what came before it in the trace is known


def test_the_order_of_files_does_not_matter_where_they_say_their_rank(slow: list[Path]) -> None:
    assert diagnose([slow[2], slow[0], slow[1]]) == diagnose(slow)


def test_rank_by_name_or_by_order(tmp_path: Path) -> None:
    both = [trace.write(tmp_path, told=False) for trace in steps([(100, 400)] * 2)]
    named = diagnose([both[1], both[0]])
    assert (named["rank_from"], [one["rank"] for one in named["ranks"]]) == ("name", [0, 1])
    assert named["collectives"]["ranks"][1]["arrived_last"] == 2
    letters = [file.rename(tmp_path / name) for file, name in zip(both, ("b.json", "a.json"), strict=True)]
    ordered = diagnose(letters)
    assert (ordered["rank_from"], [one["rank"] for one in ordered["ranks"]]) == ("order", [0, 1])
    assert [one["source"]["file"] for one in ordered["ranks"]] == [str(file) for file in letters]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["run3/rank0.json", "run3/rank10.json"], [0, 10]),
        (["host-TP-1.trace.json.gz", "host-TP-0.trace.json.gz"], [1, 0]),
        (["a1b1.json", "a2b2.json"], []),  # two numbers differ
        (["rank01.json", "rank1.json"], []),  # the same number
        (["x0.json", "y1.json"], []),
    ],
)
def test_the_one_number_in_which_names_differ(names: list[str], ranks: list[int]) -> None:
    assert distributed._differing(names) == ranks


def test_processes_and_a_cluster_change_nothing(slow: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    serial = diagnose(slow)
    monkeypatch.setattr(distributed, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert diagnose(slow) == serial
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        read: list[str] = []
        assert diagnose(slow, scheduler=cluster.scheduler_address, notify=read.append) == serial
        assert read == ["1 of 3 ranks read", "2 of 3 ranks read", "3 of 3 ranks read"]
        broken = slow[1].with_name("rank9.json")
        broken.write_text('{"traceEvents": [{"ph": "X",')
        with pytest.raises(ProblemError, match=r"rank9\.json: is no trace of torch\.profiler"):
            diagnose([slow[0], broken], scheduler=cluster.scheduler_address)


def test_folders_are_their_traces(slow: list[Path]) -> None:
    folder = slow[0].parent
    (folder / "expected.txt").write_text("no trace")
    assert expand([folder]) == slow
    assert expand([slow[1]]) == [slow[1]]
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(ProblemError, match="no trace is in this folder"):
        expand([empty])


def test_what_is_no_rank_is_one_sentence(slow: list[Path], tmp_path: Path) -> None:
    snapshot = tmp_path / "memory.json"
    snapshot.write_text(json.dumps({"segments": [], "device_traces": []}))
    with pytest.raises(ProblemError, match=r"memory\.json: several files are taken as the ranks of one run"):
        diagnose([slow[0], snapshot])
    with pytest.raises(ProblemError, match="is of rank 0, and so is"):
        diagnose([slow[0], slow[0]])
    with pytest.raises(ProblemError, match=r"No Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        diagnose(slow, scheduler="tcp://127.0.0.1:9")


def test_without_dask_a_scheduler_is_one_sentence(slow: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ProblemError, match=r"--scheduler needs Dask: pip install 'worklog\[cluster\]'"):
        diagnose(slow, scheduler="tcp://127.0.0.1:9")
    assert len(diagnose(slow)["ranks"]) == 3


def test_without_collectives_ranks_stand_side_by_side(tmp_path: Path) -> None:
    both = steps([(100, 400)])
    for trace in both:
        trace.events = trace.events[:2]
    found = diagnose([trace.write(tmp_path) for trace in both])
    assert (found["alignment"], found["collectives"], found["findings"]) == ([], None, [])
    assert {one["reason"] for one in found["abstained"]} == {"no kernel of a collective is in the traces"}
    assert len(found["ranks"]) == 2


def run(*argv: str) -> str:
    result = CliRunner().invoke(cli.app, ["diagnose", *argv])
    assert result.exit_code == 0, result.exception
    return result.stdout


def test_the_verb_takes_a_folder_and_prints_what_ranks_do_to_each_other(slow: list[Path]) -> None:
    assert json.loads(run(str(slow[0].parent), "--json")) == json.loads(json.dumps(diagnose(slow)))
    out = run(*map(str, slow))
    assert out.startswith("3 ranks, numbered as their traces say\n")
    assert "w waiting" in out
    bars = [line for line in out.splitlines() if line.startswith("█") and "compute" not in line]
    assert [(len(line), line.count("w")) for line in bars] == [(100, 65), (100, 0), (100, 62)]  # of 3700: 2400, 2320
    assert "for rank 1, which comes late: it has more compute before them" in " ".join(out.split())
    assert "Clock of rank 1: 123 us ahead of the first's, by the ends of 8 collectives, give or take 0 us." in out


def test_what_could_not_be_matched_is_said(tmp_path: Path) -> None:
    both = steps([(100, 400), (120, 300)], numbered=False)
    both[1].events = both[1].events[5:]
    out = " ".join(run(*(str(trace.write(tmp_path)) for trace in both)).split())
    assert out.count("the trace does not number the collectives of 0 [0, 1], and their kernels (2, 1) are not") == 1
    more = steps([(100, 400), (120, 300)]), steps([(50, 60)] * 3, numbered=False)
    for trace, other, missing in zip(*more, (0, 5), strict=True):
        for event in other.events[missing:]:
            group = {"Process Group Name": "1"} if "Process Group Name" in event["args"] else {}
            number = {
                name: event["args"][name] + 50 for name in ("correlation", "External id") if name in event["args"]
            }
            trace.events.append({**event, "ts": event["ts"] + 5000, "args": {**event["args"], **group, **number}})
    out = " ".join(run(*(str(trace.write(tmp_path)) for trace in more[0])).split())
    assert "waits" in out
    assert "The trace does not number the collectives of 1 [0, 1], and their kernels (3, 2) are not" in out


def test_no_name_steers_the_terminal(tmp_path: Path) -> None:
    both = steps([(100, 400)] * 4, names=["\x1b[2Jgemm\n[red]", "x"])
    out = run(*(str(trace.write(tmp_path)) for trace in both))
    assert "\x1b" not in out


def test_captures_of_nsys_one_a_rank_or_one_of_all(tmp_path: Path) -> None:
    """An export tells nothing of a collective but its kernel's name and stream; the answers are the other tool's."""
    three = steps([(100, 400, 110)] * 8, names=["gemm", "extra", "gemm"], offsets=[0, 123, -77])
    expected = diagnose([trace.write(tmp_path) for trace in three])
    exports = [export([trace], tmp_path / f"rank{trace.rank}.sqlite") for trace in three]
    found = diagnose(exports)
    assert found["rank_from"] == "name"
    assert found["alignment"] == expected["alignment"]
    assert found["collectives"]["ranks"] == expected["collectives"]["ranks"]
    for mine, other in zip(found["findings"], expected["findings"], strict=True):
        assert (mine["rule"], mine["title"], mine["share"]) == (other["rule"], other["title"], other["share"])
        assert mine["evidence"] == other["evidence"]
    for trace in three:
        for event in trace.events:
            event["ts"] -= trace.offset  # processes of one capture share its clock
    whole = json.loads(run(str(export(three, tmp_path / "all.sqlite")), "--json"))
    splits = ("waiting_ns", "transfer_ns", "exposed_ns", "arrived_last")
    for mine, other in zip(whole["collectives"]["ranks"], expected["collectives"]["ranks"], strict=True):
        assert {key: mine[key] for key in splits} == {key: other[key] for key in splits}
    (straggler,) = [finding for finding in whole["findings"] if finding["rule"] == "straggler"]
    assert straggler["evidence"]["late"] == "GPU 1"


def test_two_devices_of_one_trace_are_compared_without_a_second_file(tmp_path: Path) -> None:
    """One program with two GPUs, or one capture of two processes: the clock is one."""
    first, second = steps([(100, 400)] * 4)
    events: list[dict[str, Any]] = []
    for event in second.events:
        args = dict(event["args"])
        for name in ("correlation", "External id"):
            if name in args:
                args[name] += 1000
        if "device" in args:
            args["device"] = 1
        events.append({**event, "tid": event["tid"] + 100, "args": args})
    first.events += events
    file = first.write(tmp_path)
    found = json.loads(run(str(file), "--json"))
    assert [one["label"] for one in found["collectives"]["ranks"]] == ["GPU 0", "GPU 1"]
    assert found["collectives"]["ranks"][0]["waiting_ns"] == 4 * 300_000
    assert "straggler" in [finding["rule"] for finding in found["findings"]]
    assert "GPU 0 waits" in run(str(file))
