"""The calling-context tree: by hand, and any timeline against a search one by one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hand_made import trace
from hypothesis import given, settings
from hypothesis import strategies as st
from test_context import Frame, enclosing, plain, with_frames

from worklog.analysis import kernels
from worklog.analysis.timeline import account
from worklog.analysis.tree import METRICS, NAMES, Tree, bottom_up, build
from worklog.traces.schema import (
    ANNOTATION,
    COMMUNICATION,
    COMPUTE,
    COPY,
    COPYING,
    GRAPH,
    LAUNCH,
    MEMSET,
    MODULE,
    OPERATOR,
    OTHER,
    PYTHON,
    SPAN,
    SYNC,
    Trace,
)

Path = tuple[tuple[str, str], ...]
"""(kind, name) from below the root."""


def grown(t: Trace, **options: Any) -> Tree:
    chosen = t.select()
    return build(t, chosen, [account(t, device, window) for device, window in chosen.windows.items()], **options)


def costs(tree: Tree) -> dict[Path, dict[str, int]]:
    """Own of every node that has any."""

    def path(at: int) -> Path:
        return () if at == 0 else (*path(int(tree.parent[at])), (NAMES[int(tree.kind[at])], tree.texts[tree.text[at]]))

    found: dict[Path, dict[str, int]] = {}
    for at in range(len(tree.parent)):
        own = {metric: int(values[at]) for metric, values in tree.own.items() if values[at]}
        if own:
            assert path(at) not in found
            found[path(at)] = own
    return found


FRAMES = [
    plain(0, 1000, PYTHON, "train.py(30): main"),
    plain(100, 300, MODULE, "nn.Module: Net_0"),
    plain(101, 150, MODULE, "nn.Module: Linear_0"),
    (110, 140, 0, OPERATOR, "aten::linear", 3, 0),
    (115, 135, 0, OPERATOR, "aten::addmm", 3, 0),
    plain(160, 290, MODULE, "nn.Module: Linear_1"),
    (170, 200, 0, OPERATOR, "aten::linear", 4, 0),
    (500, 600, 9, OPERATOR, "autograd::engine::evaluate_function: AddmmBackward0", 3, 1),
    (501, 599, 9, OPERATOR, "AddmmBackward0", 3, 1),
    plain(510, 540, OPERATOR, "aten::mm", 9),
]
CALLS = [
    (50, 60, COPYING),  # 0: in main
    (120, 125, LAUNCH),  # 1: in Linear_0
    (180, 185, LAUNCH),  # 2: in Linear_1
    (520, 525, LAUNCH),  # 3: in the backward of Linear_0
    (700, 705, LAUNCH),  # 4: of a graph, in main
    (2000, 2001, LAUNCH),  # 5: in nothing, and lost
    (800, 801, SYNC),
]
WORK = [
    (55, 75, COPY, 0),
    (130, 160, COMPUTE, 1),
    (150, 170, COMPUTE, 2),  # overlaps the one before: both count in full
    (530, 570, COMPUTE, 3),
    (710, 720, COMPUTE, 4),
    (720, 750, COMMUNICATION, 4),
    (760, 765, MEMSET, -1),
]
MAIN = ("python", "train.py:30 main")
NET = (MAIN, ("module", "Net_0"))
BACK = (*NET, ("module", "Linear_0"), ("backward", "AddmmBackward0"), ("operator", "aten::mm"))


def by_hand() -> Trace:
    return with_frames(trace(WORK, CALLS, thread=[0, 0, 0, 9, 0, 0, 0], graph=[4]), FRAMES)


def test_each_call_and_what_it_launched_has_its_place() -> None:
    linear = (("operator", "aten::linear"), ("operator", "aten::addmm"))
    assert costs(grown(by_hand())) == {
        # idle: [50, 55) before the copy, [75, 130) before the first kernel, [170, 530), [570, 710); [750, 760) is
        # unexplained, as no call is known
        (MAIN, ("call", "call_0"), ("copy", "kernel_0")): {"copy_ns": 20, "idle_ns": 5, "activities": 1},
        (*NET, ("module", "Linear_0"), *linear, ("call", "call_1")): {"launches": 1},
        (*NET, ("module", "Linear_0"), *linear, ("call", "call_1"), ("kernel", "kernel_1")): {
            "kernel_ns": 30,
            "idle_ns": 55,
            "activities": 1,
        },
        (*NET, ("module", "Linear_1"), linear[0], ("call", "call_2")): {"launches": 1},
        (*NET, ("module", "Linear_1"), linear[0], ("call", "call_2"), ("kernel", "kernel_2")): {
            "kernel_ns": 20,
            "activities": 1,
        },
        (*BACK, ("call", "call_3")): {"launches": 1},
        (*BACK, ("call", "call_3"), ("kernel", "kernel_3")): {"kernel_ns": 40, "idle_ns": 360, "activities": 1},
        (MAIN, ("call", "call_4")): {"launches": 1},
        (MAIN, ("call", "call_4"), ("kernel", "kernel_4")): {"kernel_ns": 10, "idle_ns": 140, "activities": 1},
        (MAIN, ("call", "call_4"), ("communication", "kernel_5")): {"kernel_ns": 30, "activities": 1},
        (("unknown", "(launch unknown)"), ("memset", "kernel_6")): {"copy_ns": 5, "activities": 1},
        (("call", "call_5"),): {"launches": 1},
    }


def test_inclusive_is_own_and_all_below() -> None:
    tree = grown(by_hand())
    inclusive = tree.inclusive()
    name = {tree.texts[text]: at for at, text in enumerate(tree.text)}
    assert inclusive["kernel_ns"][0] == 30 + 20 + 40 + 10 + 30
    assert inclusive["kernel_ns"][name["Net_0"]] == 30 + 20 + 40
    assert inclusive["idle_ns"][name["Linear_0"]] == 55 + 360
    assert inclusive["launches"][name["train.py:30 main"]] == 4
    assert inclusive["copy_ns"][0] == 25


def test_modules_of_one_class_fold() -> None:
    found = costs(grown(by_hand(), fold=True))
    net = (MAIN, ("module", "Net"), ("module", "Linear"))
    assert found[(*net, ("backward", "AddmmBackward0"), ("operator", "aten::mm"), ("call", "call_3"))] == {
        "launches": 1
    }
    assert (*net, ("operator", "aten::linear"), ("call", "call_2")) in found


def test_from_below_the_callers_follow() -> None:
    found = costs(bottom_up(grown(by_hand())))
    mm = (("kernel", "kernel_3"), ("call", "call_3"), ("operator", "aten::mm"), ("backward", "AddmmBackward0"))
    assert found[(*mm, ("module", "Linear_0"), ("module", "Net_0"), MAIN)]["kernel_ns"] == 40
    assert found[(("memset", "kernel_6"), ("unknown", "(launch unknown)"))] == {"copy_ns": 5, "activities": 1}


def test_operators_have_their_time_without_that_of_those_inside() -> None:
    t = by_hand()
    found = costs(grown(t, operators=(t.frames["kind"] >= 0).to_numpy()))
    spent = {path[-2:]: own["cpu_ns"] for path, own in found.items() if "cpu_ns" in own}
    assert spent == {
        (("module", "Linear_0"), ("operator", "aten::linear")): 30 - 20,
        (("operator", "aten::linear"), ("operator", "aten::addmm")): 20,
        (("module", "Linear_1"), ("operator", "aten::linear")): 30,
        (("module", "Linear_0"), ("backward", "AddmmBackward0")): 2 + 98 - 30,
        (("backward", "AddmmBackward0"), ("operator", "aten::mm")): 30,
    }


@pytest.mark.parametrize("seen", [True, False])
def test_libraries_are_shown_on_request(seen: bool) -> None:
    frames = [*FRAMES, plain(102, 149, PYTHON, "torch/nn/modules/module.py(9): _call_impl")]
    (path,) = (p for p in costs(grown(with_frames(by_hand(), frames), libraries=seen)) if p[-1] == ("call", "call_1"))
    assert (("python", "torch/nn/modules/module.py:9 _call_impl") in path) == seen


def test_nothing_at_all() -> None:
    for t in (trace([]), with_frames(trace([]), FRAMES), trace([(5, 9, COMPUTE, -1)])):
        tree = grown(t)
        assert {metric: int(values.sum()) for metric, values in tree.own.items()} == dict.fromkeys(METRICS, 0) | (
            {} if t.activities.empty else {"kernel_ns": 4, "activities": 1}
        )
        assert len(bottom_up(tree).parent) == (1 if t.activities.empty else 3)


NAMED = {
    ANNOTATION: ("step", "loop"),
    MODULE: ("nn.Module: A_0", "nn.Module: A_1", "nn.Module: B_0"),
    PYTHON: ("a.py(1): f", "b.py(2): g", "torch/c.py(3): h", "<built-in function i>"),
    OPERATOR: ("aten::x", "aten::y"),
    SPAN: ("span",),
}


@st.composite
def random_traces(draw: st.DrawFn) -> Trace:
    times = st.integers(1, 60)
    frames: list[Frame] = []
    for _ in range(draw(st.integers(0, 14))):
        start, end, kind, thread = (
            draw(times),
            draw(times),
            draw(st.sampled_from(sorted(NAMED))),
            draw(st.integers(0, 1)),
        )
        number, backward = draw(st.integers(-1, 2)), draw(st.booleans())
        if kind == OPERATOR and backward and number >= 0:
            name = draw(st.sampled_from(("autograd::engine::evaluate_function: XBackward0", "XBackward0")))
            frames.append((start, end, thread, kind, name, number, 1))
        else:
            forward = number if kind == OPERATOR and thread == 0 else -1
            frames.append((start, end, thread, kind, draw(st.sampled_from(NAMED[kind])), forward, 0))
    calls = draw(st.lists(st.tuples(times, times, st.sampled_from((LAUNCH, SYNC, COPYING, OTHER))), max_size=8))
    known = st.integers(-1, len(calls) - 1)
    work = draw(st.lists(st.tuples(times, times, st.integers(COMPUTE, GRAPH), known), max_size=10))
    devices = draw(st.lists(st.integers(0, 1), min_size=len(work), max_size=len(work)))
    threads = draw(st.lists(st.integers(0, 1), min_size=len(calls), max_size=len(calls)))
    graph = draw(st.lists(st.integers(0, 30), max_size=2))
    return with_frames(trace(work, calls, device=devices, thread=threads, graph=graph), frames)


class Slow:
    """The definitions, one frame at a time."""

    def __init__(self, t: Trace) -> None:
        columns = ("start_ns", "end_ns", "thread", "kind", "name", "sequence", "forward_thread")
        rows = [row for row in t.frames[list(columns)].itertuples(index=False) if row.kind != SPAN]
        rows.sort(key=lambda row: (row.thread, row.start_ns, -row.end_ns, row.kind))
        self.rows: list[Any] = rows
        self.tuples = [tuple(row) for row in rows]
        self.parents = [enclosing(self.tuples, at, r.thread, r.start_ns, r.end_ns) for at, r in enumerate(rows)]

    def label(self, at: int) -> tuple[str, str]:
        row = self.rows[at]
        if row.kind == OPERATOR:
            backward = "Backward" in row.name
            return "backward" if backward else "operator", row.name.split(": ")[-1] if backward else row.name
        names = {"a.py(1): f": "a.py:1 f", "b.py(2): g": "b.py:2 g"}
        kind = {ANNOTATION: "range", MODULE: "module", PYTHON: "python"}[row.kind]
        return kind, names.get(row.name, row.name.removeprefix("nn.Module: "))

    def twice(self, at: int) -> bool:
        above = self.parents[at]
        return above >= 0 and "Backward" in self.rows[at].name and "Backward" in self.rows[above].name

    def kept(self, at: int) -> bool:
        return not self.rows[at].name.startswith(("torch/", "<")) and not self.twice(at)

    def forward(self, at: int) -> int:
        row = self.rows[at]
        fit = [
            other
            for other, f in enumerate(self.rows)
            if f.kind == OPERATOR
            and "Backward" not in f.name
            and f.sequence == row.sequence
            and f.start_ns < row.start_ns
        ]
        return fit[-1] if fit and "Backward" in row.name else -1

    def path(self, at: int) -> Path:
        """From the root to the frame `at`."""
        if at < 0:
            return ()
        if not self.kept(at):
            return self.path(self.parents[at])
        above = self.parents[at]
        if (forward := self.forward(at)) >= 0:
            above = self.parents[forward]
            while above >= 0 and (not self.kept(above) or self.label(above)[0] == "operator"):
                above = self.parents[above]
        return (*self.path(above), self.label(at))

    def around(self, thread: int, start: int, end: int) -> Path:
        before = sum((row.thread, row.start_ns) <= (thread, start) for row in self.rows)
        return self.path(enclosing(self.tuples, before, thread, start, end))


def searched(t: Trace) -> dict[Path, dict[str, int]]:
    slow, found = Slow(t), defaultdict[Path, dict[str, int]](lambda: defaultdict(int))
    kinds = {COMPUTE: "kernel", COMMUNICATION: "communication", COPY: "copy", MEMSET: "memset", GRAPH: "graph"}

    def call(row: int) -> Path:
        if row < 0:
            return (("unknown", "(launch unknown)"),)
        one = t.calls.iloc[row]
        return (*slow.around(one["thread"], one["start_ns"], one["end_ns"]), ("call", str(one["name"])))

    def leaf(row: int) -> Path:
        one = t.activities.iloc[row]
        return (*call(one["call"]), (kinds[one["kind"]], str(one["name"])))

    for row, one in t.activities.iterrows():
        spent = max(one["end_ns"] - one["start_ns"], 0)
        metric = {COMPUTE: "kernel_ns", COMMUNICATION: "kernel_ns", COPY: "copy_ns", MEMSET: "copy_ns"}.get(one["kind"])
        found[leaf(row)]["activities"] += 1
        if metric and spent:
            found[leaf(row)][metric] += spent
    for row, one in t.calls.iterrows():
        if one["kind"] == LAUNCH:
            found[call(row)]["launches"] += 1
    for device, window in t.select().windows.items():
        for gap in account(t, device, window).gaps.itertuples():
            if idle := gap.launch + gap.host + gap.sync:
                found[leaf(gap.next)]["idle_ns"] += idle
    return {path: dict(own) for path, own in found.items()}


@settings(max_examples=400, deadline=None)
@given(random_traces())
def test_any_timeline_has_the_costs_of_the_definition_and_all_of_them(t: Trace) -> None:
    tree, chosen = grown(t), t.select()
    assert costs(tree) == searched(t)
    for one in (tree, bottom_up(tree)):
        totals = {metric: int(values.sum()) for metric, values in one.own.items()}
        assert {metric: int(values[0]) for metric, values in one.inclusive().items()} == totals
        assert totals["kernel_ns"] == sum(ns for _, _, ns in kernels.by_name(t, chosen.launched))
        lines = [account(t, device, window) for device, window in chosen.windows.items()]
        assert totals["idle_ns"] == sum(
            line.accounting_ns[part] for line in lines for part in ("launch", "host", "sync")
        )
        assert totals["launches"] == int((t.calls["kind"] == LAUNCH).sum())
        assert totals["activities"] == len(t.activities)
    reverse = {path[::-1]: own for path, own in costs(bottom_up(tree)).items()}
    assert reverse == {path: own for path, own in costs(tree).items() if path}
