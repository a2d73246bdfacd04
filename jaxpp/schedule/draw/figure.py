"""Figures of bars in time: the timeline, a row a rank, and the pebble graph, a row a computation along the pipeline.

The pebble graph shows time and memory in one picture. Rows follow the data: the forwards of stages 0 to S - 1, the backwards from
S - 1 to 0, the weight parts. Under each forward row lie its pebbles, one a residual that is alive: from the start of its F to the
end of its B, or of its I and W. A pebble keeps its place as long as it lives, as a buffer would. Where they are more than can be
counted by eye, their number stands there, on a ground that is the darker the more they are.
"""

import os
from collections.abc import Sequence
from typing import Any

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw.panel import (
    DOT,
    IDLE,
    INK,
    Panel,
    Part,
    cell_of,
    inside,
    key_of_bars,
    module_of,
    page,
    several_stages,
    shade,
    width_of,
)
from jaxpp.schedule.residuals import Lane, column_width, lanes, live, peak

__all__ = [
    "draw_pebbles",
    "draw_timeline",
    "pebble_gif",
    "pebbles",
    "pebbles_margin",
    "pebbles_room",
    "shortest",
    "timeline",
    "timeline_room",
]

_MOST_PEBBLES, _NARROWEST = 9, 5.0  # that are drawn one by one, and the points of a column that has room for them
_MOST_FRAMES, _FRAMES_A_SECOND = 120, 6


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
    makespan, tall = max(bar.end for bar in bars) or 1, timeline_room(stage_to_rank)
    (panel,) = page(heading, makespan, [tall], width_of(makespan / shortest(bars), stage_to_rank), 0.25)
    draw_timeline(panel, bars, stage_to_rank)
    key_of_bars(panel, bars, stage_to_rank)
    return panel.axes.figure


def shortest(bars: Sequence[Bar]) -> Number:
    """The length that one in twenty bars is below, not counting those that take no time."""
    lengths = sorted(bar.end - bar.start for bar in bars if bar.end > bar.start)
    return lengths[len(lengths) // 20] if lengths else (max(bar.end for bar in bars) or 1) / 100


def timeline_room(stage_to_rank: Sequence[int], above: float = 0) -> Part:
    """The room of a timeline with that many inches above it."""
    num_ranks = max(stage_to_rank) + 1
    return Part(num_ranks, num_ranks * (0.42 if num_ranks <= 8 else 0.32), above)


def draw_timeline(panel: Panel, bars: Sequence[Bar], stage_to_rank: Sequence[int], until: Number = 0) -> None:
    """Draw a timeline onto a panel that has room for it; it goes on ``until`` then, if that is later than the last bar."""
    makespan, num_ranks = max(until, *(bar.end for bar in bars)) or 1, max(stage_to_rank) + 1
    panel.rectangles([(0, makespan, *inside(rank)) for rank in range(num_ranks)], IDLE, "idle")
    panel.bars([cell_of(bar, bar.rank, stage_to_rank) for bar in bars])
    panel.axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], [str(rank) for rank in range(num_ranks)])
    panel.axes.set_ylabel("rank", size=9, color=INK)


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
    makespan, step, room = max(bar.end for bar in bars) or 1, column_width(bars), pebbles_room(bars)
    (panel,) = page(heading, makespan, [room], width_of(makespan / step, stage_to_rank), pebbles_margin(stage_to_rank))
    key_of_bars(panel, bars, stage_to_rank, draw_pebbles(panel, bars, stage_to_rank, step))
    if until is not None:
        curtain = module_of("patches").Rectangle((until, -0.1), makespan, room.rows + 0.2, facecolor="white", zorder=5)
        panel.axes.add_patch(curtain)
    return panel.axes.figure


def pebbles_room(bars: Sequence[Bar], above: float = 0) -> Part:
    """The room of a pebble graph with that many inches above it."""
    rows = max(y + 1 + (Kind.F in lane.kinds) for lane, y in _tops(lanes(bars)).items())
    return Part(rows, min(0.24 * rows, 18), above)


def pebbles_margin(stage_to_rank: Sequence[int]) -> float:
    """Inches to the right of a pebble graph, for its peaks."""
    return 1.4 if several_stages(stage_to_rank) else 0.6


def draw_pebbles(panel: Panel, bars: Sequence[Bar], stage_to_rank: Sequence[int], step: float) -> str:
    """Draw a pebble graph onto a panel that has room for it, with a column every ``step``.

    Returns:
        what stands for the residuals in its key: a pebble, or a colour where they are too many.
    """
    makespan, several, tops = max(bar.end for bar in bars) or 1, several_stages(stage_to_rank), _tops(lanes(bars))
    panel.rectangles([(0, makespan, *inside(top)) for top in tops.values()], IDLE, "idle")
    top = {(lane.stage, kind): y for lane, y in tops.items() for kind in lane.kinds}
    panel.bars([cell_of(bar, top[bar.action[:2]], stage_to_rank) for bar in bars])
    residuals = live(bars)
    by_stage = [[r for r in residuals if r.stage == stage] for stage in range(len(stage_to_rank))]
    most = max(map(peak, by_stage))
    countable = most <= _MOST_PEBBLES and panel.points[0] * step >= _NARROWEST
    for stage, (rank, own) in enumerate(zip(stage_to_rank, by_stage, strict=True)):
        lane = top[stage, Kind.F] + 1
        if countable:
            panel.pebbles(own, lane, step, most)
        else:
            panel.numbers(own, lane, most)
        total = peak(r for r in residuals if stage_to_rank[r.stage] == rank)
        panel.margin([str(peak(own)), f"rank {rank}: {total}"][: 1 + several], lane + 0.5)
    panel.margin(["peak", "of its rank"][: 1 + several], -0.7)
    panel.axes.set_yticks([y + 0.5 for y in tops.values()], ["/".join(lane.kinds) + str(lane.stage) for lane in tops])
    return DOT if countable else shade(1)


def pebble_gif(bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, path: str | os.PathLike[str]) -> None:
    """Write the pebble graph as a GIF in which time passes: a frame a column, or 120 frames if there are more columns than that.

    Args:
        bars: as for ``timeline``.
        stage_to_rank: likewise.
        heading: likewise.
        path: the file to write.
    """
    makespan = max(bar.end for bar in bars)
    num_frames = min(_MOST_FRAMES, round(makespan / column_width(bars))) or 1
    figure = pebbles(bars, stage_to_rank, heading, until=0)
    curtain = figure.axes[0].patches[-1]
    writer = module_of("animation").PillowWriter(fps=_FRAMES_A_SECOND)
    with writer.saving(figure, os.fspath(path), dpi=min(100, 1200 / figure.get_figwidth())):
        for frame in range(1, num_frames + 1):
            curtain.set_x(makespan * frame / num_frames)
            writer.grab_frame()
        for _ in range(2 * _FRAMES_A_SECOND):  # the end stays for a while
            writer.grab_frame()


def _tops(rows: Sequence[Lane]) -> dict[Lane, float]:
    """Where each row begins: forward rows are two high, for the pebbles, and the blocks are half a row apart."""
    forwards = sum(Kind.F in lane.kinds for lane in rows)
    gaps = [0.5 * (Kind.F not in lane.kinds) + 0.5 * (Kind.W in lane.kinds) for lane in rows]
    return {lane: min(k, forwards) + k + gap for k, (lane, gap) in enumerate(zip(rows, gaps, strict=True))}
