"""The README's table of problems, drawn from what their pages cite."""

from __future__ import annotations

from pathlib import Path

from worklog import problem as problems
from worklog.render.evidence import ClaimView, Run
from worklog.render.pages import Page
from worklog.render.quantity import UNITS, PageError, digits
from worklog.render.tables import table

BEGIN, END = "<!-- begin:problems -->", "<!-- end:problems -->"


def _newest(page: Page) -> Run | None:
    """The newest of the problem's own runs that the page cites; one on a GPU before one without."""
    own = [run for run in page.runs.values() if run.problem == page.source.parent.name]
    return max(own, key=lambda run: (bool(run.hardware["gpus"]), run.date, run.id), default=None)


def _claim(claim: ClaimView) -> str:
    if claim.measured is None:
        return f"{claim.name}: undecided"
    unit = claim.unit if claim.unit in UNITS else ""
    gap = "" if claim.unit in ("", "x") else " "
    value = float(claim.measured)
    return f"{claim.name}: {digits(value)}{gap}{claim.unit if unit or claim.unit else ''}"


def row(folder: Path, page: Page) -> list[str]:
    """Problem, symptom, result, machine, status. A problem without a cited run says so."""
    name = f"[`{folder.name}`](problems/{folder.name}/WORKLOG.md)"
    symptom = problems.load(str(folder)).title
    newest = _newest(page)
    if newest is None:
        return [name, symptom, page.result or "-", "-", "no recorded run yet"]
    claims = list(newest.claims.values())
    result = page.result or (_claim(claims[0]) if claims else "-")
    held = sum(claim.holds is True for claim in claims)
    status = f"{held} of {len(claims)} claims hold" if claims else "recorded"
    machines = dict.fromkeys(run.gpu for run in page.runs.values() if run.hardware["gpus"])
    return [name, symptom, result, ", ".join(machines) or "CPU only", f"{status}, {newest.date}"]


def readme(root: Path, pages: dict[Path, Page]) -> str:
    """README.md with its table of problems replaced. `pages` maps a problem's folder to its worklog page.

    Raises PageError if the README lacks the two markers.
    """
    text = (root / "README.md").read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PageError(f"README.md:1: lacks the markers {BEGIN} and {END}, between which `worklog render` writes")
    rows = [row(folder, page) for folder, page in sorted(pages.items())]
    body = table(rows, ["problem", "symptom", "result", "machine", "status"]) if rows else "No problem yet."
    return f"{before}{BEGIN}\n{body}\n{END}{after}"
