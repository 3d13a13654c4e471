from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]


def doctor(*arguments: str, **variables: str) -> tuple[int, str, str]:
    own = {**os.environ, "PYTHONPATH": str(REPO / "src"), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "worklog.cli", "doctor", *arguments],
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def checks(**variables: str) -> dict[str, dict[str, Any]]:
    code, out, err = doctor("--json", **variables)
    assert code == 0, err
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_a_machine_with_torch_can_do_cpu_runs() -> None:
    code, out, err = doctor()
    assert code == 0, err
    for line in ("python", "torch", "gpu", "nsys", "ncu", "gpu counters", "container", "memory", "disk"):
        assert any(row.startswith(line) for row in out.splitlines()), line


def test_what_is_missing_says_what_it_disables_and_the_remedy() -> None:
    for check in checks().values():
        assert check["found"]
        if check["state"] != "ok":
            assert check["disables"], check["name"]
            assert check["remedy"], check["name"]


def test_half_an_nsight_compute_is_found_and_repaired(nsight_compute: Path, tmp_path: Path) -> None:
    nsys = checks()["nsys"]
    assert nsys["state"] == "fault"
    assert "2025.3.1.90" in nsys["found"]
    assert f"ln -s linux-desktop-glibc_2_11_3-x64 {nsight_compute}/host-linux-x64" in nsys["remedy"]
    assert "libdw.so.1" in nsys["remedy"]
    (nsight_compute / "host-linux-x64").symlink_to("linux-desktop-glibc_2_11_3-x64")
    (tmp_path / "libdw.so.1").touch()
    assert checks(WORKLOG_NSYS_LIBRARY_PATH=str(tmp_path))["nsys"]["state"] == "ok"


def test_side_by_side_packages_that_problems_need(tmp_path: Path) -> None:
    problem = tmp_path / "problems" / "toy"
    problem.mkdir(parents=True)
    (problem / "repro.py").write_text(
        "from worklog.problem import Variant\nTITLE, CONFIGS, build, claims = '', (), None, None\n"
        "VARIANTS = tuple(Variant(slug=f'v{n}', summary='', needs={'torchao': v}) "
        "for n, v in enumerate(['0.13.0', '0.18.0']))\n"
    )
    (tmp_path / "packages" / "torchao-0.18.0" / "torchao").mkdir(parents=True)
    found = checks(WORKLOG_ROOT=str(tmp_path), WORKLOG_PACKAGES=str(tmp_path / "packages"))
    assert found["torchao 0.18.0"]["state"] == "ok"
    assert found["torchao 0.13.0"]["state"] == "missing"
    assert found["torchao 0.13.0"]["disables"] == "toy/v0"
    target = tmp_path / "packages" / "torchao-0.13.0"
    assert found["torchao 0.13.0"]["remedy"] == f"pip install --no-deps --target {target} torchao==0.13.0"


def test_a_problem_that_does_not_import_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "problems" / "toy").mkdir(parents=True)
    (tmp_path / "problems" / "toy" / "repro.py").write_text("import no_such_module\n")
    found = checks(WORKLOG_ROOT=str(tmp_path))["problems"]
    assert found["state"] == "fault"
    assert "no_such_module" in found["found"]


@pytest.mark.parametrize(
    ("content", "state", "found"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "missing", "libcudart.so.13"),
        (
            (
                "class cuda:\n    is_available = staticmethod(lambda: False)\n    init = staticmethod(lambda: None)\n"
                "class version:\n    cuda = None\n__version__ = '2.6.0+cpu'\n"
            ),
            "fault",
            "2.6.0+cpu, older than 2.11",
        ),
    ],
)
def test_without_a_usable_torch_even_a_cpu_run_is_impossible(
    tmp_path: Path, content: str, state: str, found: str
) -> None:
    (tmp_path / "torch.py").write_text(content)
    code, out, err = doctor("--json", PYTHONPATH=f"{tmp_path}:{REPO / 'src'}")
    assert code == 2, err
    said = json.loads(out)
    assert said["cpu_run"] is False
    torch = next(check for check in said["checks"] if check["name"] == "torch")
    assert torch["state"] == state
    assert found in torch["found"]


def test_works_where_torch_is_not_installed(tmp_path: Path) -> None:
    # -S leaves site-packages out; what doctor needs of it is linked beside, torch is not.
    import rich

    packages = Path(rich.__file__).parents[1]
    for entry in packages.iterdir():
        if not entry.name.startswith(("torch", "functorch", "__pycache__")):
            (tmp_path / entry.name).symlink_to(entry)
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO / 'src'}"}
    argv = [sys.executable, "-S", "-m", "worklog.cli", "doctor", "--json"]
    done = subprocess.run(argv, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    said = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert said["torch"]["found"] == "not installed"
    assert said["torch sees the gpu"]["state"] == "unknown"
