"""`worklog repro` on tests/faulty_problem, whose variants really hang, are killed, run out of memory, fill the disk."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from worklog import record as records
from worklog import runner
from worklog.record import Record

HERE = Path(__file__).parent
FAULTY = HERE / "faulty_problem"
SLEEP_S = f"987.{uuid.uuid4().int % 10**9}"
"""What the hanging variant's grandchild sleeps: how /proc is searched for it."""


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [changes.pop("PYTHONPATH", ""), str(HERE.parent / "src")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "FAULTY_PROBLEM_SLEEP_S": SLEEP_S, **changes}


def worklog(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "worklog.cli", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env=environment(**changes), timeout=120, check=False)


def repro(out: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return worklog("repro", str(FAULTY), "--out", str(out), *arguments, **changes)


def only_record(out: Path) -> Record:
    """The record of the one run in `out`, in which nothing else may lie."""
    (folder,) = out.iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["record.json", "stdout.log"]
    record = records.load(folder)
    assert record.run_id == folder.name
    return record


def sleepers() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if SLEEP_S.encode() in words:
            found.append(file.parent.name)
    return found


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """All variants but the one that fills the disk, in one run."""
    out = tmp_path_factory.mktemp("out")
    text = (FAULTY / "repro.py").read_text()
    slugs = [slug for slug in re.findall(r'Variant\(slug="(\w+)"', text) if slug != "fills_disk"]
    return repro(out, "--json", *[f"--variant={slug}" for slug in slugs]), out


FAULTS = {
    "wrong": ("wrong_result", "case second: relative error 1.00e-01 is above the limit 1e-05"),
    "wrong_later": ("wrong_result", "case second: relative error 1.00e-01 is above the limit 1e-05"),
    "not_a_number": ("wrong_result", "case second: the result is not finite"),
    "wrong_shape": ("wrong_result", "case second: the result has shape (63, 64), the reference (64, 64)"),
    "raises": ("error", "case second: RuntimeError: this variant raises"),
    "hangs": ("timeout", "not done after 6 s, stopped in case second"),
    "killed": ("error", "killed by signal 9 (SIGKILL) in case second"),
    "exits": ("error", "exited with 7 while it was built: about to leave"),
    "no_package": (
        "unsupported",
        "needs no-such-package 1.0, which is not installed; ./scripts/repro puts it into .packages/no-such-package-1.0",
    ),
    "other_version": (
        "unsupported",
        f"needs msgspec 0.0.1, but finds {msgspec.__version__}; ./scripts/repro puts it into .packages/msgspec-0.0.1",
    ),
    "gpu_only": ("skipped", "runs on cuda only"),
    "refuses": ("unsupported", "it is for a machine with three hands"),
}


@pytest.mark.parametrize("slug", FAULTS)
def test_fault_is_one_sentence_and_its_status(whole_run, slug):
    variant = only_record(whole_run[1]).variants[slug]
    assert (variant.status, variant.message) == FAULTS[slug]


def test_out_of_memory_is_a_status_and_the_next_case_runs(whole_run):
    variant = only_record(whole_run[1]).variants["out_of_memory"]
    assert variant.status == "out_of_memory"
    assert re.fullmatch(r"case second: out of memory when it asked for \d+ bytes", variant.message)
    assert variant.cases["third"].status == "ok"


def test_faulty_case_has_no_time_and_the_others_keep_theirs(whole_run):
    variants = only_record(whole_run[1]).variants
    for slug in ("wrong", "wrong_later", "not_a_number", "wrong_shape", "raises", "out_of_memory"):
        states = {name: (case.status == "ok", case.timing is not None) for name, case in variants[slug].cases.items()}
        assert states == {"first": (True, True), "second": (False, False), "third": (True, True)}, slug
    for slug in ("hangs", "killed"):
        assert list(variants[slug].cases) == ["first"]
        assert len(variants[slug].cases["first"].timing.samples_us) == 5


def test_sound_variants_before_and_after_are_unaffected(whole_run):
    variants = only_record(whole_run[1]).variants
    for slug in ("plain", "also_plain"):
        assert variants[slug].status == "ok"
        assert [len(case.timing.samples_us) for case in variants[slug].cases.values()] == [5, 5, 5]
        assert variants[slug].facts == {"size": 64}


def test_memory_of_a_product_is_its_operands_and_its_result(whole_run):
    memory = only_record(whole_run[1]).variants["plain"].cases["first"].memory
    square = 4 * 64 * 64
    assert (memory.baseline_bytes, memory.allocated_bytes) == (2 * square, 3 * square)
    assert memory.largest_temporary_bytes == square


def test_exit_code_and_stdout_of_a_run_with_failures(whole_run):
    process, out = whole_run
    assert process.returncode == 1
    assert process.stdout.encode() == (next(out.iterdir()) / "record.json").read_bytes()
    assert json.loads(process.stdout)["complete"] is True
    assert "Traceback" not in process.stderr


def test_time_limit_ends_grandchildren_too(whole_run):
    assert only_record(whole_run[1]).variants["hangs"].seconds < 9
    assert sleepers() == []


def test_log_has_the_traceback_and_no_path_of_this_machine(whole_run):
    (folder,) = whole_run[1].iterdir()
    log = (folder / "stdout.log").read_text()
    assert "raise RuntimeError" in log
    assert "== hangs" in log
    for text in (log, (folder / "record.json").read_text()):
        assert str(HERE.parent) not in text
        assert str(whole_run[1]) not in text
    (described,) = only_record(whole_run[1]).artifacts
    assert described == records.artifact(folder, folder / "stdout.log")


def test_table_names_every_case_and_failure(tmp_path):
    process = repro(tmp_path, "--variant=plain", "--variant=raises")
    assert process.returncode == 1
    assert "CPU run at a small size" in process.stdout
    assert re.search(r"raises +error", process.stdout)
    assert re.search(r"plain +[\d.]+ .s +.* 1\.00x ", process.stdout)
    assert "raises: error: case second: RuntimeError: this variant raises" in process.stdout
    assert "claim holds: a product takes time" in process.stdout
    assert "No GPU run of this problem is recorded" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("repro", "no_such_problem"), "No problem 'no_such_problem'; there are: "),
        (("repro", str(FAULTY), "--variant", "typo"), "faulty_problem has no variant 'typo'; it has: plain, wrong"),
        (("repro", str(FAULTY), "--config", "typo"), "faulty_problem has no config 'typo'; it has: cuda, cpu."),
        (("repro", str(FAULTY), "--config", "cpu", "--device", "cuda"), "--device cuda and --config cpu disagree"),
        (("repro", str(FAULTY), "--step", "../x"), "--step '../x' becomes part of a folder's name"),
        (("repro", str(FAULTY), "--out", "/proc/worklog"), "/proc/worklog: cannot be written ("),
    ],
)
def test_mistake_is_one_sentence_and_exit_2(arguments, sentence):
    process = worklog(*arguments)
    assert process.returncode == 2
    assert process.stdout == ""
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith(f"worklog: {sentence}")


