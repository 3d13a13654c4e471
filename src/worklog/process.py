"""A child process: in a group of its own, with a time limit, its output in the run's log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import worklog
from worklog.capture.paths import scrub


@dataclass(frozen=True)
class Ending:
    """How a child process ended: `code` as subprocess gives it, None where it was stopped from here."""

    code: int | None
    why: Literal["exited", "timeout", "interrupted"]


def supervise(arguments: Sequence[str], timeout_s: float, log: IO[bytes], stop: threading.Event) -> Ending:
    """Run `python -m worklog.child` in a process group of its own; none of the group outlives this call."""
    library = str(Path(worklog.__file__).parents[1])
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), library]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "worklog.child", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s
    why: Literal["exited", "timeout", "interrupted"] = "exited"
    while process.poll() is None:
        if stop.is_set() or time.monotonic() > deadline:
            why = "interrupted" if stop.is_set() else "timeout"
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return Ending(code if why == "exited" else None, why)


def last_line(log: Path, start: int) -> str:
    """`: <the last line>` of what the log holds from `start` on."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {scrub(lines[-1])[:300]}" if lines else ""
