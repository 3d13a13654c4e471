"""A trace that someone else recorded: another GPU, another torch. What is expected is counted tick by tick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worklog.diagnose import diagnose
from worklog.traces import operators

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "torch_profiler_v100" / "trace.json"


def events(*categories: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(FILE.read_text())["traceEvents"] if event.get("cat") in categories]


def covered(event: dict[str, Any], tick: int) -> bool:
    return bool(event["ts"] <= tick < event["ts"] + event["dur"])


def counted() -> dict[str, int]:
    """Microseconds of each part, one by one; the trace has one stream, one thread and no overlap."""
    kernels, copies = events("kernel"), events("gpu_memcpy")
    work = sorted(kernels + copies, key=lambda event: event["ts"])
    called = {event["args"]["correlation"]: event for event in events("cuda_runtime", "cuda_driver")}
    waits = [event for event in called.values() if event["name"].endswith("Synchronize")]
    found = dict.fromkeys(("compute", "copy", "launch", "host", "sync"), 0)
    begins = called[work[0]["args"]["correlation"]]["ts"]
    for tick in range(begins, work[-1]["ts"] + work[-1]["dur"]):
        if any(covered(event, tick) for event in kernels):
            found["compute"] += 1
        elif any(covered(event, tick) for event in copies):
            found["copy"] += 1
        else:
            following = next(event for event in work if event["ts"] > tick)
            idle_since = max([event["ts"] + event["dur"] for event in work if event["ts"] <= tick], default=begins)
            asked = called[following["args"]["correlation"]]["ts"]
            waiting = tick < asked and any(covered(event, tick) for event in waits)
            found["launch" if asked <= idle_since else "sync" if waiting else "host"] += 1
    return found


def test_the_accounting_is_what_counting_gives() -> None:
    (device,) = diagnose(FILE)["devices"]
    parts = {part: ns for part, ns in device["accounting_ns"].items() if ns}
    assert parts == {part: 1000 * ticks for part, ticks in counted().items()}
    assert parts == {"compute": 400_000, "copy": 4_000, "launch": 15_000, "host": 1_452_000, "sync": 8_000}
    assert (device["span_ns"], device["busy_ns"], device["kernel_count"]) == (1_879_000, 404_000, 4)


def test_every_kernel_is_joined_and_no_operator_is_made_up() -> None:
    found = diagnose(FILE)
    assert found["coverage"]["kernels_joined_to_launch"] == 1.0
    assert [(k["count"], k["total_ns"]) for k in found["kernels"]] == [(2, 204_000), (2, 196_000)]
    assert found["kernels"][0]["name"] == "rms_norm_0d1d2d3de4de5"
    summary = operators.read(FILE)
    assert summary["device"] == "Tesla V100-PCIE-16GB"
    assert {row["name"] for row in summary["operators"]} == {"cudaLaunchKernel", "cuLaunchKernel"}
    assert summary["kernels"][0]["grid"] == [4096, 1, 1]
