"""Chrome traces as torch.profiler (Kineto) writes them: events, a batch at a time.

Format: https://github.com/pytorch/kineto (output_json.cpp). Times are microseconds: whole ones since 1970 in older
versions, then with three decimals, then those since the quarter of the year began (baseTimeNanoseconds). A float64
tells apart the nanoseconds of a quarter; larger times are read as decimals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from worklog.problem import ProblemError
from worklog.traces.files import content

BATCH = 2000
"""Events read at once: those of a gigabyte do not fit in memory, and few stay in the processor's caches."""
EXACT_US = 1 << 43
"""Below it the nearest float64 of a time in microseconds is less than half a nanosecond away. It is 101 days."""
LIMIT_US = (1 << 61) // 1000
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
    old_external: Any = msgspec.field(default=None, name="external id")
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
    pid: int | float | str | None = 0
    tid: int | float | str | None = 0
    args: Args = NO_ARGS

    @property
    def start(self) -> int:
        return nanoseconds(self.ts)

    @property
    def end(self) -> int:
        return nanoseconds(self.ts) + nanoseconds(self.dur)


class ExactEvent(Event, gc=False):
    ts: int | Decimal = 0  # type: ignore[assignment]
    dur: int | Decimal = 0  # type: ignore[assignment]


class _Document(msgspec.Struct):
    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")


@dataclass(frozen=True)
class Trace:
    file: Path
    written: list[msgspec.Raw]
    """Each event's JSON."""
    devices: list[dict[str, Any]]
    rank: int | None

    def batches(self) -> Iterator[list[Event]]:
        """Every event, in the order of the file. Raises ProblemError for one that is not as Kineto writes it."""
        for first in range(0, len(self.written), BATCH):
            text = b"[" + b",".join(self.written[first : first + BATCH]) + b"]"
            try:
                batch = _FLOAT.decode(text)
                latest = np.abs([time for event in batch for time in (event.ts, event.dur)]).max()
                if not latest <= LIMIT_US:  # it may be no number
                    raise ProblemError(
                        f"{self.file}: is no trace of torch.profiler (an event at {latest:.3g} microseconds)."
                    )
                yield batch if latest < EXACT_US else _DECIMAL.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                why = re.sub(r"\$\[(\d+)\]", lambda at: f"$.traceEvents[{first + int(at[1])}]", str(error))  # noqa: B023
                raise ProblemError(f"{self.file}: is no trace of torch.profiler ({why}).") from error


_FLOAT = msgspec.json.Decoder(list[Event], strict=False)
_DECIMAL: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[ExactEvent], strict=False)


def load(file: Path) -> Trace:
    """Raises ProblemError if it is no such trace (.json or .json.gz)."""
    try:
        read = msgspec.json.decode(content(file), type=_Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProblemError(f"{file}: is no trace of torch.profiler ({error}).") from error
    devices = [one for one in read.devices if isinstance(one, dict)] if isinstance(read.devices, list) else []
    rank = read.distributed.get("rank") if isinstance(read.distributed, dict) else None
    return Trace(file, read.events, devices, rank if isinstance(rank, int) else None)


def nanoseconds(microseconds: float | Decimal) -> int:
    """The nearest; of a float64 below EXACT_US the one that was written."""
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)
