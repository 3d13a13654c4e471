"""Images without a Docker engine: buildah builds and runs what a Dockerfile says, on a stand-in for NVIDIA's image."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CERTIFICATES = Path("/etc/ssl/certs")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""What the images are told to be built from."""
CALLER = 4242
"""The number of a user who starts containers, on the host alone."""
LINGER = '"$@"; code=$?; sleep 0.2; exit $code'
"""buildah 1.28 at times loses what a program says in its last moment: `id -u` once in 60, on a busy machine."""
PIP_FILES = (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf")


def lines(*argv: str | Path, cwd: Path = REPOSITORY, **variables: str) -> list[str]:
    """What a command prints; its stderr in the message if it fails."""
    own = {**os.environ, **variables}
    done = subprocess.run([str(a) for a in argv], cwd=cwd, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout.splitlines()


def image_name(problem: str) -> str:
    return f"localhost/worklog-{problem.replace('_', '-')}:local"


@dataclass(frozen=True)
class Layer:
    """`made_by`: buildah's word for the instruction. `bytes`: of the layer as an uncompressed archive."""

    made_by: str
    bytes: int
    digest: str


class Buildah:
    """buildah with a storage of its own; needs root, for chroot isolation.

    With the kernel's overlay file system each instruction becomes a layer that later builds share. Where that cannot be
    mounted (a container, say), vfs: there a layer is a whole copy, so an image gets only one above its base.
    $STORAGE_DRIVER chooses, as for buildah itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        overlay = subprocess.run([*self._with("overlay"), "info"], capture_output=True, check=False).returncode == 0
        self.driver = os.environ.get("STORAGE_DRIVER") or ("overlay" if overlay else "vfs")
        self.layered = self.driver == "overlay"
        self.argv = self._with(self.driver)
        self.pip = folder / "pip.conf"
        self.shared = self._pip_settings()

    def _with(self, driver: str) -> list[str]:
        places = ("--root", self.folder / driver, "--runroot", self.folder / f"{driver}-run")
        return [str(a) for a in ("buildah", "--storage-driver", driver, *places)]

    def _pip_settings(self) -> list[str]:
        """This machine's own settings of pip (index, wheels of torch's CPU build, certificates) as mounts for builds.

        They reach the build as mounts, so that nothing of them stays in the image.
        """
        settings = configparser.RawConfigParser()
        settings.read(PIP_FILES)
        if not settings.has_section("global"):
            settings.add_section("global")
        for name, value in os.environ.items():
            if name.startswith("PIP_") and name != "PIP_CONFIG_FILE":
                settings.set("global", name.removeprefix("PIP_").lower().replace("_", "-"), value)
        with self.pip.open("w") as file:
            settings.write(file)
        named = {Path(p) for p in re.findall(r"(?:^|[\s=:])(?:file://)?(/[\w./-]+)", self.pip.read_text())}
        folders = {CERTIFICATES, *(Path("/", *p.parts[1:3]) if p.is_dir() else p.parent for p in named if p.exists())}
        mounts = [f"{place}:{place}:ro" for place in sorted(folders) if place.is_dir()]
        return [f"--volume={mount}" for mount in (f"{self.pip}:/etc/pip.conf:ro", *mounts)]

    def __call__(self, *arguments: str | Path) -> list[str]:
        return lines(*self.argv, *arguments)

    def build(self, dockerfile: Path, tag: str, context: Path, *options: str, **arguments: str) -> list[str]:
        own = [*options, *(f"--build-arg={name}={value}" for name, value in arguments.items())]
        how = ["--isolation", "chroot", "--force-rm", *(["--layers"] if self.layered else []), *self.shared]
        return self("bud", *how, *own, "--file", dockerfile, "--tag", tag, context)

    def remove(self) -> None:
        """Containers first: what is mounted in them would stay."""
        subprocess.run([*self.argv, "rm", "--all"], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def inspect(self, image: str) -> dict[str, Any]:
        """Of the OCI image: config, history, rootfs."""
        found: dict[str, Any] = json.loads("\n".join(self("inspect", "--type", "image", image)))["OCIv1"]
        return found

    def layers(self, image: str) -> list[Layer]:
        """From the first to the last. The sizes are those that the storage has noted."""
        stored = json.loads((self.folder / self.driver / f"{self.driver}-layers/layers.json").read_text())
        sizes = {layer["diff-digest"]: layer["diff-size"] for layer in stored if "diff-digest" in layer}
        found = self.inspect(image)
        made_by = [step["created_by"] for step in found["history"] if not step.get("empty_layer")]
        return [Layer(by, sizes[d], d) for by, d in zip(made_by, found["rootfs"]["diff_ids"], strict=True)]

    def container(self, image: str) -> Container:
        (name,) = self("from", "--pull-never", image)
        return Container(self, name, list(self.inspect(image)["config"]["Entrypoint"]))


@dataclass(frozen=True)
class Container:
    """One working container of an image; its own file system is kept from run to run."""

    buildah: Buildah
    name: str
    entrypoint: list[str]

    def run(
        self, *words: str, entrypoint: Sequence[str] | None = None, options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """`docker run [OPTIONS] [--entrypoint ENTRYPOINT] IMAGE WORDS`; `options`: --user, --volume, --cap-add."""
        entry = self.entrypoint if entrypoint is None else entrypoint
        own = [*options, self.name, "--", "sh", "-c", LINGER, "sh", *entry, *words]
        argv = [*self.buildah.argv, "run", "--isolation", "chroot", *own]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=900)

    def sh(self, program: str, *options: str) -> str:
        done = self.run(program, entrypoint=("sh", "-c"), options=options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
