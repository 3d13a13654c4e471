"""Records of one problem beside each other, as text in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from worklog.render.terminal import NONE, clean, microseconds, three

NARROW = 110
"""Below this width the spread has no column."""
CPU = "A CPU's times are at a small size: what a CPU can show, and not the finding."
LEGEND = (
    "ratio: of the time of {} in the same record. of ceiling: least bytes, or operations, over the time, as a share of "
    "the copy bandwidth (copy), or bf16 matrix-product rate (mm), that the same run measured."
)
COMPARED = (
    " this / it: this record's time over that one's. this - it: of ceiling, in points. ~: p10 .. p90 of both overlap, "
    "so the difference is within the spread."
)


def report(found: dict[str, Any], width: int = 120) -> Group:
    """What worklog.compare.compare returns."""
    names = labels(found["records"])
    parts: list[RenderableType] = [Text(clean(found["problem"]), style="bold")]
    parts += [_machine(record, names[record["run_id"]]) for record in found["records"]]
    alike = [record for record in found["records"] if record["apart"] is None]
    parts += [Text(), _times(found, alike, names, width)]
    summaries = [_summary(found["cases"], record["run_id"], names[record["run_id"]]) for record in alike[1:]]
    parts += [Text(), *filter(None, summaries)] if any(summaries) else []
    for record in found["records"]:
        if record["apart"] is not None:
            heading = f"RECORDED on {names[record['run_id']]}, not to be set against the above: {record['apart']}."
            parts += [Text(), Text(clean(heading), style="yellow")]
            parts.append(_times(found, [record], names, width))
    if found["claims"]:
        parts += [Text(), _claims(found["claims"], found["records"], names)]
    legend = LEGEND.format(clean(found["baseline"])) + COMPARED * any(one["comparisons"] for one in found["cases"])
    parts += [Text(), Text(legend, style="dim")]
    notes = [CPU] * any(record["device"] == "cpu" for record in found["records"]) + found["notes"]
    parts += [Text(), *(Text(clean(note), style="yellow") for note in notes)] if notes else []
    return Group(*parts)


def labels(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """`this`, then `H200` or, where two would be called the same, `H200 b77d34`, by run id."""
    names = {record["run_id"]: _short(record) for record in records}
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    first = records[0]["run_id"]
    return {
        run_id: "this" if run_id == first else f"{name} {run_id[-6:]}" if name in twice else name
        for run_id, name in names.items()
    }


def _short(record: dict[str, Any]) -> str:
    """Without the maker's name."""
    name = clean(record["gpu"] or "") if record["device"] == "cuda" else "CPU"
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ") or "GPU"


def _machine(record: dict[str, Any], name: str) -> Text:
    copy, product = record["copy_bytes_per_s"], record["matmul_flop_per_s"]
    on_gpu = record["device"] == "cuda"
    told = [
        clean((record["gpu"] if on_gpu else record["cpu"]) or ""),
        f"copies {three(copy / 1e12)} TB/s" if copy else "",
        f"bf16 products {three(product / 1e12)} TFLOP/s" if product else "",
        f"config {clean(record['config'])}",
        f"driver {clean(record['driver'])}" if on_gpu and record["driver"] else "",
        f"torch {clean(record['torch'])}" if record["torch"] else "",
    ]
    return Text.assemble((f"{name}: ", "bold"), clean(record["run_id"]), ": ", ", ".join(filter(None, told)))


def _summary(cases: Sequence[dict[str, Any]], run_id: str, name: str) -> Text | None:
    """How many differences are more than the spread."""
    found = [other for one in cases for other in one["comparisons"] if other["run_id"] == run_id]
    if not found:
        return None
    shares = [one["fraction_beyond_spread"] for one in found if one["fraction_beyond_spread"] is not None]
    times = sum(one["time_beyond_spread"] for one in found)
    text = f"Against {name}: {times} of {len(found)} times differ by more than the spread"
    return Text(text + (f", and {sum(shares)} of {len(shares)} shares of a ceiling." if shares else "."))


def _times(found: dict[str, Any], records: Sequence[dict[str, Any]], names: Mapping[str, str], width: int) -> Table:
    """The cases of these records."""
    mine = {record["run_id"] for record in records}
    columns = ["time", *["p10 .. p90"] * (width >= NARROW), "ratio", "of ceiling"]
    columns += ["this / it", "this - it"] * (len(records) > 1)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("variant", overflow="fold")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for one in found["cases"]:
        results = [result for result in one["results"] if result["run_id"] in mine]
        if results and one["case"] != last:
            last = one["case"]
            table.add_row(Text(clean(last), style="bold cyan"))
        against = {other["run_id"]: other for other in one["comparisons"]}
        for at, result in enumerate(results):
            name, own = "" if at else f"  {clean(one['variant'])}", names[result["run_id"]]
            cells = _cells(result) | _differences(against.get(result["run_id"]))
            table.add_row(name, own, *(cells[column] for column in columns))
    return table


def _cells(result: dict[str, Any]) -> dict[str, str]:
    if result["median_us"] is None:
        return {"time": result["status"], "p10 .. p90": NONE, "ratio": NONE, "of ceiling": NONE}
    ratio = result["ratio_to_baseline"]
    shares = {"copy": result["copy_fraction"], "mm": result["matmul_fraction"]}
    nearest = max(shares, key=lambda of: shares[of] or 0.0)
    share = shares[nearest]
    return {
        "time": microseconds(result["median_us"]),
        "p10 .. p90": f"{microseconds(result['p10_us'])} .. {microseconds(result['p90_us'])}",
        "ratio": f"{ratio:.2f}x" if ratio else NONE,
        "of ceiling": f"{share:.0%} {nearest}" if share else NONE,
    }


def _differences(other: dict[str, Any] | None) -> dict[str, str]:
    if other is None:
        return {"this / it": "", "this - it": ""}
    ratio = f"{'' if other['time_beyond_spread'] else '~'}{other['time_ratio']:.2f}x"
    if other["fraction_difference"] is None:
        return {"this / it": ratio, "this - it": NONE}
    beyond = "" if other["fraction_beyond_spread"] else "~"
    of = {"copy": "copy", "matmul": "mm"}[other["ceiling"]]
    return {"this / it": ratio, "this - it": f"{beyond}{other['fraction_difference'] * 100:+.0f} {of}"}


def _claims(claims: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], names: Mapping[str, str]) -> Table:
    holding = [record["run_id"] for record in records if any(_of(claim, record["run_id"]) for claim in claims)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("claim", overflow="fold")
    table.add_column("required", justify="right", no_wrap=True)
    for run_id in holding:
        table.add_column(names[run_id], justify="right")
    for claim in claims:
        required = {result["required"] for result in claim["results"]}
        table.add_row(
            clean(claim["name"]),
            " or ".join(_number(one, claim["unit"]) for one in required),
            *(_verdict(_of(claim, run_id), claim["unit"]) for run_id in holding),
        )
    return table


def _of(claim: dict[str, Any], run_id: str) -> dict[str, Any] | None:
    return next((result for result in claim["results"] if result["run_id"] == run_id), None)


def _verdict(result: dict[str, Any] | None, unit: str) -> Text:
    if result is None:
        return Text(NONE, style="dim")
    word, colour = {True: ("holds", "green"), False: ("does not hold", "red"), None: ("undecided", "yellow")}[
        result["holds"]
    ]
    measured = "" if result["measured"] is None else f"{_number(result['measured'], unit)} "
    return Text.assemble(measured, (word, colour))


def _number(value: float | None, unit: str) -> str:
    return NONE if value is None else f"{value:.4g}{' ' * bool(unit)}{clean(unit)}"
