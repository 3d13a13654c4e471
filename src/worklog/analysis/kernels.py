"""Kernels by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.timeline import launched_kernels
from worklog.traces.schema import Trace


def by_name(trace: Trace, launched: Any) -> list[tuple[str, int, int]]:
    """(demangled name, count, summed ns) of the kernels among `launched`, most costly first.

    Kernels that overlap count each in full. A duration below zero counts as zero.
    """
    act, mine = trace.activities, launched_kernels(trace, launched)
    ns = np.maximum((act["end_ns"].to_numpy() - act["start_ns"].to_numpy())[mine], 0)
    found = pd.Series(ns).groupby(act["name"].cat.codes.to_numpy()[mine]).agg(["size", "sum"])
    names = act["name"].cat.categories
    rows = zip(names[found.index], found["size"].tolist(), found["sum"].tolist(), strict=True)
    return sorted(((str(name), count, ns) for name, count, ns in rows), key=lambda row: (-row[2], row[0]))
