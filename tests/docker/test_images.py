"""Every problem's image, and that of a new problem, really built and run. `scripts/test images`; some minutes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from building import CALLER, COMMIT, REPOSITORY, Buildah, Container, image_name

pytestmark = pytest.mark.images
BRIEFLY = {
    "float8_weight_only": ["--variant", "bf16_eager"],
    "unet_conv_inference": ["--config", "tiny", "--variant", "eager", "--variant", "policy"],
}
CLOSURE = """
import importlib.metadata as m, re
from packaging.requirements import Requirement
plain = lambda name: re.sub(r"[-_.]+", "-", name).lower()
wanted, seen = [REQUIRED], set()
while wanted:
    name = plain(wanted.pop())
    if name not in seen:
        seen.add(name)
        for text in m.requires(name) or []:
            r = Requirement(text)
            if r.marker is None or r.marker.evaluate({"extra": ""}):
                wanted.append(r.name)
print(*sorted({plain(d.name) for d in m.distributions()} - seen))
"""


@pytest.mark.usefixtures("image")
def test_what_docker_inspect_says(problem: str, buildah: Buildah) -> None:
    config = buildah.inspect(image_name(problem))["config"]
    assert config["Entrypoint"] == ["python", f"problems/{problem}/repro.py"]
    assert not config.get("Cmd"), "words after the image's name are the entry point's options"
    assert config["User"] == "1000:1000"
    assert config["WorkingDir"] == "/worklog"
    assert set(config["Volumes"]) == {"/cache"}
    assert {f"WORKLOG_COMMIT={COMMIT}", "WORKLOG_DIRTY=0", "HOME=/cache"} <= set(config["Env"])
    assert config["Labels"]["org.opencontainers.image.base.name"] == "localhost/stand-in"
    assert not re.search(r"(?i)password|secret|token", " ".join(config["Env"]))


def test_help(image: Container) -> None:
    done = image.run("--help")
    assert done.returncode == 0, done.stderr
    assert "--device" in done.stdout


def test_a_run_on_the_cpu_lands_in_the_callers_folder_as_the_callers(
    image: Container, problem: str, results: Path
) -> None:
    options = [f"--user={CALLER}:{CALLER}", f"--volume={results}:/worklog/out"]
    done = image.run(*BRIEFLY.get(problem, []), options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = results.glob(f"{problem}/*-cpu-repro-*/record.json")
    made = json.loads(file.read_text())
    assert made["source"]["commit"] == COMMIT
    assert made["source"]["dirty"] is False
    assert {variant["status"] for variant in made["variants"].values()} == {"ok"}
    for path in (results, *results.rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (CALLER, CALLER), path
    if list(REPOSITORY.glob(f"reports/{problem}/*-baseline-*/record.json")):
        assert "No GPU run of this problem is recorded" not in done.stdout + done.stderr


def test_captures_are_the_entry_points_too(image: Container, problem: str, results: Path) -> None:
    printed = image.run("profile", "--with", "nsys", "--print")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("nsys profile")
    if problem == "row_norms":
        options = [f"--user={CALLER}:{CALLER}", f"--volume={results}:/worklog/out"]
        traced = image.run("profile", "--with", "torch", "--config", "cpu", options=options)
        assert traced.returncode == 0, traced.stderr
        assert list(results.rglob("torch.square_then_sum.json.gz"))


def test_the_profilers_of_versions_env_are_found(image: Container) -> None:
    found = {check["name"]: check for check in json.loads(image.sh("worklog doctor --json"))["checks"]}
    pins = dict(re.findall(r"^(NSIGHT_\w+)=(.+)$", (REPOSITORY / "docker/versions.env").read_text(), re.M))
    assert found["nsys"]["found"].startswith(pins["NSIGHT_SYSTEMS_VERSION"])
    assert found["ncu"]["found"].startswith(pins["NSIGHT_COMPUTE_VERSION"].rpartition(".")[0])
    assert "(on PATH)" in found["nsys"]["found"]
    assert "(on PATH)" in found["ncu"]["found"]
    assert found["container"]["found"].startswith("inside one")
    assert found["mounted driver"]["remedy"] or found["mounted driver"]["state"] == "ok"
    assert {c["state"] for name, c in found.items() if name.startswith("torchao")} <= {"ok"}


def test_its_user_is_not_root_and_any_user_has_a_cache(image: Container) -> None:
    assert image.sh("id -u; id -g").split() == ["1000", "1000"]
    assert image.run("touch /worklog/x", entrypoint=("sh", "-c")).returncode != 0
    image.sh('test "$HOME" = /cache && mkdir -p "$TRITON_CACHE_DIR" "$TORCHINDUCTOR_CACHE_DIR"', f"--user={CALLER}")


def test_it_holds_torch_and_its_packages_and_nothing_else(image: Container, problem: str) -> None:
    files = ("requirements/base.txt", f"problems/{problem}/requirements.txt")
    required = {
        found[1]
        for file in files
        if (REPOSITORY / file).is_file()
        for found in re.finditer(r"^([A-Za-z][\w-]*)==", (REPOSITORY / file).read_text(), re.M)
    }
    program = CLOSURE.replace("[REQUIRED]", repr(sorted(required)))
    done = image.run(program, entrypoint=("python", "-c"))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"pip", "setuptools"}
    size = image.sh(
        "du --summarize --block-size=1M /worklog/.venv /worklog/.packages /worklog /usr 2>/dev/null || true"
    )
    print(f"\nMiB in the image of {problem}:\n{size}")


def test_nothing_of_the_build_machine_is_left(image: Container) -> None:
    assert image.sh("cat /etc/pip.conf 2>/dev/null || true") == ""
    assert image.sh("ls /worklog").split() == [
        "LICENSE", "README.md", "out", "problems", "pyproject.toml", "reports", "requirements", *(
            ["scripts"] if "scripts" in image.sh("ls /worklog") else []), "src",
    ]  # fmt: skip
    assert image.sh("command -v sshd ssh git || true") == ""
    found = image.sh(
        "find / -xdev \\( -name 'id_rsa*' -o -name '.netrc' -o -name '.pypirc' -o -name .git \\) 2>/dev/null || true"
    )
    assert found == ""


def test_a_results_folder_that_may_not_be_written_is_one_sentence(image: Container, results: Path) -> None:
    done = image.run("--device", "cpu", options=[f"--volume={results}:/worklog/out:ro"])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("worklog: ")]
    assert "/worklog/out" in done.stderr
    assert sentence


def test_a_full_disk_is_one_sentence(image: Container, problem: str, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k,mode=1777", "tmpfs", tmp_path / "small"]).returncode:
        pytest.skip("this machine lets no one mount a small disk")
    try:
        done = image.run(*BRIEFLY.get(problem, []), options=[f"--volume={tmp_path}/small:/worklog/out"])
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


def test_the_ncu_service_hands_the_capability_to_the_caller(image: Container) -> None:
    written = yaml.safe_load((REPOSITORY / "docker/compose.yaml").read_text())["x-ncu"]
    words = [re.sub(r"\$\{WORKLOG_[UG]ID:-1000\}", str(CALLER), word) for word in written["entrypoint"]]
    assert words.pop() == "worklog"
    capabilities = [f"--cap-add=CAP_{name}" for name in written["cap_add"]]
    done = image.run(
        "id -u; grep CapEff /proc/self/status", entrypoint=[*words, "sh", "-c"], options=["--user=0:0", *capabilities]
    )
    assert done.returncode == 0, done.stderr
    uid, effective = done.stdout.split()[0], int(done.stdout.split()[-1], 16)
    assert uid == str(CALLER)
    assert effective == 1 << 21, "SYS_ADMIN and nothing else"


def test_the_notebook_server_asks_for_a_token(buildah: Buildah, base: str, checkout: Path) -> None:
    name = "localhost/worklog-notebook:local"
    buildah.build(checkout / "docker/notebook.Dockerfile", name, checkout, BASE=base)
    container = buildah.container(name)
    try:
        mount = [f"--user={CALLER}", f"--volume={checkout}/problems:/worklog/problems"]
        checkout.chmod(0o755)
        done = container.run(entrypoint=["timeout", "20", *container.entrypoint], options=mount)
        assert re.search(r"http://127\.0\.0\.1:8888/lab\?token=[0-9a-f]{40,}", done.stderr), done.stderr
        assert container.sh("python -c 'import torch, pandas, worklog; print(worklog.__file__)'").startswith(
            "/worklog/src"
        )
    finally:
        buildah("rm", container.name)
        buildah("rmi", name)
