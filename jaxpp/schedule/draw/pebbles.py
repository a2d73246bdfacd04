"""The pebble graph: time and memory in one picture, a row for each computation along the pipeline.

Rows follow the data: the forwards of stages 0 to S - 1, the backwards from S - 1 to 0, the weight parts from S - 1 to 0. Under each
forward row lie its pebbles, one for each residual that is alive: from the start of its F to the end of its B, or of its I and W. A
pebble keeps its place as long as it lives, as a buffer would. Where there are more pebbles than can be counted by eye, their number
stands there instead, on a ground that is darker for larger numbers.

Forwards without backwards keep nothing, so there the rows of the forwards have no room for pebbles.
"""

import math
import os
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw.canvas import (
    ANY,
    BAR,
    DOT,
    Figure,
    Labels,
    Panel,
    Part,
    are_seen,
    bar_key,
    choose_labels,
    frame_of,
    matplotlib_module,
    page,
    several_stages,
    shade,
)
from jaxpp.schedule.draw.timeline import TITLE, Timeline, extents, scaled, shortest
from jaxpp.schedule.residual_counts import lifetimes, peaks

__all__ = ["Lane", "lanes", "pebble_gif", "pebble_pair", "pebbles"]

_MOST_PEBBLES = 9  # that are drawn one by one
_COLUMN = 6.0  # points that a column of pebbles has at least, in a pair
_MOST_FRAMES, _FRAMES_A_SECOND = 120, 6


class Lane(NamedTuple):
    """A row of the pebble graph: the kinds of action that it holds, of one stage."""

    kinds: tuple[Kind, ...]
    stage: int


def lanes(bars: Iterable[Bar]) -> dict[Lane, float]:
    """The rows of the pebble graph in the order that data flows, each with its top: F upwards, then B and I downwards, then W.

    Forward rows are two high, with the pebbles in the lower half, if there are backwards; between the blocks is half a row.
    """
    present = {(action.stage, action.kind) for _, action, _, _ in bars}
    forward_rows = 1 + any(kind != Kind.F for _, kind in present)
    stages = sorted({stage for stage, _ in present})
    found: dict[Lane, float] = {}
    top = 0.0
    for gap, height, block, order in (
        (0, forward_rows, (Kind.F,), stages),
        (0.5, 1, (Kind.B, Kind.I), stages[::-1]),
        (0.5, 1, (Kind.W,), stages[::-1]),
    ):
        top += gap
        for stage in order:
            kinds = tuple(kind for kind in block if (stage, kind) in present)
            if kinds:
                found[Lane(kinds, stage)] = top
                top += height
    return found


def pebbles(
    bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, until: float | None = None, width: float | None = None
) -> Figure:
    """The pebble graph: what runs when along the pipeline, and every residual alive meanwhile, up to a time if one is given.

    In the margin on the right: the most residuals alive at once on each stage, and on its rank if ranks have several stages.
    ``width`` is in inches.
    """
    makespan, step = max(bar.end for bar in bars) or 1, _column_width(bars)
    figure = _figure(heading, [Timeline("", bars)], stage_to_rank, [step], width)
    if until is not None:
        rows = _room(bars, makespan, 0).rows
        curtain = matplotlib_module("patches").Rectangle((until, -0.1), makespan, rows + 0.2, facecolor="white", zorder=5)
        figure.axes[0].add_patch(curtain)
    return figure


def pebble_pair(heading: str, timelines: Sequence[Timeline], stage_to_rank: Sequence[int], width: float | None = None) -> Figure:
    """The pebble graphs of a step as it ran, and as it would run on devices of its own, in milliseconds, one below the other.

    There are two columns of pebbles to a short action, or fewer where columns would be too narrow.
    """
    steps = [shortest(line.bars) / 2 for line in timelines]
    return _figure(heading, timelines, stage_to_rank, steps, width, "ms")


