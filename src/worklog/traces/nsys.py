"""Nsight Systems' SQLite export: how busy each GPU was, and its kernels."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from worklog.problem import ProblemError
from worklog.traces import export, schema
from worklog.traces.activity import kernel_table
from worklog.traces.intervals import Intervals, union_ns
from worklog.traces.schema import Trace


def tables(file: Path, geometry: bool = False) -> Trace:
    """The whole export in the tables of the schema; with `geometry` activities have the columns of activity.GEOMETRY.

    Raises ProblemError if it is no export of nsys.
    """
    with _open(file) as database:
        return _tables(database, file, geometry)


def read(file: Path, range_name: str | None = None) -> dict[str, Any]:
    """GPU time of a whole export, or of the NVTX range(s) `range_name` projected on the GPU (Trace.select).

    busy_ns is the union of kernels, copies and memsets on all streams in a device's window, kernel_ns that of kernels
    alone, copy_only_ns the rest of busy_ns, idle_ns = span_ns - busy_ns. launch_count are the API calls that launched
    kernels or graphs. kernels are of all devices together.

    Keys: nsys_version, schema_version, graph_trace_mode ("graph", "node" or None), devices, kernels (see
    activity.kernel_table), note (None, or what this export cannot tell; the numbers concerned are None).
    Raises ProblemError if it is no export of nsys, has no such range, or the range launched nothing.
    """
    with _open(file) as database:
        trace = _tables(database, file, geometry=True)
        chosen = trace.select(range_name)
        work, lost = trace.activities[chosen.launched], trace.calls[trace.lost & chosen.called]
        calls = trace.calls[chosen.called]
        return {
            "nsys_version": trace.tool_version,
            "schema_version": export.meta(database, "META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION"),
            "graph_trace_mode": export.graph_mode(database, work),
            "devices": [
                _device(
                    device, window, work[work["device"] == device], trace.activities, calls, bool(lost["graph"].any())
                )
                for device, window in chosen.windows.items()
            ],
            "kernels": kernel_table(work[work["kind"] <= schema.COMMUNICATION]),
            "note": _note(work, calls, lost),
        }


@contextmanager
def _open(file: Path) -> Iterator[sqlite3.Connection]:
    if not file.is_file():
        raise ProblemError(f"{file}: no such file.")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            if not export.columns(database, "StringIds"):
                raise ProblemError(f"{file}: is no SQLite export of nsys (it has no table StringIds).")
            yield database
    except sqlite3.DatabaseError as error:
        raise ProblemError(f"{file}: is no SQLite export of nsys ({error}).") from error


def _tables(database: sqlite3.Connection, file: Path, geometry: bool = False) -> Trace:
    names = {at: str(text) for at, text in database.execute("SELECT id, value FROM StringIds") if text is not None}
    calls = export.calls(database, names)
    return Trace(
        file=file,
        tool="nsys",
        tool_version=export.meta(database, "META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION"),
        activities=export.work(database, names, calls, geometry),
        calls=calls,
        frames=export.ranges(database),
    )


def _device(
    device: int, window: Intervals, rows: pd.DataFrame, everything: pd.DataFrame, calls: pd.DataFrame, blind: bool
) -> dict[str, Any]:
    """`rows` were launched in the window; of `everything`, what ran on the device at any time keeps it busy."""
    own = calls[calls.index.isin(rows["call"])]
    everything = everything[everything["device"] == device]
    kernels = everything[everything["kind"] <= schema.COMMUNICATION]
    busy = union_ns(everything["start_ns"], everything["end_ns"], window)
    only_kernels = union_ns(kernels["start_ns"], kernels["end_ns"], window)
    whole = blind or bool((rows["kind"] == schema.GRAPH).any())
    return {
        "device": device,
        "span_ns": window.length,
        "busy_ns": None if blind else busy,
        "kernel_ns": None if whole else only_kernels,
        "copy_only_ns": None if whole else busy - only_kernels,
        "idle_ns": None if blind else window.length - busy,
        "kernel_count": None if whole else int((rows["kind"] <= schema.COMMUNICATION).sum()),
        "launch_count": int((own["kind"] == schema.LAUNCH).sum()) if len(calls) else None,
    }


def _note(work: pd.DataFrame, calls: pd.DataFrame, lost: pd.DataFrame) -> str | None:
    said = []
    if whole := int((work["kind"] == schema.GRAPH).sum()):
        said.append(
            f"CUDA graphs were traced as one piece: {whole} graph executions have no kernel rows, so kernels are those "
            "outside of graphs, and busy_ns holds each graph from its start to its end"
        )
    if count := int(lost["graph"].sum()):
        said.append(f"{count} graph launches have no row of GPU activity at all, so busy and idle time are unknown")
    if count := len(lost) - int(lost["graph"].sum()):
        launches = int((calls["kind"] == schema.LAUNCH).sum())
        said.append(f"{count} of {launches} launches have no row of GPU activity")
    if calls.empty:
        said.append("without CUDA API rows the launches are unknown, and a span begins with the first GPU activity")
    return "; ".join(said) or None
