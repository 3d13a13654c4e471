"""Fixtures: buildah, the base image, a checkout with a new problem, docker-compose. Each skips with its reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from building import REPOSITORY, Buildah, lines


def _installed(*programs: str) -> str | None:
    """None, or why these programs are not here. Root installs the packages of these names."""
    if os.geteuid() != 0:
        return "building images without a Docker engine needs root"
    if missing := [p for p in programs if not shutil.which(p)]:
        if not shutil.which("apt-get"):
            return f"{' and '.join(missing)} are not installed, and there is no apt-get to do it"
        install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
        for argv in (["apt-get", "update"], install):
            subprocess.run(
                argv, capture_output=True, check=False, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            )
    if missing := [p for p in programs if not shutil.which(p)]:
        return f"apt-get cannot install {' and '.join(missing)} here"
    return None


@pytest.fixture(scope="session")
def buildah() -> Iterator[Buildah]:
    if why := _installed("buildah", "debootstrap"):
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="worklog-images-"))  # not pytest's, which are kept: this is gigabytes
    yield Buildah(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def base(buildah: Buildah) -> str:
    """docker/base.Dockerfile, built on the stand-in."""
    root = buildah.folder / "stand-in"
    lines(REPOSITORY / "tests/docker/stand-in", root)
    (container,) = buildah("from", "scratch")
    buildah("add", "--quiet", container, root, "/")
    buildah("commit", "--quiet", "--rm", container, "stand-in")
    shutil.rmtree(root)
    python = re.match(r"Python (\d+\.\d+)", lines("/usr/bin/python3", "--version")[0])
    assert python, "the distribution's own Python"
    image = "localhost/worklog-base:local"
    file = REPOSITORY / "docker/base.Dockerfile"
    buildah.build(file, image, REPOSITORY, CUDA_IMAGE="localhost/stand-in", PYTHON_VERSION=python[1])
    return image


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout as it is, without what git ignores, and with a problem that `worklog new` just made."""
    root = tmp_path_factory.mktemp("checkout")
    names = lines("git", "ls-files", "--cached", "--others", "--exclude-standard")
    later = [name for name in names if name.startswith(("problems/", "reports/"))]  # pages being written may not render
    for name in [n for n in names if n not in later]:
        _copy(name, root)
    (root / "problems").mkdir()
    new = [sys.executable, "-m", "worklog.cli", "new", "row_norms"]
    lines(*new, cwd=root, WORKLOG_ROOT=str(root), PYTHONPATH=str(root / "src"))
    for name in later:
        _copy(name, root)
    return root


def _copy(name: str, root: Path) -> None:
    if (REPOSITORY / name).is_file():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, root / name)


@pytest.fixture(scope="session")
def compose(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """docker-compose of version 2: this machine's, or that of a Debian release which has it, unpacked."""
    if (found := shutil.which("docker-compose")) and not lines(found, "version", "--short")[0].startswith(
        ("1.", "v1.")
    ):
        return [found]
    folder = tmp_path_factory.mktemp("compose")
    sources, lists = folder / "sources", folder / "lists"
    sources.mkdir()
    lists.mkdir()
    for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("debian.sources")):
        if file.is_file():
            text = re.sub(r"\bbookworm(-updates|-security)?\b", "trixie", file.read_text())
            (sources / file.name).write_text(re.sub(r"(?s)\n\n.*", "\n", text) if file.suffix == ".sources" else text)
    own = [f"-oDir::Etc::sourcelist={sources}/sources.list", f"-oDir::Etc::sourceparts={sources}"]
    own += [f"-oDir::State::lists={lists}", "-oAPT::Sandbox::User=root"]
    for argv in (["apt-get", *own, "update"], ["apt-get", *own, "download", "docker-compose"]):
        if not shutil.which("apt-get") or subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode:
            pytest.skip("no docker-compose of version 2 here, and no Debian package of it to be had")
    (package,) = folder.glob("docker-compose_*.deb")
    lines("dpkg", "-x", package, folder)
    (program,) = (p for p in folder.glob("usr/**/docker-compose") if p.is_file() and "cli-plugins" in p.parts)
    return [str(program)]
