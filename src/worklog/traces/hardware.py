"""Which GPUs a timeline was taken on."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from worklog.traces import files

MARK = '"deviceProperties":'
HEAD = 1 << 20
"""Kineto writes the devices before the events."""


def gpus(file: Path) -> list[str]:
    """Names by number, as far as the file tells them: nsys the machine's, torch.profiler those that torch sees."""
    try:
        return _of_nsys(file) if files.kind(file) == "nsys" else _of_kineto(file)
    except (sqlite3.DatabaseError, OSError, ValueError, *files.DAMAGED):
        return []


def _of_nsys(file: Path) -> list[str]:
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        return [str(name) for (name,) in database.execute("SELECT name FROM TARGET_INFO_GPU ORDER BY id")]


def _of_kineto(file: Path) -> list[str]:
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    if head.startswith(files.GZIP):
        with gzip.open(file) as unpacked:
            head = unpacked.read(HEAD)
    text = head.decode(errors="replace")
    devices: list[object] = []
    if MARK in text:
        with contextlib.suppress(json.JSONDecodeError):
            at = text.index(MARK) + len(MARK)
            devices, _ = json.JSONDecoder().raw_decode(text[at:].lstrip())
    return [str(device.get("name")) for device in devices if isinstance(device, dict)]
