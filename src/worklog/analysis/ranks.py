"""Several ranks of one run: collectives matched, clocks aligned through them, communication split into its two halves.

A rank's kernel of an all-reduce begins when that rank arrives and ends when the data of all have been exchanged. What
lies before the last rank's arrival is waiting, the rest is transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.collectives import BEFORE, Rank
from worklog.traces.intervals import Intervals

KEY = ["group", "name", "number", "numbered", "part"]
"""What two ranks' kernels of one collective have in common."""


@dataclass(frozen=True)
class Clock:
    """Of one trace, against that of the first: add `offset_ns` to its times."""

    rank: int
    offset_ns: int
    """Median of the differences of the ends of common collectives, moved into `bounds_ns` where it lies outside."""
    uncertainty_ns: int
    """Largest deviation of such a difference from the offset, or the farther one of `bounds_ns` if that is nearer."""
    bounds_ns: tuple[int, int] | None
    """Where the offset must lie if no collective ends on a rank before another began it; None: there is no such
    offset, a clock jumped or drifted."""
    collectives: int


@dataclass(frozen=True)
class Ranks:
    ranks: Sequence[Rank]
    clocks: Sequence[Clock]
    """The first rank's, with offset zero, and those of ranks that share collectives with it or with another."""
    calls: pd.DataFrame
    """A row for each kernel of a matched collective: member (index of ranks), row (of its collectives), key (the
    collective), group, name, size, start_ns, end_ns, waiting_ns, transfer_ns (their sum is the kernel's duration), late
    (member that arrived last), lead_ns (how long after the one before it), follows (on every rank another collective
    came before it) and behind_ of each of BEFORE: how much more of it the late rank had since the collective before
    than the median of the others."""
    reasons: Sequence[str]
    """Why kernels of collectives could not be matched, or clocks not be aligned."""

    def label(self, member: int) -> str:
        """`rank 1`; `GPU 1` of a single trace; both where ranks have several GPUs."""
        one = self.ranks[member]
        if len({rank.rank for rank in self.ranks}) == 1:
            return f"GPU {one.device}"
        several = len({(rank.rank, rank.device) for rank in self.ranks}) > len({rank.rank for rank in self.ranks})
        return f"rank {one.rank} GPU {one.device}" if several else f"rank {one.rank}"

    def exposed(self, member: int, calls: pd.DataFrame, *columns: str) -> int:
        """How much of the member's exposed communication lies in these `columns` (waiting_ns, transfer_ns) of calls."""
        own = calls[calls["member"] == member]
        met = own["start_ns"] + own["waiting_ns"]
        low = own["start_ns"] if "waiting_ns" in columns else met
        high = own["end_ns"] if "transfer_ns" in columns else met
        return self.ranks[member].exposed.within(Intervals.union(low, high))


def together(ranks: Sequence[Rank]) -> Ranks:
    """Of ranks with collectives; each in a trace of its own, or several devices of one trace. O(n log n) in kernels."""
    matched, reasons = _match(ranks)
    clocks = _align([rank.rank for rank in ranks], matched)
    alone = [rank.rank for rank in ranks if rank.rank not in clocks and rank.collectives["every"].any()]
    if alone and not matched.empty:
        several = ", ".join(map(str, sorted(set(alone))))
        reasons.append(f"no collective is common to rank {several} and the first rank, so their clocks are unknown")
    offset = np.asarray([clocks[rank.rank].offset_ns if rank.rank in clocks else 0 for rank in ranks], dtype=np.int64)
    known = matched["member"].map({at: rank.rank in clocks for at, rank in enumerate(ranks)}).to_numpy(bool)
    return Ranks(ranks, list(clocks.values()), _split(_shared(matched[known]), offset), reasons)