def test_problem_that_does_not_load_is_one_sentence(tmp_path):
    (tmp_path / "repro.py").write_text("import a_module_that_nobody_has\n")
    process = worklog("repro", str(tmp_path))
    assert process.returncode == 2
    (line,) = process.stderr.strip().splitlines()
    assert "cannot be loaded: ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in line


def test_no_gpu_is_a_record_that_says_so(tmp_path):
    process = repro(tmp_path, "--device", "cuda", "--variant=plain", "--variant=raises")
    assert process.returncode == 2
    message = "config cuda needs a CUDA GPU and the driver shows none; --device cpu runs what a CPU can show"
    assert f"worklog: no variant could run: {message}." in process.stderr
    variants = only_record(tmp_path).variants
    assert {slug: (v.status, v.message) for slug, v in variants.items()} == {
        "plain": ("unsupported", message),
        "raises": ("unsupported", message),
    }


def test_old_torch_is_a_record_that_says_so(tmp_path):
    stub = tmp_path / "path" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('an old torch must not be imported')\n")
    (stub / "version.py").write_text("__version__ = '2.8.0+cpu'\ncuda = None\n")
    process = repro(tmp_path / "out", "--variant=plain", PYTHONPATH=str(stub.parent))
    message = "needs torch 2.11 or later, but finds 2.8.0+cpu; ./scripts/repro installs it"
    assert process.returncode == 2
    assert message in process.stderr
    record = only_record(tmp_path / "out")
    assert (record.variants["plain"].status, record.variants["plain"].message) == ("unsupported", message)
    assert record.software["torch"] == "2.8.0+cpu"


def test_claim_that_does_not_hold_is_exit_1(tmp_path):
    process = repro(tmp_path, "--variant=plain", FAULTY_PROBLEM_REQUIRED_US="1e15")
    assert process.returncode == 1
    assert "claim does not hold: a product takes time" in process.stdout
    assert only_record(tmp_path).claims[0].holds is False


def test_check_looks_at_claims_alone(tmp_path):
    assert repro(tmp_path, "--check", "--variant=plain", "--variant=exits").returncode == 0


