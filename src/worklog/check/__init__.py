"""`worklog check`: everything that a reader relies on and a machine can verify.

Records valid and unedited, artifacts the files that they were, pages and figures equal to what the records give, no
number without an origin, commands that parse and verbs that exist, links that lead somewhere, folders of one shape,
one version of each package.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worklog import problem
from worklog.check.failure import Failure
from worklog.problem import ProblemError

__all__ = ["Failure", "folders_of", "run"]


def run(root: Path, names: Iterable[str], app: Any) -> list[Failure]:
    """Check these problems; the repository's own pages and pins too if `names` are all there are.

    `app` is the typer application: pages may call only verbs and options that it has. Raises ProblemError for an
    unknown name.
    """
    from worklog.check import commands, evidence, folders, pages, pins
    from worklog.render import stale
    from worklog.render.pages import PageError

    known, chosen = folders_of(root), list(names)
    if unknown := [name for name in chosen if name not in known]:
        raise ProblemError(f"No problem {unknown[0]!r}; there are: {', '.join(known) or 'none'}.")
    everything = set(chosen) == set(known)
    found: list[Failure] = []
    for name in chosen:
        found += folders.check(root, name)
        found += evidence.check(root, name)
        if not _loads(name):
            found.append(Failure(f"problems/{name}/WORKLOG.md", 0, "is not checked, because repro.py cannot be loaded"))
            continue
        try:
            found += pages.rendered(root, stale(root, [name], index=False))
        except PageError as error:
            found += pages.page_errors(error)
        readme = root / "problems" / name / "README.md"
        if readme.is_file() and not readme.with_name("README.md.j2").is_file():
            found += pages.unbound(root, readme)
    if everything:
        found += pins.check(root)
        if all(map(_loads, problem.names())):
            try:
                found += pages.rendered(root, stale(root, [], index=True))
            except PageError as error:
                found += pages.page_errors(error)
    written = [*root.glob("*.md"), *root.glob("docs/**/*.md")] if everything else []
    for page in sorted([*written, *(p for name in chosen for p in (root / "problems" / name).glob("*.md"))]):
        found += pages.links(root, page)
        found += pages.private_names(root, page)
        found += commands.check(root, page, app)
    return sorted(set(found))


def _loads(name: str) -> bool:
    try:
        problem.load(name)
    except ProblemError:
        return False
    return True


def folders_of(root: Path) -> list[str]:
    """Every folder under problems/ that git or a person would see as one, with or without a repro.py."""
    seen = (p.name for p in (root / "problems").iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
    return sorted({*seen, *problem.names()})
