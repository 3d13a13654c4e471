"""The tables that every reader of timelines fills: what ran on devices, what the host called, which ranges it named.

Times are integer nanoseconds on one clock for a trace. -1 stands for what a trace does not say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from worklog.problem import ProblemError
from worklog.traces.intervals import Intervals

COMPUTE, COMMUNICATION, COPY, MEMSET, GRAPH = range(5)
"""`kind` of an activity; of those that overlap the first has the time. GRAPH: a replay without rows for its nodes."""
LAUNCH, SYNC, COPYING, OTHER = range(4)
"""`kind` of a call."""
ACTIVITY = {
    "start_ns": "int64",
    "end_ns": "int64",
    "device": "int32",
    "stream": "int32",
    "kind": "int8",
    "name": "category",
    "correlation": "int64",
    "process": "int32",
    "call": "int64",
    "pageable": "int8",
    "bytes": "int64",
}
"""`call` is the row of the call that asked for it; `pageable` 1: a copy from or to pageable host memory; `bytes` of
copies and memsets."""
CALL = {
    "start_ns": "int64",
    "end_ns": "int64",
    "thread": "int32",
    "process": "int32",
    "name": "category",
    "correlation": "int64",
    "kind": "int8",
    "graph": "bool",
}
"""`graph`: launches a whole CUDA graph."""
ANNOTATION, MODULE, PYTHON, OPERATOR, SPAN = range(5)
"""`kind` of a frame: an NVTX or record_function range, an nn.Module's forward, a Python function, an operator; SPAN:
a range that begins and ends anywhere (nvtx start/end) and so nests in nothing."""
FRAME = {
    "start_ns": "int64",
    "end_ns": "int64",
    "thread": "int32",
    "process": "int32",
    "kind": "int8",
    "name": "category",
    "sequence": "int64",
    "forward_thread": "int64",
}
"""What the host's threads were in. `sequence` and `forward_thread` join an autograd operator to its forward one."""
COLLECTIVE = {
    "activity": "int64",
    "group": "category",
    "name": "category",
    "sequence": "int64",
    "size": "int64",
}
"""What is known of communication kernels beside their names: `activity` is the kernel's row; `group`, a process group,
and `sequence`, the number of the call in it, are the same on every rank; `size` is the number of ranks in the group."""

NO_NAMES = pd.Categorical([], categories=pd.Index([], dtype=object))

_API = r"(cu|cuda|hip)"
_CALLS = (
    (LAUNCH, re.compile(_API + r"(Ext|Module)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")),
    (SYNC, re.compile(_API + r"(Device|Stream|Event|Ctx)Synchronize")),
    (COPYING, re.compile(_API + r"Memcpy")),
)
_COMMUNICATION = re.compile(
    r"\b_?(nccl|rccl|msccl|nvshmem)|(one_shot|two_shot|multimem)_all_reduce|cross_device_reduce", re.IGNORECASE
)
"""Kernels of NCCL and its kin, of torch's symmetric memory, and vLLM's own all-reduce."""


@dataclass(frozen=True)
class Selection:
    """What a window is about: which activities were asked for in it, and the time of each device that it covers."""

    launched: Any
    """Mask over activities."""
    called: Any
    """Mask over calls."""
    windows: dict[int, Intervals]
    spans: pd.DataFrame
    """Of each device and occurrence of the range: start and end of what was launched, before overlap makes them one."""


