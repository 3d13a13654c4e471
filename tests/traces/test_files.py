"""A file is known by its content; one that no reader takes is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from worklog.problem import ProblemError
from worklog.traces import files, kineto, memory

TRACE = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "dur": 2}]})


def test_known_by_content_whatever_the_name(tmp_path: Path) -> None:
    odd = tmp_path / "trace.pt"
    odd.write_bytes(gzip.compress(TRACE.encode()))
    assert files.kind(odd) == "kineto"
    assert len(kineto.tables(odd).calls) == 0
    late = tmp_path / "late.json"
    late.write_text(json.dumps({"padding": "x" * 2 * files.HEAD, "traceEvents": []}))
    assert files.kind(late) == "kineto"
    late.write_text(json.dumps({"segments": [], "device_traces": []}))
    assert files.kind(late) == "memory"
    with closing(sqlite3.connect(tmp_path / "any.db")) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    assert files.kind(tmp_path / "any.db") == "nsys"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.json.gz", gzip.compress(TRACE.encode())[:40], r"the gzip file is cut off or damaged"),
        ("t.json.gz", gzip.compress(TRACE.encode())[:-12] + b"\0" * 12, r"the gzip file is cut off or damaged"),
        ("t.json", b'{"cells": [], "nbformat": 4}', r"JSON of another kind"),
        ("t.json", b"no JSON at all", r"is no trace; this file holds neither"),
        ("t.json", b"", r"is no trace; this file holds neither"),
        ("t.bin", bytes(range(256)) * 4, r"is no trace; this file holds neither"),
    ],
)
def test_no_reader_takes_it(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ProblemError, match=said) as caught:
        files.kind(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"none\.json: cannot be read \(No such file or directory\)"):
        files.kind(tmp_path / "none.json")
    with pytest.raises(ProblemError, match=r"is a folder without the tables that `nsys export"):
        files.kind(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        '{"traceEvents": [{"ph": "X", "ts": 1',
        '{"traceEvents": 3}',
        '{"traceEvents": [3]}',
        '{"traceEvents": [{"args": 7}]}',
    ],
)
def test_damaged_json_is_one_sentence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(ProblemError, match=r"is no trace of torch\.profiler"):
        kineto.tables(file)


@pytest.mark.parametrize(
    "content",
    [
        '{"device_traces": {"a": 1}, "segments": []}',
        '{"device_traces": [[{"action": "free_requested"}]], "segments": [3]}',
        '{"segments": 1}',
    ],
)
def test_damaged_snapshot_is_one_sentence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(content)
    with pytest.raises(ProblemError, match="is no snapshot of torch's allocator"):
        memory.read(file)


def test_empty_trace_says_so(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"traceEvents": []}')
    with pytest.raises(ProblemError, match="the trace is empty"):
        kineto.tables(file)
