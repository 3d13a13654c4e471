"""Timelines written down activity by activity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from worklog.traces import schema
from worklog.traces.schema import ACTIVITY, CALL, FRAME, Trace

Work = tuple[int, int, int, int]
"""start, end, kind, row of its call or -1"""
Call = tuple[int, int, int]
"""start, end, kind"""


def trace(
    work: Sequence[Work],
    calls: Sequence[Call] = (),
    *,
    device: Sequence[int] = (),
    thread: Sequence[int] = (),
    graph: Sequence[int] = (),
    pageable: Sequence[int] = (),
) -> Trace:
    """All on device 0 and thread 0 unless `device`, `thread` say otherwise; `graph`: calls that launch a graph."""
    columns = np.array(work, dtype=np.int64).reshape(-1, 4).T
    called = np.array(calls, dtype=np.int64).reshape(-1, 3).T
    size, count = len(work), len(calls)
    return Trace(
        file=Path("hand made"),
        tool="nsys",
        tool_version=None,
        activities=schema.frame(
            ACTIVITY,
            start_ns=columns[0],
            end_ns=columns[1],
            device=np.array(device or [0] * size, dtype=np.int64),
            kind=columns[2],
            name=schema.categories(np.arange(size), [f"kernel_{at}" for at in range(size)]),
            call=columns[3],
            pageable=np.array(pageable or [-1] * size, dtype=np.int8),
        ),
        calls=schema.frame(
            CALL,
            start_ns=called[0],
            end_ns=called[1],
            thread=np.array(thread or [0] * count, dtype=np.int64),
            process=np.zeros(count, np.int64),
            name=schema.categories(np.arange(count), [f"call_{at}" for at in range(count)]),
            kind=called[2],
            graph=np.isin(np.arange(count), graph),
        ),
        frames=schema.frame(FRAME, name=schema.categories(np.zeros(0, np.int64), [])),
    )
