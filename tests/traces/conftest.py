"""An export of nsys, made of the tables that a test names."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from nsys_builder import META, STRINGS, Rows


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """export(KERNEL=(schema, rows), ...): only tables that are named exist, as with nsys."""

    def make(**tables: tuple[str, Rows]) -> Path:
        file = tmp_path / f"nsys.{len(list(tmp_path.iterdir()))}.sqlite"
        everything: dict[str, tuple[str, Rows]] = {
            "StringIds": ("id INTEGER, value TEXT", STRINGS.items()),
            "META_DATA_EXPORT": (
                META,
                [("EXPORT_SCHEMA_VERSION", "3.25.0"), ("EXPORT_PRODUCT_VERSION", "2026.2.1.7")],
            ),
        }
        for name, table in tables.items():
            activity = name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "GRAPH_TRACE")
            everything[f"CUPTI_ACTIVITY_KIND_{name}" if activity else name] = table
        with closing(sqlite3.connect(file)) as database, database:
            for name, (schema, rows) in everything.items():
                database.execute(f"CREATE TABLE {name} ({schema})")
                for row in rows:
                    database.execute(f"INSERT INTO {name} VALUES ({', '.join('?' * len(row))})", row)
        return file

    return make
