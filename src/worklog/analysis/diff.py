"""The change of a window's wall time, before -> after, as a sum of terms that equals it to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from worklog.analysis.ledger import KEY, Ledger
from worklog.analysis.match import match
from worklog.analysis.spread import half_width

Kind = Literal["added", "removed", "slower", "faster", "exposed", "hidden", "copy", "memset", "idle", "busy"]

LAUNCHED = ("kernel", "graph")
"""Groups of a ledger in which one launch is like the other."""


@dataclass(frozen=True)
class Amount:
    """What one occurrence spends on a term's work; of several shapes together."""

    name: str
    shape: str
    count: float
    ns: int
    """How long it ran, also behind other work."""
    exclusive_ns: int


@dataclass(frozen=True)
class Term:
    kind: Kind
    """added, removed: launches of a kernel. slower, faster: each launch. exposed, hidden: less or more of it ran behind
    other work. copy, memset, idle: all of the change. busy: of everything that ran, where it cannot be told apart."""
    name: str
    part: str
    """Of the accounting, to whose change the terms of a part add up; or `busy`."""
    module: str
    ns: int
    """Positive: this much longer after."""
    spread_ns: float | None
    """Half of the 95 % interval of ns over the occurrences; None: a side has only one."""
    within_noise: bool | None
    matched_by: str
    before: Amount | None
    after: Amount | None


@dataclass(frozen=True)
class Difference:
    before_ns: int
    after_ns: int
    delta_ns: int
    spread_ns: float | None
    within_noise: bool | None
    terms: list[Term]
    """Largest first; none is zero, and their sum is delta_ns."""


def diff(before: Ledger, after: Ledger, spelled_alike: bool = True) -> Difference:
    """One occurrence against one occurrence: the means, in whole nanoseconds (Ledger.per_occurrence).

    A kernel that is on both sides changes by up to three terms: launches added or removed, times the mean of its times
    before and after; each launch slower or faster, times the mean of the launches before and after; exposed or hidden
    time. `spelled_alike`: see match. Exchanging before and after negates every term. O(n log n).
    """
    matches = match(before, after, spelled_alike)
    old, new = _Side.of(before, matches.before, len(matches.how)), _Side.of(after, matches.after, len(matches.how))
    effects = [effect for effect in _effects(old, new) if len(effect.ns)]
    terms = [
        _term(effect, number, matches.how[number], old, new)
        for effect in effects
        for number in np.flatnonzero(effect.ns).tolist()
    ]
    spread = half_width(_variance(before.spans_ns), before.occurrences, _variance(after.spans_ns), after.occurrences)
    spans = int(old.exclusive.sum()), int(new.exclusive.sum())
    return Difference(
        *spans,
        spans[1] - spans[0],
        *_noise(spans[1] - spans[0], float(spread)),
        sorted(terms, key=lambda term: (-abs(term.ns), term.name, term.kind, term.module)),
    )


@dataclass(frozen=True)
class _Side:
    """Arrays over the matches, of one occurrence."""

    occurrences: int
    entries: dict[str, Any]
    """Columns of the ledger's entries."""
    number: Any
    """Of each entry its match."""
    of_match: Any
    """The entries of each match."""
    exclusive: Any
    hidden: Any
    count: Any
    variance: dict[str, Any]
    """Over the occurrences: of count, exclusive and hidden ns, and of the mean ns of a launch."""
    launched: Any
    """In how many occurrences there was a launch."""

    @classmethod
    def of(cls, ledger: Ledger, number: Any, size: int) -> _Side:
        exclusive, hidden = ledger.per_occurrence()
        spent = ledger.spent.assign(number=number[ledger.spent["entry"]])
        spent = spent.groupby(["number", "occurrence"])[["count", "ns", "exclusive_ns"]].sum().reset_index()
        values = {
            "count": spent["count"],
            "exclusive": spent["exclusive_ns"],
            "hidden": spent["ns"] - spent["exclusive_ns"],
        }
        groups, every = spent["number"].to_numpy(), np.full(size, ledger.occurrences)
        launched = np.bincount(groups, minlength=size)
        variance = {name: _variances(groups, of, size, every) for name, of in values.items()}
        variance["launch"] = _variances(groups, spent["ns"] / spent["count"], size, launched)
        summed = [np.zeros(size, np.int64) for _ in range(3)]
        for total, value in zip(summed, (exclusive, hidden, ledger.entries["count"].to_numpy()), strict=True):
            np.add.at(total, number, value)
        order = np.argsort(number, kind="stable")
        rows = np.split(order, np.searchsorted(number[order], np.arange(1, size)))
        count = summed[2] / ledger.occurrences
        columns = {name: ledger.entries[name].to_numpy(object) for name in KEY}
        return cls(ledger.occurrences, columns, number, rows, summed[0], summed[1], count, variance, launched)

    @property
    def of_launch(self) -> Any:
        """Mean ns of a launch, alone or behind others; 0: there is none."""
        return (self.exclusive + self.hidden) / np.maximum(self.count, np.finfo(float).tiny)

    def amount(self, number: int) -> Amount | None:
        rows = self.of_match[number]
        if not len(rows):
            return None
        shapes = sorted(set(self.entries["shape"][rows]))
        exclusive, count = int(self.exclusive[number]), float(self.count[number])
        shape = shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes"
        return Amount(self.entries["name"][rows[0]], shape, count, exclusive + int(self.hidden[number]), exclusive)


