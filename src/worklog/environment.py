"""What a run ran on: source, hardware, clocks, software. Nothing here imports torch or makes a CUDA context."""

from __future__ import annotations

import csv
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worklog.nsight import find_ncu, find_nsys, library_path, version
from worklog.problem import Device, ProblemError, root
from worklog.record import Clocks, Gpu, Hardware, Source


def source() -> Source:
    """The commit that runs, and whether tracked or new files differ from it.

    $WORKLOG_COMMIT and $WORKLOG_DIRTY (0 or 1) speak where there is no .git (a copied tree, an image). reports/ is left
    out: it holds results, and a second run is not made dirty by the first one's record.
    """
    image = os.environ.get("WORKLOG_IMAGE") or None
    if commit := os.environ.get("WORKLOG_COMMIT"):
        dirty = os.environ.get("WORKLOG_DIRTY")
        return Source(commit=commit, dirty=None if dirty not in ("0", "1") else dirty == "1", image=image)
    try:
        at = root()
    except ProblemError:
        return Source(commit=None, dirty=None, image=image)
    commit = _git(at, "rev-parse", "HEAD")
    status = _git(at, "status", "--porcelain", "--", ".", ":!reports")
    return Source(commit=commit or None, dirty=None if not commit or status is None else status != "", image=image)


