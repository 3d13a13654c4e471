"""Run a tool over a program: few environment variables, a time limit that leaves no process behind, output kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from worklog.problem import ProblemError
from worklog.record import Status

PASSED = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "OMP_NUM_THREADS",
)
PASSED_PREFIXES = ("CUDA_", "NCCL_", "NVSHMEM_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "WORKLOG_")


class CaptureError(ProblemError):
    """A capture that could not be made, in one sentence, with the status that the record gets."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status


@dataclass(frozen=True)
class Finished:
    returncode: int
    output: str
    """stdout and stderr as they came, together."""
    seconds: float

    @property
    def last_line(self) -> str:
        """The last line of the program's own words: a tool's `==PROF==` lines and progress bars are passed over."""
        lines = [line.strip() for line in self.output.splitlines()]
        said = [
            line for line in lines if line and not re.match(r"==\w+==|\[\d/\d\]|Generat|Collecting|Processing", line)
        ]
        return said[-1] if said else "it printed nothing"


def environment(own: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that the profiled program gets: `PASSED` and `PASSED_PREFIXES` of `own` (default: os.environ).

    nsys writes every variable of the program into its report, and reports are published.
    """
    own = os.environ if own is None else own
    return {name: value for name, value in own.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}


def execute(
    argv: Sequence[str], *, cwd: Path, timeout_s: float, log: Path, own: Mapping[str, str] | None = None
) -> Finished:
    """Run `argv` in `cwd` with `environment(own)`; append what it prints to `log`.

    Raises CaptureError (timeout) after killing the tool and all that it started, (unsupported) if it cannot be started.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        begin = out.tell()
        try:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=environment(own),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CaptureError("unsupported", f"{argv[0]} cannot be started ({error.strerror}).") from error
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise CaptureError(
                "timeout", f"{Path(argv[0]).name} was killed after its time limit of {timeout_s:g} s."
            ) from None
        except BaseException:
            kill_tree(process)
            raise
    with log.open("rb") as kept:
        kept.seek(begin)
        output = kept.read().decode(errors="replace")
    return Finished(returncode, output, time.monotonic() - started)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and every descendant; a profiler starts the program in a process group of its own."""
    doomed = [process.pid, *_descendants(process.pid)]
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from _descendants(child)
