"""Device activity as tables: how long something ran, and which kernels cost what."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

GEOMETRY = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
TELLING = re.compile(r"\b(\w+?_kernel_cuda|\w*[Ff]unctor(?!_)|\w+Ops|cutlass_\w+|\w+_functor)\b")
"""Template arguments that say what a wrapper such as at::native's `elementwise_kernel` or CUTLASS's `Kernel2` does."""
GENERIC = {"BinaryFunctor", "BUnaryFunctor", "AUnaryFunctor"}
"""Wrappers of at::native around the functor that matters."""


def short_name(demangled: str) -> str:
    """The function's own name: no return type, namespace, parameters or template arguments.

    Of template arguments only the one is kept that tells copies of a generic kernel apart: `void
    at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>(int, ...)` gives
    `vectorized_elementwise_kernel<FillFunctor>`.
    """
    bare, depth, arguments = "", 0, ""
    text = demangled.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    for letter in text:
        if letter == "(" and depth == 0:
            break
        depth += letter == "<"
        if depth:
            arguments += letter
        else:
            bare += letter
        depth -= letter == ">"
    name = bare.strip().split(" ")[-1].rsplit("::", 1)[-1]
    telling = [word for word in TELLING.findall(arguments) if word not in GENERIC]
    return f"{name}<{telling[0]}>" if telling else name or demangled


def kernel_table(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Kernels by demangled name, most costly first.

    `rows` has name (demangled), start_ns, end_ns and the columns of GEOMETRY. Each kernel: name (short), full_name,
    count, total_ns, median_ns, share (of the summed kernel time), and grid, block [x, y, z] of its most common launch.
    """
    if rows.empty:
        return []
    timed = rows.assign(ns=rows["end_ns"] - rows["start_ns"])
    total = int(timed["ns"].sum())
    found = []
    for full_name, group in timed.groupby("name", sort=True, observed=True):
        geometry = group.groupby(list(GEOMETRY)).size().idxmax()
        spent = int(group["ns"].sum())
        found.append(
            {
                "name": short_name(str(full_name)),
                "full_name": str(full_name),
                "count": len(group),
                "total_ns": spent,
                "median_ns": round(float(group["ns"].median())),
                "share": spent / total if total else 0.0,
                "grid": [int(n) for n in geometry[:3]],
                "block": [int(n) for n in geometry[3:]],
            }
        )
    return sorted(found, key=lambda kernel: (-kernel["total_ns"], kernel["full_name"]))
