"""One program as versions of torch.profiler write it: the same answer, worked out by hand, whatever the version.

The program, in ticks: a launch in [10, 15) of a kernel that runs in [20, 50); a blocking copy called in [40, 62) that
runs in [50, 60); a Triton kernel launched by the driver's call in [70, 74) that runs in [80, 90). So of [10, 90) 40 are
compute, 10 copy, 10 launch (before the first kernel, its call had begun), 2 sync (the copy's call was not back) and
18 host. Sources of each version's layout: kineto's output_json.cpp (fmtTs, writeCompleteEvent, "Make all timestamps
relative to 3 month intervals"), its tb_plugin/test for the oldest, and the trace in fixtures/torch_profiler_v100.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from worklog.diagnose import diagnose
from worklog.traces import kineto, operators, schema

PARTS = {"compute": 40, "communication": 0, "copy": 10, "memset": 0}
PARTS |= {"launch": 10, "host": 18, "sync": 2, "unexplained": 0}
SINCE_1970 = 1_712_196_697_021_337_000
HOST, LANE = {"pid": 4711, "tid": 4711}, {"pid": 0, "tid": 7}
Event = dict[str, Any]


def program() -> list[Event]:
    """Times in ticks; each version writes them in its own way."""
    events = [
        ("cpu_op", "aten::linear", 8, 64, {"External id": 6}),
        ("cpu_op", "aten::mm", 9, 17, {"External id": 7, "Sequence number": 41, "Fwd thread id": 0}),
        ("cuda_runtime", "cudaLaunchKernel", 10, 15, {"cbid": 211, "correlation": 1, "External id": 7}),
        ("kernel", "void gemm<float>(float*)", 20, 50, {"correlation": 1, "External id": 7}),
        ("cuda_runtime", "cudaMemcpyAsync", 40, 62, {"cbid": 41, "correlation": 2, "External id": 6}),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 50, 60, {"correlation": 2, "External id": 6, "bytes": 64}),
        ("cpu_op", "triton_poi_fused_0", 66, 76, {"External id": 1}),
        ("cuda_driver", "cuLaunchKernel", 70, 74, {"cbid": 307, "correlation": 3, "External id": 1}),
        ("kernel", "triton_poi_fused_0", 80, 90, {"correlation": 3, "External id": 1}),
        ("user_annotation", "ProfilerStep#1", 0, 95, {}),
    ]
    found = []
    for cat, name, start, end, args in events:
        device = cat in ("kernel", "gpu_memcpy")
        shape = {"grid": [4, 2, 1], "block": [64, 1, 1]} if cat == "kernel" else {}
        place = {"device": 0, "context": 1, "stream": 7} if device else {}
        found.append({"ph": "X", "cat": cat, "name": name, **(LANE if device else HOST), "at": start, "end": end})
        found[-1]["args"] = args | place | shape
    return found


def beside() -> list[Event]:
    """What else stands in such files, and is no work of the device and no call."""
    fudged = {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#1", **LANE, "at": 19, "end": 91}
    waits = {"ph": "X", "cat": "cuda_sync", "name": "Event Sync", **LANE, "at": 15, "end": 66}
    span = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
    buffers = {
        "ph": "X",
        "cat": "overhead",
        "name": "Activity Buffer Request",
        "pid": -1,
        "tid": 0,
        "at": 60,
        "end": 99,
    }
    memory = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", **HOST, "at": 11}
    ends = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "at": 99}
    counter = {"ph": "C", "cat": "cuda_profiler_range", "name": "counter", **LANE, "at": 20, "args": {"value": 3}}
    name = {"ph": "M", "name": "process_name", "pid": 4711, "tid": 0, "at": 0, "args": {"name": "python"}}
    arrows = [{"ph": ph, "id": 1, "cat": "ac2g", "name": "ac2g", **HOST, "at": 10} for ph in "sf"]
    args = {"args": {"stream": 7, "correlation": 2, "device": 0}}
    return [fudged | args, waits | args, span | {"at": 0, "end": 99}, buffers, memory, ends, counter, name, *arrows]


def timed(events: list[Event], tick_ns: int, origin_ns: int, text: Callable[[int], str]) -> str:
    """The events' JSON, with times that no float has touched."""
    written = []
    for event in events:
        own = {key: value for key, value in event.items() if key not in ("at", "end")}
        times = f'"ts": {text(origin_ns + tick_ns * event["at"])}'
        if "end" in event:
            times += f', "dur": {text(tick_ns * (event["end"] - event["at"]))}'
        written.append(f"{json.dumps(own)[:-1]}, {times}}}")
    return ",\n".join(written)


