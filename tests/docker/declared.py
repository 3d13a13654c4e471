"""What the repository's files say of its images: pins, instructions, services, the page's commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from building import REPOSITORY

PAGE = REPOSITORY / "DOCKER_README.md"
TEMPLATE = REPOSITORY / "src/worklog/templates/problem/Dockerfile.tmpl"
PROBLEMS = sorted(p.parent.name for p in REPOSITORY.glob("problems/*/repro.py"))
DOCKERFILES = [
    *sorted(REPOSITORY.glob("docker/*Dockerfile")),
    *sorted(REPOSITORY.glob("problems/*/Dockerfile")),
    TEMPLATE,
]


def pins() -> dict[str, str]:
    text = (REPOSITORY / "docker/versions.env").read_text()
    return {name: value.strip('"') for name, value in re.findall(r"^([A-Z_]+)=(.+)$", text, re.M)}


def instructions(file: Path) -> list[str]:
    """One string an instruction of a Dockerfile: comments left out, continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", file.read_text())
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())["services"]
    return found


def commands() -> list[str]:
    text = PAGE.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    found = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [re.sub(r"\s+#.*", "", line).strip() for line in found if line.strip() and not line.startswith("#")]
