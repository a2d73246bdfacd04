"""What all figures share: their colours, a page with a heading and a key, bars in rows, and numbers in the bars that have room.

matplotlib is an optional extra, imported when something is drawn, and used without pyplot, so no state is shared. The colours are
Okabe and Ito's, which differ in lightness, for the colour-blind and for grey prints.
"""

import base64
import functools
import importlib
import importlib.util
import io
import itertools
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Number

Axes = Any
Figure = Any  # matplotlib's; it is optional, so its classes cannot be imported here
CSS_DPI = 96  # pixels of a page in an inch
BAR = 0.88  # the part of a row that a bar is high
IDLE, INK, DOT = "#EFEFEF", "#222222", "dot"
WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input part", Kind.W: "W weight part"}
_COLOURS = {Kind.F: "#0072B2", Kind.B: "#E69F00", Kind.I: "#CC79A7", Kind.W: "#F0E442"}
_GROUPS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_LEAST, _MOST, _COLUMN, _BESIDE = 5.0, 9.375, 0.28, 0.9  # inches: of a page (at most 900 pixels), of a bar, beside the bars
_SMALLEST, _LARGEST = 6.0, 8.0  # points of the numbers in bars
_AROUND = tuple(  # points from a mark to its number, the nearest first
    (far * across, far * up)
    for far in (8, 14, 20, 27)
    for across, up in ((-1, -0.7), (1, 0.7), (1, -0.7), (-1, 0.7), (0, -1.1), (0, 1.1), (-1.2, 0), (1.2, 0))
)


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def matplotlib_module(module: str) -> Any:
    """A module of matplotlib, or an error that says how to install it."""
    if not has_matplotlib():
        fix = 'pip install -e ".[figures]" in the checkout of jaxpp'
        raise ImportError(f"figures need matplotlib, which is not installed. Fix: {fix}")
    return importlib.import_module(f"matplotlib.{module}")


def new_figure(inches: tuple[float, float], layout: str = "none") -> Figure:
    """An empty figure, white, that shows itself in a notebook; an inch is 96 pixels of a page."""
    figure = _picture_class()(inches, dpi=2 * CSS_DPI, facecolor="white", layout=layout)
    matplotlib_module("backends.backend_agg").FigureCanvasAgg(figure)
    return figure


@functools.cache
def _picture_class() -> type:
    """A matplotlib figure that a notebook shows once, at the same size everywhere, with or without pyplot's inline backend."""

    class Picture(matplotlib_module("figure").Figure):
        def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict[str, str], dict[str, Any]]:
            del include, exclude  # there is one format
            out = io.BytesIO()
            self.savefig(out, format="png", dpi=2 * CSS_DPI)
            width, height = (round(CSS_DPI * inches) for inches in self.get_size_inches())
            data = {"image/png": base64.b64encode(out.getvalue()).decode(), "text/plain": repr(self)}
            return data, {"image/png": {"width": width, "height": height}}

        def _ipython_display_(self) -> None:
            """Without this the inline backend, once it is on, would draw its own picture, cropped and at another size."""
            data, metadata = self._repr_mimebundle_()
            importlib.import_module("IPython.display").display(data, metadata=metadata, raw=True)

    return Picture


def colour_of(kind: Kind, order: int, latest: int, wide: float = math.inf) -> str:
    """The colour of a bar of ``wide`` points on stage number ``order`` of its rank: paler for later stages, stronger if thin."""
    thin = min(1.0, max(0.0, 1 - wide / 4))
    pale = _mix(_COLOURS[kind], "#FFFFFF", (1 - thin) * 0.55 * order / max(1, latest))
    return _mix(pale, "#000000", 0.25 * thin) if kind == Kind.W else pale


