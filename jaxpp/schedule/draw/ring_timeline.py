"""The timeline of a ring: a row for each rank, a colour for each group, the numbers of its turns.

All bars of a ring are forwards, so their colours are free to tell which group runs. Passes that take in prompts are paler.
"""

from collections import defaultdict
from collections.abc import Sequence

from jaxpp.schedule.clock import Bar
from jaxpp.schedule.draw.canvas import (
    BAR,
    IDLE,
    INK,
    Entry,
    Figure,
    Labels,
    Panel,
    choose_labels,
    frame_of,
    group_colour,
    group_ink,
    inside,
    page,
)
from jaxpp.schedule.draw.timeline import Timeline, draw_others, shortest, timeline_room

__all__ = ["draw_ring", "ring_key", "ring_timeline", "turns_of"]

_MOST_NAMED = 12
"""Groups that a key names one by one."""


def ring_timeline(
    bars: Sequence[Bar], stage_to_rank: Sequence[int], num_groups: int, heading: str, width: float | None = None
) -> Figure:
    """The bars of a ring in time as a matplotlib ``Figure``; ``width`` is in inches."""
    line = Timeline("", bars, num_groups=num_groups)
    across = line.end or 1
    frame = frame_of(heading, ring_key(line, numbered=True), across / shortest(bars), 0.25, width=width)
    part = timeline_room(stage_to_rank, across)
    (labels,) = choose_labels([(turns_of(line), 72 * frame.width / across)], BAR * part.points)
    (panel,) = page(frame, heading, ring_key(line, numbered=bool(labels.kinds)), [part])
    draw_ring(panel, line, stage_to_rank, labels)
    return panel.axes.figure


def turns_of(line: Timeline) -> list[Bar]:
    """The bars of a ring, each with the number of its turn in place of its pass."""
    groups = line.num_groups or 1
    return [bar._replace(action=bar.action._replace(microbatch=bar.action.microbatch // groups)) for bar in line.bars]


def draw_ring(panel: Panel, line: Timeline, stage_to_rank: Sequence[int], labels: Labels) -> None:
    """Draw the timeline of a ring onto a panel that has room for it."""
    ranks, groups = range(max(stage_to_rank) + 1), line.num_groups or 1
    panel.rectangles([(0, line.end or 1, *inside(rank)) for rank in ranks], IDLE, "idle")
    own: dict[tuple[int, bool], list[Bar]] = defaultdict(list)
    for turn, bar in zip(turns_of(line), line.bars, strict=True):
        own[bar.action.microbatch % groups, bar.action.microbatch in line.prompts].append(turn)
    for (group, prompt), bars in sorted(own.items()):
        _draw(panel, bars, group, labels.size if labels.kinds else None, prompt=prompt)
    panel.axes.set_yticks([rank + 0.5 for rank in ranks], list(map(str, ranks)))
    panel.axes.set_ylabel("rank", size=9, color=INK)
    draw_others(panel, line)


def _draw(panel: Panel, bars: Sequence[Bar], group: int, size: float | None, *, prompt: bool) -> None:
    """Draw the bars of one group, and their turns in digits of so many points where those have room."""
    wide = [panel.points[0] * float(bar.end - bar.start) for bar in bars]
    edges = [min(0.7, 0.1 * points) for points in wide]
    label = f"group {group}" + ", prompt" * prompt
    panel.rectangles([(bar.start, bar.end, *inside(bar.rank)) for bar in bars], group_colour(group, pale=prompt), label, edges)
    spots = defaultdict(list)
    for bar, points in zip(bars, wide, strict=True):
        text = str(bar.action.microbatch)
        if size and Labels(size).fits(text, points, BAR * panel.points[1]):
            spots[text].append(((bar.start + bar.end) / 2, bar.rank + 0.5))
    for text, at in spots.items():
        panel.write(text, size or 0, at, group_ink(group, pale=prompt))


def ring_key(line: Timeline, *, numbered: bool, more: Sequence[Entry] = ()) -> list[Entry]:
    """What the colours mean, ``more`` among them, and what the numbers are if there are any."""
    groups = line.num_groups or 1
    named = range(min(groups, _MOST_NAMED))
    entries: list[Entry] = [(f"group {group}", group_colour(group), 0) for group in named]
    entries += [(f"and {groups - len(named)} more", "", 0)] * (groups > len(named))
    entries += [("paler: a prompt", group_colour(0, pale=True), 0)] * bool(line.prompts)
    return [*entries, *more, ("idle", IDLE, 0), *[("numbers: turns", "", 0)] * numbered]
