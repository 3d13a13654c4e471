"""Device time given to single activities: each nanosecond that a device is busy belongs to exactly one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.timeline import BUSY
from worklog.traces.intervals import Intervals
from worklog.traces.schema import Selection, Trace


@dataclass(frozen=True)
class Occurrences:
    """The occurrences of a range on one device, as windows that are apart."""

    count: int
    windows: Intervals
    """Sorted, they may touch; `row` numbers the occurrence, of which one may have no window."""

    @classmethod
    def of(cls, selection: Selection, device: int) -> Occurrences:
        """Where they overlap (the host asks for the next step while the last one runs) the earlier has the time.

        Their windows' union is the selection's, so their lengths add up to the accounting's span.
        """
        own = selection.spans[selection.spans["device"] == device]
        return cls(len(own), Intervals.apart(own["start"], own["end"]))

    def at(self, time: Any) -> Any:
        """The number of the occurrence in whose window each time lies; the times lie in one."""
        return self.windows.row[np.searchsorted(self.windows.start, time, side="right") - 1]


def attribute(trace: Trace, device: int, occurrences: Occurrences) -> pd.DataFrame:
    """A row for each activity and occurrence that meet: row (of activities), occurrence, ns and exclusive_ns.

    `ns` is how long the activity ran in the window. `exclusive_ns` is what of it the activity is given: where several
    run, time belongs to the first of compute, communication, copy, memset, replay of a graph, as in timeline.account,
    and within a kind to the one that began first (of those that began together, to the one first in the trace). The
    sums of exclusive_ns by kind are the accounting's parts. O(n log n).
    """
    act, windows = trace.activities, occurrences.windows
    start, end = act["start_ns"].to_numpy(), act["end_ns"].to_numpy()
    rows = np.flatnonzero((act["device"].to_numpy() == device) & (end > start))
    kind = act["kind"].to_numpy()[rows]
    rows = rows[np.lexsort((start[rows], kind))]
    kind, start, end = act["kind"].to_numpy()[rows], start[rows], end[rows]
    met = Intervals(start, end, rows).pieces(windows)  # its `row` counts in `rows`
    own = np.zeros(len(met.row), np.int64)
    first = np.searchsorted(met.row, np.arange(len(rows)))  # of each activity's pieces
    window = np.searchsorted(windows.start, met.start, side="right") - 1
    for level in BUSY:
        low, high = np.searchsorted(kind, [level, level + 1])
        if low == high:
            continue
        alone = np.maximum(start[low:high], _reached(end[low:high]))
        free = Intervals.union(start[:low], end[:low]).gaps(windows)
        given = Intervals(alone, end[low:high], rows[low:high]).pieces(free)
        mine = low + given.row
        at = first[mine] + np.searchsorted(windows.start, given.start, side="right") - 1 - window[first[mine]]
        length = given.end - given.start
        np.add.at(own, at[length > 0], length[length > 0])
    return pd.DataFrame(
        {
            "row": rows[met.row],
            "occurrence": windows.row[window],
            "ns": met.end - met.start,
            "exclusive_ns": own,
        }
    )


def _reached(end: Any) -> Any:
    """How far the intervals before each one reach."""
    lowest = np.iinfo(np.int64).min
    return np.concatenate(([lowest], np.maximum.accumulate(end)[:-1])) if len(end) else end
