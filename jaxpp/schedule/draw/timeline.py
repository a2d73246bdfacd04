"""The timeline: bars in time, a row for each rank. Schedules, simulations and profiles are drawn by the same function."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw.panel import INK, Figure, Panel, Part, bar_legend, inside, page, width_of

__all__ = ["REST", "SENT", "TITLE", "Timeline", "draw_timeline", "shortest", "timeline", "timeline_room"]

REST, SENT = "#8C8C8C", "#D55E00"
"""The colours of what is no action, and of what arrives, which is a line below the row of a rank."""
TITLE = 0.32  # inches above a panel that has a title


class Timeline(NamedTuple):
    """A step in time, in any unit. Its ``rest`` is the begin of the step, sums of tied gradients, and the update."""

    title: str
    bars: Sequence[Bar]
    rest: Sequence[tuple[int, float, float]] = ()  # rank, start and end
    sends: Sequence[tuple[int, float, float]] = ()  # rank, start and end of each arrival

    @property
    def end(self) -> Number:
        """When everything is done."""
        return max([bar.end for bar in self.bars] + [end for _, _, end in self.rest])


def timeline(bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str) -> Figure:
    """The bars in time, a row for each rank, as a matplotlib ``Figure`` with its Agg canvas, for ``savefig``."""
    line = Timeline("", bars)
    across, room = line.end or 1, timeline_room(stage_to_rank)
    (panel,) = page(heading, across, [room], width_of(across / shortest(bars), stage_to_rank), 0.25)
    draw_timeline(panel, line, stage_to_rank)
    bar_legend(panel, bars, stage_to_rank)
    return panel.axes.figure


def shortest(bars: Sequence[Bar]) -> Number:
    """The length of a short bar: one in twenty is shorter, not counting those that take no time."""
    lengths = sorted(bar.end - bar.start for bar in bars if bar.end > bar.start)
    return lengths[len(lengths) // 20] if lengths else (max(bar.end for bar in bars) or 1) / 100


def timeline_room(stage_to_rank: Sequence[int], above: float = 0) -> Part:
    """The room of a timeline with that many inches above it."""
    num_ranks = max(stage_to_rank) + 1
    return Part(num_ranks, num_ranks * (0.42 if num_ranks <= 8 else 0.32), above)


def draw_timeline(panel: Panel, line: Timeline, stage_to_rank: Sequence[int]) -> None:
    """Draw a timeline onto a panel that has room for it."""
    ranks = range(max(stage_to_rank) + 1)
    panel.lanes({str(rank): rank for rank in ranks}, [(bar, bar.rank) for bar in line.bars], line.end or 1, stage_to_rank)
    panel.rectangles([(start, end, *inside(rank)) for rank, start, end in line.rest], REST, "rest")
    panel.rectangles([(start, end, rank + 0.94, rank + 1.04) for rank, start, end in line.sends], SENT, "sends")
    panel.axes.set_ylabel("rank", size=9, color=INK)
    panel.title(line.title)
