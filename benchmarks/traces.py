"""How long `worklog diagnose` takes on large traces, made by repeating a real one, beside what else reads such files.

    python benchmarks/traces.py TRACE.json.gz --megabytes 100 --hta /elsewhere/venv/bin/python
    python benchmarks/traces.py EXPORT.sqlite --kernels 1000000

Each is measured in a process of its own: wall and processor seconds, the least of `--runs`, and peak resident memory
above that of the imports. `diagnose` is loading and the full diagnosis, `worklog diagnose` the whole command with the
interpreter's start and the printed text. Beside it: for JSON `json.loads` alone on the unpacked file, and HTA loading
it where the interpreter `--hta` has it (PyPI: traceinsight 0.6.1 and psutil); for SQLite, fetching the same tables row
by row, and `nsys stats` where nsys is there. On a machine that is busy compare processor seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

MEASURE = """
import resource, sys, time
from pathlib import Path
{imports}
file, before = Path(sys.argv[1]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, worked = time.perf_counter(), time.process_time()
{body}
took = time.perf_counter() - start, time.process_time() - worked
print("measured", *took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
DIAGNOSE = MEASURE.format(
    imports="import worklog.render.diagnosis\nfrom worklog.diagnose import diagnose", body="diagnose(file)"
)
LOADS = MEASURE.format(imports="import json", body="json.loads(file.read_bytes())")
HTA = MEASURE.format(
    imports="from hta.trace_analysis import TraceAnalysis", body="TraceAnalysis(trace_files={0: str(file)})"
)
FETCH = MEASURE.format(
    imports="import sqlite3",
    body="""database = sqlite3.connect(file)
for table in ("KERNEL", "MEMCPY", "RUNTIME"):
    database.execute(f"SELECT * FROM CUPTI_ACTIVITY_KIND_{table}").fetchall()""",
)
STATS = ["nsys", "stats", "-q", "-r", "cuda_gpu_kern_sum,cuda_api_sum,nvtx_gpu_proj_sum"]


class Cost(NamedTuple):
    processor_s: float
    wall_s: float
    peak_bytes: float | None = None


def repeat_json(source: Path, target: Path, size: int, distinct: bool = False) -> None:
    """Copies of the events one after another in time, with correlation and external ids of their own.

    With `distinct` every kernel has a name of its own.
    """
    raw = source.read_bytes()
    trace = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
    ids = ("correlation", "External id")
    step = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    stride = 1 + max((event.get("args", {}).get(name) or 0 for event in events for name in ids), default=0)
    head = {"schemaVersion": 1} | {key: value for key, value in trace.items() if key != "traceEvents"}
    with target.open("w") as out:
        out.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        copy = 0
        while out.tell() < size:
            for event in events:
                args = event.get("args", {})
                moved = {name: args[name] + copy * stride for name in ids if args.get(name)}
                again = event | {"ts": round(event["ts"] + copy * step, 3), "args": args | moved}
                if distinct and event.get("cat") == "kernel":
                    again["name"] = f"void kernel_{out.tell()}<float>(float*)"
                out.write(json.dumps(again) + ",\n")
            copy += 1
        out.write("{}]}")


def repeat_sqlite(source: Path, target: Path, kernels: int) -> None:
    """Copies of the rows one after another in time, with correlation ids of their own."""
    shutil.copy(source, target)
    with closing(sqlite3.connect(target)) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        timed = [t for t in tables if t.startswith("CUPTI_ACTIVITY_KIND_") or t == "NVTX_EVENTS"]
        spans = [database.execute(f'SELECT MIN(start), MAX("end") FROM {t}').fetchone() for t in timed]
        step = max(high for _, high in spans) - min(low for low, _ in spans)
        stride = 1 + database.execute("SELECT MAX(correlationId) FROM CUPTI_ACTIVITY_KIND_RUNTIME").fetchone()[0]
        have = database.execute("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()[0]
        for table in timed:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            move = {"start": f"start + n * {step}", "end": f'"end" + n * {step}'}
            move["correlationId"] = f"correlationId + n * {stride}"
            picked = ", ".join(move.get(column, f'"{column}"') for column in columns)
            count = (
                f"WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {-(-kernels // have) - 1})"
            )
            database.execute(f"INSERT INTO {table} {count} SELECT {picked} FROM c, {table} ORDER BY n")
        database.commit()


def measured(argv: list[str], runs: int) -> Cost:
    """The run with the least processor time of a program that prints its own measure, or else of the process."""
    found = []
    for _ in range(runs):
        start, before = time.perf_counter(), os.times()
        out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        wall, after = time.perf_counter() - start, os.times()
        own = [line.split()[1:] for line in out.splitlines() if line.startswith("measured ")]
        if own:
            own_wall, processor, peak = (float(word) for word in own[-1])
            found.append(Cost(processor, own_wall, peak))
        else:
            worked = after.children_user + after.children_system - before.children_user - before.children_system
            found.append(Cost(worked, wall))
    return min(found)


def report(name: str, cost: Cost, size: int, beside: Cost | None = None) -> None:
    text = f"{name}: {cost.wall_s:.2f} s, {cost.processor_s:.2f} s of the processor"
    if cost.peak_bytes is not None:
        text += f", {cost.peak_bytes / 1e9:.2f} GB, {cost.peak_bytes / size:.2f} x the file"
    if beside is not None:
        wall, processor = beside.wall_s / cost.wall_s, beside.processor_s / cost.processor_s
        text += f"; diagnose takes {wall:.2f} x its time, {processor:.2f} x of the processor"
    print(text, flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=int, default=100, help="of the JSON (1e6 bytes)")
    parser.add_argument("--kernels", type=int, default=1_000_000, help="of the SQLite export")
    parser.add_argument("--distinct", action="store_true", help="JSON: a name of its own for every kernel")
    parser.add_argument("--hta", help="an interpreter that has HTA")
    parser.add_argument("--runs", type=int, default=2, help="of each; the least counts")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        as_json = asked.trace.name.removesuffix(".gz").endswith(".json")
        large = Path(folder) / ("large.json" if as_json else "large.sqlite")
        if as_json:
            repeat_json(asked.trace, large, asked.megabytes * 1_000_000, asked.distinct)
        else:
            repeat_sqlite(asked.trace, large, asked.kernels)
        size = large.stat().st_size
        print(f"{asked.trace.name} repeated to {size / 1e6:.0f} MB", flush=True)
        ours = measured([sys.executable, "-c", DIAGNOSE, str(large)], asked.runs)
        report("diagnose", ours, size)
        command = [sys.executable, "-m", "worklog.cli", "diagnose", str(large)]
        report("worklog diagnose", measured(command, asked.runs), size)
        beside: dict[str, list[str]] = {}
        if as_json:
            beside["json.loads"] = [sys.executable, "-c", LOADS, str(large)]
            if asked.hta:
                beside["HTA, load alone"] = [asked.hta, "-c", HTA, str(large)]
        else:
            beside["sqlite3 fetchall"] = [sys.executable, "-c", FETCH, str(large)]
            if shutil.which("nsys"):
                beside["nsys stats"] = [*STATS, str(large)]
        for name, program in beside.items():
            report(name, measured(program, asked.runs), size, ours)


if __name__ == "__main__":
    main()
