"""One thing that is wrong, and where."""

from __future__ import annotations

import difflib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Failure:
    file: str
    """Relative to the repository."""
    line: int
    """From 1; 0 where the file has no lines or the failure is about the whole of it."""
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.message}"


def differing_line(current: bytes, wanted: bytes) -> tuple[int, str, str]:
    """First line of `current` that differs from `wanted`: its number, what it is, what it should be."""
    have, want = (text.decode("utf-8", "replace").splitlines() for text in (current, wanted))
    matcher = difflib.SequenceMatcher(None, have, want, autojunk=False)
    for tag, low, _, wanted_low, wanted_high in matcher.get_opcodes():
        if tag != "equal":
            is_now = have[low] if low < len(have) and tag != "insert" else "(nothing)"
            should = want[wanted_low] if wanted_low < wanted_high else "(nothing)"
            return low + 1, is_now.strip(), should.strip()
    return max(len(have), 1), "(its line ends)", "(other line ends)"


def edited_line(root: Path, file: Path) -> int:
    """First line of a text file that differs from the committed one; 0 where git cannot tell."""
    argv = ["git", "-C", str(root), "diff", "-U0", "--no-color", "--no-ext-diff", "HEAD", "--", str(file)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"^@@ -\S+ \+(\d+)", done.stdout, re.M)
    return int(found[1]) if found else 0
