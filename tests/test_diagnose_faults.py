"""`worklog diagnose` on damaged and odd files: one sentence and exit 2, or a diagnosis that says what was left out."""

from __future__ import annotations

import gzip
import json
import pickle
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from worklog import cli
from worklog.analysis import operators as analysis
from worklog.traces import kineto, operators

torch = pytest.importorskip("torch")
HOUR = 3_600_000_000


def event(cat: str, name: str, at: float, dur: float, correlation: int = 0, **args: Any) -> dict[str, Any]:
    place = {"pid": 0, "tid": 7} if cat in ("kernel", "gpu_memcpy") else {"pid": 1, "tid": 1}
    own = {"correlation": correlation, "device": 0, "stream": 7} | args
    return {"ph": "X", "cat": cat, "name": name, **place, "ts": at, "dur": dur, "args": own}


def pair(number: int, at: float, ran: float = 6, name: str = "gemm") -> list[dict[str, Any]]:
    """A launch of two microseconds, and its kernel three after it began."""
    call = event("cuda_runtime", "cudaLaunchKernel", at, 2, number)
    return [call, event("kernel", name, at + 3, ran, number)]


def write(folder: Path, events: list[dict[str, Any]], name: str = "t.json") -> Path:
    file = folder / name
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return file


def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The console entry: exit code, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["worklog", "diagnose", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capfd.readouterr()
    return int(left.value.code or 0), out, err


def database(folder: Path, *statements: str) -> Path:
    file = folder / "t.sqlite"
    with closing(sqlite3.connect(file)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return file


STRINGS = "CREATE TABLE StringIds (id INTEGER, value TEXT)"
KERNELS = "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER)"
REFUSED = {
    "truncated gzip": ("t.json.gz", gzip.compress(bytes(range(256)))[:60], "cut off or damaged"),
    "not JSON": ("t.json", b"<html>no trace</html>", "is no trace; this file holds neither"),
    "JSON of another kind": ("t.json", b'{"cells": []}', "JSON of another kind"),
    "cut off JSON": ("t.json", b'{"traceEvents": [{"ph": "X", "ts": 1', "is no trace of torch.profiler"),
    "an event that is none": ("t.json", b'{"traceEvents": [{}, 3]}', "$.traceEvents[1]"),
    "deep JSON": ("t.json", b'{"traceEvents": ' + b"[" * 100_000, "is no trace of torch.profiler"),
    "empty trace": ("t.json", b'{"traceEvents": []}', "the trace is empty"),
    "empty file": ("t.json", b"", "is no trace"),
    "a time that is no number": (
        "t.json",
        b'{"traceEvents": [{"ph": "X", "ts": "nan"}]}',
        "an event at nan microseconds",
    ),
    "a time beyond 64 bits": (
        "t.json",
        b'{"traceEvents": [{"ph": "X", "ts": 1e17}]}',
        "an event at 1e+17 microseconds",
    ),
    "no database": ("t.sqlite", b"SQLite format 3\0" + bytes(900), "is no SQLite export of nsys"),
    "hostile pickle": ("t.pickle", pickle.dumps({"segments": print}), "holds more than plain data"),
    "no report": ("t.ncu-rep", b"NVR\0", "t.ncu-rep: "),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_in_one_sentence_with_exit_2(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, said = REFUSED[fault]
    file = tmp_path / name
    file.write_bytes(content)
    code, out, err = run(monkeypatch, capfd, str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"worklog: {file}: ")
    assert said in err
    assert err.count("\n") == 1


def test_missing_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(monkeypatch, capfd, str(database(tmp_path, "CREATE TABLE other (a)")))
    assert (code, err.count("\n")) == (2, 1)
    assert "it has no table StringIds" in err
    (tmp_path / "t.sqlite").unlink()
    file = database(tmp_path, STRINGS, KERNELS, "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 0)")
    code, out, _ = run(monkeypatch, capfd, str(file))
    assert code == 0
    flat = " ".join(out.split())
    assert "The export does not say which version its schema has." in flat
    assert "KERNEL has no streamId, correlationId, demangledName." in flat
    assert "the trace holds no CUDA calls of the host" in flat


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one: forward and backward, on two threads."""
    file = tmp_path_factory.mktemp("cpu") / "t.json"
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        net(torch.ones(4, 8)).sum().backward()
    profiler.export_chrome_trace(str(file))
    return file


def test_a_trace_of_the_cpu_says_so_and_shows_operators(
    on_cpu: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(monkeypatch, capfd, str(on_cpu), "--json")
    found = json.loads(out)
    assert (code, found["devices"], found["kernels"]) == (0, [], [])
    rows = {row["name"]: row for row in found["operators"]}
    assert rows["aten::addmm"]["count"] == 2
    one_by_one = {row["name"]: row for row in operators.read(on_cpu)["operators"]}
    assert {name: row["count"] for name, row in rows.items()} == {n: row["count"] for n, row in one_by_one.items()}
    total = sum(row["self_cpu_ns"] for row in rows.values())
    assert total == pytest.approx(sum(row["self_cpu_ns"] for row in one_by_one.values()), rel=1e-3)
    code, out, _ = run(monkeypatch, capfd, str(on_cpu))
    assert "CPU alone, no work of a GPU" in out
    assert "aten::addmm" in out
    assert "the trace holds no work of a GPU" in " ".join(out.split())


def test_own_time_by_hand(tmp_path: Path) -> None:
    spans = [("a", 0, 100), ("b", 10, 30), ("c", 15, 5), ("b", 60, 10), ("d", 200, -5)]
    events = [event("cpu_op", name, at, dur) for name, at, dur in spans]
    assert analysis.by_name(kineto.tables(write(tmp_path, events))) == [
        {"name": "a", "count": 1, "self_cpu_ns": 60_000},
        {"name": "b", "count": 2, "self_cpu_ns": 35_000},
        {"name": "c", "count": 1, "self_cpu_ns": 5_000},
        {"name": "d", "count": 1, "self_cpu_ns": 0},
    ]


def test_negative_and_overlapping_durations_are_counted_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    over = [*pair(1, 0, 20), *pair(2, 5, 20), *pair(3, 10, -4), *pair(4, 40)]
    code, out, _ = run(monkeypatch, capfd, str(write(tmp_path, over)), "--json")
    found = json.loads(out)
    (device,) = found["devices"]
    # Kernels in [3, 23), [8, 28), one that ends before it begins, and [43, 49).
    assert (code, device["span_ns"], device["accounting_ns"]["compute"]) == (0, 49_000, 25_000 + 6_000)
    assert sum(device["accounting_ns"].values()) == 49_000
    assert found["coverage"]["negative_durations"] == 1
    code, out, _ = run(monkeypatch, capfd, str(tmp_path / "t.json"))
    assert "1 activities end before they begin, and count no time." in out


def test_a_clock_that_jumps_back_is_said_and_the_parts_still_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    early = [one | {"ts": one["ts"] - HOUR} if one["cat"] == "kernel" else one for one in pair(2, 100)]
    file = write(tmp_path, [*pair(1, HOUR), *[one | {"ts": one["ts"] + HOUR} for one in early]])
    code, out, _ = run(monkeypatch, capfd, str(file), "--json")
    (device,) = json.loads(out)["devices"]
    assert (code, sum(device["accounting_ns"].values())) == (0, device["span_ns"])
    assert device["accounting_ns"]["compute"] == 12_000
    assert json.loads(out)["coverage"]["activities_before_their_launch"] == 1
    code, out, _ = run(monkeypatch, capfd, str(file))
    assert "1 activities begin before the call that launched them: the clocks do not agree." in " ".join(out.split())


HOSTILE = "<script>alert(1)</script>\n\x1b[2J\x1b]0;owned\x07[bold red]\u202e"


def test_no_name_steers_the_terminal_or_makes_a_second_line_of_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spans = [event("user_annotation", HOSTILE, 0, 100), event("cpu_op", HOSTILE, 1, 90)]
    file = write(tmp_path, [*spans, *pair(1, 5, name=HOSTILE), *pair(2, 50, name=HOSTILE)])
    code, out, _ = run(monkeypatch, capfd, str(file))
    assert code == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert "<script>" in out
    code, out, _ = run(monkeypatch, capfd, str(file), "--json")
    assert [kernel["name"] for kernel in json.loads(out)["kernels"]] == [HOSTILE]
    assert "\x1b" not in out
    code, out, err = run(monkeypatch, capfd, str(file), "--range", "\x1b[31mstep")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert not {"\x1b", "\x07", "\u202e"} & set(err)
    assert "has no NVTX range" in err


MEASURE = """
import resource, sys, time
from pathlib import Path
from worklog.diagnose import diagnose
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
found = diagnose(Path(sys.argv[1]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(time.process_time() - start, (after - before) * 1024, len(found["kernels"]))
"""


def test_as_many_names_as_kernels_cost_time_and_memory_in_proportion(tmp_path: Path) -> None:
    """A hundred thousand here; a million is measured by benchmarks/traces.py."""
    count = 100_000
    events = [one for n in range(count) for one in pair(n + 1, 10 * n, name=f"void kernel_{n}<float, {n}>(float*)")]
    file = write(tmp_path, events)
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True)
    seconds, memory, names = (float(word) for word in done.stdout.split())
    assert time.perf_counter() - start < 600
    assert names == count
    assert seconds < 60
    assert memory < 10 * file.stat().st_size
