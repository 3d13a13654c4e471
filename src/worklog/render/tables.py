"""Markdown tables from rows of quantities."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worklog.render.quantity import FILTERS, UNITS, PageError, Quantity, count, digits, in_unit

_UNIT = re.compile(r"\(([^()]+)\)$")


def _lookup(row: Any, path: str) -> Any:
    value = row
    for part in path.split("."):
        if isinstance(value, Mapping):
            if part not in value:
                raise PageError(f"table(): a row has no {part!r}; it has: {', '.join(map(str, value))}")
            value = value[part]
        elif part.startswith("_"):
            raise PageError(f"table(): {part!r} is not for pages")
        else:
            value = getattr(value, part)
    return value


def _pick(row: Any, path: str) -> Any:
    """What `path` ("decode.median_ms", or "decode.error | sci") finds; a failed variant shows its status instead."""
    path, _, name = (part.strip() for part in path.partition("|"))
    try:
        value = _lookup(row, path)
    except PageError:
        status = getattr(row, "status", "ok")
        if status == "ok":
            raise
        return str(status).replace("_", " ")
    if not name or value is None:
        return value
    if name not in FILTERS:
        raise PageError(f"table(): no filter {name!r}; there are: {', '.join(FILTERS)}")
    return FILTERS[name](value)


def _show(value: Any, unit: str | None, header: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit is not None and isinstance(value, (Quantity, float)):
        return digits(in_unit(value, unit)) + (value.note if isinstance(value, Quantity) else "")
    if isinstance(value, Quantity) and float(value).is_integer() and not value.label:
        return count(value) if value.dims == UNITS[""][1] else str(value)
    if isinstance(value, float) and not isinstance(value, Quantity):
        raise PageError(f"table(): {value!r} under {header!r} comes from no record")
    return str(value)


def table(rows: Sequence[Any], columns: Sequence[str] | Mapping[str, str]) -> str:
    """A Markdown table, aligned.

    `columns` as a list: each row is a list of cells. `columns` as {header: path}: each row is a variant, a case or a
    dict, and the path is looked up in it. A header ending in a unit, "time (ms)" or "of copy (%)", prints its column's
    quantities in that unit without repeating it. None prints as a dash.
    """
    headers = list(columns)
    if isinstance(columns, Mapping):
        paths = columns
        cells = [[_pick(row, paths[header]) for header in headers] for row in rows]
    else:
        cells = [list(row) for row in rows]
    for row in cells:
        if len(row) != len(headers):
            raise PageError(f"table(): a row has {len(row)} cells under {len(headers)} columns: {row[:1]}...")
    units = [found[1] if (found := _UNIT.search(header)) and found[1] in UNITS else None for header in headers]
    texts = [
        [_show(cell, unit, header).replace("|", "\\|") for cell, unit, header in zip(row, units, headers, strict=True)]
        for row in cells
    ]
    right = [
        any(unit or isinstance(row[i], (int, float)) for row in cells) and not all(isinstance(r[i], str) for r in cells)
        for i, unit in enumerate(units)
    ]
    widths = [max([3, len(header), *(len(row[i]) for row in texts)]) for i, header in enumerate(headers)]

    def line(values: Sequence[str]) -> str:
        pad: list[Callable[[int], str]] = [v.rjust if r else v.ljust for v, r in zip(values, right, strict=True)]
        return "| " + " | ".join(p(w) for p, w in zip(pad, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(headers), rule, *(line(row) for row in texts)])
