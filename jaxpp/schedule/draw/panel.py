"""What all figures are drawn with: axes whose size in points is known, so that what fits is known before it is drawn.

matplotlib is an optional extra. It is imported when something is drawn, and used without pyplot, so no state is shared.
"""

import functools
import importlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw.canvas import IDLE, INK, Labels, colour_of, dark, ink_of, shade
from jaxpp.schedule.residual_counts import Residual, counts, places

__all__ = [
    "BAR",
    "Cell",
    "Figure",
    "Panel",
    "are_seen",
    "has_matplotlib",
    "inside",
    "matplotlib_module",
    "new_figure",
    "text_inches",
]

BAR = 0.88
"""The part of a row that a bar is high."""
_DOT, _SMALLEST_DOT = 3.2, 0.9  # points: the radius of the largest pebble, and of the smallest that can be seen


class Cell(NamedTuple):
    """A bar as it is drawn: its box, its kind, the number of its stage on its rank, and its text."""

    left: Number
    right: Number
    top: float
    bottom: float
    kind: Kind
    order: int
    text: str = ""


Figure = Any
"""A ``matplotlib.figure.Figure``; matplotlib is optional, so its classes cannot be imported here."""


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(inches: tuple[float, float]) -> Figure:
    """An empty figure, white, that shows itself in a notebook; an inch is 96 pixels of a page.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    matplotlib_module("figure")
    return importlib.import_module("jaxpp.schedule.draw.canvas").Picture(inches)


class Panel:
    """Axes of known size.

    Args:
        figure: which they are a part of.
        box: left, bottom, width and height in inches.
        across: x goes from 0 to that.
        down: y goes from 0 at the top to that.

    Attributes:
        points: of one unit along x, and of one unit along y.
    """

    def __init__(self, figure: Figure, box: tuple[float, float, float, float], across: Number, down: float):
        width, height = figure.get_size_inches()
        self.box = box
        self.axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
        self.across = across
        self.points = 72 * box[2] / across, 72 * box[3] / down
        self.axes.set(xlim=(0, across), ylim=(down, 0), facecolor="none")
        self.axes.tick_params(length=0, labelsize=8, labelcolor=INK)
        self.axes.spines[:].set_visible(False)

    def rectangles(
        self,
        boxes: Iterable[tuple[Number, Number, float, float]],
        colour: str | Sequence[str],
        label: str,
        edge: float | Sequence[float] = 0,
    ) -> None:
        """Draw boxes (left, right, top, bottom) as one collection, with white lines of ``edge`` points.

        ``colour`` is that of all boxes, or one colour for each.
        """
        corners = [((left, top), (right, top), (right, bottom), (left, bottom)) for left, right, top, bottom in boxes]
        self.polygons(corners, colour, label, edge, "white")

    def polygons(
        self,
        corners: Sequence[Sequence[tuple[Number, float]]],
        colour: str | Sequence[str],
        label: str,
        edge: float | Sequence[float],
        line: str,
    ) -> None:
        """Draw polygons as one collection, with lines of ``edge`` points around them."""
        made = matplotlib_module("collections").PolyCollection(corners, facecolors=colour, edgecolors=line, linewidths=edge)
        made.set_label(label)
        self.axes.add_collection(made, autolim=False)

    def lanes(
        self,
        tops: Mapping[str, float],
        bars: Iterable[tuple[Bar, float]],
        end: Number,
        stage_to_rank: Sequence[int],
        labels: Labels,
    ) -> None:
        """Draw named lanes, idle up to ``end``, and on them the bars, each in the lane that begins at the number beside it."""
        self.rectangles([(0, end, *inside(top)) for top in tops.values()], IDLE, "idle")
        self.cells([_cell_of(bar, top, stage_to_rank) for bar, top in bars], labels)
        self.axes.set_yticks([top + 0.5 for top in tops.values()], list(tops))

    def cells(self, cells: Sequence[Cell], labels: Labels) -> None:
        """Draw the cells, one collection for each kind and stage of its rank, with numbers where they have room."""
        groups: dict[tuple[Kind, int], list[Cell]] = defaultdict(list)
        latest = max(cell.order for cell in cells)
        for cell in cells:
            groups[cell.kind, cell.order].append(cell)
        for (kind, order), group in groups.items():
            wide = [self.points[0] * (cell.right - cell.left) for cell in group]
            fills = [colour_of(kind, order, latest, points) for points in wide]
            self.rectangles([cell[:4] for cell in group], fills, f"{kind} {order}", [min(0.7, 0.1 * points) for points in wide])
            if order:
                self.rectangles([line for cell in group for line in _underlines(cell)], dark(kind), "underline")
            spots = defaultdict(list)
            for cell, points in zip(group, wide, strict=True):
                if kind in labels.kinds and labels.fits(cell.text, points, self.points[1] * (cell.bottom - cell.top)):
                    spots[cell.text].append(((cell.left + cell.right) / 2, (cell.top + cell.bottom) / 2 - 0.05 * order))
            for text, at in spots.items():
                self.write(text, labels.size, at, ink_of(kind, order, latest))

    def pebbles(self, residuals: Sequence[Residual], top: float, step: float, most: int) -> None:
        """Draw the residuals of a stage into the lane at ``top``: in every column a dot each, if it is alive then; ``most`` fit.

        A residual that lives between the middles of two columns has a dot in the middle of its life.
        """
        num_rows, radius = _pebble_rows(most, self.points[0] * step, self.points[1])
        num_columns, dots = -(-most // num_rows), []
        for residual, place in places(residuals):
            across, down = 0.1 + 0.8 * (place // num_rows + 0.5) / num_columns, (place % num_rows + 0.5) / num_rows
            columns = range(*(math.ceil(time / step - across) for time in (residual.start, residual.end)))
            times = [(column + across) * step for column in columns] or [(residual.start + residual.end) / 2]
            dots += [(time, inside(top)[0] + BAR * down) for time in times]
        self.dots(radius, dots)

    def numbers(self, residuals: Sequence[Residual], top: float, most: int, labels: Labels) -> None:
        """Draw how many residuals of a stage are alive into the lane at ``top``, the darker the nearer to ``most``."""
        spans = defaultdict(list)
        for start, end, count in counts(residuals):
            spans[count].append((start, end, *inside(top)))
        high = BAR * self.points[1]
        for count, boxes in spans.items():
            self.rectangles(boxes, shade(count / most), f"{count} pebbles")
            middles = [
                ((start + end) / 2, top + 0.5)
                for start, end, _, _ in boxes
                if labels.fits(str(most), self.points[0] * (end - start), high)
            ]
            self.write(str(count), labels.size, middles, "#000000")

    def dots(self, radius: float, at: Sequence[tuple[float, float]]) -> None:
        """Draw pebbles."""
        self.stamp(matplotlib_module("path").Path.unit_circle(), radius, at, INK, "pebbles")

    def margin(self, texts: Sequence[str], y: float) -> None:
        """Write to the right of the axes."""
        for inches, text in zip((0.12, 0.5), texts, strict=False):
            self.axes.text(self.across + 72 * inches / self.points[0], y, text, size=8, va="center", color=INK)

    def title(self, text: str, above: float = 0.07) -> None:
        """Write a title, that many inches above the axes."""
        if text:
            self.axes.text(0, -72 * above / self.points[1], text, size=9, weight="bold", va="bottom", color=INK)

    def write(self, text: str, size: float, at: Sequence[tuple[float, float]], colour: str) -> None:
        """Stamp a text, centred, at each place."""
        if at:
            path = matplotlib_module("textpath").TextPath((0, 0), text, size=size)
            middle = path.get_extents().get_points().mean(axis=0)
            self.stamp(matplotlib_module("path").Path(path.vertices - middle, path.codes), 1, at, colour, "text")

    def stamp(self, path: Any, scale: float, at: Sequence[tuple[float, float]], colour: str, label: str) -> None:
        """Draw the same path, its units ``scale`` points, at each place."""
        where = {"sizes": [scale**2], "offsets": at, "offset_transform": self.axes.transData}
        made = matplotlib_module("collections").PathCollection([path], facecolors=[colour], linewidths=0, label=label, **where)
        made.set_transform(matplotlib_module("transforms").IdentityTransform())
        self.axes.add_collection(made, autolim=False)


def are_seen(most: int, wide: float, high: float) -> bool:
    """Whether so many pebbles in a column of a lane, so many points wide and high, are large enough to be seen."""
    return _pebble_rows(most, wide, high)[1] >= _SMALLEST_DOT


def _pebble_rows(most: int, wide: float, high: float) -> tuple[int, float]:
    """How so many pebbles lie in a column of a lane if they are as large as can be: in how many rows, and their radius."""
    wide, high = 0.8 * wide, BAR * high
    sizes = {rows: min(wide / -(-most // rows), high / rows) for rows in range(1, most + 1)}
    num_rows = max(sizes, key=sizes.__getitem__)
    return num_rows, min(_DOT, 0.4 * sizes[num_rows])


def _cell_of(bar: Bar, top: float, stage_to_rank: Sequence[int]) -> Cell:
    """The cell of a bar in the row that begins at ``top``."""
    stage, kind, microbatch = bar.action
    order = list(stage_to_rank[:stage]).count(stage_to_rank[stage])
    return Cell(bar.start, bar.end, *inside(top), kind, order, str(microbatch))


def _underlines(cell: Cell) -> list[tuple[Number, Number, float, float]]:
    thick = 0.08 * (cell.bottom - cell.top)
    bottoms = [cell.bottom - (0.5 + 1.6 * k) * thick for k in range(cell.order)]
    return [(cell.left, cell.right, bottom - thick, bottom) for bottom in bottoms]


def inside(top: float) -> tuple[float, float]:
    """Top and bottom of what stands in the row that begins at ``top``."""
    return top + (1 - BAR) / 2, top + (1 + BAR) / 2


@functools.lru_cache(maxsize=256)
def text_inches(text: str, size: float) -> float:
    """How wide a text of so many points is, at most: letters that are fitted to pixels are a little wider than their outlines."""
    return 1.03 * matplotlib_module("textpath").TextPath((0, 0), text, size=size).get_extents().x1 / 72 if text else 0.0


def matplotlib_module(module: str) -> Any:
    """A module of matplotlib, or an error that says how to install it."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError('figures need matplotlib, which is not installed. Fix: pip install "jaxpp[figures]"') from error
