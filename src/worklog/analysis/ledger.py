"""A device's window as amounts that add up: kernels by name, shape and module, copies, and the kinds of idle time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.exclusive import Occurrences, attribute
from worklog.analysis.timeline import BUSY, IDLE, account
from worklog.traces.activity import GEOMETRY
from worklog.traces.intervals import Intervals
from worklog.traces.schema import COMMUNICATION, COPY, GRAPH, MEMSET, Selection, Trace

KEY = ("group", "part", "name", "shape", "module")
SPENT = ["count", "ns", "exclusive_ns"]
GROUPS = {COPY: "copy", MEMSET: "memset", GRAPH: "graph"}
"""Of activities; the others are kernels. Beside them `idle`, and `busy` where activities cannot be told apart."""
COPIED = re.compile(r"memcpy\w* (\w+)", re.IGNORECASE)
BUSY_NAME = "everything that ran on the GPU"


@dataclass(frozen=True)
class Ledger:
    occurrences: int
    spans_ns: Any
    """Of each occurrence."""
    entries: pd.DataFrame
    """Sorted by KEY, its columns, all text; and count, ns, exclusive_ns (summed over the occurrences), first_ns."""
    spent: pd.DataFrame
    """entry (row of entries), occurrence in which it began, count, ns, exclusive_ns; exclusive_ns adds up to the spans.
    """

    def per_occurrence(self) -> tuple[Any, Any]:
        """For each entry (exclusive, hidden) ns of one occurrence, integers.

        The exclusive ones are the means, rounded so that they add up to the rounded mean span: an entry gets what its
        addition changes in the rounded running sum, so each is less than 1 ns off. Hidden is what ran behind others.
        """
        running = np.cumsum(self.entries["exclusive_ns"].to_numpy())
        exclusive = np.diff(self._rounded(running), prepend=0)
        return exclusive, self._rounded((self.entries["ns"] - self.entries["exclusive_ns"]).to_numpy())

    def _rounded(self, total: Any) -> Any:
        """The mean over occurrences of sums that are not negative, half up."""
        return (2 * total + self.occurrences) // (2 * self.occurrences)


def ledger(trace: Trace, selection: Selection, device: int, modules: Any = None, apart: bool = True) -> Ledger:
    """Of one device in the selection's windows; `trace` may have the columns of activity.GEOMETRY.

    `modules` names for each call the module that made it. Without `apart` all activities are one entry.
    """
    occurrences = Occurrences.of(selection, device)
    pieces = attribute(trace, device, occurrences)
    entry, entries = _entries(trace, pieces["row"].to_numpy(), modules, apart)
    pieces["entry"] = entry
    begins = ~pieces["row"].duplicated().to_numpy()  # what crosses into the next occurrence is of the first, whole
    pieces["count"] = begins
    pieces["occurrence"] = pieces["occurrence"].to_numpy()[begins][np.cumsum(begins) - 1]
    idle, parts = _idle(trace, selection, device, occurrences)
    idle["entry"] += len(entries)
    entries = pd.concat([entries, parts], ignore_index=True)
    spent = pd.concat([pieces.drop(columns="row"), idle]).groupby(["entry", "occurrence"])[SPENT].sum().reset_index()
    entries = entries.join(spent.groupby("entry")[SPENT].sum().reindex(entries.index, fill_value=0))
    order = entries.sort_values(list(KEY)).index.to_numpy()
    spent["entry"] = np.argsort(order)[spent["entry"]]
    spans = np.zeros(occurrences.count, np.int64)
    spans[occurrences.windows.row] = occurrences.windows.end - occurrences.windows.start
    return Ledger(occurrences.count, spans, entries.loc[order].reset_index(drop=True), spent)


def _entries(trace: Trace, rows: Any, modules: Any, apart: bool) -> tuple[Any, pd.DataFrame]:
    """For each of these rows of activities the number of its entry, and KEY and first_ns of the entries."""
    act = trace.activities.iloc[rows]
    if not apart:
        first = act["start_ns"].min() if len(rows) else 0
        every = pd.DataFrame([("busy", "busy", BUSY_NAME, "", "", first)], columns=[*KEY, "first_ns"])
        return np.zeros(len(rows), np.int64), every[: len(rows)]
    kernel = act["kind"].to_numpy() <= COMMUNICATION
    codes = {"kind": act["kind"].to_numpy(), "name": act["name"].cat.codes.to_numpy()}
    if set(GEOMETRY) <= set(act.columns):
        codes |= {name: np.where(kernel, act[name], -1) for name in GEOMETRY}
    if modules is not None:
        call = act["call"].to_numpy()
        codes["module"] = np.where(kernel & (call >= 0), np.append(modules.codes, -1)[call], -1)
    table = pd.DataFrame({**codes, "first_ns": act["start_ns"].to_numpy()})
    groups = table.groupby(list(codes))
    entries = groups["first_ns"].min().reset_index()
    known = act["name"].cat.categories
    spelled = [_name(k, str(known[c])) for k, c in zip(entries["kind"], entries["name"], strict=True)]
    return groups.ngroup().to_numpy(), pd.DataFrame(
        {
            "group": [GROUPS.get(kind, "kernel") for kind in entries["kind"]],
            "part": [BUSY[kind] for kind in entries["kind"]],
            "name": spelled,
            "shape": _shapes(entries),
            "module": ["" if code < 0 else str(modules.categories[code]) for code in entries.get("module", ())] or "",
            "first_ns": entries["first_ns"],
        }
    )


def _name(kind: int, name: str) -> str:
    """Copies go by their way alone: tools name them differently, and one that was pinned is still the same copy."""
    if kind == COPY:
        way = COPIED.search(name)
        return f"memcpy {way[1]}" if way else name
    return "memset" if kind == MEMSET else name


def _shapes(entries: pd.DataFrame) -> Any:
    """`4096x1x1 of 128x1x1`: grid and block; empty where they are unknown."""
    if "grid_x" not in entries:
        return ""
    sizes = entries[list(GEOMETRY)].to_numpy().tolist()
    return ["" if row[0] < 0 else "{}x{}x{} of {}x{}x{}".format(*row) for row in sizes]


def _idle(
    trace: Trace, selection: Selection, device: int, occurrences: Occurrences
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The accounting's gaps as pieces, a gap in the occurrence in which it begins; and the entries of IDLE."""
    window = selection.windows.get(device, Intervals.union([], []))
    gaps = account(trace, device, window).gaps
    found = []
    for number, part in enumerate(IDLE):
        own = gaps[gaps[part] > 0]
        ns = own[part].to_numpy()
        columns = {"entry": number, "occurrence": occurrences.at(own["start_ns"].to_numpy()), "count": 1}
        found.append(pd.DataFrame({**columns, "ns": ns, "exclusive_ns": ns}))
    names = pd.DataFrame([("idle", part, part, "", "", 0) for part in IDLE], columns=[*KEY, "first_ns"])
    return pd.concat(found, ignore_index=True), names
