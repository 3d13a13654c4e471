"""torch.profiler: operators, modules, Python lines and kernels of a few iterations, as a gzipped Chrome trace."""

from __future__ import annotations

import gzip
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from worklog.capture.paths import relative_text
from worklog.record import write_whole


def trace(run: Callable[[], object], file: Path, plain: bool = False) -> None:
    """Run `run` twice, the first time to warm the profiler up, and write the trace of the second to `file` (.json.gz).

    The attribution pass (plain=False) records stacks, shapes and modules, which makes the host several times slower:
    read names from it, not times. The plain pass records activities alone: read times from it. A synchronise follows
    `run`, so that the last kernels are in the trace. The machine's name and folders are taken out.

    Raises RecordError if the disk refuses the file.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=1),  # CUPTI starts late: events of a first run get lost
            on_trace_ready=lambda done: done.export_chrome_trace(str(raw)),
            record_shapes=not plain,
            with_stack=not plain,
            with_modules=not plain,
            acc_events=True,
        ) as profiler:
            for _ in range(2):
                run()
                if on_gpu:
                    torch.cuda.synchronize()
                profiler.step()
        text = raw.read_text(encoding="utf-8")
    text = re.sub(r'"(host_name|traceName)": "[^"]*"', r'"\1": ""', relative_text(text))
    write_whole(file, gzip.compress(text.encode(), mtime=0))