def whole(ns: int) -> str:
    assert ns % 1000 == 0
    return str(ns // 1000)


def decimals(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03}"


def quoted(ns: int) -> str:
    return f'"{decimals(ns)}"'


def old_ids(event: Event) -> Event:
    """Until torch 2.3 the External id of calls and device work was their correlation id."""
    args = event["args"]
    return event | {"args": args | ({"External id": args["correlation"]} if "correlation" in args else {})}


def arrows(events: list[Event], cat: str, name: str) -> list[Event]:
    return [event | {"cat": cat, "name": name} if event.get("cat") == "ac2g" else event for event in events]


def with_stacks_in_arguments(event: Event) -> Event:
    if event["cat"] != "cpu_op":
        return event
    return event | {
        "args": event["args"] | {"Call stack": "train.py(3): step;x.py(1): <module>", "Module Hierarchy": "A"}
    }


def torch_1_13() -> str:
    events = [with_stacks_in_arguments(old_ids(event)) for event in program()]
    events += arrows(beside(), "async_cpu_to_gpu", "async_gpu")
    body = timed(events, 1000, SINCE_1970, whole)
    return f'{{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{body}], "traceName": "t.json"}}'


def torch_2_0() -> str:
    body = timed([old_ids(event) for event in program()] + beside(), 1000, SINCE_1970, whole)
    return f'{{\n  "schemaVersion": 1,\n  "with_flops": 1, "traceEvents": [{body}],\n  "traceName": "t.json"\n}}'


def nanoseconds_since_1970() -> str:
    body = timed(program() + beside(), 1001, SINCE_1970 + 123, decimals)
    return f'{{"schemaVersion": 1, "traceEvents": [{body}], "displayTimeUnit": "ns", "traceName": "t.json"}}'


def in_the_quarter(origin_ns: int) -> str:
    body = timed(program() + beside(), 1001, origin_ns, decimals)
    head = '"displayTimeUnit": "ms", "baseTimeNanoseconds": 1790857026000000000'
    return f'{{"schemaVersion": 1, {head}, "traceEvents": [{body}], "traceName": "t.json"}}'


def texts() -> str:
    events = [event | {"pid": str(event["pid"]), "tid": str(event["tid"])} for event in program()]
    for event in events:
        event["args"] = {key: str(value) if isinstance(value, int) else value for key, value in event["args"].items()}
    return f'{{"traceEvents": [{timed(events, 1001, 123, quoted)}]}}'


def torch_1_8() -> str:
    renamed = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "cuda_driver": "Runtime"}
    renamed |= {"kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    events = []
    for event in program():
        args = {key: value for key, value in event["args"].items() if key not in ("device", "stream", "External id")}
        lane = {"tid": "stream 7"} if event["cat"] in ("kernel", "gpu_memcpy") else {"tid": "4711"}
        named = {"external id" if lane["tid"] != "4711" else "External id": event["args"].get("External id", 0)}
        events.append(event | {"cat": renamed.get(event["cat"], event["cat"]), "args": args | named} | lane)
    return f'{{"traceEvents": [{timed(events, 1000, SINCE_1970, whole)}]}}'


VERSIONS = {
    "torch 1.8, categories in capitals, device and stream by the lane": (torch_1_8, 1000),
    "torch 1.13, whole microseconds since 1970, async_gpu arrows": (torch_1_13, 1000),
    "torch 2.0, whole microseconds since 1970, ac2g arrows": (torch_2_0, 1000),
    "nanoseconds since 1970": (nanoseconds_since_1970, 1001),
    "nanoseconds early in a quarter": (lambda: in_the_quarter(4_305_248_407_165_883), 1001),
    "nanoseconds on the last day of a quarter": (lambda: in_the_quarter(92 * 86_400 * 10**9 - 999_999), 1001),
    "numbers as texts": (texts, 1001),
}


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """A file of this version, and a tick's nanoseconds."""
    write, tick = VERSIONS[request.param]
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(write().encode()))
    return file, tick


