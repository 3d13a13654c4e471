"""A difference of two timelines as text in a terminal: from before to after, term by term, in numbers that add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worklog.render.terminal import clean, three
from worklog.traces.activity import short_name

ROWS = 12
MODULES = 5
NARROW = 90
"""Below this width there is no waterfall."""
CELLS = 28
BROKEN = 0.6
"""A waterfall whose lowest point is above this part of its highest does not begin at nothing, and says so."""
NOISE = "~"
SMALL = 0.002
"""Rows below this part of all changes are folded."""
MEANING = {
    "added": "added, removed: launches of a kernel.",
    "slower": "slower, faster: each launch.",
    "exposed": "hidden, exposed: more, or less, of it ran behind other work.",
}
PAIRS = {"removed": "added", "faster": "slower", "hidden": "exposed"}
IDLE = {
    "launch": "work was on its way",
    "host": "the host had not asked for the next work",
    "sync": "the host still waited for work that was over",
    "unexplained": "the trace cannot tell why",
}
MATCHED = {"name": "another shape", "words of the name": "another spelling"}
KERNELS = {*PAIRS, *PAIRS.values()}
SUMS = {
    "kernels": ("compute",),
    "communication": ("communication",),
    "copies and memsets": ("copy", "memset"),
    "everything that ran": ("busy",),
    "replayed graphs": ("graph",),
    "idle": ("launch", "host", "sync", "unexplained"),
}


@dataclass(frozen=True)
class Row:
    """Terms that a reader takes for one: the same change of the same kernel in several shapes."""

    terms: Sequence[dict[str, Any]]

    @property
    def ns(self) -> int:
        return sum(term["ns"] for term in self.terms)

    @property
    def spread_ns(self) -> float | None:
        """No less than that of the sum: standard errors add up at most."""
        known = [term["spread_ns"] for term in self.terms]
        return None if None in known else sum(known)


def report(found: dict[str, Any], width: int = 120) -> Group:
    """What worklog.diff.diff returns."""
    parts: list[RenderableType] = [_source("before", found["before"]), _source("after ", found["after"])]
    longest, *others = sorted(found["devices"], key=lambda d: -max(d["before_ns"], d["after_ns"]))
    counts = found["before"]["occurrences"], found["after"]["occurrences"]
    parts += [Text(), _heading(longest), Text(_basis(counts), style="dim")]
    parts += [Text(summed)] if (summed := _summed(longest["terms"])) else []
    parts.append(Text())
    parts.append(_waterfall(longest, width))
    parts += [Text(), Text(modules)] if (modules := _by_module(longest["terms"])) else []
    parts += [Text.assemble(_heading(device), ("; its terms: --json", "dim")) for device in others]
    notes = [f"Not told apart: {one['terms']}: {clean(one['reason'])}." for one in found["abstained"]]
    notes += [clean(warning) for warning in found["warnings"]]
    parts += [Text(), *(Text(note, style="yellow") for note in notes)] if notes else []
    kinds = {PAIRS.get(term["kind"], term["kind"]) for term in longest["terms"]}
    legend = " ".join(text for kind, text in MEANING.items() if kind in kinds)
    return Group(*parts, *[Text(f"\n{legend}", style="dim")] * bool(legend))


def _source(word: str, side: dict[str, Any]) -> Text:
    version = f" {clean(side['tool_version'])}" if side["tool_version"] else ""
    told = [
        f"{side['tool']}{version}",
        clean(side["gpu"] or ""),
        f"range {clean(side['range'])}" if side["range"] else "whole trace",
    ]
    return Text.assemble(f"{word} ", (clean(side["file"]), "bold"), ": ", ", ".join(filter(None, told)))


def _heading(device: dict[str, Any]) -> Text:
    before, after, delta = device["before_ns"], device["after_ns"], device["delta_ns"]
    one, two = device["before_device"], device["after_device"]
    name = f"GPU {two}" if one == two else f"GPU {one}, then GPU {two}"
    change = f"{_time(abs(delta))} {'more' if delta > 0 else 'less'}" if delta else "no change"
    ratio = f", {three(after / before)} times as long" if before and delta else ""
    noise = ""
    if delta and device["spread_ns"] is not None:
        noise = f" (+- {_time(device['spread_ns'])}{', within noise' if device['within_noise'] else ''})"
    return Text(f"{name}: {_time(before)} -> {_time(after)}, {change}{noise}{ratio}", style="bold")


def _time(ns: float) -> str:
    """Five digits, for two times that are close to one another."""
    size, unit = next((size, unit) for size, unit in ((1e9, "s"), (1e6, "ms"), (0.0, "us")) if ns >= size)
    return f"{ns / (size or 1e3):.5g} {unit}"


def _basis(occurrences: tuple[int, int]) -> str:
    one, two = occurrences
    if one == two == 1:
        return "One occurrence on each side: no spread is known, so small terms may be noise."
    means = f"One occurrence: the mean of {one} before and of {two} after."
    if 1 in occurrences:
        return f"{means} With a single one on a side no spread is known."
    return f"{means} +-: 95 % interval over the occurrences; {NOISE}: within it, so maybe noise."


def _summed(terms: Sequence[dict[str, Any]]) -> str:
    """The terms by what they are of; they add up too."""
    found = []
    for words, parts in SUMS.items():
        own = [
            t["ns"]
            for t in terms
            if ("graph" if t["part"] == "unexplained" and t["kind"] != "idle" else t["part"]) in parts
        ]
        if own:
            found.append(f"{words} {exact(sum(own), sign=True)} us")
    return ", ".join(found)


def _by_module(terms: Sequence[dict[str, Any]]) -> str:
    """The kernels' terms, where modules are known; what is left has a place too, so that these add up."""
    spent: dict[str, int] = {}
    for term in terms:
        if term["kind"] in KERNELS:
            spent[term["module"]] = spent.get(term["module"], 0) + term["ns"]
    known = sorted((name for name in spent if name), key=lambda name: -abs(spent[name]))
    if not known:
        return ""
    rest = sum(spent.values()) - sum(spent[name] for name in known[:MODULES])
    told = [f"{clean(name)} {exact(spent[name], sign=True)} us" for name in known[:MODULES]]
    return "Kernels by module: " + ", ".join([*told, *[f"the rest {exact(rest, sign=True)} us"] * bool(rest)])


