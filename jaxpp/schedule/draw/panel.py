"""What all figures are drawn with: axes whose size in points is known, so that text is drawn only where it fits into a bar.

Colours are Okabe and Ito's. Each has another lightness, so that the colour-blind and readers of grey prints can tell them apart.
The later stages of a rank are paler and underlined, once for the second stage, twice for the third.

matplotlib is an optional extra. It is imported when something is drawn, and used without pyplot, so no state is shared.
"""

import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.residual_counts import Residual, counts, places

__all__ = [
    "DOT",
    "INK",
    "LEFT",
    "Entry",
    "Figure",
    "Panel",
    "Part",
    "bar_legend",
    "has_matplotlib",
    "inside",
    "legend",
    "matplotlib_module",
    "page",
    "several_stages",
    "shade",
    "width_of",
]

_COLOURS = {Kind.F: "#0072B2", Kind.B: "#E69F00", Kind.I: "#CC79A7", Kind.W: "#F0E442"}
_WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input part", Kind.W: "W weight part"}
_IDLE, INK, DOT = "#EFEFEF", "#222222", "dot"
LEFT, _TOP, _BOTTOM = 0.62, 0.66, 0.5  # inches around the axes: the rows' names, heading and key, the time
_SMALLEST, _LARGEST = 4.5, 8.0  # points of the numbers in bars


class _Cell(NamedTuple):
    """A bar as it is drawn: its box, its kind, the number of its stage on its rank, and its text."""

    left: Number
    right: Number
    top: float
    bottom: float
    kind: Kind
    order: int
    text: str = ""


class Part(NamedTuple):
    """The room of one panel of a page: the extent of y from the top, and in inches its height and what is left free above it."""

    rows: float
    height: float
    above: float = 0


Figure = Any
"""A ``matplotlib.figure.Figure``; matplotlib is optional, so its classes cannot be imported here."""
Entry = tuple[str, Kind | str, int]
"""Words of a legend, what they explain (a kind, a colour, or ``DOT``), and for a kind which stage of its rank."""


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