def _git(at: Path, *arguments: str) -> str | None:
    if not (at / ".git").exists() or not shutil.which("git"):
        return None
    done = subprocess.run(["git", "-C", str(at), *arguments], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None


def hardware(device: Device) -> Hardware:
    """The host, and for "cuda" the GPUs that CUDA shows to this process with the state of the first one.

    `start` is read now; the caller fills `end`.
    """
    host = {"cpu": _cpu_name(), "cpu_count": _cpu_count(), "memory_bytes": _memory_bytes()}
    if device == "cpu":
        return Hardware(**host)  # type: ignore[arg-type]
    seen = _cuda_devices()
    state = _nvml_state(seen[0][0] if seen else None) or _smi_state(seen[0][0] if seen else None) or {}
    return Hardware(
        **host,  # type: ignore[arg-type]
        gpus=[gpu for _, gpu in seen],
        driver=state.get("driver"),
        power_limit_w=state.get("power_limit_w"),
        mig=state.get("mig"),
        start=state.get("clocks"),
    )


def clocks() -> Clocks | None:
    """SM and memory clock, power and temperature of the first visible GPU now; None without an NVIDIA driver."""
    seen = _cuda_devices()
    uuid = seen[0][0] if seen else None
    state = _nvml_state(uuid) or _smi_state(uuid)
    return state["clocks"] if state else None


def gpu_free_bytes() -> int | None:
    """Free memory of the first visible GPU; None without an NVIDIA driver."""
    seen = _cuda_devices()
    uuid = seen[0][0] if seen else None
    state = _nvml_state(uuid) or _smi_state(uuid)
    return state["free_bytes"] if state else None


def software(packages: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions by name: python, torch, cuda, cudnn, triton, nsys, ncu and each of `packages`. None: not here."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["torch"], found["cuda"] = torch_version()
    found["cudnn"] = _first(f"nvidia-cudnn-cu{major}" for major in (14, 13, 12))
    found["triton"] = _first(("triton", "pytorch-triton", "triton-windows"))
    nsys, ncu = find_nsys().path, find_ncu().path
    found["nsys"] = version(nsys, {**os.environ, "LD_LIBRARY_PATH": library_path()}) if nsys else None
    found["ncu"] = version(ncu) if ncu else None
    for name in packages:
        found.setdefault(name, _first((name,)))
    return found


def torch_version() -> tuple[str | None, str | None]:
    """(torch, the CUDA it was built for), read from torch/version.py without the seconds that `import torch` takes."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / "version.py"
        if file.is_file():
            names = runpy.run_path(str(file))
            return names.get("__version__"), names.get("cuda")
    return None, None


def _first(distributions: Iterable[str]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _cpu_count() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory_bytes() -> int:
    """Memory that a new process can take: what the kernel calls available, within the cgroup's limit."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
    available = int(found.group(1)) << 10 if found else _memory_bytes()
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def _cuda_devices() -> list[tuple[str, Gpu]]:
    """(UUID, properties) of each GPU that CUDA_VISIBLE_DEVICES leaves, asked of the driver library.

    cuInit and the attribute calls make no context, so they take no GPU memory from what is measured. Attribute numbers
    are those of CUdevice_attribute in cuda.h.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    if cuda.cuInit(0) != 0:
        return []
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for ordinal in range(count.value):
        device, total = ctypes.c_int(), ctypes.c_size_t()
        name, uuid = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        cuda.cuDeviceGetUuid(uuid, device)
        sm_count, l2_bytes, major, minor = (_cuda_attribute(cuda, device, n) for n in (16, 38, 75, 76))
        gpu = Gpu(
            name=name.value.decode(),
            memory_bytes=total.value,
            sm_count=sm_count,
            compute_capability=f"{major}.{minor}",
            l2_bytes=l2_bytes,
        )
        h = bytes(uuid).hex()
        found.append((f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}", gpu))
    return found


def _cuda_attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> int:
    value = ctypes.c_int()
    if (code := cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)) != 0:
        raise ProblemError(f"The CUDA driver does not answer for device attribute {number} (error {code}).")
    return value.value


def _nvml_state(uuid: str | None) -> dict[str, Any] | None:
    """Driver, power limit, MIG mode and clocks through nvidia-ml-py; None without that package or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None

    def ask(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except pynvml.NVMLError:
            return None

    try:
        gpu = (uuid and ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)) or ask(pynvml.nvmlDeviceGetHandleByIndex, 0)
        if gpu is None:
            return None
        power, limit = ask(pynvml.nvmlDeviceGetPowerUsage, gpu), ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu)
        mig = ask(pynvml.nvmlDeviceGetMigMode, gpu)
        driver = ask(pynvml.nvmlSystemGetDriverVersion)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, gpu)
        return {
            "free_bytes": None if memory is None else int(memory.free),
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "power_limit_w": None if limit is None else limit / 1e3,
            "mig": None if mig is None else bool(mig[0]),
            "clocks": Clocks(
                sm_mhz=ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
                memory_mhz=ask(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
                power_w=None if power is None else power / 1e3,
                temperature_c=ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
            ),
        }
    finally:
        pynvml.nvmlShutdown()


SMI_FIELDS = (
    "uuid,driver_version,clocks.sm,clocks.mem,power.draw,enforced.power.limit,temperature.gpu,mig.mode.current,"
    "memory.free"
)


def _smi_state(uuid: str | None) -> dict[str, Any] | None:
    """The same by `nvidia-smi`, for hosts without nvidia-ml-py."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        return None
    argv = [smi, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = SMI_FIELDS.split(",")
    read = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    rows = [dict(zip(names, row, strict=True)) for row in read if len(row) == len(names)]
    row = next((r for r in rows if r["uuid"] == uuid), rows[0] if rows else None)
    if done.returncode != 0 or row is None:
        return None

    def number(name: str) -> float | None:
        return float(row[name]) if re.fullmatch(r"-?\d+(\.\d+)?", row[name]) else None

    def whole(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    free_mib = whole("memory.free")
    return {
        "free_bytes": None if free_mib is None else free_mib << 20,
        "driver": row["driver_version"],
        "power_limit_w": number("enforced.power.limit"),
        "mig": {"Enabled": True, "Disabled": False}.get(row["mig.mode.current"]),
        "clocks": Clocks(
            sm_mhz=whole("clocks.sm"),
            memory_mhz=whole("clocks.mem"),
            power_w=number("power.draw"),
            temperature_c=whole("temperature.gpu"),
        ),
    }
