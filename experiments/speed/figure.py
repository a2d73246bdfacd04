"""The figure: for each problem a bar for each schedule, as long as its step is in plain steps, with the quartiles as a whisker."""

from collections.abc import Sequence
from typing import Any

from jaxpp.schedule.draw.canvas import INK, Panel, draw_key, new_figure

from experiments.speed.steps import StepRow

__all__ = ["speed_figure"]

_BAR, _PALE, _RULE, _LOOP = "#0072B2", "#666666", "#D55E00", "#E69F00"
_ROW, _WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _TITLE = (
    0.34,
    6.0,
    1.15,
    2.0,
    0.5,
    0.3,
    0.36,
)  # inches: a schedule, its bar, around them
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the grid


def speed_figure(rows: Sequence[StepRow]) -> Any:
    """A figure of all problems, each on its own scale.

    Args:
        rows: what was measured; neighbours of one problem and number of microbatches share a panel.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    panels: dict[tuple[str, int], list[StepRow]] = {}
    for row in rows:
        panels.setdefault((row.problem, row.microbatches), []).append(row)
    tall = [_TITLE + _ROW * len(found) + _BOTTOM for found in panels.values()]
    inches = _LEFT + _WIDTH + _RIGHT, _TOP + sum(tall) + 0.1
    figure = new_figure(inches)
    heading = "a pipelined step, in steps of plain jit on one device"
    figure.text(_LEFT / inches[0], 1 - 0.12 / inches[1], heading, va="top", size=11, color=INK)
    words = [("the fastest plain step", _RULE, 0), ("the fastest that splits its batch", _LOOP, 0), ("quartiles", INK, 0)]
    draw_key(figure, words, _LEFT, inches[1] - _TOP - 0.02, _WIDTH)
    top = inches[1] - _TOP
    for found, height in zip(panels.values(), tall, strict=True):
        _panel(figure, found, top - height + _BOTTOM)
        top -= height
    return figure


def _panel(figure: Any, rows: Sequence[StepRow], bottom: float) -> None:
    most = 1.02 * max(1.2, *(max(row.quartiles[1], row.loop / row.plain) for row in rows))
    panel = Panel(figure, (_LEFT, bottom, _WIDTH, _ROW * len(rows)), most, len(rows))
    panel.axes.set(yticks=[], axisbelow=True)
    panel.axes.grid(axis="x", color="#E5E5E5")
    first = rows[0]
    panel.title(f"{first.problem}, {first.microbatches} microbatches")
    panel.rectangles(
        [(0, row.ratio, k + 0.14, k + 0.86) for k, row in enumerate(rows)],
        _BAR,
        "ratios",
    )
    thick = 1.6 / panel.points[0]  # of the lines, in units of x
    for size, colour in ((first.loop / first.plain, _LOOP), (1.0, _RULE)):
        panel.rectangles([(size - thick / 2, size + thick / 2, 0, len(rows))], colour, "a plain step")
    panel.rectangles([(*row.quartiles, k + 0.47, k + 0.53) for k, row in enumerate(rows)], INK, "quartiles")
    inch = 72 / panel.points[0]
    for k, row in enumerate(rows):
        panel.axes.text(-0.08 * inch, k + 0.5, row.schedule, size=9.5, ha="right", va="center", color=INK)
        end = max(row.ratio, row.quartiles[1], first.loop / first.plain) + 0.1 * inch
        words = f"{row.ratio:.2f}  ({_time(row.seconds)})"
        panel.axes.text(end, k + 0.5, words, size=9, va="center", color=_PALE, bbox=_WHITE)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
