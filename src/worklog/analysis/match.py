"""Which entries of two ledgers are the same work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from worklog.analysis.ledger import KEY, Ledger

LEVELS = (
    ("exact", ["group", "part", "name", "shape", "module"]),
    ("name", ["group", "part", "name", "module"]),
    ("name", ["group", "part", "name"]),
    ("words of the name", ["group", "part", "words", "shape", "module"]),
)
RENAMED = "place in the module"
_WORD = re.compile(r"[A-Za-z_]\w{3,}")
_SPELLING = {"Array", "anonymous", "array", "bool", "char", "const", "detail", "false", "instance", "lambda", "long"}
_SPELLING |= {"namespace", "operator", "true", "unnamed", "unsigned", "void"}
"""Words of demangled names in which compilers, tools and releases of torch differ for one and the same kernel."""


@dataclass(frozen=True)
class Matches:
    before: Any
    """For each entry of the ledger before the number of its match, from 0; entries of one number belong together."""
    after: Any
    how: list[str]
    """Of each match: a name of LEVELS (`name`: another shape or module), RENAMED, or empty where a side has none."""


def match(before: Ledger, after: Ledger, spelled_alike: bool = True) -> Matches:
    """Kernels by name, shape and module, each where both ledgers know it; everything else by name.

    What is left over goes by name and module, then by name alone, as far as a name has as many launches an occurrence
    on both sides: the same launches with another shape. With another number of launches they are other work. Likewise
    by the words of the name, shape and module: releases of a library spell template arguments differently. Then, in a
    module whose kernels are the same in number and order but for some that are left over, those are renamed. What is
    still left was removed or added. Ledgers that are not `spelled_alike`, of two tools, match by words from the start.
    Exchanging the sides changes nothing.
    """
    both = pd.concat([before.entries.assign(side=0), after.entries.assign(side=1)], ignore_index=True)
    for column in ("shape", "module"):
        if both.groupby("side")[column].agg(lambda known: (known == "").all()).any():
            both[column] = ""
    both["weight"] = both["count"] * np.where(both["side"] == 0, after.occurrences, before.occurrences)
    both["words"] = [words(name) for name in both["name"]]
    if not spelled_alike:
        both["name"] = both["words"]
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


def words(name: str) -> str:
    """What two spellings of a demangled kernel have in common: its identifiers, without those of how it is spelled."""
    return " ".join(sorted({*_WORD.findall(name)} - _SPELLING)) if "<" in name or "(" in name else name
