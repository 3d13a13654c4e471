"""A container's view of its host: whether this is one, and whether the NVIDIA driver mounted into it fits."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""First driver branch that runs programs of a CUDA major version: NVIDIA, "CUDA Compatibility", table 1."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
COUNTERS = (
    "start the service that may read them, scripts/docker-run PROBLEM_ncu, or let every user of the host read them "
    "(DOCKER_README.md, GPU counters); --cap-add=SYS_ADMIN alone gives them to root"
)
"""What lets ncu read GPU counters in one of our images."""
MISMATCH = 803
"""CUDA_ERROR_SYSTEM_DRIVER_MISMATCH of cuda.h."""


def inside() -> bool:
    """Docker and Podman leave a file; Kubernetes and systemd set a variable."""
    files = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return any(f.exists() for f in files) or any(v in os.environ for v in ("container", "KUBERNETES_SERVICE_HOST"))


def host_driver(file: Path = KERNEL_MODULE) -> str | None:
    """Version of the host's kernel module, e.g. "580.95.05", which /proc shows in containers too; None without one."""
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)", file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found.group(1) if found else None


def library() -> tuple[tuple[int, int], int] | None:
    """(CUDA version that the libcuda.so.1 found here supports, what its cuInit returns); None where there is none.

    Makes no context.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return (version.value // 1000, version.value % 1000 // 10), cuda.cuInit(0)


def driver_fault(
    needed: str | None, host: str | None, seen: tuple[tuple[int, int], int] | None
) -> tuple[str, str] | None:
    """What is wrong with the mounted driver, and the remedy; None if nothing is.

    `needed`: the CUDA version that the image or torch is built for, e.g. "13.0.1"; None or "": not compared.
    `host`, `seen`: what `host_driver` and `library` return.
    """
    if seen is None and host is None:
        return "the host has no NVIDIA driver", "run on a host with an NVIDIA GPU and driver; the CPU part works here"
    if seen is None:
        remedy = "start with --gpus all; where Docker refuses that, install nvidia-container-toolkit on the host"
        return f"the host's driver {host} is not mounted: no libcuda.so.1", remedy
    supported, code = seen
    if code == MISMATCH:
        remedy = "start a new container; if that fails too, reboot the host: its driver was updated while it ran"
        return f"the mounted libcuda.so.1 is not of the host's driver {host or ''}".rstrip(), remedy
    major = int(needed.split(".")[0]) if needed else 0
    if supported[0] < major:
        branch = OLDEST_DRIVER.get(major)
        newer = f"{branch} or later" if branch else f"one for CUDA {major}"
        found = f"driver {host or 'of unknown version'} goes up to CUDA {supported[0]}.{supported[1]}"
        return f"{found}, and CUDA {needed} is needed", f"update the host's driver to {newer}"
    return None
