"""torch.profiler's traces: device time by kernel, operator and module; CPU time where there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from worklog.problem import ProblemError
from worklog.traces import schema
from worklog.traces.activity import GEOMETRY, kernel_table
from worklog.traces.chrome import MODULE, NESTED, Event, Node, load, module, nest
from worklog.traces.intervals import union_ns
from worklog.traces.schema import Trace

DEVICE_WORK = {"kernel": schema.COMPUTE, "gpu_memcpy": schema.COPY, "gpu_memset": schema.MEMSET}
CALLS = ("cuda_runtime", "cuda_driver")
COMMUNICATES = "record_param_comms"
"""The operator that torch.distributed's NCCL backend opens around each of its calls."""
OPERATOR = re.compile(r"\w+::\w")
FRAMES = {"user_annotation": schema.ANNOTATION, "python_function": schema.PYTHON, "cpu_op": schema.OPERATOR}


def tables(file: Path, geometry: bool = False) -> Trace:
    """The trace in the tables of the schema; with `geometry` activities have the columns of activity.GEOMETRY too.

    Raises ProblemError if it is no such trace or holds no timed event.
    """
    raw = load(file)
    events = [event for event in raw.events if event.ph == "X"]
    if not events:
        raise ProblemError(f"{file}: the trace is empty: it holds no event that has a duration.")
    trace = _tables(file, events, raw.distributed.get("rank"))
    if not geometry:
        return trace
    shapes = _geometry([event for event in events if event.cat in DEVICE_WORK])
    return replace(trace, activities=trace.activities.assign(**shapes))


def _tables(file: Path, events: Sequence[Event], rank: Any = None) -> Trace:
    """A trace of Kineto is of one process, so correlation ids alone join."""
    work = [event for event in events if event.cat in DEVICE_WORK]
    called = [event for event in events if event.cat in CALLS]
    threads: dict[tuple[Any, Any], int] = {}
    names = _names(called)
    kinds, graphs = schema.call_kinds(names)
    calls = schema.outermost(
        schema.frame(
            schema.CALL,
            **_times(called),
            thread=[threads.setdefault((event.pid, event.tid), len(threads)) for event in called],
            process=np.zeros(len(called), np.int64),
            name=names,
            correlation=[_integer(event.args.correlation) for event in called],
            kind=kinds,
            graph=graphs,
        )
    )
    names, process = _names(work), np.zeros(len(work), np.int64)
    correlation = np.asarray([_integer(event.args.correlation) for event in work], dtype=np.int64)
    kind = np.asarray([DEVICE_WORK[event.cat or ""] for event in work], dtype=np.int8)
    paths = ["->" in str(name) for name in names.categories]  # Memcpy HtoD (Pageable -> Device)
    pageable = [("Pageable" in str(name)) if said else -1 for name, said in zip(names.categories, paths, strict=True)]
    activities = schema.frame(
        schema.ACTIVITY,
        **_times(work),
        device=[_device(event) for event in work],
        stream=[_integer(event.args.stream) for event in work],
        kind=np.where(kind == schema.COMPUTE, schema.kernel_kinds(names), kind),
        name=names,
        correlation=correlation,
        process=process,
        call=schema.join(process, correlation, calls),
        pageable=np.where(kind == schema.COPY, np.asarray([*pageable, -1], dtype=np.int8)[names.codes], -1),
        bytes=[_integer(event.args.bytes) for event in work],
    )
    frames = _frames([event for event in events if event.cat in FRAMES], threads)
    stacks = bool((frames["kind"] == schema.PYTHON).any() or (frames["kind"] == schema.MODULE).any())
    return Trace(
        file=file,
        tool="torch.profiler",
        tool_version=None,
        activities=activities,
        calls=calls,
        frames=frames,
        stacks=stacks,
        rank=rank if isinstance(rank, int) else None,
        collectives=_collectives(events, work, np.flatnonzero(activities["kind"] == schema.COMMUNICATION)),
    )