@dataclass(frozen=True, eq=False)
class Trace:
    file: Path
    tool: Literal["nsys", "torch.profiler"]
    tool_version: str | None
    activities: pd.DataFrame
    calls: pd.DataFrame
    frames: pd.DataFrame
    stacks: bool = False
    """Python stacks were recorded, which slows the host several times."""
    rank: int | None = None
    """Of a distributed run, where the trace says it."""
    collectives: pd.DataFrame = field(default_factory=lambda: frame(COLLECTIVE, group=NO_NAMES, name=NO_NAMES))
    """Of the communication kernels that the trace tells more of; nsys tells nothing."""
    notes: tuple[str, ...] = ()
    """What the file does not tell, or may tell otherwise than it was read: sentences without their full stop."""

    @cached_property
    def ranges(self) -> pd.DataFrame:
        """The frames that a program named itself."""
        return self.frames[self.frames["kind"].isin((ANNOTATION, SPAN))]

    @cached_property
    def lost(self) -> Any:
        """Mask over calls: launches without a row of what they launched."""
        mask = (self.calls["kind"] == LAUNCH).to_numpy().copy()
        call = self.activities["call"].to_numpy()
        mask[call[call >= 0]] = False
        return mask

    def called_at(self) -> Any:
        """For each activity the start of the call that asked for it; its own start where that is unknown."""
        own, call = self.activities["start_ns"].to_numpy(), self.activities["call"].to_numpy()
        if self.calls.empty:
            return own
        return np.where(call >= 0, self.calls["start_ns"].to_numpy()[call], own)

    def select(self, range_name: str | None = None) -> Selection:
        """The whole trace, or the range(s) of this name, projected on the devices.

        A device's window begins with the first call (inside of the range, in its process, on whichever thread) that
        launched something on it, and ends when the last of what was launched ended; of a range that occurs many times
        each occurrence has its own, and those that overlap are one. `ProfilerStep` means every step of torch.profiler.
        Raises ProblemError if there is no such range or it launched nothing.
        """
        act = self.activities
        if range_name is None:
            occurrence, called = np.zeros(len(act), np.int64), np.ones(len(self.calls), bool)
        else:
            of_call = self.occurrence(range_name, self.calls)
            called, call = of_call >= 0, act["call"].to_numpy()
            occurrence = np.where(call >= 0, of_call[call], -1) if len(of_call) else np.full(len(act), -1)
        launched = occurrence >= 0
        if range_name is not None and not launched.any() and not (called & (self.calls["kind"] == LAUNCH)).any():
            raise ProblemError(f"{self.file}: nothing was launched on a GPU inside of the NVTX range {range_name!r}.")
        spans = pd.DataFrame(
            {
                "device": act["device"].to_numpy(),
                "occurrence": occurrence,
                "start": np.minimum(act["start_ns"].to_numpy(), self.called_at()),
                "end": act["end_ns"].to_numpy(),
            },
            copy=False,
        )
        if not launched.all():
            spans = spans[launched]
        spans = spans.groupby(["device", "occurrence"], sort=True).agg({"start": "min", "end": "max"}).reset_index()
        return Selection(
            launched,
            called,
            {int(device): Intervals.union(own["start"], own["end"]) for device, own in spans.groupby("device")},
            spans,
        )

    def occurrence(self, name: str, table: pd.DataFrame) -> Any:
        """For each row of calls or frames the number of the range's occurrence in which it began, -1: outside."""
        names = self.ranges["name"].astype(str)
        mine = self.ranges[(names == name) | (names.str.startswith("ProfilerStep#") & (name == "ProfilerStep"))]
        if mine.empty:
            known = ", ".join(sorted({str(other) for other in names})[:8])
            raise ProblemError(f"{self.file}: has no NVTX range {name!r}; its ranges: {known or 'none'}.")
        found = np.full(len(table), -1, np.int64)
        process, start = table["process"].to_numpy(), table["start_ns"].to_numpy()
        base = 0
        for owner, own in mine.groupby("process"):
            times = Intervals.apart(own["start_ns"], own["end_ns"] + 1)  # a call at the very end is inside
            at = np.searchsorted(times.start, start, side="right") - 1
            ends = np.concatenate((times.end, [np.iinfo(np.int64).min]))
            found = np.where((process == owner) & (start < ends[at]) & (at >= 0), base + at, found)
            base += len(times.start)
        return found


def frame(columns: dict[str, str], **values: Any) -> pd.DataFrame:
    """A table of this schema; what is not given is -1. Nothing is copied that has the type already."""
    length = max((len(value) for value in values.values()), default=0)
    series = {
        name: values[name] if dtype == "category" else _typed(values.get(name), dtype, length)
        for name, dtype in columns.items()
    }
    return pd.DataFrame(series, copy=False)