def summary(found: Ranks) -> dict[str, Any]:
    """Sums in ns; `unsplit` is of kernels that no other rank's were matched with, or that wait for no other rank.

    Of each rank communication_ns is the summed duration of its kernels, waiting + transfer + unsplit; exposed_ns, where
    they run beside no compute, is time of the device, and adds up to the accounting's communication. waits: who waited
    for whom. partial: collectives with ranks whose traces are not here; waiting for those counts as transfer.
    unmatched: why kernels of collectives could not be matched, or clocks not be aligned.
    """
    calls, ranks = found.calls, []
    for member, rank in enumerate(found.ranks):
        own = calls[calls["member"] == member]
        spent = int((rank.collectives["end_ns"] - rank.collectives["start_ns"]).sum())
        waiting, transfer = int(own["waiting_ns"].sum()), int(own["transfer_ns"].sum())
        moved, split = (
            found.exposed(member, calls, "transfer_ns"),
            found.exposed(member, calls, "waiting_ns", "transfer_ns"),
        )
        exposed = {"waiting": split - moved, "transfer": moved, "unsplit": rank.exposed.length - split}
        ranks.append(
            {
                "label": found.label(member),
                "rank": rank.rank,
                "device": rank.device,
                "kernels": len(rank.collectives),
                "communication_ns": spent,
                "waiting_ns": waiting,
                "transfer_ns": transfer,
                "unsplit_ns": spent - waiting - transfer,
                "exposed_ns": exposed,
                "arrived_last": int((own["late"] == member).sum()),
            }
        )
    by_call = calls.groupby(["name", "group"], sort=True)
    waited = calls[calls["waiting_ns"] > 0].groupby(["member", "late"], sort=True)["waiting_ns"].agg(["size", "sum"])
    members = calls.groupby("key").agg(size=("size", "first"), here=("member", "nunique"))
    return {
        "ranks": ranks,
        "calls": [
            {
                "name": name,
                "group": group,
                "count": int(own["key"].nunique()),
                "median_transfer_ns": int(own["transfer_ns"].median()),
                "waiting_ns": int(own["waiting_ns"].sum()),
            }
            for (name, group), own in by_call
        ],
        "waits": [
            {
                "waiting": found.label(member),
                "late": found.label(late),
                "count": int(row["size"]),
                "waiting_ns": int(row["sum"]),
            }
            for (member, late), row in waited.iterrows()
        ],
        "partial": int((members["size"] > members["here"]).sum()),
        "unmatched": list(found.reasons),
    }


def _match(ranks: Sequence[Rank]) -> tuple[pd.DataFrame, list[str]]:
    """Rows of ranks' collectives that another rank has too, with their `member`, `row` and `key`."""
    own = [rank.collectives.assign(member=at, row=np.arange(len(rank.collectives))) for at, rank in enumerate(ranks)]
    rows = pd.concat(own, ignore_index=True)
    rows = rows[rows["every"].to_numpy(bool)].reset_index(drop=True)
    rows["part"] = rows.groupby(["member", *KEY[:-1]], sort=False).cumcount()
    loose, reasons = _out_of_step(rows)
    rows = rows[~loose].reset_index(drop=True)
    rows["key"] = rows.groupby(KEY, sort=False).ngroup()
    return _shared(rows), reasons


def _shared(rows: pd.DataFrame) -> pd.DataFrame:
    shared = rows.groupby("key")["member"].transform("size") > 1
    return rows[shared.to_numpy(bool)].reset_index(drop=True)


def _out_of_step(rows: pd.DataFrame) -> tuple[Any, list[str]]:
    """Mask of rows whose order tells nothing: kernels without numbers of a group whose sequence is not every rank's."""
    loose, reasons = np.zeros(len(rows), bool), []
    counted = rows[~rows["numbered"].to_numpy(bool)]
    members = counted["member"].nunique()
    for group, own in counted.groupby("group", sort=False):
        by_member = {member: part["name"].tolist() for member, part in own.groupby("member", sort=True)}
        first, *others = by_member.values()
        wanted = members if int(own["size"].iloc[0]) < 0 else len(by_member)
        if len(by_member) < wanted or any(names != first for names in others):
            loose[own.index] = True
            counts = ", ".join(str(len(names)) for names in by_member.values())
            reasons.append(
                f"the trace does not number the collectives of {group or 'a group'}, and their kernels ({counts}) are "
                "not the same sequence on every rank: record the same steps on all ranks"
            )
    return loose, reasons


