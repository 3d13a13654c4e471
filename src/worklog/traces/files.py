"""What a file is, by its content, and the content of those that may be gzipped."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Literal

from worklog.problem import ProblemError
from worklog.traces.pickled import BEGINNING

Kind = Literal["nsys", "kineto", "memory", "ncu"]
GZIP = b"\x1f\x8b"
HEAD = 1 << 16
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
MARKS: tuple[tuple[bytes, Kind], ...] = (
    (b'"traceEvents"', "kineto"),
    (b'"device_traces"', "memory"),
    (b'"segments"', "memory"),
)


def content(file: Path) -> bytes:
    """Unpacked where it is gzipped, whatever its name. Raises ProblemError."""
    try:
        raw = file.read_bytes()
        return gzip.decompress(raw) if raw.startswith(GZIP) else raw
    except DAMAGED as error:
        raise ProblemError(f"{file}: the gzip file is cut off or damaged ({error}).") from error
    except OSError as error:
        raise ProblemError(f"{file}: cannot be read ({error.strerror or error}).") from error


def kind(file: Path) -> Kind:
    """Raises ProblemError, which says what to do, for a file that no reader takes."""
    if file.is_dir():
        raise ProblemError(
            f"{file}: is a folder; export the report as one file: `nsys export --type sqlite REPORT.nsys-rep`."
        )
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD)
        if packed := head.startswith(GZIP):
            with gzip.open(file) as unpacked:
                head = unpacked.read(HEAD)
    except DAMAGED as error:
        raise ProblemError(f"{file}: the gzip file is cut off or damaged ({error}).") from error
    except OSError as error:
        raise ProblemError(f"{file}: cannot be read ({error.strerror or error}).") from error
    if file.name.endswith(".nsys-rep"):
        raise ProblemError(f"{file}: export it first: `nsys export --type sqlite {file.name}`.")
    if head.startswith(b"SQLite format 3\0"):
        return "nsys"
    if file.name.removesuffix(".gz").endswith(".ncu-rep"):
        return "ncu"
    if head.startswith(BEGINNING):
        return "memory"
    if head.lstrip().startswith(b"{"):
        found = _marked(head) or _marked(content(file))
        if found is not None:
            return found
        raise ProblemError(
            f"{file}: JSON of another kind; torch.profiler's has traceEvents, a memory snapshot device_traces."
        )
    what = "gzip file" if packed else "file"
    raise ProblemError(
        f"{file}: is no trace; this {what} holds neither an nsys SQLite export, torch.profiler's JSON, an ncu report "
        "nor a memory snapshot."
    )


def _marked(text: bytes) -> Kind | None:
    return next((kind for mark, kind in MARKS if mark in text), None)
