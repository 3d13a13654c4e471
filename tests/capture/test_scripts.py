"""nsys.sh and ncu.sh of a problem spell out what the builders build, and keep the same variables from the reports."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from worklog import problem, profile
from worklog.capture.tool import environment

REPO = Path(__file__).resolve().parents[2]
PROBLEMS = sorted(p.parent.name for p in (REPO / "problems").glob("*/nsys.sh"))


def dry_run(script: Path, variant: str, **variables: str) -> list[list[str]]:
    """The commands that the script would run."""
    own = {"PATH": os.environ["PATH"], "PYTHON": "python", "DRY_RUN": "1", **variables}
    done = subprocess.run([str(script), variant], env=own, capture_output=True, text=True, check=True)
    return [block.splitlines() for block in done.stdout.split("\n\n")]


def built(name: str, variant: str, request: profile.Request) -> list[list[str]]:
    script = f"problems/{name}/repro.py"
    return [c.argv for c in profile.commands(script, variant, request, folder=f"out/{name}")]


def test_every_problem_has_both_scripts() -> None:
    assert PROBLEMS
    assert [n for n in PROBLEMS if not (REPO / "problems" / n / "ncu.sh").is_file()] == []


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("which", ["attribution", "timing"])
def test_nsys_script_equals_the_builders(name: str, which: profile.Pass) -> None:
    script = REPO / "problems" / name / "nsys.sh"
    assert dry_run(script, "a_b", PASS=which) == built(name, "a_b", profile.Request(tool="nsys", which=which))
    request = profile.Request(tool="nsys", which=which, case="two words", config="small", iterations=7)
    assert dry_run(script, "v", PASS=which, CASE="two words", CONFIG="small", ITERATIONS="7") == built(
        name, "v", request
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_ncu_script_equals_the_builders(name: str) -> None:
    script = REPO / "problems" / name / "ncu.sh"
    assert dry_run(script, "a_b") == built(name, "a_b", profile.Request(tool="ncu"))
    request = profile.Request(tool="ncu", kernel=".*gemv|x y.*", launch_skip=2, launch_count=1, case="c", iterations=4)
    variables = {"KERNEL": ".*gemv|x y.*", "LAUNCH_SKIP": "2", "LAUNCH_COUNT": "1", "CASE": "c", "ITERATIONS": "4"}
    assert dry_run(script, "v", **variables) == built(name, "v", request)


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_script_passes_the_same_variables(
    checkout: Path, program: Callable[[str, str], Path], tool: profile.Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(REPO / "problems" / PROBLEMS[0] / f"{tool}.sh", checkout / "problems" / "toy")
    program(tool, "env > seen")
    for variable in ("HF_TOKEN", "NVIDIA_API_KEY", "USER"):
        monkeypatch.setenv(variable, "secret")
    for variable in ("CUDA_HOME", "NCCL_X", "OMP_NUM_THREADS", "TMPDIR", "TORCH_LOGS", "TRITON_X", "WORKLOG_IMAGE"):
        monkeypatch.setenv(variable, "/tmp")
    subprocess.run([checkout / "problems" / "toy" / f"{tool}.sh", "plain"], check=True)
    seen = dict(line.split("=", 1) for line in (checkout / "seen").read_text().splitlines() if "=" in line)
    made_by_the_shell = {"_", "SHLVL", "PWD", "OLDPWD", "LD_LIBRARY_PATH"}
    assert set(seen) - made_by_the_shell == set(environment(profile.own_environment())) - made_by_the_shell
    assert seen["PYTHONPATH"].startswith("src:")


@pytest.mark.usefixtures("checkout")
def test_print_is_one_flag_a_line() -> None:
    toy = problem.load("toy")
    command = profile.commands(
        profile.relative(toy.folder / "repro.py"), "plain", profile.Request(tool="nsys"), folder="out/toy"
    )[0]
    lines = profile.printed(command.argv).splitlines()
    assert lines[0] == "nsys profile \\"
    assert "  python problems/toy/repro.py capture \\" in lines
    assert lines[-1] == "  --iterations=3"
    assert all(line.count(" --") == 1 for line in lines[1:] if "python" not in line)
    joined = subprocess.run(["bash", "-c", f"printf '%s\\n' {profile.printed(command.argv)}"], capture_output=True)
    assert joined.stdout.decode().splitlines() == command.argv
