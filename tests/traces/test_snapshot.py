"""Snapshots in the layout of torch.cuda.memory._snapshot(), as worklog.capture writes them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from worklog.capture.memory_snapshot import encode
from worklog.problem import ProblemError
from worklog.traces import memory

GELU = [{"filename": "nn/gelu.py", "line": 9, "name": "forward"}, {"filename": "model.py", "line": 3, "name": "block"}]
DEEP = [{"filename": "??", "line": 0, "name": "c10::alloc"}] + [
    {"filename": f"deep{n}.py", "line": n, "name": "f"} for n in range(9)
]


def alloc(addr: int, size: int, time_us: int, frames: list[dict[str, Any]] = GELU) -> dict[str, Any]:
    return {"action": "alloc", "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": frames}


def free(addr: int, size: int, time_us: int) -> list[dict[str, Any]]:
    """The allocator reports a free twice; the second may come late, after work on another stream."""
    return [
        {"action": "free_requested", "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": []},
        {"action": "free_completed", "addr": addr, "size": size, "stream": 0, "time_us": time_us + 1, "frames": []},
    ]


def block(address: int, size: int, state: str, asked: int | None = None) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": asked or size, "state": state, "frames": []}


EVENTS = [
    {"action": "segment_alloc", "addr": 0, "size": 4096, "stream": 0, "time_us": 50, "frames": []},
    alloc(2000, 300, 100),
    alloc(3000, 200, 110),
    *free(1000, 64, 120),  # from before the history
    alloc(4000, 500, 130, DEEP),  # 1000 + 64 + 300 + 200 - 64 + 500: the peak
    *free(2000, 300, 140),
    alloc(2000, 100, 150),
    *free(4000, 500, 160),
]
SEGMENTS = [
    {
        "device": 0,
        "address": 500,
        "total_size": 8192,
        "blocks": [
            block(500, 1024, "active_allocated", 1000),  # weights
            block(1524, 476, "inactive"),
            block(2000, 512, "active_allocated", 100),
            block(3000, 512, "active_allocated", 200),
            block(4000, 512, "active_pending_free", 500),
        ],
    },
    {"device": 1, "address": 99, "total_size": 512, "blocks": [block(99, 512, "active_allocated")]},
]


def snapshot(folder: Path, events: list[dict[str, Any]], segments: list[dict[str, Any]]) -> Path:
    file = folder / "memory.net.json.gz"
    file.write_bytes(encode({"segments": segments, "device_traces": [events, []]}))
    return file


def test_peak_baseline_and_curve(tmp_path: Path) -> None:
    found = memory.read(snapshot(tmp_path, EVENTS, SEGMENTS))
    assert found["baseline_bytes"] == 1000 + 64
    assert found["peak_bytes"] == 2000
    assert found["timeline"] == [
        [0, 1064], [0, 1364], [10, 1564], [20, 1500], [30, 2000], [40, 1700], [50, 1800], [60, 1300],
    ]  # fmt: skip


def test_blocks_alive_at_the_peak_by_stack(tmp_path: Path) -> None:
    found = memory.read(snapshot(tmp_path, EVENTS, SEGMENTS))
    assert found["largest"] == [
        {"bytes": 1000, "count": 1, "frames": []},
        {"bytes": 500, "count": 1, "frames": [f"deep{n}.py:{n} f" for n in range(6)]},
        {"bytes": 500, "count": 2, "frames": ["nn/gelu.py:9 forward", "model.py:3 block"]},
    ]
    assert sum(row["bytes"] for row in found["largest"]) == found["peak_bytes"]


def test_temporaries_of_the_peak_and_what_the_allocator_holds_at_the_end(tmp_path: Path) -> None:
    found = memory.read(snapshot(tmp_path, EVENTS, SEGMENTS))
    # 200 are still there at the end, 1000 were there before; 2000 holds another block by then.
    assert found["temporaries"] == [
        {"bytes": 500, "count": 1, "frames": [f"deep{n}.py:{n} f" for n in range(6)], "longest_us": 30},
        {"bytes": 300, "count": 1, "frames": ["nn/gelu.py:9 forward", "model.py:3 block"], "longest_us": 40},
    ]
    assert (found["reserved_bytes"], found["unused_bytes"]) == (1024 + 476 + 3 * 512, 476)


def test_history_that_only_frees_has_its_peak_at_the_start(tmp_path: Path) -> None:
    found = memory.read(snapshot(tmp_path, free(7, 10, 5), []))
    assert (found["baseline_bytes"], found["peak_bytes"]) == (10, 10)
    assert found["largest"] == [{"bytes": 10, "count": 1, "frames": []}]


def test_peak_at_the_very_end(tmp_path: Path) -> None:
    found = memory.read(snapshot(tmp_path, [alloc(1, 5, 0), alloc(2, 6, 1)], []))
    assert found["peak_bytes"] == sum(row["bytes"] for row in found["largest"]) == 11


def test_long_history_keeps_its_extremes_in_400_points(tmp_path: Path) -> None:
    source = random.Random(0)
    events: list[dict[str, Any]] = []
    alive: list[tuple[int, int]] = []
    level, levels = 0, [0]
    for at in range(5000):
        if alive and source.random() < 0.5:
            addr, size = alive.pop(source.randrange(len(alive)))
            events.append(free(addr, size, at)[0])
            level -= size
        else:
            size = source.choice((1, 10, 1000, 100_000 if at == 2501 else 50))
            events.append(alloc(at + 1, size, at))
            alive.append((at + 1, size))
            level += size
        levels.append(level)
    found = memory.read(snapshot(tmp_path, events, []))
    values = [n for _, n in found["timeline"]]
    assert 300 < len(values) <= 400
    assert max(values) == found["peak_bytes"] == max(levels)
    assert min(values) == min(levels)
    assert (values[0], values[-1]) == (0, levels[-1])
    assert all(levels[0 if i == 0 else at + 1] == n for i, (at, n) in enumerate(found["timeline"]))
    for stretch in range(0, 5000, 500):  # not only the extremes of the whole
        kept = [n for at, n in found["timeline"][1:] if stretch <= at < stretch + 500]
        assert abs(max(kept) - max(levels[stretch + 1 : stretch + 501])) <= 1050


def test_files_that_are_no_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "memory.x.json"
    for content in ("{", "{}", '{"device_traces": [[{}]], "segments": []}', "[]"):
        file.write_text(content)
        with pytest.raises(ProblemError, match=r"memory\.x\.json: is no snapshot"):
            memory.read(file)
