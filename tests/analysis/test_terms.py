"""Terms of a difference: worked out by hand, and for any two timelines adding up to the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hand_made import trace
from hypothesis import given, settings
from hypothesis import strategies as st

from worklog.analysis.diff import Difference, diff
from worklog.analysis.ledger import ledger
from worklog.analysis.modules import of_calls
from worklog.analysis.spread import half_width, student
from worklog.analysis.timeline import account
from worklog.traces import schema
from worklog.traces.activity import GEOMETRY
from worklog.traces.schema import (
    ANNOTATION,
    COMMUNICATION,
    COMPUTE,
    COPY,
    COPYING,
    FRAME,
    GRAPH,
    LAUNCH,
    MODULE,
    SYNC,
    Trace,
)

Row = tuple[str, int, int]
"""name, start, end of a kernel; its launch begins 2 before it, or with `late` later."""
OPPOSITE = {"added": "removed", "slower": "faster", "exposed": "hidden"}
OPPOSITE |= {two: one for one, two in OPPOSITE.items()}


def kernels(
    rows: Sequence[Row],
    *,
    asked: Sequence[int] = (),
    grid: Sequence[int] = (),
    kinds: Sequence[int] = (),
    modules: Sequence[tuple[str, int, int]] = (),
    steps: Sequence[tuple[int, int]] = (),
) -> Trace:
    """Each kernel is launched at `asked`, by default all of them at the start of the first."""
    starts = list(asked) or [min(start for _, start, _ in rows)] * len(rows)
    kinds = list(kinds) or [COMPUTE] * len(rows)
    t = trace([(low, high, kind, at) for at, ((_, low, high), kind) in enumerate(zip(rows, kinds, strict=True))])
    calls = trace([], [(at, at + 1, LAUNCH) for at in starts]).calls
    frames = [(f"nn.Module: {name}", low, high, MODULE) for name, low, high in modules]
    frames += [("step", low, high, ANNOTATION) for low, high in steps]
    names = [name for name, *_ in rows]
    shapes = {name: np.ones(len(rows), np.int64) for name in GEOMETRY} | {"grid_x": np.asarray(grid, np.int64)}
    return replace(
        t,
        activities=t.activities.assign(name=schema.categories(np.arange(len(rows)), names), **(shapes if grid else {})),
        calls=calls,
        frames=schema.frame(
            FRAME,
            start_ns=[low for _, low, _, _ in frames],
            end_ns=[high for _, _, high, _ in frames],
            thread=[0] * len(frames),
            process=[0] * len(frames),
            kind=[kind for *_, kind in frames],
            name=schema.categories(np.arange(len(frames)), [name for name, *_ in frames]),
        ),
    )


def compared(before: Trace, after: Trace, range_name: str | None = None, device: int = 0) -> Difference:
    sides = [ledger(t, t.select(range_name), device, of_calls(t)) for t in (before, after)]
    return diff(*sides)


def terms(found: Difference) -> dict[tuple[str, str], int]:
    """(kind, name) -> ns; they must add up."""
    assert sum(term.ns for term in found.terms) == found.delta_ns == found.after_ns - found.before_ns
    assert 0 not in [term.ns for term in found.terms]
    assert len({(term.kind, term.name) for term in found.terms}) == len(found.terms)
    return {(term.kind, term.name): term.ns for term in found.terms}


def test_one_slower_one_added_one_fused_away_and_less_idle() -> None:
    before = kernels([("gemm", 0, 100), ("bias", 110, 130), ("relu", 140, 160), ("copy", 200, 210)])
    after = kernels([("gemm", 0, 150), ("bias_relu", 155, 180), ("copy", 200, 210)])
    found = compared(before, after)
    # Idle: 10 + 10 + 40 before, 5 + 20 after; all of it in launches, for all were asked for at 0.
    assert terms(found) == {
        ("slower", "gemm"): 50,
        ("removed", "bias"): -20,
        ("removed", "relu"): -20,
        ("added", "bias_relu"): 25,
        ("idle", "launch"): -35,
    }
    assert (found.before_ns, found.after_ns, found.spread_ns) == (210, 210, None)
    assert [term.name for term in found.terms][:2] == ["gemm", "launch"]
    slower = found.terms[0]
    assert (slower.before.count, slower.before.ns, slower.after.ns) == (1.0, 100, 150)


def test_idle_by_what_the_host_did() -> None:
    """Asked for 30 late before; in time, but waiting for the launch, after."""
    before = kernels([("a", 0, 50), ("b", 100, 150)], asked=[0, 80])
    after = kernels([("a", 0, 50), ("b", 60, 110)], asked=[0, 40])
    assert terms(compared(before, after)) == {("idle", "host"): -50, ("idle", "launch"): 10}


def test_more_launches_and_slower_ones_are_two_terms() -> None:
    before = kernels([("add", 0, 10), ("add", 10, 20)])
    after = kernels([("add", 0, 16), ("add", 16, 32), ("add", 32, 48)])
    # 20 -> 48: one launch more at (10 + 16) / 2, and (2 + 3) / 2 launches each 6 slower.
    assert terms(compared(before, after)) == {("added", "add"): 13, ("slower", "add"): 15}


def test_a_kernel_behind_another_is_hidden_and_not_faster() -> None:
    before = kernels([("gemm", 0, 100), ("norm", 100, 140)])
    after = kernels([("gemm", 0, 100), ("norm", 70, 110)])
    found = compared(before, after)
    assert terms(found) == {("hidden", "norm"): -30}
    (term,) = found.terms
    assert (term.after.ns, term.after.exclusive_ns) == (40, 10)
    assert terms(compared(after, before)) == {("exposed", "norm"): 30}


def test_communication_behind_kernels_and_copies_by_their_way() -> None:
    rows = [("gemm", 0, 100), ("ncclAllReduce", 100, 180), ("Memcpy HtoD (Pageable -> Device)", 180, 220)]
    kinds = [COMPUTE, COMMUNICATION, COPY]
    before = kernels(rows, kinds=kinds)
    rows = [("gemm", 0, 100), ("ncclAllReduce", 20, 110), ("Memcpy HtoD (Pinned -> Device)", 110, 120)]
    after = kernels(rows, kinds=kinds)
    found = compared(before, after)
    assert terms(found) == {
        ("hidden", "ncclAllReduce"): -80,
        ("slower", "ncclAllReduce"): 10,
        ("copy", "memcpy HtoD"): -30,
    }
    assert {term.name: term.part for term in found.terms} == {"ncclAllReduce": "communication", "memcpy HtoD": "copy"}


def test_shapes_are_apart_and_equal_launches_of_another_shape_are_together() -> None:
    before = kernels([("add", 0, 10), ("add", 10, 110), ("mul", 110, 120)], grid=[1, 64, 4])
    after = kernels([("add", 0, 10), ("add", 10, 90), ("mul", 90, 110)], grid=[1, 64, 8])
    found = compared(before, after)
    assert terms(found) == {("faster", "add"): -20, ("slower", "mul"): 10}
    assert {term.name: term.matched_by for term in found.terms} == {"add": "exact", "mul": "name"}
    assert found.terms[0].before.shape == "64x1x1 of 1x1x1"
    # Another number of launches of another shape is other work.
    after = kernels([("add", 0, 10), ("add", 10, 110), ("mul", 110, 115), ("mul", 115, 120)], grid=[1, 64, 8, 8])
    assert terms(compared(before, after)) == {("removed", "mul"): -10, ("added", "mul"): 10}
    # Where one trace knows no shapes, names must do.
    before = kernels([("add", 0, 10), ("add", 10, 110)])
    after = kernels([("add", 0, 10), ("add", 10, 90)], grid=[1, 64])
    assert terms(compared(before, after)) == {("faster", "add"): -20}


def test_another_spelling_of_template_arguments_is_no_other_kernel() -> None:
    """Older and newer releases of torch."""
    old, new = (
        f"void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, {array} >"
        for array in ("at::detail::Array<char*, 1>", "std::array<char*, 1ul>")
    )
    before = kernels([(f"{old}(int)", 0, 10), (f"{old}(int)", 10, 20)], grid=[4, 8])
    after = kernels([(f"{new}(int)", 0, 10), (f"{new}(int)", 10, 25)], grid=[4, 8])
    assert terms(compared(before, after)) == {("slower", f"{new}(int)"): 5}
    (term,) = compared(before, after).terms
    assert (term.matched_by, term.before.name, term.before.shape) == (
        "words of the name",
        f"{old}(int)",
        "8x1x1 of 1x1x1",
    )
    other = new.replace("FillFunctor", "CosFunctor")  # an operation of its own
    after = kernels([(f"{other}(int)", 0, 10), (f"{other}(int)", 10, 20)], grid=[4, 8])
    assert sorted(term.kind for term in compared(before, after).terms) == ["added", "added", "removed", "removed"]
    twice = kernels([(f"{new}(int)", 0, 10), (f"{new}(int)", 10, 20), (f"{new}(int)", 20, 30)], grid=[4, 8, 8])
    assert sorted(kind for kind, _ in terms(compared(before, twice))) == ["added", "removed"]


def test_modules_tell_equal_kernels_apart_and_numbers_of_instances_do_not() -> None:
    rows = [("add", 0, 10), ("add", 10, 20), ("add", 20, 30)]
    asked = [0, 10, 20]
    names = ["Net_0", "Attention_1", "MLP_2", "Attention_7"]
    before = kernels(rows, asked=asked, modules=list(zip(names, [0, 0, 10, 20], [30, 9, 19, 29], strict=True)))
    names = ["Net_3", "Attention_0", "MLP_0", "Attention_1"]
    rows = [("add", 0, 10), ("add", 10, 26), ("add", 26, 36)]
    after = kernels(rows, asked=asked, modules=list(zip(names, [0, 0, 10, 20], [30, 9, 19, 29], strict=True)))
    found = compared(before, after)
    assert terms(found) == {("slower", "add"): 6}
    assert found.terms[0].module == "Net.MLP"


def renaming(names: Sequence[str], module: str = "Linear_0") -> Trace:
    rows = [(name, 10 * at, 10 * at + 10 - (name == "gemm_128") * 4) for at, name in enumerate(names)]
    return kernels(rows, asked=[10 * at for at in range(len(rows))], modules=[(module, 0, 10 * len(rows))])


def test_a_kernel_in_the_place_of_another_in_its_module_is_renamed() -> None:
    found = compared(renaming(["norm", "gemm_64", "bias"]), renaming(["norm", "gemm_128", "bias"]))
    # The next kernel waits for its launch, which is asked for when it begins: 4 ns of the host.
    assert terms(found) == {("faster", "gemm_128"): -4, ("idle", "host"): 4}
    (term,) = [term for term in found.terms if term.name == "gemm_128"]
    assert (term.before.name, term.after.name, term.matched_by) == ("gemm_64", "gemm_128", "place in the module")


@pytest.mark.parametrize(
    ("before", "after", "module"),
    [
        (["norm", "gemm_64", "bias"], ["gemm_128", "norm", "bias"], "Linear_0"),  # in another place
        (["norm", "gemm_64", "bias"], ["norm", "gemm_128", "gemm_128", "bias"], "Linear_0"),  # twice as often
        (["norm", "gemm_64", "bias"], ["norm", "gemm_128", "bias"], "Conv_0"),  # in another module
    ],
)
def test_what_is_not_in_the_same_place_was_removed_and_added(before: list[str], after: list[str], module: str) -> None:
    found = terms(compared(renaming(before), renaming(after, module)))
    assert found["removed", "gemm_64"] == -10
    assert found["added", "gemm_128"] == 6 * after.count("gemm_128")


STEPS = [(0, 90), (100, 190), (200, 290)]


def stepped(lengths: Sequence[tuple[int, int]]) -> Trace:
    """For each step a kernel `a` and, 5 later, a kernel `b` of these lengths."""
    rows: list[Row] = []
    for (low, _), (a, b) in zip(STEPS, lengths, strict=False):
        rows += [("a", low, low + a), ("b", low + a + 5, low + a + 5 + b)]
    return kernels(rows, asked=[low for _, low, _ in rows], steps=STEPS[: len(lengths)])


def test_occurrences_count_with_their_means_and_tell_noise_from_change() -> None:
    before, after = stepped([(30, 10), (31, 10), (32, 12)]), stepped([(45, 11), (46, 10)])
    found = compared(before, after, "step")
    # Means: a 31 -> 45.5, b 32/3 -> 10.5, idle 5 -> 5; the running sums of a, b, idle are rounded half up.
    assert (found.before_ns, found.after_ns) == (47, 61)
    assert terms(found) == {("slower", "a"): 15, ("faster", "b"): -1}
    a, b = found.terms
    assert (a.within_noise, b.within_noise, found.within_noise) == (False, True, False)
    assert a.spread_ns == pytest.approx(welch([30, 31, 32], [45, 46]), rel=1e-4)
    assert b.spread_ns == pytest.approx(welch([10, 10, 12], [11, 10]), rel=1e-4)
    assert found.spread_ns == pytest.approx(welch([45, 46, 49], [61, 61]), rel=1e-4)


def welch(one: list[int], two: list[int]) -> float:
    """The textbook's formula; quantiles of Student's t from its printed table."""
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
    a, b = (np.var(x, ddof=1) / len(x) for x in (one, two))
    freedom = int((a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(two) - 1)))
    return table[freedom] * (a + b) ** 0.5


def test_a_kernel_of_some_occurrences_only_has_the_spread_of_that() -> None:
    one = kernels([("a", 0, 10), ("a", 100, 110), ("b", 110, 130)], asked=[0, 100, 105], steps=STEPS[:2])
    two = kernels([("a", 0, 10), ("a", 100, 110)], asked=[0, 100], steps=STEPS[:2])
    (term,) = compared(one, two, "step").terms
    assert (term.kind, term.ns, term.before.count) == ("removed", -10, 0.5)
    assert term.spread_ns == pytest.approx(12.7062 * (200 / 2) ** 0.5, rel=1e-4)
    assert term.within_noise


def launched(lengths: Sequence[Sequence[int]]) -> Trace:
    """For each step kernels `a` of these lengths, one after another."""
    rows: list[Row] = []
    for (low, _), own in zip(STEPS, lengths, strict=False):
        for ns in own:
            low = max(low, rows[-1][2]) if rows else low
            rows.append(("a", low, low + ns))
    rows += [("b", low + 80, low + 81) for low, _ in STEPS[: len(lengths)]]
    return kernels(rows, asked=[low for _, low, _ in rows], steps=STEPS[: len(lengths)])


def test_spreads_of_launches_and_of_each_launch() -> None:
    found = compared(launched([(10, 12), (10, 14), (10, 12, 14)]), launched([(20, 20), (20, 22, 24)]), "step")
    before, after = Fraction(82, 7), Fraction(106, 5)  # mean ns of a launch; 7/3 and 5/2 launches a step
    by_kind = {term.kind: term for term in found.terms if term.name == "a"}
    launches = welch([2, 2, 3], [2, 3]) * float(before + after) / 2
    each = welch([11, 12, 12], [20, 22]) * (7 / 3 + 5 / 2) / 2
    assert by_kind["added"].spread_ns == pytest.approx(launches, rel=0.02)  # the terms' ns are whole ones
    assert by_kind["slower"].spread_ns == pytest.approx(each, rel=1e-4)
    assert by_kind["added"].ns == pytest.approx((5 / 2 - 7 / 3) * float(before + after) / 2, abs=1)


def test_an_occurrence_without_a_launch_says_nothing_of_each_launch() -> None:
    found = compared(launched([(10,), (), (14,)]), launched([(20,), (21,), (22,)]), "step")
    by_kind = {term.kind: term for term in found.terms if term.name == "a"}
    assert by_kind["slower"].spread_ns == pytest.approx(welch([10, 14], [20, 21, 22]) * (2 / 3 + 1) / 2, rel=1e-4)
    assert by_kind["added"].spread_ns == pytest.approx(welch([1, 0, 1], [1, 1, 1]) * (12 + 21) / 2, rel=1e-2)


def test_another_shape_is_matched_by_launches_of_one_occurrence() -> None:
    names = [("a", 0, 10), ("a", 100, 110), ("a", 200, 210)]
    before = kernels(names, asked=[0, 100, 200], grid=[1, 1, 1], steps=STEPS)
    after = kernels(names[:2], asked=[0, 100], grid=[2, 2], steps=STEPS[:2])
    assert terms(compared(before, after, "step")) == {}


def test_what_crosses_into_the_next_occurrence_is_still_one_launch() -> None:
    """Both steps are asked for at once: the window of the second begins where the first one's kernels end."""
    rows = [("a", 0, 40), ("slow", 40, 140), ("a", 100, 145), ("slow", 150, 240)]
    before = kernels(rows, asked=[0, 5, 50, 55], steps=[(0, 20), (50, 70)])
    side = ledger(before, before.select("step"), 0)
    assert side.spans_ns.tolist() == [140, 100]
    counts = side.spent.assign(name=side.entries["name"][side.spent["entry"]].to_numpy())
    counts = counts[counts["name"].isin(["a", "slow"])].groupby(["name", "occurrence"])[["count", "ns"]].sum()
    assert counts.to_dict("index") == {
        ("a", 0): {"count": 2, "ns": 85},
        ("slow", 0): {"count": 1, "ns": 100},
        ("slow", 1): {"count": 1, "ns": 90},
    }
    assert [
        term.before.count
        for term in diff(side, ledger(kernels([("b", 0, 9)]), kernels([("b", 0, 9)]).select(), 0)).terms
        if term.name == "a"
    ] == [1.0]


