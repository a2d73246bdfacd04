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
from typing import Any, NamedTuple

from jaxpp.observe.memory.liveness import KINDS
from jaxpp.schedule.clock import Bar, Number
from jaxpp.schedule.draw.figure import draw_pebbles, draw_timeline, pebbles_margin, pebbles_room, shortest, timeline_room
from jaxpp.schedule.draw.panel import DOT, INK, LEFT, Entry, Panel, Part, inside, key_of, key_of_bars, page, width_of
from jaxpp.stages.table import bytes_in_words

__all__ = ["COLOURS", "Curve", "Timeline", "pebble_pair", "profile_figure"]

COLOURS = ("#262626", "#6A6A6A", "#ABABAB", "#00684B", "#00AB7E", "#B4E3D3", "#7AC2A8", "#8C8C8C", "#E4E4E4")
_REST, _SENT = "#8C8C8C", "#D55E00"  # what is no action, and what arrives: a line below the row of a rank
_TITLE, _KEY = 0.32, 0.28  # inches above a panel, for its title and for a key under that
_ROW, _LINE, _LETTER, _MARGIN = 0.6, 0.135, 0.065, 0.9  # inches: a device's row, a line and a letter of its name, the peaks
_LETTERS = 20  # in a line of a device's name
_COLUMN = 6.0  # points that a column of pebbles has at least
_NARROWEST = 8.2  # inches, for the key of the memory


class Curve(NamedTuple):
    """Live bytes of one device over a step, by kind.

    Attributes:
        label: the device and its ranks, ``cuda:0 (ranks 0, 4)``.
        times: milliseconds from the start of the step, none before the one that it follows.
        levels: ``levels[k]`` are the bytes of each of ``KINDS`` from ``times[k]`` on; the last ones stay to the end of the step.
    """

    label: str
    times: tuple[float, ...]
    levels: tuple[tuple[int, ...], ...]


class Timeline(NamedTuple):
    """A step in time, in milliseconds.

    Attributes:
        title: what it is.
        bars: the actions.
        rest: rank, start and end of what else the ranks run: the step's begin, sums of tied gradients, the update.
        sends: rank, start and end of each arrival.
    """

    title: str
    bars: Sequence[Bar]
    rest: Sequence[tuple[int, float, float]] = ()
    sends: Sequence[tuple[int, float, float]] = ()

    @property
    def end(self) -> float:
        """When all is done."""
        return max([float(bar.end) for bar in self.bars] + [end for _, _, end in self.rest])


