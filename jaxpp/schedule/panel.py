"""What figures are drawn with: axes whose size in points is known, so that what fits into a bar is known before it is drawn.

Colours are Okabe and Ito's, each of another lightness, so that they part for the colour-blind and in grey. The later stages of a
rank are paler and underlined, once for the second stage, twice for the third.

matplotlib is an optional extra. It is imported when something is drawn, and used without pyplot, so no state is shared.
"""

import importlib.util
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.residuals import Residual, counts, places

__all__ = [
    "DOT",
    "IDLE",
    "INK",
    "Cell",
    "Panel",
    "available",
    "cell_of",
    "inside",
    "key_of",
    "module_of",
    "page",
    "several_stages",
    "shade",
    "width_of",
]

_COLOURS = {Kind.F: "#0072B2", Kind.B: "#E69F00", Kind.I: "#CC79A7", Kind.W: "#F0E442"}
_WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input part", Kind.W: "W weight part"}
IDLE, INK, DOT = "#EFEFEF", "#222222", "dot"
_LEFT, _TOP, _BOTTOM = 0.62, 0.66, 0.5  # inches around the axes: the rows' names, heading and key, the time
_SMALLEST, _LARGEST = 4.5, 8.0  # points of the numbers in bars


class Cell(NamedTuple):
    """A bar as it is drawn: its box, its kind, which stage of its rank it is of, and what stands in it."""

    left: Number
    right: Number
    top: float
    bottom: float
    kind: Kind
    order: int
    text: str = ""


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


