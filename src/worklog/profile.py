"""`worklog profile`: which commands profile a variant, running them, and the run folder they leave."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

import worklog
from worklog import environment, runner
from worklog.capture import ncu, nsys
from worklog.capture.nsys import Export
from worklog.capture.tool import CaptureError, Session
from worklog.problem import Config, Problem, Variant, root
from worklog.record import Artifact, Status, VariantResult, artifact

Tool = Literal["torch", "nsys", "ncu", "memory"]
Pass = Literal["attribution", "timing", "both"]
ITERATIONS = {"torch": 3, "nsys": 3, "ncu": 1, "memory": 1}
"""Few: a problem's reports stay under 20 MB, and ncu replays every kernel once for each group of counters."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to capture of one variant. None: the default of the problem (case, config) or of the tool (iterations)."""

    tool: Tool
    case: str | None = None
    config: str | None = None
    kernel: str | None = None
    launch_skip: int = 0
    launch_count: int = 10
    iterations: int | None = None
    which: Pass = "both"
    export: Export = "sqlite"


@dataclass(frozen=True)
class Command:
    """One command, and the file or folder (a name in the run folder) that it leaves."""

    argv: list[str]
    made: str


def commands(
    script: str, variant: str, request: Request, *, folder: str, tool: str | None = None, python: str = "python"
) -> list[Command]:
    """The commands of a request, in order; pure. They run in the repository and write into `folder`.

    `script` is the problem's repro.py.
    `tool` is the nsys or ncu to call, by default by its plain name.
    """
    program = [python, script, "capture", f"--variant={variant}"]
    program += [f"--case={request.case}"] if request.case else []
    program += [f"--config={request.config}"] if request.config else []
    program += [f"--iterations={request.iterations or ITERATIONS[request.tool]}"]
    attribution, timing = request.which != "timing", request.which != "attribution"
    found: list[Command] = []
    if request.tool == "torch":
        if attribution:
            made = f"torch.{variant}.json.gz"
            found.append(Command([*program, f"--trace={folder}/{made}"], made))
        if timing:
            made = f"torch.{variant}.timing.json.gz"
            found.append(Command([*program, f"--trace={folder}/{made}", "--plain"], made))
    elif request.tool == "memory":
        made = f"memory.{variant}.json.gz"
        found.append(Command([*program, f"--snapshot={folder}/{made}"], made))
    elif request.tool == "nsys":
        name = tool or "nsys"
        passes: list[tuple[str, nsys.GraphTrace]] = [(f"nsys.{variant}", "node")] if attribution else []
        passes += [(f"nsys.{variant}.timing", "graph")] if timing else []
        for stem, graph_trace in passes:
            report, tables = f"{stem}.nsys-rep", f"{stem}.{'sqlite' if request.export == 'sqlite' else 'parquet'}"
            argv = nsys.profile_argv(program, f"{folder}/{report}", graph_trace=graph_trace, tool=name)
            found.append(Command(argv, report))
            argv = nsys.export_argv(f"{folder}/{report}", f"{folder}/{tables}", kind=request.export, tool=name)
            found.append(Command(argv, tables))
    else:
        made = f"ncu.{variant}.{kernel_slug(request.kernel)}.ncu-rep"
        argv = ncu.profile_argv(
            program,
            f"{folder}/{made}",
            nvtx_range=variant,
            kernel=request.kernel,
            launch_skip=request.launch_skip,
            launch_count=request.launch_count,
            tool=tool or "ncu",
        )
        found.append(Command(argv, made))
    return found


def kernel_slug(kernel: str | None) -> str:
    """A regular expression as a part of a file name: `.*gemv.*` -> `gemv`; none -> `all`."""
    return "_".join(re.findall(r"[A-Za-z0-9]+", kernel or ""))[:60] or "all"


def printed(argv: Sequence[str]) -> str:
    """The command for a shell, one flag a line; the profiled program begins a line of its own."""
    lines: list[str] = []
    for word in argv:
        quoted = shlex.quote(word)
        if lines and not word.startswith("-") and word != "python":
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return " \\\n  ".join(lines)


