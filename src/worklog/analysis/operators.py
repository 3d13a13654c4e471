"""Operators by their own time on the CPU: all that a trace without a GPU tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.nesting import Nesting
from worklog.traces.schema import OPERATOR, Trace


def by_name(trace: Trace) -> list[dict[str, Any]]:
    """[{name, count, self_cpu_ns}], most time first; an operator's own time is that without operators inside of it.

    A duration below zero counts as zero.
    """
    frames = trace.frames[trace.frames["kind"] == OPERATOR].reset_index(drop=True)
    nesting = Nesting(frames)
    own = np.maximum(nesting.end - nesting.start, 0)
    around = nesting.parent(np.arange(len(own)))
    inner = around >= 0
    np.subtract.at(own, around[inner], own[inner].copy())
    spent = pd.DataFrame({"code": frames["name"].cat.codes.to_numpy()[nesting.row], "ns": np.maximum(own, 0)})
    found = spent.groupby("code")["ns"].agg(["size", "sum"])
    names = frames["name"].cat.categories[found.index]
    rows = zip(names, found["size"].tolist(), found["sum"].tolist(), strict=True)
    return sorted(
        ({"name": str(name), "count": count, "self_cpu_ns": ns} for name, count, ns in rows),
        key=lambda row: (-row["self_cpu_ns"], row["name"]),
    )
