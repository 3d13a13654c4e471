"""The shape that every problem's folder has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from worklog import problem
from worklog.check.failure import Failure
from worklog.problem import Problem, ProblemError

FILES = (
    "README.md",
    "WORKLOG.md.j2",
    "WORKLOG.md",
    "repro.py",
    "nsys.sh",
    "ncu.sh",
    "Dockerfile",
    "requirements.txt",
    "analysis.ipynb",
)
README_LINES = 40
_SLUG = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")


def check(root: Path, name: str) -> Iterator[Failure]:
    """Everything about problems/<name>/ but its pages' content."""
    folder = root / "problems" / name
    place = f"problems/{name}"
    for file in FILES:
        if not (folder / file).is_file():
            yield Failure(f"{place}/{file}", 0, "is missing; every problem has one")
    readme = folder / "README.md"
    if readme.is_file() and (length := len(readme.read_text(encoding="utf-8").splitlines())) > README_LINES:
        yield Failure(f"{place}/README.md", README_LINES + 1, f"has {length} lines; the limit is {README_LINES}")
    for script in ("nsys.sh", "ncu.sh"):
        path = folder / script
        if path.is_file() and not path.stat().st_mode & 0o111:
            yield Failure(f"{place}/{script}", 1, f"is not executable; chmod +x {place}/{script}")
        if path.is_file() and not path.read_bytes().startswith(b"#!"):
            yield Failure(f"{place}/{script}", 1, "does not start with #!")
    if (folder / "analysis.ipynb").is_file():
        yield from _notebook(folder / "analysis.ipynb", f"{place}/analysis.ipynb")
    if (folder / "repro.py").is_file():
        yield from _declared(folder, f"{place}/repro.py")


def _notebook(file: Path, place: str) -> Iterator[Failure]:
    try:
        cells = json.loads(file.read_bytes())["cells"]
    except (ValueError, KeyError, TypeError):
        yield Failure(place, 1, "is not a notebook")
        return
    for number, cell in enumerate(cells, 1):
        source = "".join(cell.get("source", []))
        if cell.get("cell_type") == "code" and not source.lstrip().startswith(("%", "!")):
            try:
                compile(source, place, "exec")
            except SyntaxError as error:
                yield Failure(place, 0, f"cell {number} does not parse: {error.msg}")


def _declared(folder: Path, place: str) -> Iterator[Failure]:
    try:
        found = problem.load(str(folder))
    except ProblemError as error:
        cause = error.__cause__
        line = cause.lineno if isinstance(cause, SyntaxError) else 1
        yield Failure(place, line or 1, str(error).replace(f"{folder}/", ""))
        return
    source = (folder / "repro.py").read_text(encoding="utf-8").splitlines()

    def at(name: str) -> int:
        return next((i for i, line in enumerate(source, 1) if re.match(rf"(def )?{name}\b", line)), 1)

    for one, message in _faults(found):
        yield Failure(place, at(one), message)


def _faults(found: Problem) -> Iterator[tuple[str, str]]:
    if not isinstance(found.title, str) or not found.title.strip() or "\n" in found.title:
        yield "TITLE", "TITLE is not one line"
    if not found.variants:
        yield "VARIANTS", "VARIANTS is empty"
        return
    slugs = [variant.slug for variant in found.variants]
    for slug in slugs:
        if not _SLUG.fullmatch(slug):
            yield "VARIANTS", f"the slug {slug!r} is not snake_case"
    if twice := sorted({slug for slug in slugs if slugs.count(slug) > 1}):
        yield "VARIANTS", f"two variants have the slug {', '.join(twice)}"
    baselines = [v.slug for v in found.variants if re.match(r"baseline\b", v.summary, re.I)]
    if baselines != slugs[:1]:
        yield "VARIANTS", "the first variant's summary, and no other, starts with the word 'baseline'"
    names = [config.name for config in found.configs]
    if len(set(names)) != len(names):
        yield "CONFIGS", "two configs have one name"
    for device in ("cuda", "cpu"):
        if not any(config.device == device for config in found.configs):
            yield "CONFIGS", f"there is no config for {device}"
