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
SERVICES_BELOW = "  # problems: `worklog new` adds one below\n"
SERVICES = {
    "docker/compose.yaml": """
  __NAME__: &__NAME__
    <<: *problem
    image: worklog-__DASHED__:local
    build:
      context: ..
      dockerfile: problems/__NAME__/Dockerfile
      additional_contexts: {"worklog-base:local": "service:base"}
      args: *arguments
  __NAME___ncu:
    <<: [*ncu, *__NAME__]
    command: [profile, __NAME__, --with, ncu]
""",
    "docker/compose.cpu.yaml": "  __NAME__: {deploy: !reset null}\n",
}
"""Where a checkout has these files, what they get below that line."""


def content(name: str) -> dict[str, str]:
    """File name -> text of a new problem called `name`, its generated page left out."""
    made = {}
    for template in sorted(TEMPLATES.iterdir(), key=lambda entry: entry.name):
        if template.name.endswith(".tmpl"):
            made[template.name.removesuffix(".tmpl")] = _filled(template.read_text(encoding="utf-8"), name)
    return made


def services(root: Path, name: str) -> dict[Path, str]:
    """The compose files of this checkout with the services of a problem called `name`."""
    made = {}
    for file, text in SERVICES.items():
        old = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
        if SERVICES_BELOW in old:
            made[root / file] = old.replace(SERVICES_BELOW, SERVICES_BELOW + _filled(text, name))
    return made


def _filled(text: str, name: str) -> str:
    for word, value in (("__NAME__", name), ("__TITLE__", TITLE), ("__DASHED__", name.replace("_", "-"))):
        text = text.replace(word, value)
    return text


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
        for compose, text in services(folder.parents[1], name).items():
            write_whole(compose, text.encode())
    except (OSError, RecordError, pages.PageError):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
