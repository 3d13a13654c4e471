"""File names in what is published: relative to the repository or to site-packages, never this machine's folders."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

from worklog.problem import ProblemError, root


def prefixes() -> list[tuple[str, str]]:
    """(folder with a trailing slash, what stands for it), the longest first so that the innermost folder wins."""
    entries = [entry for entry in sys.path if entry and Path(entry).is_dir()]
    found = {f"{folder}/": "" for entry in entries for folder in (Path(entry).absolute(), Path(entry).resolve())}
    found |= {f"{sys.prefix}/": "", f"{sys.base_prefix}/": ""}
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    found |= {f"{tempfile.gettempdir()}/": "", f"{Path.home()}/": ""} | (
        {f"{cache}/": "torchinductor/"} if cache else {}
    )
    with contextlib.suppress(ProblemError):
        found[f"{root()}/"] = ""
    found.pop("/", None)
    return sorted(found.items(), key=lambda pair: len(pair[0]), reverse=True)


def relative_text(text: str) -> str:
    """`text` with this machine's folders taken off the front of every absolute path."""
    for folder, stand_in in prefixes():
        text = _replace(text, folder, stand_in)
    return text


def _replace(text: str, folder: str, stand_in: str) -> str:
    """Replace `folder` where a path begins with it; on the tens of MB of a trace much faster than a regex."""
    first, *rest = text.split(folder)
    parts = [first]
    for part in rest:
        inside = parts[-1][-1:].isalnum() or parts[-1][-1:] in ("_", ".", "-", "/")
        parts += [folder if inside else stand_in, part]
    return "".join(parts)


def scrub(text: str) -> str:
    """As `relative_text`; of any other absolute path only the last part is left, as .../name."""
    return re.sub(r"(?<![\w.\-/:])/(?:[\w.+\-]+/)+([\w.+\-]+)", r".../\1", relative_text(text))