def profile_figure(heading: str, timelines: Sequence[Timeline], memory: Sequence[Curve], stage_to_rank: Sequence[int]) -> Any:
    """The timelines of a step, one below the other, and the bytes on each device during the first.

    Args:
        heading: the line above.
        timelines: the step as it ran, and as it would run on devices of its own.
        memory: a curve a device; the figure has no such part if there are none.
        stage_to_rank: the rank of each stage.

    Returns:
        a matplotlib ``Figure`` with its Agg canvas, for ``savefig``. To the right of a timeline stands its end; to the right of the
        memory, which goes on to the end of the step, the peak of each device.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    measured, everything = timelines[0].bars, [bar for line in timelines for bar in line.bars]
    step = max([timelines[0].end] + [curve.times[-1] for curve in memory])
    across = max([step] + [line.end for line in timelines]) or 1
    names = [_lines(curve.label) for curve in memory]
    left = max([LEFT] + [0.15 + _LETTER * len(line) for name in names for line in name.split("\n")])
    parts = [timeline_room(stage_to_rank, _TITLE)] * len(timelines)
    if memory:
        row = max([_ROW] + [_LINE * (name.count("\n") + 2) for name in names])
        parts.append(Part(len(memory), row * len(memory), _TITLE + _KEY))
    usual = (
        statistics.mean(bar.end - bar.start for bar in measured) or across
    )  # the shortest may be as short as the stamps are fine
    width = max(_NARROWEST, width_of(across / usual, stage_to_rank))
    panels = page(heading, across, parts, width, _MARGIN, left, "ms")
    for panel, line in zip(panels, timelines, strict=False):
        draw_timeline(panel, line.bars, stage_to_rank, line.end)
        panel.rectangles([(start, end, *inside(rank)) for rank, start, end in line.rest], _REST, "rest")
        panel.rectangles([(start, end, rank + 0.94, rank + 1.04) for rank, start, end in line.sends], _SENT, "sends")
        middle = max(stage_to_rank) / 2 + 0.5
        panel.axes.text(line.end + 5 / panel.points[0], middle, _milli(line.end), size=8, va="center", color=INK)
        _title(panel, line.title)
    more: list[Entry] = [("begin, sums, update", _REST, 0)] * any(line.rest for line in timelines)
    more += [("arrives", _SENT, 0)] * any(line.sends for line in timelines)
    key_of_bars(panels[0], everything, stage_to_rank, above=_TITLE, more=more)
    for panel in panels[len(timelines) :]:
        _memory(panel, memory, names, step)
    return panels[0].axes.figure


def pebble_pair(heading: str, timelines: Sequence[Timeline], stage_to_rank: Sequence[int]) -> Any:
    """The pebble graphs of a step, one below the other.

    Args:
        heading: as for ``profile_figure``.
        timelines: as for ``profile_figure``.
        stage_to_rank: the rank of each stage.

    Returns:
        a matplotlib ``Figure``, as ``profile_figure``. A pebble stands where its residual is alive; there are two columns of
        them to a short action, or fewer where they would be too narrow.
    """
    both = [bar for line in timelines for bar in line.bars]
    across = max(bar.end for bar in both) or 1
    short = shortest(both)
    width = width_of(across / short, stage_to_rank)
    step = max(short / 2, _COLUMN / (72 * width) * across)
    parts = [pebbles_room(line.bars, _TITLE) for line in timelines]
    panels = page(heading, across, parts, width, pebbles_margin(stage_to_rank), unit="ms")
    signs = [draw_pebbles(panel, line.bars, stage_to_rank, step) for panel, line in zip(panels, timelines, strict=True)]
    for panel, line in zip(panels, timelines, strict=True):
        _title(panel, line.title)
    key_of_bars(panels[0], both, stage_to_rank, DOT if DOT in signs else signs[0], above=_TITLE)
    return panels[0].axes.figure


def _title(panel: Panel, text: str, above: float = 0.07) -> None:
    panel.axes.text(0, -72 * above / panel.points[1], text, size=9, weight="bold", va="bottom", color=INK)


def _lines(label: str) -> str:
    """The label, its ranks on lines of their own if it is long."""
    device, space, ranks = label.partition(" (")
    return label if len(label) <= _LETTERS else "\n".join([device, *textwrap.wrap(space.strip() + ranks, _LETTERS)])


def _milli(time: float) -> str:
    return f"{time:,.0f} ms" if time >= 100 else f"{time:.3g} ms"


def _memory(panel: Panel, memory: Sequence[Curve], names: Sequence[str], end: float) -> None:
    """Draw a row a device: the stacked bytes of each kind, and the peak."""
    peaks = [max(map(sum, curve.levels)) for curve in memory]
    scale = 0.88 / (max(peaks) or 1)
    for kind, colour in enumerate(COLOURS):
        areas = [area for row, curve in enumerate(memory) for area in _areas(curve, kind, row + 1, scale, end)]
        panel.polygons(areas, colour, KINDS[kind], 0.3, colour)  # the lines let bytes be seen that lived for less than a pixel
    for row, most in enumerate(peaks):
        panel.margin([bytes_in_words(most)], row + 0.56)
    panel.margin(["peak"], -72 * 0.16 / panel.points[1])
    panel.axes.set_yticks([row + 0.56 for row in range(len(memory))], names)
    present = [k for k in range(len(KINDS)) if any(level[k] for curve in memory for level in curve.levels)]
    key_of(panel, [(KINDS[k], COLOURS[k], 0) for k in present], 0.06)
    _title(panel, "memory", 0.07 + _KEY)


def _areas(curve: Curve, kind: int, base: float, scale: float, end: float) -> Iterator[list[tuple[Number, float]]]:
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
