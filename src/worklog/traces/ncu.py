"""Nsight Compute's reports, read without ncu by NVIDIA's package ncu-report, which must be as new as the ncu."""

from __future__ import annotations

import difflib
import gzip
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worklog.problem import ProblemError
from worklog.traces.activity import short_name

GEOMETRY = tuple(f"launch__{what}_dim_{axis}" for what in ("grid", "block") for axis in "xyz")
FIELDS = {
    "duration_ns": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_fraction": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_fraction": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hit_fraction": "lts__t_sector_hit_rate.pct",
    "registers_per_thread": "launch__registers_per_thread",
    "occupancy_fraction": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "waves": "launch__waves_per_multiprocessor",
}
"""What `read` returns -> the metric it is. All of them are in the sections and metrics of worklog.capture.ncu."""
UNITS = {
    "ns": {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6},
    "bytes": {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
    "fraction": {"%": 0.01},
}
"""End of the field's name -> the units that its metric may stand in, and what one of them is."""
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)
"""States of a warp that issues nothing, and `selected`, the one that does (GH100; other chips have most of them)."""
STALL_METRICS = (
    "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio",
    "smsp__average_warp_latency_issue_stalled_{}.ratio",
)


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
    stalls: dict[str, float] = field(default_factory=dict)
    """State -> mean number of warps in it at each instruction issued; empty if not collected."""


def read(report: Path) -> list[dict[str, Any]]:
    """The launches of a .ncu-rep (or .ncu-rep.gz), in order.

    Each: name, full_name, grid and block [x, y, z], duration_ns, dram_read_bytes, dram_write_bytes, dram_fraction and
    sm_fraction (throughput over the peak), l2_hit_fraction (may pass 1 by a little: its counters come from different
    replays), registers_per_thread, occupancy_fraction (warps active), waves, and stalls: the three most frequent
    reasons [{reason, share}] of warps not to issue, share of all warps' time, or None where warp states were not
    collected. ncu locks out other work and empties caches: durations are no timings.
    Raises ProblemError as `launches` does, and for a metric in a unit that is not known.
    """
    return [row(launch) for launch in launches(report, tuple(FIELDS.values()))]


def row(launch: Launch) -> dict[str, Any]:
    """One launch of `read`."""
    found: dict[str, Any] = {
        "name": short_name(launch.demangled),
        "full_name": launch.demangled,
        "grid": list(launch.grid),
        "block": list(launch.block),
    }
    for name, metric in FIELDS.items():
        value, unit, kind = launch.metrics[metric], launch.units[metric], name.rpartition("_")[2]
        if kind in UNITS and unit not in UNITS[kind]:
            raise ProblemError(f"launch {launch.index}: {metric} stands in {unit!r}, not in {list(UNITS[kind])}.")
        scaled = float(value) * UNITS[kind][unit] if kind in UNITS else float(value)
        found[name] = round(scaled) if kind in ("ns", "bytes", "thread") else scaled
    return {**found, "stalls": _top(launch.stalls)}


def _top(stalls: dict[str, float]) -> list[dict[str, Any]] | None:
    total = sum(stalls.values())
    if not total:
        return None
    reasons = sorted((r for r in stalls if r != "selected"), key=lambda reason: (-stalls[reason], reason))
    return [{"reason": reason, "share": stalls[reason] / total} for reason in reasons[:3]]


def launches(report: Path, metrics: Sequence[str]) -> list[Launch]:
    """The launches of a report with `metrics` by name, as they stand in it.

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
            try:
                file.write_bytes(gzip.decompress(report.read_bytes()))
            except (OSError, EOFError) as error:
                raise ProblemError(f"{report}: cannot be unpacked ({error}).") from error
        remedy = "ncu-report must be as new as the ncu that made it"
        try:
            context = ncu_report.load_report(str(file))
        except Exception as error:  # the extension module raises bare RuntimeError and its own types
            raise ProblemError(f"{report}: ncu-report cannot read it ({error}); {remedy}.") from error
        found = [action for at in range(len(context)) for action in _actions(context[at])]
        if not found:
            raise ProblemError(f"{report}: ncu-report finds no kernel launch in it; {remedy}.")
        return [_launch(report, index, action, metrics) for index, action in enumerate(found)]


def _actions(launch_range: Any) -> list[Any]:
    return [launch_range[at] for at in range(len(launch_range))]


def _launch(report: Path, index: int, action: Any, metrics: Sequence[str]) -> Launch:
    values: dict[str, float | int | str] = {}
    units: dict[str, str] = {}
    there = set(action.metric_names())
    for name in dict.fromkeys((*metrics, *GEOMETRY)):
        metric = action.metric_by_name(name) if name in there else None
        if metric is None or metric.value() is None:
            near = difflib.get_close_matches(name, there, n=3, cutoff=0.5)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ProblemError(f"{report}: launch {index} ({action.name()}) has no metric {name!r}{hint}.")
        values[name], units[name] = metric.value(), metric.unit()
    x = [int(values[name]) for name in GEOMETRY]
    stalls: dict[str, float] = {}
    for pattern in STALL_METRICS:
        if not stalls:
            names = {reason: pattern.format(reason) for reason in STALLS}
            stalls = {r: float(action.metric_by_name(name).value()) for r, name in names.items() if name in there}
    return Launch(
        index=index,
        name=action.name(),
        demangled=action.name(action.NameBase_DEMANGLED),
        grid=(x[0], x[1], x[2]),
        block=(x[3], x[4], x[5]),
        metrics={name: values[name] for name in metrics},
        units={name: units[name] for name in metrics},
        stalls=stalls,
    )
