"""The tables of an SQLite export of nsys, as data frames.

nsys creates a table only when it has a row for it, and columns came and went with its versions: nothing is assumed
but `start` and `end`. Meaning of tables and columns: https://docs.nvidia.com/nsight-systems (exporter, SQLite schema).
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from worklog.problem import ProblemError
from worklog.traces.activity import GEOMETRY

WORK = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "copy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    "graph": "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
}
WORK_COLUMNS = ("start", "end", "deviceId", "correlationId", "globalPid", "graphNodeId", "demangledName")
GEOMETRY_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")
PROCESS = ~0xFFFFFF
"""Takes the thread out of a globalTid, which leaves the globalPid."""


def columns(database: sqlite3.Connection, name: str) -> set[str]:
    """Of one table; empty: there is no such table."""
    return {row[1] for row in database.execute(f'PRAGMA table_info("{name}")')}


def table(database: sqlite3.Connection, name: str, wanted: Sequence[str]) -> pd.DataFrame:
    """Integer columns; -1 stands for NULL and for a column that this version of nsys does not write."""
    have = columns(database, name)
    if not have:
        return pd.DataFrame({column: pd.Series(dtype="int64") for column in wanted})
    if not {"start", "end"} <= have:
        raise sqlite3.DatabaseError(f"table {name} has no start and end")
    picked = ", ".join(f'COALESCE("{c}", -1) AS "{c}"' if c in have else f'-1 AS "{c}"' for c in wanted)
    return pd.read_sql_query(f'SELECT {picked} FROM "{name}"', database).astype("int64")


def calls(database: sqlite3.Connection, names: dict[int, str]) -> pd.DataFrame:
    """API calls, one for a correlation id (the outermost); `launches`: kernels or a graph, `graph`: a graph."""
    calls = table(
        database, "CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId")
    ).sort_values("start")
    calls = calls.assign(globalPid=calls["globalTid"] & PROCESS)
    calls = calls.drop_duplicates(["globalPid", "correlationId"]).reset_index(drop=True)
    called = [names.get(at, "") for at in calls["nameId"]]
    return calls.assign(
        launches=pd.Series([LAUNCH.match(name) is not None for name in called], dtype="bool"),
        graph=pd.Series(["GraphLaunch" in name for name in called], dtype="bool"),
    )


def work(database: sqlite3.Connection, names: dict[int, str], calls: pd.DataFrame) -> pd.DataFrame:
    """Everything that ran on a device; `call` is the index of the API call that asked for it, -1 if unknown."""
    wanted = (*WORK_COLUMNS, *GEOMETRY_COLUMNS)
    tables = [table(database, name, wanted).assign(kind=kind) for kind, name in WORK.items()]
    work = pd.concat([t for t in tables if len(t)] or tables[:1], ignore_index=True)
    work = work.rename(columns=dict(zip(GEOMETRY_COLUMNS, GEOMETRY, strict=True)))
    processes = calls["globalPid"].unique()
    if len(processes) == 1:  # exports before globalPid came
        work.loc[work["globalPid"] == -1, "globalPid"] = processes[0]
    keys = calls[["globalPid", "correlationId"]].assign(call=calls.index)
    work = work.merge(keys, on=["globalPid", "correlationId"], how="left")
    return work.assign(
        call=work["call"].fillna(-1).astype("int64"),
        full_name=[names.get(at, "unnamed kernel") for at in work["demangledName"]],
    )


def ranges(database: sqlite3.Connection, file: Path, name: str) -> list[tuple[int, int, int]]:
    """(start, end, process) of every closed NVTX range of this name."""
    have = columns(database, "NVTX_EVENTS")
    text = "n.text" if "textId" not in have else "COALESCE(n.text, s.value)"
    join = "" if "textId" not in have else "LEFT JOIN StringIds s ON s.id = n.textId"
    found = []
    if have:
        query = f'SELECT {text}, n.start, n."end", n.globalTid FROM NVTX_EVENTS n {join} WHERE n."end" IS NOT NULL'
        found = list(database.execute(query))
    if not (rows := [(start, end, thread & PROCESS) for label, start, end, thread in found if label == name]):
        known = ", ".join(sorted({str(row[0]) for row in found})[:8])
        raise ProblemError(f"{file}: has no NVTX range {name!r}; its ranges: {known or 'none'}.")
    return rows


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
    if (work["kind"] == "graph").any():
        return "graph"
    return "node" if (work["graphNodeId"] > 0).any() else None
