"""`docker compose run` for real: Docker's own engine and Compose, of Debian, with the image that buildah has built.

Compose does not build here: that takes a network inside of the engine.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from building import CALLER, COMMIT, REPOSITORY, Buildah, image_name
from declared import PAGE, commands
from engine import Engine

pytestmark = pytest.mark.images
IMAGE = "worklog-row-norms:local"
OVERRIDE = f"""
services:
  row_norms: {{pull_policy: never}}
  row_norms_ncu: {{pull_policy: never, deploy: !reset null}}
  notebook: {{pull_policy: never, deploy: !reset null, image: "{IMAGE}", entrypoint: ["sleep"], command: ["1"]}}
"""


@pytest.fixture(scope="module")
def engine(buildah: Buildah, base: str, checkout: Path) -> Iterator[Engine]:
    """With the image of row_norms."""
    folder = Path(tempfile.mkdtemp(prefix="worklog-engine-"))  # not pytest's, which are kept: this is gigabytes
    made = Engine(folder)
    try:
        if why := made.start():
            pytest.skip(why)
        name, archive = image_name("row_norms"), folder / "image.tar"
        buildah.build(checkout / "problems/row_norms/Dockerfile", name, checkout, BASE=base, COMMIT=COMMIT, DIRTY="0")
        buildah("push", "--quiet", name, f"docker-archive:{archive}:{IMAGE}")
        loaded = made("docker", "load", "--input", archive)
        assert loaded.returncode == 0, loaded.stderr
        archive.unlink()
        (folder / "override.yaml").write_text(OVERRIDE)
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def out(checkout: Path) -> Path:
    """The checkout's out/, empty and the caller's."""
    made = checkout / "out"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    os.chown(made, CALLER, CALLER)
    return made


def compose(
    engine: Engine, root: Path, *words: str, gpu: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    files = ["docker/compose.yaml", *([] if gpu else ["docker/compose.cpu.yaml"]), engine.folder / "override.yaml"]
    named = [word for file in files for word in ("-f", file)]
    own = {"WORKLOG_UID": str(CALLER), "WORKLOG_GID": str(CALLER), **more}
    return engine("docker", "compose", *named, *words, cwd=root, **own)


def left(out: Path) -> list[Path]:
    for path in (out, *out.rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (CALLER, CALLER), path
    return list(out.glob("row_norms/*/record.json"))


def test_compose_run_leaves_results_that_are_the_callers(engine: Engine, checkout: Path, out: Path) -> None:
    done = compose(engine, checkout, "run", "--rm", "row_norms")
    assert done.returncode == 0, done.stderr
    assert len(left(out)) == 1
    assert compose(engine, checkout, "run", "--rm", "row_norms", "--no-such-option").returncode == 2


def test_the_page_spells_out_what_compose_does(engine: Engine, checkout: Path, out: Path) -> None:
    (line,) = [line for line in commands() if "--shm-size" in line]
    line = re.sub(r"worklog-\S+:local.*", IMAGE, line).replace("--gpus all", "--network none")
    line = re.sub(r"\$\(id -[ug]\)", str(CALLER), line)
    done = engine("bash", "-c", f"{line} --help", cwd=checkout)
    assert done.returncode == 0, done.stderr
    done = engine("bash", "-c", line, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert len(left(out)) == 1
    service = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())["x-problem"]
    for said in ("--init", f"--shm-size {service['shm_size'].removesuffix('b')} ", "--cap-drop ALL"):
        assert said in line
    assert f"--security-opt {service['security_opt'][0].removesuffix(':true')} " in line
    assert set(re.findall(r"--volume \S+:(\S+?)\"? ", line)) == {volume["target"] for volume in service["volumes"]}


def test_without_a_gpu_runtime(engine: Engine, checkout: Path, out: Path) -> None:
    done = compose(engine, checkout, "run", "--rm", "row_norms", gpu=True)
    text = 'could not select device driver "nvidia" with capabilities: [[gpu]]'
    assert done.returncode != 0
    assert text in done.stderr
    assert text in PAGE.read_text()
    assert not left(out)


def test_without_a_results_folder_and_with_one_of_someone_else(engine: Engine, checkout: Path, out: Path) -> None:
    os.chown(out, 0, 0)
    done = compose(engine, checkout, "run", "--rm", "row_norms")
    assert done.returncode == 2
    assert "/worklog/out/row_norms: cannot be written (Permission denied)" in done.stderr
    out.rmdir()
    done = compose(engine, checkout, "run", "--rm", "row_norms")
    assert f"bind source path does not exist: {out}" in done.stderr
    for text in ("bind source path does not exist", "cannot be written (Permission denied)"):
        assert text in PAGE.read_text()


@pytest.mark.usefixtures("out")
def test_a_port_that_is_taken(engine: Engine, checkout: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        taken = compose(engine, checkout, "up", "notebook", WORKLOG_PORT=port)
    assert taken.returncode != 0
    assert f"127.0.0.1:{port}: bind: address already in use" in taken.stderr
    assert "127.0.0.1:8888: bind: address already in use" in PAGE.read_text()
    free = compose(engine, checkout, "up", "notebook", WORKLOG_PORT=port)
    assert free.returncode == 0, free.stderr
    down = compose(engine, checkout, "--profile", "*", "down", "--volumes")
    assert down.returncode == 0, down.stderr


def test_the_ncu_service_has_one_capability_and_it_takes_more_than_an_option(engine: Engine) -> None:
    service = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())["x-ncu"]
    words = [re.sub(r"\$\{WORKLOG_[UG]ID:-1000\}", str(CALLER), word) for word in service["entrypoint"]][:-1]
    run = ["docker", "run", "--rm", "--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    look = ["sh", "-c", "id -u; grep CapEff /proc/self/status"]
    added = [f"--cap-add={name}" for name in service["cap_add"]]
    done = engine(*run, "--user", "0:0", *added, "--entrypoint", words[0], IMAGE, *words[1:], *look)
    assert done.returncode == 0, done.stderr
    uid, _, effective = done.stdout.split()
    assert (int(uid), int(effective, 16)) == (CALLER, 1 << 21), "SYS_ADMIN and nothing else"
    plain = engine(*run, "--user", f"{CALLER}:{CALLER}", *added, "--entrypoint", look[0], IMAGE, *look[1:])
    assert int(plain.stdout.split()[-1], 16) == 0, "an added capability alone is root's"
