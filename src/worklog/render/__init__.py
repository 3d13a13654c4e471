"""Pages and figures drawn from records: what a reader sees is an expression over evidence."""

from __future__ import annotations

from pathlib import Path


def stale(root: Path, names: list[str]) -> dict[Path, bytes | None]:
    """Every file of these problems (and README.md) that differs from what the records give.

    The value is what the file should hold, or None for a figure that no page makes any more. Writes nothing.
    Raises PageError for a page that cannot be rendered.
    """
    from worklog import problem
    from worklog.render import index, pages

    wanted: dict[Path, bytes | None] = {}
    for name in names:
        folder = root / "problems" / name
        _, files = pages.outputs(folder)
        wanted |= files
        wanted |= dict.fromkeys(file for file in (folder / "figures").glob("*.svg") if file not in files)
    everything = {root / "problems" / n for n in problem.names() if (root / "problems" / n / "WORKLOG.md.j2").is_file()}
    if (root / "README.md").is_file():
        wanted[root / "README.md"] = index.readme(root, {f: pages.render(f) for f in everything}).encode()
    return {
        file: content for file, content in wanted.items() if (file.read_bytes() if file.is_file() else None) != content
    }


def write(files: dict[Path, bytes | None]) -> None:
    """Write each file whole; delete those whose content is None."""
    from worklog.record import write_whole

    for file, content in files.items():
        if content is None:
            file.unlink(missing_ok=True)
        else:
            write_whole(file, content)
