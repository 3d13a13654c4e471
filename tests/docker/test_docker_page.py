"""DOCKER_README.md: its commands run, its numbers are those of the files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from building import REPOSITORY
from declared import PAGE, commands, pins, services

MENTIONED = re.compile(r"scripts/[\w-]+")


def test_the_page_names_scripts_services_and_files_that_exist() -> None:
    found = commands()
    assert len(found) > 20
    known = set(services())
    for line in found:
        for name in MENTIONED.findall(line):
            assert os.access(REPOSITORY / name, os.X_OK), line
        if words := re.search(r"compose (.*?)\b(run --rm|up|build)((?: --entrypoint \w+)?)(?: (\w+))?", line):
            assert words[4] is None or words[4] in known, line
            for file in re.findall(r"-f (\S+)", words[1]):
                assert (REPOSITORY / file).is_file(), line
        if image := re.search(r"worklog-[\w-]+:\w+", line):
            assert image[0] in {service["image"] for service in services().values()}, line


def is_docker(line: str) -> bool:
    return bool(re.search(r"(^|[|)] *)docker ", line))


def test_what_the_page_has_that_no_test_runs() -> None:
    """The rest is run below, in test_docker_scripts.py and in test_offline.py."""
    tested = ("scripts/docker-run", "scripts/docker-build", "scripts/offline-bundle")
    rest = [line for line in commands() if not is_docker(line) and not any(name in line for name in tested)]
    assert [line.split()[0] for line in rest] == ["echo", "sudo", "podman"], "the host's settings, and Podman"


@pytest.mark.images
def test_docker_and_compose_take_every_command_of_the_page(docker: dict[str, str], checkout: Path) -> None:
    """They come as far as the daemon, which is not there: services, files and options are as they must be."""

    def said(line: str) -> str:
        argv = ["bash", "-o", "pipefail", "-c", line]
        own = {**os.environ, **docker}
        done = subprocess.run(argv, cwd=checkout, env=own, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode != 0, line
        return done.stderr

    found = [line for line in commands() if is_docker(line)]
    assert len(found) > 12
    for line in found:
        assert "Cannot connect to the Docker daemon" in said(line), line
    assert "no such service" in said("docker compose run --rm no_such_service")
    assert "unknown flag" in said("docker run --no-such-option image")


def test_the_page_has_the_pins() -> None:
    text = PAGE.read_text()
    pinned = pins()
    assert pinned["CUDA_IMAGE"].split("@")[0] in text
    for tool in ("SYSTEMS", "COMPUTE"):
        assert ".".join(pinned[f"NSIGHT_{tool}_VERSION"].split(".")[:3]) in text
