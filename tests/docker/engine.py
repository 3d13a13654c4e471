"""Docker's engine for a test: Debian's dockerd, started in a folder of its own and stopped with it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import debian

START_S = 90
ADDRESSES = "base=10.213.0.0/16,size=24"
"""Of the networks that Compose makes: seldom anybody's."""


class Engine:
    """A daemon with its own socket and data. Without a bridge and rules of the firewall: containers have no way out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon: subprocess.Popen[bytes] | None = None
        self.variables: dict[str, str] = {}

    def start(self) -> str | None:
        """Why there is none, or None. Needs root, and control groups that may be written."""
        newer = ("docker.io", "containerd", "docker-cli", "docker-compose")
        why = debian.unpack(self.folder, *newer, release=debian.WITH_COMPOSE)
        if why := why or debian.unpack(self.folder, "runc", "tini"):  # these need the C library of this release
            return why
        socket = self.folder / "docker.sock"
        self.variables = {**debian.variables(self.folder), "DOCKER_HOST": f"unix://{socket}"}
        places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        own = [f"--host=unix://{socket}", *(f"--{name}={self.folder / place}" for name, place in places.items())]
        quiet = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"]
        argv = ["dockerd", *own, *quiet, f"--default-address-pool={ADDRESSES}"]
        with (self.folder / "log").open("wb") as log:
            self.daemon = subprocess.Popen(argv, cwd=self.folder, env=self.environment(), stdout=log, stderr=log)
        for _ in range(START_S * 4):
            if self("docker", "info").returncode == 0:
                return None
            if self.daemon.poll() is not None:
                break
            time.sleep(0.25)
        return f"dockerd does not start here: {(self.folder / 'log').read_text().splitlines()[-1:]}"

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, **self.variables, **more}

    def __call__(self, *argv: str | Path, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command as its client."""
        words = [str(word) for word in argv]
        own = self.environment(**more)
        return subprocess.run(words, cwd=cwd, env=own, capture_output=True, text=True, check=False, timeout=600)

    def stop(self) -> None:
        """Nothing of it stays: the bridges of its networks would outlive the daemon."""
        if self.daemon and self.daemon.poll() is None:
            self("sh", "-c", "docker ps --all --quiet | xargs --no-run-if-empty docker rm --force")
            self("docker", "network", "prune", "--force")
            self.daemon.terminate()
            self.daemon.wait(timeout=60)
