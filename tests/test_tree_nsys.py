"""`worklog tree` of an nsys export with the ranges of torch's emit_nvtx, a CUDA graph, and start/end ranges."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from worklog.analysis.views import tree
from worklog.render.tree import report

PID = 0x0100_0000_2A00_0000
MAIN, AUTOGRAD = PID | 42, PID | 43
PUSH_POP, START_END = 59, 60
STRINGS = {1: "cudaLaunchKernel_v7000", 2: "cudaGraphLaunch_v10000", 10: "gemm", 11: "dgrad", 12: "fused", 20: "layer0"}
RANGES: list[tuple[Any, ...]] = [  # start, end, eventType, text, textId, globalTid
    (0, 5000, START_END, "everything", None, MAIN),
    (100, 400, PUSH_POP, None, 20, MAIN),
    (110, 390, PUSH_POP, "aten::linear, seq = 3, op_id = 8, sizes = [[8, 64], [64, 64], [64]]", None, MAIN),
    (120, 380, PUSH_POP, "aten::addmm, seq = 3, op_id = 9, sizes = [[64], [8, 64], [64, 64]]", None, MAIN),
    (600, 900, PUSH_POP, "autograd::engine::evaluate_function: AddmmBackward0, op_id = 20", None, AUTOGRAD),
    (610, 890, PUSH_POP, "AddmmBackward0, seq = 3, op_id = 21, sizes = [[8, 64]]", None, AUTOGRAD),
    (620, 800, PUSH_POP, "aten::mm, op_id = 22, sizes = [[64, 8], [8, 64]], input_op_ids = [(21, 0)]", None, AUTOGRAD),
]
CALLS = [  # start, end, globalTid, correlationId, nameId
    (200, 210, MAIN, 1, 1),
    (700, 710, AUTOGRAD, 2, 1),
    (1000, 1010, MAIN, 3, 2),
]
KERNELS = [  # start, end, deviceId, streamId, correlationId, globalPid, demangledName
    (300, 400, 0, 7, 1, PID, 10),
    (750, 950, 0, 7, 2, PID, 11),
    (1100, 1150, 0, 7, 3, PID, 12),
    (1150, 1160, 0, 7, 3, PID, 12),
]

WORK = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    file = tmp_path / "nsys.step.sqlite"
    tables: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
        "StringIds": ("id INTEGER, value TEXT", list(STRINGS.items())),
        "NVTX_EVENTS": (
            "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER",
            RANGES,
        ),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER",
            CALLS,
        ),
        "CUPTI_ACTIVITY_KIND_KERNEL": (f"{WORK}, demangledName INTEGER", KERNELS),
    }
    with closing(sqlite3.connect(file)) as database, database:
        for name, (schema, rows) in tables.items():
            database.execute(f"CREATE TABLE {name} ({schema})")
            database.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    return file


def shown(found: dict[str, Any]) -> str:
    console = Console(width=120, record=True, quiet=False, file=None, highlight=False)
    with console.capture() as text:
        console.print(report(found, 120))
    return text.get()


def chain(node: dict[str, Any]) -> list[tuple[str, str, int]]:
    """The most costly path: (kind, name, inclusive kernel_ns)."""
    found = []
    while node["children"]:
        node = node["children"][0]
        found.append((node["kind"], node["name"], node["inclusive"]["kernel_ns"]))
    return found


def test_the_backward_thread_joins_the_range_of_its_forward_operator(export: Path) -> None:
    found = tree(export, min_share=0)
    layer, graph = found["tree"]["children"]
    assert (layer["kind"], layer["name"], layer["inclusive"]["kernel_ns"]) == ("range", "layer0", 300)
    assert [(node["kind"], node["name"]) for node in layer["children"]] == [
        ("backward", "AddmmBackward0"),
        ("operator", "aten::linear"),
    ]
    backward, forward = layer["children"]
    assert chain(backward) == [
        ("operator", "aten::mm", 200),
        ("call", "cudaLaunchKernel", 200),
        ("kernel", "dgrad", 200),
    ]
    assert [name for _, name, _ in chain(forward)] == ["aten::addmm", "cudaLaunchKernel", "gemm"]
    assert (graph["kind"], graph["name"]) == ("call", "cudaGraphLaunch")
    assert (found["coverage"]["backward_operators"], found["coverage"]["backward_operators_joined"]) == (1, 1)
    text = shown(found)
    assert "AddmmBackward0 (backward) → aten::mm → cudaLaunchKernel → dgrad" in text
    assert "the trace does not say which operators put them there" in text


def test_a_range_that_another_thread_may_close_selects_but_is_in_no_path(export: Path) -> None:
    found = tree(export, range_name="everything", min_share=0)
    assert found["total"]["kernel_ns"] == 100 + 200 + 60
    assert {node["name"] for node in found["tree"]["children"]} == {"layer0", "cudaGraphLaunch"}


def test_time_on_the_host_is_that_of_the_ranges_of_operators(export: Path) -> None:
    found = tree(export, metric="cpu", min_share=0)
    assert found["total"]["cpu_ns"] == (390 - 110) + (900 - 600)
    flat = {node["name"]: node for node in tree(export, "flat", "cpu", min_share=0)["tables"]["operators"]}
    assert {name: node["own"]["cpu_ns"] for name, node in flat.items()} == {
        "aten::linear": 280 - 260,
        "aten::addmm": 260,
        "AddmmBackward0": 300 - 180,
        "aten::mm": 180,
    }


def test_replays_traced_as_one_piece_and_launches_without_a_row_are_said(export: Path) -> None:
    with closing(sqlite3.connect(export)) as database, database:
        database.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE correlationId = 3")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (2000, 2010, ?, 9, 1)", (MAIN,))
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({WORK})")
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1100, 1160, 0, 7, 3, ?)", (PID,))
    found = tree(export, min_share=0)
    assert found["total"]["kernel_ns"] == 300
    assert found["total"]["launches"] == 4
    assert found["coverage"]["graph_replays_as_one_piece"] == found["coverage"]["launches_without_activity"] == 1
    text = shown(found)
    assert "1 replays of CUDA graphs were traced as one piece: their kernels are not here." in text
    assert "1 launches have no row of what they launched." in text
