"""What ran on a device, stream by stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from worklog.traces.schema import Trace


@dataclass(frozen=True)
class Order:
    """Activities of a device: stream after stream (of each process), and on a stream by start."""

    row: Any
    """Of trace.activities."""
    stream: Any
    """A number for each process and stream."""

    @cached_property
    def first(self) -> Any:
        """Mask: with it a stream begins."""
        return np.append(True, self.stream[1:] != self.stream[:-1])[: len(self.row)]

    def keep(self, mask: Any) -> Order:
        return Order(self.row[mask], self.stream[mask])

    def runs(self, member: Any) -> tuple[Any, Any]:
        """First index, and one past the last, of each unbroken run of members (mask) on a stream."""
        before = np.append(False, member[:-1]) & ~self.first
        after = np.append(member[1:] & ~self.first[1:], False)[: len(member)]
        return np.flatnonzero(member & ~before), np.flatnonzero(member & ~after) + 1


def order(trace: Trace, device: int) -> Order:
    """Everything that ran on a device."""
    rows = np.flatnonzero(trace.activities["device"].to_numpy() == device)
    start = trace.activities["start_ns"].to_numpy()[rows]
    if not (start[1:] >= start[:-1]).all():
        rows = rows[np.argsort(start, kind="stable")]
    streams = numbers(trace, rows)
    if (streams != streams[:1]).any():
        sorting = np.argsort(streams, kind="stable")
        rows, streams = rows[sorting], streams[sorting]
    return Order(rows, streams)


def numbers(trace: Trace, rows: Any) -> Any:
    """For each of these activities the number of its process and stream."""
    process, stream = (trace.activities[name].to_numpy()[rows] for name in ("process", "stream"))
    codes, streams = pd.factorize(stream)
    if not (process == process[:1]).all():
        codes = codes + len(streams) * pd.factorize(process)[0]
    return codes.astype(np.uint16) if codes.max(initial=0) < 1 << 16 else codes  # of 16 bits sorting is linear
