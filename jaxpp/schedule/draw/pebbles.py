"""The pebble graph: time and memory in one picture, a row for each computation along the pipeline.

Rows follow the data: forwards of stages 0 to S - 1, backwards from S - 1 to 0, weight parts from S - 1 to 0. Under each forward row
lie its pebbles, one for each residual that is alive, in the same place as long as it lives, as a buffer would be. Where there are
too many to be counted by eye, their number stands there instead, on a ground that is darker for larger numbers.
"""

import math
import os
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw import canvas
from jaxpp.schedule.draw.canvas import BAR, DOT, INK, Axes, Figure, Look, Panel, inside, matplotlib_module, points_of, shade
from jaxpp.schedule.draw.timeline import Timeline, extents, looks, scaled, shortest, timeline_key
from jaxpp.schedule.residual_counts import Residual, counts, lifetimes, peaks, places

_MOST_PEBBLES = 9  # that are drawn one by one
_DOT, _SMALLEST_DOT = 3.2, 0.9  # points: the radius of the largest pebble, and of the smallest that can be seen
_COLUMN = 6.0  # points that a column of pebbles has at least, in a pair
_MOST_FRAMES, _FRAMES_A_SECOND = 120, 6


class Lane(NamedTuple):
    """A row of the pebble graph: the kinds of action that it holds, of one stage."""

    kinds: tuple[Kind, ...]
    stage: int


def lanes(bars: Iterable[Bar]) -> dict[Lane, float]:
    """The rows of the pebble graph in the order that data flows, each with its top; forward rows with pebbles are two high."""
    present = {(action.stage, action.kind) for _, action, _, _ in bars}
    forward_rows = 1 + any(kind != Kind.F for _, kind in present)
    stages = sorted({stage for stage, _ in present})
    tops: dict[Lane, float] = {}
    top = 0.0
    blocks = ((0, forward_rows, (Kind.F,), stages), (0.5, 1, (Kind.B, Kind.I), stages[::-1]), (0.5, 1, (Kind.W,), stages[::-1]))
    for gap, height, block, order in blocks:
        top += gap
        for stage in order:
            kinds = tuple(kind for kind in block if (stage, kind) in present)
            if kinds:
                tops[Lane(kinds, stage)] = top
                top += height
    return tops


def pebbles(
    bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, until: float | None = None, width: float | None = None
) -> Figure:
    """What runs when, and every residual alive, ``until`` a time if given; on the right the most of each stage and its rank."""
    figure = _figure(heading, [Timeline("", bars)], stage_to_rank, [_column_width(bars)], width)
    if until is not None:
        bottom, end = figure.axes[0].get_ylim()[0], max(bar.end for bar in bars) or 1
        curtain = matplotlib_module("patches").Rectangle((until, -0.1), end, bottom + 0.2, facecolor="white", zorder=5)
        figure.axes[0].add_patch(curtain)
    return figure


def pebble_pair(heading: str, timelines: Sequence[Timeline], stage_to_rank: Sequence[int], width: float | None = None) -> Figure:
    """The pebble graphs of a step as it ran, and as it would run on devices of its own, in milliseconds, one below the other."""
    lines = [line._replace(rest=(), sends=(), copies=(), num_groups=None) for line in timelines]
    return _figure(heading, lines, stage_to_rank, [shortest(line.bars) / 2 for line in lines], width, "ms")


def _figure(
    heading: str,
    timelines: Sequence[Timeline],
    stage_to_rank: Sequence[int],
    steps: Sequence[float],
    width: float | None,
    unit: str = "",
) -> Figure:
    """The pebble graphs one below the other, each with a column every step of its own; in a pair, no narrower than ``_COLUMN``."""
    alive = [lifetimes(line.bars) for line in timelines]
    most = [max(peaks(residuals, range(len(stage_to_rank)))) for residuals in alive]
    across = extents(timelines, [0] * len(timelines))
    columns = max(end / (2 * step if unit else step) for end, step in zip(across, steps, strict=True))
    inches, points = canvas.page_width(columns, width)
    panels = [_room(line.bars, end) for line, end in zip(timelines, across, strict=True)]
    if unit:
        steps = [max(step, _COLUMN * end / points) for step, end in zip(steps, across, strict=True)]
    high = min(72 * panel.height / panel.rows for panel in panels)
    sizes = [_in_rows(count, points * step / end, high)[1] for count, step, end in zip(most, steps, across, strict=True) if count]
    countable = max(most) <= _MOST_PEBBLES and min(sizes, default=0) >= _SMALLEST_DOT
    key = [*timeline_key(timelines, stage_to_rank), *[("residuals alive", DOT if countable else shade(1))] * any(most)]
    figure, axes = canvas.page(heading, key, panels, inches, unit)
    bars: list[list[Look]] = []
    for part, line, residuals, end in zip(axes, timelines, alive, across, strict=True):
        part.set_title(canvas.folded(scaled(line.title, end, across[0]), part), loc="left", size=9, weight="bold", color=INK)
        bars.append(_draw(part, line, residuals, stage_to_rank, points / end, countable=countable))
    canvas.fit_page(figure, axes, panels)
    for part, line, residuals, step in zip(axes, timelines, alive, steps, strict=True) if countable else ():
        _draw_dots(part, line.bars, residuals, step)
    canvas.write_numbers(list(zip(axes, bars, strict=True)), "microbatches")
    return figure


