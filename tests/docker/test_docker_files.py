"""What holds of every image before it is built: pins, lint, compose files, the scripts, the page's commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from building import REPOSITORY, lines

TEMPLATE = REPOSITORY / "src/worklog/templates/problem/Dockerfile.tmpl"
PROBLEMS = sorted(p.parent.name for p in REPOSITORY.glob("problems/*/repro.py"))
DOCKERFILES = [
    *sorted(REPOSITORY.glob("docker/*Dockerfile")),
    *sorted(REPOSITORY.glob("problems/*/Dockerfile")),
    TEMPLATE,
]
MENTIONED = re.compile(r"scripts/[\w-]+")


def pins() -> dict[str, str]:
    text = (REPOSITORY / "docker/versions.env").read_text()
    return {name: value.strip('"') for name, value in re.findall(r"^([A-Z_]+)=(.+)$", text, re.M)}


def requirements(*names: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in names:
        for package, version in re.findall(
            r"^([\w-]+)==(\S+)$", (REPOSITORY / "requirements" / name).read_text(), re.M
        ):
            found.setdefault(package, set()).add(version)
    return found


def instructions(file: Path) -> list[str]:
    """One string an instruction: comments left out, continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", file.read_text())
    return [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]


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


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())["services"]
    return found


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
    assert published == {"notebook": ["127.0.0.1:${WORKLOG_PORT:-8888}:8888"]}
    assert "ServerApp.token" not in (REPOSITORY / "docker/notebook.Dockerfile").read_text()


@pytest.mark.images
def test_docker_compose_accepts_the_files(compose: list[str], checkout: Path) -> None:
    """With a new problem in them; as the caller's user."""
    own = {"WORKLOG_UID": "4242", "WORKLOG_GID": "4343"}
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


