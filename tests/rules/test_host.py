"""host_bound and launch_bound, and the allowance for what the profiler costs the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import ARRIVES, CALL, Program, finding, gain, reasons


def eager(python: int, ran: int, kernels: int = 40, frames: int = 0) -> Program:
    """Before each kernel so many ns of Python, in so many recorded functions one after the other."""
    program = Program()
    for _ in range(kernels):
        with program.frame("model.py(7): forward", "python_function"):
            for _ in range(frames):
                with program.frame("ops.py(3): step", "python_function"):
                    program.host(python // frames)
            program.host(python if not frames else 0)
            with program.frame("aten::mul", "cpu_op"):
                program.kernel("void mul<float>(float*)", ran)
    return program


def test_a_late_host_is_found_and_one_ahead_is_not(tmp_path: Path) -> None:
    slow = eager(100_000, 50_000).diagnosis(tmp_path)
    found = finding(slow, "host_bound")
    assert found is not None
    # From a kernel's end to the next kernel: 105 us a turn of which the kernel runs 50.
    assert found["evidence"]["host_ns"] == 39 * (100_000 + CALL - 50_000)
    assert found["evidence"]["gaps"] == 39
    # Between two calls: the second call, the function and the operator around it.
    assert found["evidence"]["of_it_the_profiler_at_most_ns"] == 39 * (3_500 + 2 * 300)
    assert found["where"] == ["model.py:7 forward, aten::mul", "void mul<float>(float*)"]
    assert finding(eager(10_000, 50_000).diagnosis(tmp_path), "host_bound") is None
    assert gain(slow, eager(0, 50_000).diagnosis(tmp_path)) <= found["gain_upper_bound"]


def test_idle_time_that_recording_may_have_made_is_no_finding(tmp_path: Path) -> None:
    """60 functions of 0.3 us each are 18 of the 20 us of Python."""
    recorded = eager(20_000, 16_000, frames=60).diagnosis(tmp_path)
    assert recorded["devices"][0]["accounting_ns"]["host"] > 0.05 * recorded["devices"][0]["span_ns"]
    assert finding(recorded, "host_bound") is None
    (reason,) = reasons(recorded, "host_bound")
    assert "recording the calls and Python functions may have cost the host as much" in reason
    assert finding(eager(20_000, 16_000).diagnosis(tmp_path), "host_bound") is not None
    assert finding(eager(200_000, 16_000, frames=60).diagnosis(tmp_path), "host_bound") is not None


def test_one_gap_that_holds_most_of_it_is_called_so(tmp_path: Path) -> None:
    program = eager(20_000, 10_000)
    program.host(5_000_000)
    program.kernel("gemm", 10_000)
    found = finding(program.diagnosis(tmp_path), "host_bound")
    assert found is not None
    assert "most of it once" in found["title"]
    assert "too late" in (finding(eager(20_000, 10_000).diagnosis(tmp_path), "host_bound") or {})["title"]


def test_launches_of_graphs_whose_nodes_are_traced_may_be_long_for_that(tmp_path: Path) -> None:
    """50 nodes of 2 us each are over before their launch returns, and Python takes 5 us until the next replay."""
    for call, expected in (("cudaGraphLaunch", False), ("cudaLaunchKernel", True)):
        program = Program()
        for _ in range(20):
            start = program.now
            program._call(call, 200_000)
            for _ in range(50):
                program._work("kernel", "gemm", 2_000, 7, start + 4_000)
            program.host(5_000)
        found = program.diagnosis(tmp_path)
        assert (finding(found, "host_bound") is not None) is expected
        assert bool(reasons(found, "host_bound")) is not expected


def test_calls_that_launch_nothing_count_as_recorded_too(tmp_path: Path) -> None:
    program = Program()
    for _ in range(40):
        for _ in range(10):
            program._event("cuda_runtime", "cudaStreamIsCapturing", program.now, program.now + 3_000, 1)
            program.host(3_000)
        program.kernel("gemm", 29_000)
    found = program.diagnosis(tmp_path)
    assert finding(found, "host_bound") is None
    assert "recording the calls may have" in reasons(found, "host_bound")[0]


def test_kernels_shorter_than_their_call_are_found_and_longer_ones_are_not(tmp_path: Path) -> None:
    slow = eager(0, 1_000).diagnosis(tmp_path)
    found = finding(slow, "launch_bound")
    assert found is not None
    evidence = found["evidence"]
    assert evidence["small_kernels"] == evidence["kernels_launched_one_by_one"] == 40
    # A turn is one call, 5 us; the kernel begins 4 us after the call does and runs for 1: nothing but launching.
    assert evidence["waiting_during_launch_ns"] == 40 * ARRIVES
    assert evidence["of_it_the_profiler_at_most_ns"] == 40 * 3_500
    assert (evidence["median_small_kernel_ns"], evidence["median_launch_call_ns"]) == (1_000, CALL)
    assert finding(eager(0, 50_000).diagnosis(tmp_path), "launch_bound") is None


def test_a_handful_of_launches_is_a_beginning(tmp_path: Path) -> None:
    assert finding(eager(0, 1_000, kernels=9).diagnosis(tmp_path), "launch_bound") is None
    assert finding(eager(0, 1_000, kernels=10).diagnosis(tmp_path), "launch_bound") is not None


def test_launches_that_tracing_may_have_made_long_are_no_finding(tmp_path: Path) -> None:
    program = Program()
    for _ in range(40):
        program.kernel("tiny", 4_000)
        program.kernel("long", 11_500)
        program.host(3_000)
    found = program.diagnosis(tmp_path)
    # The long kernel runs out as the next call begins: 4 us until its kernel does, of which 3.5 may be tracing.
    assert finding(found, "launch_bound") is None
    assert "in launches, but recording the calls may have cost" in reasons(found, "launch_bound")[0]


@pytest.mark.parametrize("rule", ["host_bound", "launch_bound"])
def test_without_calls_joins_or_the_kernels_of_graphs_they_abstain(tmp_path: Path, rule: str) -> None:
    bare = eager(100_000, 1_000)
    bare.events = [event for event in bare.events if event["cat"] != "cuda_runtime"]
    assert "no CUDA calls of the host" in reasons(bare.diagnosis(tmp_path), rule)[0]
    apart = eager(100_000, 1_000)
    for event in apart.events:
        event["args"].pop("correlation", None)
    assert reasons(apart.diagnosis(tmp_path), rule) == ["no activity is joined to the call that launched it"]
    blind = eager(100_000, 1_000)
    blind._call("cudaGraphLaunch", 9_000)
    assert "replayed 1 times without rows" in reasons(blind.diagnosis(tmp_path), rule)[0]
