"""sync_every_step and blocking_copies, on simulated programs with and without the fault."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import Program, finding, gain, reasons

ITEM = "DtoH (Device -> Pageable)"


def training(steps: int, item: bool, ranges: str | None = "ProfilerStep#", host: int = 20_000) -> Program:
    """Ten kernels of 20 us a step, each after some Python; `item`: loss.item() at the end of each step."""
    program = Program()
    for step in range(steps):
        with program.frame(f"{ranges}{step}" if ranges == "ProfilerStep#" else ranges or "", "user_annotation"):
            program.host(host)
            for _ in range(10):
                program.host(5_000)
                program.kernel("void gemm<float>(float*)", 20_000)
            if item:
                with program.frame("train.py(12): step", "python_function"), program.frame("aten::item", "cpu_op"):
                    program.copy(ITEM, 1_000, wait=True)
                    program.synchronize()
    if ranges is None:
        program.events = [event for event in program.events if event["cat"] != "user_annotation"]
    return program


@pytest.mark.parametrize("ranges", ["ProfilerStep#", "step", None])
def test_an_item_in_every_step_is_found_with_its_place_and_a_true_bound(tmp_path: Path, ranges: str | None) -> None:
    slow = training(8, True, ranges).diagnosis(tmp_path)
    found = finding(slow, "sync_every_step")
    assert found is not None
    assert found["where"][0] == "train.py:12 step, aten::item"
    assert found["evidence"]["waits"] == 7  # nothing follows the last one
    if ranges is not None:
        assert found["evidence"]["steps"] == 8
        assert found["evidence"]["step"] == ranges.removesuffix("#")
    # Copy's end to the next kernel: 2 us to return, 2 us of synchronize, 20 + 5 us of Python, 4 us to arrive.
    assert found["evidence"]["median_idle_after_ns"] == 33_000
    assert found["share"] == pytest.approx(7 * 33_000 / slow["devices"][0]["span_ns"])
    fast = training(8, False, ranges).diagnosis(tmp_path)
    assert finding(fast, "sync_every_step") is None
    assert reasons(fast, "sync_every_step") == []
    assert 0.1 < gain(slow, fast) <= found["gain_upper_bound"]


def test_two_waits_are_too_few_to_judge(tmp_path: Path) -> None:
    two = training(3, True).diagnosis(tmp_path)
    assert finding(two, "sync_every_step") is None
    assert "2 times are too few" in reasons(two, "sync_every_step")[0]


def test_a_wait_for_what_is_long_over_is_not_the_cause(tmp_path: Path) -> None:
    """The host is late anyway: it calls synchronize when the device has idled for a while."""
    program = Program()
    for step in range(8):
        with program.frame(f"ProfilerStep#{step}"):
            program.kernel("gemm", 20_000)
            program.host(200_000)
            program.synchronize()
    found = program.diagnosis(tmp_path)
    assert finding(found, "sync_every_step") is None
    assert finding(found, "host_bound") is not None


def test_a_wait_now_and_then_is_not_in_every_step(tmp_path: Path) -> None:
    program = Program()
    for step in range(20):
        with program.frame(f"ProfilerStep#{step}"):
            program.kernel("gemm", 20_000)
            if step in (3, 4, 5, 6):
                program.synchronize()
                program.host(100_000)
    found = program.diagnosis(tmp_path)
    assert finding(found, "sync_every_step") is None
    assert reasons(found, "sync_every_step") == []


def test_a_wait_that_does_not_drain_the_device_costs_nothing(tmp_path: Path) -> None:
    """The host waits for a copy on another stream while kernels are queued."""
    program = Program()
    for step in range(8):
        with program.frame(f"ProfilerStep#{step}"):
            program.kernel("gemm", 100_000)
            start = program.now
            program.host(50_000)
            program._event("cuda_runtime", "cudaEventSynchronize", start, program.now, 1)
    found = program.diagnosis(tmp_path)
    assert finding(found, "sync_every_step") is None


def loading(pageable: bool) -> Program:
    """A batch of 100 us is copied and then 100 us are computed, step by step."""
    program = Program()
    for step in range(6):
        with program.frame(f"ProfilerStep#{step}"):
            with program.frame("train.py(9): load", "python_function"):
                if pageable:
                    program.copy("HtoD (Pageable -> Device)", 100_000, wait=True, size=1 << 20)
                else:
                    program.copy("HtoD (Pinned -> Device)", 100_000, wait=False)
            program.kernel("void gemm<float>(float*)", 100_000)
    return program


def test_pageable_copies_are_found_and_pinned_ones_are_not(tmp_path: Path) -> None:
    slow = loading(True).diagnosis(tmp_path)
    found = finding(slow, "blocking_copies")
    assert found is not None
    assert found["where"] == ["train.py:9 load", "Memcpy HtoD (Pageable -> Device)"]
    span = slow["devices"][0]["span_ns"]
    assert found["evidence"]["pageable_copies"] == found["evidence"]["copies"] == 6
    assert found["evidence"]["pageable_bytes"] == 6 << 20
    assert found["evidence"]["exposed_copy_ns"] == 600_000
    # Each copy comes 2 us before its call returns; the last kernel ends the window.
    assert found["evidence"]["idle_in_returns_ns"] == 6 * 2_000
    assert found["share"] == pytest.approx(612_000 / span)
    assert finding(loading(False).diagnosis(tmp_path), "blocking_copies") is None


def test_a_pageable_copy_beside_a_kernel_is_not_exposed(tmp_path: Path) -> None:
    program = Program()
    for _ in range(6):
        program.kernel("gemm", 300_000, stream=9)
        program.copy("HtoD (Pageable -> Device)", 100_000, wait=True)
    found = program.diagnosis(tmp_path)
    assert finding(found, "blocking_copies") is None


@pytest.mark.parametrize("rule", ["sync_every_step", "blocking_copies"])
def test_without_calls_or_with_opaque_graphs_they_abstain(tmp_path: Path, rule: str) -> None:
    program = loading(True)
    program.events = [event for event in program.events if event["cat"] != "cuda_runtime"]
    assert "no CUDA calls of the host" in reasons(program.diagnosis(tmp_path), rule)[0]
    program = loading(True)
    program._call("cudaGraphLaunch", 9_000)
    assert "replayed 1 times without rows" in reasons(program.diagnosis(tmp_path), rule)[0]
    unknown = loading(True)
    for event in unknown.events:
        event["name"] = "Memcpy HtoD" if event["cat"] == "gpu_memcpy" else event["name"]
    said = reasons(unknown.diagnosis(tmp_path), "blocking_copies")
    assert said == ["the trace does not say whether the host memory of its copies is pageable"]
