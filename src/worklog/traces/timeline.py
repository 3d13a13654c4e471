"""A trace of any tool that has a timeline, by its content."""

from __future__ import annotations

from pathlib import Path

from worklog.problem import ProblemError
from worklog.traces import files, kineto, nsys
from worklog.traces.schema import Trace


def load(file: Path, geometry: bool = False) -> Trace:
    """Of nsys or torch.profiler; with `geometry` activities have the columns of activity.GEOMETRY too.

    Raises ProblemError for a file that no reader takes, and for one that has no timeline.
    """
    kind = files.kind(file)
    if kind == "nsys":
        return nsys.tables(file, geometry)
    if kind == "kineto":
        return kineto.tables(file, geometry)
    what = "a memory snapshot" if kind == "memory" else "an ncu report"
    raise ProblemError(f"{file}: is {what} and has no timeline; give a trace of nsys or torch.profiler.")
