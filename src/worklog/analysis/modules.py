"""The module that made each call, where a trace knows modules."""

from __future__ import annotations

import numpy as np
import pandas as pd

from worklog.analysis.context import contexts, intern
from worklog.traces import schema
from worklog.traces.schema import Trace


def of_calls(trace: Trace) -> pd.Categorical | None:
    """`Net.Block.Linear`: the classes of the modules around each call, outermost first; "" around none.

    Without the profiler's instance numbers, which depend on what ran before; so the layers of a stack are one. A call
    of a backward operator is in the modules of its forward one. None: the trace knows no modules.
    """
    if not (trace.frames["kind"] == schema.MODULE).any():
        return None
    known = contexts(trace)
    text, texts = known.names(fold=True)
    at = known.around(*(trace.calls[name].to_numpy() for name in ("thread", "start_ns", "end_ns")))
    paths = intern(known, at, text)
    names = [""] * len(paths.parent)
    for node, (parent, kind, own) in enumerate(
        zip(paths.parent.tolist(), paths.kind.tolist(), paths.text.tolist(), strict=True)
    ):
        around = names[parent] if parent >= 0 else ""
        names[node] = ".".join(filter(None, (around, texts[own]))) if kind == schema.MODULE else around
    return schema.categories(np.append(paths.node, -1)[at], [*names, ""])
