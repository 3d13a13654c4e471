"""One function a bottleneck: it finds it, finds nothing, or abstains and says what it would need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from worklog.analysis.timeline import Timeline
from worklog.traces.schema import Selection, Trace


@dataclass(frozen=True)
class Finding:
    rule: str
    level: Literal["coarse", "fine"]
    title: str
    share: float
    """Of the device's span."""
    gain_upper_bound: float
    """The fraction of the span that would go if the cause went and nothing took its place."""
    evidence: dict[str, Any]
    where: list[str]
    next: str
    """The capture that asks the next question."""


@dataclass(frozen=True)
class Abstained:
    rule: str
    reason: str


@dataclass(frozen=True)
class Case:
    """What a rule looks at: one device in its window."""

    trace: Trace
    selection: Selection
    timeline: Timeline
