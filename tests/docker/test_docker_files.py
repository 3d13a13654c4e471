"""What holds of every image before it is built: pins, lint, compose files, the scripts, the page's commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from building import REPOSITORY, lines
from declared import DOCKERFILES, PROBLEMS, instructions, pins, services


def requirements(*names: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        for package, version in re.findall(
            r"^([\w-]+)==(\S+)$", (REPOSITORY / "requirements" / name).read_text(), re.M
        ):
            found.setdefault(package, set()).add(version)
    return found


@pytest.fixture(params=DOCKERFILES, ids=lambda file: str(file.relative_to(REPOSITORY)))
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_every_pin_of_versions_env_is_the_one_in_use() -> None:
    pinned = pins()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", (REPOSITORY / "docker/base.Dockerfile").read_text(), re.M))
    for name in ("CUDA_IMAGE", "PYTHON_VERSION", "NSIGHT_SYSTEMS_VERSION", "NSIGHT_COMPUTE_VERSION"):
        assert arguments.pop(name) == pinned.pop(name), name
    assert arguments == {}
    python = requirements("base.txt", "notebooks.txt", "side-by-side.txt")
    assert python["torch"] == {pinned.pop("TORCH_VERSION")}
    assert python["torchao"] == set(pinned.pop("TORCHAO_VERSIONS").split())
    assert python["jupyterlab"] == {pinned.pop("JUPYTERLAB_VERSION")}
    assert pinned == {}, "a pin that nothing uses"


def test_the_cuda_image_is_pinned_by_digest() -> None:
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-devel-ubuntu[\d.]+@sha256:[0-9a-f]{64}", pins()["CUDA_IMAGE"])


def test_the_folders_of_nsight_are_those_of_the_pins() -> None:
    base = (REPOSITORY / "docker/base.Dockerfile").read_text()
    for tool in ("systems", "compute"):
        short = re.match(r"\d+\.\d+\.\d+", pins()[f"NSIGHT_{tool.upper()}_VERSION"])
        assert short
        found = set(re.findall(rf"nsight-{tool}[-/]([\d.]+\d)", base))
        assert found == {short[0]}


def test_hadolint(dockerfile: Path) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "pip install -r requirements/dev.txt"
    done = subprocess.run([hadolint, "--no-color", dockerfile], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_a_dockerfile_may_not_do(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    assert not [line for line in found if line.startswith("ADD ")]
    for line in found:
        assert not re.search(r":latest\b|\b(curl|wget|git clone|ssh|gpg|apt-key)\b", line), line
        if line.startswith(("ARG", "ENV")):
            assert not re.search(r"(?i)password|secret|token|_key\b", line), line
        if "apt-get install" in line:
            packages = re.sub(r".*apt-get install((?: --[\w-]+)*) ", "", line).split(" && ")[0].split()
            assert packages
            assert [p for p in packages if "=" not in p] == [], line
        for words in re.findall(r"pip install ([^&]+)", line):
            assert re.fullmatch(r"--no-cache-dir --requirement [\w/.]+\s*", words), line
    sources = [line.removeprefix("FROM ") for line in found if line.startswith("FROM ")]
    assert all(re.fullmatch(r"\$\{\w+\}", source) for source in sources)
    for name in sources:
        (default,) = re.findall(rf"^ARG {name[2:-1]}=(\S+)$", dockerfile.read_text(), re.M)
        assert ":" in default, "a tag"
    assert [line for line in found if line.startswith("USER ")][-1] == "USER 1000:1000"


@pytest.mark.parametrize("file", [f for f in DOCKERFILES if f.name.startswith("Dockerfile")], ids=str)
def test_a_problem_installs_before_its_code_is_copied(file: Path) -> None:
    found = instructions(file)
    code = next(i for i, line in enumerate(found) if line.startswith("COPY src/"))
    installs = [i for i, line in enumerate(found) if line.startswith("RUN ")]
    assert installs
    assert max(installs) < code
    before = [line for line in found[:code] if line.startswith("COPY ")]
    assert all(re.search(r"requirements[\w/.-]* |scripts/side-by-side ", line + " ") for line in before[:-1])
    assert found.index("ARG COMMIT=") > code, "a commit is no reason to install again"
    assert found[-1].startswith('ENTRYPOINT ["python", "problems/')


def test_the_first_layer_is_the_same_in_every_image() -> None:
    images = [instructions(file) for file in DOCKERFILES if file.name != "base.Dockerfile"]
    shared = images[0][
        : next(i for i, line in enumerate(images[0]) if "requirements/base.txt" in line and "RUN" in line) + 1
    ]
    assert len(shared) == 6
    assert all(image[: len(shared)] == shared for image in images)


class _Overrides(yaml.SafeLoader):
    """Knows the tag !reset of compose files."""


_Overrides.add_constructor("!reset", lambda *_: None)


def test_every_problem_is_a_service() -> None:
    found = services()
    without_gpu = yaml.load((REPOSITORY / "docker/compose.cpu.yaml").read_text(), _Overrides)["services"]
    assert set(found) == {"base", "notebook", *PROBLEMS, *(f"{name}_ncu" for name in PROBLEMS)}
    assert without_gpu == {name: {"deploy": None} for name in ("notebook", *PROBLEMS)}
    for name in PROBLEMS:
        service = found[name]
        assert service["build"]["dockerfile"] == f"problems/{name}/Dockerfile"
        (gpu,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert gpu == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert {v["target"] for v in service["volumes"]} == {"/worklog/out", "/cache"}
        assert service["shm_size"]


def test_the_ncu_service_alone_has_a_capability() -> None:
    for name, service in services().items():
        if name.endswith("_ncu"):
            assert service["profiles"] == ["ncu"]
            assert service["cap_add"] == ["SYS_ADMIN", "SETUID", "SETGID"]
        else:
            assert "cap_add" not in service
            assert name == "base" or service["user"] == "${WORKLOG_UID:-1000}:${WORKLOG_GID:-1000}"
        assert "privileged" not in service
        assert name == "base" or service["cap_drop"] == ["ALL"]
        assert service["image"].endswith(":local")


def test_the_notebook_is_for_this_host_alone() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {"notebook": ["127.0.0.1:${WORKLOG_PORT:-8888}:${WORKLOG_PORT:-8888}"]}
    assert services()["notebook"]["command"] == ["--port=${WORKLOG_PORT:-8888}"]
    assert "ServerApp.token" not in (REPOSITORY / "docker/notebook.Dockerfile").read_text()


@pytest.mark.images
def test_docker_compose_accepts_the_files(docker: dict[str, str], checkout: Path) -> None:
    """With a new problem in them; as the caller's user."""
    own = {**docker, "WORKLOG_UID": "4242", "WORKLOG_GID": "4343"}
    compose = ("docker", "compose")
    whole = json.loads("\n".join(lines(*compose, "--profile", "*", "config", "--format", "json", cwd=checkout, **own)))
    files = ("-f", "docker/compose.yaml", "-f", "docker/compose.cpu.yaml")
    cpu = json.loads("\n".join(lines(*compose, *files, "config", "--format", "json", cwd=checkout, **own)))
    assert whole["name"] == cpu["name"] == "worklog"
    for name in (*PROBLEMS, "row_norms"):
        service = whole["services"][name]
        assert service["user"] == "4242:4343"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
        assert service["volumes"][0]["source"] == str(checkout / "out")
        assert service["build"]["context"] == str(checkout)
        assert not cpu["services"][name].get("deploy")
        ncu = whole["services"][f"{name}_ncu"]
        assert ncu["command"] == ["profile", name, "--with", "ncu"]
        assert "--reuid=4242" in ncu["entrypoint"]
