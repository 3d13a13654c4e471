"""Worklog pages: `WORKLOG.md.j2` and the recorded runs in, `WORKLOG.md` and its figures out.

A template is Jinja, sandboxed and strict: an unknown name, a missing run and a number without an origin are errors that
name the file and the line. CONTRIBUTING.md shows every function and filter with an example.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment

from worklog import problem as problems
from worklog.problem import ProblemError
from worklog.render import figures, prose
from worklog.render.evidence import Library, Run
from worklog.render.quantity import (
    FILTERS,
    UNITS,
    PageError,
    Quantity,
    digits,
    in_unit,
    number,
    plain,
    tagged,
)
from worklog.render.tables import table

_SOURCES, _RUNS = "\x02sources\x02", "\x02runs\x02"


@dataclass
class Page:
    """A rendered page."""

    source: Path
    text: str = ""
    figures: dict[str, bytes] = field(default_factory=dict)
    """Slug -> SVG."""
    runs: dict[str, Run] = field(default_factory=dict)
    """Every run that the page read, by the name it used."""
    result: str | None = None
    """What the template set as `result`: one sentence for the index."""

    @property
    def target(self) -> Path:
        return self.source.with_suffix("")


class _Author:
    """The functions that a template calls, and what they collect."""

    def __init__(self, folder: Path) -> None:
        self.library = Library(folder.parent.parent, folder.name)
        self.sources: list[str] = []
        self.figures: dict[str, bytes] = {}

    def names(self) -> dict[str, Any]:
        return {
            "run": self.library.run,
            "evidence": self.library.evidence,
            "artifact": self.artifact,
            "command": lambda run: self._run(run).command,
            "cite": self.cite,
            "predict": number,
            "verdict": verdict,
            "table": table,
            "figure": self.figure,
            "sources": lambda: _SOURCES,
            "runs": lambda: _RUNS,
            "zip": lambda *lists: list(zip(*lists, strict=True)),
            "stacked": figures.stacked,
            "grouped": figures.grouped,
            "steps": figures.steps,
            "lines": figures.lines,
        }

    def _run(self, run: str | Run) -> Run:
        return self.library.run(run) if isinstance(run, str) else run

    def _link(self, run: Run) -> str:
        return f"../../reports/{run.problem}/{run.id}/"

    def artifact(self, run: str | Run, path: str, text: str | None = None) -> str:
        """A link to a file of a run folder. Raises PageError unless the record lists it with this content."""
        found = self._run(run)
        self.library.file(found, path)
        return f"[{text or f'`{path}`'}]({self._link(found)}{path})"

    def cite(self, value: float | str, unit: str, source: str) -> Quantity | str:
        """Someone else's number, printed with a link to the page's list of sources."""
        if not source:
            raise PageError("cite() needs a source")
        if source not in self.sources:
            self.sources.append(source)
        note = f" [[{self.sources.index(source) + 1}]](#sources)"
        if isinstance(value, str):
            return f"{value} {unit}".rstrip() + note
        cited = number(value, unit)
        return Quantity(value, cited.scale, cited.dims, label=unit, note=note)

    def figure(self, slug: str, drawing: figures.Drawing, caption: str) -> str:
        """Draws figures/<slug>.svg; the image and its caption, which ends in the run ids."""
        if not slug or slug.strip("abcdefghijklmnopqrstuvwxyz0123456789-"):
            raise PageError(f"figure({slug!r}): a slug has small letters, digits and hyphens only")
        if slug in self.figures:
            raise PageError(f"figure({slug!r}): the page has one of this name already")
        self.figures[slug] = figures.svg(drawing, caption)
        runs = ", ".join(f"`{run}`" for run in sorted(drawing.runs))
        noun = "Run" if len(drawing.runs) == 1 else "Runs"
        origin = f" {noun}: {runs}." if runs else ""
        alt = caption.replace("[", "(").replace("]", ")").replace("`", "").replace("\n", " ")
        return f"![{alt}](figures/{slug}.svg)\n\n*{caption}*{origin}"

    def finish(self, text: str) -> str:
        """Put the lists, known only now, where the page asked for them; sources go to the end if it did not ask."""
        listed = "\n".join(f"{i}. {source}" for i, source in enumerate(self.sources, 1))
        if self.sources and _SOURCES not in text:
            text = f"{text.rstrip()}\n\n## Sources\n\n{_SOURCES}\n"
        rows = [
            [
                f"[`{run.id}`]({self._link(run)}record.json)",
                run.gpu,
                run.date,
                f"`{run.commit[:10]}`",
                f"`{run.command}`",
            ]
            for run in self.library.used.values()
            if run.commit
        ]
        runs = "No recorded run yet."
        if rows:
            runs = table(rows, ["run", "machine", "date", "commit", "command"])
        return text.replace(_SOURCES, listed).replace(_RUNS, runs).rstrip() + "\n"


def verdict(predicted: Quantity, measured: Quantity | None, within: float | str = 0.1) -> str:
    """**confirmed** or **refuted**, with both numbers.

    `within` is the relative deviation that was allowed beforehand, or "at least" or "at most" for a predicted bound.
    """
    unit = predicted.label
    known = unit if unit in UNITS else ""
    gap = "" if unit == "x" else " "
    if measured is None:
        return f"**undecided**: predicted {plain(predicted)}, not measured"
    value = in_unit(measured, known)
    expected = in_unit(predicted, known)
    shown = f"predicted {{}}{plain(predicted)}, measured {digits(value)}{gap}{unit}".rstrip()
    if within in ("at least", "at most"):
        holds = value >= expected if within == "at least" else value <= expected
        return f"**{'confirmed' if holds else 'refuted'}**: " + shown.format(f"{within} ")
    if not isinstance(within, (int, float)):
        raise PageError(f'verdict(): {within!r} is neither a fraction nor "at least" nor "at most"')
    off = value / expected - 1
    deviation = f" ({off * 100:+.0f} %, allowed ±{within * 100:g} %)"
    return f"**{'confirmed' if abs(off) <= within else 'refuted'}**: " + shown.format("") + deviation


def _finalize(value: Any) -> Any:
    """What an expression may print: text, whole numbers, and quantities; nothing that came from nowhere."""
    if isinstance(value, Undefined):
        return str(value)  # raises, with the name that is missing
    if value is None:
        raise PageError("this prints None: the record has no such value")
    if isinstance(value, float) and not isinstance(value, Quantity):
        raise PageError(f"{value!r} comes from no record, config, cite() or predict()")
    if isinstance(value, (dict, list, tuple, Run)) or (callable(value) and not isinstance(value, str)):
        raise PageError(f"this prints a whole {type(value).__name__}; name the value in it")
    return value


def _origin_filter(name: str) -> Any:
    """Jinja's own arithmetic filters would drop the unit; say so instead."""

    def refuse(*_: Any) -> Any:
        raise PageError(f"`| {name}` drops a number's unit and origin; use `| ms`, `| ratio(4)` and so on")

    return refuse


