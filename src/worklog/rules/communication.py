"""Rules on the communication of several ranks, and what one rank's trace cannot tell about it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from worklog.analysis.collectives import BEFORE, Rank
from worklog.analysis.ranks import Ranks
from worklog.analysis.timeline import IDLE
from worklog.rules import MATERIAL, Abstained, Finding

MOST = 0.5
"""Of all waiting: who causes more is the straggler, else the ranks take turns."""
PLACES = 3
WORDS = {"host": "time in which the host asked for nothing", "sync": "time in which the host waited for finished work"}
EACH_RANK = (
    "torchrun --nproc-per-node N --no-python nsys profile --trace=cuda,nvtx,osrt {} --output=rank%q{{RANK}} "
    "python PROGRAM"
)
STACKS = EACH_RANK.format("--cudabacktrace=kernel --python-backtrace=cuda")
OPERATORS = EACH_RANK.format("--pytorch=autograd-shapes-nvtx --sample=none")
"""One report a rank (options: see captures)."""


def straggler(found: Ranks) -> Finding | Abstained | None:
    """Ranks wait in collectives, beside no compute, for one that arrives late.

    The first collective of a trace is left out: in it ranks also wait for each other's profilers.
    """
    if found.calls.empty:
        return _unmatched("straggler", found)
    steady = found.calls[found.calls["follows"].to_numpy(bool)]
    if steady.empty:
        return Abstained("straggler", "each trace holds one collective; in the first, ranks wait for profilers too")
    waited = [found.exposed(member, steady, "waiting_ns") for member in range(len(found.ranks))]
    shares = [_share(ns, rank.span_ns) for ns, rank in zip(waited, found.ranks, strict=True)]
    waiting = int(np.argmax(shares))
    if shares[waiting] < MATERIAL:
        return None
    doubt = max(clock.uncertainty_ns for clock in found.clocks)
    own = steady[(steady["member"] == waiting) & (steady["waiting_ns"] > 0)]
    if own["waiting_ns"].sum() <= doubt * len(own):
        return Abstained("straggler", f"waiting lies within the uncertainty of the clocks ({doubt} ns a collective)")
    caused = steady.groupby("late")["waiting_ns"].sum()
    late = int(caused.idxmax())
    alone = bool(caused[late] > MOST * caused.sum())
    chosen = steady[steady["late"] == late] if alone else steady
    each = chosen.drop_duplicates("key")
    cost = found.exposed(waiting, chosen, "waiting_ns")
    behind = {part: int(each[f"behind_{part}"].sum()) for part in BEFORE}
    most = max(behind, key=lambda part: behind[part])
    who, whom, share = found.label(waiting), found.label(late), _share(cost, found.ranks[waiting].span_ns)
    evidence = {
        "waiting": who,
        "exposed_waiting_ns": cost,
        "late": whom,
        "arrived_last": int((steady.drop_duplicates("key")["late"] == late).sum()),
        "collectives": int(steady["key"].nunique()),
        "median_lead_ns": int(each["lead_ns"].median()),
        "clock_uncertainty_ns": doubt,
    }
    if alone:
        evidence |= {f"behind_in_{part}_ns": ns for part, ns in behind.items() if ns > 0}
        title = f"{who} waits {share:.0%} of the time in collectives for {whom}, which comes late"
        title += f": it has more {WORDS.get(most, most)} before them" if behind[most] > 0 else ""
    else:
        title = f"{who} waits {share:.0%} of the time in collectives; the ranks take turns in being late"
    return Finding(
        rule="straggler",
        level="coarse",
        title=title[0].upper() + title[1:],
        share=share,
        gain_upper_bound=_share(min(cost, int(each["lead_ns"].sum())), found.ranks[waiting].span_ns),
        evidence=evidence,
        where=[whom, *_more(found, late, most)] if alone else [],
        next=STACKS,
    )


def communication_not_overlapped(found: Ranks) -> Finding | Abstained | None:
    """Data move between ranks while nothing is computed. Waiting for a late rank is no communication."""
    if found.calls.empty:
        return _unmatched("communication_not_overlapped", found)
    moved = [found.exposed(member, found.calls, "transfer_ns") for member in range(len(found.ranks))]
    shares = [_share(ns, rank.span_ns) for ns, rank in zip(moved, found.ranks, strict=True)]
    member = int(np.argmax(shares))
    if (share := shares[member]) < MATERIAL:
        return _unsplit(found)
    own = found.calls[found.calls["member"] == member]
    costs = own.groupby("name")["transfer_ns"].sum().sort_values(ascending=False, kind="stable")
    split = found.exposed(member, found.calls, "waiting_ns", "transfer_ns")
    return Finding(
        rule="communication_not_overlapped",
        level="coarse",
        title=f"Collectives move data for {share:.0%} of the time while {found.label(member)} computes nothing",
        share=share,
        gain_upper_bound=share,
        evidence={
            "exposed_transfer_ns": moved[member],
            "transfer_ns": int(own["transfer_ns"].sum()),
            "exposed_waiting_ns": split - moved[member],
            "collectives": len(own),
        },
        where=found.ranks[member].places["communication"] or [str(name) for name in costs.index[:PLACES]],
        next=OPERATORS,
    )


def alone(rank: Rank) -> list[Abstained]:
    """None of these rules can judge one rank; without a word where its communication costs little."""
    share = _share(rank.exposed.length, rank.span_ns)
    reason = (
        f"{share:.0%} of the time is in collectives beside no compute, and only the traces of all ranks tell how much "
        "of that is waiting for a late one: `worklog diagnose RANK0 RANK1 ...`"
    )
    return [Abstained(rule, reason) for rule in RULES] if share >= MATERIAL else []


RULES: dict[str, Callable[[Ranks], Finding | Abstained | None]] = {
    "straggler": straggler,
    "communication_not_overlapped": communication_not_overlapped,
}


def _unmatched(rule: str, found: Ranks) -> Abstained | None:
    if not any(len(rank.collectives) for rank in found.ranks):
        return Abstained(rule, "no kernel of a collective is in the traces")
    if found.reasons:
        return Abstained(rule, "; ".join(found.reasons))
    return Abstained(
        rule, "no kernel of a collective in which every rank waits for every other is common to two traces"
    )


def _unsplit(found: Ranks) -> Abstained | None:
    shares = {
        found.label(member): _share(
            rank.exposed.length - found.exposed(member, found.calls, "waiting_ns", "transfer_ns"), rank.span_ns
        )
        for member, rank in enumerate(found.ranks)
    }
    who = max(shares, key=lambda label: shares[label])
    if shares[who] < MATERIAL:
        return None
    reason = (
        f"{who} spends {shares[who]:.0%} of the time, beside no compute, in sends, broadcasts and the like or in "
        "collectives that no other trace has; whether it waits or transfers there is unknown"
    )
    return Abstained("communication_not_overlapped", "; ".join([reason, *found.reasons]))


def _more(found: Ranks, late: int, most: str) -> list[str]:
    """What the late rank has more of before collectives: kernels, most first, or what its device waits for."""
    if most != "compute":
        return found.ranks[late].places["idle"] if most in IDLE else []
    others = [rank.kernels for member, rank in enumerate(found.ranks) if member != late]
    more = {
        name: ns - float(np.median([kernels.get(name, 0) for kernels in others]))
        for name, ns in found.ranks[late].kernels.items()
    }
    names = sorted((name for name, ns in more.items() if ns > 0), key=lambda name: -more[name])[:PLACES]
    return [*names, *found.ranks[late].places["compute"]][: PLACES + 1]


def _share(part: int, span: int) -> float:
    return part / span if span else 0.0
