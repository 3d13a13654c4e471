"""A trace of torch.profiler by kernel, operator and module; by its operators' CPU time where there is no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worklog.problem import ProblemError
from worklog.traces import chrome, schema
from worklog.traces.activity import kernel_table
from worklog.traces.chrome import Event
from worklog.traces.intervals import union_ns
from worklog.traces.kineto import (
    CALLS,
    DEVICE_WORK,
    FRAMES,
    MODULE,
    Columns,
    device,
    external,
    integer,
    integers,
    own_ids,
)
from worklog.traces.schema import Trace

NESTED = {"python_function": 0, "cpu_op": 1, "Operator": 1, "cuda_runtime": 2, "cuda_driver": 3, "Runtime": 2}
"""What nests on a thread; of events that begin and end together the first is the outer one."""
NAMESPACED = re.compile(r"\w+::\w")


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
    raw = chrome.load(file)
    events = [event for batch in raw.batches() for event in batch if event.ph == "X"]
    nodes = nest([event for event in events if event.cat in NESTED])
    columns = Columns(geometry=True)
    columns.add(events)
    trace = columns.trace(file, raw.rank)
    work = trace.activities
    if work.empty:
        return _on_cpu(file, nodes)
    kernels = work[work["kind"] <= schema.COMMUNICATION]
    spent = (kernels["end_ns"] - kernels["start_ns"]).groupby(kernels["device"]).sum()
    devices = sorted(int(one) for one in work["device"].unique())
    chosen = int(spent.idxmax()) if len(spent) else devices[0]
    note = f"the trace has devices {devices}; this is device {chosen}" if len(devices) > 1 else None
    name = next((str(d.get("name")) for d in raw.devices if d.get("id") == chosen), f"device {chosen}")
    own = [event for event in events if DEVICE_WORK.get(event.cat or "") == schema.COMPUTE]
    return {"device": name, **_on_device(trace, chosen, own, nodes), "note": note}


def _on_device(trace: Trace, chosen: int, kernels: Sequence[Event], nodes: Sequence[Node]) -> dict[str, Any]:
    launches = {integer(node.event.args.correlation): node for node in nodes if node.event.cat in CALLS}
    operators = {integer(external(node.event.args)): node for node in nodes if _is_operator(node)}
    launches.pop(-1, None)
    operators.pop(-1, None)
    correlation = integers([kernel.args.correlation for kernel in kernels])
    asked = own_ids(integers([external(kernel.args) for kernel in kernels]), correlation)
    of_operator: dict[str, list[tuple[int, int]]] = {}
    of_module: dict[str, int] = {}
    for kernel, correlated, operator in zip(kernels, correlation.tolist(), asked.tolist(), strict=True):
        node = operators.get(operator) or launches.get(correlated)
        if integer(device(kernel)) == chosen and node is not None:
            chain = node.chain()
            outer = _operator(chain)
            of_operator.setdefault(outer.event.name, []).append((id(outer), kernel.end - kernel.start))
            if path := module(chain):
                of_module[path] = of_module.get(path, 0) + kernel.end - kernel.start
    work = trace.activities[trace.activities["device"] == chosen]
    rows = work[work["kind"] <= schema.COMMUNICATION]
    window = trace.select().windows[chosen]
    busy = union_ns(work["start_ns"], work["end_ns"], window)
    return {
        "span_ns": window.length,
        "busy_ns": busy,
        "idle_ns": window.length - busy,
        "kernel_count": len(rows),
        "kernels": kernel_table(rows),
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


def _is_operator(node: Node) -> bool:
    return FRAMES.get(node.event.cat or "") == schema.OPERATOR


def _operator(chain: Sequence[Node]) -> Node:
    """The outermost namespaced operator below the innermost module; without one any operator, or the call itself."""
    below: list[Node] = []
    for node in chain:
        if node.event.name.startswith(MODULE):
            break
        below.append(node)
    called = [node for node in below if _is_operator(node)]
    named = [node for node in called if NAMESPACED.match(node.event.name)]
    return named[-1] if named else called[0] if called else chain[0]


def _most_first(spent: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(spent.items(), key=lambda item: (-item[1], item[0]))


def _on_cpu(file: Path, nodes: Sequence[Node]) -> dict[str, Any]:
    called = [node for node in nodes if _is_operator(node)]
    if not called:
        raise ProblemError(f"{file}: the trace holds neither device work nor operators.")
    own = {id(node): node.end - node.event.start for node in called}
    for node in called:
        outer = next((n for n in node.chain()[1:] if _is_operator(n)), None)
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


class Node:
    """An event on a thread, and the one that encloses it."""

    def __init__(self, event: Event, parent: Node | None) -> None:
        self.event, self.parent, self.end = event, parent, event.end

    def chain(self) -> list[Node]:
        """This one and those around it, innermost first."""
        found, at = [], self
        while True:
            found.append(at)
            if at.parent is None:
                return found
            at = at.parent


def nest(events: Sequence[Event]) -> list[Node]:
    """Containment, thread by thread."""
    ordered = sorted(events, key=lambda e: (str(e.pid), str(e.tid), e.start, -e.end, NESTED[e.cat or ""]))
    nodes: list[Node] = []
    stack: list[Node] = []
    thread: tuple[Any, Any] | None = None
    for event in ordered:
        if thread != (event.pid, event.tid):
            thread, stack = (event.pid, event.tid), []
        while stack and stack[-1].end <= event.start:
            stack.pop()
        nodes.append(Node(event, stack[-1] if stack else None))
        stack.append(nodes[-1])
    return nodes


def module(chain: Sequence[Node]) -> str:
    """`Llama.Block.Linear`: the classes of the modules around, outermost first, without the profiler's numbers."""
    names = [node.event.name for node in reversed(chain) if node.event.name.startswith(MODULE)]
    return ".".join(re.sub(r"_\d+$", "", name.removeprefix(MODULE)) for name in names)
