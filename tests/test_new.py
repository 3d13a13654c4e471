"""`worklog new`: the folder runs, renders and passes the check as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import checkouts
import pytest

from worklog import check, cli, new, problem


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = checkouts.empty(tmp_path / "checkout")
    monkeypatch.setenv("WORKLOG_ROOT", str(made))
    return made


def test_a_new_problem_passes_the_check_at_once(root: Path) -> None:
    done = checkouts.worklog(root, "new", "slow_softmax")
    assert done.returncode == 0, done.stderr
    assert check.run(root, ["slow_softmax"], cli.app) == []
    made = {file.name for file in (root / "problems/slow_softmax").iterdir()}
    assert made == {
        "README.md", "WORKLOG.md.j2", "WORKLOG.md", "repro.py", "nsys.sh", "ncu.sh", "Dockerfile", "requirements.txt",
        "analysis.ipynb",
    }  # fmt: skip
    for script in ("nsys.sh", "ncu.sh"):
        assert os.access(root / "problems/slow_softmax" / script, os.X_OK)
    assert "problems/slow_softmax/WORKLOG.md" in (root / "README.md").read_text()
    for file in (root / "problems/slow_softmax").iterdir():
        assert "__" + "NAME__" not in file.read_text()


def test_a_new_problem_runs_and_its_claim_holds(recorded_once: Path) -> None:
    run_id = checkouts.run_id(recorded_once)
    made = json.loads((recorded_once / "reports/row_norms" / run_id / "record.json").read_text())
    baseline, fix = (made["variants"][slug] for slug in ("square_then_sum", "vector_norm"))
    assert baseline["status"] == fix["status"] == "ok"
    size = baseline["facts"]["input_bytes"]
    assert baseline["cases"]["rows"]["memory"]["largest_temporary_bytes"] == size
    assert fix["cases"]["rows"]["memory"]["largest_temporary_bytes"] < size / 1000
    assert [claim["holds"] for claim in made["claims"]] == [True]


@pytest.mark.usefixtures("root")
def test_its_page_has_the_sections_of_a_worklog() -> None:
    page = (new.create("slow_softmax") / "WORKLOG.md").read_text()
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        "Summary", "Setup", "0 Baseline", "1 Application", "2 Operator", "3 Kernel", "4 Instruction and compiler",
        "5 Fix and re-measure", "Dead ends", "Limits", "Reproduce every number",
    ]  # fmt: skip
    assert "The matrix is 537 MB." in page


def test_its_notebook_runs_on_the_record(checkout: Path) -> None:
    cells = json.loads((checkout / "problems/row_norms/analysis.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
    times = names["times"]
    assert sorted(times["variant"]) == ["square_then_sum", "vector_norm"]  # type: ignore[index]
    assert (times["median_us"] > 0).all()  # type: ignore[index]


@pytest.mark.parametrize(
    "name", ["Slow", "slow-softmax", "1slow", "slow__softmax", "a/b", "../slow", "", "slow softmax"]
)
def test_a_name_that_is_not_snake_case(root: Path, name: str) -> None:
    with pytest.raises(problem.ProblemError, match="use snake_case"):
        new.create(name)
    assert list((root / "problems").iterdir()) == []


def test_a_bad_or_taken_name_is_one_sentence_and_exit_2(checkout: Path) -> None:
    taken = checkouts.worklog(checkout, "new", "row_norms")
    assert (taken.returncode, taken.stdout) == (2, "")
    assert taken.stderr == "worklog: problems/row_norms exists already; choose another name.\n"
    bad = checkouts.worklog(checkout, "new", "Row-Norms")
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)


def test_a_full_disk_leaves_nothing(root: Path) -> None:
    """A limit on file sizes refuses the write as a full disk does."""
    argv = ["bash", "-c", "ulimit -f 1; trap '' XFSZ; exec \"$@\"", "bash", *checkouts.argv("new", "slow_softmax")]
    done = subprocess.run(argv, cwd=root, env=checkouts.environment(root), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert list((root / "problems").iterdir()) == []


def test_it_gets_services_of_docker_compose(root: Path) -> None:
    shutil.copytree(checkouts.REPOSITORY / "docker", root / "docker")
    before = (root / "docker/compose.yaml").read_text()
    assert checkouts.worklog(root, "new", "slow_softmax").returncode == 0
    after = (root / "docker/compose.yaml").read_text()
    assert after.endswith(before[before.index(new.SERVICES_BELOW) + len(new.SERVICES_BELOW) :])
    assert "dockerfile: problems/slow_softmax/Dockerfile" in after
    assert "  slow_softmax_ncu:\n    <<: [*ncu, *slow_softmax]\n" in after
    assert "  slow_softmax: {deploy: !reset null}\n" in (root / "docker/compose.cpu.yaml").read_text()


@pytest.mark.parametrize("script", ["nsys.sh", "ncu.sh"])
def test_the_profilers_scripts_are_one_text(script: str) -> None:
    """The packaged template is the source; every problem's copy equals it."""
    template = (new.TEMPLATES / f"{script}.tmpl").read_text()
    for copy in checkouts.REPOSITORY.glob(f"problems/*/{script}"):
        assert copy.read_text() == template, f"cp src/worklog/templates/problem/{script}.tmpl {copy}"


@pytest.mark.usefixtures("root")
def test_the_dockerfile_installs_before_it_copies_code_and_is_not_root() -> None:
    lines = (new.create("slow_softmax") / "Dockerfile").read_text().splitlines()
    order = [
        next(i for i, line in enumerate(lines) if line.startswith(start))
        for start in (
            "ARG BASE",
            "FROM ${BASE}",
            "RUN pip install --no-cache-dir --requirement",
            "COPY src/",
            "USER 1000:1000",
            "ENTRYPOINT",
        )
    ]
    assert order == sorted(order)
    assert (
        shutil.which("hadolint") is None
        or not subprocess.run(["hadolint", "-"], input="\n".join(lines), text=True, capture_output=True).stdout
    )
