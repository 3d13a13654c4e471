"""Which GPUs a timeline was taken on; read from the file's head alone."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

from worklog.traces import files

MARK = '"deviceProperties":'
HEAD = 1 << 20
"""Kineto writes the devices before the events."""


def gpus(file: Path) -> dict[int, str]:
    """Names by the number that activities carry, as far as the file tells them."""
    try:
        return _of_nsys(file) if files.kind(file) == "nsys" else _of_kineto(file)
    except (sqlite3.DatabaseError, OSError, ValueError, *files.DAMAGED):
        return {}


def _of_nsys(file: Path) -> dict[int, str]:
    """Processes may number GPUs in ways of their own; what they disagree on is left out."""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        rows = database.execute(
            "SELECT d.cudaId, MIN(g.name) FROM TARGET_INFO_CUDA_DEVICE d JOIN TARGET_INFO_GPU g ON g.id = d.gpuId "
            "GROUP BY d.cudaId HAVING COUNT(DISTINCT g.name) = 1"
        )
        return {int(number): str(name) for number, name in rows}


def _of_kineto(file: Path) -> dict[int, str]:
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    if head.startswith(files.GZIP):
        with gzip.open(file) as unpacked:
            head = unpacked.read(HEAD)
    text = head.decode(errors="replace")
    if MARK not in text:
        return {}
    devices, _ = json.JSONDecoder().raw_decode(text[text.index(MARK) + len(MARK) :].lstrip())
    known = [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
    return {
        device["id"]: str(device["name"]) for device in known if isinstance(device.get("id"), int) and "name" in device
    }
