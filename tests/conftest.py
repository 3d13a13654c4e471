"""Fixtures that several folders of tests use."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import checkouts
import pytest

IMPORTER = """#!/bin/bash
# As the loader does: looks for libdw.so.1 and says what it lacks.
for folder in ${LD_LIBRARY_PATH//:/ }; do
  if [[ -e $folder/libdw.so.1 ]]; then echo 'QdstrmImporter: help'; exit 0; fi
done
echo "$0: error while loading shared libraries: libdw.so.1: cannot open shared object file: No such file" >&2
exit 127
"""
NSYS = "#!/bin/bash\necho 'NVIDIA Nsight Systems version 2025.3.1.90-253135822126v0'\n"


@pytest.fixture
def nsight_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An Nsight Compute installation as its package leaves it: an nsys whose importer lacks a link and libdw.

    WORKLOG_NSYS names the nsys inside. Returns the folder `host`.
    """
    host = tmp_path / "nsight-compute" / "2025.3.1" / "host"
    for path, content in (
        (host / "target-linux-x64" / "nsys", NSYS),
        (host / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter", IMPORTER),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(content)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("WORKLOG_NSYS", str(host / "target-linux-x64" / "nsys"))
    monkeypatch.delenv("WORKLOG_NSYS_LIBRARY_PATH", raising=False)
    return host


@pytest.fixture(scope="session")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkouts.recorded(tmp_path_factory.mktemp("recorded") / "checkout")


@pytest.fixture
def checkout(recorded_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a checkout whose problem row_norms has a real run, a page and a clean `worklog check`."""
    root = tmp_path / "checkout"
    shutil.copytree(recorded_once, root)
    monkeypatch.setenv("WORKLOG_ROOT", str(root))
    return root
