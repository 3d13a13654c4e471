"""Figures: valid SVG, the same bytes each time, every number from a quantity."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from worklog.render import figures
from worklog.render.quantity import UNITS, PageError, Quantity, number


def q(value: float, unit: str, run: str = "r1") -> Quantity:
    return Quantity(value, *UNITS[unit], frozenset({run}))


KINDS: dict[str, Callable[[], figures.Drawing]] = {
    "stacked": lambda: figures.stacked(
        {"eager": {"linear": q(4, "ms"), "idle": q(500, "µs")}, "fused": {"linear": q(2, "ms", "r2")}}, "ms"
    ),
    "grouped": lambda: figures.grouped(
        {"eager": {"predicted": number(29, "bytes per weight"), "counted": Quantity(28.4, runs=frozenset({"r1"}))}},
        "bytes per weight",
    ),
    "steps": lambda: figures.steps({"eager": [[q(0, "ms"), q(2**30, "bytes")], [q(3, "ms"), q(2**31, "bytes")]]}),
    "lines": lambda: figures.lines(
        {"fused": [[1, q(4e3, "GB/s")], [2, q(3e3, "GB/s")]]}, "M", "GB/s", {"copy": q(4.3, "TB/s")}, log_x=True
    ),
}


def texts(content: bytes) -> list[str]:
    return [
        "".join(node.itertext()).strip() for node in ET.fromstring(content).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_data_give_the_same_bytes(kind: str) -> None:
    first, second = (figures.svg(KINDS[kind](), "A title") for _ in range(2))
    assert first == second
    assert b"dc:date" not in first
    assert b"Matplotlib v" not in first
    root = ET.fromstring(first)
    assert float(root.get("width", "").removesuffix("pt")) == pytest.approx(72 * figures.WIDTH_IN, abs=1)


def test_numbers_and_names_are_in_the_figure_as_text() -> None:
    assert {"linear", "idle", "eager", "fused", "4.00", "4.50", "2.00", "ms"} <= set(
        texts(figures.svg(KINDS["stacked"]()))
    )
    assert {"predicted", "counted", "29.0", "28.4", "bytes per weight"} <= set(texts(figures.svg(KINDS["grouped"]())))
    assert {"time, ms", "GiB", "eager"} <= set(texts(figures.svg(KINDS["steps"]())))
    assert {"M", "GB/s", "fused", "copy", "1", "2"} <= set(texts(figures.svg(KINDS["lines"]())))


def test_runs_are_collected() -> None:
    assert KINDS["stacked"]().runs == {"r1", "r2"}
    assert KINDS["lines"]().runs == {"r1"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: figures.stacked({}),
        lambda: figures.stacked({"a": {"b": 17.3}}),
        lambda: figures.stacked({"a": {"b": q(1, "bytes")}}, "ms"),
        lambda: figures.lines({"a": [[1, 2.5]]}, "M", "GB/s"),
        lambda: figures.lines({"a": [[0.5, q(1, "GB/s")]]}, "M", "GB/s"),
    ],
)
def test_what_no_run_vouches_for_is_not_drawn(wrong: Callable[[], figures.Drawing]) -> None:
    with pytest.raises(PageError):
        figures.svg(wrong())