def _waterfall(device: dict[str, Any], width: int) -> Table:
    rows = _rows(device["terms"])
    least = SMALL * sum(abs(term["ns"]) for term in device["terms"])
    shown = [row for row in rows[:ROWS] if abs(row.ns) >= least]
    rest = rows[len(shown) :]
    if len(rest) == 1:
        shown, rest = rows, []
    spreads = device["spread_ns"] is not None
    bars = width >= NARROW
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    table.add_column("launches", justify="right", no_wrap=True)
    table.add_column("us", justify="right", no_wrap=True)
    if spreads:
        table.add_column("+- us", justify="right", no_wrap=True)
    if bars:
        table.add_column("", no_wrap=True, min_width=CELLS)
    folded = [*shown, Row([term for row in rest for term in row.terms])] if rest else shown
    running = [device["before_ns"]]
    for row in folded:
        running.append(running[-1] + row.ns)
    axis = Axis.of(running)

    def add(kind: str, what: Text, launches: str, ns: str, spread: str, bar: Text, style: str = "") -> None:
        table.add_row(kind, what, launches, ns, *[spread] * spreads, *[bar] * bars, style=style)

    add("before", Text(), "", exact(device["before_ns"]), "", axis.total(device["before_ns"]), "bold")
    for at, row in enumerate(folded):
        inside = row.spread_ns is not None and abs(row.ns) <= row.spread_ns
        number = NOISE * inside + exact(row.ns, sign=True)
        spread = "" if row.spread_ns is None else exact(round(row.spread_ns))
        last = bool(rest) and at == len(shown)
        what = Text(f"{len(row.terms)} terms") if last else _what(row)
        kind = "others" if last else row.terms[0]["kind"]
        launches = "" if last else _launches(row)
        dim = "dim" if inside or last else ""
        add(kind, what, launches, number, spread, axis.step(running[at], running[at + 1]), dim)
    add("after", Text(), "", exact(device["after_ns"]), "", axis.total(device["after_ns"]), "bold")
    return table


def _rows(terms: Sequence[dict[str, Any]]) -> list[Row]:
    """Largest first."""
    by_kernel: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for term in terms:
        key = tuple(term[name] for name in ("kind", "part", "name", "module", "matched_by"))
        by_kernel.setdefault(key, []).append(term)
    return sorted((Row(own) for own in by_kernel.values()), key=lambda row: -abs(row.ns))


def _what(row: Row) -> Text:
    term = row.terms[0]
    if term["kind"] == "idle":
        return Text(IDLE[term["name"]])
    old, new = term["before"], term["after"]
    name = clean(short_name(term["name"]) if term["kind"] in KERNELS else term["name"])
    if old and new and short_name(old["name"]) != short_name(new["name"]):
        name = f"{name} (was {clean(short_name(old['name']))})"
    shapes = {side["shape"] for one in row.terms for side in (one["before"], one["after"]) if side}
    told = [
        f"in {clean(term['module'])}" if term["module"] else "",
        MATCHED.get(term["matched_by"], f"{len(shapes)} shapes" * (len(shapes) > 1)),
    ]
    return Text.assemble(name, (", " + ", ".join(filter(None, told)) if any(told) else "", "dim"))


def _launches(row: Row) -> str:
    if row.terms[0]["kind"] in ("idle", "busy"):
        return ""
    one, two = (sum(term[side]["count"] for term in row.terms if term[side]) for side in ("before", "after"))
    return three(two) if one == two else f"{three(one)} -> {three(two)}"


def exact(ns: int, sign: bool = False) -> str:
    """Microseconds to the nanosecond, `12,345.678`, so that what is printed adds up."""
    whole, rest = divmod(abs(ns), 1000)
    return f"{'-' if ns < 0 else '+' if sign else ''}{whole:,}.{rest:03d}"


@dataclass(frozen=True)
class Axis:
    """Where a time stands among CELLS."""

    origin: int
    end: int

    @classmethod
    def of(cls, totals: Sequence[int]) -> Axis:
        low, high = min(totals), max(totals)
        return cls(low - (high - low) // 4 if low < high and low > BROKEN * high else 0, high)

    def at(self, ns: int) -> int:
        return round((ns - self.origin) * CELLS / (self.end - self.origin)) if self.end > self.origin else 0

    def total(self, ns: int) -> Text:
        """Its broken foot, where the axis does not begin at nothing, is drawn as one."""
        filled = max(self.at(ns), 1 if ns else 0)
        foot = min(filled, 2) if self.origin else 0
        return Text("┄" * foot + "█" * (filled - foot) + " " * (CELLS - filled))

    def step(self, before: int, after: int) -> Text:
        """What is less than a cell is a line."""
        low, high = self.at(min(before, after)), self.at(max(before, after))
        low = min(low, CELLS - 1)
        cells = "█" * (high - low) or "▏"
        bar = Text(" " * low).append(cells, style="red" if after > before else "green")
        return bar.append(" " * (CELLS - low - len(cells)))
