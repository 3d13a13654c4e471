"""Exports of older and newer versions of nsys: what they lack is unknown or said, and never made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nsys_builder import CALLS, KERNEL, KERNELS, META, NVTX, OVERLAPPING, PID, RUNTIME, TID, Rows, call, kernel

from worklog.diagnose import diagnose
from worklog.traces import nsys, schema


def test_old_export_with_few_columns(export: Callable[..., Path]) -> None:
    schema = (
        "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER, demangledName INTEGER, gridX INTEGER, "
        "gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER"
    )
    file = export(
        KERNEL=(schema, [(1000, 1100, 0, 1, 11, 1, 1, 1, 32, 1, 1)]),
        RUNTIME=(RUNTIME, [call(990, 1)]),
        NVTX_EVENTS=("start INTEGER, end INTEGER, text TEXT, globalTid INTEGER", [(980, 999, "plain", TID)]),
    )
    assert nsys.read(file, "plain")["devices"][0]["span_ns"] == 110


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("EXPORT_SCHEMA_VERSION", "3.2.1")], []),
        ([("EXPORT_SCHEMA_VERSION", "3.31.0")], []),
        ([("EXPORT_SCHEMA_VERSION", "4.0.1")], ["the export's schema has version 4.0.1, and what is read here is 3.x"]),
        ([], ["the export does not say which version its schema has"]),
    ],
)
def test_an_unknown_schema_version_is_said(export: Callable[..., Path], rows: Rows, said: list[str]) -> None:
    notes = diagnose(export(KERNEL=KERNELS, RUNTIME=CALLS, META_DATA_EXPORT=(META, rows)))["coverage"]["notes"]
    assert len(notes) == len(said)
    assert all(note.startswith(start) for note, start in zip(notes, said, strict=True))


def test_columns_that_are_not_there_are_said(export: Callable[..., Path]) -> None:
    bare = "start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER"
    file = export(
        KERNEL=(bare, [(1000, 1100, 0, 1)]),
        RUNTIME=("start INTEGER, end INTEGER, correlationId INTEGER", [(990, 999, 1)]),
    )
    found = diagnose(file)
    assert found["coverage"]["notes"] == [
        "the export's table CUPTI_ACTIVITY_KIND_RUNTIME has no globalTid, nameId",
        "the export's table CUPTI_ACTIVITY_KIND_KERNEL has no streamId, demangledName",
    ]
    assert [(k["name"], k["total_ns"]) for k in found["kernels"]] == [("unnamed kernel", 100)]
    assert found["devices"][0]["span_ns"] == 110
    two = [(1, 2, 0, PID | 1, 1, 1), (3, 4, 0, PID + (1 << 24), 2, 1)]
    several = diagnose(export(KERNEL=(bare, [(1000, 1100, 0, 1)]), RUNTIME=(RUNTIME, two)))["coverage"]["notes"]
    assert several == ["the export's table CUPTI_ACTIVITY_KIND_KERNEL has no streamId, globalPid, demangledName"]


def test_ids_of_any_size_are_apart(export: Callable[..., Path]) -> None:
    """Threads and processes are counted, for 32 bits do not hold their ids; a stream beyond them is unknown."""
    threads = [PID | 1, PID | 2, PID + (1 << 24) | 1, -7, 2**63 - 1]
    file = export(
        KERNEL=(KERNEL, [kernel(10, 20, 1, stream=2**40), kernel(30, 40, 2, stream=9)]),
        RUNTIME=(RUNTIME, [call(n, n + 1, tid=thread) for n, thread in enumerate(threads)]),
    )
    trace = nsys.tables(file)
    assert trace.calls["thread"].nunique() == len(threads)
    assert trace.calls["process"].tolist()[:3] == [0, 0, 1]
    assert trace.activities["stream"].tolist() == [-1, 9]


def test_ranges_with_and_without_text_of_their_own(export: Callable[..., Path]) -> None:
    rows = [
        (0, 10, 59, None, 20, TID),
        (1, 9, 60, "own", None, TID),
        (2, 8, 59, None, 99, TID),
        (3, None, 59, "open", 20, TID),
    ]
    found = nsys.tables(export(**OVERLAPPING, NVTX_EVENTS=(NVTX, rows))).frames
    assert found["name"].tolist() == ["plain", "own", "unnamed range"]
    assert found["kind"].tolist() == [schema.ANNOTATION, schema.SPAN, schema.ANNOTATION]
    assert found[["start_ns", "end_ns"]].to_numpy().tolist() == [[0, 10], [1, 9], [2, 8]]
