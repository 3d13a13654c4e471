"""`worklog profile` on a small problem: real captures by torch, and every way to fail leaves a valid record."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from worklog import record

REPO = Path(__file__).resolve().parents[1]
TOY = """
import sys, time
from worklog.problem import Case, Config, Variant, Workload

TITLE = "A linear layer"
VARIANTS = (
    Variant(slug="plain", summary="as it is"),
    Variant(slug="breaks", summary="raises"),
    Variant(slug="hangs", summary="never ends", timeout_s=3.0),
)
CONFIGS = (Config(name="gpu", device="cuda"), Config(name="small", device="cpu"))


def build(variant, config):
    if variant.slug == "breaks":
        raise RuntimeError("no such weights")
    if variant.slug == "hangs":
        time.sleep(600)
    import torch

    linear, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    return Workload(cases=[Case(name="one", run=lambda: linear(x)), Case(name="two", run=lambda: linear(x).relu())])


def claims(record):
    return []


if __name__ == "__main__":
    from worklog.cli import problem_main

    problem_main(__file__)
"""
NSYS = """
if [[ $1 == --version ]]; then echo 'NVIDIA Nsight Systems version 2025.3.1.90-1'; exit; fi
for word in "$@"; do [[ $word == --output=* ]] && out=${word#--output=}; done
echo "Generating '/tmp/nsys-report-1.qdstrm'"
if [[ $1 == profile ]]; then echo profile > "$out"; exit; fi
python3 -c 'import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    database.execute("CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)")
    rows = [("A:ENVIRONMENT_VARIABLE", "TOKEN=abc"), ("A:WORKING_DIR", "/home/someone"), ("A:PRODUCT", "nsys")]
    database.executemany("INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", rows)' "$out"
"""
NO_DATABASE = """
for word in "$@"; do [[ $word == --output=* ]] && out=${word#--output=}; done
echo "$1" > "$out"
"""
HALF = """
for word in "$@"; do [[ $word == --output=* ]] && out=${word#--output=}; done
[[ $1 == profile ]] && touch "$out" || exit 3
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    toy = tmp_path / "checkout" / "problems" / "toy"
    toy.mkdir(parents=True)
    (tmp_path / "checkout" / "pyproject.toml").touch()
    (toy / "repro.py").write_text(TOY)
    return tmp_path / "checkout"


def worklog(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "WORKLOG_ROOT": str(checkout), "PYTHONPATH": str(REPO / "src"), **variables}
    argv = [sys.executable, "-m", "worklog.cli", "profile", "toy", *arguments]
    return subprocess.run(argv, cwd=checkout, env=own, capture_output=True, text=True, check=False)


def only_run(checkout: Path) -> Path:
    (folder,) = (checkout / "out" / "toy").iterdir()
    return folder


def tool(tmp_path: Path, name: str, body: str) -> str:
    script = tmp_path / name
    script.write_text(f"#!/bin/bash\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_torch_leaves_both_passes_and_a_record(checkout: Path) -> None:
    done = worklog(checkout, "--with", "torch", "--config", "small", "--case", "two", "--iterations", "2")
    assert done.returncode == 0, done.stderr
    folder = only_run(checkout)
    kept = record.load(folder)
    assert kept.step == "profile_torch"
    assert kept.complete
    assert kept.variants["plain"].status == "ok"
    assert kept.variants["plain"].cases == {}
    paths = [a.path for a in kept.artifacts]
    assert paths == ["torch.plain.json.gz", "torch.plain.timing.json.gz", "stdout.log"]
    for artifact in kept.artifacts:
        assert record.artifact(folder, folder / artifact.path).sha256 == artifact.sha256
    argv = kept.artifacts[0].argv
    assert argv[:3] == ["python", "problems/toy/repro.py", "capture"]
    assert argv[3:6] == ["--variant=plain", "--case=two", "--config=small"]
    assert argv[-1] == f"--trace=out/toy/{kept.run_id}/torch.plain.json.gz"
    assert str(checkout) not in (folder / "record.json").read_text()
    events = json.loads(gzip.decompress((folder / paths[1]).read_bytes()))["traceEvents"]
    assert len([e for e in events if e.get("name") == "aten::relu"]) == 2


def test_a_variant_that_fails_has_its_status_and_the_others_are_captured(checkout: Path) -> None:
    variants = ("--variant", "breaks", "--variant", "hangs", "--variant", "plain")
    done = worklog(checkout, "--with", "torch", "--config", "small", "--pass", "timing", *variants)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "worklog: breaks: " in done.stderr
    assert "no such weights" in done.stderr
    kept = record.load(only_run(checkout))
    assert {slug: v.status for slug, v in kept.variants.items()} == {
        "breaks": "error",
        "hangs": "timeout",
        "plain": "ok",
    }
    assert "time limit of 3 s" in (kept.variants["hangs"].message or "")
    assert [a.path for a in kept.artifacts] == ["torch.plain.timing.json.gz", "stdout.log"]


def test_nsys_runs_both_passes_and_exports_each(checkout: Path, tmp_path: Path) -> None:
    nsys = tool(tmp_path, "nsys", NSYS)
    done = worklog(checkout, "--with", "nsys", "--config", "gpu", WORKLOG_NSYS=nsys)
    assert done.returncode == 0, done.stderr
    folder = only_run(checkout)
    kept = record.load(folder)
    assert kept.software["nsys"] == "2025.3.1.90"
    names = ["nsys.plain.nsys-rep", "nsys.plain.sqlite", "nsys.plain.timing.nsys-rep", "nsys.plain.timing.sqlite"]
    assert [a.path for a in kept.artifacts] == [*names, "stdout.log"]
    assert [(folder / name).read_text() for name in names[::2]] == ["profile\n"] * 2
    for name in names[1::2]:
        with sqlite3.connect(folder / name) as database:
            kept_values = dict(database.execute("SELECT name, value FROM META_DATA_CAPTURE"))
        assert kept_values == {"A:ENVIRONMENT_VARIABLE": "", "A:WORKING_DIR": "", "A:PRODUCT": "nsys"}
        assert b"TOKEN=abc" not in (folder / name).read_bytes()
    graph_trace = [next((w for w in a.argv if "graph-trace" in w), None) for a in kept.artifacts]
    assert graph_trace == ["--cuda-graph-trace=node", None, "--cuda-graph-trace=graph", None, None]
    assert kept.artifacts[0].argv[0] == "nsys"
    assert str(tmp_path) not in (folder / "record.json").read_text() + (folder / "stdout.log").read_text()


def test_an_export_that_is_no_database_is_one_sentence(checkout: Path, tmp_path: Path) -> None:
    done = worklog(checkout, "--with", "nsys", "--config", "gpu", WORKLOG_NSYS=tool(tmp_path, "nsys", NO_DATABASE))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "nsys.plain.sqlite, nsys's export, cannot be read or rewritten (file is not a database)" in done.stderr
    assert record.load(only_run(checkout)).variants["plain"].status == "error"


@pytest.mark.parametrize("name", ["nsys", "ncu"])
def test_missing_tool_is_one_sentence_and_exit_2_and_a_record(checkout: Path, name: str) -> None:
    variables = {f"WORKLOG_{name.upper()}": "/no/such/tool"}
    done = worklog(checkout, "--with", name, "--config", "gpu", **variables)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"worklog: plain: {name} is not here (WORKLOG_{name.upper()} names /no/such/tool" in done.stderr
    kept = record.load(only_run(checkout))
    assert kept.variants["plain"].status == "unsupported"
    assert [a.path for a in kept.artifacts] == ["stdout.log"]


def test_counters_not_permitted(checkout: Path, tmp_path: Path) -> None:
    ncu = tool(tmp_path, "ncu", "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1")
    done = worklog(checkout, "--with", "ncu", "--config", "gpu", "--kernel", "gemv", WORKLOG_NCU=ncu)
    assert done.returncode == 2
    assert "ncu may not read GPU counters here (ERR_NVGPUCTRPERM): run as root" in done.stderr
    assert record.load(only_run(checkout)).variants["plain"].status == "unsupported"


def test_what_a_failed_export_leaves_is_removed(checkout: Path, tmp_path: Path) -> None:
    done = worklog(checkout, "--with", "nsys", "--config", "gpu", WORKLOG_NSYS=tool(tmp_path, "nsys", HALF))
    assert done.returncode == 1
    assert sorted(f.name for f in only_run(checkout).iterdir()) == ["record.json", "stdout.log"]


@pytest.mark.parametrize("name", ["nsys", "ncu", "memory"])
def test_tools_for_gpus_say_so_on_a_cpu(checkout: Path, name: str) -> None:
    done = worklog(checkout, "--with", name, "--config", "small")
    assert done.returncode == 2
    assert f"worklog: plain: --with {name} needs a CUDA GPU; --with torch works here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--variant", "nope"], "worklog: toy has no variant 'nope'; it has: plain, breaks, hangs."),
        (["--config", "nope"], "worklog: toy has no config 'nope'; it has: gpu, small."),
    ],
)
def test_mistakes_are_one_sentence(checkout: Path, arguments: list[str], sentence: str) -> None:
    done = worklog(checkout, "--with", "torch", *arguments)
    assert (done.returncode, done.stderr.strip()) == (2, sentence)
    assert not (checkout / "out").exists()


def test_print_runs_nothing(checkout: Path) -> None:
    done = worklog(checkout, "--with", "ncu", "--kernel", "a b", "--variant", "breaks", "--print")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "ncu \\"
    assert "  --nvtx-include=breaks/ \\" in lines
    assert "  '--kernel-name=regex:a b' \\" in lines
    assert "  --export=out/toy/ncu.breaks.a_b.ncu-rep \\" in lines
    assert not (checkout / "out").exists()


def test_json_alone_is_on_stdout(checkout: Path) -> None:
    done = worklog(checkout, "--with", "torch", "--config", "small", "--pass", "timing", "--json")
    assert json.loads(done.stdout)["step"] == "profile_torch"
