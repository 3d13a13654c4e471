"""Rule on kernels that only put a tensor into another order."""

from __future__ import annotations

from worklog.rules import MATERIAL, Abstained, Case, Finding
from worklog.rules import kernel_names as of
from worklog.rules.captures import OPERATORS
from worklog.rules.evidence import blind, launched_inside, lengths, places, running, spared


def layout_conversions(case: Case) -> Finding | Abstained | None:
    """Kernels that compute nothing: cuDNN's between NCHW and NHWC, Inductor's that only move, copies of `contiguous()`.

    By their names, or because they were launched inside of aten::contiguous, which copies only what is in another
    order. Other copies are not counted: a name alone does not tell a permuted copy from an expanded or a sliced one.
    """
    if reason := blind(case):
        return Abstained("layout_conversions", reason)
    trace, row = case.trace, case.order.row
    moved = of.kernels(trace, of.layout) | (of.kernels(trace, of.elementwise) & launched_inside(trace, _contiguous))
    rows = row[(moved & case.selection.launched)[row]]
    ns = running(case, rows)
    if (share := case.share(ns)) < MATERIAL:
        return None
    return Finding(
        rule="layout_conversions",
        level="coarse",
        title=f"Tensors are put into another memory order for {share:.0%} of the time, which computes nothing",
        share=share,
        gain_upper_bound=case.share(spared(case, rows)),
        evidence={
            "device": case.timeline.device,
            "converting_ns": ns,
            "converting_kernels": len(rows),
        },
        where=places(case, rows, lengths(trace, rows)),
        next=OPERATORS,
    )


def _contiguous(name: str) -> bool:
    return name == "aten::contiguous"
