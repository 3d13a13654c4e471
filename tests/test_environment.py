from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worklog import environment

SMI = """#!/bin/bash
# Answers as nvidia-smi does: one CSV row a GPU, the fields in the order that was asked for.
[[ $1 == --query-gpu=uuid,driver_version,clocks.sm,clocks.mem,power.draw,enforced.power.limit,temperature.gpu,mig.mode.current,memory.free ]] || exit 2
[[ $2 == --format=csv,noheader,nounits ]] || exit 2
echo 'GPU-aaaa, 580.159.04, 345, 3201, 112.50, 700.00, 33, Disabled, 100'
echo 'GPU-bbbb, 580.159.04, 1980, 3201, [N/A], 500.00, 34, [N/A], 143771'
"""  # noqa: E501


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("WORKLOG_COMMIT", "WORKLOG_DIRTY", "WORKLOG_IMAGE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORKLOG_ROOT", str(tmp_path))
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_clean_commit_then_dirty_by_a_change_or_a_new_file(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert environment.source().commit == commit
    assert environment.source().dirty is False
    (repository / "file").write_text("two")
    assert environment.source().dirty is True
    git(repository, "checkout", "-q", "file")
    (repository / "new").touch()
    assert environment.source().dirty is True


def test_recorded_runs_do_not_make_a_tree_dirty(repository: Path) -> None:
    (repository / "reports" / "toy").mkdir(parents=True)
    (repository / "reports" / "toy" / "record.json").touch()
    assert environment.source().dirty is False


def test_variables_speak_where_there_is_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKLOG_ROOT", str(tmp_path))
    monkeypatch.delenv("WORKLOG_COMMIT", raising=False)
    assert environment.source().commit is None
    assert environment.source().dirty is None
    monkeypatch.setenv("WORKLOG_COMMIT", "abc")
    monkeypatch.delenv("WORKLOG_DIRTY", raising=False)
    assert (environment.source().commit, environment.source().dirty) == ("abc", None)
    for said, dirty in (("0", False), ("1", True)):
        monkeypatch.setenv("WORKLOG_DIRTY", said)
        assert environment.source().dirty is dirty
    monkeypatch.setenv("WORKLOG_IMAGE", "sha256:1")
    assert environment.source().image == "sha256:1"


def test_hardware_of_the_host() -> None:
    here = environment.hardware("cpu")
    assert here.cpu
    assert here.cpu_count == len(os.sched_getaffinity(0))
    assert here.memory_bytes > environment.available_memory_bytes() > 0
    assert here.gpus == []
    assert here.start is None


def test_nvidia_smi_is_read_by_uuid_and_what_it_does_not_know_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = environment._smi_state(None), environment._smi_state("GPU-bbbb")
    assert first is not None
    assert second is not None
    assert first["driver"] == "580.159.04"
    assert first["mig"] is False
    assert first["clocks"].power_w == 112.5
    assert second["clocks"].sm_mhz == 1980
    assert second["clocks"].power_w is None
    assert second["power_limit_w"] == 500.0
    assert second["mig"] is None
    assert second["free_bytes"] == 143771 << 20


def test_broken_nvidia_smi_is_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver'\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert environment._smi_state(None) is None


def test_software_names_what_is_here_and_what_is_not() -> None:
    found = environment.software(["msgspec", "no-such-package"])
    assert found["python"] == platform.python_version()
    assert found["msgspec"] == importlib.metadata.version("msgspec")
    assert found["no-such-package"] is None
    assert {"torch", "cuda", "cudnn", "triton", "nsys", "ncu"} < set(found)


def test_nothing_here_imports_torch_and_its_version_is_torchs_own() -> None:
    program = (
        "import sys\nfrom worklog import environment\n"
        "environment.software(); environment.hardware('cuda'); environment.clocks(); environment.source()\n"
        "assert 'torch' not in sys.modules\n"
        "said = environment.torch_version()\nimport torch\nassert said == (torch.__version__, torch.version.cuda)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


DRIVER = r"""
/* Two GPUs, as a driver library shows them; attribute numbers are those of CUdevice_attribute. */
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device ? "NVIDIA B" : "NVIDIA A", size);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 150000000000ul + device; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
  for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = 132; return 0; /* multiprocessors */
    case 38: *value = 60 << 20; return 0; /* L2 */
    case 75: *value = 9; return 0;
    case 76: *value = device; return 0;
  }
  return 1;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_gpus_are_what_the_driver_library_shows_and_the_state_is_the_first_ones(tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    argv = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(argv, cwd=tmp_path, check=True)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI.replace("GPU-bbbb", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"))
    smi.chmod(0o755)
    program = (
        "import msgspec\nfrom worklog import environment as e\nprint(msgspec.json.encode(e.hardware('cuda')).decode())"
    )
    own = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpus"][0] == {
        "name": "NVIDIA A",
        "memory_bytes": 150000000000,
        "sm_count": 132,
        "compute_capability": "9.0",
        "l2_bytes": 60 << 20,
    }
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA A", "NVIDIA B"]
    assert found["driver"] == "580.159.04"
    assert found["power_limit_w"] == 500.0  # of the row with the first GPU's UUID, not of the first row
    assert found["start"]["sm_mhz"] == 1980
