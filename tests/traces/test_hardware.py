"""The GPUs that a timeline names."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from worklog.traces.hardware import gpus


def test_nsys_by_the_number_in_the_process_and_not_where_processes_disagree(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)")
        database.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, ?)", [(0, "A100"), (1, "H200"), (2, "H200")])
        database.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)")
        rows = [(1, 0, 7), (2, 0, 8), (0, 1, 7), (1, 1, 8)]  # 0 is an H200 in both; 1 is an A100 in one, an H200 in one
        database.executemany("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (?, ?, ?)", rows)
    assert gpus(file) == {0: "H200"}


def test_torch_profiler_packed_or_not(tmp_path: Path) -> None:
    content = json.dumps({"deviceProperties": [{"id": 0, "name": "V100"}, {"id": 1, "name": "T4"}], "traceEvents": []})
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(content)
    packed.write_bytes(gzip.compress(content.encode()))
    assert gpus(plain) == gpus(packed) == {0: "V100", 1: "T4"}


@pytest.mark.parametrize(
    "devices", ['[{"id": 0, "na', '{"id": 0}', '[{"id": "0", "name": "x"}, {"id": 1}, 7]', "7", "[[[[", "nul"]
)
def test_a_head_that_tells_none(tmp_path: Path, devices: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(f'{{"traceEvents": [], "deviceProperties": {devices}')
    assert gpus(file) == {}
