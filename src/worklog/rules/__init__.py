"""One function a bottleneck: it finds it, finds nothing, or abstains and says what it would need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from worklog.analysis.streams import Order, order
from worklog.analysis.timeline import Timeline
from worklog.traces.schema import Selection, Trace

MATERIAL = 0.05
"""A finding's least share; ours: one in twenty is above the spread of repeated runs."""


@dataclass(frozen=True)
class Finding:
    rule: str
    level: Literal["coarse", "fine"]
    title: str
    share: float
    """Of the device's span; of a memory snapshot, of the peak."""
    gain_upper_bound: float
    """The fraction of the span (or peak) that would go if the cause went and nothing took its place."""
    evidence: dict[str, Any]
    where: list[str]
    """The most costly places in the source, as far as the trace tells them, then names of kernels or calls."""
    next: str
    """The capture that asks the next question."""


@dataclass(frozen=True)
class Abstained:
    rule: str
    reason: str


@dataclass(frozen=True, eq=False)
class Case:
    """What a rule looks at: one device in its window. What several rules build on is kept as long as it is."""

    trace: Trace
    selection: Selection
    timeline: Timeline

    @cached_property
    def order(self) -> Order:
        return order(self.trace, self.timeline.device)

    def share(self, ns: int) -> float:
        return ns / self.timeline.span_ns if self.timeline.span_ns else 0.0
