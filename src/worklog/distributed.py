"""`worklog diagnose` of several files: the ranks of one run, each diagnosed on its own, then all of them together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from worklog.analysis import ranks
from worklog.diagnose import Examined, examine, with_rules
from worklog.problem import ProblemError
from worklog.rules import Abstained, communication
from worklog.traces import files

TRACES = (".json", ".json.gz", ".sqlite")
WORTH_A_PROCESS = 64 << 20
"""Bytes of unpacked traces for each process: one starts in about the time that a reader takes for so many."""
PEAK = 4
"""Memory that a process takes at most, in sizes of the unpacked trace; the readers promise 3."""
NOTHING = "no kernel of a collective is in the traces"


def expand(paths: Iterable[Path]) -> list[Path]:
    """Files as they are; of a folder the traces in it, by name, unless it is itself a trace (an export in parquet).

    Raises ProblemError for a folder without traces.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.iterdir() if file.name.endswith(TRACES)) if path.is_dir() else []
        if path.is_dir() and not inside and not any(path.glob("*.parquet")):
            raise ProblemError(f"{path}: no trace is in this folder ({', '.join(TRACES)}).")
        found += inside or [path]
    return found


def diagnose(
    traces: Sequence[Path],
    range_name: str | None = None,
    scheduler: str | None = None,
    notify: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The files of one run, in processes of this machine or on the Dask cluster of `scheduler`.

    Keys: ranks [{rank, and what diagnose.diagnose returns}], by rank; rank_from ("trace": it says its rank, "name": the
    one number in which the names of the files differ, "order": the place in `traces`); alignment [{rank, offset_ns
    (added to its times gives those of the first rank), uncertainty_ns, bounds_ns ([low, high] or None), collectives}]
    (ranks.Clock); collectives (ranks.summary; None: there are none); findings and abstained [{rule, reason}] about all
    ranks together. Workers of a cluster have this package and see the files under the same names.

    Raises ProblemError if a file is no timeline, two are of the same rank, or no scheduler answers.
    """
    for file in traces:
        if files.kind(file) not in ("nsys", "kineto"):
            raise ProblemError(f"{file}: several files are taken as the ranks of one run; give this one alone.")
    found: list[Examined] = []
    with _executor(traces, scheduler) as executor:
        run: Callable[..., Iterable[Examined]] = map if executor is None else executor.map
        paths = traces if scheduler is None else [file.absolute() for file in traces]
        for one in run(partial(examine, range_name=range_name), paths):
            found.append(one)
            if notify is not None:
                notify(f"{len(found)} of {len(traces)} ranks read")
    numbers, rank_from = _numbers(traces, [one.rank for one in found])
    order = sorted(range(len(found)), key=lambda at: numbers[at])
    each = [{"rank": numbers[at], **_under(found[at].diagnosis, traces[at])} for at in order]
    members = [replace(member, rank=numbers[at]) for at in order for member in found[at].members]
    talking = [member for member in members if len(member.collectives)]
    empty: dict[str, Any] = {"findings": [], "abstained": []}
    if not talking:
        said = with_rules(empty, [Abstained(rule, NOTHING) for rule in communication.RULES])
        return {"ranks": each, "rank_from": rank_from, "alignment": [], "collectives": None, **said}
    together = ranks.together(talking)
    said = with_rules(empty, [rule(together) for rule in communication.RULES.values()])
    return {
        "ranks": each,
        "rank_from": rank_from,
        "alignment": [asdict(clock) for clock in together.clocks],
        "collectives": ranks.summary(together),
        **said,
    }


def _under(diagnosis: dict[str, Any], file: Path) -> dict[str, Any]:
    return {**diagnosis, "source": {**diagnosis["source"], "file": str(file)}}


def _numbers(traces: Sequence[Path], said: Sequence[int | None]) -> tuple[list[int], str]:
    told = [rank for rank in said if rank is not None]
    if len(told) < len(said):
        differ = _differing([str(file) for file in traces])
        return (differ, "name") if differ else (list(range(len(traces))), "order")
    seen: dict[int, Path] = {}
    for rank, file in zip(told, traces, strict=True):
        if rank in seen:
            raise ProblemError(f"{file}: is of rank {rank}, and so is {seen[rank]}; give each rank of one run once.")
        seen[rank] = file
    return told, "trace"


def _differing(names: Sequence[str]) -> list[int]:
    """The one number in which names differ that are else the same; []: there is none."""
    split = [re.split(r"(\d+)", name) for name in names]
    if len({tuple(parts[::2]) for parts in split}) > 1:
        return []
    varying = [column for column in zip(*(parts[1::2] for parts in split), strict=True) if len(set(column)) > 1]
    numbers = [int(number) for number in varying[0]] if len(varying) == 1 else []
    return numbers if len(set(numbers)) == len(names) else []


@contextmanager
def _executor(traces: Sequence[Path], scheduler: str | None) -> Iterator[Executor | None]:
    """None: this process is the quickest."""
    if scheduler is not None:
        with _cluster(scheduler) as executor:
            yield executor
        return
    sizes = [_unpacked(file) for file in traces]
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(PEAK * max(sizes), 1)
    workers = min(len(traces), os.cpu_count() or 1, room, sum(sizes) // WORTH_A_PROCESS)
    if workers < 2:
        yield None
        return
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn")
    ) as pool:  # a fork would copy the caller's threads
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _unpacked(file: Path) -> int:
    """Bytes; of a gzip file what its last four say, which is modulo 4 GiB."""
    if file.is_dir():
        return sum(part.stat().st_size for part in file.iterdir())
    with file.open("rb") as stream:
        if stream.read(2) != files.GZIP:
            return file.stat().st_size
        stream.seek(-4, os.SEEK_END)
        return max(int.from_bytes(stream.read(4), "little"), file.stat().st_size)


@contextmanager
def _cluster(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise ProblemError("--scheduler needs Dask: pip install 'worklog[cluster]'.") from None
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise ProblemError(f"No Dask scheduler answers at {address} ({error}).") from error
    with client:
        yield client.get_executor(pure=False)