def _align(ranks: Sequence[int], matched: pd.DataFrame) -> dict[int, Clock]:
    """By rank; from the first rank over those that share most collectives with one whose clock is known."""
    times = matched.assign(rank=np.asarray(ranks, dtype=np.int64)[matched["member"].to_numpy(np.int64)])
    ends = times.groupby(["rank", "key"]).agg(start=("start_ns", "max"), end=("end_ns", "max"), first=("end_ns", "min"))
    by_rank = {int(rank): own.droplevel("rank") for rank, own in ends.groupby("rank")}
    known = {ranks[0]: Clock(ranks[0], 0, 0, (0, 0), len(by_rank.get(ranks[0], ())))}
    while left := [rank for rank in by_rank if rank not in known]:
        pairs = [
            (len(by_rank[a].index.intersection(by_rank[b].index)), -b, -a) for a in known for b in left if a in by_rank
        ]
        count, rank, base = max(pairs, default=(0, 0, 0))
        if not count:
            break
        known[-rank] = _clock(-rank, known[-base], by_rank[-base].join(by_rank[-rank], rsuffix="_own", how="inner"))
    return known


def _clock(rank: int, base: Clock, both: pd.DataFrame) -> Clock:
    """`both`: start and end of common collectives on the base's clock and, with `_own`, on the rank's."""
    ends = np.sort((both["end"] - both["end_own"]).to_numpy())
    low, high = int((both["start"] - both["first_own"]).max()), int((both["first"] - both["start_own"]).min())
    offset = int(ends[(len(ends) - 1) // 2])
    possible = low <= high
    offset = min(max(offset, low), high) if possible else offset
    doubt = int(max(ends[-1] - offset, offset - ends[0]))
    return Clock(
        rank,
        base.offset_ns + offset,
        base.uncertainty_ns + (min(doubt, max(high - offset, offset - low)) if possible else doubt),
        (base.bounds_ns[0] + low, base.bounds_ns[1] + high) if possible and base.bounds_ns else None,
        len(both),
    )


def _split(matched: pd.DataFrame, offset: Any) -> pd.DataFrame:
    calls = matched.assign(arrival=matched["start_ns"] + offset[matched["member"].to_numpy(np.int64)])
    calls = calls.sort_values(["key", "arrival"], kind="stable", ignore_index=True)
    by_key = calls.groupby("key")
    last = by_key["arrival"].transform("max")
    length = calls["end_ns"] - calls["start_ns"]
    calls["waiting_ns"] = np.clip(last - calls["arrival"], 0, length)
    calls["transfer_ns"] = length - calls["waiting_ns"]
    calls["late"] = by_key["member"].transform("last")
    late = ~calls["key"].duplicated(keep="last")
    before = by_key["arrival"].shift(1)
    calls["lead_ns"] = (
        calls["key"].map((calls["arrival"] - before)[late].set_axis(calls["key"][late])).fillna(0).astype(np.int64)
    )
    calls["follows"] = by_key["follows"].transform("all")
    for part in BEFORE:
        others = calls[~late].groupby("key")[part].median().round().astype(np.int64)
        own = calls[late].set_index("key")[part]
        calls[f"behind_{part}"] = calls["key"].map(own - others).astype(np.int64)
    kept = ["member", "row", "key", "group", "name", "size", "start_ns", "end_ns", "waiting_ns", "transfer_ns"]
    return calls[[*kept, "late", "lead_ns", "follows", *(f"behind_{part}" for part in BEFORE)]]
