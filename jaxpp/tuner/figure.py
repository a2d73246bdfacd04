"""The figure of a search: the time of a step against the memory of the fullest device, a mark for each candidate.

Down and to the left is better. The frontier is the line through the candidates to which no other is superior in both; these
and the candidates that ran are numbered, and listed to the right. A candidate that ran has a cross at the time it took, joined to
its mark by a line: the length of the line is what the prediction missed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxpp.schedule.draw.canvas import INK, LINE, Entry, Figure, draw_key, group_colour, key_lines, new_figure, text_inches
from jaxpp.schedule.registry import SCHEDULES
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tuner.reasons import time_in_words
from jaxpp.tuner.search import Row

__all__ = ["frontier", "tuning_figure"]

_WIDTH, _TALL = 9.375, 3.9  # inches: 900 pixels of a page; the axes
_LEFT, _ABOVE, _BELOW, _HEADING, _GAP = 0.7, 0.1, 0.55, 0.28, 0.1  # inches
_LISTED, _MOST_LISTED = 0.19, 19  # inches of a line of the list; lines
_DOT, _NUMBER = 30.0, 7.5  # square points of a mark; points of a number
_SHAPES = {"least": ("o", "circle"), "keep": ("D", "diamond"), "offload": ("^", "triangle"), "recompute": ("s", "square")}
_FRONTIER, _RAN = "frontier: schedule, microbatches", "ran as well"
_MOST_TICKS = 8
_PLACES = tuple(
    (far * across, far * up)
    for far in (8, 14, 20, 27)
    for across, up in ((-1, -0.7), (1, 0.7), (1, -0.7), (-1, 0.7), (0, -1.1), (0, 1.1), (-1.2, 0), (1.2, 0))
)
"""Points from a mark to its number, the nearest first."""
_ROUND = (*(range(100, 1000, step) for step in (1, 2, 5, 10, 20, 50)), (100, 150, 200, 300, 400, 600, 800), (100, 200, 500), (100,))
"""Hundredths of a power of ten at which there may be ticks, from many to few."""


class _Point(NamedTuple):
    """A candidate in the figure: bytes and predicted time in the units of the axes, and its row."""

    x: float
    y: float
    row: Row

    @property
    def ran(self) -> float:
        """Where it lies by the time that it took; where it is if it did not run."""
        return self.y if self.row.measured is None else self.y * self.row.measured / self.row.predicted


def frontier(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of which none other is both faster and smaller, the smallest first; only those whose memory is known."""
    known = sorted((row for row in rows if row.peaks is not None), key=lambda row: (row.peak or 0, row.predicted))
    found: list[Row] = []
    for row in known:
        if not found or row.predicted < found[-1].predicted:
            found.append(row)
    return tuple(found)


def tuning_figure(rows: Sequence[Row], best: Row, hbm: int | None, width: float | None = None) -> Figure:
    """Draw the candidates whose memory is known; ``width`` is in inches."""
    known = [row for row in rows if row.peaks is not None]
    slow = min(row.predicted for row in known) >= 1
    unit = bytes_in_words(max(row.peak or 0 for row in known)).rpartition(" ")[2]
    scale = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    points = {row.candidate: _Point((row.peak or 0) / scale, (1 if slow else 1e3) * row.predicted, row) for row in known}
    room = None if hbm is None else hbm / scale
    line = [points[row.candidate] for row in frontier(known)]
    on_line = {point.row.candidate for point in line}
    ran = [point for point in points.values() if point.row.measured is not None and point.row.candidate not in on_line]
    numbered = (*line, *ran)
    words = [*_listing(_FRONTIER, line, best, 1), *_listing(_RAN, ran, best, 1 + len(line))][:_MOST_LISTED]
    margin = max(text_inches(text, 8) for text in words) + 0.3
    key, wide = _key(known, hbm, inside=_is_near(points.values(), room)), (width or _WIDTH) - _LEFT - margin
    top = _ABOVE + _HEADING + LINE * key_lines(key, wide + margin) + _GAP
    whole = (_LEFT + wide + margin, top + _TALL + _BELOW)
    figure = new_figure(whole)
    heading = f"{len(known)} candidates: the time of a step against the memory of the fullest device"
    figure.text(_LEFT / whole[0], 1 - _ABOVE / whole[1], heading, va="top", size=10, color=INK)
    axes = figure.add_axes((_LEFT / whole[0], _BELOW / whole[1], wide / whole[0], _TALL / whole[1]))
    _scales(axes, list(points.values()), room)
    _draw(axes, list(points.values()), line, room)
    chosen = points.get(best.candidate)
    if chosen is not None:
        axes.scatter([chosen.x], [chosen.y], s=4 * _DOT, facecolors="none", edgecolors=INK, linewidths=1.2, label="the choice")
    _write_numbers(axes, numbered, (72 * wide, 72 * _TALL))
    for k, text in enumerate(words):
        place = (_LEFT + wide + 0.15) / whole[0], (_BELOW + _TALL - _LISTED * k) / whole[1]
        figure.text(*place, text, va="top", size=8, color=INK, weight="bold" if text in (_FRONTIER, _RAN) else "normal")
    axes.set_xlabel(f"peak of the fullest device, {unit}", size=9, color=INK)
    axes.set_ylabel(f"a step, {'s' if slow else 'ms'}", size=9, color=INK)
    draw_key(figure, key, _LEFT, whole[1] - top + _GAP, wide + margin)
    return figure


