"""A checkout with one small problem, and programs that answer as nsys and ncu do where they fail."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TOY = """
from worklog.problem import Case, Config, Variant, Workload

TITLE = "A linear layer"
VARIANTS = (Variant(slug="plain", summary="as it is"), Variant(slug="breaks", summary="raises"))
CONFIGS = (Config(name="gpu", device="cuda"), Config(name="small", device="cpu"))


def build(variant, config):
    import torch

    if variant.slug == "breaks":
        raise RuntimeError("no such weights")
    linear, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    return Workload(cases=[Case(name="one", run=lambda: linear(x))])


def claims(record):
    return []


if __name__ == "__main__":
    from worklog.cli import problem_main

    problem_main(__file__)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that worklog takes for the repository, with the problem `toy`; WORKLOG_ROOT names it."""
    folder = tmp_path / "checkout"
    toy = folder / "problems" / "toy"
    toy.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (toy / "repro.py").write_text(TOY)
    monkeypatch.setenv("WORKLOG_ROOT", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(REPO / "src"))
    return folder


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """program("ncu", "echo hello; exit 3"): a shell script of that name, the first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, body: str) -> Path:
        script = folder / name
        script.write_text(f"#!/bin/bash\n{body}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return script

    return make
