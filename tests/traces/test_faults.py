"""Whatever stands in a file: a diagnosis, or ProblemError. A short run of what a fuzzer does at length."""

from __future__ import annotations

import copy
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worklog.diagnose import diagnose
from worklog.problem import ProblemError
from worklog.traces import chrome

LIMITS = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def event(cat: str, at: int, dur: int, correlation: int) -> dict[str, Any]:
    args = {"correlation": correlation, "device": 0, "stream": 7, "grid": [1, 1, 1]}
    return {"ph": "X", "cat": cat, "name": f"{cat} 1", "pid": 1, "tid": 1, "ts": at, "dur": dur, "args": args}


TRACE: dict[str, Any] = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "GPU"}],
    "traceEvents": [
        event("cuda_runtime", 0, 5, 1) | {"name": "cudaLaunchKernel"},
        event("kernel", 10, 20, 1),
        event("cuda_runtime", 40, 15, 2) | {"name": "cudaMemcpyAsync"},
        event("gpu_memcpy", 45, 5, 2) | {"name": "Memcpy DtoH (Device -> Pageable)"},
        event("user_annotation", 0, 60, 0) | {"name": "ProfilerStep#1"},
    ],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value stands in nested lists and dictionaries."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def add_up(file: Path, range_name: str | None) -> None:
    """The diagnosis stands, or says why not."""
    try:
        found = diagnose(file, range_name)
    except ProblemError:
        return
    json.dumps(found)
    for device in found["devices"]:
        assert sum(device["accounting_ns"].values()) == device["span_ns"]
        assert min(device["accounting_ns"].values()) >= 0


@LIMITS
@given(
    st.lists(st.tuples(st.sampled_from(places(TRACE)), JSON), min_size=1, max_size=3),
    st.sampled_from((None, "ProfilerStep")),
)
def test_kineto_with_anything_in_any_place(tmp_path: Path, edits: list[Any], range_name: str | None) -> None:
    trace = copy.deepcopy(TRACE)
    for path, value in edits:
        at: Any = trace
        try:
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
        except (TypeError, LookupError):
            continue
    file = tmp_path / "t.json"
    file.write_text(json.dumps(trace))
    add_up(file, range_name)


@LIMITS
@given(st.data())
def test_kineto_with_bytes_cut_out_or_changed(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(TRACE).encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
    file = tmp_path / "t.json"
    file.write_bytes(raw)
    add_up(file, None)


INTEGER = st.integers(0, 50) | st.integers(-(2**63), 2**63 - 1) | st.none()
CELL = INTEGER | st.floats() | st.text(max_size=3)


@settings(LIMITS, max_examples=100)
@given(
    st.lists(st.tuples(*[INTEGER] * 6) | st.tuples(*[CELL] * 6), max_size=4),
    st.lists(st.tuples(*[INTEGER] * 5) | st.tuples(*[CELL] * 5), max_size=4),
    st.lists(st.tuples(*[INTEGER] * 4) | st.tuples(*[CELL] * 4), max_size=2),
    st.sampled_from((None, "7")),
)
def test_nsys_with_anything_in_any_cell(
    tmp_path: Path, kernels: list[Any], calls: list[Any], ranges: list[Any], range_name: str | None
) -> None:
    file = tmp_path / "t.sqlite"
    file.unlink(missing_ok=True)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE StringIds (id, value)")
        database.execute("INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, NULL)")
        kernel = "start, end, deviceId, streamId, correlationId, demangledName"
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({kernel})")
        database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)")
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", kernels)
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", calls)
        database.execute("CREATE TABLE NVTX_EVENTS (text, start, end, globalTid)")
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?)", ranges)
    add_up(file, range_name)


@given(st.integers(0, 1_900_000_000_000_000_000), st.integers(0, 10**13))
def test_every_nanosecond_is_read_as_it_stands(tmp_path_factory: pytest.TempPathFactory, at: int, lasts: int) -> None:
    file = tmp_path_factory.getbasetemp() / "exact.json"
    written = [f"{ns // 1000}.{ns % 1000:03}" for ns in (at, lasts)]
    file.write_text(f'{{"traceEvents": [{{"ph": "X", "ts": {written[0]}, "dur": {written[1]}}}]}}')
    ((read,),) = chrome.load(file).batches()
    assert (read.start, read.end) == (at, at + lasts)
