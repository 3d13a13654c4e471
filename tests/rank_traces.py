"""Traces of torch.profiler as the ranks of one run would write them, from what each rank did and when: all in µs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.collectives import BEFORE, Rank
from worklog.traces.intervals import Intervals

BEGIN = 100
"""When the first step of `steps` begins; its launches begin at zero."""
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass
class RankTrace:
    """One rank. Times are of a clock that all ranks share; the file is written on a clock `offset` ahead of it."""

    rank: int
    offset: float = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def kernel(self, name: str, start: float, end: float, launched: float, stream: int = 7, **args: Any) -> None:
        number = len(self.events) + 1
        self._event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, tid=1, correlation=number)
        own = {"device": 0, "stream": stream, "correlation": number, **args}
        self._event("kernel", name, start, end, tid=stream, **own)

    def collective(
        self, start: float, end: float, launched: float, number: int | None, ranks: Sequence[int] = (0, 1), **args: Any
    ) -> None:
        """An all-reduce; `number` None: of a torch that does not write it."""
        own = {
            "External id": 100_000 + len(self.events),
            "Collective name": "allreduce",
            "Process Group Name": "0",
            "Process Group Ranks": str(list(ranks)),
            "Group size": len(ranks),
            **({} if number is None else {"Seq": number}),
            **args,
        }
        self._event("cpu_op", "record_param_comms", launched - 0.5, launched + 1, tid=1, **own)
        self.kernel(ALL_REDUCE, start, end, launched, stream=20, **{"External id": own["External id"]})

    def write(self, folder: Path, told: bool = True) -> Path:
        """`told`: the trace says which rank it is of."""
        file = folder / f"rank{self.rank}.json"
        top = {"distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2}} if told else {}
        file.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": self.events}))
        return file

    def _event(self, cat: str, name: str, start: float, end: float, tid: int, **args: Any) -> None:
        at = start + self.offset
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": end - start, "args": args}
        )


def export(ranks: Sequence[RankTrace], file: Path) -> Path:
    """The same as an export of nsys: one capture of these ranks' processes, each on its own device."""
    names = {"gemm": 1, "extra": 2, ALL_REDUCE: 3, "cudaLaunchKernel_v7000": 4}
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(at, name) for name, at in names.items()])
        times = "start INTEGER, end INTEGER, correlationId INTEGER"
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ({times}, globalTid INTEGER, nameId INTEGER)")
        work = "globalPid INTEGER, deviceId INTEGER, streamId INTEGER, demangledName INTEGER"
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({times}, {work})")
        for trace in ranks:
            process = (trace.rank + 1) << 24
            for event in trace.events:
                start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
                args, device = event["args"], trace.rank if len(ranks) > 1 else 0
                row = (start, start + length, args.get("correlation"))
                if event["cat"] == "cuda_runtime":
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 4)", (*row, process + 7)
                    )
                elif event["cat"] == "kernel":
                    where = (process, device, args["stream"], names[event["name"]])
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, *where)
                    )
    return file


def steps(
    compute: Sequence[Sequence[float]],
    transfer: float = 50,
    offsets: Sequence[float] = (),
    names: Sequence[str] = (),
    numbered: bool = True,
    first: int = 0,
) -> list[RankTrace]:
    """Ranks that compute (`compute[step][rank]`), then all-reduce, step after step; all was launched long before.

    In each step a rank arrives when its compute is over; the collective ends everywhere `transfer` after the last came.
    """
    count = len(compute[0])
    ranks = [RankTrace(rank, offsets[rank] if offsets else 0) for rank in range(count)]
    now = float(BEGIN)
    for step, spent in enumerate(compute):
        end = now + max(spent) + transfer
        for rank, trace in enumerate(ranks):
            arrival, launched = now + spent[rank], 2 * step
            trace.kernel(names[rank] if names else "gemm", now, arrival, launched)
            number = first + step if numbered else None
            trace.collective(arrival, end, launched + 1, number, ranks=range(count))
        now = end
    return ranks


def made(rank: int, start: Any, end: Any) -> Rank:
    """A rank of which only the times of its collectives are known."""
    size = len(start)
    rows = pd.DataFrame({"start_ns": start, "end_ns": end, "number": np.arange(size)})
    rows = rows.assign(group="0", name="allreduce", numbered=True, size=-1, every=True, follows=True)
    return Rank(rank, 0, 1, Intervals.union(start, end), rows.assign(**dict.fromkeys(BEFORE, 0)), {}, {})
