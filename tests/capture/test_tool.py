from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from worklog.capture.tool import CaptureError, Session, environment


def session(tmp_path: Path, **changes: object) -> Session:
    return Session(**{"cwd": tmp_path, "timeout_s": 20.0, "log": tmp_path / "log", **changes})  # type: ignore[arg-type]


def test_only_listed_variables_reach_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SSH_AUTH_SOCK", "CUDAISH", "USER", "NVIDIA_API_KEY"):
        monkeypatch.setenv(name, "secret")
    for name in ("CUDA_VISIBLE_DEVICES", "WORKLOG_COMMIT", "TRITON_CACHE_DIR", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "passed")
    done = session(tmp_path).execute(["env"])
    seen = dict(line.split("=", 1) for line in done.output.splitlines())
    assert "secret" not in seen.values()
    assert {n for n, v in seen.items() if v == "passed"} == {
        "CUDA_VISIBLE_DEVICES",
        "WORKLOG_COMMIT",
        "TRITON_CACHE_DIR",
        "LD_LIBRARY_PATH",
    }
    assert seen["PATH"] == os.environ["PATH"]


def test_allow_list_is_of_the_given_variables() -> None:
    assert environment({"PATH": "a", "TOKEN": "b", "NCCL_NVLS_ENABLE": "0"}) == {"PATH": "a", "NCCL_NVLS_ENABLE": "0"}


def test_time_limit_kills_what_the_tool_started_in_other_groups(tmp_path: Path) -> None:
    # As nsys does: the program runs in a session of its own, so killing the tool's group would leave it alive.
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid))\ntime.sleep(600)\n"
    )
    began = time.monotonic()
    with pytest.raises(CaptureError, match=r"killed after its time limit of 2 s") as caught:
        session(tmp_path, timeout_s=2.0).execute([sys.executable, "-c", script])
    assert caught.value.status == "timeout"
    assert time.monotonic() - began < 15
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_stop_ends_the_command(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(CaptureError, match="interrupted") as caught:
        session(tmp_path, stop=stop).execute(["sleep", "600"])
    assert caught.value.status == "error"


def test_missing_program_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"/no/such/tool cannot be started \(No such file") as caught:
        session(tmp_path).execute(["/no/such/tool"])
    assert caught.value.status == "unsupported"


def test_output_of_each_command_is_kept_apart_and_all_of_it_in_the_log(tmp_path: Path) -> None:
    run = session(tmp_path)
    assert run.execute(["echo", "first"]).output == "first\n"
    assert run.execute(["sh", "-c", "echo second; echo third >&2"]).output == "second\nthird\n"
    assert run.log.read_text() == "first\nsecond\nthird\n"


def test_last_line_is_the_programs_own(tmp_path: Path) -> None:
    said = "echo 'worklog: no such case.'; echo '==PROF== Disconnected from process 1'; echo 'Generating /tmp/x.qdstrm'"
    assert session(tmp_path).execute(["sh", "-c", said]).last_line == "worklog: no such case."
