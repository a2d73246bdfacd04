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
from jaxpp.schedule.panel import DOT, IDLE, INK, cell_of, inside, key_of, module_of, page, several_stages, shade, width_of
from jaxpp.schedule.residuals import Lane, column_width, lanes, live, peak

__all__ = ["pebble_gif", "pebbles", "timeline"]

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
    makespan = max(bar.end for bar in bars) or 1
    num_ranks = max(stage_to_rank) + 1
    short = sorted(bar.end - bar.start for bar in bars)[len(bars) // 20] or makespan / 100
    tall = num_ranks * (0.42 if num_ranks <= 8 else 0.32)
    panel = page(heading, makespan, num_ranks, width_of(makespan / short, stage_to_rank), tall, 0.25)
    panel.rectangles([(0, makespan, *inside(rank)) for rank in range(num_ranks)], IDLE, "idle")
    panel.bars([cell_of(bar, bar.rank, stage_to_rank) for bar in bars])
    panel.axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], [str(rank) for rank in range(num_ranks)])
    panel.axes.set_ylabel("rank", size=9, color=INK)
    key_of(panel, bars, stage_to_rank)
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
    step, tops = column_width(bars), _tops(lanes(bars))
    height = max(y + 1 + (Kind.F in lane.kinds) for lane, y in tops.items())
    several, tall = several_stages(stage_to_rank), min(0.24 * height, 18)
    panel = page(heading, makespan, height, width_of(makespan / step, stage_to_rank), tall, 1.4 if several else 0.6)
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
    key_of(panel, bars, stage_to_rank, DOT if countable else shade(1))
    if until is not None:
        panel.axes.add_patch(module_of("patches").Rectangle((until, -0.1), makespan, height + 0.2, facecolor="white", zorder=5))
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
