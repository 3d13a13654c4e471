"""Compiling CUDA C++: once, whole or not at all, and no compiler is said in words."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from worklog import nvcc

SOURCE = '#include "two.cuh"\n__global__ void kernel() {}\nextern "C" int two() { return TWO; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "two.cuh").write_text("#define TWO 2\n")
    file = tmp_path / "two.cu"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def here() -> None:
    try:
        nvcc.find()
    except FileNotFoundError:
        pytest.skip("needs nvcc")


@pytest.mark.usefixtures("here")
def test_compiled_once_and_anew_when_a_header_changes(source: Path) -> None:
    header = source.with_name("two.cuh")
    library = nvcc.shared_library("two", [source], [header])
    made = library.stat().st_mtime_ns
    assert ctypes.CDLL(str(library)).two() == 2
    assert nvcc.shared_library("two", [source], [header]) == library
    assert library.stat().st_mtime_ns == made
    header.write_text("#define TWO 3\n")
    other = nvcc.shared_library("two", [source], [header])
    assert other != library
    assert ctypes.CDLL(str(other)).two() == 3
    assert sorted(library.parent.iterdir()) == sorted((library, other))


@pytest.mark.usefixtures("here")
def test_what_does_not_compile_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("__global__ void kernel( {\n")
    with pytest.raises(RuntimeError, match=r"nvcc failed: .*two\.cu"):
        nvcc.shared_library("two", [source])
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_no_nvcc_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvcc is not on PATH"):
        nvcc.shared_library("two", [source])
