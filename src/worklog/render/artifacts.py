"""The files of a run folder as data: small JSON and CSV, and the captures that worklog.traces reads."""

from __future__ import annotations

import csv
import gzip
import io
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from worklog.problem import ProblemError
from worklog.render.quantity import PageError, tagged

READERS = {
    "nsys": re.compile(r"\.sqlite$"),
    "ncu": re.compile(r"\.ncu-rep(\.gz)?$"),
    "kineto": re.compile(r"(^|/)torch\.[^/]*\.json(\.gz)?$"),
    "memory": re.compile(r"(^|/)memory\.[^/]*\.json(\.gz)?$"),
}
"""By the names that `worklog profile` gives."""


def quantities(file: Path, path: str, sha256: str, origin: frozenset[str], range_name: str | None = None) -> Any:
    """The content of `file`, every number a Quantity of the runs `origin`, its unit from the end of its key.

    `range_name` is an NVTX range of a .sqlite. Raises PageError for a file that cannot be read.
    """
    kind = next((kind for kind, pattern in READERS.items() if pattern.search(path)), None)
    if range_name is not None and kind != "nsys":
        raise PageError(f"{path}: only a .sqlite of nsys has NVTX ranges")
    try:
        if kind is None:
            return _small(file.read_bytes(), path, origin)
        found = tagged("", _trace(kind, file, sha256, range_name), origin)
    except ProblemError as error:
        raise PageError(str(error).replace(str(file), path)) from error
    if kind == "memory":
        found["timeline"] = [
            [tagged("at_us", at, origin), tagged("at_bytes", n, origin)] for at, n in found["timeline"]
        ]
    return found


@lru_cache(maxsize=64)
def _trace(kind: str, file: Path, sha256: str, range_name: str | None) -> Any:  # noqa: ARG001
    """A page cites the same file many times, and reading it costs seconds; `sha256` stands for its content."""
    from worklog.traces import memory, ncu, nsys, operators  # pandas; pages without traces do without it

    if kind == "nsys":
        return nsys.read(file, range_name)
    return {"ncu": ncu, "kineto": operators, "memory": memory}[kind].read(file)


def _small(content: bytes, path: str, origin: frozenset[str]) -> Any:
    content = gzip.decompress(content) if path.endswith(".gz") else content
    bare = path.removesuffix(".gz")
    if bare.endswith(".json"):
        return tagged("", msgspec.json.decode(content), origin)
    if bare.endswith(".csv"):
        rows = csv.DictReader(io.StringIO(content.decode()))
        return [{key: tagged(key, _cell(value), origin) for key, value in row.items()} for row in rows]
    raise PageError(f"{path}: evidence() reads .json and .csv (also .gz), .sqlite of nsys and .ncu-rep")


def _cell(text: str) -> str | float | int | None:
    for read in (int, float):
        try:
            return read(text)
        except (TypeError, ValueError):
            continue
    return text or None
