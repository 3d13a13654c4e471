"""Finds numbers that were typed by hand: digits in a page's prose, and constants inside its expressions.

Free of the rule are code spans, fenced code, headings, link targets, links inside the page, URLs, HTML tags and
comments, list markers, and identifiers in which the digit follows a letter (bf16, H200, L2, v0.18.0, Llama-3.1-8B).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, TemplateSyntaxError, nodes


@dataclass(frozen=True, order=True)
class Unbound:
    line: int
    number: str
    why: str

    def __str__(self) -> str:
        return f"the number {self.number} {self.why}"


TYPED = "is typed into the prose; print it from run(), evidence(), config, cite() or predict()"
CONSTANT = "is a constant in an expression; give it an origin with cite() or predict()"

_FENCE = re.compile(r"^[ >]*(`{3,}|~{3,})")
_FREE = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"<!--.*?-->", re.S),
        (r"(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)*?(?<!`)\1(?!`)", re.S),
        (r"^[ >]*#{1,6}\s.*$", re.M),
        (r"\[[^\]\n]*\]\(#[^)\n]*\)", 0),
        (r"(?<=\])\([^)\n]*\)", 0),
        (r"^[ >]*\[[^\]\n]+\]:.*$", re.M),
        (r"https?://[^\s)>\"']+", 0),
        (r"</?[A-Za-z][^>\n]*>", 0),
        (r"&#\d+;", 0),
        (r"^[ >]*\d+[.)](?=\s)", re.M),
        (r"\b[A-Z][A-Za-z]*-\d[\w.]*(?:-\w[\w.]*)*", 0),
        (r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*", 0),
    )
)
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?\w*")


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _data_only(source: str) -> str:
    """The template with everything of Jinja's blanked, line for line. Raises TemplateSyntaxError."""
    kept = []
    for _, token, value in Environment(keep_trailing_newline=True).lex(source):
        kept.append(value if token == "data" else _blank(value))
    return "".join(kept)


def _without_fences(text: str) -> str:
    out, open_with = [], ""
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if open_with:
            out.append(_blank(line))
            if fence and fence[1].startswith(open_with) and not line.strip(" >`~\n"):
                open_with = ""
        elif fence:
            out.append(_blank(line))
            open_with = fence[1]
        else:
            out.append(line)
    return "".join(out)


def _typed(text: str, first_line: int = 1) -> Iterator[Unbound]:
    text = _without_fences(text)
    for pattern in _FREE:
        text = pattern.sub(lambda match: _blank(match[0]), text)
    for number, line in enumerate(text.splitlines(), first_line):
        for match in _NUMBER.finditer(line):
            yield Unbound(number, match[0].rstrip(".,"), TYPED)


def _constants(source: str) -> Iterator[Unbound]:
    tree = Environment(extensions=["jinja2.ext.do"]).parse(source)
    for output in tree.find_all(nodes.Output):
        for expression in output.nodes:
            if not isinstance(expression, nodes.TemplateData):
                yield from _bare(expression, texts=True)
    for assignment in tree.find_all(nodes.Assign):
        yield from _bare(assignment.node, texts=False)
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "figure":
            for argument in [*call.args[2:], *(k.value for k in call.kwargs)]:
                parts = [argument] if isinstance(argument, nodes.Const) else argument.find_all(nodes.Const)
                for part in parts:
                    if isinstance(part.value, str):
                        yield from _typed(part.value, part.lineno)


def _bare(expression: nodes.Node, texts: bool) -> Iterator[Unbound]:
    """Constants of an expression that names nothing: no record, no function."""
    everything = [expression, *expression.find_all(nodes.Node)]
    if any(isinstance(node, nodes.Name) for node in everything):
        return
    for node in everything:
        if not isinstance(node, nodes.Const) or isinstance(node.value, bool):
            continue
        if isinstance(node.value, (int, float)) or (
            texts and isinstance(node.value, str) and next(_typed(node.value), None)
        ):
            yield Unbound(node.lineno, str(node.value), CONSTANT)


def unbound(source: str, jinja: bool = True) -> list[Unbound]:
    """Every number in a page's source that nothing vouches for, in order of lines.

    `jinja=False`: the text is plain Markdown. A template that does not parse has no findings; rendering reports it.
    """
    if not jinja:
        return sorted(_typed(source))
    try:
        return sorted({*_typed(_data_only(source)), *_constants(source)})
    except TemplateSyntaxError:
        return []
