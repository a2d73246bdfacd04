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
from jaxpp.schedule.clock import Number
from jaxpp.schedule.draw.panel import INK, LEFT, Entry, Figure, Panel, Part, bar_legend, legend, page, width_of
from jaxpp.schedule.draw.timeline import REST, SENT, TITLE, Timeline, draw_timeline, timeline_room
from jaxpp.stages.stage_table import bytes_in_words

__all__ = ["COLOURS", "profile_figure"]

COLOURS = ("#262626", "#6A6A6A", "#ABABAB", "#00684B", "#00AB7E", "#B4E3D3", "#7AC2A8", "#8C8C8C", "#E4E4E4")
_LEGEND = 0.28  # inches above the memory, for its legend under its title
_ROW, _LINE, _LETTER, _MARGIN = 0.6, 0.135, 0.065, 0.9  # inches: a device's row, a line and a letter of its name, the peaks
_LETTERS = 20  # in a line of a device's name
_NARROWEST = 8.2  # inches, for the legend of the memory


def profile_figure(heading: str, timelines: Sequence[Timeline], memory: Sequence[Curve], stage_to_rank: Sequence[int]) -> Figure:
    """The timelines of a step, one below the other, and the bytes on each device during the first, if there are curves of them.

    To the right of a timeline stands its end; to the right of the memory, which goes on to the end of the step, the peak of each
    device.
    """
    measured, everything = timelines[0].bars, [bar for line in timelines for bar in line.bars]
    step = max([timelines[0].end, *(curve.times[-1] for curve in memory)])
    across = max([step, *(line.end for line in timelines)]) or 1
    names = [_lines(curve.label) for curve in memory]
    left = max([LEFT] + [0.15 + _LETTER * len(line) for name in names for line in name.split("\n")])
    parts = [timeline_room(stage_to_rank, TITLE)] * len(timelines)
    if memory:
        row = max([_ROW] + [_LINE * (name.count("\n") + 2) for name in names])
        parts.append(Part(len(memory), row * len(memory), TITLE + _LEGEND))
    usual = statistics.mean(bar.end - bar.start for bar in measured) or across  # a short bar may be as short as stamps are fine
    width = max(_NARROWEST, width_of(across / usual, stage_to_rank))
    panels = page(heading, across, parts, width, _MARGIN, left, "ms")
    for panel, line in zip(panels, timelines, strict=False):
        draw_timeline(panel, line, stage_to_rank)
        middle = max(stage_to_rank) / 2 + 0.5
        panel.axes.text(line.end + 5 / panel.points[0], middle, _milli(float(line.end)), size=8, va="center", color=INK)
    more: list[Entry] = [("begin, sums, update", REST, 0)] * any(line.rest for line in timelines)
    more += [("arrives", SENT, 0)] * any(line.sends for line in timelines)
    bar_legend(panels[0], everything, stage_to_rank, above=TITLE, more=more)
    for panel in panels[len(timelines) :]:
        _memory(panel, memory, names, step)
    return panels[0].axes.figure


def _lines(label: str) -> str:
    """The label, its ranks on lines of their own if it is long."""
    device, space, ranks = label.partition(" (")
    return label if len(label) <= _LETTERS else "\n".join([device, *textwrap.wrap(space.strip() + ranks, _LETTERS)])


def _milli(time: float) -> str:
    return f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"


def _memory(panel: Panel, memory: Sequence[Curve], names: Sequence[str], end: Number) -> None:
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
    present = [k for k in range(len(MEMORY_KINDS)) if any(level[k] for curve in memory for level in curve.levels)]
    legend(panel, [(MEMORY_KINDS[k], COLOURS[k], 0) for k in present], 0.06)
    panel.title("memory", 0.07 + _LEGEND)


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
