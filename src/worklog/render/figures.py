"""Figures as SVG, drawn from quantities: the same data always give the same bytes.

A page makes a figure with `figure("slug", kind, "caption")`, where kind is one of the constructors below. Each takes
Quantities only (from run(), evidence(), predict() or cite()) and a unit to draw them in, so that nothing in a figure
was typed by hand. White background: it reads the same in a light and a dark page.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worklog.render.quantity import UNITS, PageError, Quantity, digits, in_unit

WIDTH_IN = 8.6
"""619 points at 72 an inch: GitHub shows that unscaled."""

# Okabe and Ito's colours: distinct under the three common kinds of colour blindness. Yellow is too faint on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#7F7F7F")
INK, FAINT = "#1F2328", "#8C959F"
MARKERS = "osD^vPX"

STYLE: dict[str, Any] = {
    "svg.hashsalt": "worklog",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": "#E5E8EB",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Drawing:
    """A figure that is ready to be drawn, and the runs that its data come from."""

    draw: Callable[[Any], None]
    """Draws on one matplotlib Axes."""
    height_in: float
    runs: frozenset[str]


def _quantities(values: Iterable[Any]) -> tuple[list[Any], frozenset[str]]:
    found = list(values)
    runs: frozenset[str] = frozenset()
    for value in found:
        if isinstance(value, Quantity):
            runs |= value.runs
    if not found:
        raise PageError("a figure needs at least one value")
    return found, runs


def _in(value: Any, unit: str) -> float:
    """In a unit that quantities know, or, for a label of one's own ("bytes per weight"), the plain number."""
    return in_unit(value, unit if unit in UNITS else "")


def _dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _deeper(colour: str) -> str:
    """The colour, dark enough for text on white."""
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * 0.72):02X}" for i in (1, 3, 5))


def _legend(ax: Any, entries: Sequence[str]) -> None:
    one_line = sum(len(name) + 6 for name in entries) < 95
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=len(entries) if one_line else 3,
        borderaxespad=0.2,
        handlelength=1.1,
        columnspacing=1.4,
        handletextpad=0.5,
    )


def stacked(rows: Mapping[str, Mapping[str, Any]], unit: str = "ms") -> Drawing:
    """One horizontal bar a row, split into named parts: `{"bf16_eager": {"linear": q, "attention": q}, ...}`.

    Parts that fit carry their own number; the total stands at the bar's end. A part that a row lacks counts as absent.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    _, runs = _quantities(value for row in rows.values() for value in row.values())
    data = {name: {part: _in(value, unit) for part, value in row.items()} for name, row in rows.items()}
    longest = max(sum(row.values()) for row in data.values())

    def draw(ax: Any) -> None:
        for y, (_name, row) in enumerate(data.items()):
            left = 0.0
            for part, value in row.items():
                colour = COLOURS[parts.index(part) % len(COLOURS)]
                first = part not in ax.get_legend_handles_labels()[1]
                ax.barh(
                    y, value, left=left, height=0.62, color=colour, edgecolor="white", linewidth=0.8,
                    label=part if first else None,
                )  # fmt: skip
                if value > 0.07 * longest:
                    ink = "white" if _dark(colour) else INK
                    ax.text(left + value / 2, y, digits(value), ha="center", va="center", color=ink, fontsize=9)
                left += value
            ax.text(left + 0.01 * longest, y, digits(left), va="center", fontweight="bold", fontsize=10)
        ax.set_yticks(range(len(data)), list(data))
        ax.invert_yaxis()
        ax.set_xlim(0, longest * 1.1)
        ax.set_xlabel(unit)
        ax.grid(axis="x")
        ax.spines["left"].set_visible(False)
        _legend(ax, parts)

    return Drawing(draw, 1.15 + 0.42 * len(rows), runs)


def grouped(groups: Mapping[str, Mapping[str, Any]], unit: str, log: bool = False) -> Drawing:
    """A group of bars for each name, one bar a series: `{"eager": {"predicted": predict(..), "counted": q}, ...}`.

    A series whose name starts with "predicted" is drawn hollow. None leaves a gap.
    """
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    values, runs = _quantities(v for group in groups.values() for v in group.values() if v is not None)
    highest = max(_in(value, unit) for value in values)

    def draw(ax: Any) -> None:
        width = 0.8 / len(series)
        filled = [name for name in series if not name.startswith("predicted")]
        for index, name in enumerate(series):
            hollow = name not in filled
            colour = INK if hollow else COLOURS[filled.index(name) % len(COLOURS)]
            shown = [(i, _in(g[name], unit)) for i, g in enumerate(groups.values()) if g.get(name) is not None]
            at = [i + (index - (len(series) - 1) / 2) * width for i, _ in shown]
            ax.bar(
                at, [v for _, v in shown], width * 0.92, label=name, color="white" if hollow else colour,
                edgecolor=colour, linewidth=1.2, linestyle="--" if hollow else "-",
            )  # fmt: skip
            for x, (_, value) in zip(at, shown, strict=True):
                ax.annotate(
                    digits(value), (x, value), (0, 3), textcoords="offset points", ha="center", fontsize=9,
                )  # fmt: skip
        ax.set_xticks(range(len(groups)), list(groups))
        ax.set_ylabel(unit)
        if log:
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, highest * 1.12)
        ax.grid(axis="y")
        _legend(ax, series)

    return Drawing(draw, 3.6, runs)


def _ends(ax: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its right end, moved apart until none overlaps another."""
    transform = ax.transData
    placed: list[float] = []
    for x, y, name, colour in sorted(labels, key=lambda label: label[1]):
        pixel = float(transform.transform((x, y))[1])
        low = max([pixel, *(other + 12 for other in placed)])
        placed.append(low)
        ax.annotate(
            name,
            (x, y),
            (6, low - pixel),
            textcoords="offset points",
            va="center",
            color=_deeper(colour),
            fontsize=9.5,
            annotation_clip=False,
        )