DOCKER = """#!/bin/bash
# Not Docker: says what it is asked for, and that it knows the runtimes in $RUNTIMES.
case "$*" in
  "info --format"*) [[ -n ${RUNTIMES:-} ]] && echo "{\\"Runtimes\\":{$RUNTIMES}}" ;;
  "compose version"*) echo 2.39.1 ;;
  "image inspect"*) echo "sha256:of-${@: -1}" ;;
  "compose "*" build "*) ;;
  "buildx imagetools"*) echo "$DIGEST" ;;
  *) echo "$@"; env | grep ^WORKLOG_ | sort ;;
esac
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder for PATH with a docker that prints what it is asked for."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    return tmp_path


def script(host: Path, name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PATH": f"{host}:/usr/bin:/bin", **variables}
    argv = [REPOSITORY / "scripts" / name, *words]
    return subprocess.run(argv, env=own, capture_output=True, text=True, check=False, timeout=60)


def test_docker_run_takes_the_gpu_where_there_is_one(host: Path) -> None:
    (host / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    (host / "nvidia-smi").chmod(0o755)
    done = script(host, "docker-run", "float8_weight_only", "--variant", "bf16_eager", RUNTIMES='"nvidia":{}')
    assert (done.returncode, done.stderr) == (0, "on the GPU\n")
    first, *variables = done.stdout.splitlines()
    assert first == "compose -f docker/compose.yaml run --rm float8_weight_only --variant bf16_eager"
    assert f"WORKLOG_UID={os.getuid()}" in variables
    assert f"WORKLOG_GID={os.getgid()}" in variables
    assert "WORKLOG_IMAGE=sha256:of-worklog-float8-weight-only:local" in variables
    without = script(host, "docker-run", "float8_weight_only", RUNTIMES='"runc":{}')
    assert without.stderr.startswith(
        "on the CPU: Docker has no NVIDIA runtime; for the GPU install nvidia-container-toolkit"
    )
    assert "-f docker/compose.yaml -f docker/compose.cpu.yaml run" in without.stdout


def test_docker_run_takes_the_cpu_where_there_is_no_gpu(host: Path) -> None:
    done = script(host, "docker-run", "float8_weight_only", RUNTIMES='"nvidia":{}')
    assert done.stderr == "on the CPU: nvidia-smi shows no GPU on this host\n"
    assert "-f docker/compose.cpu.yaml run --rm float8_weight_only\n" in done.stdout


def test_docker_run_says_what_is_missing(host: Path) -> None:
    nobody = script(host, "docker-run", "float8_weight_only")
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert "no Docker daemon answers: systemctl start docker" in nobody.stderr
    which = script(host, "docker-run")
    assert (which.returncode, which.stderr.count("\n")) == (2, 1)
    (host / "docker").unlink()
    if not shutil.which("docker", path="/usr/bin:/bin"):
        none = script(host, "docker-run", "float8_weight_only")
        assert none.returncode == 2
        assert "docker is not on PATH" in none.stderr
        assert script(host, "docker-build").returncode == 2


def test_a_port_that_is_taken(host: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = script(host, "docker-run", "notebook", RUNTIMES='"runc":{}', WORKLOG_PORT=str(port))
    assert (taken.returncode, taken.stdout) == (2, "")
    assert f"port {port} is taken: WORKLOG_PORT={port + 1} " in taken.stderr
    free = script(host, "docker-run", "notebook", RUNTIMES='"runc":{}', WORKLOG_PORT=str(port))
    assert "up notebook" in free.stdout


def test_docker_build_builds_the_base_first_and_names_the_commit(host: Path) -> None:
    done = script(host, "docker-build", "float8_weight_only")
    assert done.returncode == 0, done.stderr
    base, problem, sizes = (line for line in done.stdout.splitlines() if not line.startswith("WORKLOG_"))
    assert base == "build --file docker/base.Dockerfile --tag worklog-base:local ."
    commit = lines("git", "rev-parse", "HEAD")[0]
    assert problem.startswith(
        "build --file problems/float8_weight_only/Dockerfile --tag worklog-float8-weight-only:local"
    )
    assert f"--build-arg COMMIT={commit} --build-arg DIRTY=" in problem
    assert sizes.startswith("history ")
    unknown = script(host, "docker-build", "no_such_problem")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "no problems/no_such_problem/Dockerfile" in unknown.stderr


def test_docker_build_compares_the_digest_with_the_registrys(host: Path) -> None:
    tag, digest = pins()["CUDA_IMAGE"].split("@")
    same = script(host, "docker-build", "--verify", DIGEST=digest)
    assert (same.returncode, same.stdout, same.stderr) == (0, "", "")
    moved = script(host, "docker-build", "--verify", DIGEST="sha256:0")
    assert moved.returncode == 1
    assert f"{tag} is now sha256:0, docker/versions.env has {digest}" in moved.stderr


def commands() -> list[str]:
    text = (REPOSITORY / "DOCKER_README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    found = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in found if line and not line.startswith("#")]


def test_the_page_names_scripts_services_and_files_that_exist() -> None:
    found = commands()
    assert len(found) > 20
    known = set(services())
    for line in found:
        for name in MENTIONED.findall(line):
            assert os.access(REPOSITORY / name, os.X_OK), line
        if words := re.search(r"compose (.*?)\b(run --rm|up|build)((?: --entrypoint \w+)?)(?: (\w+))?", line):
            assert words[4] is None or words[4] in known, line
            for file in re.findall(r"-f (\S+)", words[1]):
                assert (REPOSITORY / file).is_file(), line
        if image := re.search(r"worklog-[\w-]+:\w+", line):
            assert image[0] in {service["image"] for service in services().values()}, line


def test_the_page_has_the_pins() -> None:
    text = (REPOSITORY / "DOCKER_README.md").read_text()
    pinned = pins()
    assert pinned["CUDA_IMAGE"].split("@")[0] in text
    for tool in ("SYSTEMS", "COMPUTE"):
        assert ".".join(pinned[f"NSIGHT_{tool}_VERSION"].split(".")[:3]) in text
