"""Snapshots of torch's CUDA allocator: how much was allocated when, and what was alive at the peak.

Layout: https://pytorch.org/docs/stable/torch_cuda_memory.html#snapshot-api-reference. Sizes are those that the program
asked for; the allocator rounds them up (to 512 bytes, or to a block that it does not split).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from worklog.problem import ProblemError
from worklog.traces.files import content

POINTS = 400
FRAMES = 6
Block = tuple[int, tuple[str, ...]]
"""Bytes, frames."""


def read(file: Path) -> dict[str, Any]:
    """Allocated bytes over a snapshot's history (.json or .json.gz).

    A block counts from its allocation to the program's request to free it, as torch.cuda.memory_allocated() does.
    Keys: device (the one with most events), baseline_bytes (allocated when the history began), peak_bytes, timeline
    [[microseconds since the first event, allocated bytes], ...] with at most 400 points among which every extreme of
    its stretch of events is kept, largest [{bytes, count, frames}] of the blocks alive at the (first) peak, grouped by
    stack, most bytes first; their bytes sum to peak_bytes. frames are at most six Python lines "file:line function",
    innermost first, and [] for blocks from before the history. Raises ProblemError if it is no snapshot.
    """
    raw = content(file)
    try:
        taken = msgspec.json.decode(raw)
        return _read(taken["device_traces"], taken["segments"])
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ProblemError(f"{file}: is no snapshot of torch's allocator ({error!r}).") from error


def _read(histories: Sequence[Sequence[dict[str, Any]]], segments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    device = max(range(len(histories)), key=lambda at: len(histories[at]), default=0)
    events = [e for e in (histories[device] if histories else []) if e["action"] in ("alloc", "free_requested")]
    before = _before(events, [s for s in segments if s.get("device", device) == device])
    baseline = sum(size for size, _ in before.values())
    first = events[0].get("time_us", 0) if events else 0
    alive, allocated = dict(before), baseline
    peak, at_peak = baseline, dict(before)
    curve = [(0, baseline)]
    rising = False
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            allocated += event["size"] - alive.get(event["addr"], (0, ()))[0]
            alive[event["addr"]] = (event["size"], _frames(event.get("frames", [])))
            if allocated > peak:
                peak, rising = allocated, True
        else:
            if rising:
                at_peak, rising = dict(alive), False
            allocated -= alive.pop(event["addr"])[0]
        curve.append((event["time_us"] - first if "time_us" in event else index, allocated))
    if rising:
        at_peak = alive
    return {
        "device": device,
        "baseline_bytes": baseline,
        "peak_bytes": peak,
        "timeline": [list(point) for point in reduce(curve)],
        "largest": _grouped(list(at_peak.values())),
    }


def _before(events: Sequence[dict[str, Any]], segments: Sequence[dict[str, Any]]) -> dict[int, Block]:
    """Blocks that were there when the history began: those it frees without allocating them, and those that are left.

    A freed one is known by its size alone.
    """
    made: set[int] = set()
    found: dict[int, Block] = {}
    for event in events:
        if event["action"] == "alloc":
            made.add(event["addr"])
        elif event["addr"] in made:
            made.remove(event["addr"])
        else:
            found[event["addr"]] = (event["size"], ())
    for segment in segments:
        at = segment.get("address", 0)
        for block in segment["blocks"]:
            address = block.get("address", at)
            if block["state"] == "active_allocated" and address not in made:
                size = block.get("requested_size", block["size"])
                found[address] = (size, _frames(block.get("frames", [])))
            at = address + block["size"]
    return found


def _frames(frames: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    return tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in python[:FRAMES])


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
