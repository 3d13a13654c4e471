"""The tables of an SQLite export of nsys, as the schema's.

nsys creates a table only when it has a row for it, and columns came and went with its versions: nothing is assumed
but `start` and `end`. Meaning of tables and columns: https://docs.nvidia.com/nsight-systems (exporter, SQLite schema).
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces import schema
from worklog.traces.activity import GEOMETRY

WORK = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "copy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    "graph": "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
}
COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
OWN = {"kernel": ("demangledName",), "copy": ("copyKind", "srcKind", "dstKind", "bytes"), "memset": ("bytes",)}
GEOMETRY_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
NAMES = {"memset": "memset", "graph": "CUDA graph"}
PAGEABLE = 0
"""srcKind, dstKind of host memory that is not pinned."""
PROCESS = ~0xFFFFFF
"""Takes the thread out of a globalTid, which leaves the globalPid."""
START_END = 60
"""eventType of an NVTX range that another thread may close."""
LIMIT_NS = 1 << 61
"""Differences of times must fit in 64 bits."""
ROWS = 1 << 19
"""Fetched at once; SQLite's longest text is 1e9 bytes."""


def columns(database: sqlite3.Connection, name: str) -> set[str]:
    """Of one table; empty: there is no such table."""
    return {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')}


def table(database: sqlite3.Connection, name: str, wanted: Sequence[str]) -> dict[str, Any]:
    """Integer columns; -1 stands for NULL and for a column that this version of nsys does not write."""
    have = columns(database, name)
    if not have:
        return {column: np.zeros(0, np.int64) for column in wanted}
    if not {"start", "end"} <= have:
        raise sqlite3.DatabaseError(f"table {name} has no start and end")
    size, first, last = database.execute(f'SELECT COUNT(*), MIN(rowid), MAX(rowid) FROM "{name}"').fetchone()
    known = [column for column in wanted if column in have]
    lists = ", ".join(f'GROUP_CONCAT(COALESCE("{column}", -1))' for column in known)
    query = f'SELECT {lists} FROM "{name}" WHERE rowid BETWEEN ? AND ?'
    step = ROWS * max(1, (last - first + 1) // size) if size else ROWS
    found = {column: np.full(size, -1) for column in wanted}
    filled = 0
    for at in range(first, last + 1, step) if size else ():
        lists_of = [_numbers(text) for text in database.execute(query, (at, at + step - 1)).fetchone()]
        count = len(lists_of[0])
        if any(len(numbers) != count for numbers in lists_of) or filled + count > size:
            break
        for column, numbers in zip(known, lists_of, strict=True):
            found[column][filled : filled + count] = numbers
        filled += count
    if filled != size:
        raise sqlite3.DatabaseError(f"table {name} holds something else than integers")
    if size and not all(-LIMIT_NS <= found[t].min() <= found[t].max() <= LIMIT_NS for t in ("start", "end")):
        raise sqlite3.DatabaseError(f"table {name} holds a time beyond {LIMIT_NS} ns")
    return found


def _numbers(text: str | None) -> Any:
    """Integers between commas. As text they cross from SQLite to NumPy more than twice as fast as cell by cell."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # what NumPy says where the text is no number
        try:
            return np.fromstring(text or "", dtype=np.int64, sep=",")
        except (DeprecationWarning, ValueError):
            return np.zeros(0, np.int64)


def calls(database: sqlite3.Connection, names: dict[int, str]) -> pd.DataFrame:
    """API calls in the order of their starts, one for a correlation id (the outermost)."""
    rows = table(database, "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId"))
    called = named(rows["nameId"], names, "unnamed call")
    kinds, graphs = schema.call_kinds(called)
    return schema.outermost(
        schema.frame(
            schema.CALL,
            start_ns=rows["start"],
            end_ns=rows["end"],
            thread=rows["globalTid"],
            process=rows["globalTid"] & PROCESS,
            name=called,
            correlation=rows["correlationId"],
            kind=kinds,
            graph=graphs,
        )
    )


def work(
    database: sqlite3.Connection, names: dict[int, str], calls: pd.DataFrame, geometry: bool = False
) -> pd.DataFrame:
    """Everything that ran on a device; with `geometry` the columns activity.GEOMETRY too."""
    parts: list[dict[str, Any]] = []
    for kind, source in WORK.items():
        extra = OWN.get(kind, ()) + (GEOMETRY_COLUMNS if geometry and kind == "kernel" else ())
        rows = table(database, source, (*COMMON, *extra))
        if len(rows["start"]) or not parts:
            parts.append(_activities(kind, rows, names, geometry))
    names_of = pd.api.types.union_categoricals([part.pop("name") for part in parts])
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    process = columns["process"]
    processes = calls["process"].unique()
    if len(processes) == 1:  # exports before globalPid came
        process[process == -1] = processes[0]
    work = schema.frame(
        schema.ACTIVITY, name=names_of, call=schema.join(process, columns["correlation"], calls), **columns
    )
    return work.assign(**{name: columns[name] for name in GEOMETRY}) if geometry else work


def _activities(kind: str, rows: dict[str, Any], names: dict[int, str], geometry: bool) -> dict[str, Any]:
    """Columns of the schema, and those of activity.GEOMETRY."""
    size = len(rows["start"])
    if kind == "kernel":
        called = named(rows["demangledName"], names, "unnamed kernel")
        kinds = schema.kernel_kinds(called)
    else:
        kinds = np.full(size, {"copy": schema.COPY, "memset": schema.MEMSET, "graph": schema.GRAPH}[kind], np.int8)
        called = schema.categories(np.zeros(size, np.int64), [NAMES.get(kind, "")])
    pageable = np.full(size, -1, np.int8)
    if kind == "copy":
        called = named(rows["copyKind"], {at: f"memcpy {way}" for at, way in COPIES.items()}, "memcpy")
        ends = np.stack((rows["srcKind"], rows["dstKind"]))
        pageable = np.where((ends < 0).any(axis=0), -1, (ends == PAGEABLE).any(axis=0)).astype(np.int8)
    columns = {
        "start_ns": rows["start"],
        "end_ns": rows["end"],
        "device": rows["deviceId"],
        "stream": rows["streamId"],
        "kind": kinds,
        "name": called,
        "correlation": rows["correlationId"],
        "process": rows["globalPid"],
        "pageable": pageable,
        "bytes": rows.get("bytes", np.full(size, -1)),
    }
    if geometry:
        own = zip(GEOMETRY, GEOMETRY_COLUMNS, strict=True)
        columns |= {mine: rows.get(theirs, np.full(size, -1)) for mine, theirs in own}
    return columns


def named(ids: Any, names: dict[int, str], unknown: str) -> pd.Categorical:
    """Names of these ids."""
    codes, used = pd.factorize(ids)
    return schema.categories(codes, [names.get(int(one), unknown) for one in used])


def ranges(database: sqlite3.Connection) -> pd.DataFrame:
    """Every closed NVTX range as a frame: push/pop ones nest on their thread, start/end ones in nothing."""
    have = columns(database, "NVTX_EVENTS")
    found: list[tuple[Any, ...]] = []
    if have:
        text = "n.text" if "textId" not in have else "COALESCE(n.text, s.value)"
        join = "" if "textId" not in have else "LEFT JOIN StringIds s ON s.id = n.textId"
        kind = "n.eventType" if "eventType" in have else "NULL"
        found = list(
            database.execute(
                f'SELECT {text}, n.start, n."end", CAST(COALESCE(n.globalTid, -1) AS INTEGER), {kind} '
                f'FROM NVTX_EVENTS n {join} WHERE n."end" IS NOT NULL'
            )
        )
    if not all(isinstance(at, int) and abs(at) <= LIMIT_NS for row in found for at in row[1:3]):
        raise sqlite3.DatabaseError("table NVTX_EVENTS holds something else than times")
    thread = np.asarray([row[3] for row in found], dtype=np.int64)
    codes, names = pd.factorize(np.asarray([str(row[0]) for row in found], dtype=object))
    return schema.frame(
        schema.FRAME,
        name=schema.categories(codes, list(names)),
        start_ns=[row[1] for row in found],
        end_ns=[row[2] for row in found],
        thread=thread,
        process=thread & PROCESS,
        kind=[schema.SPAN if row[4] == START_END else schema.ANNOTATION for row in found],
    )


def meta(database: sqlite3.Connection, of: str, name: str) -> str | None:
    """The value whose name ends so, in a META_DATA table; some versions put `PROCESS_0:` before the name."""
    if not columns(database, of):
        return None
    row = database.execute(f"SELECT value FROM {of} WHERE name LIKE ?", (f"%{name}",)).fetchone()
    return None if row is None or row[0] is None else str(row[0])


def graph_mode(database: sqlite3.Connection, work: pd.DataFrame) -> str | None:
    """As the capture was asked to do, or, where the export does not say so, as its rows show."""
    if said := meta(database, "META_DATA_CAPTURE", "CUDA_GRAPH_TRACE_OPTIONS:MODE"):
        return said.lower()
    if (work["kind"] == schema.GRAPH).any():
        return "graph"
    source = WORK["kernel"]
    if "graphNodeId" not in columns(database, source):
        return None
    return "node" if database.execute(f"SELECT 1 FROM {source} WHERE graphNodeId > 0 LIMIT 1").fetchone() else None
