"""`worklog new NAME`: a problem folder that runs, renders and passes `worklog check` from its first minute."""

from __future__ import annotations

import re
import shutil
from importlib.resources import files
from pathlib import Path

from worklog import problem
from worklog.problem import ProblemError
from worklog.record import RecordError, write_whole
from worklog.render import pages

TITLE = "Row norms that square the matrix first move several times the bytes they need"
TEMPLATES = files("worklog") / "templates" / "problem"
EXECUTABLE = ("nsys.sh", "ncu.sh")


def content(name: str) -> dict[str, str]:
    """File name -> text of a new problem called `name`, its generated page left out."""
    words = {"__NAME__": name, "__TITLE__": TITLE, "__DASHED__": name.replace("_", "-")}
    made = {}
    for template in sorted(TEMPLATES.iterdir(), key=lambda entry: entry.name):
        if not template.name.endswith(".tmpl"):
            continue
        text = template.read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        made[template.name.removesuffix(".tmpl")] = text
    return made


def create(name: str) -> Path:
    """Make problems/<name>/ whole, its WORKLOG.md rendered, or nothing at all.

    Raises ProblemError for a name that is not snake_case or is taken, RecordError where the disk refuses it.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ProblemError(
            f"{name!r} is no name for a problem: use snake_case (a-z, 0-9, _), as in float8_weight_only."
        )
    folder = problem.root() / "problems" / name
    if folder.exists():
        raise ProblemError(f"problems/{name} exists already; choose another name.")
    try:
        for file, text in content(name).items():
            write_whole(folder / file, text.encode())
            if file in EXECUTABLE:
                (folder / file).chmod(0o755)
        for page, rendered in pages.outputs(folder)[1].items():
            write_whole(page, rendered)
    except (OSError, RecordError, pages.PageError):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