def _key(rows: Sequence[Row], hbm: int | None, *, inside: bool) -> list[Entry]:
    names = {row.candidate.schedule.name for row in rows}
    key: list[Entry] = [(name, _colours()[name], 0) for name in SCHEDULES if name in names]
    shapes = {row.candidate.remat for row in rows}
    key += [(f"{_SHAPES[remat][1]}: {remat}", "", 0) for remat in _SHAPES if remat in shapes and len(shapes) > 1]
    key += [("ring: the choice", "", 0)]
    key += [("cross: when it ran", "", 0)] * any(row.measured is not None for row in rows)
    room = "" if hbm is None else f"{'dashed: ' if inside else ''}hbm, {bytes_in_words(hbm)}{'' if inside else ' (farther right)'}"
    return key + [(room, "", 0)] * bool(room)


def _colours() -> Mapping[str, str]:
    return {name: group_colour(k) for k, name in enumerate(SCHEDULES)}


def _listing(title: str, points: Sequence[_Point], best: Row, first: int) -> Iterator[str]:
    """The lines of the list beside the figure."""
    if points:
        yield title
    for number, (_, _, row) in enumerate(points, first):
        each = row.candidate
        remat = f", {each.remat}" * (each.remat != "least")
        ran = "" if row.measured is None else f", ran {time_in_words(row.measured)}"
        mark = " (the choice)" * (each == best.candidate)
        yield f"{number}  {each.schedule.name}, {each.schedule.num_microbatches}{remat}: {time_in_words(row.predicted)}{ran}{mark}"


def _scales(axes: Figure, points: Sequence[_Point], room: float | None) -> None:
    """Both axes logarithmic, with plain numbers at few ticks; hbm is inside if it is not far from the candidates."""
    across = [point.x for point in points]
    if room is not None and _is_near(points, room):
        across.append(room)
    up = [place for point in points for place in (point.y, point.ran)]
    axes.set(xscale="log", yscale="log", xlim=_limits(across), ylim=_limits(up), facecolor="none")
    axes.minorticks_off()
    axes.set_xticks(*_ticks(*axes.get_xlim()))
    axes.set_yticks(*_ticks(*axes.get_ylim()))
    axes.tick_params(length=3, labelsize=8, labelcolor=INK, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)


def _is_near(points: Iterable[_Point], room: float | None) -> bool:
    """Whether hbm is so near to the candidates that it is drawn."""
    across = [point.x for point in points]
    return room is not None and min(across) / 2 < room < 2 * max(across)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """From the smallest to the largest, with some room beside them."""
    low, high = min(values), max(values)
    pad = max(1.02, (high / low) ** 0.05)
    return low / pad, high * pad


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Few round numbers between two, and how they are written."""
    power = math.floor(math.log10(low))
    ticks: list[float] = []
    for steps in _ROUND:
        ticks = [step * 10.0 ** (k - 2) for k in range(power, power + 12) for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    return ticks, [f"{tick:,.8g}" for tick in ticks]


def _draw(axes: Figure, points: Sequence[_Point], line: Sequence[_Point], room: float | None) -> None:
    """The marks, the frontier, and where memory ends."""
    if room is not None and _is_near(points, room):
        axes.axvline(room, color=INK, linewidth=0.9, linestyle="dashed", label="hbm")
    axes.step([p.x for p in line], [p.y for p in line], where="post", color=INK, linewidth=0.9, label="frontier", zorder=1.5)
    for name, colour in _colours().items():
        for remat, (shape, _) in _SHAPES.items():
            own = [p for p in points if (p.row.candidate.schedule.name, p.row.candidate.remat) == (name, remat)]
            if own:
                at = [point.x for point in own], [point.y for point in own]
                style = {"color": colour, "edgecolors": "white", "linewidths": 0.4, "zorder": 2}
                axes.scatter(*at, s=_DOT, marker=shape, label=f"{name}, {remat}", **style)
    for point in points:
        if point.row.measured is not None:
            axes.plot([point.x, point.x], [point.y, point.ran], color=INK, linewidth=0.7, zorder=2.5, label="missed")
            axes.plot([point.x], [point.ran], "x", color=INK, markersize=5, zorder=3, label="ran")


def _write_numbers(axes: Figure, points: Sequence[_Point], size: tuple[float, float]) -> None:
    """A number beside each point, where no other number stands; ``size`` is that of the axes in points."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    taken: list[tuple[float, float]] = []
    for number, point in enumerate(points, 1):
        x = size[0] * math.log(point.x / left) / math.log(right / left)
        y = size[1] * math.log(point.y / bottom) / math.log(top / bottom)
        across, up = next(
            ((a, u) for a, u in _PLACES if all(abs(x + a - x1) > 9 or abs(y + u - y1) > 9 for x1, y1 in taken)), _PLACES[0]
        )
        taken.append((x + across, y + up))
        style = {"textcoords": "offset points", "size": _NUMBER, "color": INK, "ha": "center", "va": "center"}
        axes.annotate(str(number), (point.x, point.y), (across, up), **style)
