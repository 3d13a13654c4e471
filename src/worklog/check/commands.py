"""Shell commands in a page: they parse, and what they call is there."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worklog import problem
from worklog.check.failure import Failure

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(\w*)")
_SHELLS = ("bash", "sh", "shell", "console")
_SCRIPT = re.compile(r"^(\./)?(scripts|problems|docker|\.ci)/")


@dataclass(frozen=True)
class Block:
    line: int
    """Of its first line of text, from 1."""
    text: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced shell blocks of a Markdown page; of `console` blocks the lines that start with a prompt."""
    start, language, fence, kept = 0, "", "", list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if not fence and mark:
            start, fence, language, kept = number + 1, mark[1], mark[2].lower(), []
        elif fence and line.strip().startswith(fence) and not line.strip(" `~"):
            if language in _SHELLS:
                yield Block(start, "\n".join(kept) + "\n")
            fence = ""
        elif fence:
            prompt = line.lstrip().startswith("$ ")
            kept.append(line.replace("$ ", "", 1) if prompt else "" if language == "console" else line)


def words_of(block: Block) -> Iterator[tuple[int, list[str]]]:
    """The simple commands of a block: line and words, without assignments before them and without redirections."""
    number, joined = block.line, ""
    for offset, line in enumerate(block.text.splitlines()):
        if not joined:
            number = block.line + offset
        joined += line.removesuffix("\\") + " " if line.endswith("\\") else line
        if line.endswith("\\"):
            continue
        lexer = shlex.shlex(joined, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        joined = ""
        words: list[str] = []
        try:
            tokens = list(lexer)
        except ValueError:  # a string over several lines; bash -n has judged it
            continue
        redirected = False
        for token in [*tokens, ";"]:
            if redirected:  # this token is the file
                redirected = False
            elif set(token) <= set("<>&|") and set(token) & set("<>"):
                redirected = True
                if words[-1:] in (["1"], ["2"]):
                    words.pop()
            elif token in (";", "&", "&&", "||", "|", "(", ")"):
                while words and re.match(r"^\w+=", words[0]):
                    words.pop(0)
                if words:
                    yield number, words
                words = []
            else:
                words.append(token)


def check(root: Path, page: Path, app: Any) -> Iterator[Failure]:
    """Every shell block of a Markdown file. `app` is the typer application whose verbs may be called."""
    place = str(page.relative_to(root))
    known = set(problem.names())
    for block in blocks(page.read_text(encoding="utf-8")):
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=30)
        if done.returncode:
            found = re.search(r"line (\d+): (.*)", done.stderr)
            line = block.line + (int(found[1]) - 1 if found else 0)
            yield Failure(place, line, f"bash does not parse this: {found[2] if found else done.stderr.strip()}")
            continue
        for line, words in words_of(block):
            if words[:2] == ["worklog", "new"]:
                known |= set(words[2:3])  # a page may go on with the problem that it has just made
            if message := _fault(root, words, app, known):
                yield Failure(place, line, f"`{shlex.join(words)}`: {message}")


def _fault(root: Path, words: list[str], app: Any, known: set[str]) -> str | None:
    head = words[0]
    if head == "worklog":
        return _verb(words[1:], app, known)
    if head.startswith("python"):
        if words[1:3] == ["-m", "worklog"]:
            return _verb(words[3:], app, known)
        scripts = [word for word in words[1:2] if word.endswith(".py")]
        if not scripts:
            return None
        if not (root / scripts[0]).is_file():
            return f"there is no {scripts[0]}"
        if scripts[0].startswith("problems/") and scripts[0].endswith("/repro.py") and words[2:3] != ["capture"]:
            rest = words[2:]
            verb = ["profile", *rest[1:]] if rest[:1] == ["profile"] else ["repro", *rest]
            return _verb([verb[0], Path(scripts[0]).parent.name, *verb[1:]], app, known)
        return None
    if _SCRIPT.match(head):
        file = root / head
        if not file.is_file():
            return f"there is no {head}"
        if not file.stat().st_mode & 0o111:
            return f"{head} is not executable"
    return None


def _verb(words: list[str], app: Any, known: set[str]) -> str | None:
    """What `worklog` would say to these words, without running anything."""
    from typer.main import get_command

    group: Any = get_command(app)
    if not words or words[0].startswith("-"):
        return None if words[:1] in ([], ["--help"]) else f"worklog has no option {words[0]}"
    verb = group.commands.get(words[0])
    if verb is None:
        return f"worklog has no verb {words[0]!r}; it has: {', '.join(group.commands)}"
    try:
        context = verb.make_context(words[0], list(words[1:]))
    except Exception as error:  # typer carries its own copy of click; its classes have no public name
        if type(error).__name__ == "Exit":
            return None
        return str(error.format_message()) if hasattr(error, "format_message") else str(error)
    named = context.params.get("problem")
    for name in named if isinstance(named, (list, tuple)) else [named]:
        if isinstance(name, str) and "/" not in name and name not in known and name.islower():
            return f"there is no problem {name!r}"
    return None