def _collectives(events: Sequence[Event], work: Sequence[Event], rows: Any) -> pd.DataFrame:
    """Kernels below a record_param_comms, whose arguments say more than the copy of them that kernels carry.

    Names of arguments: kineto's output_json.cpp and torch's profiler/util.h; Seq is of newer versions of torch.
    """
    asked = {_integer(event.args.external): event.args for event in events if event.name == COMMUNICATES}
    asked.pop(-1, None)
    every = [(row, asked.get(_integer(work[row].args.external), work[row].args)) for row in rows]
    known = [(row, args) for row, args in every if args.collective is not None]
    groups = [f"{'' if args.group is None else args.group} {args.group_ranks or ''}".strip() for _, args in known]
    codes = np.arange(len(known))
    return schema.frame(
        schema.COLLECTIVE,
        activity=[row for row, _ in known],
        group=schema.categories(codes, groups),
        name=schema.categories(codes, [str(args.collective) for _, args in known]),
        sequence=[_integer(args.group_sequence) for _, args in known],
        size=[_integer(args.group_size) for _, args in known],
    )


def _frames(events: Sequence[Event], threads: dict[tuple[Any, Any], int]) -> pd.DataFrame:
    names = _names(events)
    modules = np.asarray([name.startswith(MODULE) for name in names.categories], dtype=bool)
    kinds = np.asarray([FRAMES[event.cat or ""] for event in events], dtype=np.int8)
    if len(modules):
        kinds[(kinds == schema.PYTHON) & modules[names.codes]] = schema.MODULE
    return schema.frame(
        schema.FRAME,
        **_times(events),
        thread=[threads.setdefault((event.pid, event.tid), len(threads)) for event in events],
        process=np.zeros(len(events), np.int64),
        kind=kinds,
        name=names,
        sequence=[_integer(event.args.sequence) for event in events],
        forward_thread=[_integer(event.args.forward_thread) for event in events],
    )


def _times(events: Sequence[Event]) -> dict[str, Any]:
    return {
        "start_ns": np.asarray([event.start for event in events], dtype=np.int64),
        "end_ns": np.asarray([event.end for event in events], dtype=np.int64),
    }


def _names(events: Sequence[Event]) -> pd.Categorical:
    seen: dict[str, int] = {}
    codes = np.asarray([seen.setdefault(event.name, len(seen)) for event in events], dtype=np.int64)
    return schema.categories(codes, list(seen))


def _device(event: Event) -> int:
    """Traces before torch 2.0 tell it by the event's pid alone."""
    return _integer(event.pid if event.args.device is None else event.args.device)


def _integer(value: Any) -> int:
    """-1 for what is none, or none of 64 bits."""
    try:
        return int(value) if abs(int(value)) < 1 << 62 else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def read(file: Path) -> dict[str, Any]:
    """Times of one trace (.json or .json.gz).

    With device work: device (its name), span_ns from the first launch to the end of the last work, busy_ns (union of
    kernels, copies and memsets on all streams), idle_ns = span_ns - busy_ns; kernels (activity.kernel_table);
    operators [{name, count, kernel_ns, kernel_count}], the outermost operator below the innermost nn.Module whose call
    launched the kernels, or else the launching call (a graph's replay runs below no operator); modules [{name,
    kernel_ns}], class path of the innermost module; kernels_joined, the fraction of kernels whose launch is in the
    trace. Of several devices the one with most kernel time, which `note` says. modules is [] without stacks.

    Without: device, busy_ns, idle_ns and kernels_joined are None; operators [{name, count, self_cpu_ns}] by their own
    time, without that of operators inside; modules [{name, self_cpu_ns}].
    Raises ProblemError if it is no such trace or holds neither.
    """
    raw = load(file)
    events = [event for event in raw.events if event.ph == "X"]
    nodes = nest([event for event in events if event.cat in NESTED])
    trace = _tables(file, events)
    work = trace.activities
    if work.empty:
        return _on_cpu(file, nodes)
    kernels = work[work["kind"] <= schema.COMMUNICATION]
    spent = (kernels["end_ns"] - kernels["start_ns"]).groupby(kernels["device"]).sum()
    devices = sorted(int(device) for device in work["device"].unique())
    chosen = int(spent.idxmax()) if len(spent) else devices[0]
    note = f"the trace has devices {devices}; this is device {chosen}" if len(devices) > 1 else None
    name = next((str(d.get("name")) for d in raw.devices if d.get("id") == chosen), f"device {chosen}")
    own = [event for event in events if event.cat == "kernel" and _device(event) == chosen]
    return {"device": name, **_on_device(trace, chosen, own, nodes), "note": note}


