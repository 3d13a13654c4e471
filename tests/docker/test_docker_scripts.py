"""scripts/docker-run and scripts/docker-build, against a docker that prints what it is asked for."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from building import REPOSITORY, lines
from declared import commands, pins

DOCKER = """#!/bin/bash
# Not Docker: says what it is asked for, and that it knows the runtimes in $RUNTIMES.
case "$*" in
  "info --format"*)
    [[ -n ${RUNTIMES:-} ]] && echo "{\\"Runtimes\\":{$RUNTIMES},\\"SecurityOptions\\":[\\"${SECURITY:-}\\"]}" ;;
  "compose version"*) echo 2.39.1 ;;
  "image inspect"*) echo "sha256:of-${@: -1}" ;;
  "compose "*" build "*) ;;
  "buildx imagetools"*) echo "${DIGEST:?}" ;;
  *) echo "$@"; env | grep ^WORKLOG_ | sort ;;
esac
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A folder for PATH with a docker that prints what it is asked for."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    return tmp_path


def script(
    host: Path, name: str, *words: str, root: Path = REPOSITORY, before: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PATH": f"{host}:/usr/bin:/bin", **variables}
    argv = [*before, root / "scripts" / name, *words]
    return subprocess.run(argv, env=own, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def gpu(host: Path) -> Path:
    (host / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    (host / "nvidia-smi").chmod(0o755)
    return host


def test_the_pages_lines_with_these_scripts_run(gpu: Path) -> None:
    (gpu / "podman").symlink_to("docker")
    found = [line for line in commands() if re.search(r"scripts/docker-(run|build)", line)]
    assert len(found) >= 9
    own = {"PATH": f"{gpu}:/usr/bin:/bin", "RUNTIMES": '"nvidia":{}', "DIGEST": pins()["CUDA_IMAGE"].split("@")[1]}
    for line in found:
        argv = ["bash", "-c", line]
        done = subprocess.run(
            argv, cwd=REPOSITORY, env={**os.environ, **own}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (line, done.stderr)
        assert "--verify" in line or done.stdout, line


def test_docker_run_takes_the_gpu_where_there_is_one(gpu: Path) -> None:
    host = gpu
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


def test_counters_need_a_gpu(host: Path) -> None:
    done = script(host, "docker-run", "float8_weight_only_ncu", RUNTIMES='"nvidia":{}')
    assert (done.returncode, done.stdout) == (2, "")
    assert "float8_weight_only_ncu needs a GPU; here it would be on the CPU: nvidia-smi shows no GPU" in done.stderr
    assert done.stderr.count("\n") == 1


def test_root_of_a_rootless_container_is_the_caller(host: Path) -> None:
    done = script(host, "docker-run", "float8_weight_only", RUNTIMES='"runc":{}', SECURITY="name=rootless")
    assert {"WORKLOG_UID=0", "WORKLOG_GID=0"} <= set(done.stdout.splitlines())


def test_a_results_folder_of_someone_else(host: Path, tmp_path: Path) -> None:
    """As a user who owns nothing here; root may write anywhere."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts/docker-run", root / "scripts")
    for folder in (root, tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    nobody = ("setpriv", "--reuid=4242", "--regid=4242", "--clear-groups") if os.geteuid() == 0 else ()
    for out in ("none", "not writable"):
        if out == "not writable":
            (root / "out").mkdir(mode=0o555)
        if not nobody:
            root.chmod(0o555)
        done = script(host, "docker-run", "row_norms", root=root, before=nobody, RUNTIMES='"runc":{}')
        root.chmod(0o755)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert re.search(r"out/ cannot be written by user \d+: sudo chown \d+ out", done.stderr)


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
    (named,) = re.findall(rf"port {port} is taken: WORKLOG_PORT=(\d+) .*docker-run notebook", taken.stderr)
    with socket.create_server(("127.0.0.1", int(named))):
        pass  # it is free
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
    unreachable = script(host, "docker-build", "--verify", DIGEST="")
    assert unreachable.returncode == 2
    assert f"docker cannot ask the registry for {tag}: this needs a network" in unreachable.stderr.splitlines()[-1]
