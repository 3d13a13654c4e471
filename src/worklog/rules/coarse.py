"""The rules on one device's timeline, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable

from worklog.rules import Abstained, Case, Finding
from worklog.rules.chains import dequantise_then_matmul, unfused_elementwise
from worklog.rules.host import host_bound, launch_bound
from worklog.rules.layout import layout_conversions
from worklog.rules.waits import blocking_copies, sync_every_step

RULES: dict[str, Callable[[Case], Finding | Abstained | None]] = {
    "sync_every_step": sync_every_step,
    "host_bound": host_bound,
    "launch_bound": launch_bound,
    "blocking_copies": blocking_copies,
    "dequantise_then_matmul": dequantise_then_matmul,
    "unfused_elementwise": unfused_elementwise,
    "layout_conversions": layout_conversions,
}
