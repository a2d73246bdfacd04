"""Figures of a measured step: what really ran above what the virtual clock says of it, and the memory that it took.

Everything that ran or lived at the same time stands at the same place from left to right, so the figure is read downwards: where
the measured timeline idles and that of the virtual clock does not, the time went into what the clock does not know, such as the
host.

The memory of a device is an area in steps. What stays lies at the bottom, in greys; what comes and goes lies on it, in greens. The
neighbours differ in lightness, so that they part for the colour-blind and in grey. All devices have one scale.
"""

import itertools
import statistics
import textwrap
from collections.abc import Iterator, Sequence

from jaxpp.observe.memory.liveness import MEMORY_KINDS
from jaxpp.observe.profile.memory_curves import Curve
from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Number
from jaxpp.schedule.draw.canvas import (
    ANY,
    BAR,
    INK,
    LEFT,
    LINE,
    Entry,
    Figure,
    Labels,
    Panel,
    Part,
    bar_key,
    choose_labels,
    draw_key,
    frame_of,
    key_lines,
    page,
)
from jaxpp.schedule.draw.ring_timeline import draw_ring, ring_key, turns_of
from jaxpp.schedule.draw.timeline import REST, SENT, TITLE, Timeline, copied_key, draw_timeline, extents, scaled, timeline_room
from jaxpp.stages.stage_table import bytes_in_words

__all__ = ["COLOURS", "profile_figure"]

COLOURS = (
    *("#262626", "#6A6A6A", "#ABABAB", "#00684B", "#00AB7E", "#B4E3D3", "#7AC2A8", "#8C8C8C", "#4D4D4D", "#008A65"),
    "#E4E4E4",
)
_GAP = 0.04  # inches between the memory and its key
_ROW, _LINE, _LETTER, _MARGIN = 0.6, 0.135, 0.065, 0.9  # inches: a device's row, a line and a letter of its name, the peaks
_MEMORY = "memory of arrays"  # the temporaries of programs are not in it
_LETTERS = 20  # in a line of a device's name


def profile_figure(
    heading: str,
    timelines: Sequence[Timeline],
    memory: Sequence[Curve],
    stage_to_rank: Sequence[int],
    width: float | None = None,
) -> Figure:
    """The timelines of a step, one below the other, and the bytes on each device during the first, if there are curves of them.

    To the right of a timeline stands its end; to the right of the memory, which goes on to the end of the step, the peak of each
    device. ``width`` is in inches.
    """
    step = max([timelines[0].end, *(curve.times[-1] for curve in memory)])
    across = extents(timelines, [step] + [0] * (len(timelines) - 1))
    names = [_lines(curve.label) for curve in memory]
    left = max([LEFT] + [0.15 + _LETTER * len(line) for name in names for line in name.split("\n")])
    kinds = _memory_key(memory)
    usual = statistics.mean(bar.end - bar.start for bar in timelines[0].bars) or step or 1  # a short bar may be as short as can be
    frame = frame_of(heading, _key(timelines, stage_to_rank, ANY), max(across) / usual, _MARGIN, left, width)
    parts = [timeline_room(stage_to_rank, end, TITLE) for end in across]
    scales = [72 * frame.width / end for end in across]
    numbered = [turns_of(line) if line.num_groups else line.bars for line in timelines]
    labels = choose_labels(zip(numbered, scales, strict=True), BAR * parts[0].points)
    if memory:
        row = max([_ROW] + [_LINE * (name.count("\n") + 2) for name in names])
        above = TITLE + _GAP + LINE * key_lines(kinds, frame.width)
        parts.append(Part(len(memory), row * len(memory), above, across[0]))
    panels = page(frame, heading, _key(timelines, stage_to_rank, labels), parts, "ms")
    for panel, line, written in zip(panels, timelines, labels, strict=False):
        draw = draw_ring if line.num_groups else draw_timeline
        draw(panel, line._replace(title=scaled(line.title, panel.across, across[0])), stage_to_rank, written)
        middle = max(stage_to_rank) / 2 + 0.5
        panel.axes.text(line.end + 5 / panel.points[0], middle, _milli(float(line.end)), size=8, va="center", color=INK)
    for panel in panels[len(timelines) :]:
        _memory(panel, memory, names, kinds, step)
    return panels[0].axes.figure


def _key(timelines: Sequence[Timeline], stage_to_rank: Sequence[int], labels: Sequence[Labels]) -> list[Entry]:
    """The key of the timelines."""
    forwards = all(bar.action.kind == Kind.F for line in timelines for bar in line.bars)
    rest = "begin, outputs" if forwards else "begin, sums, update"
    more: list[Entry] = [(rest, REST, 0)] * any(line.rest for line in timelines)
    more += [("arrives", SENT, 0)] * any(line.sends for line in timelines)
    more += copied_key([copied for line in timelines for copied in line.copies])
    if timelines[0].num_groups:
        return ring_key(timelines[0], numbered=any(written.kinds for written in labels), more=more)
    return bar_key([bar for line in timelines for bar in line.bars], stage_to_rank, labels, more=more)


def _memory_key(memory: Sequence[Curve]) -> list[Entry]:
    """The key of the memory: the kinds of which there are bytes."""
    present = [k for k in range(len(MEMORY_KINDS)) if any(level[k] for curve in memory for level in curve.levels)]
    return [(MEMORY_KINDS[k], COLOURS[k], 0) for k in present]


def _lines(label: str) -> str:
    """The label, its ranks on lines of their own if it is long."""
    device, space, ranks = label.partition(" (")
    return label if len(label) <= _LETTERS else "\n".join([device, *textwrap.wrap(space.strip() + ranks, _LETTERS)])


def _milli(time: float) -> str:
    return f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"


def _memory(panel: Panel, memory: Sequence[Curve], names: Sequence[str], key: Sequence[Entry], end: Number) -> None:
    """Draw a row for each device: the stacked bytes of each kind, and the peak."""
    peaks = [max(map(sum, curve.levels)) for curve in memory]
    scale = 0.88 / (max(peaks) or 1)
    for kind, colour in enumerate(COLOURS):
        areas = [area for row, curve in enumerate(memory) for area in _areas(curve, kind, row + 1, scale, end)]
        panel.polygons(areas, colour, MEMORY_KINDS[kind], 0.3, colour)  # its lines show bytes that lived for less than a pixel
    for row, most in enumerate(peaks):
        panel.margin([bytes_in_words(most)], row + 0.56)
    panel.margin(["peak"], -72 * 0.16 / panel.points[1])
    panel.axes.set_yticks([row + 0.56 for row in range(len(memory))], names)
    left, bottom, wide, tall = panel.box
    draw_key(panel.axes.figure, key, left, bottom + tall + _GAP, wide)
    panel.title(_MEMORY, 0.07 + _GAP + LINE * key_lines(key, wide))


def _areas(curve: Curve, kind: int, base: float, scale: float, end: Number) -> Iterator[list[tuple[Number, float]]]:
    """The corners of what a kind adds to a curve, in steps: along its top, and back along the top of the kinds below it."""
    spans = zip(curve.times, (*curve.times[1:], end), curve.levels, strict=True)
    for present, group in itertools.groupby(spans, lambda span: span[2][kind] > 0):
        there, back = list[tuple[Number, float]](), list[tuple[Number, float]]()
        for start, stop, level in group if present else ():
            below = base - scale * sum(level[:kind])
            there += [(time, below - scale * level[kind]) for time in (start, stop)]
            back += [(time, below) for time in (start, stop)]
        if present:
            yield there + back[::-1]
