"""torch.profiler's traces of any version since torch 1.13, as the schema's tables.

Events are read a batch at a time and kept as columns of integers, which take a third of the file's size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from worklog.problem import ProblemError
from worklog.traces import chrome, schema
from worklog.traces.activity import GEOMETRY
from worklog.traces.chrome import Args, Event
from worklog.traces.schema import Trace

DEVICE_WORK = {"kernel": schema.COMPUTE, "gpu_memcpy": schema.COPY, "gpu_memset": schema.MEMSET}
DEVICE_WORK |= {"Kernel": schema.COMPUTE, "Memcpy": schema.COPY, "Memset": schema.MEMSET}  # before torch 1.12
CALLS = ("cuda_runtime", "cuda_driver", "Runtime")
FRAMES = {"user_annotation": schema.ANNOTATION, "python_function": schema.PYTHON, "cpu_op": schema.OPERATOR}
FRAMES |= {"Operator": schema.OPERATOR}
MODULE = "nn.Module: "
COMMUNICATES = "record_param_comms"
"""The operator that torch.distributed's NCCL backend opens around each of its calls."""
BEYOND = 1 << 62


def tables(file: Path, geometry: bool = False) -> Trace:
    """The trace in the tables of the schema; with `geometry` activities have the columns of activity.GEOMETRY too.

    Raises ProblemError if it is no such trace or holds no timed event.
    """
    trace = chrome.load(file)
    columns = Columns(geometry)
    for batch in trace.batches():
        columns.add(batch)
    rank = trace.rank
    del trace  # the file's text
    if columns.empty:
        raise ProblemError(f"{file}: the trace is empty: it holds no event that has a duration.")
    return columns.trace(file, rank)


class Columns:
    """The columns of the schema's tables, as far as they were read."""

    def __init__(self, geometry: bool = False) -> None:
        self.geometry, self.empty = geometry, True
        self.threads: dict[tuple[Any, Any], int] = {}
        shape = GEOMETRY if geometry else ()
        self.work = _Rows("kind", "correlation", "external", "device", "stream", "bytes", *shape)
        self.calls = _Rows("thread", "correlation")
        self.frames = _Rows("thread", "kind", "sequence", "forward_thread")
        self.asked: dict[int, Args] = {}
        """What collectives were called with, by their External id."""
        self.carried: dict[int, Args] = {}
        """The same of the kernels that carry it, by their row."""

    def add(self, events: Sequence[Event]) -> None:
        timed = [event for event in events if event.ph == "X"]
        self.empty &= not timed
        if work := [event for event in timed if event.cat in DEVICE_WORK]:
            self._work(work)
        if calls := [event for event in timed if event.cat in CALLS]:
            correlation = integers([event.args.correlation for event in calls])
            self.calls.add(calls, thread=self._threads(calls), correlation=correlation)
        if frames := [event for event in timed if event.cat in FRAMES]:
            self.frames.add(
                frames,
                thread=self._threads(frames),
                kind=np.asarray([FRAMES[event.cat or ""] for event in frames], dtype=np.int8),
                sequence=integers([event.args.sequence for event in frames]),
                forward_thread=integers([event.args.forward_thread for event in frames]),
            )
            asked = {integer(event.args.external): event.args for event in frames if event.name == COMMUNICATES}
            self.asked |= {external: args for external, args in asked.items() if external >= 0}

    def _work(self, work: Sequence[Event]) -> None:
        carried = ((at, event.args) for at, event in enumerate(work, self.work.count))
        self.carried |= {at: args for at, args in carried if args.collective is not None}
        self.work.add(
            work,
            kind=np.asarray([DEVICE_WORK[event.cat or ""] for event in work], dtype=np.int8),
            correlation=integers([event.args.correlation for event in work]),
            external=integers([external(event.args) for event in work]),
            device=integers([device(event) for event in work]),
            stream=integers([stream(event) for event in work]),
            bytes=integers([event.args.bytes for event in work]),
            **(shapes(work) if self.geometry else {}),
        )

    def _threads(self, events: Sequence[Event]) -> Any:
        known = self.threads
        return np.asarray([known.setdefault((event.pid, event.tid), len(known)) for event in events], dtype=np.int64)

    def trace(self, file: Path, rank: int | None) -> Trace:
        """A trace of Kineto is of one process, so correlation ids alone join."""
        calls, work = self._called(), self.work.table()
        names, kind, extern = work["name"], work.pop("kind"), work.pop("external")
        shape = {name: work.pop(name) for name in GEOMETRY if name in work}
        process = np.zeros(len(kind), np.int64)
        kind = np.where(kind == schema.COMPUTE, schema.kernel_kinds(names), kind)
        activities = schema.frame(
            schema.ACTIVITY,
            **work,
            kind=kind,
            process=process,
            call=schema.join(process, work["correlation"], calls),
            pageable=np.where(kind == schema.COPY, pageable(names), -1),
        )
        if shape:
            activities = activities.assign(**shape)
        frames = self._framed()
        return Trace(
            file=file,
            tool="torch.profiler",
            tool_version=None,
            activities=activities,
            calls=calls,
            frames=frames,
            stacks=bool(frames["kind"].isin((schema.PYTHON, schema.MODULE)).any()),
            rank=rank,
            collectives=self._collectives(own_ids(extern, work["correlation"]), kind),
        )

    def _called(self) -> pd.DataFrame:
        calls = self.calls.table()
        kinds, graphs = schema.call_kinds(calls["name"])
        process = np.zeros(len(kinds), np.int64)
        return schema.outermost(schema.frame(schema.CALL, **calls, process=process, kind=kinds, graph=graphs))

    def _framed(self) -> pd.DataFrame:
        frames = self.frames.table()
        names, kind = frames["name"], frames["kind"]
        modules = np.asarray([name.startswith(MODULE) for name in names.categories], dtype=bool)
        if len(modules):
            kind[(kind == schema.PYTHON) & modules[names.codes]] = schema.MODULE
        return schema.frame(schema.FRAME, **frames, process=np.zeros(len(kind), np.int64))

    def _collectives(self, extern: Any, kind: Any) -> pd.DataFrame:
        """Kernels below a record_param_comms, whose arguments say more than the copy of them that kernels carry.

        Names of arguments: kineto's output_json.cpp and torch's profiler/util.h; Seq is of newer versions of torch.
        """
        rows = np.flatnonzero(kind == schema.COMMUNICATION).tolist()
        every = [(row, self.asked.get(int(extern[row])) or self.carried.get(row)) for row in rows]
        known = [(row, args) for row, args in every if args is not None and args.collective is not None]
        groups = [f"{'' if args.group is None else args.group} {args.group_ranks or ''}".strip() for _, args in known]
        codes = np.arange(len(known))
        return schema.frame(
            schema.COLLECTIVE,
            activity=[row for row, _ in known],
            group=schema.categories(codes, groups),
            name=schema.categories(codes, [str(args.collective) for _, args in known]),
            sequence=[integer(args.group_sequence) for _, args in known],
            size=[integer(args.group_size) for _, args in known],
        )


