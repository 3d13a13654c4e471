"""The large traces of benchmarks/ are the small one, over and over."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from worklog.diagnose import diagnose

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def traces() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_traces", ROOT / "benchmarks" / "traces.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_repeated_export_has_every_kernel_as_often_and_all_joined(traces: Any, tmp_path: Path) -> None:
    files = sorted(ROOT.glob("reports/float8_weight_only/*-h200-*/nsys.bf16_eager.sqlite"))
    if not files:
        pytest.skip("no capture of bf16_eager is recorded")
    small = diagnose(files[-1])
    count = small["devices"][0]["kernel_count"]
    traces.repeat_sqlite(files[-1], tmp_path / "large.sqlite", 4 * count)
    large = diagnose(tmp_path / "large.sqlite")
    assert [(k["name"], k["count"] / 4, k["total_ns"] / 4) for k in large["kernels"]] == [
        (k["name"], k["count"], k["total_ns"]) for k in small["kernels"]
    ]
    assert large["coverage"]["kernels_joined_to_launch"] == 1.0
    assert large["devices"][0]["accounting_ns"]["compute"] == 4 * small["devices"][0]["accounting_ns"]["compute"]


def test_repeated_json_and_the_printed_ratio(
    traces: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    kernel = launch | {"cat": "kernel", "name": "k", "ts": 7, "dur": 3, "args": {"correlation": 1, "device": 0}}
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": [launch | {"args": {"correlation": 1}}, kernel]}))
    traces.repeat_json(file, tmp_path / "large.json", 5000)
    (device,) = diagnose(tmp_path / "large.json")["devices"]
    assert device["kernel_count"] > 10
    assert device["accounting_ns"]["compute"] == 3000 * device["kernel_count"]
    assert device["span_ns"] == 10_000 * device["kernel_count"]
    traces.repeat_json(file, tmp_path / "distinct.json", 5000, distinct=True)
    assert {kernel["count"] for kernel in diagnose(tmp_path / "distinct.json")["kernels"]} == {1}
    monkeypatch.setenv("PYTHONPATH", str(Path(sys.modules["worklog"].__file__ or "").parents[1]))
    traces.main([str(file), "--megabytes", "1"])
    assert "diagnose takes" in capsys.readouterr().out
