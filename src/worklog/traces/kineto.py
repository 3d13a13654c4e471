"""torch.profiler's traces: device time by kernel, operator and module; CPU time where there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from worklog.problem import ProblemError
from worklog.traces.activity import GEOMETRY, kernel_table, union_ns
from worklog.traces.chrome import MODULE, NESTED, Event, Node, load, module, nest

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
OPERATOR = re.compile(r"\w+::\w")


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
    trace = load(file)
    events = [event for event in trace.events if event.ph == "X"]
    nodes = nest([event for event in events if event.cat in NESTED])
    work = [event for event in events if event.cat in DEVICE_WORK]
    if not work:
        return _on_cpu(file, nodes)
    spent: dict[int, int] = {}
    for event in work:
        device = event.arg("device")
        spent[device] = spent.get(device, 0) + (event.end - event.start) * (event.cat == "kernel")
    chosen = max(spent, key=lambda device: spent[device])
    note = f"the trace has devices {sorted(spent)}; this is device {chosen}" if len(spent) > 1 else None
    name = next((str(d.get("name")) for d in trace.devices if d.get("id") == chosen), f"device {chosen}")
    work = [event for event in work if event.arg("device") == chosen]
    return {"device": name, **_on_device(work, nodes), "note": note}


def _on_device(work: Sequence[Event], nodes: Sequence[Node]) -> dict[str, Any]:
    launches = {node.event.arg("correlation"): node for node in nodes if node.event.cat in CALLS}
    operators = {node.event.arg("External id"): node for node in nodes if node.event.cat == "cpu_op"}
    launches.pop(None, None)
    operators.pop(None, None)
    kernels = [event for event in work if event.cat == "kernel"]
    of_operator: dict[str, list[tuple[int, int]]] = {}
    of_module: dict[str, int] = {}
    joined = 0
    for kernel in kernels:
        launch = launches.get(kernel.arg("correlation"))
        joined += launch is not None
        if (node := operators.get(kernel.arg("External id")) or launch) is not None:
            chain = node.chain()
            outer = _operator(chain)
            of_operator.setdefault(outer.event.name, []).append((id(outer), kernel.end - kernel.start))
            if path := module(chain):
                of_module[path] = of_module.get(path, 0) + kernel.end - kernel.start
    starts = [event.start for event in work]
    asked = [node.event.start for event in work if (node := launches.get(event.arg("correlation")))]
    span = max(event.end for event in work) - min(starts + asked)
    busy = union_ns(starts, [event.end for event in work])
    return {
        "span_ns": span,
        "busy_ns": busy,
        "idle_ns": span - busy,
        "kernel_count": len(kernels),
        "kernels": kernel_table(_frame(kernels)),
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
        "kernels_joined": joined / len(kernels) if kernels else None,
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


def _frame(kernels: Sequence[Event]) -> pd.DataFrame:
    rows = []
    for event in kernels:
        geometry = [*(event.arg("grid") or (-1,) * 3), *(event.arg("block") or (-1,) * 3)]
        rows.append((event.name, event.start, event.end, *geometry))
    return pd.DataFrame(rows, columns=["full_name", "start", "end", *GEOMETRY])


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
