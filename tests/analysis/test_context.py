"""Where in the source a call was made: frames against a slow search, places by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import trace
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.analysis.context import contexts, place
from worklog.analysis.labels import KINDS, labels
from worklog.analysis.nesting import ROUNDING_NS, STEPS, Nesting, compress, levels
from worklog.traces import schema
from worklog.traces.schema import ANNOTATION, FRAME, LAUNCH, MODULE, OPERATOR, PYTHON, SPAN, Trace

Frame = tuple[int, int, int, int, str, int, int]
"""start, end, thread, kind, name, sequence, forward_thread"""


def frames(rows: Sequence[Frame]) -> pd.DataFrame:
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 7
    names = ("start_ns", "end_ns", "thread", "kind", "name", "sequence", "forward_thread")
    values = dict(zip(names, columns, strict=True)) | {"process": np.zeros(len(rows), np.int64)}
    values["name"] = schema.categories(np.arange(len(rows)), list(values["name"]))
    return schema.frame(FRAME, **values)


def with_frames(t: Trace, rows: Sequence[Frame]) -> Trace:
    return dataclasses.replace(t, frames=frames(rows))


def parents(rows: Sequence[Frame]) -> list[int]:
    nesting = Nesting(frames(rows))
    return nesting.parent(np.arange(len(nesting.row))).tolist()


def plain(start: int, end: int, kind: int, name: str, thread: int = 0) -> Frame:
    return start, end, thread, kind, name, -1, -1


FORWARD = [
    plain(0, 1000, PYTHON, "train.py(30): main"),
    plain(10, 900, ANNOTATION, "ProfilerStep#4"),
    plain(100, 300, MODULE, "nn.Module: Net_0"),
    plain(105, 299, PYTHON, "torch/nn/modules/module.py(1782): _call_impl"),
    plain(110, 298, PYTHON, "net.py(16): forward"),
    plain(120, 200, MODULE, "nn.Module: Linear_7"),
    plain(125, 199, PYTHON, "<built-in function linear>"),
    (130, 160, 0, OPERATOR, "aten::linear", 4, 0),
    (131, 140, 0, OPERATOR, "aten::t", 4, 0),
    (141, 159, 0, OPERATOR, "aten::addmm", 5, 0),
]
BACKWARD = [
    (500, 600, 9, OPERATOR, "autograd::engine::evaluate_function: AddmmBackward0", 5, 1),
    (510, 590, 9, OPERATOR, "AddmmBackward0", 5, 1),
    (520, 530, 9, OPERATOR, "aten::mm", -1, -1),
    (610, 620, 9, OPERATOR, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", -1, 1),
]


def launching(*at: tuple[int, int]) -> Trace:
    """A call of 2 ns for each (start, thread)."""
    calls = [(start, start + 2, LAUNCH) for start, _ in at]
    return with_frames(trace([], calls, thread=[thread for _, thread in at]), [*FORWARD, *BACKWARD])


def test_place_names_module_line_and_outermost_operator() -> None:
    assert place(launching((145, 0)), [0]) == ["Net.Linear, net.py:16 forward, aten::linear"]
    assert place(launching((250, 0)), [0]) == ["Net, net.py:16 forward"]
    assert place(launching((400, 0)), [0]) == ["train.py:30 main"]
    assert place(launching((1200, 0)), [0]) == []  # after all frames
    assert place(launching((145, 3)), [0]) == []  # another thread


def test_place_of_backward_work_is_that_of_its_forward_operator() -> None:
    t = launching((525, 9), (615, 9))
    assert place(t, [0]) == ["Net.Linear, net.py:16 forward, AddmmBackward0 (backward)"]
    assert place(t, [1]) == ["torch::autograd::AccumulateGrad (backward)"]
    assert contexts(t).backward == (1, 1)  # AccumulateGrad has no forward operator


def test_a_forward_operator_began_before_its_backward_one() -> None:
    """A number that a clock of zeros, or another file, made equal must not hang an operator below itself."""
    rows = [
        plain(1, 2, PYTHON, "a.py(1): f"),
        (10, 50, 0, OPERATOR, "AddmmBackward0", 5, 1),
        (10, 20, 0, OPERATOR, "aten::addmm", 5, 0),
    ]
    t = with_frames(trace([], [(15, 16, LAUNCH)]), rows)
    assert contexts(t).backward == (1, 0)
    assert place(t, [0]) == ["AddmmBackward0 (backward)"]


def test_forward_threads_are_told_apart_by_the_numbers_that_they_hold() -> None:
    """Numbers are counted by thread: both have a 1. Thread 20 alone has what autograd's thread 2 asks for."""
    rows = [
        plain(0, 90, ANNOTATION, "first", 10),
        (1, 5, 10, OPERATOR, "aten::a", 1, 0),
        plain(0, 90, ANNOTATION, "second", 20),
        (1, 5, 20, OPERATOR, "aten::b", 1, 0),
        (6, 9, 20, OPERATOR, "aten::c", 2, 0),
        (100, 110, 30, OPERATOR, "BBackward0", 1, 2),
        (120, 130, 30, OPERATOR, "CBackward0", 2, 2),
    ]
    t = with_frames(trace([], [(105, 106, LAUNCH), (125, 126, LAUNCH)], thread=[30, 30]), rows)
    assert place(t, [0]) == ["second, BBackward0 (backward)"]
    assert place(t, [1]) == ["second, CBackward0 (backward)"]
    unclear = with_frames(t, rows[:-1])  # either thread may have made it
    assert contexts(unclear).backward == (1, 0)
    assert place(unclear, [0]) == ["BBackward0 (backward)"]


