"""Nsight Systems: the time line of a few iterations, and its export.

Two passes that are never mixed. `node` traces every kernel inside a CUDA graph, which slows the graph's launch: it says
what ran (attribution). `graph` traces a graph as one piece, which costs little: it says how long (timing).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from worklog.capture.tool import CaptureError, Session
from worklog.nsight import NSYS_REMEDY, find_nsys, importer_fault, library_path

GraphTrace = Literal["node", "graph"]
Export = Literal["sqlite", "parquetdir"]


def profile_argv(program: Sequence[str], report: str, *, graph_trace: GraphTrace, tool: str = "nsys") -> list[str]:
    """The command that records `program` into `report` (a name that ends in .nsys-rep)."""
    return [
        tool,
        "profile",
        "--trace=cuda,nvtx",
        f"--cuda-graph-trace={graph_trace}",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={report}",
        *program,
    ]


def export_argv(report: str, export: str, *, kind: Export = "sqlite", tool: str = "nsys") -> list[str]:
    """The command that turns a report into tables: one SQLite file, or a folder with a Parquet file for each table."""
    return [tool, "export", f"--type={kind}", "--force-overwrite=true", f"--output={export}", report]


def ready() -> Path:
    """The nsys of this machine. Raises CaptureError (unsupported) if there is none or it could write no report."""
    found = find_nsys()
    if found.path is None:
        raise CaptureError("unsupported", f"nsys is not here ({found.why}): {NSYS_REMEDY}.")
    if fault := importer_fault(found.path):
        raise CaptureError("unsupported", f"{found.path} can record but not write a report: {fault}.")
    return found.path


def run(argv: Sequence[str], made: Path, session: Session) -> None:
    """Run a command of the builders; `made` is the file or folder that it must leave.

    Raises CaptureError: nsys or the program failed, the range was never entered, the importer failed, the time limit.
    """
    own = {**(os.environ if session.own is None else session.own), "LD_LIBRARY_PATH": library_path()}
    done = replace(session, own=own).execute(argv)
    if "Importer error status" in done.output or (not made.exists() and "QdstrmImporter" in done.output):
        reason = importer_fault(Path(argv[0])) or "run `worklog doctor`"
        raise CaptureError("error", f"nsys recorded the program but its importer wrote no report: {reason}.")
    if done.returncode != 0:
        raise CaptureError("error", f"nsys {argv[1]} ended with {done.returncode}: {done.last_line}")
    if not made.exists():
        raise CaptureError(
            "error",
            f"nsys wrote no {made.name}: the program never came to cudaProfilerStart, or ran nothing on a GPU after it "
            f"(its last line: {done.last_line}).",
        )
    if made.suffix == ".sqlite":
        redact(made)


def redact(export: Path) -> None:
    """Empty what an export tells of the machine and not of the program: variables, folders, user and host name.

    nsys stores them whatever is asked of it, of the program and of other processes on the machine, in these places of
    schema 3.20 to 3.25. The .nsys-rep keeps them, and its format is not public: look at it before you give it away.
    Raises CaptureError for a file that is no database, and where the disk refuses the change.
    """
    places = (
        (
            "META_DATA_CAPTURE",
            "value",
            "name LIKE '%ENVIRONMENT_VARIABLE' OR name LIKE '%USER_NAME' OR value LIKE '/%'",
        ),
        ("META_DATA_EXPORT", "value", "name LIKE '%HOST%' OR value LIKE '/%'"),
        ("TARGET_INFO_SYSTEM_ENV", "value", "name IN ('DeviceEnvironment', 'Hostname') OR value LIKE '/%'"),
        ("PROCESSES", "name", "name LIKE '/%'"),
        # A process's variables are one string with a zero byte after each, behind which LIKE does not look.
        ("StringIds", "value", "instr(CAST(value AS BLOB), x'00') > 0 OR value GLOB '*[A-Z_]=/*'"),
    )
    database = sqlite3.connect(export)
    try:
        with database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for table, column, which in places:
                if table in tables:
                    database.execute(f"UPDATE {table} SET {column} = '' WHERE {which}")
        database.execute("VACUUM")  # what was there would else remain in free pages
    except sqlite3.Error as error:
        raise CaptureError("error", f"{export.name}, nsys's export, cannot be read or rewritten ({error}).") from error
    finally:
        database.close()