def group_colour(group: int, *, pale: bool = False) -> str:
    """The colour of a group of a ring; the second six are darker, the third six paler, and then they begin again."""
    towards, part = (("#FFFFFF", 0.0), ("#000000", 0.4), ("#FFFFFF", 0.5))[group // len(_GROUPS) % 3]
    return _mix(_mix(_GROUPS[group % len(_GROUPS)], towards, part), "#FFFFFF", 0.6 * pale)


def shade(part: float) -> str:
    """A grey, from light (0) to dark (1)."""
    return _mix("#FFFFFF", INK, 0.08 + 0.35 * part)


def ink_on(colour: str) -> str:
    """White for numbers on dark colours, else black."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#FFFFFF" if 0.3 * red + 0.59 * green + 0.11 * blue < 110 else "#000000"


def _mix(colour: str, other: str, part: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in pairs)


Entry = tuple[str, str]  # words of a key, and what they explain: a colour, ``DOT``, or nothing


def draw_key(figure: Figure, entries: Sequence[Entry], heading: str = "", where: str = "upper") -> None:
    """A heading and a key above everything, or below (``"lower"``), in as few lines as have room."""
    patch, line = matplotlib_module("patches").Patch, matplotlib_module("lines").Line2D
    width, count = figure.get_figwidth(), len(entries)
    dot = {"marker": "o", "markersize": 5, "linestyle": "none", "color": INK}
    handles = [line([], [], **dot) if what == DOT else patch(color=what or "none") for _, what in entries]
    inches = [0.47 + 0.062 * len(words) for words, _ in entries]
    num_columns = next((n for n in range(count, 1, -1) if sum(max(inches[k::n]) for k in range(n)) <= width), 1)
    order = [k for first in range(num_columns) for k in range(first, count, num_columns)]  # matplotlib fills columns first
    title = {"title": textwrap.fill(heading, max(20, int(13.5 * width))), "title_fontsize": 10, "alignment": "left"}
    style = {"fontsize": 8, "labelcolor": INK, "frameon": False, "loc": f"outside {where} left", "ncols": num_columns}
    space = {"handlelength": 1.6, "columnspacing": 1.4, "borderpad": 0, "borderaxespad": 0.4}
    figure.legend([handles[k] for k in order], [entries[k][0] for k in order], **title, **style, **space)


class Panel(NamedTuple):
    """The extent of y from the top, the height in inches, and the extent of x."""

    rows: float
    height: float
    across: Number


def page_width(columns: float, width: float | None) -> tuple[float, float]:
    """Inches of a page with so many bars beside one another, unless they are given, and about how many points its panels have."""
    width = width or min(_MOST, max(_LEAST, _BESIDE + _COLUMN * columns))
    return width, 72 * (width - _BESIDE)


def page(heading: str, key: Sequence[Entry], panels: Sequence[Panel], width: float, unit: str = "") -> tuple[Figure, list[Axes]]:
    """A figure with a heading, a key, and panels below one another, and the axes of each panel."""
    figure = new_figure((width, 3 + sum(panel.height for panel in panels)), "constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06, hspace=0)
    draw_key(figure, key, heading)
    ratios = {"height_ratios": [panel.height for panel in panels]}
    axes = list(figure.subplots(len(panels), 1, squeeze=False, gridspec_kw=ratios)[:, 0])
    for each, panel, after in itertools.zip_longest(axes, panels, panels[1:]):
        each.set(xlim=(0, panel.across), ylim=(panel.rows, 0), facecolor="none")
        each.spines[:].set_visible(False)
        each.tick_params(length=0, labelsize=8, labelcolor=INK)
        bins = max(2, int(width / 0.75))
        each.locator_params(axis="x", nbins=bins, integer=panel.across > 4, steps=[1, 2, 5, 10])
        if after is not None and after.across == panel.across:
            each.set_xticks([])
    axes[-1].set_xlabel(f"time, {unit}" if unit else "time", size=9, color=INK)
    return figure, axes


def chart(inches: tuple[float, float], heading: str, key: Sequence[Entry], across: str, up: str) -> tuple[Figure, Axes]:
    """A figure with a heading, a key, and axes that have a grid, and words along both."""
    figure = new_figure(inches, "constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    draw_key(figure, key, heading)
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.set_xlabel(across, size=9, color=INK)
    axes.set_ylabel(up, size=9, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8, labelcolor=INK, color=shade(0.6))
    axes.grid(color=shade(0), linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def fit_page(figure: Figure, axes: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """Let the page be as high as the panels need beside all that is written, and keep everything where it is then."""
    figure.draw_without_rendering()
    inches = sum(each.get_window_extent().height for each in axes) / figure.dpi
    figure.set_figheight(figure.get_figheight() + sum(panel.height for panel in panels) - inches)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def folded(title: str, axes: Axes) -> str:
    """The title of a panel in as many lines as it needs."""
    return textwrap.fill(title, max(20, int(12 * (axes.figure.get_figwidth() - _BESIDE))))


def points_of(axes: Axes) -> tuple[float, float]:
    """Points of a unit of x and of a unit of y, once the figure has been laid out."""
    box, scale = axes.get_window_extent(), 72 / axes.figure.dpi
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return scale * box.width / abs(right - left), scale * box.height / abs(top - bottom)


def inside(top: float) -> tuple[float, float]:
    """Where a bar begins in the row that begins at ``top``, and how high it is."""
    return top + (1 - BAR) / 2, BAR


Box = tuple[float, float, Number, Number]  # upper edge, height, begin and end


def draw_boxes(axes: Axes, boxes: Iterable[Box], colour: str, label: str, scale: float = 0) -> None:
    """Draw boxes of one colour, apart from one another if a unit of x has about ``scale`` points."""
    places = defaultdict[tuple[float, float], list[tuple[float, float]]](list)
    for top, height, start, end in boxes:
        places[top, height].append((float(start), float(end - start)))
    for place, spans in places.items():
        edges = [min(0.5, 0.1 * scale * long) for _, long in spans]
        axes.broken_barh(spans, place, facecolors=colour, edgecolors="white", linewidths=edges, label=label)


def draw_rows(axes: Axes, tops: dict[str, float], end: Number) -> None:
    """Draw named rows, each with its top, idle up to ``end``."""
    draw_boxes(axes, [(*inside(top), 0, end) for top in tops.values()], IDLE, "idle")
    axes.set_yticks([top + 0.5 for top in tops.values()], list(tops))


class Look(NamedTuple):
    """How a bar looks, and where: all bars of a label look the same."""

    label: str
    kind: Kind | None  # bars of a kind have their numbers all or not at all; None of what is no action
    colour: str
    lines: int  # how often the bar is underlined, as the bars of later stages are
    text: str  # its number
    top: float
    start: float
    end: float


def draw_bars(axes: Axes, bars: Iterable[Look], scale: float) -> None:
    """Draw bars, those of a label and row as one collection; a unit of x has about ``scale`` points."""
    groups = defaultdict[tuple[str, float], list[Look]](list)
    for bar in bars:
        groups[bar.label, bar.top].append(bar)
    for (label, top), group in groups.items():
        spans, bottom = [(bar.start, bar.end - bar.start) for bar in group], top + (1 + BAR) / 2
        edges = [min(0.7, 0.1 * scale * long) for _, long in spans]
        style = {"facecolors": [bar.colour for bar in group], "edgecolors": "white", "linewidths": edges}
        axes.broken_barh(spans, inside(top), label=label, **style)
        for k in range(group[0].lines):
            place, dark = (bottom - 0.08 * BAR * (1.5 + 1.6 * k), 0.08 * BAR), _mix(group[0].colour, "#000000", 0.5)
            axes.broken_barh(spans, place, facecolors=dark, label="underline")


def write_numbers(panels: Sequence[tuple[Axes, Sequence[Look]]], noun: str) -> None:
    """Write the numbers of bars in one size, and below what they are; a kind has them if four in five of its bars have room."""
    letters = max((len(bar.text) for _, bars in panels for bar in bars if bar.kind), default=1)
    sizes: list[dict[Kind, float]] = []
    for axes, bars in panels:
        (wide, high), found = points_of(axes), defaultdict[Kind, list[float]](list)
        for bar in bars:
            if bar.kind and bar.end > bar.start:
                found[bar.kind].append(wide * (bar.end - bar.start))
        fits = {kind: _largest(letters, sorted(widths)[len(widths) // 5], BAR * high) for kind, widths in found.items()}
        sizes.append({kind: math.floor(2 * size) / 2 for kind, size in fits.items() if size >= _SMALLEST})
    size = min([_LARGEST, *(size for found in sizes for size in found.values())])
    for (axes, bars), numbered in zip(panels, sizes, strict=True):
        wide, high = points_of(axes)
        for bar in bars:
            room = _largest(len(bar.text), wide * (bar.end - bar.start), BAR * high)
            if size <= room and (bar.kind is None or bar.kind in numbered):
                middle, style = bar.top + 0.5 - 0.05 * bar.lines, {"ha": "center", "va": "center_baseline"}
                axes.text((bar.start + bar.end) / 2, middle, bar.text, size=size, color=ink_on(bar.colour), **style)
    if any(sizes):
        without = {bar.kind for _, bars in panels for bar in bars} - {kind for found in sizes for kind in found}
        last, room = panels[0][0].figure.axes[-1], ", ".join(kind for kind in Kind if kind in without)
        last.set_xlabel(f"{last.get_xlabel()}  (numbers: {noun}{f'; no room in {room}' if room else ''})")


def _largest(letters: int, wide: float, high: float) -> float:
    return min((wide - 1.5) / (0.64 * letters), (high - 1.5) / 0.75)


def number_points(axes: Axes, points: Sequence[tuple[float, float]], first: int = 1) -> None:
    """Write ``first``, the next, ... beside points of axes, each where no number is written yet, as near as can be."""
    written: list[tuple[float, float]] = []
    for number, point in enumerate(points, first):
        x, y = axes.transData.transform(point) * 72 / axes.figure.dpi
        free = (place for place in _AROUND if all(math.dist((x + place[0], y + place[1]), at) > 12 for at in written))
        across, up = next(free, _AROUND[0])
        written.append((x + across, y + up))
        style = {"textcoords": "offset points", "size": 7.5, "color": INK, "ha": "center", "va": "center"}
        axes.annotate(str(number), point, (across, up), **style)
