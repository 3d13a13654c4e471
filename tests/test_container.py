"""What a container sees of its host's driver: libraries that a C compiler makes here, loaded for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worklog import container

REPOSITORY = Path(__file__).resolve().parents[1]
LIBRARY = """
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return CODE + flags; }
"""
NO_GPU = "int cuDeviceGetCount(int *count) { *count = 0; return 0; }"
ONE_GPU = """
#include <string.h>
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA A", size); return device; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1 << 30; return device; }
int cuDeviceGetUuid(unsigned char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return device; }
"""


def doctor(folder: Path, **variables: str) -> dict[str, dict[str, str]]:
    own = {**os.environ, "container": "yes", "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(REPOSITORY / "src")}
    argv = [sys.executable, "-m", "worklog.cli", "doctor", "--json"]
    done = subprocess.run(argv, env={**own, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def library(folder: Path, version: int, code: int, gpus: str = NO_GPU) -> None:
    (folder / "cuda.c").write_text(LIBRARY + gpus)
    define = [f"-DVERSION={version}", f"-DCODE={code}"]
    subprocess.run(["gcc", "-shared", "-fPIC", *define, "-o", "libcuda.so.1", "cuda.c"], cwd=folder, check=True)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_driver_too_old_for_the_image(tmp_path: Path) -> None:
    library(tmp_path, 12080, 0)
    found = doctor(tmp_path, CUDA_VERSION="13.0.1")
    assert found["container"]["found"] == "inside one, for CUDA 13.0.1"
    assert found["mounted driver"]["state"] == "fault"
    assert found["mounted driver"]["found"].endswith("goes up to CUDA 12.8, and CUDA 13.0.1 is needed")
    assert found["mounted driver"]["remedy"] == "update the host's driver to 580 or later"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_run_says_that_the_driver_is_too_old(tmp_path: Path) -> None:
    """A driver library with one GPU, and a torch that is built for a newer CUDA."""
    library(tmp_path, 12080, 0, ONE_GPU)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\n")
    (tmp_path / "torch/__init__.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    program = (
        "from worklog.child import unmet\nfrom worklog.problem import Config, Variant\n"
        "print(unmet(Variant(slug='a', summary=''), Config(name='cuda', device='cuda')))"
    )
    own = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{REPOSITORY / 'src'}"}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    assert "goes up to CUDA 12.8, and CUDA 13.0 is needed: update the host's driver to 580 or later" in done.stdout
    assert done.stdout.endswith("--device cpu runs what a CPU can show\n")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_driver_that_was_updated_under_the_container(tmp_path: Path) -> None:
    library(tmp_path, 13000, container.MISMATCH)
    found = doctor(tmp_path, CUDA_VERSION="13.0.1")["mounted driver"]
    assert "is not of the host's driver" in found["found"]
    assert found["remedy"].startswith("start a new container")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_a_driver_that_fits(tmp_path: Path) -> None:
    library(tmp_path, 13010, 0)
    found = doctor(tmp_path, CUDA_VERSION="13.0.1")["mounted driver"]
    assert found["state"] == "ok"
    assert found["found"].endswith("up to CUDA 13.1")


def test_a_driver_that_is_not_mounted(tmp_path: Path) -> None:
    module = tmp_path / "version"
    module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\nGCC version: 13\n"
    )
    assert container.host_driver(module) == "580.95.05"
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 22:50:36 UTC 2025\n")
    assert container.host_driver(module) == "570.86.15"
    assert container.host_driver(tmp_path / "none") is None
    fault = container.driver_fault("13.0.1", "580.95.05", None)
    assert fault is not None
    assert "580.95.05 is not mounted" in fault[0]
    assert "--gpus all" in fault[1]
    fault = container.driver_fault("13.0.1", None, None)
    assert fault is not None
    assert fault[0] == "the host has no NVIDIA driver"


def test_a_driver_of_a_newer_cuda_and_an_image_without_cuda() -> None:
    assert container.driver_fault("13.0.1", "600.1", ((14, 0), 0)) is None
    assert container.driver_fault(None, "450.1", ((11, 0), 0)) is None


def test_counters_in_a_container_are_a_service_away(tmp_path: Path) -> None:
    """What Docker gives a user who is not root, even with --cap-add=SYS_ADMIN: no capability at all."""
    (tmp_path / "params").write_text("RmProfilingAdminOnly: 1\n")
    (tmp_path / "status").write_text("CapEff:\t0000000000000000\n")
    program = (
        "import sys; from pathlib import Path; from worklog.doctor import _counters\n"
        "print(_counters(Path(sys.argv[1]) / 'params', Path(sys.argv[1]) / 'status').remedy)"
    )
    own = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "container": "yes"}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=own, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("start the service that may read them, scripts/docker-run PROBLEM_ncu")
