"""CUDA C++ as shared libraries: compiled by nvcc on first use, kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HOPPER = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC")
"""-gencode and not -arch: the shorthand also makes a plain sm_90 pass, which has no wgmma."""


def find() -> str:
    """nvcc from PATH, CUDA_HOME or /usr/local/cuda. Raises FileNotFoundError."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise FileNotFoundError("nvcc is not on PATH, nor in CUDA_HOME")
    return found


def shared_library(
    name: str, sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = HOPPER
) -> Path:
    """Of these sources, from the cache if they, their headers and the flags were compiled before.

    Raises RuntimeError with nvcc's words, FileNotFoundError where there is no nvcc.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worklog"
    text = "".join([*flags, *(file.read_text() for file in (*sources, *headers))])
    library = cache / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    nvcc = find()
    cache.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run([nvcc, *flags, "-o", str(part), *map(str, sources)], capture_output=True, text=True)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise RuntimeError(f"nvcc failed: {(done.stderr or done.stdout).strip()[:500]}")
    part.replace(library)
    return library
