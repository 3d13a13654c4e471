"""Readers against damaged files: a valid one with parts deleted, replaced, doubled, exchanged, or with other bytes.

    python tests/traces/fuzz.py kineto --inputs 100000

Whatever comes out of it, a reader raises ProblemError in one line or gives tables whose accounting adds up. Every
hundredth input goes through the whole diagnosis. test_faults.py runs some hundred inputs of each.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import pickle
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valid_files import KINETO, SNAPSHOT, TABLES

from worklog.analysis import timeline as accounting
from worklog.diagnose import diagnose
from worklog.problem import ProblemError
from worklog.traces import memory, timeline
from worklog.traces.schema import Selection, Trace

WHOLE = 100
ODD: tuple[Any, ...] = (None, True, -1, 0, 1, 7, 2**31, 2**53 + 1, 2**62, -(2**63), 2**63, 2**70, 0.5, -1e300, 1e18)
ODD += (
    "",
    "7",
    "nan",
    "1e999",
    "stream 7",
    "x" * 300,
    "<b>\x1b[2J\n",
    "nn.Module: A_0",
    "ProfilerStep#1",
    [],
    [1, 2, 3],
)
ODD += ([[]], {}, {"args": 1}, [None, None, None], "\ud800")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value stands in nested lists and dictionaries."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def edit(tree: Any, chance: random.Random) -> Any:
    """One to four parts deleted, replaced, doubled or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 4)):
        every = places(tree)
        if not every:
            break
        *path, last = chance.choice(every)
        at = tree
        for key in path:
            at = at[key]
        how = chance.randrange(5)
        if how == 0:
            del at[last]
        elif how == 1 and isinstance(at, list):
            at.insert(chance.randrange(len(at) + 1), copy.deepcopy(at[last]))
        elif how == 2:
            other = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at[last], at[other] = at[other], at[last]
        elif how == 3 and isinstance(at, dict):
            at[chance.choice(("x", "ts", "cat", "name", "args", "blocks"))] = at.pop(last)
        else:
            at[last] = copy.deepcopy(chance.choice(ODD))
    return tree


def bend(raw: bytes, chance: random.Random) -> bytes:
    """Some bytes deleted, replaced, doubled or put in; or the end cut off."""
    text = bytearray(raw)
    for _ in range(chance.randint(1, 3)):
        at, size = chance.randrange(len(text) + 1), chance.choice((1, 2, 8, 40))
        how = chance.randrange(5)
        if how == 0:
            del text[at : at + size]
        elif how == 1:
            text[at : at + size] = chance.randbytes(size)
        elif how == 2:
            text[at:at] = text[at : at + size]
        elif how == 3:
            text[at:at] = chance.choice((b"[" * 2000, b'"', b"9" * 400, b"\0", b"-", b"\xff\xfe", b",", b"1e9999"))
        else:
            del text[at:]
    return bytes(text)


def text_file(file: Path, tree: Any, chance: random.Random, dumps: Callable[[Any], bytes]) -> Path:
    raw = dumps(tree) if chance.random() < 0.2 else dumps(edit(tree, chance))
    if chance.random() < 0.3:
        raw = bend(raw, chance)
    if chance.random() < 0.1:
        raw = gzip.compress(raw, 1)
        raw = bend(raw, chance) if chance.random() < 0.5 else raw
    file.write_bytes(raw)
    return file


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def kineto(folder: Path, chance: random.Random) -> Path:
    return text_file(folder / "t.json", chance.choice(KINETO), chance, as_json)


def memory_json(folder: Path, chance: random.Random) -> Path:
    return text_file(folder / "m.json", SNAPSHOT, chance, as_json)


def memory_pickle(folder: Path, chance: random.Random) -> Path:
    return text_file(folder / "m.pickle", SNAPSHOT, chance, lambda tree: pickle.dumps(tree, chance.randint(2, 5)))


