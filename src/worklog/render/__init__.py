"""Pages and figures drawn from records: what a reader sees is an expression over evidence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def stale(root: Path, names: Iterable[str], index: bool = True) -> dict[Path, bytes | None]:
    """Every file of these problems, and with `index` README.md, that differs from what the records give.

    The value is what the file should hold, or None for a figure that no page makes any more. Writes nothing.
    Raises PageError for a page that cannot be rendered.
    """
    from worklog import problem
    from worklog.render import index as readme
    from worklog.render import pages

    wanted: dict[Path, bytes | None] = {}
    made: dict[Path, list[pages.Page]] = {}
    for name in names:
        folder = root / "problems" / name
        made[folder], files = pages.outputs(folder)
        wanted |= files
        wanted |= dict.fromkeys(file for file in (folder / "figures").glob("*.svg") if file not in files)
    if index and (root / "README.md").is_file():
        folders = [root / "problems" / name for name in problem.names()]
        worklogs = {
            folder: page
            for folder in folders
            for page in made.get(folder) or pages.outputs(folder)[0]
            if page.source.name == "WORKLOG.md.j2"
        }
        wanted[root / "README.md"] = readme.readme(root, worklogs).encode()
    return {f: content for f, content in wanted.items() if (f.read_bytes() if f.is_file() else None) != content}


def write(files: dict[Path, bytes | None]) -> None:
    """Write each file whole; delete those whose content is None. Raises RecordError where the disk refuses it."""
    from worklog.record import write_whole

    for file, content in files.items():
        if content is None:
            file.unlink(missing_ok=True)
        else:
            write_whole(file, content)
