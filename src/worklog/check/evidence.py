"""Recorded runs: each record valid and unedited, each artifact the file that it describes, nothing else beside them."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from worklog import record as records
from worklog.check.failure import Failure, edited_line

LARGEST_FILE = 5_000_000
LARGEST_PROBLEM = 20_000_000
"""Bytes. A problem's recorded runs together; a clone must stay quick."""

HOME = re.compile(rb"(?:/home/|/Users/)[A-Za-z][\w.-]*|/root/[\w.-]+")
_TEXT = (".json", ".log", ".csv", ".txt", ".md")


def check(root: Path, name: str) -> Iterator[Failure]:
    """Everything about reports/<name>/."""
    folder = root / "reports" / name
    if not folder.is_dir():
        return
    total = 0
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir():
            yield Failure(str(entry.relative_to(root)), 0, "is no run folder; reports/ holds recorded runs only")
            continue
        yield from _run(root, name, entry)
        total += sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
    if total > LARGEST_PROBLEM:
        message = f"holds {total / 1e6:.1f} MB of runs; the limit is {LARGEST_PROBLEM / 1e6:.0f} MB a problem"
        yield Failure(str(folder.relative_to(root)), 0, message)


def _run(root: Path, name: str, folder: Path) -> Iterator[Failure]:
    record_file = folder / "record.json"
    place = str(record_file.relative_to(root))
    listed: dict[str, records.Artifact] = {}
    try:
        record = records.load(folder)
        listed = {artifact.path: artifact for artifact in record.artifacts}
        if record.run_id != folder.name:
            yield Failure(place, _line(record_file, '"run_id"'), f"is of run {record.run_id}, not of this folder's")
        if record.problem != name:
            yield Failure(place, _line(record_file, '"problem"'), f"is of problem {record.problem}, not {name}")
    except records.RecordError as error:
        yield Failure(place, edited_line(root, record_file), str(error).removeprefix(f"{record_file}: "))
        return
    for path, artifact in listed.items():
        file = folder / path
        where = str(file.relative_to(root)) if file.is_relative_to(folder) else path
        if not file.is_file():
            yield Failure(where, 0, f"is missing; {place} lists it")
            continue
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != artifact.sha256:
            size = "" if len(content) == artifact.bytes else f", {len(content)} bytes instead of {artifact.bytes}"
            yield Failure(where, edited_line(root, file), f"is not the file that {place} describes (sha256{size})")
        elif len(content) != artifact.bytes:
            yield Failure(where, 0, f"has {len(content)} bytes; {place} says {artifact.bytes}")
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        where, path = str(file.relative_to(root)), file.relative_to(folder).as_posix()
        if path != "record.json" and path not in listed:
            yield Failure(where, 0, f"is not listed in {place}")
        if file.stat().st_size > LARGEST_FILE:
            yield Failure(where, 0, f"has {file.stat().st_size / 1e6:.1f} MB; the limit is {LARGEST_FILE / 1e6:.0f} MB")
        yield from _paths(where, file)


def _paths(where: str, file: Path) -> Iterator[Failure]:
    """Absolute paths of a home folder in a text artifact: they name a person or a machine, and nobody else has them."""
    bare = file.name.removesuffix(".gz")
    if not bare.endswith(_TEXT):
        return
    try:
        content = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
    except (OSError, EOFError, zlib.error):
        yield Failure(where, 0, "is not a readable gzip file")
        return
    if found := HOME.search(content):
        line = content.count(b"\n", 0, found.start()) + 1
        yield Failure(where, line, f"holds the absolute home path {found[0].decode()}")


def _line(file: Path, text: str) -> int:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if text in line:
            return number
    return 0