def environment(folder: Path) -> SandboxedEnvironment:
    made = SandboxedEnvironment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters.update(FILTERS)
    made.filters.update({name: _origin_filter(name) for name in ("round", "float", "int", "format", "filesizeformat")})
    return made


def render(folder: Path, source: str = "WORKLOG.md.j2") -> Page:
    """The page that `folder/source` and the recorded runs give. Writes nothing.

    Raises PageError naming file and line: a template that does not parse, an unknown name, a run that may not be cited,
    or a number that was typed by hand.
    """
    file = folder / source
    short = file.relative_to(folder.parent.parent)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise PageError(f"{short}: cannot be read ({error.strerror})") from error
    author = _Author(folder)
    try:
        template = environment(folder).get_template(source)
    except TemplateSyntaxError as error:
        raise PageError(f"{short}:{error.lineno}: {error.message}") from error
    try:
        if found := prose.unbound(text):
            raise PageError("\n".join(f"{short}:{one.line}: {one}" for one in found))
        names = {**author.names(), **_configs(folder)}
        module = template.make_module(names)
        body = author.finish(str(module))
    except (PageError, TemplateError, SecurityError, TypeError, ValueError, KeyError) as error:
        if str(error).startswith(f"{short}:"):
            raise
        raise PageError(f"{short}:{_line(error, template)}: {error}") from error
    note = (
        f"<!-- Made from {source} and reports/ by `worklog render {folder.name}`. Edit that file, not this one. -->\n"
    )
    result = getattr(module, "result", None)
    return Page(file, note + body, author.figures, author.library.used, str(result).strip() if result else None)


def _configs(folder: Path) -> Mapping[str, Any]:
    """`config`: the problem's first cuda config (its first at all, without one); `configs`: all, by name."""
    loaded = problems.load(str(folder))
    configs = {config.name: tagged("", config.as_dict(), frozenset()) for config in loaded.configs}
    try:
        default = loaded.config(None, "cuda")
    except ProblemError:
        default = loaded.configs[0]
    return {"config": configs[default.name], "configs": configs, "problem": folder.name, "title": loaded.title}


def _line(error: BaseException, template: Template) -> int:
    """The template's line that was being rendered when the error came up."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == template.filename]
    return template.get_corresponding_lineno(frames[-1].lineno or 1) if frames else 1


def outputs(folder: Path) -> tuple[list[Page], dict[Path, bytes]]:
    """Every page of a problem (each `*.md.j2` in its folder) and the content of every file that they make."""
    pages, files = [], {}
    for template in sorted(folder.glob("*.md.j2")):
        page = render(folder, template.name)
        pages.append(page)
        files[page.target] = page.text.encode()
        for slug, content in page.figures.items():
            files[folder / "figures" / f"{slug}.svg"] = content
    return pages, files


__all__ = ["Page", "PageError", "environment", "outputs", "render", "verdict"]
