"""What must hold of every capture of a real GPU under reports/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worklog.traces import memory, ncu, nsys, operators

REPORTS = Path(__file__).resolve().parents[2] / "reports"


def recorded(*patterns: str) -> Any:
    files = sorted(file for pattern in patterns for file in REPORTS.glob(f"*/*/{pattern}"))
    return pytest.mark.parametrize("file", files, ids=lambda file: f"{file.parent.name}/{file.name}")


@recorded("*.sqlite")
def test_nsys(file: Path) -> None:
    found = nsys.read(file)
    assert found["devices"]
    for device in found["devices"]:
        assert 0 <= device["idle_ns"] < device["span_ns"]
        assert device["idle_ns"] + device["busy_ns"] == device["span_ns"]
        if device["kernel_ns"] is not None:
            assert device["kernel_ns"] + device["copy_only_ns"] == device["busy_ns"]
            assert device["launch_count"] > 0
    if len(found["devices"]) == 1 and found["devices"][0]["kernel_ns"] is not None:
        assert sum(k["total_ns"] for k in found["kernels"]) >= found["devices"][0]["kernel_ns"]
        assert sum(k["count"] for k in found["kernels"]) == found["devices"][0]["kernel_count"]
        assert sum(k["share"] for k in found["kernels"]) == pytest.approx(1.0)
    if ".timing." in file.name or found["graph_trace_mode"] is not None:
        assert found["graph_trace_mode"] == ("graph" if ".timing." in file.name else "node")


@recorded("*.sqlite")
def test_nsys_range_of_the_variant(file: Path) -> None:
    """The child opens one range, named as the variant, around all that it captures."""
    slug = file.name.removeprefix("nsys.").removesuffix(".sqlite").removesuffix(".timing")
    whole, part = nsys.read(file), nsys.read(file, slug)
    assert sum(k["total_ns"] for k in part["kernels"]) == sum(k["total_ns"] for k in whole["kernels"])
    assert part["devices"][0]["busy_ns"] <= whole["devices"][0]["busy_ns"]


@recorded("torch.*.json.gz")
def test_torch(file: Path) -> None:
    found = operators.read(file)
    if found["device"] is None:
        assert "-cpu-" in file.parent.name
        return
    assert found["idle_ns"] + found["busy_ns"] == found["span_ns"]
    assert found["idle_ns"] >= 0
    assert found["kernels_joined"] > 0.95
    spent = sum(k["total_ns"] for k in found["kernels"])
    assert sum(o["kernel_ns"] for o in found["operators"]) >= 0.95 * spent
    assert sum(m["kernel_ns"] for m in found["modules"]) <= spent


@recorded("*.ncu-rep", "*.ncu-rep.gz")
def test_ncu(file: Path) -> None:
    for launch in ncu.read(file):
        assert 0 < launch["duration_ns"] < 1e9
        for name in ("dram_fraction", "sm_fraction", "l2_hit_fraction", "occupancy_fraction"):
            assert 0 <= launch[name] <= 1.05, name
        seconds = launch["duration_ns"] * 1e-9
        assert (launch["dram_read_bytes"] + launch["dram_write_bytes"]) / seconds < 9e12
        assert launch["registers_per_thread"] <= 255
        assert launch["stalls"]


@recorded("memory.*.json.gz")
def test_memory(file: Path) -> None:
    found = memory.read(file)
    assert found["peak_bytes"] >= found["baseline_bytes"]
    assert sum(row["bytes"] for row in found["largest"]) == found["peak_bytes"]
    assert max(n for _, n in found["timeline"]) == found["peak_bytes"]
    assert len(found["timeline"]) <= 400
