"""scripts/offline-bundle: what DOCKER_README says of it, with small packages in the place of torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from building import REPOSITORY

pytestmark = pytest.mark.images


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("offline")
    for folder in ("scripts", "src", "requirements"):
        shutil.copytree(REPOSITORY / folder, made / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, made)
    small = {"base": "packaging==26.3", "dev": "-r base.txt", "side-by-side": "mdurl==0.1.2", "side-by-side-test": ""}
    for name, text in small.items():
        (made / "requirements" / f"{name}.txt").write_text(text + "\n")
    done = bundle(made)
    assert done.returncode == 0, done.stderr
    return made


def bundle(root: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHON": sys.executable}
    argv = [*before, root / "scripts/offline-bundle", *words]
    return subprocess.run(argv, env=own, capture_output=True, text=True, check=False, timeout=300)


def test_another_python_and_platform_can_be_named(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(root, other, ignore=shutil.ignore_patterns(".bundle"))
    (other / "requirements/base.txt").write_text("msgspec==0.22.0\n")
    assert bundle(other, "3.12", "aarch64").returncode == 0
    (wheel,) = (other / ".bundle").glob("msgspec-*.whl")
    assert "cp312" in wheel.name
    assert "aarch64" in wheel.name


def test_it_installs_without_a_network(root: Path) -> None:
    assert bundle(root, "--verify").returncode == 0
    done = bundle(root, "--install", before=("unshare", "--net"))
    if "unshare failed" in done.stderr:
        pytest.skip("this user cannot make a process without a network")
    assert done.returncode == 0, done.stderr
    assert (root / ".packages/mdurl-0.1.2").is_dir()
    program = "import packaging, worklog; print(worklog.__file__)"
    said = subprocess.run([root / ".venv/bin/python", "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(root / "src/worklog/__init__.py")


def test_a_wheel_that_is_not_the_one_downloaded_is_refused(root: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(root, changed, ignore=shutil.ignore_patterns(".venv", ".packages"))
    wheel = next((changed / ".bundle").glob("packaging-*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    done = bundle(changed, "--verify")
    assert done.returncode == 2
    assert ".bundle is not what was downloaded" in done.stderr
    wheel.unlink()
    assert bundle(changed, "--install").returncode == 2
    assert not (changed / ".venv").exists()
