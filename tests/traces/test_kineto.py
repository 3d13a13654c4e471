"""Traces of torch.profiler: a real one of the CPU, and one of a GPU in Kineto's layout with hand-computed answers."""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from worklog.capture import torch_profiler
from worklog.problem import ProblemError
from worklog.traces import operators

torch = pytest.importorskip("torch")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x))) + x


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "torch.block.json.gz"
    net, x = torch.nn.Sequential(Block(), Block()), torch.ones(8, 64)
    torch_profiler.trace(lambda: net(x), file)
    return file


def test_real_cpu_trace_by_operator_and_module(traced: Path) -> None:
    found = operators.read(traced)
    assert found["device"] is None
    assert (found["busy_ns"], found["idle_ns"], found["kernels"], found["kernels_joined"]) == (None, None, [], None)
    counts = {row["name"]: row["count"] for row in found["operators"]}
    assert {name: counts[name] for name in ("aten::linear", "aten::addmm", "aten::silu", "aten::add")} == {
        "aten::linear": 4,
        "aten::addmm": 4,
        "aten::silu": 2,
        "aten::add": 2,
    }
    assert {row["name"] for row in found["modules"]} == {"Sequential.Block.Linear", "Sequential.Block"}


def test_own_times_of_a_real_trace_add_up_to_its_outermost_operators(traced: Path) -> None:
    found = operators.read(traced)
    events = [e for e in json.loads(gzip.decompress(traced.read_bytes()))["traceEvents"] if e.get("cat") == "cpu_op"]
    outer = [e for e in events if not any(_encloses(other, e) for other in events)]
    assert 0 < len(outer) < len(events)
    own = sum(row["self_cpu_ns"] for row in found["operators"])
    assert own == pytest.approx(sum(e["dur"] for e in outer) * 1e3, abs=len(outer))
    assert sum(row["self_cpu_ns"] for row in found["modules"]) == own
    assert own <= found["span_ns"]
    assert [row["self_cpu_ns"] for row in found["operators"]] == sorted(
        (row["self_cpu_ns"] for row in found["operators"]), reverse=True
    )


def _encloses(other: dict[str, Any], event: dict[str, Any]) -> bool:
    ends = (e["ts"] + e["dur"] for e in (event, other))
    return other is not event and other["ts"] <= event["ts"] and next(ends) <= next(ends)


def event(cat: str, name: str, at_us: str, dur_us: str, tid: int = 1, **args: Any) -> str:
    """One event as text, so that no float touches its times, which begin at more digits than a float64 holds."""
    fields = json.dumps({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "args": args})
    return f'{fields[:-1]}, "ts": {Decimal(1790857026000000) + Decimal(at_us)}, "dur": {dur_us}}}'


def ran(cat: str, name: str, at_us: str, dur_us: str, correlation: int, external: int | None = None) -> str:
    args = {} if external is None else {"External id": external}
    if cat == "kernel":
        args |= {"grid": [3, 1, 1], "block": [64, 1, 1]}
    return event(cat, name, at_us, dur_us, 7, correlation=correlation, device=0, **args)


EVENTS = [  # addmm ends a nanosecond after linear, around it, as rounding leaves such events
    event("python_function", "nn.Module: Net_0", "0.000", "90.000"),
    event("python_function", "nn.Module: Linear_3", "1.000", "40.000"),
    event("cpu_op", "aten::linear", "2.000", "30.000", **{"External id": 5}),
    event("cpu_op", "aten::addmm", "3.000", "29.001", **{"External id": 6}),
    event("cuda_runtime", "cudaLaunchKernel", "4.000", "3.000", correlation=21),
    event("cuda_runtime", "cudaLaunchKernel", "8.000", "3.000", correlation=22),
    event("cpu_op", "Torch-Compiled Region: 0/0", "49.000", "11.000", **{"External id": 7}),
    event("cpu_op", "float8::gemv", "50.000", "9.000", **{"External id": 8}),
    event("cuda_driver", "cuLaunchKernelEx", "52.000", "3.000", correlation=23),
    event("cuda_runtime", "cudaGraphLaunch", "95.000", "3.000", correlation=24),
    event("cuda_runtime", "cudaMemcpyAsync", "98.500", "1.000", correlation=26),
    ran("kernel", "void gemm<float>(float*)", "10.001", "10.001", 21, 6),
    ran("kernel", "void reduce<float>(float*)", "15.000", "10.000", 22, 6),
    ran("kernel", "gemv", "60.000", "5.000", 23, 8),
    ran("kernel", "gemv", "99.000", "4.000", 24),
    ran("kernel", "gemv", "99.500", "3.000", 24),
    ran("kernel", "stray", "104.000", "1.000", 99),
    ran("gpu_memcpy", "Memcpy DtoD", "110.000", "2.000", 26),
    event("gpu_user_annotation", "net", "0.000", "200.000", 7),
]