def _curves(
    series: Mapping[str, Sequence[Sequence[Any]]], x_unit: str, y_unit: str, ceilings: Mapping[str, Any]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float], frozenset[str]]:
    values = [value for points in series.values() for point in points for value in point]
    _, runs = _quantities([*values, *ceilings.values()])

    def along(value: Any) -> float:
        if isinstance(value, int):
            return float(value)
        return _in(value, x_unit)

    curves = {name: [(along(x), _in(y, y_unit)) for x, y in points] for name, points in series.items()}
    return curves, {name: _in(value, y_unit) for name, value in ceilings.items()}, runs


def _plot(
    curves: dict[str, list[tuple[float, float]]],
    limits: dict[str, float],
    step: bool,
    log_x: bool,
    labels: tuple[str, str],
) -> Callable[[Any], None]:
    def draw(ax: Any) -> None:
        if log_x:
            ax.set_xscale("log", base=2)
            ticks = sorted({x for points in curves.values() for x, _ in points})
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()
        highest = max([y for points in curves.values() for _, y in points] + list(limits.values()))
        ax.set_ylim(0, highest * 1.08)
        ends = []
        for index, (name, points) in enumerate(curves.items()):
            colour = COLOURS[index % len(COLOURS)]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            if step:
                ax.plot(xs, ys, drawstyle="steps-post", color=colour)
            else:
                ax.plot(xs, ys, marker=MARKERS[index % len(MARKERS)], markersize=5, color=colour, clip_on=False)
            ends.append((xs[-1], ys[-1], name, colour))
        right = max(x for points in curves.values() for x, _ in points)
        left = min(x for points in curves.values() for x, _ in points)
        ax.set_xlim(left if step else None, right)
        ends = [(right if step else x, y, name, colour) for x, y, name, colour in ends]
        for name, value in limits.items():
            ax.axhline(value, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
            ends.append((right, value, name, INK))
        ax.set_xlabel(labels[0])
        ax.set_ylabel(labels[1])
        ax.grid(axis="y")
        _ends(ax, ends)

    return draw


def steps(
    series: Mapping[str, Sequence[Sequence[Any]]], x: str = "ms", unit: str = "GiB", ceilings: Mapping[str, Any] = {}
) -> Drawing:
    """A value that holds until it changes, over time: `{"0.13.0 eager": [[time, bytes], ...], ...}`."""
    curves, limits, runs = _curves(series, x, unit, ceilings)
    return Drawing(_plot(curves, limits, True, False, (f"time, {x}", unit)), 3.4, runs)


def lines(
    series: Mapping[str, Sequence[Sequence[Any]]],
    x: str,
    unit: str,
    ceilings: Mapping[str, Any] = {},
    log_x: bool = False,
) -> Drawing:
    """Points joined by lines: `{"fused": [[1, q], [2, q]], ...}`; x values are whole numbers or dimensionless.

    `ceilings` are drawn as dashed level lines: what the machine allows.
    """
    curves, limits, runs = _curves(series, "", unit, ceilings)
    return Drawing(_plot(curves, limits, False, log_x, (x, unit)), 3.8, runs)


def svg(drawing: Drawing, title: str = "") -> bytes:
    """The figure's file, without date, version or random identifiers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(WIDTH_IN, drawing.height_in), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        FigureCanvasSVG(figure)
        drawing.draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(
            out, format="svg", metadata={"Date": None, "Creator": None} | ({"Title": title} if title else {})
        )
    # Verdana has DejaVu Sans's widths, and is there where DejaVu is not.
    text = out.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return ("\n".join(line.rstrip() for line in text.splitlines()) + "\n").encode()
