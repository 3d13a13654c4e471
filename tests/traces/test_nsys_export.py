"""Exports of nsys with answers computed by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from nsys_builder import COPY, KERNEL, META, NVTX, OVERLAPPING, PID, RUNTIME, TID, call, kernel

from worklog.problem import ProblemError
from worklog.traces import nsys


def test_two_streams_overlap_once_and_everything_adds_up(export: Callable[..., Path]) -> None:
    found = nsys.read(export(**OVERLAPPING))
    assert found["devices"] == [
        {
            "device": 0,
            "span_ns": 1420 - 900,
            "busy_ns": 250 + 10 + 20,
            "kernel_ns": 200 + 10,
            "copy_only_ns": 50 + 20,
            "idle_ns": 520 - 280,
            "kernel_count": 3,
            "launch_count": 4,
        }
    ]
    assert [(k["name"], k["count"], k["total_ns"], k["median_ns"]) for k in found["kernels"]] == [
        ("gemm", 2, 250, 125),
        ("_scale", 1, 10, 10),
    ]
    assert found["kernels"][0]["share"] == 250 / 260
    assert found["kernels"][0]["full_name"] == "void gemm<float, 4>(float*)"
    assert found["kernels"][0]["grid"] == [4, 2, 1]
    assert found["kernels"][0]["block"] == [128, 1, 1]
    assert (found["nsys_version"], found["schema_version"]) == ("2026.2.1.7", "3.25.0")
    assert found["graph_trace_mode"] is None
    assert found["note"] is None


def test_devices_are_apart_and_calls_of_another_process_do_not_join(export: Callable[..., Path]) -> None:
    other = PID + (1 << 24)
    file = export(
        KERNEL=(KERNEL, [kernel(1000, 1100, 1), kernel(5000, 5001, 1, device=1, pid=other)]),
        RUNTIME=(RUNTIME, [call(990, 1), call(4000, 1, tid=other | 3)]),
    )
    first, second = nsys.read(file)["devices"]
    assert (first["device"], first["span_ns"], first["busy_ns"], first["launch_count"]) == (0, 110, 100, 1)
    assert (second["device"], second["span_ns"], second["busy_ns"], second["launch_count"]) == (1, 1001, 1, 1)


def test_window_of_a_range_is_what_was_launched_in_it(export: Callable[..., Path]) -> None:
    other = PID + (1 << 24)
    elsewhere = kernel(1270, 1280, 9, device=1, pid=other)
    before, after = kernel(100, 1050, 1, name=11), kernel(1300, 1400, 4, name=11)
    # Both ways in which nsys keeps a text; the range closes before its kernels run, as ranges do.
    ranges = [(995, 1020, 59, None, 20, TID), (0, 2000, 59, "other", None, TID), (5, None, 34, "mark", None, TID)]
    file = export(
        KERNEL=(KERNEL, [before, kernel(1060, 1100, 2), kernel(1200, 1260, 3), after, elsewhere]),
        RUNTIME=(RUNTIME, [call(90, 1), call(1000, 2), call(1010, 3, 5), call(1030, 4), call(1005, 9, tid=other | 3)]),
        NVTX_EVENTS=(NVTX, ranges),
    )
    found = nsys.read(file, "plain")
    (device,) = found["devices"]
    assert (device["span_ns"], device["kernel_count"], device["launch_count"]) == (1260 - 1000, 2, 2)
    assert device["busy_ns"] == 50 + 40 + 60  # the first 50 belong to a kernel from before, which kept the GPU busy
    assert device["idle_ns"] == 260 - 150
    assert [(k["name"], k["count"]) for k in found["kernels"]] == [("gemm", 2)]
    with pytest.raises(ProblemError, match="has no NVTX range 'plan'; its ranges: other, plain"):
        nsys.read(file, "plan")


def test_range_that_launched_nothing_is_an_error(export: Callable[..., Path]) -> None:
    file = export(**OVERLAPPING, NVTX_EVENTS=(NVTX, [(0, 10, 59, "early", None, TID)]))
    with pytest.raises(ProblemError, match="nothing was launched on a GPU inside of the NVTX range 'early'"):
        nsys.read(file, "early")


GRAPH_TRACE = COPY + ", graphId INTEGER, graphExecId INTEGER"
GRAPH = "CUDA_GRAPH_TRACE_OPTIONS:MODE"


def test_graph_with_node_rows_counts_its_launch_once(export: Callable[..., Path]) -> None:
    file = export(
        KERNEL=(KERNEL, [kernel(1000 + 20 * n, 1010 + 20 * n, 1, node=70 + n) for n in range(5)]),
        RUNTIME=(RUNTIME, [call(900, 1, 2)]),
        NVTX_EVENTS=(NVTX, [(890, 910, 59, "plain", None, TID)]),
        META_DATA_CAPTURE=(META, [(GRAPH, "Node")]),
    )
    found = nsys.read(file, "plain")
    (device,) = found["devices"]
    assert found["graph_trace_mode"] == "node"
    assert (device["kernel_count"], device["launch_count"], device["busy_ns"]) == (5, 1, 50)
    assert device["span_ns"] == 1090 - 900
    assert found["note"] is None


def test_graph_traced_as_one_piece_abstains_from_kernels(export: Callable[..., Path]) -> None:
    file = export(
        KERNEL=(KERNEL, [kernel(1000, 1010, 1)]),
        GRAPH_TRACE=(GRAPH_TRACE, [(1100, 1500, 0, 7, 2, PID, 3, 4), (1600, 2000, 0, 7, 3, PID, 3, 4)]),
        RUNTIME=(RUNTIME, [call(900, 1), call(910, 2, 2), call(1050, 3, 2)]),
        META_DATA_CAPTURE=(META, [("PROCESS_0:" + GRAPH, "Graph")]),
    )
    found = nsys.read(file)
    (device,) = found["devices"]
    assert found["graph_trace_mode"] == "graph"
    assert (device["span_ns"], device["busy_ns"], device["idle_ns"]) == (1100, 810, 290)
    assert (device["kernel_ns"], device["copy_only_ns"], device["kernel_count"]) == (None, None, None)
    assert device["launch_count"] == 3
    assert "2 graph executions have no kernel rows" in found["note"]


def test_graph_without_any_rows_leaves_busy_time_unknown(export: Callable[..., Path]) -> None:
    file = export(
        KERNEL=(KERNEL, [kernel(1000, 1010, 1)]), RUNTIME=(RUNTIME, [call(900, 1), call(910, 2, 2), call(920, 3)])
    )
    found = nsys.read(file)
    (device,) = found["devices"]
    assert (device["busy_ns"], device["idle_ns"], device["kernel_ns"]) == (None, None, None)
    assert "1 graph launches have no row of GPU activity at all" in found["note"]
    assert "1 of 3 launches have no row" in found["note"]
    only = nsys.read(export(RUNTIME=(RUNTIME, [call(900, 1, 2)])))
    assert only["devices"] == only["kernels"] == []
    assert "unknown" in only["note"]


@pytest.mark.parametrize("cell", ["'first'", "2.5", "x'00ff'"])
def test_a_cell_that_is_no_integer_is_an_error_and_null_is_unknown(export: Callable[..., Path], cell: str) -> None:
    file = export(**OVERLAPPING)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = NULL WHERE start = 1300")
    assert nsys.tables(file).activities["correlation"].tolist() == [1, 2, -1, 4, 6]
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = {cell} WHERE start = 1050")
    with pytest.raises(
        ProblemError, match=r"is no SQLite export of nsys \((table .* something else than integers|Could not)"
    ):
        nsys.tables(file)


def test_rows_are_whole_across_chunks_and_holes_in_their_numbers(
    export: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worklog.traces.source.ROWS", 7)
    rows = [kernel(1000 + 10 * n, 1004 + 10 * n, n + 1, stream=n % 3) for n in range(50)]
    file = export(KERNEL=(KERNEL, rows), RUNTIME=(RUNTIME, [call(10 * n, n + 1) for n in range(50)]))
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE start BETWEEN 1100 AND 1295")
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = 1 << 60 WHERE start = 1490")
    work = nsys.tables(file).activities
    kept = [n for n in range(50) if not 10 <= n < 30]
    assert sorted(work[["start_ns", "end_ns", "correlation", "stream", "call"]].to_numpy().tolist()) == [
        [1000 + 10 * n, 1004 + 10 * n, n + 1, n % 3, n] for n in kept
    ]


def test_without_api_rows_launches_are_unknown(export: Callable[..., Path]) -> None:
    found = nsys.read(export(KERNEL=OVERLAPPING["KERNEL"]))
    assert found["devices"][0]["launch_count"] is None
    assert found["devices"][0]["span_ns"] == 310
    assert "without CUDA API rows" in found["note"]


def test_files_that_are_no_export(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="no such file"):
        nsys.read(tmp_path / "x.sqlite")
    (tmp_path / "x.sqlite").write_bytes(b"no database at all, but long enough to look at")
    with pytest.raises(ProblemError, match="no SQLite export of nsys"):
        nsys.read(tmp_path / "x.sqlite")
    with closing(sqlite3.connect(tmp_path / "y.sqlite")) as database:
        database.execute("CREATE TABLE t (a)")
    with pytest.raises(ProblemError, match="no table StringIds"):
        nsys.read(tmp_path / "y.sqlite")