def _room(bars: Sequence[Bar], across: Number) -> Panel:
    keeps = any(bar.action.kind != Kind.F for bar in bars)
    rows = max(top + 1 + (keeps and Kind.F in lane.kinds) for lane, top in lanes(bars).items())
    return Panel(rows, rows * max(0.14, min(0.24, 14 / rows)), across)


def _draw(
    axes: Axes, line: Timeline, residuals: Sequence[Residual], stage_to_rank: Sequence[int], scale: float, *, countable: bool
) -> list[Look]:
    """Draw a pebble graph but for its dots; returns what has numbers."""
    tops, several = lanes(line.bars), len(stage_to_rank) > max(stage_to_rank) + 1
    top_of = {(lane.stage, kind): top for lane, top in tops.items() for kind in lane.kinds}
    canvas.draw_rows(axes, {"/".join(lane.kinds) + str(lane.stage): top for lane, top in tops.items()}, line.end or 1)
    bars = list(looks(line, stage_to_rank, scale, top_of))
    if residuals:
        of_rank, of_stage = peaks(residuals, stage_to_rank), peaks(residuals, range(len(stage_to_rank)))
        beside = {"transform": axes.get_yaxis_transform(), "size": 8, "va": "center", "color": INK}
        for stage, rank in enumerate(stage_to_rank):
            lane = top_of[stage, Kind.F] + 1
            axes.text(1.01, lane + 0.5, f"{of_stage[stage]}{f'  (rank {rank}: {of_rank[rank]})' if several else ''}", **beside)
            for start, end, count in () if countable else counts(r for r in residuals if r.stage == stage):
                colour = shade(count / max(of_stage))
                bars.append(Look(f"{count} pebbles", None, colour, 0, str(count), lane, float(start), float(end)))
        axes.text(1.01, -0.5, "peak", **beside)
    canvas.draw_bars(axes, bars, scale)
    return bars


def _draw_dots(axes: Axes, bars: Sequence[Bar], residuals: Sequence[Residual], step: float) -> None:
    """Draw the residuals of each stage: a dot in each column that they live through, or one in the middle of a shorter life."""
    (wide, high), tops = points_of(axes), {lane.stage: top + 1 for lane, top in lanes(bars).items() if Kind.F in lane.kinds}
    most = max(peaks(residuals, range(1 + max(tops))), default=0)
    num_rows, radius = _in_rows(most, wide * step, high)
    for stage, top in tops.items():
        dots: list[tuple[float, float]] = []
        for residual, place in places(residual for residual in residuals if residual.stage == stage):
            across, down = 0.1 + 0.8 * (place // num_rows + 0.5) / -(-most // num_rows), (place % num_rows + 0.5) / num_rows
            columns = range(*(math.ceil(time / step - across) for time in (residual.start, residual.end)))
            times = [(column + across) * step for column in columns] or [float(residual.start + residual.end) / 2]
            dots += [(time, inside(top)[0] + BAR * down) for time in times]
        axes.scatter(*zip(*dots, strict=True), s=(2 * radius) ** 2, color=INK, linewidths=0, label="pebbles")


def _in_rows(most: int, wide: float, high: float) -> tuple[int, float]:
    """How so many pebbles lie in a column of a lane if they are as large as can be: in how many rows, and their radius."""
    sizes = {rows: min(0.8 * wide / -(-most // rows), BAR * high / rows) for rows in range(1, most + 1)}
    num_rows = max(sizes, key=sizes.__getitem__)
    return num_rows, min(_DOT, 0.4 * sizes[num_rows])


def pebble_gif(bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, path: str | os.PathLike[str]) -> None:
    """Write the pebble graph as a GIF in which time passes: a frame for each column, or 120 frames if there are more columns."""
    makespan = max(bar.end for bar in bars)
    num_frames = min(_MOST_FRAMES, round(makespan / _column_width(bars))) or 1
    figure = pebbles(bars, stage_to_rank, heading, until=0)
    curtain = figure.axes[0].patches[-1]
    writer = matplotlib_module("animation").PillowWriter(fps=_FRAMES_A_SECOND)
    with writer.saving(figure, os.fspath(path), dpi=min(100, 1200 / figure.get_figwidth())):
        for frame in range(1, num_frames + 1):
            curtain.set_x(makespan * frame / num_frames)
            writer.grab_frame()
        for _ in range(2 * _FRAMES_A_SECOND):  # the end stays for a while
            writer.grab_frame()


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
    return step if exact and step and makespan / step <= 2000 else float(makespan / 400)
