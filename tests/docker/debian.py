"""Docker's client and engine without installing them: Debian's packages, unpacked into a folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

WITH_COMPOSE = "trixie"
"""The first release of Debian with docker-compose of version 2 and with docker-cli."""


def has_compose() -> bool:
    """Whether this machine has docker with its plugin compose."""
    argv = ["docker", "compose", "version"]
    return bool(shutil.which("docker")) and not subprocess.run(argv, capture_output=True, check=False).returncode


def unpack(folder: Path, *packages: str, release: str | None = None) -> str | None:
    """Put the files of these packages, without their dependencies, below `folder`; why not, or None.

    `release`: instead of this machine's own release, taken from the same servers.
    """
    if not shutil.which("apt-get"):
        return "there is no apt-get"
    made = folder / (release or "own")
    options = ["-oAPT::Sandbox::User=root"]
    if release:
        options += _of(release, made)
        if subprocess.run(["apt-get", *options, "update"], capture_output=True, check=False).returncode:
            return f"apt-get cannot read the packages of Debian {release}"
    made.mkdir(parents=True, exist_ok=True)
    argv = ["apt-get", *options, "download", *packages]
    if subprocess.run(argv, cwd=made, capture_output=True, check=False).returncode:
        return f"apt-get has no {' and '.join(packages)}"
    for package in made.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
        package.unlink()
    return None


def _of(release: str, folder: Path) -> list[str]:
    """Options with which apt-get reads another release's packages and leaves its own lists alone."""
    sources, lists = folder / "sources", folder / "lists"
    for made in (sources, lists):
        made.mkdir(parents=True, exist_ok=True)
    for file in (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources")):
        if file.is_file():
            text = re.sub(r"\bbookworm(-updates|-security)?\b", release, file.read_text())
            (sources / file.name).write_text(re.sub(r"(?s)\n\n.*", "\n", text) if file.suffix == ".sources" else text)
    return [
        f"-oDir::Etc::sourcelist={sources}/sources.list",
        f"-oDir::Etc::sourceparts={sources}",
        f"-oDir::State::lists={lists}",
    ]


def variables(folder: Path) -> dict[str, str]:
    """PATH and DOCKER_CONFIG for what `unpack` put below `folder`."""
    config = folder / "config"
    config.mkdir(exist_ok=True)
    if not (config / "cli-plugins").exists():
        (config / "cli-plugins").symlink_to(folder / "usr/libexec/docker/cli-plugins")
    programs = [str(folder / place) for place in ("usr/bin", "usr/sbin")]
    return {"PATH": ":".join([*programs, os.environ["PATH"]]), "DOCKER_CONFIG": str(config)}
