"""One version of a package in all files that pin it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from worklog import problem
from worklog.check.failure import Failure

_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[\w,-]+\])?\s*(==|[<>=!~]=?|@|;|$)\s*([\w.+-]*)")
_INLINE = re.compile(r"(?<![\w.-])([A-Za-z][\w.-]*)==([\w.]+)")
_SETTING = re.compile(r"^\s*(?:ARG\s+|ENV\s+)?([A-Z][A-Z0-9_]*)_VERSION=\"?([\w.]+)\"?")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def check(root: Path) -> Iterator[Failure]:
    """Compares requirements files, Dockerfiles and docker/versions.env.

    Packages that a variant takes from a directory of its own (its `needs`) exist in several versions by design.
    """
    free = {_plain(name) for n in problem.names() for v in _variants(n) for name in v.needs}
    seen: dict[str, tuple[str, str]] = {}
    for place, line, name, version in _pins(root):
        if not version:
            yield Failure(place, line, f"does not pin {name}; write {name}==VERSION")
            continue
        first = seen.setdefault(_plain(name), (version, f"{place}:{line}"))
        if first[0] != version and _plain(name) not in free:
            yield Failure(place, line, f"pins {name} {version}; {first[1]} pins {first[0]}")


def _variants(name: str) -> tuple[problem.Variant, ...]:
    try:
        return problem.load(name).variants
    except Exception:  # check.folders reports a problem that cannot be loaded
        return ()


def _pins(root: Path) -> Iterator[tuple[str, int, str, str]]:
    """File, line, package, version ("" where a requirements file pins none)."""
    settings = [root / "docker" / "versions.env"]
    docker = [*root.glob("docker/*Dockerfile*"), *root.glob("problems/*/Dockerfile")]
    requirements = [*sorted(root.glob("requirements/*.txt")), *sorted(root.glob("problems/*/requirements.txt"))]
    for file in [f for f in settings if f.is_file()] + requirements + sorted(docker):
        place = str(file.relative_to(root))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            text = line.split("#", 1)[0].strip()
            if not text:
                continue
            if file in requirements:
                if (found := _REQUIREMENT.match(text)) and not text.startswith("-"):
                    yield place, number, found[1], found[3] if found[2] == "==" else ""
                continue
            if found := _SETTING.match(text):
                yield place, number, found[1].replace("_", "-").lower(), found[2]
            for name, version in _INLINE.findall(text):
                yield place, number, name, version
