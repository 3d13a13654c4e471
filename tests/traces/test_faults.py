"""Whatever stands in a file: tables whose accounting adds up, or ProblemError. A short run of fuzz.py."""

from __future__ import annotations

from pathlib import Path

import fuzz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.traces import chrome, kineto


@pytest.mark.parametrize("reader", fuzz.MAKERS)
def test_damaged_files_are_refused_or_add_up(tmp_path: Path, reader: str) -> None:
    count, taken = fuzz.run(reader, 150, tmp_path)
    assert count >= 150
    assert 0.1 < taken / count < 0.9


@settings(deadline=None)
@given(st.integers(0, 1_900_000_000_000_000_000), st.integers(0, 10**13))
def test_every_nanosecond_is_read_as_it_stands(tmp_path_factory: pytest.TempPathFactory, at: int, lasts: int) -> None:
    file = tmp_path_factory.getbasetemp() / "exact.json"
    written = [f"{ns // 1000}.{ns % 1000:03}" for ns in (at, lasts)]
    file.write_text(f'{{"traceEvents": [{{"ph": "X", "ts": {written[0]}, "dur": {written[1]}}}]}}')
    ((read,),) = chrome.load(file).batches()
    assert (read.start, read.end) == (at, at + lasts)
    assert kineto.nanoseconds([read.ts, read.ts, read.dur]).tolist() == [at, at, lasts]
