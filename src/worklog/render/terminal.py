"""A record as text in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from worklog.record import CaseResult, Claim, Record, VariantResult

COLOURS = {"ok": "green", "skipped": "dim", "unsupported": "yellow"}
NONE = "-"
WIDTH = 120
"""Columns where stdout is a file or a pipe."""
NARROW = 100
CPU_NOTE = "CPU run at a small size: what a CPU can show. Its times are not the finding."


def stdout() -> Console:
    """As wide as the terminal, or WIDTH."""
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else WIDTH
    return console


def show(record: Record, title: str, beside: Record | None) -> None:
    """Print `record` on stdout; a CPU record says what it is not, and `beside` it stands what a GPU showed."""
    console = stdout()
    heading = title if record.config["device"] == "cuda" else f"{title}\n{CPU_NOTE}"
    console.print(report(record, heading, console.width))
    if record.config["device"] == "cpu":
        console.print()
        if beside is None:
            console.print("No GPU run of this problem is recorded in reports/.")
        else:
            console.print(
                report(
                    beside, f"RECORDED on {beside.gpu_name} on {beside.started_utc[:10]}, not run here:", console.width
                )
            )


def report(record: Record, title: str, width: int = WIDTH) -> Group:
    """Where and when, one block of rows a case, what failed, and the claims."""
    where = record.gpu_name or f"CPU ({record.hardware.cpu}, {record.hardware.cpu_count} cores)"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(f"{where}, {record.started_utc}, {record.run_id}")]
    if cases := case_names(record):
        parts.append(case_table(record, cases, width))
    parts += failures(record)
    parts += [claim_line(claim) for claim in record.claims]
    return Group(*parts)


def failures(record: Record) -> list[Text]:
    """One line for each status and message; the variants that share it stand in front."""
    sharing: dict[tuple[str, str | None], list[str]] = {}
    for slug, variant in record.variants.items():
        if variant.status != "ok":
            sharing.setdefault((variant.status, variant.message), []).append(slug)
    return [
        Text.assemble((", ".join(slugs), "bold"), ": ", (status, COLOURS.get(status, "red")), f": {message}")
        for (status, message), slugs in sharing.items()
    ]


def case_names(record: Record) -> list[str]:
    """In the order in which the variants name them."""
    return list(dict.fromkeys(name for variant in record.variants.values() for name in variant.cases))


def case_table(record: Record, cases: Iterable[str], width: int) -> Table:
    """Median time, its ratio to the first variant's, least bytes over it, their share of the copy ceiling, memory."""
    results = [case for variant in record.variants.values() for case in variant.cases.values()]
    ceiling = record.ceilings.copy_bytes_per_s
    columns = ["time", "p10 .. p90", "ratio"] if width > NARROW else ["time", "ratio"]
    columns += ["GB/s"] if any(case.bytes for case in results) else []
    columns += ["of copy"] if ceiling and any(case.bytes for case in results) else []
    columns += ["peak", "largest"] if any(case.memory for case in results) else []
    columns += ["error"] if any(case.correctness for case in results) else []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("variant", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name in cases:
        table.add_row(Text(name, style="bold cyan"))
        rows = {slug: v.cases[name] for slug, v in record.variants.items() if name in v.cases}
        first = baseline(record, name)
        for slug, case in rows.items():
            cells = {
                **times(case, first),
                "GB/s": three(case.bytes_per_s / 1e9) if case.timing and case.bytes else NONE,
                "of copy": f"{case.bytes_per_s / ceiling:.0%}" if case.timing and case.bytes and ceiling else NONE,
                "peak": size(case.memory.allocated_bytes) if case.memory else NONE,
                "largest": size(case.memory.largest_temporary_bytes) if case.memory else NONE,
                "error": error(case),
            }
            table.add_row(f"  {slug}", *(cells[column] for column in columns))
    return table


def baseline(record: Record, name: str) -> float | None:
    """Median of the first variant's case, if that was timed."""
    first: VariantResult | None = next(iter(record.variants.values()), None)
    case = first.cases.get(name) if first else None
    return case.timing.median_us if case and case.timing else None


def times(case: CaseResult, first: float | None) -> dict[str, str]:
    if case.timing is None:
        return {"time": case.status, "p10 .. p90": NONE, "ratio": NONE}
    taken = case.timing
    return {
        "time": microseconds(taken.median_us),
        "p10 .. p90": f"{microseconds(taken.p10_us)} .. {microseconds(taken.p90_us)}",
        "ratio": f"{taken.median_us / first:.2f}x" if first else NONE,
    }


def error(case: CaseResult) -> str:
    if case.correctness is None:
        return NONE
    return "no number" if case.correctness.value is None else f"{case.correctness.value:.1e}"


def microseconds(us: float) -> str:
    """Three digits: `13.7 us`, `1.42 ms`, `2.1 s`."""
    size, unit = next((size, unit) for size, unit in ((1e6, "s"), (1e3, "ms"), (0.0, "us")) if us >= size)
    value = us / (size or 1.0)
    return f"{three(value)} {unit}"


def three(value: float) -> str:
    """Three digits; those before the point are always kept, and below a hundredth one digit serves."""
    if value and value < 0.01:
        return f"{value:.0e}"
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def size(number: int | None) -> str:
    """Three digits: `49.2 KiB`, `5.25 GiB`."""
    if number is None:
        return NONE
    unit, name = next(
        (2**p, n) for p, n in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")) if number >= 2**p or not p
    )
    value = number / unit
    return f"{three(value)} {name}"


def claim_line(claim: Claim) -> Text:
    """`claim holds: name (17.1 x measured, 10 x required)`."""
    word, colour = {True: ("holds", "green"), False: ("does not hold", "red"), None: ("undecided", "yellow")}[
        claim.holds
    ]
    numbers = [
        f"{value:.4g}{' ' * bool(claim.unit)}{claim.unit} {what}"
        for value, what in ((claim.measured, "measured"), (claim.required, "required"))
        if value is not None
    ]
    rest = "; ".join(filter(None, [", ".join(numbers), claim.reason]))
    return Text.assemble("claim ", (word, colour), f": {claim.name}", f" ({rest})" if rest else "")


@contextlib.contextmanager
def progress(slugs: Sequence[str], console: Console) -> Iterator[Callable[[str, VariantResult | None], None]]:
    """A bar over the variants and a line for each that ends; yields what the runner calls when one starts or ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=len(slugs))

        def notify(slug: str, result: VariantResult | None) -> None:
            if result is None:
                bar.update(task, description=slug)
                return
            bar.advance(task)
            status = Text(result.status, style=COLOURS.get(result.status, "red"))
            console.print(Text.assemble(f"{slug}: ", status, f", {result.seconds:.1f} s"))

        yield notify


def clean(text: str) -> str:
    """Names come from other programs: nothing in them may steer the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
