"""Where the tables of an nsys export are: an SQLite file, or a folder with a Parquet file for each."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROWS = 1 << 15
"""Fetched at once, so that their text stays in the processor's caches."""
PARQUET = ".parquet"


class ExportError(Exception):
    """Why a table cannot be read, as the rest of a sentence."""


class Source(Protocol):
    name: str
    """What such an export is called."""

    def columns(self, table: str) -> set[str]:
        """Empty: there is no such table."""

    def count(self, table: str) -> int:
        """Rows of a table that is there."""

    def chunks(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Integer columns that are there, some rows at a time, in the table's order; -1 stands for NULL."""

    def texts(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of columns that are there, as they stand, in the table's order."""


class Sqlite:
    name = "SQLite export"

    def __init__(self, database: sqlite3.Connection) -> None:
        self.database, self.counted = database, dict[str, int]()
        database.text_factory = lambda text: text.decode(errors="replace")  # names may be of any bytes

    def columns(self, table: str) -> set[str]:
        return {row[1] for row in self.database.execute(f'PRAGMA table_info("{table}")')}

    def count(self, table: str) -> int:
        if table not in self.counted:  # SQLite reads the whole table for it
            self.counted[table] = self.database.execute(f'SELECT COUNT(*) FROM "{table}"').fetchone()[0]
        return self.counted[table]

    def chunks(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """As lists of numbers in one text, which cross from SQLite to NumPy more than twice as fast as cells do."""
        first, last = self.database.execute(f'SELECT MIN(rowid), MAX(rowid) FROM "{table}"').fetchone()
        if first is None:
            return
        lists = ", ".join(f'GROUP_CONCAT(COALESCE("{column}", -1))' for column in columns)
        query = f'SELECT COUNT(*), {lists} FROM "{table}" WHERE rowid BETWEEN ? AND ?'
        step = ROWS * max(1, (last - first + 1) // self.count(table))
        for at in range(first, last + 1, step):
            size, *texts = self.database.execute(query, (at, min(at + step - 1, last))).fetchone()
            chunk = {column: _numbers(text) for column, text in zip(columns, texts, strict=True)}
            if any(len(numbers) != size for numbers in chunk.values()):
                raise ExportError(f"table {table} holds something else than integers")
            if size:
                yield chunk

    def texts(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        picked = ", ".join(f'"{column}"' for column in columns)
        return self.database.execute(f'SELECT {picked} FROM "{table}" ORDER BY rowid')


def _numbers(text: Any) -> Any:
    """Integers between commas; none where it is something else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # what NumPy says where the text is no number
        try:
            return np.fromstring(text or "", dtype=np.int64, sep=",")
        except (DeprecationWarning, ValueError):
            return np.zeros(0, np.int64)


class Parquet:
    name = "Parquet export"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def columns(self, table: str) -> set[str]:
        return set(self._file(table).schema_arrow.names) if (self.folder / f"{table}{PARQUET}").is_file() else set()

    def count(self, table: str) -> int:
        return int(self._file(table).metadata.num_rows)

    def chunks(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        for batch in self._batches(table, columns):
            yield {column: _integers(batch.column(column), table) for column in columns}

    def texts(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        for batch in self._batches(table, columns):
            yield from zip(*(batch.column(column).to_pylist() for column in columns), strict=True)

    def _batches(self, table: str, columns: Sequence[str]) -> Iterator[Any]:
        """pyarrow says in many ways that a file is damaged."""
        batches = self._file(table).iter_batches(ROWS, columns=list(columns))
        while True:
            try:
                batch = next(batches, None)
            except (OSError, ValueError, ArithmeticError, MemoryError, NotImplementedError) as error:
                raise ExportError(f"{table}{PARQUET}: {_line(error)}") from error
            if batch is None:
                return
            if len(batch):
                yield batch

    def _file(self, table: str) -> Any:
        import pyarrow.parquet

        try:
            return pyarrow.parquet.ParquetFile(self.folder / f"{table}{PARQUET}")
        except (OSError, ValueError, ArithmeticError, MemoryError, NotImplementedError) as error:
            raise ExportError(f"{table}{PARQUET}: {_line(error)}") from error


def _integers(column: Any, table: str) -> Any:
    import pyarrow

    try:
        values = column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
        return values.cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ExportError(f"table {table} holds something else than integers") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
