"""The verbs of `worklog`. Parsing and printing only; what a verb does is in the module it calls."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from worklog import problem as problems
from worklog import runner
from worklog.cli_traces import AsJson, diagnose_verb, diff_verb, tree_verb
from worklog.problem import ProblemError
from worklog.record import RecordError, dumps
from worklog.render import terminal

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def main() -> None:
    """Console entry: one sentence and exit 2 for a user's mistake, 130 for an interrupt, no traceback."""
    try:
        app(prog_name="worklog")
    except (ProblemError, RecordError) as error:
        typer.echo(f"worklog: {terminal.clean(str(error))}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def problem_main(script: str) -> None:
    """What `python problems/<name>/repro.py ...` does: repro, or with a first word `capture` or `profile` that.

    `capture --variant V [--config C] [--case C] [--iterations N]` is the program that nsys and ncu profile.
    """
    folder, words = str(Path(script).resolve().parent), sys.argv[1:]
    if words[:1] == ["capture"]:
        from worklog import child

        raise SystemExit(child.main(["capture", folder, *words[1:]]))
    verb, rest = (words[0], words[1:]) if words[:1] == ["profile"] else ("repro", words)
    sys.argv = ["worklog", verb, folder, *rest]
    main()


@app.command("list")
def list_problems(as_json: AsJson = False) -> None:
    """The problems of this checkout. Example: worklog list --json"""
    found = [problems.load(name) for name in problems.names()]
    if as_json:
        rows = [
            {
                "name": p.name,
                "title": p.title,
                "variants": [{"slug": v.slug, "summary": v.summary, "devices": v.devices} for v in p.variants],
                "configs": [c.as_dict() for c in p.configs],
            }
            for p in found
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    for p in found:
        typer.echo(f"{p.name}: {p.title} ({len(p.variants)} variants)")


@app.command()
def repro(
    problem: Annotated[str, typer.Argument(help="A name that `worklog list` prints, or a problem's folder.")],
    variant: Annotated[list[str] | None, typer.Option(help="Only this one; may be given several times.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")] = "auto",
    config: Annotated[str | None, typer.Option(help="Default: the problem's first config for the device.")] = None,
    step: Annotated[str, typer.Option(help="The worklog's step that this run is for; part of the run id.")] = "repro",
    out: Annotated[Path | None, typer.Option(help="The run's folder is made in here. Default: out/PROBLEM/")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 if, and only if, a claim does not hold.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a problem's variants, each in a process of its own, and say which of its claims hold on this machine.

    Exit code 0: reproduced as claimed; 1: a claim does not hold or a variant failed; 2: could not run.

    Example: worklog repro float8_weight_only --variant bf16_eager --device cuda
    """
    err, chosen = Console(stderr=True, highlight=False), problems.load(problem)
    settings = chosen.config(config, runner.choose_device(device))
    if device not in ("auto", settings.device):
        raise ProblemError(f"--device {device} and --config {config} disagree: that config is for {settings.device}.")
    slugs = [chosen.variant(slug).slug for slug in variant or ()] or [v.slug for v in chosen.variants]
    with terminal.progress(slugs, err) as notify:
        outcome = runner.run(
            chosen, settings, variants=slugs, step=step, out=out, argv=["worklog", *sys.argv[1:]], notify=notify
        )
    record = outcome.record
    if as_json:
        sys.stdout.buffer.write(dumps(record))
    else:
        terminal.show(record, chosen.title, runner.recorded(chosen) if settings.device == "cpu" else None)
    if outcome.folder is None:
        raise ProblemError(f"The run is over but could not be kept: {outcome.failure}")
    err.print(f"Record: {outcome.folder}/record.json", soft_wrap=True)
    code = runner.exit_code(record, claims_only=check)
    if code == 2:
        reasons = {v.message for v in record.variants.values() if v.status == "unsupported"}
        err.print(f"worklog: no variant could run: {'; '.join(sorted(map(str, reasons)))}.", soft_wrap=True)
    raise typer.Exit(code)


@app.command("profile")
def profile_verb(
    problem: Annotated[str, typer.Argument(help="A name that `worklog list` prints, or a problem's folder.")],
    tool: Annotated[Literal["torch", "nsys", "ncu", "memory"], typer.Option("--with", help="The profiler.")],
    variant: Annotated[
        list[str] | None, typer.Option(help="May be given several times. Default: the baseline.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Default: the problem's first case.")] = None,
    config: Annotated[str | None, typer.Option(help="Default: the problem's first config for this machine.")] = None,
    kernel: Annotated[str | None, typer.Option(help="ncu: regular expression for the kernel's name.")] = None,
    launch_skip: Annotated[int, typer.Option(help="ncu: matching launches to pass over.")] = 0,
    launch_count: Annotated[int, typer.Option(help="ncu: launches to count.")] = 10,
    iterations: Annotated[int | None, typer.Option(help="Runs of the case. Default: 3, for ncu and memory 1.")] = None,
    which: Annotated[
        Literal["attribution", "timing", "both"],
        typer.Option("--pass", help="torch, nsys: what ran (slows the host), how long, or one after the other."),
    ] = "both",
    export: Annotated[
        Literal["sqlite", "parquetdir"], typer.Option(help="nsys: form of the exported tables.")
    ] = "sqlite",
    out: Annotated[Path | None, typer.Option(help="The run's folder is made in here. Default: out/PROBLEM/")] = None,
    show: Annotated[bool, typer.Option("--print", help="Show the commands and run nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Profile a variant and keep its traces with a record of how they were made. Profiled times are no results.

    Exit code 0: captured; 1: a capture failed; 2: this machine cannot make it (the message says what is missing).

    Example: worklog profile float8_weight_only --with ncu --variant float8_fused --kernel '.*gemv.*' --print
    """
    from worklog import profile

    err, chosen = Console(stderr=True, highlight=False), problems.load(problem)
    request = profile.Request(
        tool=tool,
        case=case,
        config=config,
        kernel=kernel,
        launch_skip=launch_skip,
        launch_count=launch_count,
        iterations=iterations,
        which=which,
        export=export,
    )
    slugs = [chosen.variant(slug).slug for slug in variant or ()] or [chosen.variants[0].slug]
    if show:
        script, folder = profile.relative(chosen.folder / "repro.py"), f"out/{chosen.name}"
        every = [c for slug in slugs for c in profile.commands(script, slug, request, folder=folder)]
        typer.echo("\n\n".join(profile.printed(command.argv) for command in every))
        return

    def complain(text: str) -> None:
        err.print(f"worklog: {text}", soft_wrap=True, markup=False)

    with err.status("starting") as status:
        outcome = profile.profile(
            chosen, slugs, request, out=out, argv=["worklog", *sys.argv[1:]], notify=status.update, complain=complain
        )
    if outcome.folder is None:
        raise ProblemError(f"The capture is over but could not be kept: {outcome.failure}")
    if as_json:
        sys.stdout.buffer.write(dumps(outcome.record))
    else:
        for kept in outcome.record.artifacts:
            typer.echo(f"{kept.bytes / 2**20:8.2f} MiB  {outcome.folder / kept.path}")
    raise typer.Exit(runner.exit_code(outcome.record))


app.command("diagnose")(diagnose_verb)
app.command("tree")(tree_verb)
app.command("diff")(diff_verb)


@app.command("compare")
def compare_verb(
    records: Annotated[list[Path], typer.Argument(help="Run folders, or their record.json; the first is this GPU's.")],
    as_json: AsJson = False,
) -> None:
    """This GPU's record beside the recorded ones: times, shares of each GPU's own ceilings, and which claims hold.

    With one record, beside the newest of each GPU in reports/. Differences below the spread are marked.

    Example: worklog compare out/float8_weight_only/20261121-rtx4090-repro-0a1b2c
    """
    from worklog.compare import compare
    from worklog.render import compare as rendered

    found = compare(records)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    console = terminal.stdout()
    console.print(rendered.report(found, console.width))


@app.command("doctor")
def doctor_verb(as_json: AsJson = False) -> None:
    """What is here, what each missing thing disables, and how to get it. Example: worklog doctor --json

    Exit code 0: a CPU run is possible at least; 2: not even that.
    """
    from worklog import doctor

    err = Console(stderr=True, highlight=False)
    with err.status("looking"):
        found = doctor.diagnose()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        terminal.stdout().print(doctor.table(found))
    raise typer.Exit(0 if found.cpu_run else 2)


@app.command()
def render(
    problem: Annotated[str | None, typer.Argument(help="Default: every problem.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a file would change.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make WORKLOG.md, its figures and the README's index from the templates and reports/.

    Prints the files that it wrote. Exit code 2: a page cannot be rendered as it stands; the place is named.

    Example: worklog render float8_weight_only --check
    """
    from worklog.render import stale, write

    names = [problems.load(problem).name] if problem else problems.names()
    files = stale(problems.root(), names)
    if not check:
        write(files)
    changed = [str(file.relative_to(problems.root())) for file in sorted(files)]
    typer.echo(json.dumps(changed, indent=1) if as_json else "\n".join(changed) or "Nothing to change.")
    raise typer.Exit(1 if check and changed else 0)


@app.command("check")
def check_verb(
    problem: Annotated[str | None, typer.Argument(help="Default: every problem, and the repository's pages.")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify records, artifacts, pages, commands, links, folders and pins; print each failure with its place.

    Exit code 0: nothing is wrong; 1: something is. Example: worklog check float8_weight_only --json
    """
    from worklog import check

    root = problems.root()
    err = Console(stderr=True, highlight=False)
    with err.status("checking"):
        found = check.run(root, [problem] if problem else check.folders_of(root), app)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(failure) for failure in found], indent=1))
    else:
        typer.echo("\n".join(map(str, found)) or "Nothing is wrong.")
    raise typer.Exit(1 if found else 0)


@app.command("new")
def new_verb(name: Annotated[str, typer.Argument(help="snake_case; the subject, not the verdict.")]) -> None:
    """Make a problem folder that runs, renders and passes `worklog check`. Example: worklog new slow_softmax"""
    from worklog import new

    folder = new.create(name)
    from worklog.render import stale, write

    write(stale(problems.root(), []))
    typer.echo(f"{folder.relative_to(problems.root())}: run it with `worklog repro {name}`, then edit its files.")


if __name__ == "__main__":
    main()