def test_numbers_of_two_processes_are_two() -> None:
    rows = [
        plain(0, 90, ANNOTATION, "rank 0", 10),
        plain(1, 5, ANNOTATION, "aten::a, seq = 1, op_id = 1", 10),
        plain(50, 60, ANNOTATION, "ABackward0, seq = 1, op_id = 2", 10),
        plain(0, 90, ANNOTATION, "rank 1", 20),
        plain(1, 5, ANNOTATION, "aten::a, seq = 1, op_id = 1", 20),
        plain(50, 60, ANNOTATION, "ABackward0, seq = 1, op_id = 2", 20),
    ]
    t = with_frames(trace([], [(55, 56, LAUNCH)] * 2, thread=[10, 20]), rows)
    assert contexts(t).backward == (2, 0)
    t = dataclasses.replace(t, frames=t.frames.assign(process=t.frames["thread"]))
    assert contexts(t).backward == (2, 2)
    assert place(t, [1]) == ["rank 1, ABackward0 (backward)"]


def test_places_by_frequency_or_by_cost_and_no_more_than_asked_for() -> None:
    t = launching((250, 0), (145, 0), (150, 0), (400, 0))
    linear, net, main = "Net.Linear, net.py:16 forward, aten::linear", "Net, net.py:16 forward", "train.py:30 main"
    assert place(t, [0, 1, 2, 3]) == [linear, net, main]
    assert place(t, np.array([3, 0, 1, 2]), limit=2, cost=[5, 7, 3, 3]) == [net, linear]
    assert place(t, []) == []
    assert place(trace([], [(0, 1, LAUNCH)]), [0]) == []


def test_place_in_a_deep_stack_of_calls() -> None:
    """As deep as the calls are many: what walks the whole stack for each call takes minutes."""
    deep, end = 20_000, 10**6
    rows = [plain(at, end - at, OPERATOR, f"op::{at}") for at in range(deep)]
    t = with_frames(launching(*((at, 0) for at in range(deep))), [plain(-1, end, MODULE, "nn.Module: Net_0"), *rows])
    assert place(t, np.arange(deep)) == ["Net, op::0"]


def test_ranges_of_emit_nvtx_are_operators_and_join_their_forward_ones() -> None:
    rows = [
        plain(0, 100, ANNOTATION, "step"),
        plain(10, 40, ANNOTATION, "layer0"),
        plain(12, 20, ANNOTATION, "aten::addmm, seq = 12, op_id = 5, sizes = [[8], [8, 64], [64, 8]]"),
        plain(50, 60, ANNOTATION, "AddmmBackward0, seq = 12, op_id = 9, sizes = [[8, 8]], input_op_ids = [(5,0)]"),
        plain(52, 58, ANNOTATION, "aten::mm, op_id = 10, sizes = [[8, 8], [8, 64]]"),
    ]
    t = with_frames(trace([], [(15, 16, LAUNCH), (55, 56, LAUNCH)]), rows)
    assert place(t, [0]) == ["layer0, aten::addmm"]
    assert place(t, [1]) == ["layer0, AddmmBackward0 (backward)"]


