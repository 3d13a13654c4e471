"""Exports of nsys, built table by table as its schema documents them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PID = 0x0100_0000_2A00_0000
TID = PID | 42
STRINGS = {
    1: "cudaLaunchKernel_v7000",
    2: "cudaGraphLaunch_v10000",
    3: "cudaMemcpyAsync_v3020",
    4: "cudaDeviceSynchronize_v3020",
    5: "cuLaunchKernelEx",
    10: "void gemm<float, 4>(float*)",
    11: "_scale",
    20: "plain",
}
KERNEL = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId "
    "INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL, "
    "gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER "
    "NOT NULL, graphNodeId INTEGER"
)
COPY = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER"
RUNTIME = "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER"
NVTX = "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER"
META = "name TEXT, value TEXT"
Rows = Iterable[tuple[Any, ...]]


def kernel(
    start: int, end: int, call: int, *, stream: int = 7, name: int = 10, device: int = 0, node: int = 0, pid: int = PID
) -> tuple[Any, ...]:
    return (start, end, device, stream, call, pid, name, name, 4, 2, 1, 128, 1, 1, node or None)


def call(start: int, call: int, name: int = 1, tid: int = TID) -> tuple[Any, ...]:
    return (start, start + 5, 0, tid, call, name)


OVERLAPPING = {
    # Stream 7 runs gemm in [1000, 1100), stream 8 runs it in [1050, 1200) and _scale in [1300, 1310).
    "KERNEL": (
        KERNEL,
        [kernel(1000, 1100, 1), kernel(1050, 1200, 2, stream=8), kernel(1300, 1310, 3, stream=8, name=11)],
    ),
    # [1150, 1250): half of it beside a kernel.
    "MEMCPY": (COPY, [(1150, 1250, 0, 9, 4, PID)]),
    "MEMSET": (COPY, [(1400, 1420, 0, 9, 6, PID)]),
    "RUNTIME": (RUNTIME, [call(900, 1), call(910, 2), call(920, 3, 5), call(930, 4, 3), call(940, 5, 4), call(950, 6)]),
}
KERNELS, CALLS = OVERLAPPING["KERNEL"], OVERLAPPING["RUNTIME"]
