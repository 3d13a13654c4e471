"""The tables of an export of nsys, as the schema's.

nsys creates a table only when it has a row for it, and columns came and went with its versions: nothing is assumed
but `start` and `end`. Meaning of tables and columns: https://docs.nvidia.com/nsight-systems (exporter, schema).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces import schema
from worklog.traces.activity import GEOMETRY
from worklog.traces.source import ExportError, Source

WORK = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "copy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
    "graph": "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
}
CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", ("start", "end", "globalTid", "correlationId", "nameId"))
RANGES = ("NVTX_EVENTS", ("start", "end", "globalTid", "eventType", "textId"))
COMMON = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
OWN = {"kernel": ("demangledName",), "copy": ("copyKind", "srcKind", "dstKind", "bytes"), "memset": ("bytes",)}
GEOMETRY_COLUMNS = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
WIDE = {"start", "end", "correlationId", "globalPid", "globalTid", "bytes"}
"""What 32 bits do not hold."""
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
SCHEMA = "3."
"""Versions that are read here; NVIDIA raises the first number for changes that break most queries."""
SPARED = {"globalPid", "textId", "eventType"}
"""Columns for want of which older exports lose nothing, unless they are of several processes."""


def table(source: Source, name: str, wanted: Sequence[str]) -> dict[str, Any]:
    """Integer columns; -1 stands for NULL and for a column that this version of nsys does not write."""
    have = source.columns(name)
    if not have:
        return {column: np.zeros(0, np.int64) for column in wanted}
    if not {"start", "end"} <= have:
        raise ExportError(f"table {name} has no start and end")
    size, filled = source.count(name), 0
    found = {column: np.empty(size, np.int64 if column in WIDE else np.int32) for column in wanted}
    for chunk in source.chunks(name, [column for column in wanted if column in have]):
        rows = slice(filled, filled := filled + len(chunk["start"]))
        if filled > size:
            break
        for column, values in chunk.items():
            found[column][rows] = values if column in WIDE else schema.small(values)
    if filled != size:
        raise ExportError(f"table {name} holds {filled} rows, and says {size}")
    for column in set(wanted) - have:
        found[column].fill(-1)
    if size and not all(-LIMIT_NS <= found[t].min() <= found[t].max() <= LIMIT_NS for t in ("start", "end")):
        raise ExportError(f"table {name} holds a time beyond {LIMIT_NS} ns")
    return found


class Export:
    """The tables of one export; what they share are strings by their ids, and small numbers for threads, processes."""

    def __init__(self, source: Source) -> None:
        if not source.columns("StringIds") >= {"id", "value"}:
            raise ExportError("it has no table StringIds")
        self.source = source
        rows = source.texts("StringIds", ("id", "value"))
        self.strings = {at: str(text) for at, text in rows if isinstance(at, int) and text is not None}
        self.threads, self.processes = _Numbers(), _Numbers()

    def calls(self) -> pd.DataFrame:
        """API calls in the order of their starts, one for a correlation id (the outermost)."""
        rows = table(self.source, *CALLS)
        called = self._named(rows.pop("nameId"), "unnamed call")
        kinds, graphs = schema.call_kinds(called)
        thread, process = self._who(rows.pop("globalTid"))
        return schema.outermost(
            schema.frame(
                schema.CALL,
                start_ns=rows["start"],
                end_ns=rows["end"],
                thread=thread,
                process=process,
                name=called,
                correlation=rows["correlationId"],
                kind=kinds,
                graph=graphs,
            )
        )

    def work(self, calls: pd.DataFrame, geometry: bool = False) -> pd.DataFrame:
        """Everything that ran on a device; with `geometry` the columns activity.GEOMETRY too."""
        parts: list[dict[str, Any]] = []
        for kind, source in WORK.items():
            extra = OWN.get(kind, ()) + (GEOMETRY_COLUMNS if geometry and kind == "kernel" else ())
            rows = table(self.source, source, (*COMMON, *extra))
            if len(rows["start"]) or not parts:
                parts.append(self._activities(kind, rows, geometry))
        names = pd.api.types.union_categoricals([part.pop("name") for part in parts])
        columns = {name: _joined([part.pop(name) for part in parts]) for name in list(parts[0])}
        process, processes = columns["process"], calls["process"].unique()
        if len(processes) == 1:  # exports before globalPid came
            process[process == -1] = processes[0]
        shape = {name: columns.pop(name) for name in GEOMETRY} if geometry else {}
        call = schema.join(process, columns["correlation"], calls)
        return schema.frame(schema.ACTIVITY, name=names, call=call, **columns).assign(**shape)

    def _activities(self, kind: str, rows: dict[str, Any], geometry: bool) -> dict[str, Any]:
        """Columns of the schema, and those of activity.GEOMETRY; takes them out of `rows`."""
        size = len(rows["start"])
        if kind == "kernel":
            called = self._named(rows.pop("demangledName"), "unnamed kernel")
            kinds = schema.kernel_kinds(called)
        else:
            kinds = np.full(size, {"copy": schema.COPY, "memset": schema.MEMSET, "graph": schema.GRAPH}[kind], np.int8)
            called = schema.categories(np.zeros(size, np.int64), [NAMES.get(kind, "")])
        pageable = np.full(size, -1, np.int8)
        if kind == "copy":
            called = _called(rows["copyKind"], {at: f"memcpy {way}" for at, way in COPIES.items()}, "memcpy")
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
            "process": self.processes.of(rows.pop("globalPid")),
            "pageable": pageable,
            "bytes": rows.get("bytes", np.full(size, -1)),
        }
        if geometry:
            own = zip(GEOMETRY, GEOMETRY_COLUMNS, strict=True)
            columns |= {mine: rows.get(theirs, np.full(size, -1)) for mine, theirs in own}
        return columns

    def ranges(self) -> pd.DataFrame:
        """Every closed NVTX range as a frame: push/pop ones nest on their thread, start/end ones in nothing."""
        rows = table(self.source, *RANGES)
        closed = rows["end"] != -1
        names = self._named(rows["textId"], "unnamed range")
        if "text" in self.source.columns(RANGES[0]):
            own = np.asarray([text for (text,) in self.source.texts(RANGES[0], ("text",))], dtype=object)
            said = np.flatnonzero(~pd.isna(own))
            if len(said):
                every = names.astype(object)
                every[said] = [str(text) for text in own[said]]
                names = pd.Categorical(every)
        thread, process = self._who(rows["globalTid"])
        return schema.frame(
            schema.FRAME,
            name=names[closed],
            start_ns=rows["start"][closed],
            end_ns=rows["end"][closed],
            thread=thread[closed],
            process=process[closed],
            kind=np.where(rows["eventType"][closed] == START_END, schema.SPAN, schema.ANNOTATION),
        )

    def meta(self, of: str, name: str) -> str | None:
        """The value whose name ends so, in a META_DATA table; some versions put `PROCESS_0:` before the name."""
        if not self.source.columns(of) >= {"name", "value"}:
            return None
        rows = self.source.texts(of, ("name", "value"))
        return next((str(value) for own, value in rows if str(own).endswith(name) and value is not None), None)

    def graph_mode(self, work: pd.DataFrame) -> str | None:
        """As the capture was asked to do, or, where the export does not say so, as its rows show."""
        if said := self.meta("META_DATA_CAPTURE", "CUDA_GRAPH_TRACE_OPTIONS:MODE"):
            return said.lower()
        if (work["kind"] == schema.GRAPH).any():
            return "graph"
        if "graphNodeId" not in self.source.columns(WORK["kernel"]):
            return None
        nodes = self.source.chunks(WORK["kernel"], ("graphNodeId",))
        return "node" if any((chunk["graphNodeId"] > 0).any() for chunk in nodes) else None

    def notes(self) -> list[str]:
        """What this export does not tell, or may tell otherwise than is read here."""
        version = self.meta("META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION")
        said = []
        if version is None:
            said.append("the export does not say which version its schema has")
        elif not version.startswith(SCHEMA):
            said.append(
                f"the export's schema has version {version}, and what is read here is {SCHEMA}x: check the numbers"
            )
        for name, wanted in (CALLS, RANGES, *((WORK[kind], (*COMMON, *own)) for kind, own in OWN.items())):
            have = self.source.columns(name)
            several = len(self.processes.known) > 2
            absent = [one for one in wanted if have and one not in have and (several or one not in SPARED)]
            if absent:
                said.append(f"the export's table {name} has no {', '.join(absent)}")
        return said

    def _named(self, ids: Any, unknown: str) -> pd.Categorical:
        return _called(ids, self.strings, unknown)

    def _who(self, thread: Any) -> tuple[Any, Any]:
        """Numbers of threads and of their processes."""
        codes, found = pd.factorize(thread)
        return self.threads.of(found)[codes], self.processes.of(np.where(found == -1, -1, found & PROCESS))[codes]


class _Numbers:
    """Small numbers for ids in the order in which they come; -1 stays."""

    def __init__(self) -> None:
        self.known = {-1: -1}

    def of(self, ids: Any) -> Any:
        codes, found = pd.factorize(ids)
        numbers = [self.known.setdefault(one, len(self.known) - 1) for one in found.tolist()]
        return np.asarray(numbers, dtype=np.int32)[codes]


def _called(ids: Any, names: dict[int, str], unknown: str) -> pd.Categorical:
    codes, used = pd.factorize(ids)
    return schema.categories(codes, [names.get(one, unknown) for one in used.tolist()])


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
