"""Fixtures: buildah, a checkout with a new problem, the images, Docker's own clients. Each skips with its reason."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import debian
import pytest
from building import CALLER, COMMIT, REPOSITORY, Buildah, Container, image_name, lines

PROBLEMS = ["row_norms", *sorted(p.parent.name for p in REPOSITORY.glob("problems/*/Dockerfile"))]
"""The one that `worklog new` makes in `checkout`, and those that are here."""


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
    made = Buildah(folder)
    yield made
    made.remove()


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


@pytest.fixture(scope="session", params=PROBLEMS)
def problem(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def image(problem: str, buildah: Buildah, base: str, checkout: Path) -> Iterator[Container]:
    """A container of this problem's image."""
    name = image_name(problem)
    buildah.build(checkout / "problems" / problem / "Dockerfile", name, checkout, BASE=base, COMMIT=COMMIT, DIRTY="0")
    container = buildah.container(name)
    yield container
    buildah("rm", container.name)
    buildah("rmi", name)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder of the caller's. pytest's own folders above it are closed to others."""
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    made = tmp_path / "out"
    made.mkdir()
    os.chown(made, CALLER, CALLER)
    return made


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which docker and its compose are found, this machine's or Debian's, and no daemon for them."""
    nobody = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    if debian.has_compose():
        return nobody
    folder = tmp_path_factory.mktemp("docker")
    if why := debian.unpack(folder, "docker-cli", "docker-compose", release=debian.WITH_COMPOSE):
        pytest.skip(f"no docker with compose here, and {why}")
    return {**nobody, **debian.variables(folder)}
