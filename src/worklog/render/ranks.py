"""The diagnosis of several ranks as text in a terminal: each rank's time in a line, then what they do to each other."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from worklog.render import collectives
from worklog.render.diagnosis import PARTS, bar, explained, not_judged
from worklog.render.terminal import clean, microseconds

FROM = {
    "trace": "numbered as their traces say",
    "name": "numbered as their names say",
    "order": "numbered in the order given: neither the traces nor their names say it",
}


def report(found: dict[str, Any], width: int = 120) -> Group:
    """What worklog.distributed.diagnose returns."""
    lines, count = _accounting(found), len(found["ranks"])
    seen = {part for accounting in lines.values() for part, ns in accounting.items() if ns}
    parts: list[RenderableType] = [
        Text.assemble((f"{count} rank{'s' * (count != 1)}", "bold"), f", {FROM[found['rank_from']]}")
    ]
    for one in found["ranks"]:
        parts += [Text(), *_rank(one, lines, width)]
    legend = Text()
    for part, (letter, colour, _) in PARTS.items():
        if part in seen:
            legend.append(letter, style=colour).append(f" {part}  ")
    parts += [Text(), legend] * bool(seen)
    if found["collectives"]:
        parts += [Text(), collectives.table(found["collectives"])]
    names = {kernel["name"] for one in found["ranks"] for kernel in one["kernels"]}
    for finding in found["findings"]:
        parts += [Text(), *explained(finding, names)]
    return Group(*parts, Text(), *(Text(line, style="dim") for line in _unknown(found)))


def _accounting(found: dict[str, Any]) -> dict[tuple[int, int], dict[str, int]]:
    """Of each rank and device the accounting, with the waiting taken out of the communication."""
    known = found["collectives"]["ranks"] if found["collectives"] else []
    waiting = {(rank["rank"], rank["device"]): rank["exposed_ns"]["waiting"] for rank in known}
    lines = {}
    for one in found["ranks"]:
        for device in one["devices"]:
            which, parts = (one["rank"], device["device"]), device["accounting_ns"]
            own = waiting.get(which, 0)
            lines[which] = {**parts, "communication": parts["communication"] - own, "waiting": own}
    return lines


def _rank(one: dict[str, Any], accounting: dict[tuple[int, int], dict[str, int]], width: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for device in one["devices"]:
        span = device["span_ns"]
        busy = device["busy_ns"] / span if span else 0.0
        heading = f"rank {one['rank']}" + f" GPU {device['device']}" * (len(one["devices"]) > 1)
        lines += [
            Text.assemble(
                (heading, "bold"),
                f": {microseconds(span / 1e3)}, busy {busy:.1%}, {device['kernel_count']} kernels, ",
                clean(one["source"]["file"]),
            ),
            bar(accounting[one["rank"], device["device"]], min(width, 100)),
        ]
    if not one["devices"]:
        lines.append(Text(f"rank {one['rank']}: no work of a GPU, {clean(one['source']['file'])}"))
    lines += [Text(f"  {clean(finding['title'])}") for finding in one["findings"]]
    return lines


def _unknown(found: dict[str, Any]) -> list[str]:
    lines = [_clock(clock) for clock in found["alignment"][1:]]
    if summary := found["collectives"]:
        if summary["partial"]:
            lines.append(
                f"{summary['partial']} collectives have ranks whose traces are not here: waiting for them counts as "
                "transfer."
            )
        if any(rank["unsplit_ns"] for rank in summary["ranks"]):
            lines.append(
                "Not split: collectives that no other rank's trace has, and those that do not wait for every rank."
            )
        said = " ".join(one["reason"] for one in found["abstained"])
        reasons = [clean(reason) for reason in summary["unmatched"] if reason not in said]
        lines += [f"{reason[0].upper()}{reason[1:]}." for reason in reasons]
    lines += not_judged(found["abstained"])
    lines.append("The whole of one rank: worklog diagnose FILE.")
    return lines


def _clock(clock: dict[str, Any]) -> str:
    ahead = -clock["offset_ns"]
    side = "ahead of" if ahead >= 0 else "behind"
    jumped = "" if clock["bounds_ns"] else "; no one offset fits all collectives: a clock jumped or drifts"
    return (
        f"Clock of rank {clock['rank']}: {microseconds(abs(ahead) / 1e3)} {side} the first's, by the ends of "
        f"{clock['collectives']} collectives, give or take {microseconds(clock['uncertainty_ns'] / 1e3)}{jumped}."
    )
