"""What a file is, by its content, and the content of those that may be gzipped."""

from __future__ import annotations

import gzip
import hashlib
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
        if (file / "StringIds.parquet").is_file():
            return "nsys"
        raise ProblemError(f"{file}: is a folder without the tables that `nsys export --type parquetdir` leaves.")
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
    if file.name.endswith(".nsys-rep") or head.startswith(b"SQLite format 3\0"):
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
        f"{file}: is no trace; this {what} holds neither a report or export of nsys, torch.profiler's JSON, an ncu "
        "report nor a memory snapshot."
    )


def sha256(file: Path) -> str:
    """Of a folder, that of its files' sums and names, in the order of their names."""
    if file.is_dir():
        sums = "".join(f"{sha256(one)}  {one.name}\n" for one in sorted(file.iterdir()) if one.is_file())
        return hashlib.sha256(sums.encode()).hexdigest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _marked(text: bytes) -> Kind | None:
    return next((kind for mark, kind in MARKS if mark in text), None)