def test_one_occurrence_has_no_spread() -> None:
    found = compared(stepped([(30, 10)]), stepped([(40, 10), (41, 10)]), "step")
    assert (found.spread_ns, found.within_noise) == (None, None)
    assert {(term.spread_ns, term.within_noise) for term in found.terms} == {(None, None)}


def test_students_quantiles_and_counts_that_give_none() -> None:
    printed = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 29: 2.0452, 30: 2.0423, 120: 1.9799}
    assert {f: round(student(f), 4) for f in printed} == printed
    assert np.isnan(half_width(1.0, 1, 1.0, 5))
    assert half_width(0.0, 3, 0.0, 3) == 0.0


@pytest.mark.parametrize(("n", "m", "least"), [(3, 3, 0.94), (10, 10, 0.94), (3, 5, 0.93), (2, 10, 0.89)])
def test_the_interval_covers_what_its_docstring_says(n: int, m: int, least: float) -> None:
    random = np.random.default_rng(0)
    one, two = random.normal(0, 1, (20_000, n)), random.normal(0, 3, (20_000, m))
    half = half_width(one.var(1, ddof=1), n, two.var(1, ddof=1), m)
    assert least < (abs(one.mean(1) - two.mean(1)) <= half).mean() < 0.99


times = st.integers(0, 60)


