"""The same capture as SQLite, as a folder of Parquet files and as a report gives the same tables."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from worklog import cli
from worklog.diagnose import diagnose
from worklog.problem import ProblemError
from worklog.traces import files, nsys, source, timeline

RECORDED = sorted((Path(__file__).resolve().parents[2] / "reports").glob("*/*/nsys.*.sqlite"))
each_recorded = pytest.mark.parametrize("recorded", RECORDED, ids=lambda file: file.name)


def parquet(database: Path, folder: Path, narrow: bool = False) -> Path:
    """As `nsys export --type parquetdir` lays tables out: TABLE.parquet in NAME_pqtdir, and only those with rows."""
    made = folder / f"{database.stem}_pqtdir"
    made.mkdir()
    with closing(sqlite3.connect(database)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            declared = {row[1]: row[2] for row in connection.execute(f'PRAGMA table_info("{name}")')}
            rows = connection.execute(f'SELECT * FROM "{name}"').fetchall()
            if not rows:
                continue
            types = {"INTEGER": pa.int64(), "TEXT": pa.string(), "REAL": pa.float64()}
            columns = {}
            for at, (column, kind) in enumerate(declared.items()):
                values = pa.array([row[at] for row in rows], type=types[kind])
                if narrow and column in ("deviceId", "streamId", "nameId"):
                    values = values.cast(pa.uint32())
                if narrow and column == "copyKind":
                    values = values.dictionary_encode()
                columns[column] = values
            pq.write_table(pa.table(columns), made / f"{name}.parquet", row_group_size=100)
    return made


def same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one, other, check_categorical=False)


@each_recorded
@pytest.mark.parametrize("narrow", [False, True])
def test_parquet_gives_the_tables_that_sqlite_gives(tmp_path: Path, recorded: Path, narrow: bool) -> None:
    folder = parquet(recorded, tmp_path, narrow)
    assert files.kind(folder) == "nsys"
    one, other = timeline.load(recorded, geometry=True), timeline.load(folder, geometry=True)
    assert len(one.activities) > 500
    assert len(one.ranges) == 1
    same(one.activities, other.activities)
    same(one.calls, other.calls)
    same(one.frames, other.frames)
    assert one.tool_version == other.tool_version
    assert nsys.read(recorded) == nsys.read(folder)
    known, found = diagnose(recorded), diagnose(folder)
    assert known.pop("source")["sha256"] != found.pop("source")["sha256"]
    assert known == found


def test_a_folder_has_a_sum_of_its_own_that_every_file_changes(tmp_path: Path) -> None:
    folder = parquet(RECORDED[0], tmp_path)
    before = files.sha256(folder)
    with (folder / "StringIds.parquet").open("ab") as stream:
        stream.write(b"\0")
    assert files.sha256(folder) != before


@pytest.mark.parametrize("damage", ["cut", "zeros", "text"])
def test_a_damaged_parquet_file_is_one_sentence(tmp_path: Path, damage: str) -> None:
    folder = parquet(RECORDED[0], tmp_path)
    file = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    raw = file.read_bytes()
    if damage == "text":
        table = pq.read_table(file)
        at = table.column_names.index("correlationId")
        table = table.set_column(at, "correlationId", pa.array(["first"] * len(table)))
        pq.write_table(table, file)
    else:
        file.write_bytes(raw[:-100] if damage == "cut" else raw[:200] + bytes(600) + raw[800:])
    with pytest.raises(
        ProblemError, match=r"_pqtdir: is no Parquet export of nsys \(.*CUPTI_ACTIVITY_KIND_KERNEL"
    ) as said:
        timeline.load(folder)
    assert "\n" not in str(said.value)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").touch()
    with pytest.raises(
        ProblemError, match="is a folder without the tables that `nsys export --type parquetdir` leaves"
    ):
        diagnose(tmp_path)


def test_small_chunks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parquet(RECORDED[0], tmp_path)
    one, other = timeline.load(RECORDED[0]), timeline.load(folder)
    monkeypatch.setattr(source, "ROWS", 7)
    same(one.activities, timeline.load(RECORDED[0]).activities)
    same(other.activities, timeline.load(folder).activities)


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """exporter(body): a program that stands where nsys would, and answers to `nsys export`; its words are kept."""

    def make(body: str) -> Path:
        script = tmp_path / "nsys"
        script.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/asked\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("WORKLOG_NSYS", str(script))
        return tmp_path / "asked"

    return make


def report(folder: Path) -> Path:
    """What stands in for a report is the SQLite export that nsys would make of it, with a variable of the program."""
    file = folder / "train.nsys-rep"
    shutil.copy(RECORDED[0], file)
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'API_TOKEN=hunter2')")
        every = "\0".join(("TERM=xterm", "API_TOKEN=hunter2", "HOME=/root", ""))
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(10_001, every), (10_002, "PATH=/hunter2")])
    return file


COPY = 'for word in "$@"; do case "$word" in --output=*) made="${word#--output=}";; *) given="$word";; esac; done\n'


def test_a_report_is_exported_and_nothing_of_the_export_stays(tmp_path: Path, exporter: Callable[[str], Path]) -> None:
    asked, file = exporter(COPY + 'cp "$given" "$made"'), report(tmp_path)
    before = set(tmp_path.iterdir())
    same(timeline.load(file).activities, timeline.load(RECORDED[0]).activities)
    assert asked.read_text().split()[:2] == ["export", "--type=sqlite"]
    with nsys.exported(file) as made:
        assert b"hunter2" not in made.read_bytes()
        kept = made
    assert not kept.exists()
    assert set(tmp_path.iterdir()) - before == {asked}
    assert diagnose(file)["devices"] == diagnose(RECORDED[0])["devices"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'The report file is corrupt'; exit 1", "nsys export ended with 1: The report file is corrupt"),
        ("exit 0", "nsys wrote no report.sqlite"),
        (COPY + 'echo no database > "$made"', "nsys's export, cannot be read or rewritten"),
    ],
)
def test_a_report_that_nsys_cannot_read(
    tmp_path: Path, exporter: Callable[[str], Path], body: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    exporter(body)
    file = report(tmp_path)
    monkeypatch.setattr("sys.argv", ["worklog", "diagnose", str(file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    _, err = capfd.readouterr()
    assert left.value.code == 2
    assert err.startswith(f"worklog: {file}: ")
    assert said in err
    assert err.count("\n") == 1


def test_without_nsys_the_sentence_says_how_to_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKLOG_NSYS", os.devnull)
    with pytest.raises(ProblemError, match=r"only nsys reads this.*`nsys export --type sqlite train\.nsys-rep`"):
        diagnose(report(tmp_path))
