"""The timeline: bars in time, a row for each rank. Schedules, simulations and profiles are drawn by the same function."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw.canvas import (
    ANY,
    BAR,
    INK,
    Entry,
    Figure,
    Labels,
    Panel,
    Part,
    bar_key,
    choose_labels,
    frame_of,
    inside,
    page,
)

__all__ = [
    "OUT",
    "REST",
    "SENT",
    "TITLE",
    "Copied",
    "Timeline",
    "copied_key",
    "draw_others",
    "draw_timeline",
    "extents",
    "scaled",
    "shortest",
    "timeline",
    "timeline_room",
]

REST, SENT = "#8C8C8C", "#D55E00"
"""The colours of what is no action, and of what arrives, which is a line below the row of a rank."""
OUT, BACK = "#00684B", "#7AC2A8"
"""The colours of copies to host memory and back, which are lines at the lower edge of the row of a rank."""
TITLE = 0.32  # inches above a panel that has a title
_UNEQUAL = 2  # how many times as long one timeline is as the other if they have scales of their own


class Copied(NamedTuple):
    """A copy of residuals to host memory, or back, on the link between a rank's device and its host."""

    rank: int
    start: Number
    end: Number
    back: bool


class Timeline(NamedTuple):
    """A step in time, in any unit. Its ``rest`` is the begin of the step, sums of tied gradients, and the update.

    Of a ring, it has the number of groups, and the numbers of the passes that take in prompts.
    """

    title: str
    bars: Sequence[Bar]
    rest: Sequence[tuple[int, float, float]] = ()  # rank, start and end
    sends: Sequence[tuple[int, float, float]] = ()  # rank, start and end of each arrival
    num_groups: int | None = None
    prompts: Set[int] = frozenset()
    copies: Sequence[Copied] = ()

    @property
    def end(self) -> Number:
        """When everything is done."""
        return max([bar.end for bar in self.bars] + [end for _, _, end in self.rest])


def timeline(
    bars: Sequence[Bar], stage_to_rank: Sequence[int], heading: str, width: float | None = None, copies: Sequence[Copied] = ()
) -> Figure:
    """The bars in time, a row for each rank, as a matplotlib ``Figure``; ``width`` is in inches."""
    line = Timeline("", bars, copies=copies)
    across, more = line.end or 1, copied_key(copies)
    frame = frame_of(heading, bar_key(bars, stage_to_rank, ANY, more=more), across / shortest(bars), 0.25, width=width)
    part = timeline_room(stage_to_rank, across)
    labels = choose_labels([(bars, 72 * frame.width / across)], BAR * part.points)
    (panel,) = page(frame, heading, bar_key(bars, stage_to_rank, labels, more=more), [part])
    draw_timeline(panel, line, stage_to_rank, *labels)
    return panel.axes.figure


def shortest(bars: Sequence[Bar]) -> Number:
    """The length of a short bar: one in twenty is shorter, not counting those that take no time."""
    lengths = sorted(bar.end - bar.start for bar in bars if bar.end > bar.start)
    return lengths[len(lengths) // 20] if lengths else (max(bar.end for bar in bars) or 1) / 100


def extents(timelines: Sequence[Timeline], least: Sequence[Number]) -> list[Number]:
    """How far the time of each panel goes: as far as that of the longest, or, if some are far shorter, of each as far as its own.

    Each panel goes at least as far as the number in ``least`` says.
    """
    own = [max(line.end, end) or 1 for line, end in zip(timelines, least, strict=True)]
    return own if max(own) > _UNEQUAL * min(own) else [max(own)] * len(own)


def scaled(title: str, across: Number, first: Number) -> str:
    """The title of a panel, and how its scale of time compares with that of the first panel."""
    ratio = first / across
    if ratio == 1:
        return title
    return f"{title} (time stretched {ratio:.2g} times)" if ratio > 1 else f"{title} (time compressed {1 / ratio:.2g} times)"


def timeline_room(stage_to_rank: Sequence[int], across: Number, above: float = 0) -> Part:
    """The room of a timeline with that many inches above it."""
    num_ranks = max(stage_to_rank) + 1
    row = 0.42 if num_ranks <= 8 else max(0.2, min(0.32, 5.2 / num_ranks))
    return Part(num_ranks, num_ranks * row, above, across)


def draw_timeline(panel: Panel, line: Timeline, stage_to_rank: Sequence[int], labels: Labels) -> None:
    """Draw a timeline onto a panel that has room for it."""
    ranks = range(max(stage_to_rank) + 1)
    bars = [(bar, bar.rank) for bar in line.bars]
    panel.lanes({str(rank): rank for rank in ranks}, bars, line.end or 1, stage_to_rank, labels)
    draw_others(panel, line)


def copied_key(copies: Sequence[Copied]) -> list[Entry]:
    """What the colours of copies mean, if there are any."""
    return [("to the host", OUT, 0), ("back", BACK, 0)] if copies else []


def draw_others(panel: Panel, line: Timeline) -> None:
    """Draw what is no action: the rest of a step, copies, what arrives, and what the timeline is called."""
    for back, colour, top in ((False, OUT, 0.74), (True, BACK, 0.84)):
        boxes = [(each.start, each.end, each.rank + top, each.rank + top + 0.1) for each in line.copies if each.back == back]
        edges = [min(0.5, 0.1 * panel.points[0] * (end - start)) for start, end, _, _ in boxes]
        panel.rectangles(boxes, colour, "copies back" if back else "copies to the host", edges)
    panel.rectangles([(start, end, *inside(rank)) for rank, start, end in line.rest], REST, "rest")
    panel.rectangles([(start, end, rank + 0.94, rank + 1.04) for rank, start, end in line.sends], SENT, "sends")
    panel.axes.set_ylabel("rank", size=9, color=INK)
    panel.title(line.title)