@dataclass(frozen=True)
class _Effect:
    """Arrays over the matches."""

    kinds: Any
    """Where ns is negative, where it is positive."""
    ns: Any
    spread: Any


def _effects(old: _Side, new: _Side) -> list[_Effect]:
    """What adds up to the change of every match."""

    def spread(of: str, scale: Any = 1.0) -> Any:
        counts = (old.launched, new.launched) if of == "launch" else (old.occurrences, new.occurrences)
        return half_width(old.variance[of], counts[0], new.variance[of], counts[1]) * scale

    group = np.full(len(old.exclusive), "", object)
    for side in (old, new):
        group[side.number] = side.entries["group"]
    launches = np.isin(group, LAUNCHED)
    both = launches & (old.count > 0) & (new.count > 0)
    mean, count = (old.of_launch + new.of_launch) / 2, (old.count + new.count) / 2
    launched = np.where(both, np.rint((new.count - old.count) * mean), 0).astype(np.int64)
    hiding = np.where(both, old.hidden - new.hidden, 0)
    rest = new.exclusive - old.exclusive - launched - hiding
    own = np.where(launches, "", group)
    return [
        _Effect((np.full(len(own), "removed"), np.full(len(own), "added")), launched, spread("count", mean)),
        _Effect((np.full(len(own), "hidden"), np.full(len(own), "exposed")), hiding, spread("hidden")),
        _Effect(
            tuple(
                np.where(both, one, np.where(launches, two, own))
                for one, two in (("faster", "removed"), ("slower", "added"))
            ),
            rest,
            np.where(both, spread("launch", count), spread("exclusive")),
        ),
    ]


def _term(effect: _Effect, number: int, how: str, old: _Side, new: _Side) -> Term:
    ns = int(effect.ns[number])
    side = new if len(new.of_match[number]) else old
    entry = side.of_match[number][0]
    modules = {module for one in (old, new) for module in one.entries["module"][one.of_match[number]]}
    spread, within = _noise(ns, float(effect.spread[number]))
    return Term(
        kind=effect.kinds[ns > 0][number],
        name=side.entries["name"][entry],
        part=side.entries["part"][entry],
        module=modules.pop() if len(modules) == 1 else "",
        ns=ns,
        spread_ns=spread,
        within_noise=within,
        matched_by=how,
        before=old.amount(number),
        after=new.amount(number),
    )


def _noise(ns: int, spread: float) -> tuple[float | None, bool | None]:
    return (None, None) if np.isnan(spread) else (spread, abs(ns) <= spread)


def _variances(group: Any, values: Any, size: int, counts: Any) -> Any:
    """Of each group; of its `counts` values those that are not given are 0. NaN for fewer than two."""
    counts, values = np.maximum(counts, 1), np.asarray(values, dtype=float)
    mean = np.bincount(group, values, size) / counts
    squares = np.bincount(group, (values - mean[group]) ** 2, size)
    squares = squares + (counts - np.bincount(group, minlength=size)) * mean**2
    return np.divide(squares, counts - 1, out=np.full(size, np.nan), where=counts > 1)


def _variance(values: Any) -> float:
    return float(np.var(values, ddof=1)) if len(values) > 1 else float("nan")
