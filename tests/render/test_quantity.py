"""Numbers keep their unit and origin, and print with the digits that were asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worklog.render.quantity import FILTERS, UNITS, PageError, Quantity, digits, number, tagged


def quantity(value: float, unit: str, *runs: str) -> Quantity:
    return Quantity(value, *UNITS[unit], frozenset(runs))


def show(value: object, name: str, *arguments: int) -> str:
    return FILTERS[name](value, *arguments)


@pytest.mark.parametrize(
    ("value", "significant", "text"),
    [
        (17.349, 3, "17.3"), (17.349, 4, "17.35"), (0.012345, 3, "0.0123"), (9.996, 3, "10.0"), (999.6, 3, "1,000"),
        (123456.7, 3, "123,457"), (0, 3, "0"), (-2.5, 3, "-2.50"), (1, 3, "1.00"), (0.99951, 3, "1.00"),
    ],
)  # fmt: skip
def test_digits(value: float, significant: int, text: str) -> None:
    assert digits(value, significant) == text


@given(st.floats(1e-9, 1e12), st.integers(2, 6))
def test_digits_round_and_never_use_an_exponent(value: float, significant: int) -> None:
    text = digits(value, significant)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - significant))


def test_filters_convert_between_units_of_one_kind() -> None:
    time = quantity(1234.6, "µs")
    assert [show(time, name) for name in ("ns", "us", "ms", "s")] == [
        "1,234,600 ns",
        "1,235 µs",
        "1.23 ms",
        "0.00123 s",
    ]
    size = quantity(2**31, "bytes")
    assert [show(size, name) for name in ("mib", "gib", "gb")] == ["2,048 MiB", "2.00 GiB", "2.15 GB"]
    assert show(quantity(0.123, ""), "percent") == "12.3 %"
    assert show(quantity(1.834, ""), "ratio") == "1.83x"
    assert show(quantity(0.00312, ""), "sci") == "3.1e-3"
    assert show(quantity(16384, ""), "count") == "16,384"


def test_arithmetic_keeps_units_and_runs() -> None:
    time, size = quantity(500, "µs", "a"), quantity(2e9, "bytes", "b")
    assert show(size / time, "tbps") == "4.00 TB/s"
    assert show(time / quantity(1, "ms"), "percent") == "50.0 %"
    assert show(time + quantity(1, "ms"), "ms") == "1.50 ms"
    assert show(1 / (time / time), "ratio") == "1.00x"
    assert show(sum([time, time]), "ms") == "1.00 ms"
    assert (size / time).runs == {"a", "b"}
    assert quantity(1, "ms") > time
    assert max(time, quantity(0.4, "ms")) == time


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t, b: t + b,
        lambda t, b: t - b,
        lambda t, _: t + 1,
        lambda t, b: t < b,
        lambda t, _: show(t, "gib"),
        lambda _, b: show(b, "ms"),
        lambda t, _: show(t, "ratio"),
        lambda t, b: show(b / t, "ms"),
        lambda t, _: t / 0,
        lambda t, _: str(t),
        lambda *_: show(quantity(0.5, ""), "count"),
    ],
)
def test_what_has_no_meaning_is_an_error(wrong: object) -> None:
    with pytest.raises(PageError):
        wrong(quantity(1.5, "µs"), quantity(8, "bytes"))  # type: ignore[operator]


def test_a_bare_float_has_no_origin() -> None:
    with pytest.raises(PageError, match=r"17\.3 comes from no record"):
        show(17.3, "ms")


def test_whole_numbers_print_and_others_ask_for_a_filter() -> None:
    assert str(Quantity(4096)) == "4096"
    with pytest.raises(PageError, match="needs a filter"):
        str(Quantity(0.5))


def test_predicted_numbers_print_as_they_are() -> None:
    assert [str(number(v, u)) for v, u in ((29, "bytes per weight"), (1.5, "ms"), (17, "x"))] == [
        "29 bytes per weight", "1.5 ms", "17x",
    ]  # fmt: skip


def test_the_end_of_a_key_gives_the_unit() -> None:
    data = {"a_us": 2, "a_ns": [1500], "peak_bytes": 2**30, "rate_bytes_per_s": 2e9, "n": 3, "flag": True, "name": "x"}
    found = tagged("", data, frozenset({"r"}))
    assert show(found["a_us"], "us") == "2.00 µs"
    assert show(found["a_ns"][0], "us") == "1.50 µs"
    assert show(found["peak_bytes"], "gib") == "1.00 GiB"
    assert show(found["rate_bytes_per_s"], "gbps") == "2.00 GB/s"
    assert (str(found["n"]), found["flag"], found["name"]) == ("3", True, "x")
    assert found["n"].runs == {"r"}
