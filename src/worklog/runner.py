"""A run: environment, then each variant in a process of its own, then claims, then the record."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import msgspec

from worklog import container, environment
from worklog.capture.paths import scrub
from worklog.problem import Config, Device, Problem, ProblemError, Variant, root
from worklog.process import last_line, supervise
from worklog.record import (
    SCHEMA_VERSION,
    Ceilings,
    Claim,
    Record,
    RecordError,
    VariantResult,
    artifact,
    load,
    save,
    write_whole,
)

CEILINGS_TIMEOUT_S = 300.0
Notify = Callable[[str, VariantResult | None], None]
"""Called with a slug and None when a variant starts, and with its result when it ends."""


@dataclass(frozen=True)
class Outcome:
    record: Record
    folder: Path | None
    """None: the record could not be written."""
    failure: str | None = None
    """Why not, and what to do, in one sentence."""


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Device:
    """What `auto` means here: cuda where the driver shows a GPU and this torch is built for CUDA."""
    if asked != "auto":
        return asked
    return "cuda" if environment.torch_version()[1] and environment.hardware("cuda").gpus else "cpu"


def run(
    problem: Problem,
    config: Config,
    *,
    variants: Sequence[str] = (),
    step: str = "repro",
    out: Path | None = None,
    argv: Sequence[str] = (),
    notify: Notify | None = None,
) -> Outcome:
    """Run `variants` (default: all) and leave `<out>/<run id>/` with record.json and stdout.log.

    The folder gets its name only when it is whole. Ctrl-C, SIGTERM or SIGHUP ends the run with a record that says so.
    Raises ProblemError for an unknown variant, and before anything runs where `out` cannot be written.
    """
    chosen = [problem.variant(slug) for slug in dict.fromkeys(variants)] or list(problem.variants)
    began = time.monotonic()
    record = begin(problem, chosen, config, step=step, argv=argv)
    hardware = record.hardware
    with interrupts() as stop, staging(out or root() / "out" / problem.name, record) as folder:
        with (folder / "stdout.log").open("wb") as log:
            ceilings = measure_ceilings(log, stop) if hardware.gpus else Ceilings()
            results: dict[str, VariantResult] = {}
            for variant in chosen:
                if notify:
                    notify(variant.slug, None)
                results[variant.slug] = run_variant(problem, variant, config, log, stop)
                if notify:
                    notify(variant.slug, results[variant.slug])
            changed = msgspec.structs.replace(
                record,
                complete=not stop.is_set(),
                hardware=msgspec.structs.replace(hardware, end=environment.clocks() if hardware.gpus else None),
                ceilings=ceilings,
                variants=results,
            )
            changed = msgspec.structs.replace(changed, claims=claims_of(problem, changed, log))
        return finish(msgspec.structs.replace(changed, seconds=time.monotonic() - began), folder)


def begin(problem: Problem, chosen: Sequence[Variant], config: Config, *, step: str, argv: Sequence[str]) -> Record:
    """The record of a run that has done nothing yet: its id and what it runs on. Raises ProblemError for a bad step."""
    if not re.fullmatch(r"[a-z0-9_]+", step):
        raise ProblemError(f"--step {step!r} becomes part of a folder's name; use a-z, 0-9 and _.")
    started = datetime.datetime.now(datetime.UTC)
    hardware = environment.hardware(config.device)
    unique = hashlib.sha256(f"{problem.name} {started.isoformat()} {os.getpid()}".encode()).hexdigest()[:6]
    gpu = gpu_slug(hardware.gpus[0].name) if hardware.gpus else config.device
    return Record(
        schema_version=SCHEMA_VERSION,
        run_id=f"{started:%Y%m%d}-{gpu}-{step}-{unique}",
        problem=problem.name,
        step=step,
        argv=[scrub(word) for word in argv],
        started_utc=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        seconds=0.0,
        complete=False,
        source=environment.source(),
        hardware=hardware,
        software=environment.software(sorted({name for v in chosen for name in v.needs})),
        config=config.as_dict(),
    )


def run_variant(
    problem: Problem, variant: Variant, config: Config, log: IO[bytes], stop: threading.Event
) -> VariantResult:
    """The variant's own account of itself, or, where it could not finish, what it had and how it ended."""
    if stop.is_set():
        return VariantResult(status="skipped", message="the run was interrupted before it")
    if config.device not in variant.devices:
        return VariantResult(status="skipped", message=f"runs on {' and '.join(variant.devices)} only")
    log.write(f"== {variant.slug}\n".encode())
    log.flush()
    log_start, began = log.tell(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="worklog-") as place:
        file = Path(place) / "result.json"
        arguments = ["measure", str(problem.folder), variant.slug, "--config", config.name, "--result", str(file)]
        ending = supervise(arguments, variant.timeout_s, log, stop)
        left = msgspec.json.decode(file.read_bytes(), type=VariantResult) if file.exists() else None
    if left is None:
        left = VariantResult(status="error", message="before it began")
    result = msgspec.structs.replace(left, seconds=time.monotonic() - began)
    where = left.message or ""
    if ending.why == "interrupted":
        return msgspec.structs.replace(result, status="error", message=f"interrupted {where}")
    if ending.why == "timeout":
        message = f"not done after {variant.timeout_s:g} s, stopped {where}"
        return msgspec.structs.replace(result, status="timeout", message=message)
    assert ending.code is not None
    if ending.code < 0:
        name = signal.Signals(-ending.code).name
        return msgspec.structs.replace(
            result, status="error", message=f"killed by signal {-ending.code} ({name}) {where}"
        )
    if ending.code > 0:
        message = f"exited with {ending.code} {where}{last_line(Path(log.name), log_start)}"
        return msgspec.structs.replace(result, status="error", message=message)
    return result


