"""Run a tool over a program: few environment variables, a time limit that leaves no process behind, output kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, kw_only=True)
class Session:
    """How the commands of one capture run: where, for how long, with which variables, and where their output goes."""

    cwd: Path
    timeout_s: float
    log: Path
    own: Mapping[str, str] | None = None
    """Variables to choose from; None: os.environ."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set from outside to end the command early."""

    def execute(self, argv: Sequence[str]) -> Finished:
        """Run `argv` with `environment(own)`; append what it prints to `log`.

        Raises CaptureError: "unsupported" if it cannot be started; "timeout", or "error" when `stop` was set, after the
        tool and everything that it started are dead.
        """
        started = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            begin = out.seek(0, os.SEEK_END)
            try:
                process = subprocess.Popen(
                    argv,
                    cwd=self.cwd,
                    env=environment(self.own),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise CaptureError("unsupported", f"{argv[0]} cannot be started ({error.strerror}).") from error
            try:
                returncode = self._wait(process, Path(argv[0]).name)
            finally:
                kill_tree(process)
        with self.log.open("rb") as kept:
            kept.seek(begin)
            output = kept.read().decode(errors="replace")
        return Finished(returncode, output, time.monotonic() - started)

    def _wait(self, process: subprocess.Popen[bytes], name: str) -> int:
        end = time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            try:
                return process.wait(0.1)
            except subprocess.TimeoutExpired:
                if self.stop.is_set():
                    raise CaptureError("error", f"{name} was interrupted.") from None
        raise CaptureError("timeout", f"{name} was killed after its time limit of {self.timeout_s:g} s.")


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, and its descendants; a profiler starts the program in a group of its own."""
    if process.poll() is not None:
        return
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
