"""How long `worklog diagnose` takes on large traces, made by repeating a real one, beside what else reads such files.

    python benchmarks/traces.py TRACE.json.gz --megabytes 100
    python benchmarks/traces.py EXPORT.sqlite --kernels 1000000

Each is measured in a process of its own: wall seconds, and peak resident memory above that of the imports. For JSON the
measure beside it is `json.loads` alone on the unpacked file; for SQLite, fetching the same columns row by row, and
`nsys stats` where nsys is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

MEASURE = """
import resource, sys, time
from pathlib import Path
{imports}
file, before = Path(sys.argv[1]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
{body}
print(time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
DIAGNOSE = MEASURE.format(imports="from worklog.diagnose import diagnose", body="diagnose(file)")
LOADS = MEASURE.format(imports="import json", body="json.loads(file.read_bytes())")
FETCH = MEASURE.format(
    imports="import sqlite3",
    body="""database = sqlite3.connect(file)
for table in ("KERNEL", "MEMCPY", "RUNTIME"):
    database.execute(f"SELECT * FROM CUPTI_ACTIVITY_KIND_{table}").fetchall()""",
)
STATS = ["nsys", "stats", "-q", "-r", "cuda_gpu_kern_sum,cuda_api_sum,nvtx_gpu_proj_sum"]


def repeat_json(source: Path, target: Path, size: int) -> None:
    """Copies of the events one after another in time, with correlation and external ids of their own."""
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


def measured(program: str, file: Path) -> tuple[float, float]:
    """(seconds, bytes), the better of two runs."""
    runs = []
    for _ in range(2):
        out = subprocess.run([sys.executable, "-c", program, str(file)], check=True, capture_output=True, text=True)
        runs.append(tuple(float(word) for word in out.stdout.split()))
    return min(runs)  # type: ignore[return-value]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--megabytes", type=int, default=100, help="of the JSON (1e6 bytes)")
    parser.add_argument("--kernels", type=int, default=1_000_000, help="of the SQLite export")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        as_json = asked.trace.name.removesuffix(".gz").endswith(".json")
        large = Path(folder) / ("large.json" if as_json else "large.sqlite")
        if as_json:
            repeat_json(asked.trace, large, asked.megabytes * 1_000_000)
        else:
            repeat_sqlite(asked.trace, large, asked.kernels)
        size = large.stat().st_size
        print(f"{asked.trace.name} repeated to {size / 1e6:.0f} MB")
        beside: dict[str, Any] = {"json.loads": LOADS} if as_json else {"sqlite3 fetchall": FETCH}
        seconds, memory = measured(DIAGNOSE, large)
        print(f"diagnose: {seconds:.2f} s, {memory / 1e9:.2f} GB, {memory / size:.2f} x the file")
        for name, program in beside.items():
            other, its_memory = measured(program, large)
            print(f"{name}: {other:.2f} s, {its_memory / 1e9:.2f} GB; diagnose takes {seconds / other:.2f} x its time")
        if not as_json and shutil.which("nsys"):
            start = time.perf_counter()
            subprocess.run([*STATS, str(large)], check=True, capture_output=True)
            other = time.perf_counter() - start
            print(f"nsys stats: {other:.2f} s; diagnose takes {seconds / other:.2f} x its time")


if __name__ == "__main__":
    main()
