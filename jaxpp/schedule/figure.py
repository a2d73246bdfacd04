"""Figures of bars in time: the timeline, a row a rank, and the pebble graph, a row a computation along the pipeline.

The pebble graph shows time and memory in one picture. Rows follow the data: the forwards of stages 0 to S - 1, the backwards from
S - 1 to 0, the weight parts. Under each forward row lie its pebbles, one a residual that is alive: from the start of its F to the
end of its B, or of its I and W. A pebble keeps its place as long as it lives, as a buffer would. Where they are more than can be
counted by eye, their number stands there, on a ground that is the darker the more they are.

Colours are Okabe and Ito's, each of another lightness, so that they part for the colour-blind and in grey. The later stages of a
rank are paler and underlined, once for the second stage, twice for the third.

matplotlib is an optional extra. It is imported when something is drawn, and used without pyplot, so no state is shared.
"""

import heapq
import importlib.util
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number

__all__ = ["Lane", "Residual", "available", "counts", "lanes", "live", "peak", "pebble_gif", "pebbles", "places", "timeline"]

_COLOURS = {Kind.F: "#0072B2", Kind.B: "#E69F00", Kind.I: "#CC79A7", Kind.W: "#F0E442"}
_WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input part", Kind.W: "W weight part"}
_IDLE, _INK = "#EFEFEF", "#222222"
_LEFT, _TOP, _BOTTOM = 0.62, 0.66, 0.5  # inches around the axes: the rows' names, heading and key, the time
_SMALLEST, _LARGEST = 4.5, 8.0  # points of the numbers in bars
_ORDINALS, _DOT = ("second", "third", "fourth"), "dot"
_MOST_PEBBLES, _NARROWEST = 9, 5.0  # that are drawn one by one, and the points of a column that has room for them
_MOST_FRAMES, _FRAMES_A_SECOND = 120, 6


class Residual(NamedTuple):
    """What a forward keeps for its backward, and when."""

    stage: int
    microbatch: int
    start: Number
    end: Number


class Lane(NamedTuple):
    """A row of the pebble graph: the kinds it holds, of one stage."""

    kinds: tuple[Kind, ...]
    stage: int


class _Cell(NamedTuple):
    left: Number
    right: Number
    top: float
    bottom: float
    kind: Kind
    order: int  # of the stage among those of its rank
    text: str = ""


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def live(bars: Iterable[Bar]) -> tuple[Residual, ...]:
    """The life of every residual: from the start of F to the end of B, or of the later of I and W; sorted by stage, then start."""
    begun, ended = dict[tuple[int, int], Number](), dict[tuple[int, int], Number]()
    for _, (stage, kind, microbatch), start, end in bars:
        if kind == Kind.F:
            begun[stage, microbatch] = start
        ended[stage, microbatch] = max(end, ended.get((stage, microbatch), end))
    return tuple(sorted((Residual(*at, start, ended[at]) for at, start in begun.items()), key=lambda r: (r.stage, r.start)))


def places(residuals: Iterable[Residual]) -> tuple[tuple[Residual, int], ...]:
    """Each residual with the lowest place that is free when it begins; one that ends at that time has left its place."""
    taken: list[tuple[Number, int]] = []
    free: list[int] = []
    found = []
    for residual in sorted(residuals, key=lambda r: r.start):
        while taken and taken[0][0] <= residual.start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        place = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (residual.end, place))
        found.append((residual, place))
    return tuple(found)


def peak(residuals: Iterable[Residual]) -> int:
    """Most residuals alive at once."""
    return max((place + 1 for _, place in places(residuals)), default=0)


def counts(residuals: Iterable[Residual]) -> tuple[tuple[Number, Number, int], ...]:
    """How many are alive when: (start, end, count) of each span of time in which that stays the same and is not 0."""
    changes: dict[Number, int] = defaultdict(int)
    for _, _, start, end in residuals:
        changes[start] += 1
        changes[end] -= 1
    times = sorted(time for time, change in changes.items() if change)
    levels = itertools.accumulate(changes[time] for time in times)
    return tuple((start, end, count) for (start, end), count in zip(itertools.pairwise(times), levels, strict=False) if count)


def lanes(bars: Iterable[Bar]) -> tuple[Lane, ...]:
    """The rows of the pebble graph in the order that data flows: F upwards, then B and I downwards, then W likewise."""
    present = {(action.stage, action.kind) for _, action, _, _ in bars}
    stages = sorted({stage for stage, _ in present})
    found = []
    for block, order in ((Kind.F,), stages), ((Kind.B, Kind.I), stages[::-1]), ((Kind.W,), stages[::-1]):
        for stage in order:
            kinds = tuple(kind for kind in block if (stage, kind) in present)
            found += [Lane(kinds, stage)] * bool(kinds)
    return tuple(found)


