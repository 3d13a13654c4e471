"""Chrome traces as torch.profiler (Kineto) writes them: events, and which encloses which.

Format: https://github.com/pytorch/kineto (output_json.cpp). Times stand there in microseconds with three decimals. A
float64 holds their nanoseconds for the first weeks of a clock; those since 1970 are read as decimals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from worklog.problem import ProblemError
from worklog.traces.files import content

NESTED = {"python_function": 0, "cpu_op": 1, "cuda_runtime": 2, "cuda_driver": 3}
"""What nests on a thread; of events that begin and end together the first is the outer one."""
MODULE = "nn.Module: "
EXACT_US = 2**52 / 1000
"""Below it a float64 of microseconds tells one nanosecond from the next."""
LIMIT_US = 2**61 / 1000
"""Beyond it nanoseconds do not fit in 64 bits."""


class Args(msgspec.Struct, gc=False, frozen=True):
    """Of an event's arguments those that are read: skipping the rest makes reading four times faster."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    grid: Any = None
    block: Any = None
    bytes: Any = None
    external: Any = msgspec.field(default=None, name="External id")
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_sequence: Any = msgspec.field(default=None, name="Seq")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: Args = NO_ARGS

    @property
    def start(self) -> int:
        return round(self.ts * 1000)

    @property
    def end(self) -> int:
        return round(self.ts * 1000) + round(self.dur * 1000)


class ExactEvent(Event, gc=False):
    ts: Decimal = Decimal(0)  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]


class Trace(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")
    devices: list[dict[str, Any]] = msgspec.field(default_factory=list, name="deviceProperties")
    distributed: dict[str, Any] = msgspec.field(default_factory=dict, name="distributedInfo")


class ExactTrace(Trace):
    events: list[ExactEvent] = msgspec.field(name="traceEvents")  # type: ignore[assignment]


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


def load(file: Path) -> Trace:
    """Raises ProblemError if it is no such trace (.json or .json.gz)."""
    raw = content(file)
    try:
        trace = msgspec.json.decode(raw, type=Trace)
        latest = max((max(abs(event.ts), abs(event.dur)) for event in trace.events), default=0)
        if latest > LIMIT_US:
            raise ProblemError(f"{file}: is no trace of torch.profiler (an event at {latest:.3g} microseconds).")
        return trace if latest < EXACT_US else msgspec.json.decode(raw, type=ExactTrace)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProblemError(f"{file}: is no trace of torch.profiler ({error}).") from error


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