class Panel:
    """Axes of known size, so that what fits into a bar is known before it is drawn.

    The box is left, bottom, width and height in inches; x goes from 0 to ``across``, y from 0 at the top to ``down``.
    """

    def __init__(self, figure: Figure, box: tuple[float, float, float, float], across: Number, down: float):
        width, height = figure.get_size_inches()
        self.box = box
        self.axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        self.across = across
        self.points = 72 * box[2] / across, 72 * box[3] / down
        self.axes.set(xlim=(0, across), ylim=(down, 0), facecolor="none")
        self.axes.tick_params(length=0, labelsize=8, labelcolor=INK)
        self.axes.tick_params(axis="y", labelsize=min(8, self.points[1]))
        self.axes.spines[:].set_visible(False)

    def rectangles(
        self, boxes: Iterable[tuple[Number, Number, float, float]], colour: str, label: str, edge: float | Sequence[float] = 0
    ) -> None:
        """Draw boxes (left, right, top, bottom) of one colour, as one collection, with white lines of ``edge`` points."""
        corners = [((left, top), (right, top), (right, bottom), (left, bottom)) for left, right, top, bottom in boxes]
        self.polygons(corners, colour, label, edge, "white")

    def polygons(
        self, corners: Sequence[Sequence[tuple[Number, float]]], colour: str, label: str, edge: float | Sequence[float], line: str
    ) -> None:
        """Draw polygons of one colour, as one collection, with lines of ``edge`` points around them."""
        made = matplotlib_module("collections").PolyCollection(corners, facecolors=[colour], edgecolors=line, linewidths=edge)
        made.set_label(label)
        self.axes.add_collection(made, autolim=False)

    def lanes(
        self, tops: Mapping[str, float], bars: Iterable[tuple[Bar, float]], end: Number, stage_to_rank: Sequence[int]
    ) -> None:
        """Draw named lanes, idle up to ``end``, and on them the bars, each in the lane that begins at the number beside it."""
        self.rectangles([(0, end, *inside(top)) for top in tops.values()], _IDLE, "idle")
        self.cells([_cell_of(bar, top, stage_to_rank) for bar, top in bars])
        self.axes.set_yticks([top + 0.5 for top in tops.values()], list(tops))

    def cells(self, cells: Sequence[_Cell]) -> None:
        """Draw the cells, one collection for each kind and stage of its rank, with numbers where they can be read."""
        groups: dict[tuple[Kind, int], list[_Cell]] = defaultdict(list)
        latest, longest = max(cell.order for cell in cells), max(len(cell.text) for cell in cells)
        for cell in cells:
            groups[cell.kind, cell.order].append(cell)
        for (kind, order), group in groups.items():
            pale = 0.55 * order / max(1, latest)
            edges = [min(0.7, 0.1 * self.points[0] * (cell.right - cell.left)) for cell in group]
            self.rectangles([cell[:4] for cell in group], _mix(_COLOURS[kind], "#FFFFFF", pale), f"{kind} {order}", edges)
            if order:
                dark = _mix(_COLOURS[kind], "#000000", 0.35)
                self.rectangles([line for cell in group for line in _underlines(cell)], dark, "underline")
            ink = "#FFFFFF" if kind == Kind.F and pale < 0.25 else "#000000"
            spots = defaultdict(list)
            sizes = [self._size(longest, cell.right - cell.left, cell.bottom - cell.top) for cell in group]
            usual = max(_SMALLEST, statistics.median_low(sizes))
            for cell, size in zip(group, sizes, strict=True):
                spots[cell.text, min(size, usual)].append(
                    ((cell.left + cell.right) / 2, (cell.top + cell.bottom) / 2 - 0.05 * order)
                )
            for (text, size), at in spots.items():
                self.write(text, size, at, ink)

    def pebbles(self, residuals: Sequence[Residual], top: float, step: float, most: int) -> None:
        """Draw the residuals of a stage into the lane at ``top``: in every column a dot each, if it is alive then; ``most`` fit."""
        wide, high = 0.8 * self.points[0] * step, 0.88 * self.points[1]
        num_rows = max(range(1, most + 1), key=lambda rows: min(wide / -(-most // rows), high / rows))
        num_columns = -(-most // num_rows)
        cell, dots = min(wide / num_columns, high / num_rows), []
        for residual, place in places(residuals):
            across, down = 0.1 + 0.8 * (place // num_rows + 0.5) / num_columns, (place % num_rows + 0.5) / num_rows
            columns = range(*(math.ceil(time / step - across) for time in (residual.start, residual.end)))
            dots += [((column + across) * step, top + 0.06 + 0.88 * down) for column in columns]
        self.dots(min(3.2, 0.4 * cell), dots)

    def numbers(self, residuals: Sequence[Residual], top: float, most: int) -> None:
        """Draw how many residuals of a stage are alive into the lane at ``top``, the darker the nearer to ``most``."""
        spans = defaultdict(list)
        for start, end, count in counts(residuals):
            spans[count, self._size(len(str(count)), end - start, 0.88)].append((start, end, *inside(top)))
        for (count, size), boxes in spans.items():
            self.rectangles(boxes, shade(count / most), f"{count} pebbles")
            self.write(str(count), size, [((start + end) / 2, top + 0.5) for start, end, _, _ in boxes], "#000000")

    def dots(self, radius: float, at: Sequence[tuple[float, float]]) -> None:
        """Draw pebbles."""
        self.stamp(matplotlib_module("path").Path.unit_circle(), radius, at, INK, "pebbles")

    def margin(self, texts: Sequence[str], y: float) -> None:
        """Write to the right of the axes."""
        for inches, text in zip((0.12, 0.5), texts, strict=False):
            x, size = self.across + 72 * inches / self.points[0], min(8, self.points[1])
            self.axes.text(x, y, text, size=size, va="center", color=INK)

    def title(self, text: str, above: float = 0.07) -> None:
        """Write a title, that many inches above the axes."""
        if text:
            self.axes.text(0, -72 * above / self.points[1], text, size=9, weight="bold", va="bottom", color=INK)

    def write(self, text: str, size: float, at: Sequence[tuple[float, float]], colour: str) -> None:
        """Stamp a text, centred, at each place; not at all if its size is 0."""
        if text and size:
            path = matplotlib_module("textpath").TextPath((0, 0), text, size=size)
            middle = path.get_extents().get_points().mean(axis=0)
            self.stamp(matplotlib_module("path").Path(path.vertices - middle, path.codes), 1, at, colour, "text")

    def stamp(self, path: Any, scale: float, at: Sequence[tuple[float, float]], colour: str, label: str) -> None:
        """Draw the same path, its units ``scale`` points, at each place."""
        where = {"sizes": [scale**2], "offsets": at, "offset_transform": self.axes.transData}
        made = matplotlib_module("collections").PathCollection([path], facecolors=[colour], linewidths=0, label=label, **where)
        made.set_transform(matplotlib_module("transforms").IdentityTransform())
        self.axes.add_collection(made, autolim=False)

    def _size(self, letters: int, width: Number, height: float) -> float:
        """Points of a text that fits, in steps of a half; 0 if it could not be read."""
        fits = min(_LARGEST, 1.35 * self.points[0] * width / max(1, letters), 0.9 * self.points[1] * height)
        return math.floor(2 * fits) / 2 if fits >= _SMALLEST else 0


def page(
    heading: str, across: Number, parts: Sequence[Part], width: float, margin: float, left: float = LEFT, unit: str = ""
) -> tuple[Panel, ...]:
    """A figure with a heading, and panels below one another. They share the axis of time, which is under the last.

    ``width`` is that of every panel, ``margin`` and ``left`` are the space beside them, all in inches; ``unit`` is that of time.
    """
    wide, tall = left + width + margin, _TOP + sum(part.above + part.height for part in parts) + _BOTTOM
    figure = matplotlib_module("figure").Figure((wide, tall), dpi=120, facecolor="white", layout="none")
    matplotlib_module("backends.backend_agg").FigureCanvasAgg(figure)
    figure.text(left / wide, 1 - 0.1 / tall, heading, va="top", size=10, color=INK)
    panels, bottom = [], tall - _TOP
    for part in parts:
        bottom -= part.above + part.height
        panels.append(Panel(figure, (left, bottom, width, part.height), across, part.rows))
    for panel in panels[:-1]:
        panel.axes.set_xticks([])
    last = panels[-1].axes
    last.set_xlabel(f"time, {unit}" if unit else "time", size=9, color=INK)
    last.locator_params(axis="x", nbins=max(2, int(width / 0.7)), integer=across > 4, steps=[1, 2, 5, 10])
    return tuple(panels)


def legend(panel: Panel, entries: Iterable[Entry], above: float) -> None:
    """What colours mean, in a line that many inches above the panel."""
    figure, (left, bottom, _, tall) = panel.axes.figure, panel.box
    width = figure.get_figwidth() - left
    key = Panel(figure, (left, bottom + tall + above, width, 0.2), width, 1)
    key.axes.set(xticks=[], yticks=[])
    cells, x = [], 0.0
    for words, what, order in entries:
        if isinstance(what, Kind):
            cells.append(_Cell(x, x + 0.22, 0.1, 0.9, what, order))
        elif what == DOT:
            key.dots(3, [(x + 0.11, 0.5)])
        else:
            key.rectangles([(x, x + 0.22, 0.1, 0.9)], what, words)
        key.axes.text(x + 0.28, 0.52, words, size=8, va="center", color=INK)
        x += 0.42 + 0.057 * len(words)
    if cells:
        key.cells(cells)


def bar_legend(
    panel: Panel, bars: Sequence[Bar], stage_to_rank: Sequence[int], pebble: str = "", above: float = 0, more: Sequence[Entry] = ()
) -> None:
    """What the colours of bars mean, in a line between the heading and what lies that many inches above the panel."""
    entries: list[Entry] = [(_WORDS[k], k, 0) for k in Kind if any(b.action.kind == k for b in bars)]
    entries += [("later stage of its rank", Kind.F, 1)] * several_stages(stage_to_rank)
    entries += [*more, *[("idle", _IDLE, 0), ("residuals alive", pebble, 0)][: 1 + bool(pebble)]]
    legend(panel, entries, 0.1 + above)


def _cell_of(bar: Bar, top: float, stage_to_rank: Sequence[int]) -> _Cell:
    """The cell of a bar in the row that begins at ``top``."""
    stage, kind, microbatch = bar.action
    order = list(stage_to_rank[:stage]).count(stage_to_rank[stage])
    return _Cell(bar.start, bar.end, *inside(top), kind, order, str(microbatch))


def inside(top: float) -> tuple[float, float]:
    """Top and bottom of what stands in the row that begins at ``top``."""
    return top + 0.06, top + 0.94


def several_stages(stage_to_rank: Sequence[int]) -> bool:
    """Whether some rank has more than one."""
    return len(stage_to_rank) > max(stage_to_rank) + 1


def width_of(columns: float, stage_to_rank: Sequence[int]) -> float:
    """Inches for so many columns, with room for the key at least."""
    return min(22, max(7.8 if several_stages(stage_to_rank) else 6.1, 0.28 * columns))


def shade(part: float) -> str:
    """A grey, from light (0) to dark (1)."""
    return _mix("#FFFFFF", INK, 0.08 + 0.35 * part)


def matplotlib_module(module: str) -> Any:
    """A module of matplotlib, or an error that says how to install it."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError('figures need matplotlib, which is not installed. Fix: pip install "jaxpp[figures]"') from error


def _underlines(cell: _Cell) -> list[tuple[Number, Number, float, float]]:
    thick = 0.08 * (cell.bottom - cell.top)
    bottoms = [cell.bottom - (0.5 + 1.6 * k) * thick for k in range(cell.order)]
    return [(cell.left, cell.right, bottom - thick, bottom) for bottom in bottoms]


def _mix(colour: str, other: str, part: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in pairs)
