"""Figures of a measured step: what really ran above what the virtual clock says of it, and the memory that it took.

The memory of a device is an area in steps, all on one scale: what stays lies at the bottom, in greys; what comes and goes on it, in
greens. Neighbours differ in lightness, so that they part for the colour-blind and in grey.
"""

import statistics
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpp.observe.memory.liveness import MEMORY_KINDS, Liveness
from jaxpp.observe.profile.spans import Span
from jaxpp.schedule.draw.canvas import INK, Axes, Figure, Panel, draw_key, fit_page, page, page_width, write_numbers
from jaxpp.schedule.draw.timeline import Timeline, draw_timeline, extents, room, scaled, timeline_key
from jaxpp.tables import bytes_in_words
from jaxpp.types import Device

COLOURS = (
    *("#262626", "#6A6A6A", "#ABABAB", "#00684B", "#00AB7E", "#B4E3D3", "#7AC2A8", "#8C8C8C", "#4D4D4D", "#008A65"),
    "#E4E4E4",
)
_ROW, _LINE = 0.6, 0.135  # inches: of a device, and of a line of its name
_LETTERS = 20  # in a line of a device's name


class Curve(NamedTuple):
    """Live bytes of one device over a step, by kind."""

    label: str  # the device and its ranks, ``cuda:0 (ranks 0, 4)``
    times: tuple[float, ...]  # milliseconds from the start of the step, in ascending order
    levels: tuple[tuple[int, ...], ...]  # the bytes of each of ``MEMORY_KINDS`` from each time on, the last to the end of the step


def curves(liveness: Liveness, spans: Sequence[Span], by_rank: Sequence[Device]) -> tuple[Curve, ...]:
    """One curve for each device, in milliseconds; there is one span for each line of ``liveness``.

    Results are there from a program's start, what nobody reads after it is freed at its end, and what arrives is there once the
    device has begun what it was given before. So a curve has the moments of ``liveness`` in order, and the same peak.
    """
    found, end = [], max(1e3 * span.end for span in spans)
    for device in liveness.devices:
        ranks = [str(rank) for rank, home in enumerate(by_rank) if home == device]
        label = f"{device} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
        alive = liveness.levels[device].tolist()
        after = (liveness.levels[device] - liveness.freed[device]).tolist()
        times, levels, now = [0.0], [tuple(alive[0])], 0.0
        for number, (line, span) in enumerate(zip(liveness.lines, spans, strict=True), 1):
            for time, level in ((span.start, alive[number]), (span.end, after[number])):
                now = max(now, 1e3 * time) if line.device == device and line.program is not None else now
                if tuple(level) != levels[-1]:
                    times.append(now)
                    levels.append(tuple(level))
        found.append(Curve(label, (*times, max(now, end)), (*levels, tuple(alive[-1]))))
    return tuple(found)


def profile_figure(
    heading: str, timelines: Sequence[Timeline], memory: Sequence[Curve], stage_to_rank: Sequence[int], width: float | None = None
) -> Figure:
    """The timelines of a step, one below the other, each with its end; and the bytes and peak of each device that has a curve."""
    step = max([timelines[0].end, *(curve.times[-1] for curve in memory)])
    across = extents(timelines, [step] + [0] * (len(timelines) - 1))
    panels = [room(stage_to_rank, end) for end in across]
    names = [_lines(curve.label) for curve in memory]
    if memory:
        row = max([_ROW] + [_LINE * (name.count("\n") + 2) for name in names])
        panels.append(Panel(len(memory), row * len(memory), across[0]))
    usual = statistics.mean(bar.end - bar.start for bar in timelines[0].bars) or step or 1  # a short bar may be as short as can be
    inches, points = page_width(max(across) / usual, width)
    figure, axes = page(heading, timeline_key(timelines, stage_to_rank), panels, inches, "ms")
    bars = []
    for part, line, end in zip(axes, timelines, across, strict=False):
        titled = line._replace(title=scaled(line.title, end, across[0]))
        bars.append(draw_timeline(part, titled, stage_to_rank, points / end))
        middle, ended = max(stage_to_rank) / 2 + 0.5, float(line.end)
        took = f"{ended:,.0f} ms" if ended >= 100 else f"{ended:.3g} ms"
        part.annotate(took, (ended, middle), (4, 0), textcoords="offset points", size=8, va="center", color=INK)
    if memory:
        _draw_memory(axes[-1], memory, names, step)
        present = [k for k in range(len(MEMORY_KINDS)) if any(level[k] for curve in memory for level in curve.levels)]
        draw_key(figure, [(MEMORY_KINDS[k], COLOURS[k]) for k in present], where="lower")
    fit_page(figure, axes, panels)
    write_numbers(list(zip(axes, bars, strict=False)), "turns" if timelines[0].num_groups else "microbatches")
    return figure


def _lines(label: str) -> str:
    device, space, ranks = label.partition(" (")
    return label if len(label) <= _LETTERS else "\n".join([device, *textwrap.wrap(space.strip() + ranks, _LETTERS)])


def _draw_memory(axes: Axes, memory: Sequence[Curve], names: Sequence[str], end: float) -> None:
    peaks = [max(map(sum, curve.levels)) for curve in memory]
    beside = {"transform": axes.get_yaxis_transform(), "size": 8, "va": "center", "color": INK}
    for row, curve in enumerate(memory):
        times = [*curve.times, end]
        sizes = np.array([*curve.levels, curve.levels[-1]], float).T * 0.88 / (max(peaks) or 1)
        tops = row + 1 - np.cumsum(sizes, axis=0)
        for kind, (size, top) in enumerate(zip(sizes, tops, strict=True)):
            there = (size > 0) | np.append(False, size[:-1] > 0)  # up to the moment at which nothing is left
            style = {"step": "post", "color": COLOURS[kind], "linewidth": 0.3, "label": MEMORY_KINDS[kind]}
            axes.fill_between(times, top, top + size, where=there, **style)  # lines show bytes that lived for less than a pixel
        axes.text(1.01, row + 0.56, bytes_in_words(peaks[row]), **beside)
    axes.text(1.01, -0.1, "peak", **beside)
    axes.set_yticks([row + 0.56 for row in range(len(memory))], names)
    axes.set_title("memory of arrays", loc="left", size=9, weight="bold", color=INK)  # not the temporaries of programs