def _on_device(trace: Trace, device: int, kernels: Sequence[Event], nodes: Sequence[Node]) -> dict[str, Any]:
    launches = {node.event.args.correlation: node for node in nodes if node.event.cat in CALLS}
    operators = {node.event.args.external: node for node in nodes if node.event.cat == "cpu_op"}
    launches.pop(None, None)
    operators.pop(None, None)
    of_operator: dict[str, list[tuple[int, int]]] = {}
    of_module: dict[str, int] = {}
    for kernel in kernels:
        launch = launches.get(kernel.args.correlation)
        if (node := operators.get(kernel.args.external) or launch) is not None:
            chain = node.chain()
            outer = _operator(chain)
            of_operator.setdefault(outer.event.name, []).append((id(outer), kernel.end - kernel.start))
            if path := module(chain):
                of_module[path] = of_module.get(path, 0) + kernel.end - kernel.start
    work = trace.activities[trace.activities["device"] == device]
    rows = work[work["kind"] <= schema.COMMUNICATION]
    window = trace.select().windows[device]
    busy = union_ns(work["start_ns"], work["end_ns"], window)
    return {
        "span_ns": window.length,
        "busy_ns": busy,
        "idle_ns": window.length - busy,
        "kernel_count": len(rows),
        "kernels": kernel_table(rows.assign(**_geometry(kernels))),
        "operators": sorted(
            (
                {
                    "name": name,
                    "count": len({call for call, _ in rows}),
                    "kernel_ns": sum(ns for _, ns in rows),
                    "kernel_count": len(rows),
                }
                for name, rows in of_operator.items()
            ),
            key=lambda row: (-row["kernel_ns"], row["name"]),
        ),
        "modules": [{"name": name, "kernel_ns": ns} for name, ns in _most_first(of_module)],
        "kernels_joined": float((rows["call"] >= 0).mean()) if len(rows) else None,
    }


def _operator(chain: Sequence[Node]) -> Node:
    """The outermost namespaced operator below the innermost module; without one any operator, or the call itself."""
    below: list[Node] = []
    for node in chain:
        if node.event.name.startswith(MODULE):
            break
        below.append(node)
    called = [node for node in below if node.event.cat == "cpu_op"]
    named = [node for node in called if OPERATOR.match(node.event.name)]
    return named[-1] if named else called[0] if called else chain[0]


def _geometry(kernels: Sequence[Event]) -> dict[str, Any]:
    """Columns of activity.GEOMETRY."""
    rows = [[*(e.args.grid or (-1,) * 3), *(e.args.block or (-1,) * 3)] for e in kernels]
    return dict(zip(GEOMETRY, np.asarray(rows, dtype=np.int64).reshape(-1, 6).T, strict=True))


def _most_first(spent: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(spent.items(), key=lambda item: (-item[1], item[0]))


def _on_cpu(file: Path, nodes: Sequence[Node]) -> dict[str, Any]:
    called = [node for node in nodes if node.event.cat == "cpu_op"]
    if not called:
        raise ProblemError(f"{file}: the trace holds neither device work nor operators.")
    own = {id(node): node.end - node.event.start for node in called}
    for node in called:
        outer = next((n for n in node.chain()[1:] if n.event.cat == "cpu_op"), None)
        if outer is not None:
            own[id(outer)] -= node.end - node.event.start
    count: dict[str, int] = {}
    of_operator: dict[str, int] = {}
    of_module: dict[str, int] = {}
    for node in called:
        name, path = node.event.name, module(node.chain())
        count[name] = count.get(name, 0) + 1
        of_operator[name] = of_operator.get(name, 0) + own[id(node)]
        if path:
            of_module[path] = of_module.get(path, 0) + own[id(node)]
    return {
        "device": None,
        "span_ns": max(node.end for node in called) - min(node.event.start for node in called),
        "busy_ns": None,
        "idle_ns": None,
        "kernel_count": 0,
        "kernels": [],
        "operators": [{"name": name, "count": count[name], "self_cpu_ns": ns} for name, ns in _most_first(of_operator)],
        "modules": [{"name": name, "self_cpu_ns": ns} for name, ns in _most_first(of_module)],
        "kernels_joined": None,
        "note": "a trace without GPU work: times are those of operators on the CPU",
    }
