"""Rules on kernels that follow one another on a stream with nothing between: what one kernel could do at once."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from worklog.rules import MATERIAL, Abstained, Case, Finding
from worklog.rules.captures import traffic
from worklog.rules.evidence import blind, idle_before, launched_inside, lengths, names, places, running, spared
from worklog.rules.kernel_names import by_inductor, converts, dequantises, elementwise, kernels, matmul
from worklog.traces.schema import MEMSET

RECURS = 3
"""Least number of matrix products that a conversion precedes; ours: a model has more layers than that."""


def dequantise_then_matmul(case: Case) -> Finding | Abstained | None:
    """Kernels that convert an operand to another type right before the matrix product that reads it, time and again.

    They come directly before the product on its stream, in an unbroken run of element-wise kernels that begins with a
    conversion. A conversion counts if it, or the operator around its launch, is called a dequantisation; and without
    such a name if it runs longer than the product itself. That is so for weights and few rows: converting N*K weights
    moves 3 bytes or more for each (float8 to bfloat16), the product reads 2. Converting M*K activations outlasts a
    product of N columns only below some hundred columns (6*M*K bytes against 2*M*N*K operations: N < 3 * operations
    per byte). So a conversion of weights before many rows is not found without a name.
    The bound is what goes with the conversions (evidence.spared); that the product could read fewer bytes is not in it.
    """
    if reason := blind(case):
        return Abstained("dequantise_then_matmul", reason)
    rows, products = _dequantised(case)
    ns = running(case, rows)
    if len(products) < RECURS or (share := case.share(ns)) < MATERIAL:
        return None
    spent = lengths(case.trace, rows)
    return Finding(
        rule="dequantise_then_matmul",
        level="coarse",
        title=f"Operands are converted to another type just before matrix products, for {share:.0%} of the time",
        share=share,
        gain_upper_bound=case.share(spared(case, rows)),
        evidence={
            "device": case.timeline.device,
            "converting_ns": ns,
            "converting_kernels": len(rows),
            "products_after_a_conversion": len(products),
            "products": int((kernels(case.trace, matmul) & case.selection.launched)[case.order.row].sum()),
            "their_products_ns": running(case, products),
        },
        where=places(case, rows, spent),
        next=traffic(names(case, rows, spent), "conversions"),
    )


def unfused_elementwise(case: Case) -> Finding | Abstained | None:
    """Element-wise kernels of torch's own that follow one another on a stream: one kernel could do a chain's work.

    The share is all of a chain but its longest kernel. The bound (evidence.spared) is larger: what passes between the
    kernels of a chain would not go through memory any more, so that even the longest would take less. Left out: what
    dequantise_then_matmul counts, and chains of Inductor's kernels alone, which it had its chance to fuse.
    """
    if reason := blind(case):
        return Abstained("unfused_elementwise", reason)
    row = case.order.row
    spent, member = lengths(case.trace, row), kernels(case.trace, elementwise) & case.selection.launched
    member[_dequantised(case)[0]] = False
    starts, ends = case.order.runs(member[row])
    own = np.append(0, np.cumsum(~kernels(case.trace, by_inductor)[row]))
    chained = (ends - starts > 1) & (own[ends] > own[starts])
    starts, ends = starts[chained], ends[chained]
    total = np.append(0, np.cumsum(spent))
    whole = int((total[ends] - total[starts]).sum())
    longest = int(np.maximum.reduceat(np.append(spent, 0), np.ravel((starts, ends), "F"))[::2].sum())
    chosen = _within(starts, ends, len(row))
    ns = running(case, row[chosen])
    share = case.share(min(whole - longest, ns))
    if share < MATERIAL:
        return None
    rows, spent = row[chosen], spent[chosen]
    return Finding(
        rule="unfused_elementwise",
        level="coarse",
        title=f"Chains of element-wise kernels: with one kernel for each, {share:.0%} of the time would be spared",
        share=share,
        gain_upper_bound=case.share(spared(case, rows)),
        evidence={
            "device": case.timeline.device,
            "chains": len(starts),
            "median_length": float(np.median(ends - starts)),
            "chains_ns": whole,
            "all_but_the_longest_ns": whole - longest,
            "idle_before_them_ns": idle_before(case, rows),
        },
        where=places(case, rows, spent),
        next=traffic(names(case, rows, spent), "chains"),
    )


_known: WeakKeyDictionary[Case, tuple[Any, Any]] = WeakKeyDictionary()


def _dequantised(case: Case) -> tuple[Any, Any]:
    """Rows of activities: kernels that convert for a product, and those products."""
    if case not in _known:
        _known[case] = _conversions(case)
    return _known[case]


def _conversions(case: Case) -> tuple[Any, Any]:
    trace, launched = case.trace, case.selection.launched
    order = case.order.keep(
        trace.activities["kind"].to_numpy()[case.order.row] != MEMSET
    )  # cuBLAS clears its workspace
    row = order.row
    product = (kernels(trace, matmul) & launched)[row]
    sure = ((kernels(trace, dequantises) | launched_inside(trace, dequantises)) & launched)[row] & ~product
    starts, ends = order.runs((kernels(trace, elementwise) & launched)[row] | sure)
    beyond = np.append(product & ~order.first, False)  # a run at the very end is before no product
    starts, ends = starts[beyond[ends]], ends[beyond[ends]]
    spent, chosen = lengths(trace, row), _within(starts, ends, len(row))
    run = np.repeat(np.arange(len(starts)), ends - starts)
    begins = sure[chosen] | (kernels(trace, converts)[row[chosen]] & (spent[chosen] > spent[ends][run]))
    runs, first = np.unique(run[begins], return_index=True)
    begin = np.full(len(starts), len(row))
    begin[runs] = chosen[begins][first]
    return row[chosen[chosen >= begin[run]]], row[ends[runs]]


def _within(starts: Any, ends: Any, size: int) -> Any:
    """The indices in [start, end) of these disjoint runs."""
    edges = np.zeros(size + 1, np.int8)
    edges[starts] += 1
    edges[ends] -= 1
    return np.flatnonzero(np.cumsum(edges[:-1]))