def _typed(values: Any, dtype: str, length: int) -> Any:
    if values is None:
        return np.full(length, -1, dtype)
    found = np.asarray(values)
    return small(found.astype(np.int64)) if dtype == "int32" != found.dtype else found.astype(dtype, copy=False)


def small(numbers: Any) -> Any:
    """With 32 bits; -1 for what they do not hold."""
    if len(numbers) and not -(1 << 31) <= numbers.min() <= numbers.max() < 1 << 31:
        numbers = np.where(np.abs(numbers) < 1 << 31, numbers, -1)
    return numbers.astype(np.int32)


def categories(codes: Any, names: Sequence[str]) -> pd.Categorical:
    """`codes` of `names`, of which several may be equal."""
    unique, first = np.unique(np.asarray(names, dtype=object), return_inverse=True) if len(names) else ([], [])
    return pd.Categorical.from_codes(
        np.asarray(first, dtype=np.int32)[codes], categories=pd.Index(unique, dtype=object)
    )


def kernel_kinds(names: pd.Categorical) -> Any:
    """COMPUTE or COMMUNICATION of each kernel, by its name."""
    kinds = [COMMUNICATION if _COMMUNICATION.search(str(name)) else COMPUTE for name in names.categories]
    return np.asarray(kinds, dtype=np.int8)[names.codes] if kinds else np.zeros(0, np.int8)


def call_kinds(names: pd.Categorical) -> tuple[Any, Any]:
    """LAUNCH, SYNC, COPYING or OTHER of each call by its name, and whether it launches a graph."""
    known = [str(name) for name in names.categories]
    kinds = [next((kind for kind, pattern in _CALLS if pattern.match(name)), OTHER) for name in known]
    if not known:
        return np.zeros(0, np.int8), np.zeros(0, bool)
    graphs = [kind == LAUNCH and "GraphLaunch" in name for kind, name in zip(kinds, known, strict=True)]
    return np.asarray(kinds, dtype=np.int8)[names.codes], np.asarray(graphs, dtype=bool)[names.codes]


def outermost(calls: pd.DataFrame) -> pd.DataFrame:
    """In the order of their starts, without calls that another one made for the same correlation id."""
    if not calls["start_ns"].is_monotonic_increasing:
        calls = calls.sort_values("start_ns", kind="stable", ignore_index=True)
    keys = _keys(calls["process"].to_numpy(), calls["correlation"].to_numpy())
    inner = np.zeros(len(keys), bool)
    if not _rising(keys):
        order = np.argsort(keys, kind="stable")
        inner[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    inner &= calls["correlation"].to_numpy() > 0
    return calls[~inner].reset_index(drop=True) if inner.any() else calls


def join(process: Any, correlation: Any, calls: pd.DataFrame) -> Any:
    """For each activity the row of the call of its process with its correlation id, -1: there is none."""
    if not (size := len(calls)):
        return np.full(len(correlation), -1, np.int64)
    owners, asked = calls["process"].to_numpy(), calls["correlation"].to_numpy()
    if (owners == owners[0]).all() and (process == owners[0]).all():
        keys, wanted = asked, correlation
    else:
        both = _keys(np.concatenate((owners, process)), np.concatenate((asked, correlation)))
        keys, wanted = both[:size], both[size:]
    order = None if _rising(keys) else np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, wanted, sorter=order), size - 1)
    rows = at if order is None else order[at]
    return np.where((correlation > 0) & (keys[rows] == wanted), rows, -1)


def _rising(keys: Any) -> bool:
    return bool((keys[1:] > keys[:-1]).all())


def _keys(process: Any, correlation: Any) -> Any:
    """One integer for each pair."""
    if int(correlation.max(initial=0)) > 1 << 40:  # no tool counts so far: the product must not overflow
        correlation = np.where(correlation > 0, pd.factorize(correlation)[0] + 1, 0)
    if (process == process[:1]).all():
        return correlation
    codes = pd.factorize(process)[0]
    return codes * (int(correlation.max(initial=0)) + 1) + np.maximum(correlation, 0)
