"""The communication of several GPUs as a table: what of it was waiting, what transfer, what neither hides."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from worklog.render.terminal import microseconds

COLUMNS = ("collectives", "waiting", "transfer", "not split", "beside no compute: waiting", "transfer", "came last")


def table(summary: dict[str, Any]) -> Table:
    """`summary` is analysis.ranks.summary's. A column of zeros is left out."""
    rows = [
        (
            rank["label"],
            str(rank["kernels"]),
            rank["waiting_ns"],
            rank["transfer_ns"],
            rank["unsplit_ns"],
            rank["exposed_ns"]["waiting"],
            rank["exposed_ns"]["transfer"],
            str(rank["arrived_last"]),
        )
        for rank in summary["ranks"]
    ]
    found = Table(box=None, pad_edge=False, header_style="bold")
    shown = [at for at in range(len(COLUMNS) + 1) if any(row[at] != 0 for row in rows)]
    for at in shown:
        found.add_column(("", *COLUMNS)[at], justify="right" if at else "left", no_wrap=not at)
    for row in rows:
        cells = [cell if isinstance(cell, str) else microseconds(cell / 1e3) for cell in row]
        found.add_row(*(cells[at] for at in shown))
    return found
