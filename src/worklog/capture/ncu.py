"""Nsight Compute: hardware counters of chosen kernels (worklog.traces.ncu reads them back without ncu).

ncu replays each kernel once per group of counters, so its program's times mean nothing; only the counters do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from worklog.capture.tool import CaptureError, Session
from worklog.nsight import NCU_REMEDY, PERMISSION_REMEDY, find_ncu

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy", "WarpStateStats")
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__bytes.sum.per_second",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "smsp__sass_inst_executed_op_local.sum",
    "smsp__average_thread_inst_executed_per_inst_executed.ratio",
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
)
"""Named one by one because the sections (and `--set full` of ncu 2025.3) leave some of them out."""


def profile_argv(
    program: Sequence[str],
    report: str,
    *,
    nvtx_range: str,
    kernel: str | None = None,
    launch_skip: int = 0,
    launch_count: int = 10,
    tool: str = "ncu",
) -> list[str]:
    """The command that counts `launch_count` launches inside the NVTX push/pop range `nvtx_range`, into `report`.

    `kernel` is a regular expression for the kernel's name without its parameters; None takes every kernel.
    """
    return [
        tool,
        "--target-processes=all",
        "--nvtx",
        f"--nvtx-include={nvtx_range}/",
        *([f"--kernel-name=regex:{kernel}"] if kernel else []),
        f"--launch-skip={launch_skip}",
        f"--launch-count={launch_count}",
        "--graph-profiling=node",
        *(f"--section={section}" for section in SECTIONS),
        f"--metrics={','.join(METRICS)}",
        "--clock-control=none",
        "--cache-control=all",
        "--force-overwrite",
        f"--export={report}",
        *program,
    ]


def ready() -> Path:
    """The ncu of this machine. Raises CaptureError (unsupported) if there is none.

    Whether it may read counters shows only when it runs: the driver's settings need not be visible in a container.
    """
    found = find_ncu()
    if found.path is None:
        raise CaptureError("unsupported", f"ncu is not here ({found.why}): {NCU_REMEDY}.")
    return found.path


def run(argv: Sequence[str], made: Path, session: Session) -> None:
    """Run a command of `profile_argv`; `made` is the report that it must leave.

    Raises CaptureError: counters not permitted, no kernel matched, ncu or the program failed, the time limit.
    """
    done = session.execute(argv)
    if "ERR_NVGPUCTRPERM" in done.output:
        raise CaptureError(
            "unsupported", f"ncu may not read GPU counters here (ERR_NVGPUCTRPERM): {PERMISSION_REMEDY}."
        )
    if errors := re.findall(r"^==ERROR==\s*(.+)$", done.output, flags=re.MULTILINE):
        raise CaptureError("error", f"ncu: {errors[0].rstrip('.')} (program's last line: {done.last_line}).")
    if done.returncode != 0:
        raise CaptureError("error", f"The program under ncu ended with {done.returncode}: {done.last_line}")
    if "No kernels were profiled" in done.output or not made.exists():
        seen = re.findall(r"^\s*\d+\.\s+(\S.*)$", done.output.partition("Available Kernels:")[2], flags=re.MULTILINE)
        where = next(a for a in argv if a.startswith("--nvtx-include=")).partition("=")[2]
        regex = next((a.partition("=")[2] for a in argv if a.startswith("--kernel-name=")), "any name")
        listed = f"; kernels that ran: {', '.join(seen[:8])}" if seen else ""
        raise CaptureError("error", f"ncu matched no kernel ({regex}, NVTX range {where}){listed}.")
