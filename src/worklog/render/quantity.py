"""Numbers that know their unit and the run they come from, and how they are printed.

A `Quantity` is a float. Its `scale` and `dims` say what one of it is in seconds, bytes, operations and joules, so that
`bytes / median_us` prints right as GB/s and `median_us / median_ms` as a plain ratio. `runs` names the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jinja2 import Undefined

from worklog.problem import ProblemError

Dims = tuple[int, int, int, int]
"""Exponents of second, byte, floating-point operation, joule."""

NONE: Dims = (0, 0, 0, 0)
TIME: Dims = (1, 0, 0, 0)
FREQUENCY: Dims = (-1, 0, 0, 0)
BYTES: Dims = (0, 1, 0, 0)
BYTE_RATE: Dims = (-1, 1, 0, 0)
FLOP: Dims = (0, 0, 1, 0)
FLOP_RATE: Dims = (-1, 0, 1, 0)
ENERGY: Dims = (0, 0, 0, 1)
POWER: Dims = (-1, 0, 0, 1)

UNITS: dict[str, tuple[float, Dims]] = {
    "ns": (1e-9, TIME),
    "µs": (1e-6, TIME),
    "us": (1e-6, TIME),
    "ms": (1e-3, TIME),
    "s": (1.0, TIME),
    "bytes": (1.0, BYTES),
    "KiB": (2.0**10, BYTES),
    "MiB": (2.0**20, BYTES),
    "GiB": (2.0**30, BYTES),
    "MB": (1e6, BYTES),
    "GB": (1e9, BYTES),
    "GB/s": (1e9, BYTE_RATE),
    "TB/s": (1e12, BYTE_RATE),
    "GFLOP": (1e9, FLOP),
    "TFLOP": (1e12, FLOP),
    "TFLOP/s": (1e12, FLOP_RATE),
    "MHz": (1e6, FREQUENCY),
    "W": (1.0, POWER),
    "J": (1.0, ENERGY),
    "mJ": (1e-3, ENERGY),
    "%": (0.01, NONE),
    "x": (1.0, NONE),
    "": (1.0, NONE),
}
"""Printed unit -> (what one is in base units, dimension). GB is 1e9 bytes, GiB is 2^30."""

_SUFFIXES: tuple[tuple[str, float, Dims], ...] = (
    ("gb_per_s", 1e9, BYTE_RATE),
    ("bytes_per_s", 1.0, BYTE_RATE),
    ("flop_per_s", 1.0, FLOP_RATE),
    ("per_s", 1.0, FREQUENCY),
    ("ns", 1e-9, TIME),
    ("us", 1e-6, TIME),
    ("ms", 1e-3, TIME),
    ("s", 1.0, TIME),
    ("seconds", 1.0, TIME),
    ("bytes", 1.0, BYTES),
    ("flop", 1.0, FLOP),
    ("joules", 1.0, ENERGY),
    ("joules_per_call", 1.0, ENERGY),
    ("w", 1.0, POWER),
    ("mhz", 1e6, FREQUENCY),
    ("percent", 0.01, NONE),
)


class PageError(ProblemError):
    """A page that cannot be rendered as it stands; the message says what and, once known, where."""


class Quantity(float):
    """A number with unit and origin. Arithmetic keeps both; adding a time to a size is an error."""

    scale: float
    dims: Dims
    runs: frozenset[str]
    label: str
    """Printed unit, where the author gave one (predict, cite)."""
    note: str
    """Markdown printed after the number: the link to its source."""

    def __new__(
        cls,
        value: float,
        scale: float = 1.0,
        dims: Dims = NONE,
        runs: frozenset[str] = frozenset(),
        *,
        label: str = "",
        note: str = "",
    ) -> Quantity:
        self = super().__new__(cls, value)
        self.scale, self.dims, self.runs = scale, dims, runs
        self.label, self.note = label, note
        return self

    def _sum(self, other: Any, sign: int) -> Quantity:
        if isinstance(other, (int, float)) and not isinstance(other, Quantity):
            if other != 0 and (self.dims != NONE or self.scale != 1.0):
                raise PageError(f"{float(self):g} has a unit and {other:g} has none; they cannot be added")
            other = Quantity(other, self.scale, self.dims)
        if not isinstance(other, Quantity):
            return NotImplemented  # type: ignore[no-any-return]
        if other.dims != self.dims:
            raise PageError(f"{unit_name(self)} and {unit_name(other)} cannot be added or subtracted")
        value = float(self) + sign * float(other) * (other.scale / self.scale)
        return Quantity(value, self.scale, self.dims, self.runs | other.runs)

    def _product(self, other: Any, sign: int) -> Quantity:
        if not isinstance(other, (int, float)):
            return NotImplemented  # type: ignore[no-any-return]
        right = other if isinstance(other, Quantity) else Quantity(other)
        if sign < 0 and float(right) == 0:
            raise PageError("division by zero")
        a, b = self.dims, right.dims
        dims = (a[0] + sign * b[0], a[1] + sign * b[1], a[2] + sign * b[2], a[3] + sign * b[3])
        value = float(self) * float(right) ** sign
        return Quantity(value, self.scale * right.scale**sign, dims, self.runs | right.runs)

    def __add__(self, other: Any) -> Quantity:
        return self._sum(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Quantity:
        return self._sum(other, -1)

    def __rsub__(self, other: Any) -> Quantity:
        return (-self)._sum(other, 1)

    def __mul__(self, other: Any) -> Quantity:
        return self._product(other, 1)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Quantity:
        return self._product(other, -1)

    def __rtruediv__(self, other: Any) -> Quantity:
        return Quantity(other)._product(self, -1)

    def __neg__(self) -> Quantity:
        return Quantity(-float(self), self.scale, self.dims, self.runs)

    def __abs__(self) -> Quantity:
        return Quantity(abs(float(self)), self.scale, self.dims, self.runs)

    def _against(self, other: Any) -> float:
        """`other` in this one's unit; a plain number is taken to be in it."""
        if not isinstance(other, Quantity):
            return float(other)
        if other.dims != self.dims:
            raise PageError(f"{unit_name(self)} and {unit_name(other)} cannot be compared")
        return float(other) * (other.scale / self.scale)

    def __lt__(self, other: Any) -> bool:
        return float(self) < self._against(other)

    def __le__(self, other: Any) -> bool:
        return float(self) <= self._against(other)

    def __gt__(self, other: Any) -> bool:
        return float(self) > self._against(other)

    def __ge__(self, other: Any) -> bool:
        return float(self) >= self._against(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and float(self) == self._against(other)

    def __str__(self) -> str:
        return plain(self)

    def __hash__(self) -> int:
        return hash(float(self))


def unit_name(value: Quantity) -> str:
    for name, (scale, dims) in UNITS.items():
        if dims == value.dims and math.isclose(scale, value.scale):
            return name or "a plain number"
    return f"a value of dimension {value.dims}"


def in_unit(value: Any, unit: str) -> float:
    """The number of `unit` in `value`.

    A value without a unit (a count out of a file) is taken in the unit's base: bytes for GiB, bytes/s for GB/s, and in
    the unit itself for times, ratios and percent of a fraction. Raises PageError for a value of another dimension and
    for a bare float, which nothing vouches for.
    """
    scale, dims = UNITS[unit]
    if isinstance(value, Undefined):
        str(value)  # raises, with the name that is missing
    if value is None:
        raise PageError("the record has no such value (null)")
    if not isinstance(value, Quantity):
        raise PageError(f"{value!r} comes from no record, config, cite() or predict(); it cannot be printed as {unit}")
    if value.dims == dims:
        return float(value) * (value.scale / scale)
    if value.dims == NONE and value.scale == 1.0:
        return float(value) if dims == TIME else float(value) / scale
    raise PageError(f"{unit_name(value)} cannot be printed as {unit or 'a plain number'}")


def digits(value: float, significant: int = 3) -> str:
    """`significant` digits, never an exponent, thousands separated; digits before the point are always kept."""
    if not math.isfinite(value):
        raise PageError(f"{value} is not a number that a page can show")
    if value == 0:
        return "0"
    rounded = float(f"{value:.{max(significant, 1) - 1}e}")
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def measure(unit: str, significant: int) -> Callable[..., str]:
    """A Jinja filter that prints a quantity in `unit`: `{{ x | ms }}`, or `{{ x | ms(4) }}` for four digits."""
    gap = "" if unit == "x" else " "

    def show(value: Any, significant: int = significant) -> str:
        text = digits(in_unit(value, unit), significant)
        return f"{text}{gap}{unit}".rstrip() + str(value.note)

    return show


def count(value: Any) -> str:
    """A whole number with its thousands separated; anything else is an error."""
    number = float(value)
    if not number.is_integer():
        raise PageError(f"{number!r} is not a whole number")
    return f"{int(number):,}" + (value.note if isinstance(value, Quantity) else "")


def sci(value: Any, significant: int = 2) -> str:
    """`3.1e-3`: errors and other numbers far from one."""
    mantissa, exponent = f"{in_unit(value, ''):.{significant - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}" + str(value.note)


def plain(value: Quantity) -> str:
    """What `{{ x }}` prints without a filter: whole numbers and numbers whose author gave the unit."""
    if value.label:
        gap = "" if value.label == "x" else " "
        return f"{float(value):,.12g}{gap}{value.label}{value.note}"
    if value.dims != NONE or value.scale != 1.0:
        raise PageError(f"a number in {unit_name(value)} needs a filter, such as `| ms` or `| gib`")
    if float(value).is_integer():
        return f"{int(value)}{value.note}"
    raise PageError(f"{float(value)!r} needs a filter, such as `| ratio`, `| percent` or `| sci`")


def number(value: float, unit: str) -> Quantity:
    """`value` of a unit written by the author, such as "GB/s" or "bytes per weight"; unknown units are only a label."""
    scale, dims = UNITS.get(unit, (1.0, NONE))
    return Quantity(value, scale, dims, label=unit)


def tagged(key: str, value: Any, runs: frozenset[str]) -> Any:
    """JSON with every number made a Quantity; the end of its key (`_us`, `_bytes`, `_per_s`, ...) gives its unit."""
    if isinstance(value, dict):
        return {str(k): tagged(str(k), v, runs) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [tagged(key, v, runs) for v in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    for suffix, scale, dims in _SUFFIXES:
        if key.endswith("_" + suffix) or (key == suffix and len(key) > 3):
            return Quantity(value, scale, dims, runs)
    return Quantity(value, runs=runs)


_PRINTED = {
    **{name: name for name in ("ns", "ms", "s")},
    **{unit.lower(): unit for unit in ("KiB", "MiB", "GiB", "MB", "GB", "GFLOP", "TFLOP", "MHz")},
    "us": "µs",
    "gbps": "GB/s",
    "tbps": "TB/s",
    "tflops": "TFLOP/s",
    "watts": "W",
    "joules": "J",
    "ratio": "x",
    "percent": "%",
    "plain": "",
}
FILTERS: dict[str, Callable[..., str]] = {name: measure(unit, 3) for name, unit in _PRINTED.items()}
FILTERS |= {"count": count, "sci": sci}