@st.composite
def timelines(draw: st.DrawFn) -> Trace:
    calls = draw(st.lists(st.tuples(times, times, st.sampled_from((LAUNCH, SYNC, COPYING))), max_size=8))
    known = st.integers(-1, len(calls) - 1)
    work = draw(st.lists(st.tuples(times, times, st.integers(COMPUTE, GRAPH), known), min_size=1, max_size=12))
    names = draw(st.lists(st.sampled_from("abc"), min_size=len(work), max_size=len(work)))
    steps = draw(st.lists(st.tuples(times, times), max_size=5))
    grid = draw(st.lists(st.integers(1, 2), min_size=len(work), max_size=len(work)))
    t, framed = trace(work, calls), kernels([("x", 0, 1)], steps=steps)
    shapes = {name: np.asarray(grid) for name in GEOMETRY}
    named = t.activities.assign(name=schema.categories(np.arange(len(work)), names), **shapes)
    return replace(t, activities=named, frames=framed.frames)


@settings(max_examples=120, deadline=None)
@given(timelines(), timelines(), st.booleans())
def test_terms_of_any_two_timelines_add_up_and_are_negated_by_exchange(one: Trace, two: Trace, steps: bool) -> None:
    try:
        chosen = [t.select("step" if steps else None) for t in (one, two)]
    except schema.ProblemError:
        return
    if not all(selection.windows for selection in chosen):
        return
    sides = [ledger(t, selection, 0) for t, selection in zip((one, two), chosen, strict=True)]
    found = diff(*sides)
    assert all(type(term.ns) is int and term.ns for term in found.terms)
    assert sum(term.ns for term in found.terms) == found.delta_ns == found.after_ns - found.before_ns
    spans = []
    for t, selection, side, ns in zip((one, two), chosen, sides, (found.before_ns, found.after_ns), strict=True):
        line = account(t, 0, selection.windows[0])
        mean = Fraction(line.span_ns, side.occurrences)
        assert ns == int(mean + Fraction(1, 2))
        assert side.spans_ns.sum() == line.span_ns == side.spent["exclusive_ns"].sum()
        parts = side.entries.groupby("part")["exclusive_ns"].sum()
        assert {part: total for part, total in parts.items() if total} == {
            part: total for part, total in line.accounting_ns.items() if total
        }
        rounded, _ = side.per_occurrence()
        assert rounded.sum() == ns
        assert all(
            abs(Fraction(int(total), side.occurrences) - int(own)) < 1
            for total, own in zip(side.entries["exclusive_ns"], rounded, strict=True)
        )
        spans.append(line)
    if all(side.occurrences == 1 for side in sides):
        for part in line.accounting_ns:
            change = spans[1].accounting_ns[part] - spans[0].accounting_ns[part]
            assert sum(term.ns for term in found.terms if term.part == part) == change

    def essence(difference: Difference, swap: bool) -> list[tuple[Any, ...]]:
        sign = -1 if swap else 1
        return sorted(
            (
                OPPOSITE.get(term.kind, term.kind) if swap else term.kind,
                sign * term.ns,
                term.part,
                term.matched_by,
                *(repr(side) for side in ((term.after, term.before) if swap else (term.before, term.after))),
                None if term.spread_ns is None else round(term.spread_ns, 6),
            )
            for term in difference.terms
        )

    assert essence(diff(*reversed(sides)), swap=True) == essence(found, swap=False)
    assert diff(sides[0], sides[0]).terms == diff(sides[1], sides[1]).terms == []
