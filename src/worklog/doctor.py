"""`worklog doctor`: what is here, what each missing thing disables, and how to get it."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from worklog import container, environment, nsight
from worklog.problem import ProblemError, load, names, packages_folder, root

State = Literal["ok", "missing", "fault", "unknown"]
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
LEAST_DISK_BYTES, LEAST_MEMORY_BYTES = 2 << 30, 4 << 30
"""What a CPU run with its compile caches takes, rounded up."""


@dataclass(frozen=True)
class Check:
    """One line of the table. `disables` and `remedy` are empty where the state is ok."""

    name: str
    state: State
    found: str
    disables: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    checks: list[Check]

    @property
    def cpu_run(self) -> bool:
        """Python and torch are enough for the CPU part of every problem."""
        return all(check.state == "ok" for check in self.checks if check.name in ("python", "torch"))

    @property
    def gpu_run(self) -> bool:
        needed = ("python", "torch", "gpu", "torch sees the gpu")
        return all(check.state == "ok" for check in self.checks if check.name in needed)

    def as_dict(self) -> dict[str, Any]:
        return {"cpu_run": self.cpu_run, "gpu_run": self.gpu_run, "checks": [asdict(check) for check in self.checks]}


def diagnose() -> Diagnosis:
    """Look at everything; takes the seconds of one `import torch`, in a process of its own."""
    torch = _import_torch()
    checks = [_python(), _torch(torch), _gpu(), _torch_sees_gpu(torch), _gpu_readings()]
    checks += [_nsys(), _ncu(), _counters(), *_python_packages(), *_side_packages()]
    checks += [*_docker(), *_container(torch), _memory(), _disk()]
    return Diagnosis(checks)


def table(diagnosis: Diagnosis) -> Table:
    """One row a check; under what is not ok, what it disables and the remedy."""
    colours = {"ok": "green", "missing": "yellow", "fault": "red", "unknown": "yellow"}
    what = "CPU and GPU runs" if diagnosis.gpu_run else "CPU runs" if diagnosis.cpu_run else "no runs"
    shown = Table(title=f"This machine: {what}", box=None, title_justify="left", pad_edge=False)
    for column in ("what", "state", "found"):
        shown.add_column(column, overflow="fold")
    for check in diagnosis.checks:
        found = Text(check.found)
        if check.state != "ok":
            found.append(f"\nwithout it: {check.disables}\nremedy: {check.remedy}", style="dim")
        shown.add_row(check.name, Text(check.state, style=colours[check.state]), found)
    return shown


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("python", "fault", version, "everything", "use Python 3.11 or later")
    return Check("python", "ok", f"{version} at {sys.executable}")


def _import_torch() -> dict[str, Any] | str:
    """What torch says of itself, or why it does not import."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    program = (
        "import json, torch\n"
        "said = {'version': torch.__version__, 'cuda': torch.version.cuda, 'available': torch.cuda.is_available()}\n"
        "try:\n    torch.cuda.init()\nexcept Exception as error:\n    said['why'] = str(error).splitlines()[0]\n"
        "print(json.dumps(said))"
    )
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "import torch takes more than 120 s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or ["import torch ends without a word"])[-1]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _torch(torch: dict[str, Any] | str) -> Check:
    remedy = "pip install -r requirements/base.txt, or torch for your CUDA from https://pytorch.org"
    if isinstance(torch, str):
        return Check("torch", "missing", torch, "every run and capture; pages and traces can still be read", remedy)
    if tuple(int(n) for n in re.findall(r"\d+", torch["version"])[:2]) < OLDEST_TORCH:
        return Check("torch", "fault", f"{torch['version']}, older than 2.11", "every run and capture", remedy)
    return Check("torch", "ok", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")


def _gpu() -> Check:
    disables = "GPU runs, nsys, ncu, memory snapshots; the CPU part of each problem and the recorded traces still work"
    try:
        hardware = environment.hardware("cuda")
    except ProblemError as error:
        return Check("gpu", "fault", str(error), disables, "reboot, or reinstall the NVIDIA driver")
    if not hardware.gpus:
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            found = "an NVIDIA driver, but libcuda.so.1 shows no GPU to this process"
            remedy = (
                "look at CUDA_VISIBLE_DEVICES and at LD_LIBRARY_PATH (it must reach libcuda.so.1, in some containers "
                "/usr/local/nvidia/lib64); in Docker start with --gpus all"
            )
            return Check("gpu", "fault", found, disables, remedy)
        remedy = "run on a machine with an NVIDIA GPU and driver; in Docker start with --gpus all"
        return Check("gpu", "missing", "no NVIDIA driver", disables, remedy)
    first, free = hardware.gpus[0], environment.gpu_free_bytes()
    found = f"{len(hardware.gpus)} x {first.name} ({first.memory_bytes / 2**30:.0f} GiB"
    found += f", {free / 2**30:.0f} GiB free)" if free is not None else ")"
    found += f", driver {hardware.driver or 'version unknown'}" + (", MIG on" if hardware.mig else "")
    return Check("gpu", "ok", found)


def _torch_sees_gpu(torch: dict[str, Any] | str) -> Check:
    name, disables = "torch sees the gpu", "GPU runs"
    if isinstance(torch, str):
        return Check(name, "unknown", "torch does not import", disables, "see torch")
    if torch["available"]:
        return Check(name, "ok", f"yes, built for CUDA {torch['cuda']}")
    remedy = "install a torch built for CUDA (https://pytorch.org)" if torch["cuda"] is None else "see gpu"
    return Check(name, "missing", torch.get("why", "no"), disables, remedy)


def _gpu_readings() -> Check:
    """Who reads clocks, power and temperature."""
    if importlib.util.find_spec("pynvml"):
        return Check("clocks and power", "ok", "nvidia-ml-py")
    if shutil.which("nvidia-smi"):
        return Check("clocks and power", "ok", "nvidia-smi (nvidia-ml-py is not installed, energy is not measured)")
    disables = "clocks, power limit and energy in records"
    return Check("clocks and power", "missing", "no nvidia-ml-py, no nvidia-smi", disables, "pip install nvidia-ml-py")


def _nsys() -> Check:
    disables = "profile --with nsys; recorded .sqlite files can still be read"
    tool = nsight.find_nsys()
    if tool.path is None:
        return Check("nsys", "missing", tool.why, disables, nsight.NSYS_REMEDY)
    version = nsight.version(tool.path, {**os.environ, "LD_LIBRARY_PATH": nsight.library_path()})
    found = f"{version or 'version unknown'}, {tool.path} ({tool.why})"
    if fault := nsight.importer_fault(tool.path):
        return Check("nsys", "fault", found, disables, fault)
    if version is None:
        return Check("nsys", "fault", found, disables, f"`{tool.path} --version` fails: run it to see why")
    return Check("nsys", "ok", found)


def _ncu() -> Check:
    disables = "profile --with ncu; recorded .ncu-rep files can still be read"
    tool = nsight.find_ncu()
    if tool.path is None:
        return Check("ncu", "missing", tool.why, disables, nsight.NCU_REMEDY)
    version = nsight.version(tool.path)
    found = f"{version or 'version unknown'}, {tool.path} ({tool.why})"
    if version is None:
        return Check("ncu", "fault", found, disables, f"`{tool.path} --version` fails: run it to see why")
    return Check("ncu", "ok", found)


def _counters(params: Path = nsight.PARAMS, status: Path = Path("/proc/self/status")) -> Check:
    name, disables = "gpu counters", "profile --with ncu"
    if denied := nsight.counters_denied(params, status):
        remedy = container.COUNTERS if container.inside() else denied
        return Check(name, "fault", "denied to this user (ERR_NVGPUCTRPERM)", disables, remedy)
    if not params.exists():
        return Check(name, "unknown", f"{params} is not here", "perhaps profile --with ncu", "try it")
    return Check(name, "ok", "nothing in the driver's settings forbids them")


def _python_packages() -> Iterator[Check]:
    for module, distribution, disables in (
        ("ncu_report", "ncu-report", "reading .ncu-rep files"),
        ("pandas", "pandas", "tables of traces and notebooks"),
        ("matplotlib", "matplotlib", "figures of pages"),
    ):
        if importlib.util.find_spec(module) is None:
            yield Check(distribution, "missing", "not installed", disables, f"pip install {distribution}")


def _side_packages() -> Iterator[Check]:
    """Distributions that variants need in folders of their own, e.g. .packages/torchao-0.13.0/."""
    try:
        problems = [load(name) for name in names()]
        folder = packages_folder()
    except ProblemError as error:
        yield Check("problems", "fault", str(error), "the problems", "run inside a checkout, or set WORKLOG_ROOT")
        return
    except Exception as error:  # a repro.py that does not import is the finding, not an accident of doctor
        yield Check("problems", "fault", f"{type(error).__name__}: {error}", "the problems", "repair that repro.py")
        return
    needs: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        for variant in problem.variants:
            for need in variant.needs.items():
                needs.setdefault(need, []).append(f"{problem.name}/{variant.slug}")
    for (name, version), users in sorted(needs.items()):
        place = folder / f"{name}-{version}"
        if any(place.glob(f"{name.replace('-', '_')}*")):
            yield Check(f"{name} {version}", "ok", str(place))
        else:
            disables = ", ".join(users[:3]) + (f" and {len(users) - 3} more" if len(users) > 3 else "")
            remedy = f"pip install --no-deps --target {place} {name}=={version}"
            yield Check(f"{name} {version}", "missing", f"no {place}", disables, remedy)


def _docker() -> Iterator[Check]:
    disables = "docker compose run; the same runs work without Docker"
    if not shutil.which("docker"):
        if container.inside():
            return
        yield Check("docker", "missing", "not on PATH", disables, "https://docs.docker.com/engine/install")
        return
    info = _said("docker", "info", "--format", "{{json .}}")
    said = json.loads(info) if info and info.startswith("{") else {}
    if not said.get("ServerVersion"):
        remedy = "start it (systemctl start docker), or join the group docker"
        yield Check("docker", "fault", "the client, but no daemon answers", disables, remedy)
        return
    yield Check("docker", "ok", said["ServerVersion"])
    compose = _said("docker", "compose", "version", "--short")
    if compose is None:
        yield Check("docker compose", "missing", "no such plugin", disables, "install docker-compose-plugin")
    else:
        yield Check("docker compose", "ok", compose)
    if "nvidia" in said.get("Runtimes", {}) or (said.get("CDISpecDirs") and any(Path("/etc/cdi").glob("nvidia*"))):
        yield Check("nvidia container toolkit", "ok", "Docker knows it")
    else:
        remedy = "install nvidia-container-toolkit"
        yield Check("nvidia container toolkit", "missing", "Docker has no nvidia runtime", "GPUs inside Docker", remedy)


def _said(*argv: str) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _container(torch: dict[str, Any] | str) -> Iterator[Check]:
    """Inside of one: whether the driver that the host mounts into it fits the image."""
    if not container.inside():
        yield Check("container", "ok", "not inside one")
        return
    needed = os.environ.get("CUDA_VERSION") or (torch["cuda"] if isinstance(torch, dict) else None)
    host, seen = container.host_driver(), container.library()
    yield Check("container", "ok", "inside one" + (f", for CUDA {needed}" if needed else ""))
    if fault := container.driver_fault(needed, host, seen):
        yield Check("mounted driver", "fault" if host or seen else "missing", fault[0], "GPU runs in it", fault[1])
    elif seen:
        yield Check("mounted driver", "ok", f"{host or 'version unknown'}, up to CUDA {seen[0][0]}.{seen[0][1]}")


def _memory() -> Check:
    available = environment.available_memory_bytes()
    found = f"{available / 2**30:.1f} GiB available"
    if available < LEAST_MEMORY_BYTES:
        return Check("memory", "fault", found, "large CPU configs", "close programs, or give the container more")
    return Check("memory", "ok", found)


def _disk() -> Check:
    try:
        place = root()
    except ProblemError:
        place = Path.cwd()
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free at {place}"
    if free < LEAST_DISK_BYTES:
        return Check("disk", "fault", found, "captures and compile caches", "free some space, or use --out elsewhere")
    return Check("disk", "ok", found)
