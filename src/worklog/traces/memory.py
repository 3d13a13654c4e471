"""Snapshots of torch's CUDA allocator: how much was allocated when, and what was alive at the peak.

Layout: https://pytorch.org/docs/stable/torch_cuda_memory.html#snapshot-api-reference. Sizes are those that the program
asked for; the allocator rounds them up (to 512 bytes, or to a block that it does not split).

A pickle may come from anywhere: what many events share in it is looked at once, or reading could take far longer than
its length suggests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from worklog.problem import ProblemError
from worklog.traces.files import content
from worklog.traces.pickled import BEGINNING, NotPlainError, plain

POINTS = 400
FRAMES = 6
PLACE = 400
"""Letters of a frame that are kept."""
Block = tuple[int, tuple[str, ...]]
"""Bytes, frames."""


class Frame(msgspec.Struct):
    filename: str = ""
    line: int = 0
    name: str = ""


class Event(msgspec.Struct):
    action: str
    addr: int = 0
    size: int = 0
    time_us: int | None = None
    frames: Any = ()


class Held(msgspec.Struct):
    """A block of a segment."""

    size: int
    state: str
    address: int | None = None
    requested_size: int | None = None
    frames: Any = ()


class Segment(msgspec.Struct):
    blocks: list[Held]
    address: int = 0
    device: int | None = None


class Snapshot(msgspec.Struct):
    device_traces: list[Any]
    segments: list[Any]


def read(file: Path) -> dict[str, Any]:
    """Allocated bytes over a snapshot's history: the pickle of torch.cuda.memory._dump_snapshot, or the same as JSON.

    A block counts from its allocation to the program's request to free it, as torch.cuda.memory_allocated() does.
    Keys: device (the one with most events), baseline_bytes (allocated when the history began), peak_bytes, timeline
    [[microseconds since the first event, allocated bytes], ...] with at most 400 points among which every extreme of
    its stretch of events is kept, largest [{bytes, count, frames}] of the blocks alive at the (first) peak, grouped by
    stack, most bytes first; their bytes sum to peak_bytes. temporaries: of those blocks the ones that the history both
    allocates and frees, in the same way and with longest_us, the longest that one of them lived (None: no times).
    reserved_bytes and unused_bytes: what the allocator held at the end, and what of it in no block. frames are at most
    six Python lines "file:line function", innermost first, and [] for blocks from before the history. Raises
    ProblemError if it is no snapshot, or a pickle that holds more than plain data, of which nothing is run.
    """
    raw = content(file)
    try:
        if raw.startswith(BEGINNING):
            taken = msgspec.convert(plain(raw), Snapshot)
        else:
            taken = msgspec.json.decode(raw, type=Snapshot)
        return _read(taken, len(raw))
    except NotPlainError as error:
        raise ProblemError(f"{file}: this pickle {error}, so it is no snapshot of torch's allocator.") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProblemError(f"{file}: is no snapshot of torch's allocator ({error}).") from error


def _read(taken: Snapshot, written: int) -> dict[str, Any]:
    """`written`: bytes of the file."""
    histories = taken.device_traces
    lengths = [len(history) if isinstance(history, list) else 0 for history in histories]
    device = max(range(len(histories)), key=lengths.__getitem__, default=0)
    history = msgspec.convert(histories[device] if histories else [], list[Event])
    events = [event for event in history if event.action in ("alloc", "free_requested")]
    frames = Frames()
    held = _blocks(taken.segments, device, written)
    before = _before(events, held, frames)
    baseline = sum(size for size, _ in before.values())
    first = (events[0].time_us or 0) if events else 0
    alive, allocated = {address: size for address, (size, _) in before.items()}, baseline
    curve = [(0, baseline)]
    for index, event in enumerate(events):
        allocated -= alive.pop(event.addr, 0)
        if event.action == "alloc":
            allocated += event.size
            alive[event.addr] = event.size
        curve.append((index if event.time_us is None else event.time_us - first, allocated))
    at_peak = max(range(len(curve)), key=lambda at: curve[at][1])
    return {
        "device": device,
        "baseline_bytes": baseline,
        "peak_bytes": curve[at_peak][1],
        "timeline": [list(point) for point in reduce(curve)],
        "largest": _grouped(_alive(events[:at_peak], before, frames)),
        "temporaries": _temporaries(events, at_peak, frames),
        "reserved_bytes": sum(block.size for _, block in held),
        "unused_bytes": sum(block.size for _, block in held if block.state == "inactive"),
    }


def _alive(events: Sequence[Event], before: dict[int, Block], frames: Frames) -> list[Block]:
    """The blocks that are there after these events."""
    alive = dict(before)
    for event in events:
        alive.pop(event.addr, None)
        if event.action == "alloc":
            alive[event.addr] = (event.size, frames.of(event.frames))
    return list(alive.values())


def _temporaries(events: Sequence[Event], at_peak: int, frames: Frames) -> list[dict[str, Any]]:
    made: dict[int, Event] = {}
    for event in events[:at_peak]:
        made.pop(event.addr, None)
        if event.action == "alloc":
            made[event.addr] = event
    blocks: list[Block] = []
    longest: dict[tuple[str, ...], int] = {}
    for event in events[at_peak:]:
        block = made.pop(event.addr, None)
        if block is not None and event.action == "free_requested":
            blocks.append((block.size, stack := frames.of(block.frames)))
            if event.time_us is not None and block.time_us is not None:
                longest[stack] = max(longest.get(stack, 0), event.time_us - block.time_us)
    return [{**row, "longest_us": longest.get(tuple(row["frames"]))} for row in _grouped(blocks)]


def _blocks(segments: Sequence[Any], device: int, written: int) -> list[tuple[int, Held]]:
    """Each block of the device with its address."""
    held = sum(len(s["blocks"]) for s in segments if isinstance(s, dict) and isinstance(s.get("blocks"), list))
    if held > written:
        raise NotPlainError("holds more blocks than it has bytes")
    found = []
    for segment in msgspec.convert(segments, list[Segment]):
        at = segment.address
        for block in segment.blocks if segment.device in (device, None) else ():
            found.append((at if block.address is None else block.address, block))
            at = found[-1][0] + block.size
    return found


def _before(events: Sequence[Event], held: Sequence[tuple[int, Held]], frames: Frames) -> dict[int, Block]:
    """Blocks that were there when the history began: those it frees without allocating them, and those that are left.

    A freed one is known by its size alone.
    """
    made: set[int] = set()
    found: dict[int, Block] = {}
    for event in events:
        if event.action == "alloc":
            made.add(event.addr)
        elif event.addr in made:
            made.remove(event.addr)
        else:
            found[event.addr] = (event.size, ())
    for address, block in held:
        if block.state == "active_allocated" and address not in made:
            size = block.size if block.requested_size is None else block.requested_size
            found[address] = (size, frames.of(block.frames))
    return found


class Frames:
    """Stacks as texts. Events of a pickle share their stacks, and stacks their frames: each is read once."""

    def __init__(self) -> None:
        self.stacks: dict[int, tuple[str, ...]] = {}
        self.places: dict[int, str | None] = {}

    def of(self, stack: Any) -> tuple[str, ...]:
        if (known := self.stacks.get(id(stack))) is None:
            frames = msgspec.convert(stack, list[Any])
            python = (place for place in map(self.place, frames) if place is not None)
            known = self.stacks[id(stack)] = tuple(itertools.islice(python, FRAMES))
        return known

    def place(self, frame: Any) -> str | None:
        if id(frame) not in self.places:
            read = msgspec.convert(frame, Frame)
            python = read.filename.endswith(".py")
            self.places[id(frame)] = f"{read.filename}:{read.line} {read.name}"[:PLACE] if python else None
        return self.places[id(frame)]


def _grouped(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for size, frames in blocks:
        groups.setdefault(frames, []).append(size)
    rows = [{"bytes": sum(sizes), "count": len(sizes), "frames": list(frames)} for frames, sizes in groups.items()]
    return sorted(rows, key=lambda row: (-row["bytes"], row["frames"]))


def reduce(curve: Sequence[tuple[int, int]], points: int = POINTS) -> list[tuple[int, int]]:
    """At most `points` of the curve's points in their order: first, last, and lowest and highest of each stretch."""
    if len(curve) <= points:
        return list(curve)
    inner, stretches = len(curve) - 2, (points - 2) // 2
    kept = {0, len(curve) - 1}
    for number in range(stretches):
        stretch = range(1 + number * inner // stretches, 1 + (number + 1) * inner // stretches)
        if stretch:
            kept |= {min(stretch, key=lambda at: curve[at][1]), max(stretch, key=lambda at: curve[at][1])}
    return [curve[at] for at in sorted(kept)]