def database(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        for name, (columns, rows) in TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            connection.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", rows)


def sqlite(folder: Path, chance: random.Random) -> Path:
    template, file = folder / "template.sqlite", folder / "t.sqlite"
    if not template.exists():
        database(template)
    if chance.random() < 0.3:
        file.write_bytes(bend(template.read_bytes(), chance))
        return file
    shutil.copyfile(template, file)
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        for _ in range(chance.randint(1, 4)):
            name = chance.choice(list(TABLES))
            column = chance.choice(TABLES[name][0])
            value = chance.choice(
                [odd for odd in ODD if not isinstance(odd, (list, dict)) and odd != "\ud800"] + [b"\0"]
            )
            row = f"rowid = {chance.randint(1, 5)}"
            change: tuple[str, tuple[Any, ...]] = chance.choice(
                (
                    (f"UPDATE {name} SET {column} = ? WHERE {row}", (value,)),
                    (f"UPDATE {name} SET {column} = ?", (value,)),
                    (f"UPDATE {name} SET rowid = {chance.choice((0, -5, 2**40, 2**62))} WHERE {row}", ()),
                    (f"DELETE FROM {name} WHERE {row}", ()),
                    (f"INSERT INTO {name} SELECT * FROM {name}", ()),
                    (f"ALTER TABLE {name} DROP COLUMN {column}", ()),
                    (f"ALTER TABLE {name} RENAME COLUMN {column} TO other", ()),
                    (f"DROP TABLE {name}", ()),
                )
            )
            with suppress(sqlite3.Error, OverflowError):
                connection.execute(*change)
    return file


def parquet(folder: Path, chance: random.Random) -> Path:
    made = folder / "t_pqtdir"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    bent = chance.choice(list(TABLES))
    for name, (columns, rows) in TABLES.items():
        table = pa.table({column: [row[at] for row in rows] for at, column in enumerate(columns)})
        if name == bent and chance.random() < 0.7:
            table = alter(table, chance)
        if table is None:
            continue
        with suppress(pa.ArrowException):
            pq.write_table(table, made / f"{name}.parquet")
    if chance.random() < 0.5:
        file = made / f"{bent}.parquet"
        if file.exists():
            file.write_bytes(bend(file.read_bytes(), chance))
    return made


def alter(table: Any, chance: random.Random) -> Any:
    column = chance.randrange(table.num_columns)
    name, size = table.column_names[column], table.num_rows
    values = chance.choice(
        (
            pa.array(["x"] * size), pa.array([None] * size), pa.array([2**62] * size), pa.array([-(2**63)] * size),
            pa.array([0.5] * size), pa.array([2**63] * size, pa.uint64()),
            pa.array([b"\0"] * size), pa.array([True] * size),
            pa.array([[1]] * size), pa.array(["7"] * size).dictionary_encode(),
        )
    )  # fmt: skip
    return chance.choice(
        (
            table.set_column(column, name, values),
            table.drop_columns([name]),
            table.rename_columns(["other" if one == name else one for one in table.column_names]),
            table.slice(0, 0),
            pa.concat_tables([table, table]),
            None,
        )
    )


MAKERS: dict[str, Callable[[Path, random.Random], Path]] = {
    "kineto": kineto,
    "sqlite": sqlite,
    "parquet": parquet,
    "memory_json": memory_json,
    "memory_pickle": memory_pickle,
}


def check(file: Path, reader: str, whole: bool) -> bool:
    """Whether the reader took it. Raises what no reader may, and AssertionError for numbers that do not add up."""
    try:
        if whole:
            json.dumps(diagnose(file))
        if reader.startswith("memory"):
            found = memory.read(file)
            assert sum(row["bytes"] for row in found["largest"]) == found["peak_bytes"]
            assert len(found["timeline"]) <= memory.POINTS
            return True
        trace = timeline.load(file, geometry=True)
        add_up(trace, trace.select())
        with suppress(ProblemError):  # the range may be gone
            add_up(trace, trace.select("ProfilerStep" if reader == "kineto" else "step"))
        return True
    except ProblemError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from error
        return False


def add_up(trace: Trace, chosen: Selection) -> None:
    for number, window in chosen.windows.items():
        line = accounting.account(trace, number, window)
        assert sum(line.accounting_ns.values()) == line.span_ns == window.length
        assert min(line.accounting_ns.values()) >= 0
        assert 0 <= line.busy_ns <= line.span_ns


def run(reader: str, inputs: int, folder: Path) -> tuple[int, int]:
    """(inputs, of them taken). Raises at the first that fails, with the number that makes it again."""
    count = taken = 0

    @settings(max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64 - 1))
    def attempt(number: int) -> None:
        nonlocal count, taken
        count += 1
        taken += check(MAKERS[reader](folder, random.Random(number)), reader, count % WHOLE == 0)

    attempt()
    return count, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=MAKERS)
    parser.add_argument("--inputs", type=int, default=100_000)
    asked = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        count, taken = run(asked.reader, asked.inputs, Path(folder))
    print(
        f"{asked.reader}: {count} inputs in {time.perf_counter() - start:.0f} s, {taken} read, {count - taken} refused"
    )


if __name__ == "__main__":
    main()
