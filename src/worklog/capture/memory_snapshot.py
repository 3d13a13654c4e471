"""History and state of torch's CUDA allocator over a few iterations.

The file is gzipped JSON with the keys and the layout of `torch.cuda.memory._snapshot()`: `segments` (what the allocator
holds), `device_traces` (each allocation and free in order, with its Python stack). Unlike a pickle it can be opened
without trusting it. https://pytorch.org/memory_viz takes pickles only; make one with

    python -m worklog.capture.memory_snapshot memory.VARIANT.json.gz memory.pickle
"""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worklog.capture.paths import relative_text
from worklog.problem import ProblemError
from worklog.record import write_whole

MAX_ENTRIES = 200_000
KEPT = ("segments", "device_traces", "allocator_settings")


def snapshot(run: Callable[[], object], file: Path) -> None:
    """Record allocator history around one call of `run` and write it to `file` (.json.gz).

    Blocks allocated before (weights, caches) are in `segments` without a stack. Raises ProblemError without a CUDA GPU
    or if more than 200 000 events came, RecordError if the disk refuses the file.
    """
    import torch

    if not torch.cuda.is_available():
        raise ProblemError(
            "A memory snapshot needs a CUDA GPU: torch keeps a history of its CUDA allocator only; "
            "worklog repro measures the CPU's peak."
        )
    memory = torch.cuda.memory
    memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES)
    try:
        run()
        torch.cuda.synchronize()
        taken = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    write_whole(file, encode(taken))


def encode(taken: dict[str, Any]) -> bytes:
    """The gzipped JSON of a snapshot. Raises ProblemError if its history is cut off at the front."""
    if any(len(events) >= MAX_ENTRIES for events in taken["device_traces"]):
        raise ProblemError(f"More than {MAX_ENTRIES} allocator events: capture fewer iterations.")
    text = json.dumps({name: taken[name] for name in KEPT if name in taken}, separators=(",", ":"), default=str)
    return gzip.compress(relative_text(text).encode(), mtime=0)


def to_pickle(file: Path, pickled: Path) -> None:
    """The same snapshot as the pickle that https://pytorch.org/memory_viz opens."""
    write_whole(pickled, pickle.dumps(json.loads(gzip.decompress(file.read_bytes()))))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m worklog.capture.memory_snapshot memory.VARIANT.json.gz OUT.pickle")
    to_pickle(Path(sys.argv[1]), Path(sys.argv[2]))