class _Rows:
    """Columns of one table, in pieces; names are numbers until the end."""

    def __init__(self, *columns: str) -> None:
        self.columns, self.count = columns, 0
        self.names: dict[str, int] = {}
        self.pieces: list[dict[str, Any]] = []

    def add(self, events: Sequence[Event], **columns: Any) -> None:
        self.count += len(events)
        names = self.names
        start = nanoseconds([event.ts for event in events])
        columns["start_ns"], columns["end_ns"] = start, start + nanoseconds([event.dur for event in events])
        columns["name"] = np.asarray([names.setdefault(event.name, len(names)) for event in events], dtype=np.int32)
        self.pieces.append(columns)

    def table(self) -> dict[str, Any]:
        if not self.pieces:
            self.add([], **dict.fromkeys(self.columns, np.zeros(0, np.int64)))
        found = {name: np.concatenate([piece.pop(name) for piece in self.pieces]) for name in list(self.pieces[0])}
        return found | {"name": schema.categories(found["name"], list(self.names))}


def nanoseconds(microseconds: Sequence[Any]) -> Any:
    """chrome.nanoseconds of each."""
    times = np.asarray(microseconds)
    if times.dtype == np.int64:
        return times * 1000
    if times.dtype != np.float64:
        return np.asarray([chrome.nanoseconds(one) for one in microseconds], dtype=np.int64)
    whole = np.trunc(times)
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


def integers(values: Sequence[Any]) -> Any:
    """`integer` of each."""
    try:
        found = np.asarray([-1 if value is None else value for value in values])
    except (ValueError, OverflowError):
        found = np.zeros(0)
    if found.dtype == np.int64 and found.ndim == 1 and (np.abs(found) < BEYOND).all():
        return found
    return np.asarray([integer(value) for value in values], dtype=np.int64)


def integer(value: Any) -> int:
    """-1 for what is none, or none of 64 bits."""
    try:
        return int(value) if abs(int(value)) < BEYOND else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def external(args: Args) -> Any:
    return args.old_external if args.external is None else args.external


def own_ids(extern: Any, correlation: Any) -> Any:
    """External ids of device work; -1 in older versions, where each is the correlation id and no operator's."""
    old = bool((extern == correlation)[extern >= 0].all())
    return np.full(len(extern), -1) if old else extern


def device(event: Event) -> Any:
    """Traces before torch 2.0 tell it by the event's pid alone."""
    return event.pid if event.args.device is None else event.args.device


def stream(event: Event) -> Any:
    """The lane of device work is its stream, once called `stream 7`."""
    if event.args.stream is not None:
        return event.args.stream
    return re.sub(r"^stream ", "", event.tid) if isinstance(event.tid, str) else event.tid


def pageable(names: pd.Categorical) -> Any:
    """1: `Memcpy HtoD (Pageable -> Device)`, 0: between other kinds of memory, -1: the name does not say it."""
    said = [("Pageable" in str(name)) if "->" in str(name) else -1 for name in names.categories]
    return np.asarray([*said, -1], dtype=np.int8)[names.codes]


def shapes(work: Sequence[Event]) -> dict[str, Any]:
    """Columns of activity.GEOMETRY."""
    both = (shape for event in work for shape in (event.args.grid, event.args.block))
    sides = [side for shape in both for side in (shape if isinstance(shape, list) and len(shape) == 3 else (-1,) * 3)]
    return dict(zip(GEOMETRY, integers(sides).reshape(-1, 6).T, strict=True))
