"""Captures in a run's folder, as pages cite them."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import checkouts
import msgspec
import pytest

from worklog import record
from worklog.render import artifacts
from worklog.render.evidence import Library
from worklog.render.quantity import FILTERS, PageError, Quantity
from worklog.traces import nsys


@pytest.fixture
def run_folder(checkout: Path) -> Iterator[Path]:
    yield checkout / "reports/row_norms" / checkouts.run_id(checkout)
    artifacts._trace.cache_clear()


def keep(folder: Path, name: str) -> None:
    """List a file in the run's record."""
    old = record.load(folder)
    listed = [*old.artifacts, record.artifact(folder, folder / name)]
    record.save(msgspec.structs.replace(old, artifacts=listed), folder)


def export(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.executescript(
            """
            CREATE TABLE StringIds (id, value);
            INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, 'gemm');
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (100, 110, 16777217, 1, 1), (5100, 5110, 16777217, 2, 1);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, correlationId, globalPid, demangledName);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (200, 3200, 0, 1, 16777216, 2);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (6100, 7100, 0, 2, 16777216, 2);
            CREATE TABLE NVTX_EVENTS (start, end, text, globalTid);
            INSERT INTO NVTX_EVENTS VALUES (5000, 5200, 'fast', 16777217);
            """
        )


def test_nsys_export_whole_and_by_range(run_folder: Path) -> None:
    export(run_folder / "nsys.fast.sqlite")
    keep(run_folder, "nsys.fast.sqlite")
    library = Library(run_folder.parents[2], "row_norms")
    whole = library.evidence(run_folder.name, "nsys.fast.sqlite")
    assert FILTERS["us"](whole["devices"][0]["busy_ns"]) == "4.00 µs"
    assert FILTERS["percent"](whole["kernels"][0]["share"]) == "100 %"
    part = library.evidence(run_folder.name, "nsys.fast.sqlite", "fast")
    assert FILTERS["us"](part["devices"][0]["span_ns"]) == "2.00 µs"
    assert part["devices"][0]["busy_ns"].runs == {run_folder.name}
    with pytest.raises(PageError, match=r"^nsys\.fast\.sqlite: has no NVTX range 'slow'; its ranges: fast"):
        library.evidence(run_folder.name, "nsys.fast.sqlite", "slow")
    with pytest.raises(PageError, match=r"only a \.sqlite of nsys has NVTX ranges"):
        library.evidence(run_folder.name, "kernels.csv", "fast")


def test_a_file_is_read_once(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(run_folder / "nsys.fast.sqlite")
    keep(run_folder, "nsys.fast.sqlite")
    library, reads, read = Library(run_folder.parents[2], "row_norms"), [], nsys.read
    monkeypatch.setattr(nsys, "read", lambda file, name: reads.append(name) or read(file, name))
    found = [library.evidence(run_folder.name, "nsys.fast.sqlite")["kernels"][0]["count"] for _ in range(3)]
    assert (found, len(reads)) == ([2, 2, 2], 1)


def test_recorded_torch_trace_of_the_cpu(checkout: Path) -> None:
    (folder,) = (checkout / "reports/row_norms").glob("*-profile_torch-*")
    (name,) = [a.path for a in record.load(folder).artifacts if a.path.endswith(".timing.json.gz")]
    found = Library(checkout, "row_norms").evidence(folder.name, name)
    assert found["device"] is None
    assert all(row["self_cpu_ns"].dims == (1, 0, 0, 0) for row in found["operators"])
    assert found["operators"][0]["self_cpu_ns"] >= found["operators"][-1]["self_cpu_ns"] >= 0


def test_snapshot_gives_a_curve_with_units(run_folder: Path) -> None:
    event = {"action": "alloc", "addr": 1, "size": 2**20, "time_us": 5, "frames": []}
    content = {"segments": [], "device_traces": [[event, {**event, "action": "free_requested", "time_us": 1505}]]}
    (run_folder / "memory.fast.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    keep(run_folder, "memory.fast.json.gz")
    found = Library(run_folder.parents[2], "row_norms").evidence(run_folder.name, "memory.fast.json.gz")
    assert FILTERS["mib"](found["peak_bytes"]) == "1.00 MiB"
    assert [(FILTERS["ms"](at), FILTERS["mib"](n)) for at, n in found["timeline"]] == [
        ("0 ms", "0 MiB"),
        ("0 ms", "1.00 MiB"),
        ("1.50 ms", "0 MiB"),
    ]
    assert all(isinstance(n, Quantity) for point in found["timeline"] for n in point)


def test_other_json_is_taken_as_it_is_and_other_files_are_refused(run_folder: Path) -> None:
    (run_folder / "torch.json").write_text('{"total_ns": 3}')
    (run_folder / "notes.txt").write_text("x")
    (run_folder / "ncu.fast.all.ncu-rep").write_bytes(b"not a report")
    for name in ("torch.json", "notes.txt", "ncu.fast.all.ncu-rep"):
        keep(run_folder, name)
    library = Library(run_folder.parents[2], "row_norms")
    assert FILTERS["ns"](library.evidence(run_folder.name, "torch.json")["total_ns"]) == "3.00 ns"
    with pytest.raises(PageError, match=r"notes\.txt: evidence\(\) reads"):
        library.evidence(run_folder.name, "notes.txt")
    with pytest.raises(PageError, match=r"ncu\.fast\.all\.ncu-rep: ncu-report (finds|cannot)"):
        library.evidence(run_folder.name, "ncu.fast.all.ncu-rep")
