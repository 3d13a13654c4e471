"""Which entries of two ledgers are the same work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.ledger import KEY, Ledger

LEVELS = (
    ("exact", ["group", "part", "name", "shape", "module"]),
    ("name", ["group", "part", "name", "module"]),
    ("name", ["group", "part", "name"]),
)
RENAMED = "place in the module"


@dataclass(frozen=True)
class Matches:
    before: Any
    """For each entry of the ledger before the number of its match, from 0; entries of one number belong together."""
    after: Any
    how: list[str]
    """Of each match: `exact`, `name` (another shape or module), RENAMED, or empty where it has one side only."""


def match(before: Ledger, after: Ledger) -> Matches:
    """Kernels by name, shape and module, each where both ledgers know it; everything else by name.

    What is left over goes by name and module, then by name alone, as far as a name has as many launches an occurrence
    on both sides: the same launches with another shape. With another number of launches they are other work. Then, in
    a module whose kernels are the same in number and order but for some that are left over, those are renamed. What
    is still left was removed or added. Exchanging the sides changes nothing.
    """
    both = pd.concat([before.entries.assign(side=0), after.entries.assign(side=1)], ignore_index=True)
    for column in ("shape", "module"):
        if both.groupby("side")[column].agg(lambda known: (known == "").all()).any():
            both[column] = ""
    both["weight"] = both["count"] * np.where(both["side"] == 0, after.occurrences, before.occurrences)
    number = np.full(len(both), -1)
    how: list[str] = []
    for level, columns in LEVELS:
        left = both[(number < 0) & ((level == "exact") | (both["group"] == "kernel"))]
        groups = left.groupby(columns)
        launches = [left["weight"].where(left["side"] == side, 0).groupby(groups.ngroup()).sum() for side in (0, 1)]
        alike = groups["side"].nunique().to_numpy() == 2
        if level != "exact":
            alike &= (launches[0] == launches[1]).to_numpy()
        number[left.index] = np.append(np.cumsum(alike) - 1 + len(how), -1)[
            np.where(alike[groups.ngroup()], groups.ngroup(), -1)
        ]
        how += [level] * int(alike.sum())
    _rename(both, number, how)
    alone = number < 0
    number[alone] = len(how) + both[alone].groupby(["side", *KEY]).ngroup()
    how += [""] * (number.max(initial=-1) + 1 - len(how))
    return Matches(number[: len(before.entries)], number[len(before.entries) :], how)


def _rename(both: pd.DataFrame, number: Any, how: list[str]) -> None:
    """Give numbers to those left over that stand in the same place of the same module."""
    kernels = both[(both["group"] == "kernel") & (both["module"] != "")]
    for _, own in kernels.sort_values("first_ns").groupby("module"):
        old, new = (own.index[own["side"] == side].to_numpy() for side in (0, 1))
        if len(old) != len(new) or (number[old] != number[new]).any():
            continue
        for one, other in zip(old[number[old] < 0], new[number[new] < 0], strict=True):
            if both["weight"][one] == both["weight"][other] and both["part"][one] == both["part"][other]:
                number[one] = number[other] = len(how)
                how.append(RENAMED)
