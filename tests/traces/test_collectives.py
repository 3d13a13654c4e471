"""What a trace of torch.profiler tells of its collectives: arguments of record_param_comms, joined to the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worklog.traces import kineto

CALL = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
    "Group size": 2,
    "In msg nelems": 1000,
    "Out msg nelems": 1000,
    "dtype": "Float",
}


def event(cat: str, name: str, at: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": at, "dur": dur, "args": args}


def kernel(name: str, at: float, **args: Any) -> dict[str, Any]:
    return event("kernel", name, at, 5, device=0, stream=20, **args)


def read(folder: Path, events: list[dict[str, Any]]) -> list[list[Any]]:
    file = folder / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = kineto.tables(file).collectives
    assert list(found.columns) == ["activity", "group", "name", "sequence", "size"]
    return [list(row) for row in found.itertuples(index=False)]


def test_kernels_get_the_arguments_of_the_call_they_are_linked_to(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "record_param_comms", 0, 3, **{"External id": 7, **CALL, "Seq": 41}),
        event("cpu_op", "record_param_comms", 4, 3, **{"External id": 8, **CALL, "Seq": 42}),
        kernel("gemm", 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, **{"External id": 8, **CALL}),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, **{"External id": 7, **CALL}),
        kernel("at::native::CatArrayBatchedCopy", 30, **{"External id": 7}),  # of a list's outputs: no communication
    ]
    assert read(tmp_path, events) == [[1, "0 [0, 1]", "allreduce", 42, 2], [2, "0 [0, 1]", "allreduce", 41, 2]]


def test_without_operators_kernels_tell_themselves_and_old_ones_nothing(tmp_path: Path) -> None:
    events = [
        kernel("ncclDevKernel_AllGather_RING_LL", 10, **{"Collective name": "_allgather_base", "Group size": 4}),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 20),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 30, **{"External id": [3]}),
    ]
    assert read(tmp_path, events) == [[0, "", "_allgather_base", -1, 4]]
