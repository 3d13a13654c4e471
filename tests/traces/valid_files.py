"""One small valid file for each reader, as data: what the fuzzer damages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

V100 = Path(__file__).resolve().parents[1] / "fixtures" / "torch_profiler_v100" / "trace.json"


def host(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def device(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    shape = {"device": 0, "stream": 7, "grid": [4, 1, 1], "block": [64, 1, 1], "bytes": 64}
    return host(cat, name, ts, dur) | {"pid": 0, "tid": 7, "args": args | shape}


COMMS = {
    "Collective name": "allreduce",
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
    "Group size": 2,
    "Seq": 1,
}
STEP = [
    host("user_annotation", "ProfilerStep#1", 0, 900.25),
    host("python_function", "train.py(3): step", 1.001, 800),
    host("python_function", "nn.Module: Linear_0", 2, 100),
    host("cpu_op", "aten::linear", 3, 50, **{"External id": 5, "Sequence number": 9}),
    host("cuda_runtime", "cudaLaunchKernel", 10, 5, **{"correlation": 1, "External id": 5}),
    device("kernel", "void gemm<float>(float*)", 20.5, 30.125, **{"correlation": 1, "External id": 5}),
    host("cpu_op", "record_param_comms", 60, 20, **{"External id": 6} | COMMS),
    host("cuda_runtime", "cudaLaunchKernelExC", 65, 5, **{"correlation": 2, "External id": 6}),
    device("kernel", "ncclDevKernel_AllReduce", 80, 40, **{"correlation": 2, "External id": 6} | COMMS),
    host("cuda_runtime", "cudaMemcpyAsync", 100, 60, correlation=3),
    device("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 130, 20, correlation=3),
    device("gpu_memset", "Memset (Device)", 155, 2, correlation=4),
    host("cuda_runtime", "cudaGraphLaunch", 170, 5, correlation=5),
    host("cuda_runtime", "cudaDeviceSynchronize", 180, 30, correlation=6),
    host(
        "cpu_op",
        "autograd::engine::evaluate_function: AddmmBackward0",
        215,
        9,
        **{"Sequence number": 9, "Fwd thread id": 1},
    ),
]
KINETO = (
    {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU"}],
        "distributedInfo": {"rank": 1},
        "traceEvents": STEP,
    },
    json.loads(V100.read_text()),
)
FRAMES = [{"filename": "a.py", "line": 3, "name": "f"}, {"filename": "??", "line": 0, "name": "c10::g"}]
SNAPSHOT = {
    "segments": [
        {"device": 0, "address": 512, "total_size": 4096, "segment_pool_id": [0, 0], "blocks": [
            {"address": 512, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": FRAMES},
            {"address": 1536, "size": 512, "state": "inactive", "frames": []},
        ]},
    ],
    "device_traces": [[
        {"action": "alloc", "addr": 2048, "size": 300, "stream": 0, "time_us": 10, "frames": FRAMES},
        {"action": "alloc", "addr": 4096, "size": 200, "stream": 0, "time_us": 12, "frames": FRAMES[:1]},
        {"action": "free_requested", "addr": 2048, "size": 300, "stream": 0, "time_us": 14, "frames": []},
        {"action": "free_completed", "addr": 2048, "size": 300, "stream": 0, "time_us": 15, "frames": []},
        {"action": "free_requested", "addr": 64, "size": 16, "stream": 0, "time_us": 16, "frames": []},
    ]],
}  # fmt: skip
PID = 0x0100_0000_2A00_0000
ACTIVITY = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
GRID = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
TABLES: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {
    "StringIds": (
        ("id", "value"),
        [(1, "cudaLaunchKernel_v7000"), (2, "cudaGraphLaunch_v10000"), (3, "gemm"), (4, "step")],
    ),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        (*ACTIVITY, "demangledName", "graphNodeId", *GRID),
        [(20 * n, 20 * n + 10, 0, 7, n, PID, 3, None, 4, 1, 1, 64, 1, 1) for n in range(1, 5)],
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        (*ACTIVITY, "bytes", "copyKind", "srcKind", "dstKind"), [(95, 105, 0, 7, 9, PID, 64, 1, 0, 2)],
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": ((*ACTIVITY, "bytes"), [(110, 111, 0, 7, 10, PID, 4)]),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ((*ACTIVITY, "graphId"), [(120, 140, 0, 7, 11, PID, 5)]),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        ("start", "end", "globalTid", "correlationId", "nameId"),
        [(10 * n, 10 * n + 4, PID | 42, n, 2 if n == 11 else 1) for n in range(1, 12)],
    ),
    "NVTX_EVENTS": (
        ("start", "end", "globalTid", "eventType", "text", "textId"),
        [(5, 90, PID | 42, 59, None, 4), (6, 70, PID | 42, 60, "x", None)],
    ),
    "META_DATA_EXPORT": (
        ("name", "value"),
        [("EXPORT_SCHEMA_VERSION", "3.20.3"), ("EXPORT_PRODUCT_VERSION", "2025.3")],
    ),
}  # fmt: skip
