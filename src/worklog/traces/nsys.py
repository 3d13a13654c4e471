"""Nsight Systems' reports and exports: how busy each GPU was, and its kernels."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd

from worklog.capture import nsys as capture
from worklog.capture.tool import CaptureError, Session
from worklog.nsight import find_nsys
from worklog.problem import ProblemError
from worklog.traces import schema
from worklog.traces.activity import kernel_table
from worklog.traces.export import Export
from worklog.traces.intervals import Intervals, union_ns
from worklog.traces.schema import Trace
from worklog.traces.source import ExportError, Parquet, Sqlite

REPORT = ".nsys-rep"
EXPORT_S = 3600
"""Time limit of nsys export; it takes minutes for gigabytes."""


def tables(file: Path, geometry: bool = False) -> Trace:
    """The whole export in the tables of the schema; with `geometry` activities have the columns of activity.GEOMETRY.

    Raises ProblemError if it is no export of nsys.
    """
    with _open(file) as export:
        return _tables(export, file, geometry)


def read(file: Path, range_name: str | None = None) -> dict[str, Any]:
    """GPU time of a whole export, or of the NVTX range(s) `range_name` projected on the GPU (Trace.select).

    busy_ns is the union of kernels, copies and memsets on all streams in a device's window, kernel_ns that of kernels
    alone, copy_only_ns the rest of busy_ns, idle_ns = span_ns - busy_ns. launch_count are the API calls that launched
    kernels or graphs. kernels are of all devices together.

    Keys: nsys_version, schema_version, graph_trace_mode ("graph", "node" or None), devices, kernels (see
    activity.kernel_table), note (None, or what this export cannot tell; the numbers concerned are None).
    Raises ProblemError if it is no export of nsys, has no such range, or the range launched nothing.
    """
    with _open(file) as export:
        trace = _tables(export, file, geometry=True)
        chosen = trace.select(range_name)
        work, lost = trace.activities[chosen.launched], trace.calls[trace.lost & chosen.called]
        calls = trace.calls[chosen.called]
        return {
            "nsys_version": trace.tool_version,
            "schema_version": export.meta("META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION"),
            "graph_trace_mode": export.graph_mode(work),
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
def _open(file: Path) -> Iterator[Export]:
    if not file.exists():
        raise ProblemError(f"{file}: no such file.")
    try:
        if file.is_dir():
            yield Export(Parquet(file))
            return
        with exported(file) if file.suffix == REPORT else nullcontext(file) as database:
            where = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
            with closing(sqlite3.connect(where, uri=True)) as connection:
                yield Export(Sqlite(connection))
    except (ExportError, sqlite3.DatabaseError, UnicodeError) as error:
        what = Parquet.name if file.is_dir() else Sqlite.name
        raise ProblemError(f"{file}: is no {what} of nsys ({error}).") from error


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """The SQLite export of a .nsys-rep while the context lasts, without the variables of what was profiled.

    Raises ProblemError if nsys is not here, or cannot read the report.
    """
    nsys = find_nsys().path
    if nsys is None:
        raise ProblemError(
            f"{report}: only nsys reads this, and it is not here; export where it is: "
            f"`nsys export --type sqlite {report.name}`."
        )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "report.sqlite"
        session = Session(cwd=Path(folder), timeout_s=EXPORT_S, log=Path(folder) / "log")
        try:
            capture.run(capture.export_argv(str(report.absolute()), str(made), tool=str(nsys)), made, session)
        except CaptureError as error:
            raise ProblemError(f"{report}: {error}") from error
        yield made


def _tables(export: Export, file: Path, geometry: bool = False) -> Trace:
    calls = export.calls()
    return Trace(
        file=file,
        tool="nsys",
        tool_version=export.meta("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION"),
        activities=export.work(calls, geometry),
        calls=calls,
        frames=export.ranges(),
        notes=tuple(export.notes()),
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