def trace(folder: Path, events: list[str]) -> Path:
    file = folder / "torch.net.json"
    file.write_text(
        f'{{"deviceProperties": [{{"id": 0, "name": "NVIDIA H200"}}], "traceEvents": [{", ".join(events)}]}}'
    )
    return file


def test_gpu_trace_to_the_nanosecond(tmp_path: Path) -> None:
    found = operators.read(trace(tmp_path, EVENTS))
    assert found["device"] == "NVIDIA H200"
    assert found["span_ns"] == 112_000 - 4_000
    assert found["busy_ns"] == 14_999 + 5_000 + 4_000 + 1_000 + 2_000
    assert found["idle_ns"] == found["span_ns"] - found["busy_ns"]
    assert found["kernel_count"] == 6
    assert [(k["name"], k["count"], k["total_ns"], k["median_ns"]) for k in found["kernels"]] == [
        ("gemv", 3, 12_000, 4_000),
        ("gemm", 1, 10_001, 10_001),
        ("reduce", 1, 10_000, 10_000),
        ("stray", 1, 1_000, 1_000),
    ]
    assert (found["kernels"][0]["grid"], found["kernels"][0]["block"]) == ([3, 1, 1], [64, 1, 1])
    assert found["note"] is None


def test_kernels_are_charged_to_operators_and_modules_as_far_as_they_join(tmp_path: Path) -> None:
    found = operators.read(trace(tmp_path, EVENTS))
    assert found["operators"] == [
        {"name": "aten::linear", "count": 1, "kernel_ns": 20_001, "kernel_count": 2},
        {"name": "cudaGraphLaunch", "count": 1, "kernel_ns": 7_000, "kernel_count": 2},
        {"name": "float8::gemv", "count": 1, "kernel_ns": 5_000, "kernel_count": 1},
    ]
    assert found["modules"] == [{"name": "Net.Linear", "kernel_ns": 20_001}, {"name": "Net", "kernel_ns": 5_000}]
    assert found["kernels_joined"] == 5 / 6


def test_without_external_ids_the_launch_says_the_operator(tmp_path: Path) -> None:
    bare = [re.sub(r'"External id": \d+(, )?', "", text) for text in EVENTS]
    assert operators.read(trace(tmp_path, bare))["operators"] == operators.read(trace(tmp_path, EVENTS))["operators"]


def test_external_id_says_the_operator_of_a_launch_from_another_thread(tmp_path: Path) -> None:
    call = event("cuda_runtime", "cudaLaunchKernel", "53.000", "1.000", 2, correlation=28)
    found = operators.read(trace(tmp_path, [*EVENTS, call, ran("kernel", "gemv", "70.000", "1.000", 28, 8)]))
    assert found["operators"][2] == {"name": "float8::gemv", "count": 1, "kernel_ns": 6_000, "kernel_count": 2}
    assert found["kernels_joined"] == 6 / 7


def test_of_two_devices_the_busier_one_and_says_so(tmp_path: Path) -> None:
    other = ran("kernel", "gemv", "300.000", "1.000", 27).replace('"device": 0', '"device": 1')
    found = operators.read(trace(tmp_path, [*EVENTS, other]))
    assert found["span_ns"] == 108_000
    assert found["note"] == "the trace has devices [0, 1]; this is device 0"


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="neither device work nor operators"):
        operators.read(trace(tmp_path, []))
    for content in (b"{}", b"[1, 2", gzip.compress(b'{"traceEvents": [{"ts": "soon"}]}')):
        file = tmp_path / ("torch.x.json.gz" if content[:1] == b"\x1f" else "torch.x.json")
        file.write_bytes(content)
        with pytest.raises(ProblemError, match=r"torch\.x\.json.* is no trace of torch\.profiler"):
            operators.read(file)
