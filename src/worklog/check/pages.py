"""Markdown pages: equal to what the records give, no number without an origin, links that lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from worklog.check.evidence import HOME
from worklog.check.failure import Failure, differing_line
from worklog.render import prose
from worklog.render.pages import PageError

_LINK = re.compile(r"!?\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"^(?:\./)?(?:src|scripts|problems|requirements|docker|tests|docs|reports|\.ci)/[\w./-]+$")
_IMAGE = re.compile(r"(?<![/\w.-])(?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d+)?/[\w./-]+(?::[\w.-]+|@sha256:[0-9a-f]+)")
_HOST = re.compile(r"\b(?:[\w-]+\.)+(?:internal|local|lan|corp|intranet)\b|\b[\w.-]+:\d{4,5}/")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")


def rendered(root: Path, files: dict[Path, bytes | None]) -> Iterator[Failure]:
    """`files`: what render.stale found, each file with the content that it should have."""
    for file, wanted in sorted(files.items()):
        place = str(file.relative_to(root))
        if wanted is None:
            yield Failure(place, 0, "is made by no page any more; `worklog render` deletes it")
        elif not file.is_file():
            yield Failure(place, 0, "is missing; run `worklog render`")
        else:
            line, is_now, should = differing_line(file.read_bytes(), wanted)
            yield Failure(place, line, f"is {_short(is_now)}, but the records give {_short(should)}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")


def page_errors(error: PageError) -> Iterator[Failure]:
    """A PageError's lines, `file:line: message` each, as failures."""
    for text in str(error).splitlines():
        found = re.match(r"(\S+?):(\d+): (.*)", text)
        yield Failure(found[1], int(found[2]), found[3]) if found else Failure("problems", 0, text)


def unbound(root: Path, page: Path) -> Iterator[Failure]:
    """Numbers that were typed into a page that is written by hand (a problem's README.md)."""
    for one in prose.unbound(page.read_text(encoding="utf-8"), jinja=False):
        yield Failure(str(page.relative_to(root)), one.line, str(one))


def anchors(text: str) -> set[str]:
    """The heading anchors that GitHub makes, and those set by hand."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for line in _outside_code(text).values():
        if heading := re.match(r"#{1,6}\s+(.*?)\s*#*$", line):
            plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            count = 0
            while (name := slug if not count else f"{slug}-{count}") in found:
                count += 1
            found.add(name)
    return found


def _outside_code(text: str) -> dict[int, str]:
    lines, fence = {}, ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if not fence and mark:
            fence = mark[1]
        elif fence:
            if line.strip().startswith(fence) and not line.strip(" `~"):
                fence = ""
        else:
            lines[number] = line
    return lines


def links(root: Path, page: Path) -> Iterator[Failure]:
    """Relative links, anchors inside the repository, and repository paths in code spans all exist."""
    place, text = str(page.relative_to(root)), page.read_text(encoding="utf-8")
    for number, line in _outside_code(text).items():
        for target in _LINK.findall(_SPAN.sub(lambda span: " " * len(span[0]), line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield Failure(place, number, f"links to {path}, which is not there")
            elif not file.is_relative_to(root):
                yield Failure(place, number, f"links to {path}, which is outside of the repository")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
                yield Failure(place, number, f"links to #{anchor}, and {path or 'this page'} has no such heading")
        for span in _SPAN.findall(line):
            if _PATH.match(span) and not (root / span).exists():
                yield Failure(place, number, f"names `{span}`, which is not there")


def private_names(root: Path, page: Path) -> Iterator[Failure]:
    """Image registries, hosts of a private network and home folders: true on one machine only."""
    place = str(page.relative_to(root))
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if found := HOME.search(line.encode()):
            yield Failure(place, number, f"holds the absolute home path {found[0].decode()}")
        bare = re.sub(r"https?://", " //", line)
        if match := _IMAGE.search(bare) or _HOST.search(line):
            yield Failure(place, number, f"names the host {match[0]}; a page names images without their registry")
