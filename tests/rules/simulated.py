"""A GPU and its host, clock by clock, and the traces that torch.profiler and nsys would write of them.

The host asks, the streams of one device do what they are asked for in order. The same program without its fault says
what the fault really costs. Times are whole nanoseconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from worklog.diagnose import diagnose

CALL = 5_000
"""What a launch or a copy costs the host."""
ARRIVES = 4_000
"""From the begin of a call to the earliest begin of its work."""
BETWEEN = 1_000
"""Between two pieces of work on a stream."""


PROCESS = 4711 << 24
"""globalPid."""
COMMON = 'start, "end", deviceId, streamId, correlationId, globalPid'
TABLES = {
    "KERNEL": f"{COMMON}, demangledName",
    "MEMCPY": f"{COMMON}, copyKind, srcKind, dstKind, bytes",
    "RUNTIME": 'start, "end", globalTid, correlationId, nameId',
    "NVTX": 'start, "end", globalTid, eventType, textId',
}


class Program:
    def __init__(self) -> None:
        self.now = 1_000_000
        self.free: dict[int, int] = {}
        self.over = self.now
        """When the last work of the device ends."""
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def host(self, ns: int) -> None:
        """Work of the host alone."""
        self.now += ns

    def kernel(self, name: str, ns: int, stream: int = 7) -> None:
        self._call("cudaLaunchKernel", CALL)
        self._work("kernel", name, ns, stream, self.now - CALL + ARRIVES)

    def copy(self, way: str, ns: int, wait: bool, size: int = 4) -> None:
        """`way` is as torch.profiler says it, such as `HtoD (Pageable -> Device)`; with `wait` until it is over."""
        start = self.now
        self._call("cudaMemcpyAsync", CALL)
        end = self._work("gpu_memcpy", f"Memcpy {way}", ns, 7, start + ARRIVES, bytes=size)
        if wait:
            self.now = max(self.now, end + 2_000)
            self.events[-2]["dur"] = (self.now - start) / 1000

    def synchronize(self, call: str = "cudaStreamSynchronize") -> None:
        start = self.now
        self.now = max(self.now, self.over) + 2_000
        self._event("cuda_runtime", call, start, self.now, 1)

    @contextmanager
    def frame(self, name: str, cat: str = "user_annotation") -> Iterator[None]:
        self._event(cat, name, self.now, self.now, 1)
        event = self.events[-1]  # an outer one stands before those inside of it
        start = self.now
        yield
        event["dur"] = (self.now - start) / 1000

    def diagnosis(self, folder: Path, range_name: str | None = None) -> dict[str, Any]:
        file = folder / f"{len(list(folder.iterdir()))}.json"
        file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        found: dict[str, Any] = json.loads(json.dumps(diagnose(file, range_name)))
        return found

    def export(self, file: Path) -> Path:
        """The same as nsys exports it: ranges, calls, kernels and copies, no operators or Python functions."""
        names: dict[str, int] = {}
        rows: dict[str, list[tuple[int, ...]]] = {"KERNEL": [], "MEMCPY": [], "RUNTIME": [], "NVTX": []}
        for event in self.events:
            start, end = round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000)
            name, args = names.setdefault(event["name"], len(names) + 1), event["args"]
            common = (start, end, 0, args.get("stream", 0), args.get("correlation", 0), PROCESS)
            if event["cat"] == "kernel":
                rows["KERNEL"].append((*common, name))
            elif event["cat"] == "gpu_memcpy":
                way, pageable = event["name"].split()[1], "Pageable" in event["name"]
                ends = (0 if pageable else 1, 2)
                rows["MEMCPY"].append((*common, *((1, *ends) if way == "HtoD" else (2, *ends[::-1])), args["bytes"]))
            elif event["cat"] == "cuda_runtime":
                rows["RUNTIME"].append((start, end, PROCESS + 1, args.get("correlation", 0), name))
            elif event["cat"] == "user_annotation":
                rows["NVTX"].append((start, end, PROCESS + 1, 59, name))
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
            database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(at, name) for name, at in names.items()])
            for table, columns in TABLES.items():
                full = "NVTX_EVENTS" if table == "NVTX" else f"CUPTI_ACTIVITY_KIND_{table}"
                database.execute(f"CREATE TABLE {full} ({columns})")
                marks = ", ".join("?" * (columns.count(",") + 1))
                database.executemany(f"INSERT INTO {full} VALUES ({marks})", rows[table])
        return file

    def _call(self, name: str, ns: int) -> None:
        self.correlation += 1
        self._event("cuda_runtime", name, self.now, self.now + ns, 1, correlation=self.correlation)
        self.now += ns

    def _work(self, cat: str, name: str, ns: int, stream: int, arrives: int, **args: Any) -> int:
        start = max(arrives, self.free.get(stream, 0))
        self.free[stream], self.over = start + ns + BETWEEN, max(self.over, start + ns)
        args |= {"correlation": self.correlation, "device": 0, "stream": stream}
        self._event(cat, name, start, start + ns, stream, **args)
        return start + ns

    def _event(self, cat: str, name: str, start: int, end: int, tid: int, **args: Any) -> None:
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args})


def finding(found: dict[str, Any], rule: str) -> dict[str, Any] | None:
    """Of this rule, of which a device has one at most. A finding is in order whatever it says."""
    said = [one for one in found["findings"] if one["rule"] == rule]
    assert len(said) <= 1
    for one in said:
        assert 0.05 <= one["share"] <= 1
        assert one["share"] <= one["gain_upper_bound"] + 1e-9 or rule == "sync_every_step"
        assert one["gain_upper_bound"] <= 1
        assert one["where"]
        assert one["next"].split()[0] in ("nsys", "ncu", "worklog")
    return said[0] if said else None


def reasons(found: dict[str, Any], rule: str) -> list[str]:
    return [one["reason"] for one in found["abstained"] if one["rule"] == rule]


def gain(slow: dict[str, Any], fast: dict[str, Any]) -> float:
    """What the device's span really lost."""
    before, after = slow["devices"][0]["span_ns"], fast["devices"][0]["span_ns"]
    return float((before - after) / before)
