"""The collectives of one rank: when its kernels ran, which call of which group each was, what came before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.context import place
from worklog.analysis.timeline import IDLE, Timeline
from worklog.traces.intervals import Intervals
from worklog.traces.schema import COMMUNICATION, COMPUTE, COPY, GRAPH, MEMSET, Selection, Trace

BEFORE = ("compute", "copy", "memset", *IDLE)
"""Parts of the time before a collective; timeline.PARTS without communication."""
KERNELS = 100
"""Names of kernels that a rank keeps, most costly first."""
PLACES = 3
"""Places in the source that it keeps."""
_EVERY_RANK = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|cross_device_reduce", re.I)
"""Collectives whose end on any rank needs data from every other: those that a broadcast or a send are not. Names as
torch.distributed gives them, or those of NCCL's kernels."""


@dataclass(frozen=True)
class Rank:
    """One device of one rank. What other ranks need of it, whatever the size of its trace."""

    rank: int
    device: int
    span_ns: int
    exposed: Intervals
    """Communication beside no compute in the windows of the timeline; its length is the accounting's communication."""
    collectives: pd.DataFrame
    """A row for each communication kernel, by start: start_ns, end_ns, group, name, number (its place in the group),
    numbered (the trace tells the number, not the order of kernels), size (ranks in the group, -1: unknown), every (it
    ends nowhere before every rank began it), follows (a communication kernel ran before it) and the parts BEFORE: the
    time since that kernel ended, or since the trace began, in ns."""
    kernels: dict[str, int]
    """Compute kernels that began in such times before a collective: summed ns by name."""
    places: dict[str, list[str]]
    """Where in the source (context.place, most costly first) collectives were launched, the `compute` kernels, and
    work that the device had to wait for, `idle`."""


def of_trace(trace: Trace, chosen: Selection, lines: Sequence[Timeline], everything: Sequence[Timeline]) -> list[Rank]:
    """`lines` account for what was chosen, `everything` for the whole trace; both have each device once."""
    whole = {line.device: line for line in everything}
    return [_of_device(trace, chosen, line, whole[line.device]) for line in lines]


def _of_device(trace: Trace, chosen: Selection, line: Timeline, everything: Timeline) -> Rank:
    """O(n log n) in activities; nothing is computed of a device without communication."""
    act = trace.activities
    own = np.flatnonzero(act["device"].to_numpy() == line.device)
    number = 0 if trace.rank is None else trace.rank
    talks = act["kind"].to_numpy()[own] == COMMUNICATION
    if not talks.any():
        return Rank(number, line.device, line.span_ns, Intervals.union([], []), pd.DataFrame(), {}, {})
    order = np.argsort(act["start_ns"].to_numpy()[own], kind="stable")
    own, talks = own[order], talks[order]
    start, end, kind = (act[name].to_numpy()[own] for name in ("start_ns", "end_ns", "kind"))
    end = np.maximum(end, start)
    rows = _described(trace, own[talks]).assign(start_ns=start[talks], end_ns=end[talks])
    begin = min([int(start[0]), *everything.gaps["start_ns"][:1].tolist()])
    since = np.concatenate(([begin], np.maximum.accumulate(end[talks])[:-1]))
    since = np.minimum(since, start[talks])
    rows["follows"] = np.arange(len(rows)) > 0
    for part, ns in _before(start, end, kind, everything.gaps, since, start[talks]).items():
        rows[part] = ns
    computes = kind == COMPUTE
    kernels = Intervals.union(start[kind <= COMMUNICATION], end[kind <= COMMUNICATION])
    free = Intervals.union(since[1:], start[talks][1:])
    early = computes & (free.inside(start, start + 1) > 0)
    idle = everything.gaps[free.inside(everything.gaps["start_ns"], everything.gaps["end_ns"]) > 0]
    waits = {"communication": (own[talks], (end - start)[talks]), "compute": (own[early], (end - start)[early])}
    waits["idle"] = (idle["next"].to_numpy(), (idle["end_ns"] - idle["start_ns"]).to_numpy())
    return Rank(
        rank=number,
        device=line.device,
        span_ns=line.span_ns,
        exposed=Intervals.union(start[computes], end[computes]).gaps(kernels).pieces(chosen.windows[line.device]),
        collectives=rows[chosen.launched[own[talks]]].reset_index(drop=True),
        kernels=_by_name(act["name"].array[own[early]], (end - start)[early]),
        places={what: _places(trace, *cost) for what, cost in waits.items()},
    )


def _described(trace: Trace, rows: Any) -> pd.DataFrame:
    """group, name, number, numbered, size and every; a kernel of which nothing is told is one of its stream's."""
    told = trace.collectives.set_index("activity")
    told = told[~told.index.duplicated()].reindex(rows)
    known = told["name"].notna().to_numpy()
    stream = pd.factorize(trace.activities["stream"].to_numpy()[rows])[0]
    kernel = trace.activities["name"].array[rows].astype(object)
    found = pd.DataFrame(
        {
            "group": np.where(known, told["group"].astype(object), [f"stream {at}" for at in stream]),
            "name": np.where(known, told["name"].astype(object), kernel),
            "size": told["size"].fillna(-1).to_numpy(np.int64),
        }
    )
    sequence = told["sequence"].fillna(-1).to_numpy(np.int64)
    found["numbered"] = sequence >= 0
    order = found.groupby(["group", "numbered"]).cumcount().to_numpy()
    found["number"] = np.where(sequence >= 0, sequence, order)
    names, known_names = pd.factorize(found["name"])
    found["every"] = np.asarray([_EVERY_RANK.search(name) is not None for name in known_names], dtype=bool)[names]
    return found


def _before(start: Any, end: Any, kind: Any, gaps: pd.DataFrame, low: Any, high: Any) -> dict[str, Any]:
    """Of each [low, high), in which no communication runs, the parts BEFORE; precedence as in timeline.account."""
    parts, busy = {}, np.zeros(len(low), np.int64)
    level = {"compute": kind == COMPUTE, "copy": kind == COPY, "memset": kind == MEMSET, "unexplained": kind == GRAPH}
    seen = np.zeros(len(kind), bool)
    for part, mask in level.items():
        if part == "compute" or mask.any():
            seen |= mask
            now = Intervals.union(start[seen], end[seen]).inside(low, high)
        parts[part], busy = now - busy, now
    began = gaps["start_ns"].to_numpy()
    at, to = np.searchsorted(began, low), np.searchsorted(began, high)
    for part in IDLE:
        upto = np.concatenate(([0], np.cumsum(gaps[part].to_numpy())))
        parts[part] = parts.get(part, 0) + np.where(to > at, upto[to] - upto[at], 0)
    return {part: parts[part] for part in BEFORE}


def _by_name(names: Any, ns: Any) -> dict[str, int]:
    spent = pd.Series(ns).groupby(np.asarray(names.codes)).sum().nlargest(KERNELS)
    return {str(names.categories[code]): int(total) for code, total in spent.items()}


def _places(trace: Trace, rows: Any, ns: Any) -> list[str]:
    call = np.where(rows >= 0, np.append(trace.activities["call"].to_numpy(), -1)[rows], -1)
    return place(trace, call[call >= 0], PLACES, ns[call >= 0])
