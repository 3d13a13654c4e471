from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from worklog import nsight


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose PATH and variables name no tool."""
    for variable in ("WORKLOG_NSYS", "WORKLOG_NCU"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.mark.usefixtures("bare")
def test_nsys_inside_the_newest_nsight_compute_is_found(tmp_path: Path) -> None:
    executable(tmp_path / "nsight-compute/2025.3.1/host/target-linux-x64/nsys")
    newest = executable(tmp_path / "nsight-compute/2025.10.0/host/target-linux-x64/nsys")
    found = nsight.find_nsys([tmp_path])
    assert found.path == newest
    assert "not on PATH, found under" in found.why


@pytest.mark.usefixtures("bare")
def test_nsight_systems_goes_before_nsight_compute(tmp_path: Path) -> None:
    executable(tmp_path / "nsight-compute/2026.1.0/host/target-linux-x64/nsys")
    proper = executable(tmp_path / "nsight-systems/2024.6.2/bin/nsys")
    assert nsight.find_nsys([tmp_path]).path == proper


@pytest.mark.usefixtures("bare")
def test_ncu_is_found_and_its_absence_explained(tmp_path: Path) -> None:
    assert nsight.find_ncu([tmp_path]).path is None
    assert str(tmp_path) in nsight.find_ncu([tmp_path]).why
    ncu = executable(tmp_path / "nsight-compute/2025.3.1/ncu")
    assert nsight.find_ncu([tmp_path]).path == ncu


def test_path_goes_before_folders_and_the_variable_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, on_path = executable(tmp_path / "named" / "ncu"), executable(tmp_path / "bin" / "ncu")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("WORKLOG_NCU", raising=False)
    assert nsight.find_ncu([tmp_path]).path == on_path
    monkeypatch.setenv("WORKLOG_NCU", str(named))
    assert nsight.find_ncu([tmp_path]).path == named
    named.chmod(0o600)
    assert nsight.find_ncu([tmp_path]).path is None


def test_both_repairs_are_named_then_each_is_done(nsight_compute: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys, link = nsight_compute / "target-linux-x64" / "nsys", nsight_compute / "host-linux-x64"
    fault = nsight.importer_fault(nsys)
    assert fault is not None
    assert f"ln -s linux-desktop-glibc_2_11_3-x64 {link}" in fault
    assert "lacks libdw.so.1: apt-get install libdw1 libelf1" in fault
    assert "WORKLOG_NSYS_LIBRARY_PATH=" in fault

    link.symlink_to("linux-desktop-glibc_2_11_3-x64")
    fault = nsight.importer_fault(nsys)
    assert fault is not None
    assert "ln -s" not in fault
    assert "libdw.so.1" in fault

    libraries = nsight_compute.parent / "libraries"
    libraries.mkdir()
    (libraries / "libdw.so.1").touch()
    monkeypatch.setenv("WORKLOG_NSYS_LIBRARY_PATH", str(libraries))
    assert nsight.importer_fault(nsys) is None


def test_an_nsys_without_an_importer_near_it_is_not_blamed(tmp_path: Path) -> None:
    assert nsight.importer_fault(executable(tmp_path / "bin" / "nsys")) is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_all_missing_libraries_of_a_real_program_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("libabsent_a.so.1", "libabsent_b.so.2"):
        (tmp_path / "empty.c").write_text(f"int f_{name[10]}(void) {{ return 0; }}")
        subprocess.run(
            ["gcc", "-shared", f"-Wl,-soname,{name}", "-o", f"libraries/{name}", "empty.c"], cwd=tmp_path, check=True
        )
    (tmp_path / "main.c").write_text("int f_a(void); int f_b(void); int main(void) { return f_a() + f_b(); }")
    argv = ["gcc", "main.c", "-Llibraries", "-l:libabsent_a.so.1", "-l:libabsent_b.so.2", "-o", "importer"]
    subprocess.run(argv, cwd=tmp_path, check=True)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("WORKLOG_NSYS_LIBRARY_PATH", raising=False)
    assert set(nsight.missing_libraries(tmp_path / "importer")) == {"libabsent_a.so.1", "libabsent_b.so.2"}
    monkeypatch.setenv("WORKLOG_NSYS_LIBRARY_PATH", str(libraries))
    assert nsight.missing_libraries(tmp_path / "importer") == []


@pytest.mark.parametrize(
    ("params", "capabilities", "denied"),
    [
        ("RmProfilingAdminOnly: 1\n", "0000000000000000", True),
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", True),  # root in a Docker container: no CAP_SYS_ADMIN
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", False),
        ("ModifyDeviceFiles: 1\nRmProfilingAdminOnly: 0\n", "0000000000000000", False),
        (None, "0000000000000000", False),
    ],
)
def test_counter_permission(tmp_path: Path, params: str | None, capabilities: str, denied: bool) -> None:
    file, status = tmp_path / "params", tmp_path / "status"
    if params is not None:
        file.write_text(params)
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    why = nsight.counters_denied(file, status)
    assert (why is not None) == denied
    if why is not None:
        assert "ERR_NVGPUCTRPERM" in why
        assert "--cap-add=SYS_ADMIN" in why


def test_version(nsight_compute: Path, tmp_path: Path) -> None:
    assert nsight.version(nsight_compute / "target-linux-x64" / "nsys") == "2025.3.1.90"
    assert nsight.version(tmp_path / "none") is None
    assert nsight.version(executable(tmp_path / "silent")) is None
