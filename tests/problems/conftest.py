"""What a test of a problem needs besides Python, and is skipped without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from worklog import problem
from worklog.nvcc import find

TRITON = "triton-3.6.0"


def packages(name: str) -> Path:
    folder = problem.packages_folder() / name
    if not folder.is_dir():
        pytest.skip(f"needs {name} in {problem.packages_folder().name}/; scripts/test installs it")
    return folder


@pytest.fixture(scope="session")
def torchao() -> Path:
    """The folder in which each version of torchao has a folder of its own."""
    for version in ("0.13.0", "0.14.1", "0.18.0"):
        packages(f"torchao-{version}")
    return problem.packages_folder()


@pytest.fixture(scope="session")
def triton() -> Path:
    """Triton in a folder of its own: torch's CPU build brings none."""
    return packages(TRITON)


@pytest.fixture(scope="session")
def nvcc() -> str:
    try:
        return find()
    except FileNotFoundError:
        pytest.skip("needs nvcc")


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with these arguments, with `path` in front of its modules and more environment variables."""

    def run(*arguments: object, path: list[Path], **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables, "PYTHONPATH": os.pathsep.join(map(str, path))}
        argv = [sys.executable, *map(str, arguments)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)

    return run