def _figure(
    heading: str,
    timelines: Sequence[Timeline],
    stage_to_rank: Sequence[int],
    steps: Sequence[float],
    width: float | None,
    unit: str = "",
) -> Figure:
    """The pebble graphs one below the other, each with a column every step of its own; in a pair, no narrower than ``_COLUMN``."""
    everything = [bar for line in timelines for bar in line.bars]
    keeps = any(bar.action.kind != Kind.F for bar in everything)
    above, margin = TITLE if unit else 0, 1.4 if several_stages(stage_to_rank) else 0.6
    across = extents([line._replace(rest=()) for line in timelines], [0] * len(timelines))
    columns = max(end / (2 * step if unit else step) for end, step in zip(across, steps, strict=True))
    frame = frame_of(heading, bar_key(everything, stage_to_rank, ANY, pebble=DOT * keeps), columns, margin, width=width)
    parts = [_room(line.bars, end, above) for line, end in zip(timelines, across, strict=True)]
    scales = [72 * frame.width / end for end in across]
    if unit:
        steps = [max(step, _COLUMN / scale) for step, scale in zip(steps, scales, strict=True)]
    labels = choose_labels(zip([line.bars for line in timelines], scales, strict=True), BAR * min(part.points for part in parts))
    countable = all(map(_countable, timelines, steps, scales, parts))
    key = bar_key(everything, stage_to_rank, labels, pebble=(DOT if countable else shade(1)) * keeps)
    panels = page(frame, heading, key, parts, unit)
    for panel, line, step, written in zip(panels, timelines, steps, labels, strict=True):
        _draw(panel, line.bars, stage_to_rank, step if countable else None, written)
        panel.title(scaled(line.title, panel.across, across[0]))
    return panels[0].axes.figure


def _room(bars: Sequence[Bar], across: Number, above: float) -> Part:
    keeps = any(bar.action.kind != Kind.F for bar in bars)
    rows = max(top + 1 + (keeps and Kind.F in lane.kinds) for lane, top in lanes(bars).items())
    return Part(rows, rows * max(0.14, min(0.24, 14 / rows)), above, across)


def _countable(line: Timeline, step: float, scale: float, part: Part) -> bool:
    """Whether the pebbles of every stage can be counted by eye, in columns of so much time."""
    most = max(peaks(lifetimes(line.bars), range(1 + max(bar.action.stage for bar in line.bars))))
    return 0 < most <= _MOST_PEBBLES and are_seen(most, step * scale, part.points)


def _draw(panel: Panel, bars: Sequence[Bar], stage_to_rank: Sequence[int], step: float | None, labels: Labels) -> None:
    """Draw a pebble graph onto a panel that has room for it, with a column every ``step``, or with numbers if there is none."""
    makespan, several, tops = max(bar.end for bar in bars) or 1, several_stages(stage_to_rank), lanes(bars)
    top_of = {(lane.stage, kind): top for lane, top in tops.items() for kind in lane.kinds}
    named = {"/".join(lane.kinds) + str(lane.stage): top for lane, top in tops.items()}
    panel.lanes(named, [(bar, top_of[bar.action[:2]]) for bar in bars], makespan, stage_to_rank, labels)
    residuals = lifetimes(bars)
    if not residuals:
        return
    of_rank, of_stage = peaks(residuals, stage_to_rank), peaks(residuals, range(len(stage_to_rank)))
    most = max(of_stage)
    for stage, rank in enumerate(stage_to_rank):
        lane, own = top_of[stage, Kind.F] + 1, [residual for residual in residuals if residual.stage == stage]
        if step:
            panel.pebbles(own, lane, step, most)
        else:
            panel.numbers(own, lane, most, labels)
        panel.margin([str(of_stage[stage]), f"rank {rank}: {of_rank[rank]}"][: 1 + several], lane + 0.5)
    panel.margin(["peak", "of its rank"][: 1 + several], -0.7)


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