@pytest.mark.parametrize(
    ("name", "label", "kind"),
    [
        ("aten::mm, seq = 3, op_id = 7, sizes = [[2]]", "aten::mm", "operator"),
        ("aten::mm, op_id = 7", "aten::mm", "operator"),
        ("aten::mm, seq = 3", "aten::mm", "operator"),
        ("aten::mm, sizes = [[2], []]", "aten::mm", "operator"),
        ("aten::mm", "aten::mm", "operator"),
        ("MyFunction, seq = 3, op_id = 7", "MyFunction", "operator"),
        ("MulBackward0, seq = 3", "MulBackward0", "backward"),
        ("autograd::engine::evaluate_function: MulBackward0, op_id = 9", "MulBackward0", "backward"),
        ("prefill, seq = 512", "prefill, seq = 512", "range"),
        ("prefill, seq = long, op_id = 1", "prefill, seq = long, op_id = 1", "range"),
        ("layer, sizes = [1]", "layer, sizes = [1]", "range"),
        ("ProfilerStep#12", "ProfilerStep", "range"),
        ("FSDP::forward", "FSDP::forward", "range"),
    ],
)
def test_ranges_by_name(name: str, label: str, kind: str) -> None:
    known = labels(frames([plain(0, 1, ANNOTATION, name)]), [0])
    assert (known.texts[known.text[0]], KINDS[int(known.kind[0])]) == (label, kind)
    assert known.sequence[0] in (3, -1, -2)
    assert (known.sequence[0] == 3) == ("seq = 3" in name)


@pytest.mark.parametrize(
    ("name", "label", "plumbing"),
    [
        ("train.py(21): loss_of", "train.py:21 loss_of", False),
        ("/a/lib/python3.11/site-packages/timm/vit.py(7): forward", "timm/vit.py:7 forward", False),
        ("/a/lib/python3.11/site-packages/torch/nn/x.py(7): f", "torch/nn/x.py:7 f", True),
        ("torch/nn/modules/module.py(1782): _call_impl", "torch/nn/modules/module.py:1782 _call_impl", True),
        ("/home/me/torch/train.py(3): main", "/home/me/torch/train.py:3 main", False),
        ("contextlib.py(78): inner", "contextlib.py:78 inner", True),
        ("<built-in method to of Tensor object at 0x7f00>", "<built-in method to of Tensor object>", True),
        ("<frozen runpy>(88): _run_code", "<frozen runpy>:88 _run_code", True),
    ],
)
def test_python_frames_by_name(name: str, label: str, plumbing: bool) -> None:
    known = labels(frames([plain(0, 1, PYTHON, name)]), [0])
    assert known.texts[known.text[0]] == label
    assert known.plumbing.tolist() == [plumbing]


def test_a_range_that_overlaps_python_frames_lies_beside_them() -> None:
    """torch.profiler opens ProfilerStep#4 inside one call of `step` and closes it inside the next one."""
    rows = [
        plain(0, 1000, PYTHON, "train.py(30): main"),
        plain(100, 120, PYTHON, "loop.py(5): step"),
        plain(110, 510, ANNOTATION, "ProfilerStep#4"),
        plain(500, 520, PYTHON, "loop.py(5): step"),
        plain(515, 900, ANNOTATION, "ProfilerStep#5"),
        plain(600, 700, PYTHON, "model.py(1): run"),
    ]
    nesting = Nesting(frames(rows))
    assert nesting.row.tolist() == [0, 1, 2, 3, 4, 5]
    assert nesting.parent(np.arange(6)).tolist() == [-1, 0, 0, 0, 0, 4]
    assert nesting.around(np.array([0, 0]), np.array([650, 450]), np.array([660, 450])).tolist() == [5, 2]


