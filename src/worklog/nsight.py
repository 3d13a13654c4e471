"""Where nsys and ncu are on this machine, and whether they can do their work.

nsys and ncu are not on PyPI. They come with the CUDA toolkit and with their own packages, and an nsys is also inside
every Nsight Compute installation; that one needs two repairs before it can write a report (`importer_fault`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NVIDIA_FOLDERS = (Path("/opt/nvidia"), Path("/usr/local/cuda"))
PARAMS = Path("/proc/driver/nvidia/params")
CAP_SYS_ADMIN = 21
"""Bit of CapEff in /proc/self/status, from linux/capability.h."""
PERMISSION_PAGE = "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
PERMISSION_REMEDY = (
    "run as root (in this repository's images: scripts/docker-run PROBLEM_ncu; in others root with "
    "--cap-add=SYS_ADMIN), or let every user read the counters: put "
    f"'options nvidia NVreg_RestrictProfilingToAdminUsers=0' into /etc/modprobe.d/ and reboot ({PERMISSION_PAGE})"
)
NSYS_REMEDY = (
    "install NVIDIA's package nsight-systems-cli (https://developer.nvidia.com/nsight-systems), "
    "or name the binary in WORKLOG_NSYS"
)
NCU_REMEDY = (
    "install NVIDIA's package nsight-compute (https://developer.nvidia.com/nsight-compute), "
    "or name the binary in WORKLOG_NCU"
)


@dataclass(frozen=True)
class Tool:
    """A program, or None and the places that were searched."""

    path: Path | None
    why: str


def _newest(paths: Iterable[Path]) -> list[Path]:
    def version(path: Path) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", str(path))]

    return sorted((p for p in paths if p.is_file() and os.access(p, os.X_OK)), key=version, reverse=True)


def _find(name: str, variable: str, patterns: Sequence[str], folders: Sequence[Path]) -> Tool:
    if given := os.environ.get(variable):
        path = Path(given)
        if path.is_file() and os.access(path, os.X_OK):
            return Tool(path, f"named by {variable}")
        return Tool(None, f"{variable} names {given}, which is not a program")
    if on_path := shutil.which(name):
        return Tool(Path(on_path), "on PATH")
    for pattern in patterns:
        for folder in folders:
            if found := _newest(folder.glob(pattern)):
                return Tool(found[0], f"not on PATH, found under {folder}")
    return Tool(None, f"not on PATH and not under {' or '.join(map(str, folders))}")


def find_nsys(folders: Sequence[Path] = NVIDIA_FOLDERS) -> Tool:
    """$WORKLOG_NSYS, PATH, an Nsight Systems installation, and last the nsys inside an Nsight Compute installation."""
    patterns = (
        "nsight-systems*/*/bin/nsys",
        "nsight-systems*/*/target-linux-*/nsys",
        "nsight-systems*/bin/nsys",
        "bin/nsys",
        "nsight-compute*/*/host/target-linux-*/nsys",
        "nsight-compute*/host/target-linux-*/nsys",
    )
    return _find("nsys", "WORKLOG_NSYS", patterns, folders)


def find_ncu(folders: Sequence[Path] = NVIDIA_FOLDERS) -> Tool:
    """$WORKLOG_NCU, PATH, an Nsight Compute installation, a CUDA toolkit."""
    return _find("ncu", "WORKLOG_NCU", ("nsight-compute*/*/ncu", "nsight-compute*/ncu", "bin/ncu"), folders)


def library_path() -> str:
    """LD_LIBRARY_PATH for nsys: $WORKLOG_NSYS_LIBRARY_PATH before what is set already. May be empty."""
    parts = (os.environ.get("WORKLOG_NSYS_LIBRARY_PATH"), os.environ.get("LD_LIBRARY_PATH"))
    return ":".join(part for part in parts if part)


def version(tool: Path, environment: dict[str, str] | None = None) -> str | None:
    """What `tool --version` calls itself, e.g. "2025.3.1.90"; None if it does not run or does not say."""
    try:
        done = subprocess.run(
            [str(tool), "--version"], capture_output=True, text=True, timeout=30, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\b[Vv]ersion\s+(\d+(?:\.\d+)+)", done.stdout)
    return found.group(1) if found else None


def importer_fault(nsys: Path) -> str | None:
    """Why this nsys would record but write no .nsys-rep, with the remedy; None if nothing speaks against it.

    nsys hands its raw recording to `QdstrmImporter`, which it looks for in `../host-linux-x64/`. Inside Nsight Compute
    that folder has another name, and the importer needs libdw, which a slim image lacks.
    """
    host = nsys.resolve().parent.parent
    importer = host / "host-linux-x64" / "QdstrmImporter"
    faults = []
    if not importer.is_file():
        elsewhere = sorted(host.glob("linux-desktop-*/QdstrmImporter"))
        if not elsewhere:
            return None
        importer = elsewhere[-1]
        link = host / "host-linux-x64"
        faults.append(f"nsys looks for its importer in {link}, which is missing: ln -s {importer.parent.name} {link}")
    if missing := missing_libraries(importer):
        faults.append(
            f"its importer lacks {', '.join(missing)}: apt-get install libdw1 libelf1 (they hold libdw and libelf), or "
            "unpack them (dpkg -x PACKAGE.deb FOLDER) and set WORKLOG_NSYS_LIBRARY_PATH=FOLDER/usr/lib/x86_64-linux-gnu"
        )
    return "; ".join(faults) or None


def missing_libraries(program: Path) -> list[str]:
    """Shared libraries for want of which `program` does not start; empty if it starts.

    The loader stops at the first one; ldd names the others. The program's own folder is searched too, as nsys does.
    """
    path = f"{program.parent}:{library_path()}".rstrip(":")
    own = {**os.environ, "LC_ALL": "C", "LD_LIBRARY_PATH": path}
    first = re.findall(r"error while loading shared libraries: ([^:\s]+)", _said([str(program), "--help"], own))
    if not first:
        return []
    return list(dict.fromkeys(first + re.findall(r"^\s*(\S+) => not found", _said(["ldd", str(program)], own), re.M)))


def _said(argv: Sequence[str], own: dict[str, str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=own, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def counters_denied(params: Path = PARAMS, status: Path = Path("/proc/self/status")) -> str | None:
    """Why ncu would end with ERR_NVGPUCTRPERM here, with the remedy; None if nothing speaks against it.

    The driver refuses GPU performance counters to users without CAP_SYS_ADMIN when RmProfilingAdminOnly is 1. Root
    inside a container often has not got that capability.
    """
    try:
        restricted = re.search(r"^RmProfilingAdminOnly:\s*1\b", params.read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    if not restricted or _has_capability(status, CAP_SYS_ADMIN):
        return None
    return f"the driver lets only administrators read GPU counters (ERR_NVGPUCTRPERM): {PERMISSION_REMEDY}"


def _has_capability(status: Path, bit: int) -> bool:
    try:
        effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status.read_text(), flags=re.MULTILINE)
    except OSError:
        return False
    return effective is not None and bool(int(effective.group(1), 16) >> bit & 1)
