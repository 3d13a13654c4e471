"""The verbs that explain any trace, ours or not: diagnose, diff, tree. Parsing and printing only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from worklog.render import terminal

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]


def diagnose_verb(
    files: Annotated[
        list[Path], typer.Argument(help="A report or export of nsys, torch.profiler's trace, or the like; one a rank.")
    ],
    range_name: Annotated[
        str | None, typer.Option("--range", help="An NVTX range, or ProfilerStep; default: the whole trace.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler that reads the ranks; default: this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Where the time of a trace went, to the nanosecond: kernels, copies, and who kept the GPU waiting.

    Takes nsys reports, their exports (SQLite, Parquet folder) and torch.profiler traces; summarises ncu reports and
    memory snapshots (pickle, JSON).
    Several files, or a folder of them, are the ranks of one run: clocks aligned, waiting told from transfer in
    collectives. Exit code 0: diagnosed; 2: a file cannot be read as a trace, or has no such range.

    Example: worklog diagnose rank0.json.gz rank1.json.gz --range ProfilerStep --json
    """
    from worklog import distributed
    from worklog.diagnose import diagnose
    from worklog.render import diagnosis, ranks

    err, console = Console(stderr=True, highlight=False), terminal.stdout()
    traces = distributed.expand(files)
    with err.status(f"reading {traces[0].name}") as status:
        if len(traces) == 1 and scheduler is None:
            found, report = diagnose(traces[0], range_name), diagnosis.report
        else:
            found, report = distributed.diagnose(traces, range_name, scheduler, status.update), ranks.report
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        console.print(report(found, console.width))


def diff_verb(
    before: Annotated[Path, typer.Argument(help="A trace of nsys or torch.profiler.")],
    after: Annotated[Path, typer.Argument(help="Another one, of the same work.")],
    range_name: Annotated[
        str | None,
        typer.Option("--range", help="An NVTX range, or ProfilerStep; default: torch.profiler's steps, or all."),
    ] = None,
    range_after: Annotated[
        str | None, typer.Option(help="The range in AFTER, where it has another name there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Why AFTER takes longer or shorter than BEFORE: terms that add up to the change, to the nanosecond.

    Kernels added, removed, slower, faster or hidden behind others, copies, and the kinds of idle time. Of a range that
    occurs several times it compares the means, and marks terms below the spread of the occurrences.

    Example: worklog diff before.sqlite after.sqlite --range eager --range-after fused
    """
    from worklog.diff import diff
    from worklog.render import diff as rendered

    err, console = Console(stderr=True, highlight=False), terminal.stdout()
    with err.status(f"reading {before.name} and {after.name}"):
        found = diff(before, after, range_name, range_after)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    console.print(rendered.report(found, console.width))


def tree_verb(
    file: Annotated[Path, typer.Argument(help="A trace of nsys or torch.profiler.")],
    view: Annotated[
        Literal["top-down", "bottom-up", "flat"], typer.Option(help="From the program, from the kernels, or as tables.")
    ] = "top-down",
    metric: Annotated[
        Literal["kernel", "copy", "launches", "idle", "cpu"] | None,
        typer.Option(help="What is counted; cpu: operators on the host. Default: kernel, without a GPU cpu."),
    ] = None,
    range_name: Annotated[
        str | None, typer.Option("--range", help="An NVTX range, or ProfilerStep; default: the whole trace.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Levels below the root; an only child is none. Default: all.")
    ] = None,
    min_share: Annotated[float, typer.Option(min=0, max=1, help="Fold what costs less than this of all.")] = 0.01,
    fold: Annotated[bool, typer.Option("--fold", help="Modules of one class in one place are one.")] = False,
    libraries: Annotated[bool, typer.Option("--libraries", help="Show Python frames of torch and Python too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which module, line and operator the time of kernels, copies and gaps belongs to.

    Exit code 0: printed; 2: the file has no timeline or no such range.

    Example: worklog tree trace.json.gz --metric copy --view bottom-up
    """
    from worklog.analysis import views
    from worklog.render import tree

    err, console = Console(stderr=True, highlight=False), terminal.stdout()
    with err.status(f"reading {file.name}"):
        found = views.tree(file, view, metric, range_name, depth, min_share, fold=fold, libraries=libraries)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        console.print(tree.report(found, console.width))