class Panel:
    """Axes of known size, so that what fits into a bar is known before it is drawn.

    Args:
        figure: to be on.
        box: left, bottom, width and height in inches.
        across: the extent of x.
        down: the extent of y, from the top.
    """

    def __init__(self, figure: Any, box: tuple[float, float, float, float], across: Number, down: float):
        width, height = figure.get_size_inches()
        self.axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        self.across = across
        self.points = 72 * box[2] / across, 72 * box[3] / down
        self.axes.set(xlim=(0, across), ylim=(down, 0), facecolor="none")
        self.axes.tick_params(length=0, labelsize=8, labelcolor=INK)
        self.axes.tick_params(axis="y", labelsize=min(8, self.points[1]))
        self.axes.spines[:].set_visible(False)

    def rectangles(self, boxes: Iterable[tuple[Number, Number, float, float]], colour: str, label: str, edge: float = 0) -> None:
        """Draw boxes (left, right, top, bottom) of one colour, as one collection."""
        corners = [((left, top), (right, top), (right, bottom), (left, bottom)) for left, right, top, bottom in boxes]
        made = module_of("collections").PolyCollection(corners, facecolors=[colour], edgecolors="white", linewidths=edge)
        made.set_label(label)
        self.axes.add_collection(made, autolim=False)

    def bars(self, cells: Sequence[Cell]) -> None:
        """Draw the cells, a collection a kind and stage of its rank; with their numbers where these can be read."""
        groups: dict[tuple[Kind, int], list[Cell]] = defaultdict(list)
        latest, longest = max(cell.order for cell in cells), max(len(cell.text) for cell in cells)
        for cell in cells:
            groups[cell.kind, cell.order].append(cell)
        for (kind, order), group in groups.items():
            pale = 0.55 * order / max(1, latest)
            edge = min(0.7, 0.1 * self.points[0] * min(cell.right - cell.left for cell in group))
            self.rectangles([cell[:4] for cell in group], _mix(_COLOURS[kind], "#FFFFFF", pale), f"{kind} {order}", edge)
            if order:
                dark = _mix(_COLOURS[kind], "#000000", 0.35)
                self.rectangles([line for cell in group for line in _underlines(cell)], dark, "underline")
            ink = "#FFFFFF" if kind == Kind.F and pale < 0.25 else "#000000"
            spots = defaultdict(list)
            for cell in group:
                size = self._size(longest, cell.right - cell.left, cell.bottom - cell.top)
                spots[cell.text, size].append(((cell.left + cell.right) / 2, (cell.top + cell.bottom) / 2 - 0.05 * order))
            for (text, size), at in spots.items():
                self.write(text, size, at, ink)

    def pebbles(self, residuals: Sequence[Residual], top: float, step: float, most: int) -> None:
        """Draw the residuals of a stage into the lane at ``top``: a dot each in every column; ``most`` have room."""
        wide, high = 0.8 * self.points[0] * step, 0.88 * self.points[1]
        num_rows = max(range(1, most + 1), key=lambda rows: min(wide / -(-most // rows), high / rows))
        num_columns = -(-most // num_rows)
        cell, dots = min(wide / num_columns, high / num_rows), []
        for residual, place in places(residuals):
            across, down = 0.1 + 0.8 * (place // num_rows + 0.5) / num_columns, (place % num_rows + 0.5) / num_rows
            columns = range(round(residual.start / step), round(residual.end / step))
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
        self.stamp(module_of("path").Path.unit_circle(), radius, at, INK, "pebbles")

    def margin(self, texts: Sequence[str], y: float) -> None:
        """Write to the right of the axes."""
        for inches, text in zip((0.12, 0.5), texts, strict=False):
            x, size = self.across + 72 * inches / self.points[0], min(8, self.points[1])
            self.axes.text(x, y, text, size=size, va="center", color=INK)

    def write(self, text: str, size: float, at: Sequence[tuple[float, float]], colour: str) -> None:
        """Stamp a text, centred, at each place; not at all if its size is 0."""
        if text and size:
            path = module_of("textpath").TextPath((0, 0), text, size=size)
            middle = path.get_extents().get_points().mean(axis=0)
            self.stamp(module_of("path").Path(path.vertices - middle, path.codes), 1, at, colour, "text")

    def stamp(self, path: Any, scale: float, at: Sequence[tuple[float, float]], colour: str, label: str) -> None:
        """Draw the same path, its units ``scale`` points, at each place."""
        where = {"sizes": [scale**2], "offsets": at, "offset_transform": self.axes.transData}
        made = module_of("collections").PathCollection([path], facecolors=[colour], linewidths=0, label=label, **where)
        made.set_transform(module_of("transforms").IdentityTransform())
        self.axes.add_collection(made, autolim=False)

    def _size(self, letters: int, width: Number, height: float) -> float:
        """Points of a text that fits, in steps of a half; 0 if it could not be read."""
        fits = min(_LARGEST, 1.35 * self.points[0] * width / max(1, letters), 0.9 * self.points[1] * height)
        return math.floor(2 * fits) / 2 if fits >= _SMALLEST else 0


def page(heading: str, makespan: Number, rows: float, width: float, height: float, margin: float) -> Panel:
    """A figure with a heading, and axes of that many inches for that many rows."""
    across, tall = _LEFT + width + margin, _BOTTOM + height + _TOP
    figure = module_of("figure").Figure((across, tall), dpi=120, facecolor="white", layout="none")
    module_of("backends.backend_agg").FigureCanvasAgg(figure)
    figure.text(_LEFT / across, 1 - 0.1 / tall, heading, va="top", size=10, color=INK)
    panel = Panel(figure, (_LEFT, _BOTTOM, width, height), makespan, rows)
    panel.axes.set_xlabel("time", size=9, color=INK)
    panel.axes.locator_params(axis="x", nbins=max(2, int(width / 0.7)), integer=makespan > 4, steps=[1, 2, 5, 10])
    return panel


def key_of(panel: Panel, bars: Sequence[Bar], stage_to_rank: Sequence[int], pebble: str = "") -> None:
    """What the colours mean, in a line between the heading and the axes."""
    width, height = panel.axes.figure.get_size_inches()
    key = Panel(panel.axes.figure, (_LEFT, height - _TOP + 0.1, width - _LEFT, 0.2), width - _LEFT, 1)
    key.axes.set(xticks=[], yticks=[])
    entries: list[tuple[str, Kind | str, int]] = [(_WORDS[k], k, 0) for k in Kind if any(b.action.kind == k for b in bars)]
    entries += [("later stage of its rank", Kind.F, 1)] * several_stages(stage_to_rank)
    entries += [("idle", IDLE, 0), ("residuals alive", pebble, 0)][: 1 + bool(pebble)]
    cells, x = [], 0.0
    for words, what, order in entries:
        if isinstance(what, Kind):
            cells.append(Cell(x, x + 0.22, 0.1, 0.9, what, order))
        elif what == DOT:
            key.dots(3, [(x + 0.11, 0.5)])
        else:
            key.rectangles([(x, x + 0.22, 0.1, 0.9)], what, words)
        key.axes.text(x + 0.28, 0.52, words, size=8, va="center", color=INK)
        x += 0.42 + 0.057 * len(words)
    key.bars(cells)


def cell_of(bar: Bar, top: float, stage_to_rank: Sequence[int]) -> Cell:
    """The cell of a bar in the row that begins at ``top``."""
    stage, kind, microbatch = bar.action
    order = list(stage_to_rank[:stage]).count(stage_to_rank[stage])
    return Cell(bar.start, bar.end, *inside(top), kind, order, str(microbatch))


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


def module_of(module: str) -> Any:
    """A module of matplotlib.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError('figures need matplotlib, which is not installed. Fix: pip install "jaxpp[figures]"') from error


def _underlines(cell: Cell) -> list[tuple[Number, Number, float, float]]:
    thick = 0.08 * (cell.bottom - cell.top)
    bottoms = [cell.bottom - (0.5 + 1.6 * k) * thick for k in range(cell.order)]
    return [(cell.left, cell.right, bottom - thick, bottom) for bottom in bottoms]


def _mix(colour: str, other: str, part: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in pairs)