def test_rounding_does_not_put_an_operator_beside_the_one_that_called_it() -> None:
    rows = [plain(2000, 32000, OPERATOR, "aten::linear"), plain(3001, 32002, OPERATOR, "aten::addmm")]
    assert parents(rows) == [-1, 0]
    coarse = [plain(2000, 32000, OPERATOR, "aten::linear"), plain(3000, 33000, OPERATOR, "aten::addmm")]
    assert parents(coarse) == [-1, 0]  # whole microseconds
    beside = [plain(2000, 32000, OPERATOR, "aten::linear"), plain(3001, 32003, OPERATOR, "aten::addmm")]
    assert parents(beside) == [-1, -1]


def test_far_out_is_found_by_single_steps_and_beyond_them() -> None:
    deep = [plain(at, 2000 - at, PYTHON, "<built-in function f>") for at in range(1, 3 * STEPS)]
    t = with_frames(trace([], [(900, 901, LAUNCH)]), [plain(0, 2001, PYTHON, "a.py(1): f"), *deep])
    assert place(t, [0]) == ["a.py:1 f"]
    nesting = Nesting(t.frames)
    outermost = np.arange(len(deep) + 1) == 0
    assert set(nesting.around_among(np.arange(1, len(deep) + 1), outermost).tolist()) == {0}


@st.composite
def random_frames(draw: st.DrawFn) -> list[Frame]:
    times, kinds = st.integers(0, 40), st.sampled_from((ANNOTATION, MODULE, PYTHON, OPERATOR, SPAN))
    rows = draw(st.lists(st.tuples(times, times, st.integers(-1, 1), kinds), max_size=14))
    return [(start, end, thread, kind, f"frame_{at}", -1, -1) for at, (start, end, thread, kind) in enumerate(rows)]


def enclosing(rows: list[Any], before: int, thread: int, start: int, end: int) -> int:
    """The definition, one by one: of those before, the last that is open at `start` and until `end`."""
    fit = [
        at
        for at, (s, e, own, *_) in enumerate(rows[:before])
        if own == thread and s <= start < e and e >= end - ROUNDING_NS
    ]
    return fit[-1] if fit else -1


@settings(max_examples=300, deadline=None)
@given(random_frames(), st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 40), st.integers(0, 10)), max_size=5))
def test_nesting_is_the_definition_whatever_the_frames(rows: list[Frame], asked: list[Any]) -> None:
    nesting = Nesting(frames(rows))
    order = [at for at, row in enumerate(rows) if row[2] >= 0 and row[3] != SPAN]
    order.sort(key=lambda at: (rows[at][2], rows[at][0], -rows[at][1], rows[at][3]))
    assert nesting.row.tolist() == order
    ordered = [rows[at] for at in order]
    coarse = all(time % 1000 == 0 for row in ordered for time in row[:2])
    if not coarse:
        for at, (start, end, thread, *_) in enumerate(ordered):
            assert nesting.parent(np.array([at])) == [enclosing(ordered, at, thread, start, end)]
        columns = np.array(asked, np.int64).reshape(-1, 3).T
        found = nesting.around(columns[0], columns[1], columns[1] + columns[2])
        for at, (thread, start, length) in enumerate(asked):
            begun = sum((row[2], row[0]) <= (thread, start) for row in ordered)
            assert found[at] == enclosing(ordered, begun, thread, start, start + length)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 30), max_size=30), st.lists(st.booleans(), min_size=30, max_size=30))
def test_ancestors_and_depths(raw: list[int], keep: list[bool]) -> None:
    parent = np.array([min(above, at - 1) for at, above in enumerate(raw)], np.int64)

    def ancestors(at: int) -> list[int]:
        above = int(parent[at])
        return [] if above < 0 else [above, *ancestors(above)]

    mask = np.array(keep[: len(parent)], bool)
    expected = [next((a for a in ancestors(at) if mask[a]), -1) for at in range(len(parent))]
    assert compress(parent, mask).tolist() == expected
    by_depth = [rows.tolist() for rows in levels(parent)]
    assert sorted(at for rows in by_depth for at in rows) == list(range(len(parent)))
    assert all(len(ancestors(at)) == depth for depth, rows in enumerate(by_depth) for at in rows)
