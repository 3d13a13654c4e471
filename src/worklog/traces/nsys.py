"""Nsight Systems' SQLite export: how busy each GPU was, and its kernels."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd

from worklog.problem import ProblemError
from worklog.traces import export
from worklog.traces.activity import kernel_table, union_ns


def read(file: Path, range_name: str | None = None) -> dict[str, Any]:
    """GPU time of a whole export, or of the NVTX range(s) `range_name` projected on the GPU.

    The window of a device begins with the first call that launched something on it (inside of the range, in its
    process) and ends when the last of what was launched ended. busy_ns is the union of kernels, copies and memsets on
    all streams in it, kernel_ns that of kernels alone, copy_only_ns the rest of busy_ns, idle_ns = span_ns - busy_ns.
    launch_count are the API calls that launched kernels or graphs. kernels are of all devices together.

    Keys: nsys_version, schema_version, graph_trace_mode ("graph", "node" or None), devices, kernels (see
    activity.kernel_table), note (None, or what this export cannot tell; the numbers concerned are None).
    Raises ProblemError if it is no export of nsys, has no such range, or the range launched nothing.
    """
    if not file.is_file():
        raise ProblemError(f"{file}: no such file.")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            return _read(database, file, range_name)
    except (sqlite3.DatabaseError, pd.errors.DatabaseError) as error:
        raise ProblemError(f"{file}: is no SQLite export of nsys ({error}).") from error


def _read(database: sqlite3.Connection, file: Path, range_name: str | None) -> dict[str, Any]:
    if not export.columns(database, "StringIds"):
        raise ProblemError(f"{file}: is no SQLite export of nsys (it has no table StringIds).")
    names = dict(database.execute("SELECT id, value FROM StringIds"))
    calls = export.calls(database, names)
    work = export.work(database, names, calls)
    if range_name is not None:
        inside = _inside(export.ranges(database, file, range_name), calls)
        calls, everything = calls[inside], work
        work = work[work["call"].isin(calls.index)]
        if work.empty and not calls["launches"].any():
            raise ProblemError(f"{file}: nothing was launched on a GPU inside of the NVTX range {range_name!r}.")
    else:
        everything = work
    lost = calls[calls["launches"] & ~calls.index.isin(work["call"])]
    return {
        "nsys_version": export.meta(database, "META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION"),
        "schema_version": export.meta(database, "META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION"),
        "graph_trace_mode": export.graph_mode(database, work),
        "devices": [
            _device(int(device), rows, everything[everything["deviceId"] == device], calls, lost)
            for device, rows in work.groupby("deviceId", sort=True)
        ],
        "kernels": kernel_table(work[work["kind"] == "kernel"]),
        "note": _note(work, calls, lost),
    }


def _device(
    device: int, rows: pd.DataFrame, everything: pd.DataFrame, calls: pd.DataFrame, lost: pd.DataFrame
) -> dict[str, Any]:
    """`rows` were launched in the window, `everything` ran on the device at any time."""
    own = calls[calls.index.isin(rows["call"])]
    low = min([int(rows["start"].min()), *own["start"].tolist()])
    window = (low, int(rows["end"].max()))
    kernels = everything[everything["kind"] == "kernel"]
    span, busy = window[1] - window[0], union_ns(everything["start"], everything["end"], window)
    only_kernels = union_ns(kernels["start"], kernels["end"], window)
    blind = bool(lost["graph"].any())
    whole = blind or bool((rows["kind"] == "graph").any())
    return {
        "device": device,
        "span_ns": span,
        "busy_ns": None if blind else busy,
        "kernel_ns": None if whole else only_kernels,
        "copy_only_ns": None if whole else busy - only_kernels,
        "idle_ns": None if blind else span - busy,
        "kernel_count": None if whole else int((rows["kind"] == "kernel").sum()),
        "launch_count": int(own["launches"].sum()) if len(calls) else None,
    }


def _note(work: pd.DataFrame, calls: pd.DataFrame, lost: pd.DataFrame) -> str | None:
    said = []
    if whole := int((work["kind"] == "graph").sum()):
        said.append(
            f"CUDA graphs were traced as one piece: {whole} graph executions have no kernel rows, so kernels are those "
            "outside of graphs, and busy_ns holds each graph from its start to its end"
        )
    if count := int(lost["graph"].sum()):
        said.append(f"{count} graph launches have no row of GPU activity at all, so busy and idle time are unknown")
    if count := len(lost) - int(lost["graph"].sum()):
        said.append(f"{count} of {int(calls['launches'].sum())} launches have no row of GPU activity")
    if calls.empty:
        said.append("without CUDA API rows the launches are unknown, and a span begins with the first GPU activity")
    return "; ".join(said) or None


def _inside(ranges: Sequence[tuple[int, int, int]], calls: pd.DataFrame) -> Any:
    """Which calls began while one of the ranges was open in their process, on whichever thread."""
    inside = pd.Series(False, index=calls.index)
    for start, end, process in ranges:
        inside |= calls["start"].between(start, end) & (calls["globalPid"] == process)
    return inside