def test_the_accounting_is_that_of_the_program(version: tuple[Path, int]) -> None:
    file, tick = version
    found = diagnose(file)
    (device,) = found["devices"]
    assert (device["device"], device["span_ns"], device["kernel_count"]) == (0, 80 * tick, 2)
    assert device["accounting_ns"] == {part: ticks * tick for part, ticks in PARTS.items()}
    assert [(one["name"], one["total_ns"]) for one in found["kernels"]] == [
        ("void gemm<float>(float*)", 30 * tick),
        ("triton_poi_fused_0", 10 * tick),
    ]
    assert found["coverage"]["kernels_joined_to_launch"] == 1.0
    assert diagnose(file, "ProfilerStep#1")["devices"][0]["span_ns"] == 80 * tick


def test_streams_copies_and_the_hosts_frames(version: tuple[Path, int]) -> None:
    file, tick = version
    trace = kineto.tables(file, geometry=True)
    assert set(trace.activities["stream"]) == {7}
    (copy,) = trace.activities[trace.activities["kind"] == schema.COPY].to_dict("records")
    assert (copy["pageable"], copy["bytes"]) == (1, 64)
    assert trace.activities["grid_x"].tolist() == [4, -1, 4]
    operator = trace.frames[trace.frames["kind"] == schema.OPERATOR]
    assert operator["name"].tolist() == ["aten::linear", "aten::mm", "triton_poi_fused_0"]
    assert (operator["end_ns"] - operator["start_ns"]).tolist() == [56 * tick, 8 * tick, 10 * tick]
    assert operator["sequence"].tolist() == [-1, 41, -1]
    assert trace.calls["thread"].nunique() == 1
    assert set(operator["thread"]) == set(trace.calls["thread"])
    assert (trace.rank, trace.stacks) == (None, False)


def test_kernels_are_charged_to_the_operator_that_launched_them(version: tuple[Path, int]) -> None:
    """In old versions a kernel's External id 1 is a correlation id, and not the operator of that number."""
    file, tick = version
    found = operators.read(file)
    spent = {row["name"]: row["kernel_ns"] for row in found["operators"]}
    assert spent == {"aten::linear": 30 * tick, "triton_poi_fused_0": 10 * tick}
    assert found["kernels_joined"] == 1.0


def test_a_lone_rank_is_read_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "rank3.json"
    info = {"backend": "nccl", "rank": 3, "world_size": 4, "pg_count": 1}
    file.write_text(json.dumps({"distributedInfo": info})[:-1] + "," + torch_2_0().lstrip()[1:])
    assert kineto.tables(file).rank == 3
    assert diagnose(file)["devices"][0]["accounting_ns"]["host"] == 18_000


def test_recorded_python_functions_are_frames_and_said(tmp_path: Path) -> None:
    stacks = [
        {"ph": "X", "cat": "python_function", "name": name, **HOST, "at": at, "end": 92, "args": {"Python id": at}}
        for at, name in ((1, "train.py(7): step"), (2, "nn.Module: Linear_0"))
    ]
    file = tmp_path / "stacks.json"
    file.write_text(f'{{"traceEvents": [{timed(program() + stacks, 1000, 0, whole)}]}}')
    trace = kineto.tables(file)
    assert trace.stacks
    names = trace.frames.set_index("name")["kind"]
    assert (names["train.py(7): step"], names["nn.Module: Linear_0"]) == (schema.PYTHON, schema.MODULE)
    assert diagnose(file)["devices"][0]["accounting_ns"] == {part: 1000 * ticks for part, ticks in PARTS.items()}


def test_events_beyond_one_batch_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    file.write_text(torch_2_0())
    at_once = kineto.tables(file)
    monkeypatch.setattr("worklog.traces.chrome.BATCH", 3)
    piecewise = kineto.tables(file)
    for one, other in ((at_once.activities, piecewise.activities), (at_once.frames, piecewise.frames)):
        assert one.astype({"name": str}).equals(other.astype({"name": str}))