def _column_width(bars: Sequence[Bar]) -> float:
    """The longest time that all starts and ends are multiples of; where that would be very short, a part of the makespan."""
    times = {time for bar in bars for time in (bar.start, bar.end)}
    makespan = max(times)
    if not makespan:
        return 1.0
    fractions = [Fraction(time).limit_denominator(64) for time in times]
    scale = math.lcm(*(f.denominator for f in fractions))
    step = math.gcd(*(int(f * scale) for f in fractions)) / scale
    exact = all(abs(f - time) < 1e-6 * makespan for f, time in zip(fractions, times, strict=True))
    return step if exact and step and makespan / step <= 2000 else makespan / 400


def timeline(bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str) -> Any:
    """The bars in time, a row a rank.

    Args:
        bars: what ran.
        stage_to_rank: the rank of each stage.
        heading: the line above.

    Returns:
        a matplotlib ``Figure`` with its Agg canvas, for ``savefig``.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    makespan = max(bar.end for bar in bars) or 1
    num_ranks = max(stage_to_rank) + 1
    short = sorted(bar.end - bar.start for bar in bars)[len(bars) // 20] or makespan / 100
    tall = num_ranks * (0.42 if num_ranks <= 8 else 0.32)
    panel = _page(heading, makespan, num_ranks, _width(makespan / short), tall, 0.25)
    panel.rectangles([(0, makespan, *_inside(rank)) for rank in range(num_ranks)], _IDLE, "idle")
    panel.bars([_cell(bar, bar.rank, stage_to_rank) for bar in bars])
    panel.axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], [str(rank) for rank in range(num_ranks)])
    panel.axes.set_ylabel("rank", size=9, color=_INK)
    _key(panel, bars, stage_to_rank)
    return panel.axes.figure


def pebbles(bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, until: Number | None = None) -> Any:
    """The pebble graph: what runs when along the pipeline, and every residual that is alive meanwhile.

    Args:
        bars: as for ``timeline``.
        stage_to_rank: likewise.
        heading: likewise.
        until: the end of what is shown; all of it unless given.

    Returns:
        a matplotlib ``Figure``, as ``timeline``. In the margin on the right: the most residuals alive at once on each stage, and on
        its rank if ranks have several stages.
    """
    makespan = max(bar.end for bar in bars) or 1
    step, tops = _column_width(bars), _tops(lanes(bars))
    height = max(y + 1 + (Kind.F in lane.kinds) for lane, y in tops.items())
    several = len(stage_to_rank) > max(stage_to_rank) + 1
    panel = _page(heading, makespan, height, _width(makespan / step), min(0.24, 18 / height) * height, 1.4 if several else 0.6)
    panel.rectangles([(0, makespan, *_inside(top)) for top in tops.values()], _IDLE, "idle")
    top = {(lane.stage, kind): y for lane, y in tops.items() for kind in lane.kinds}
    panel.bars([_cell(bar, top[bar.action[:2]], stage_to_rank) for bar in bars])
    residuals = live(bars)
    by_stage = [[residual for residual in residuals if residual.stage == stage] for stage in range(len(stage_to_rank))]
    most = max(map(peak, by_stage))
    countable = most <= _MOST_PEBBLES and 72 * _width(makespan / step) * step / makespan >= _NARROWEST
    for stage, (rank, own) in enumerate(zip(stage_to_rank, by_stage, strict=True)):
        lane = top[stage, Kind.F] + 1
        if countable:
            panel.pebbles(own, lane, step, most)
        else:
            panel.numbers(own, lane, most)
        total = peak(residual for residual in residuals if stage_to_rank[residual.stage] == rank)
        panel.margin([str(peak(own)), f"rank {rank}: {total}"][: 1 + several], lane + 0.5)
    panel.margin(["peak", "of its rank"][: 1 + several], -0.7)
    panel.axes.set_yticks([y + 0.5 for y in tops.values()], ["/".join(lane.kinds) + str(lane.stage) for lane in tops])
    _key(panel, bars, stage_to_rank, _DOT if countable else _shade(1))
    if until is not None:
        panel.axes.add_patch(_matplotlib("patches").Rectangle((until, -0.1), makespan, height + 0.2, facecolor="white", zorder=5))
    return panel.axes.figure


def pebble_gif(bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, path: str | os.PathLike[str]) -> None:
    """Write the pebble graph as a GIF in which time passes: a frame a column, or 120 frames if there are more columns than that.

    Args:
        bars: as for ``timeline``.
        stage_to_rank: likewise.
        heading: likewise.
        path: the file to write.
    """
    makespan = max(bar.end for bar in bars)
    num_frames = min(_MOST_FRAMES, round(makespan / _column_width(bars))) or 1
    figure = pebbles(bars, stage_to_rank, heading, until=0)
    curtain = figure.axes[0].patches[-1]
    writer = _matplotlib("animation").PillowWriter(fps=_FRAMES_A_SECOND)
    with writer.saving(figure, os.fspath(path), dpi=min(100, 1200 / figure.get_figwidth())):
        for frame in range(1, num_frames + 1):
            curtain.set_x(makespan * frame / num_frames)
            writer.grab_frame()
        for _ in range(2 * _FRAMES_A_SECOND):  # the end stays for a while
            writer.grab_frame()


class _Panel:
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
        self.axes.tick_params(length=0, labelsize=8, labelcolor=_INK)
        self.axes.spines[:].set_visible(False)

    def rectangles(self, boxes: Iterable[tuple[Number, Number, float, float]], colour: str, label: str, edge: float = 0) -> None:
        """Draw boxes (left, right, top, bottom) of one colour, as one collection."""
        corners = [((left, top), (right, top), (right, bottom), (left, bottom)) for left, right, top, bottom in boxes]
        made = _matplotlib("collections").PolyCollection(corners, facecolors=[colour], edgecolors="white", linewidths=edge)
        made.set_label(label)
        self.axes.add_collection(made, autolim=False)

    def bars(self, cells: Sequence[_Cell]) -> None:
        """Draw the cells, a collection a kind and stage of its rank; with their numbers where these can be read."""
        groups: dict[tuple[Kind, int], list[_Cell]] = defaultdict(list)
        latest, longest = max(cell.order for cell in cells), max(len(cell.text) for cell in cells)
        for cell in cells:
            groups[cell.kind, cell.order].append(cell)
        for (kind, order), group in groups.items():
            pale = 0.55 * order / max(1, latest)
            narrow = self.points[0] * min(cell.right - cell.left for cell in group)
            self.rectangles(
                [cell[:4] for cell in group], _mix(_COLOURS[kind], "#FFFFFF", pale), f"{kind} {order}", edge=min(0.7, 0.1 * narrow)
            )
            if order:
                lines = [line for cell in group for line in _underlines(cell)]
                self.rectangles(lines, _mix(_COLOURS[kind], "#000000", 0.35), "underline")
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
            spans[count, self._size(len(str(count)), end - start, 0.88)].append((start, end, *_inside(top)))
        for (count, size), boxes in spans.items():
            self.rectangles(boxes, _shade(count / most), f"{count} pebbles")
            self.write(str(count), size, [((start + end) / 2, top + 0.5) for start, end, _, _ in boxes], "#000000")

    def dots(self, radius: float, at: Sequence[tuple[float, float]]) -> None:
        """Draw pebbles."""
        self.stamp(_matplotlib("path").Path.unit_circle(), radius, at, _INK, "pebbles")

    def margin(self, texts: Sequence[str], y: float) -> None:
        """Write to the right of the axes."""
        for inches, text in zip((0.12, 0.5), texts, strict=False):
            x = self.across + 72 * inches / self.points[0]
            self.axes.text(x, y, text, size=8, va="center", color=_INK)

    def write(self, text: str, size: float, at: Sequence[tuple[float, float]], colour: str) -> None:
        """Stamp a text, centred, at each place; not at all if its size is 0."""
        if text and size:
            path = _matplotlib("textpath").TextPath((0, 0), text, size=size)
            middle = path.get_extents().get_points().mean(axis=0)
            self.stamp(_matplotlib("path").Path(path.vertices - middle, path.codes), 1, at, colour, "text")

    def stamp(self, path: Any, scale: float, at: Sequence[tuple[float, float]], colour: str, label: str) -> None:
        """Draw the same path, its units ``scale`` points, at each place."""
        style = {"facecolors": [colour], "linewidths": 0, "label": label}
        where = {"sizes": [scale**2], "offsets": at, "offset_transform": self.axes.transData}
        made = _matplotlib("collections").PathCollection([path], **style, **where)
        made.set_transform(_matplotlib("transforms").IdentityTransform())
        self.axes.add_collection(made, autolim=False)

    def _size(self, letters: int, width: Number, height: float) -> float:
        """Points of a text that fits, in steps of a half; 0 if it could not be read."""
        fits = min(_LARGEST, 1.35 * self.points[0] * width / max(1, letters), 0.9 * self.points[1] * height)
        return math.floor(2 * fits) / 2 if fits >= _SMALLEST else 0


def _page(heading: str, makespan: Number, rows: float, width: float, height: float, margin: float) -> _Panel:
    """A figure with a heading, and axes of that many inches for that many rows."""
    across, tall = _LEFT + width + margin, _BOTTOM + height + _TOP
    figure = _matplotlib("figure").Figure((across, tall), dpi=120, facecolor="white", layout="none")
    _matplotlib("backends.backend_agg").FigureCanvasAgg(figure)
    figure.text(_LEFT / across, 1 - 0.1 / tall, heading, va="top", size=10, color=_INK)
    panel = _Panel(figure, (_LEFT, _BOTTOM, width, height), makespan, rows)
    panel.axes.set_xlabel("time", size=9, color=_INK)
    panel.axes.locator_params(axis="x", nbins=max(2, int(width / 0.7)), integer=makespan > 4, steps=[1, 2, 5, 10])
    return panel


def _key(panel: _Panel, bars: Sequence[Bar], stage_to_rank: Sequence[int], pebble: str = "") -> None:
    """What the colours mean, in a line between the heading and the axes."""
    width, height = panel.axes.figure.get_size_inches()
    key = _Panel(panel.axes.figure, (_LEFT, height - _TOP + 0.1, width - _LEFT, 0.2), width - _LEFT, 1)
    key.axes.set(xticks=[], yticks=[])
    kinds, most = {bar.action.kind for bar in bars}, max(map(list(stage_to_rank).count, stage_to_rank))
    entries: list[tuple[str, Kind | str, int]] = [(_WORDS[kind], kind, 0) for kind in Kind if kind in kinds]
    entries += [(f"{word} stage of its rank", Kind.F, order) for order, word in enumerate(_ORDINALS[: most - 1], start=1)]
    entries += [("idle", _IDLE, 0), ("residuals alive", pebble, 0)][: 1 + bool(pebble)]
    cells, x = [], 0.0
    for words, what, order in entries:
        if isinstance(what, Kind):
            cells.append(_Cell(x, x + 0.22, 0.1, 0.9, what, order))
        elif what == _DOT:
            key.dots(3, [(x + 0.11, 0.5)])
        else:
            key.rectangles([(x, x + 0.22, 0.1, 0.9)], what, words)
        key.axes.text(x + 0.28, 0.52, words, size=8, va="center", color=_INK)
        x += 0.45 + 0.062 * len(words)
    key.bars(cells)


def _tops(rows: Sequence[Lane]) -> dict[Lane, float]:
    """Where each row begins: forward rows are two high, for the pebbles, and the blocks are half a row apart."""
    forwards = sum(Kind.F in lane.kinds for lane in rows)
    gaps = [0.5 * (Kind.F not in lane.kinds) + 0.5 * (Kind.W in lane.kinds) for lane in rows]
    return {lane: min(k, forwards) + k + gap for k, (lane, gap) in enumerate(zip(rows, gaps, strict=True))}


def _cell(bar: Bar, top: float, stage_to_rank: Sequence[int]) -> _Cell:
    stage, kind, microbatch = bar.action
    order = list(stage_to_rank[:stage]).count(stage_to_rank[stage])
    return _Cell(bar.start, bar.end, *_inside(top), kind, order, str(microbatch))


def _underlines(cell: _Cell) -> list[tuple[Number, Number, float, float]]:
    thick = 0.08 * (cell.bottom - cell.top)
    bottoms = [cell.bottom - (0.5 + 1.6 * k) * thick for k in range(cell.order)]
    return [(cell.left, cell.right, bottom - thick, bottom) for bottom in bottoms]


def _inside(top: float) -> tuple[float, float]:
    return top + 0.06, top + 0.94


def _width(columns: float) -> float:
    return min(22, max(5.6, 0.28 * columns))


def _mix(colour: str, other: str, part: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in pairs)


def _shade(part: float) -> str:
    return _mix("#FFFFFF", _INK, 0.08 + 0.35 * part)


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError('figures need matplotlib, which is not installed. Fix: pip install "jaxpp[figures]"') from error