def test_claims_that_raise_are_undecided(tmp_path):
    assert repro(tmp_path, "--variant=plain", FAULTY_PROBLEM_CLAIMS="raise").returncode == 0
    (claim,) = only_record(tmp_path).claims
    assert (claim.holds, claim.reason) == (None, "claims() failed with KeyError: 'no_such_variant'")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_leaves_a_record_and_no_process(tmp_path, number):
    argv = [sys.executable, "-m", "worklog.cli", "repro", str(FAULTY), "--out", str(tmp_path)]
    argv += ["--variant=plain", "--variant=hangs", "--variant=also_plain"]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not sleepers():
            assert time.monotonic() < deadline, "the hanging variant did not begin"
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert sleepers() == []
    record = only_record(tmp_path)
    assert record.complete is False
    assert {slug: (v.status, v.message) for slug, v in record.variants.items()} == {
        "plain": ("ok", None),
        "hangs": ("error", "interrupted in case second"),
        "also_plain": ("skipped", "the run was interrupted before it"),
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_that_fills_during_the_run_leaves_nothing_half_written(small_disk):
    process = repro(
        small_disk / "out", "--variant=plain", "--variant=fills_disk", FAULTY_PROBLEM_FILL=f"{small_disk}/x"
    )
    assert process.returncode == 2
    assert re.search(r"plain +[\d.]+ .s", process.stdout), "the table is printed all the same"
    assert "The run is over but could not be kept: " in process.stderr
    assert "No space left on device" in process.stderr
    assert process.stderr.endswith(f"; {runner.remedy()}.\n")
    assert "Traceback" not in process.stderr
    assert list((small_disk / "out").iterdir()) == []


def test_disk_that_is_full_from_the_start_stops_the_run_before_it_begins(tmp_path):
    """With a file size limit instead of a small disk, so that it needs no root."""
    argv = [sys.executable, "-m", "worklog.cli", "repro", str(FAULTY), "--out", str(tmp_path), "--variant=plain"]
    process = subprocess.run(
        argv,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr == f"worklog: {tmp_path}: cannot be written (File too large); {runner.remedy()}.\n"
    assert list(tmp_path.iterdir()) == []


def test_recorded_gpu_run_stands_beside_a_cpu_run(tmp_path):
    root = tmp_path / "checkout"
    shutil.copytree(FAULTY, root / "problems" / "faulty_problem")
    (root / "pyproject.toml").touch()
    changes = {"WORKLOG_ROOT": str(root), "WORKLOG_COMMIT": "0" * 40, "WORKLOG_DIRTY": "0"}
    argv = ("repro", "faulty_problem", "--variant=plain")
    assert worklog(*argv, **changes).returncode == 0
    run = only_record(root / "out" / "faulty_problem")
    gpu = records.Gpu(name="NVIDIA H200", memory_bytes=1, sm_count=132, compute_capability="9.0", l2_bytes=1)
    hardware = msgspec.structs.replace(run.hardware, gpus=[gpu])
    for run_id, started, dirty in (
        ("older", "2026-01-01T00:00:00Z", False),
        ("newest_clean", "2026-02-02T00:00:00Z", False),
        ("dirty", "2026-03-03T00:00:00Z", True),
    ):
        source = records.Source(commit="0" * 40, dirty=dirty)
        config = {**run.config, "device": "cuda"}
        changed = msgspec.structs.replace(
            run, run_id=run_id, started_utc=started, hardware=hardware, source=source, config=config
        )
        records.save(changed, root / "reports" / "faulty_problem" / run_id)
    process = worklog(*argv, **changes)
    assert process.returncode == 0
    here, recorded = process.stdout.split("RECORDED on NVIDIA H200 on 2026-02-02, not run here:")
    assert "CPU run at a small size" in here
    assert "NVIDIA H200, 2026-02-02T00:00:00Z, newest_clean" in recorded


def test_list_names_problems_variants_and_configs(tmp_path):
    shutil.copytree(FAULTY, tmp_path / "problems" / "faulty_problem")
    (tmp_path / "pyproject.toml").touch()
    process = worklog("list", "--json", WORKLOG_ROOT=str(tmp_path))
    (row,) = json.loads(process.stdout)
    assert (row["name"], row["configs"][1]) == ("faulty_problem", {"name": "cpu", "device": "cpu", "size": 64})
    assert row["variants"][0] == {"slug": "plain", "summary": "the baseline, sound", "devices": ["cpu", "cuda"]}
    assert "faulty_problem: Variants of one matrix product" in worklog("list", WORKLOG_ROOT=str(tmp_path)).stdout


def problem_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(FAULTY / "repro.py"), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=60, check=False)


def test_problem_script_is_the_same_run(tmp_path):
    assert problem_script("--variant=plain", "--out", str(tmp_path)).returncode == 0
    record = only_record(tmp_path)
    assert (record.problem, record.variants["plain"].status) == ("faulty_problem", "ok")
    assert record.argv[:2] == ["worklog", "repro"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--variant", "typo"), "worklog: faulty_problem has no variant 'typo'"),
        (("--variant", "plain", "--case", "typo"), "worklog: No case 'typo'; there are: first, second, third."),
        (("--variant", "no_package"), "worklog: no_package needs no-such-package 1.0, which is not installed"),
    ],
)
def test_capture_of_what_is_not_there_is_one_sentence_and_exit_2(arguments, sentence):
    process = problem_script("capture", *arguments)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("repro", "--help"), ("list",)])
def test_help_and_list_work_without_torch(tmp_path, arguments):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not here')\n")
    (tmp_path / "problems").mkdir()
    (tmp_path / "pyproject.toml").touch()
    process = worklog(*arguments, PYTHONPATH=str(tmp_path), WORKLOG_ROOT=str(tmp_path))
    assert (process.returncode, process.stderr) == (0, "")
