from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from worklog.capture import ncu
from worklog.capture.tool import CaptureError, Session

Program = Callable[[str, str], Path]
# What ncu 2025.3 prints.
NOT_PERMITTED = """
echo '==PROF== Connected to process 113001 (/usr/bin/python3.12)'
echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0. For instructions on enabling permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM'
echo '==PROF== Disconnected from process 113001'
echo '==WARNING== No kernels were profiled.'
"""  # noqa: E501
NO_MATCH = """
echo '==PROF== Connected to process 7 (/usr/bin/python3.12)'
echo '==PROF== Disconnected from process 7'
echo '==WARNING== No kernels were profiled.'
echo 'Available Kernels:'
echo '1. gemvx_kernel'
echo '2. vectorized_elementwise_kernel'
"""
NO_PROFILER = """
echo '==ERROR== Failed to initialize the profiler: LibraryNotLoaded'
exit 1
"""


def run(tool: Path, tmp_path: Path) -> None:
    argv = ncu.profile_argv(["python", "x.py"], "x.ncu-rep", nvtx_range="plain", kernel="gemm.*", tool=str(tool))
    ncu.run(argv, tmp_path / "x.ncu-rep", Session(cwd=tmp_path, timeout_s=20.0, log=tmp_path / "log"))


def test_command_states_range_kernel_sections_and_clocks() -> None:
    argv = ncu.profile_argv(["python", "x.py"], "x.ncu-rep", nvtx_range="plain", kernel="a|b", launch_skip=2)
    assert argv[0] == "ncu"
    assert argv[-2:] == ["python", "x.py"]
    assert "--nvtx-include=plain/" in argv
    assert "--kernel-name=regex:a|b" in argv
    assert "--launch-skip=2" in argv
    assert "--clock-control=none" in argv
    assert [a for a in argv if a.startswith("--section=")] == [f"--section={s}" for s in ncu.SECTIONS]
    assert "dram__bytes_read.sum" in next(a for a in argv if a.startswith("--metrics=")).partition("=")[2].split(",")


def test_no_kernel_means_every_kernel() -> None:
    argv = ncu.profile_argv(["python"], "x.ncu-rep", nvtx_range="plain")
    assert not [a for a in argv if a.startswith("--kernel-name")]


def test_report_that_was_made_is_no_failure(program: Program, tmp_path: Path) -> None:
    run(program("ncu", "echo '==PROF== Profiling \"gemm\"'; touch x.ncu-rep"), tmp_path)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (NOT_PERMITTED, "unsupported", r"ncu may not read GPU counters here \(ERR_NVGPUCTRPERM\): run as root"),
        (
            NO_MATCH,
            "error",
            r"ncu matched no kernel \(regex:gemm\.\*, NVTX range plain/\); kernels that ran: gemvx_kernel, vectori",
        ),
        (NO_PROFILER, "error", r"ncu: Failed to initialize the profiler: LibraryNotLoaded"),
        (
            "echo 'worklog: no such case.'; exit 2",
            "error",
            r"The program under ncu ended with 2: worklog: no such case",
        ),
        ("echo fine", "error", r"ncu matched no kernel"),
    ],
)
def test_failures_are_one_sentence(program: Program, tmp_path: Path, body: str, status: str, sentence: str) -> None:
    with pytest.raises(CaptureError) as caught:
        run(program("ncu", body), tmp_path)
    assert re.match(sentence, str(caught.value))
    assert "\n" not in str(caught.value)
    assert caught.value.status == status


def test_missing_ncu_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKLOG_NCU", str(tmp_path / "ncu"))
    with pytest.raises(CaptureError, match=r"ncu is not here \(WORKLOG_NCU names"):
        ncu.ready()
