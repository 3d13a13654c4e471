"""Nsight Compute: hardware counters of chosen kernels, and reading them back without ncu.

ncu replays each kernel once per group of counters, so its program's times mean nothing; only the counters do.
"""

from __future__ import annotations

import difflib
import gzip
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worklog.capture.tool import CaptureError, Session
from worklog.nsight import NCU_REMEDY, PERMISSION_REMEDY, find_ncu
from worklog.problem import ProblemError

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
GEOMETRY = tuple(f"launch__{what}_dim_{axis}" for what in ("grid", "block") for axis in "xyz")


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


@dataclass(frozen=True)
class Launch:
    """One profiled kernel launch."""

    index: int
    name: str
    """Function name without parameters."""
    demangled: str
    grid: tuple[int, int, int]
    """Thread blocks."""
    block: tuple[int, int, int]
    """Threads."""
    metrics: dict[str, float | int | str]
    units: dict[str, str]


def read(report: Path, metrics: Sequence[str] = METRICS) -> list[Launch]:
    """The launches of a .ncu-rep (or .ncu-rep.gz), in order, with `metrics` by name, in the report's base units.

    Raises ProblemError if the file cannot be read, holds no launch, or a launch lacks one of the metrics: a counter
    that was not collected is never read as nothing.
    """
    try:
        import ncu_report
    except ImportError as error:
        raise ProblemError("Reading a .ncu-rep needs the package ncu-report: pip install ncu-report.") from error
    if not report.is_file():
        raise ProblemError(f"{report}: no such file.")
    with tempfile.TemporaryDirectory() as folder:
        file = report
        if report.suffix == ".gz":
            file = Path(folder) / report.stem
            file.write_bytes(gzip.decompress(report.read_bytes()))
        try:
            context = ncu_report.load_report(str(file))
        except Exception as error:  # the extension module raises bare RuntimeError and its own types
            version = getattr(ncu_report, "__version__", "unknown version")
            raise ProblemError(
                f"{report}: ncu-report ({version}) cannot read it ({error}); it must be as new as the ncu that made it."
            ) from error
        launches = [action for at in range(len(context)) for action in _actions(context[at])]
        if not launches:
            raise ProblemError(f"{report}: holds no kernel launch.")
        return [_launch(report, index, action, metrics) for index, action in enumerate(launches)]


def _actions(launch_range: Any) -> list[Any]:
    return [launch_range[at] for at in range(len(launch_range))]


def _launch(report: Path, index: int, action: Any, metrics: Sequence[str]) -> Launch:
    values: dict[str, float | int | str] = {}
    units: dict[str, str] = {}
    for name in dict.fromkeys((*metrics, *GEOMETRY)):
        metric = action.metric_by_name(name)
        value = None if metric is None else metric.value()
        if value is None:
            near = difflib.get_close_matches(name, list(action.metric_names()), n=3, cutoff=0.5)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ProblemError(f"{report}: launch {index} ({action.name()}) has no metric {name!r}{hint}.")
        values[name], units[name] = value, metric.unit()
    x = [int(values[name]) for name in GEOMETRY]
    return Launch(
        index=index,
        name=action.name(),
        demangled=action.name(action.NameBase_DEMANGLED),
        grid=(x[0], x[1], x[2]),
        block=(x[3], x[4], x[5]),
        metrics={name: values[name] for name in metrics},
        units={name: units[name] for name in metrics},
    )