def measure_ceilings(log: IO[bytes], stop: threading.Event) -> Ceilings:
    """In a process of its own, so that its buffers are nobody's; empty where it fails (the log says why)."""
    log.write(b"== ceilings\n")
    log.flush()
    with tempfile.TemporaryDirectory(prefix="worklog-") as place:
        file = Path(place) / "ceilings.json"
        supervise(["ceilings", "--result", str(file)], CEILINGS_TIMEOUT_S, log, stop)
        return msgspec.json.decode(file.read_bytes(), type=Ceilings) if file.exists() else Ceilings()


def claims_of(problem: Problem, record: Record, log: IO[bytes]) -> list[Claim]:
    """The problem's verdicts on its record; a verdict that cannot be computed is an undecided claim, not a lost run."""
    try:
        return problem.claims(record)
    except Exception as error:
        log.write(("== claims\n" + "".join(traceback.format_exception(error))).encode())
        reason = f"claims() failed with {type(error).__name__}: {error}"
        return [Claim(name="claims", holds=None, measured=None, required=None, reason=reason)]


def finish(record: Record, folder: Path) -> Outcome:
    """Take this machine's folders out of log and messages, list the log, seal the record, give the folder its name."""
    log, final = folder / "stdout.log", folder.parent / record.run_id
    record = msgspec.structs.replace(record, variants={s: scrubbed(v) for s, v in record.variants.items()})
    try:
        write_whole(log, scrub(log.read_text(errors="replace") if log.exists() else "").encode())
        record = msgspec.structs.replace(record, artifacts=[*record.artifacts, artifact(folder, log)])
        save(record, folder)
        folder.rename(final)
    except (OSError, RecordError) as error:
        return Outcome(record, None, f"{error}; {remedy()}.")
    return Outcome(record, final)


def scrubbed(variant: VariantResult) -> VariantResult:
    def clean(text: str | None) -> str | None:
        return text and scrub(text)

    cases = {n: msgspec.structs.replace(case, message=clean(case.message)) for n, case in variant.cases.items()}
    return msgspec.structs.replace(variant, message=clean(variant.message), cases=cases)


def exit_code(record: Record, *, claims_only: bool = False) -> int:
    """0: as claimed; 1: a claim does not hold or a variant failed; 2: nothing could run; 130: interrupted.

    `claims_only`: a failed variant alone does not count.
    """
    if not record.complete:
        return 130
    states = {variant.status for variant in record.variants.values()}
    if not states - {"unsupported", "skipped"}:
        return 2
    if any(claim.holds is False for claim in record.claims):
        return 1
    return 1 if not claims_only and states - {"ok", "skipped"} else 0


def recorded(problem: Problem) -> Record | None:
    """The newest one that is `usable`."""
    return max(usable(problem.name), key=lambda r: r.started_utc, default=None)


def usable(problem: str) -> list[Record]:
    """The records in reports/ that are whole, clean, from a GPU, and hold times: captures hold none."""
    found = []
    for file in (root() / "reports" / problem).glob("*/record.json"):
        with contextlib.suppress(RecordError):
            found.append(load(file))
    timed = [r for r in found if any(c.timing for v in r.variants.values() for c in v.cases.values())]
    return [r for r in timed if r.complete and r.source.dirty is False and r.gpu_name]


def gpu_slug(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` -> `rtx4090`."""
    words = [w for w in re.findall(r"[a-z0-9]+", name.lower()) if w not in ("nvidia", "geforce", "tesla")]
    return "".join(words) or "gpu"


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Turn SIGINT, SIGTERM and SIGHUP into a flag, so that no write of the run is cut in two and no child is left."""
    asked = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def staging(parent: Path, record: Record) -> Iterator[Path]:
    """A hidden folder in `parent` that already holds `record`; removed at the end unless it was renamed.

    Raises ProblemError where it cannot be written.
    """
    folder = parent / f".{record.run_id}.part"
    try:
        try:
            save(record, folder)
        except RecordError as error:
            why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
            raise ProblemError(f"{parent}: cannot be written ({why}); {remedy()}.") from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remedy() -> str:
    """What to do where a results folder takes no more."""
    if container.inside():
        return "free some space, or mount a folder that this user may write: scripts/docker-run does"
    return "free some space, or choose another folder with --out"