def profile(
    problem: Problem,
    variants: Sequence[str],
    request: Request,
    *,
    out: Path | None = None,
    argv: Sequence[str] = (),
    notify: Callable[[str], None] = lambda _: None,
    complain: Callable[[str], None] = lambda _: None,
) -> runner.Outcome:
    """Capture `variants` (default: the baseline) one after another and leave a run folder with files and record.json.

    `notify` hears each file that is being made, `complain` each variant that could not be captured: its record has the
    status and the sentence, and the others are captured all the same.
    Raises ProblemError for an unknown variant or config, and where `out` cannot be written.
    """
    chosen = [problem.variant(slug) for slug in dict.fromkeys(variants)] or [problem.variants[0]]
    config = problem.config(request.config, runner.choose_device("auto"))
    step, began = f"profile_{request.tool}", time.monotonic()
    record = runner.begin(problem, chosen, config, step=step, argv=argv)
    parent = out or root() / "out" / problem.name
    with runner.interrupts() as stop, runner.staging(parent, record) as folder:
        log = folder / "stdout.log"
        log.touch()
        results: dict[str, VariantResult] = {}
        artifacts: list[Artifact] = []
        for variant in chosen:
            if stop.is_set():
                results[variant.slug] = VariantResult(status="skipped", message="the run was interrupted before it")
                continue
            variant_began = time.monotonic()
            status: Status = "ok"
            message = None
            try:
                session = Session(cwd=root(), timeout_s=variant.timeout_s, log=log, own=own_environment(), stop=stop)
                final = f"{relative(parent)}/{record.run_id}"
                artifacts += capture(problem, variant, config, request, folder, final, session, notify)
            except CaptureError as error:
                status, message = error.status, str(error)
                complain(f"{variant.slug}: {error}")
            seconds = time.monotonic() - variant_began
            results[variant.slug] = VariantResult(status=status, message=message, seconds=seconds)
        drop_leftovers(folder, [folder / known.path for known in artifacts])
        end = environment.clocks() if record.hardware.gpus else None
        done = msgspec.structs.replace(
            record,
            complete=not stop.is_set(),
            hardware=msgspec.structs.replace(record.hardware, end=end),
            variants=results,
            artifacts=artifacts,
            seconds=time.monotonic() - began,
        )
        return runner.finish(done, folder)


def capture(
    problem: Problem,
    variant: Variant,
    config: Config,
    request: Request,
    folder: Path,
    final: str,
    session: Session,
    notify: Callable[[str], None],
) -> list[Artifact]:
    """Run the commands of one variant into `folder`; each file they made, with the command as it reads for `final`.

    Raises CaptureError at the first command that fails.
    """
    tool = None
    if request.tool != "torch" and config.device == "cpu":
        raise CaptureError(
            "unsupported",
            f"--with {request.tool} needs a CUDA GPU; --with torch works here, and reports/{problem.name}/ holds "
            "recorded traces that open without one.",
        )
    if request.tool in ("nsys", "ncu"):
        tool = str((nsys if request.tool == "nsys" else ncu).ready())
    script = relative(problem.folder / "repro.py")
    real = commands(script, variant.slug, request, folder=str(folder), tool=tool, python=sys.executable)
    shown = commands(script, variant.slug, request, folder=final)
    found: list[Artifact] = []
    for run, show in zip(real, shown, strict=True):
        notify(f"{variant.slug}: {run.made}")
        made = folder / run.made
        if request.tool == "nsys":
            nsys.run(run.argv, made, session)
        elif request.tool == "ncu":
            ncu.run(run.argv, made, session)
        else:
            run_program(run.argv, made, session)
        files = sorted(file for file in made.rglob("*") if file.is_file()) if made.is_dir() else [made]
        found += [artifact(folder, compressed(file), show.argv, variant.slug) for file in files]
    return found


def compressed(file: Path) -> Path:
    """An ncu report is stored as .ncu-rep.gz: it holds whole code modules, and shrinks to a tenth. Others stay."""
    if file.suffix != ".ncu-rep":
        return file
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    file.unlink()
    return packed


def drop_leftovers(folder: Path, wanted: Sequence[Path]) -> None:
    """Delete what a capture that failed left half-done."""
    for file in folder.rglob("*"):
        if file.is_file() and file not in wanted and file.name not in ("record.json", "stdout.log"):
            file.unlink()


def run_program(argv: Sequence[str], made: Path, session: Session) -> None:
    """A capture that torch makes itself, inside the program."""
    done = session.execute(argv)
    if done.returncode != 0:
        raise CaptureError("error", f"The program ended with {done.returncode}: {done.last_line}")
    if not made.exists():
        raise CaptureError("error", f"The program ended well but left no {made.name}.")


def relative(path: Path) -> str:
    """As seen from the repository; of a path outside of it only the last part."""
    absolute = path.resolve()
    return absolute.relative_to(root()).as_posix() if absolute.is_relative_to(root()) else absolute.name


def own_environment() -> dict[str, str]:
    """This process's variables, with src/ on PYTHONPATH where worklog runs from the checkout uninstalled."""
    source = Path(worklog.__file__).resolve().parents[1]
    if not source.is_relative_to(root()):
        return dict(os.environ)
    kept = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p and Path(p).resolve() != source]
    return {**os.environ, "PYTHONPATH": ":".join([str(source.relative_to(root())), *kept])}
