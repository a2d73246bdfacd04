"""The page of a figure: a heading, a key, and below them panels one under the other, of which the width is known beforehand.

A page is as wide as its numbers need, and no wider than a notebook or a text column shows it: 900 pixels.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.schedule.clock import Number
from jaxpp.schedule.draw.canvas import INK, LINE, Entry, Panel, draw_key, key_lines, key_width, new_figure, text_inches

__all__ = ["LEFT", "Frame", "Part", "frame_of", "page"]

LEFT = 0.62
"""Inches to the left of panels, for the names of their rows."""
_MOST = 9.375  # inches: 900 pixels of a page
_COLUMN = 0.28  # inches that a bar is wide if there is room
_ABOVE, _BETWEEN, _BELOW, _TICKS = 0.1, 0.06, 0.5, 0.22  # inches: over the heading, around the key, under the last panel, for ticks
_SIZE, _HEADING = 10, 0.2  # the heading: points, and inches of a line


class Frame(NamedTuple):
    """Inches from left to right: beside the panels, the panels, and beside them again."""

    left: float
    width: float
    margin: float


class Part(NamedTuple):
    """The room of one panel of a page.

    Attributes:
        rows: the extent of y from the top.
        height: in inches.
        above: inches that are left free above it.
        across: the extent of x.
    """

    rows: float
    height: float
    above: float
    across: Number

    @property
    def points(self) -> float:
        """Points that a row is high."""
        return 72 * self.height / self.rows


def frame_of(
    heading: str, key: Sequence[Entry], columns: float, margin: float, left: float = LEFT, width: float | None = None
) -> Frame:
    """The frame of a page with so many bars beside one another; ``width`` is that of the whole page in inches, if it is given."""
    needed = max(_COLUMN * columns, key_width(key), text_inches(heading, _SIZE) - margin)
    return Frame(left, (width or min(_MOST, left + needed + margin)) - left - margin, margin)


def page(frame: Frame, heading: str, key: Sequence[Entry], parts: Sequence[Part], unit: str = "") -> tuple[Panel, ...]:
    """A figure with a heading, a key, and panels below one another. The axis of time, in ``unit``, is under the last.

    A panel whose extent of time is not that of the next has numbers of its own under it.
    """
    wide, lines, num_lines = round(sum(frame), 6), _wrapped(heading, frame.width + frame.margin), key_lines(key, frame.width)
    top = _ABOVE + _HEADING * len(lines) + _BETWEEN + LINE * num_lines + _BETWEEN
    own = [part.across != after.across for part, after in itertools.pairwise(parts)] + [False]
    tall = top + sum(part.above + part.height for part in parts) + _TICKS * sum(own) + _BELOW
    figure = new_figure((wide, tall))
    for k, line in enumerate(lines):
        figure.text(frame.left / wide, 1 - (_ABOVE + _HEADING * k) / tall, line, va="top", size=_SIZE, color=INK)
    panels, bottom = [], tall - top
    for part, has_ticks in zip(parts, own, strict=True):
        bottom -= part.above + part.height
        panels.append(Panel(figure, (frame.left, bottom, frame.width, part.height), part.across, part.rows))
        bottom -= _TICKS * has_ticks
    draw_key(figure, key, frame.left, tall - top + _BETWEEN, frame.width)
    for panel, has_ticks in zip(panels, own, strict=True):
        if has_ticks or panel is panels[-1]:
            bins = max(2, int(frame.width / 0.7))
            panel.axes.locator_params(axis="x", nbins=bins, integer=panel.across > 4, steps=[1, 2, 5, 10])
        else:
            panel.axes.set_xticks([])
    panels[-1].axes.set_xlabel(f"time, {unit}" if unit else "time", size=9, color=INK)
    return tuple(panels)


def _wrapped(text: str, inches: float) -> list[str]:
    """The lines of a heading, broken between words."""
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_inches(longer, _SIZE) <= inches:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
