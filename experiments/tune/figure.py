"""The figure: for each candidate a bar as long as its step took, the prediction as a mark, and the choice named in ink."""

from collections.abc import Sequence
from typing import Any

from jaxpp.schedule.draw.canvas import INK, Panel, legend, new_figure

from experiments.tune.measure import Row

__all__ = ["tune_figure"]

_BAR, _CHOICE, _RULE, _PALE = "#56B4E9", "#0072B2", "#D55E00", "#666666"
_ROW, _WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 0.24, 6.0, 2.9, 1.5, 0.75, 0.5  # inches: a candidate, its bar, and around them


def tune_figure(problem: str, rows: Sequence[Row]) -> Any:
    """A figure of all candidates, the fastest at the top.

    Args:
        problem: its name, for the heading.
        rows: the candidates.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    rows = sorted(rows, key=lambda row: row.ratio)
    inches = _LEFT + _WIDTH + _RIGHT, _TOP + _ROW * len(rows) + _BOTTOM
    figure = new_figure(inches)
    heading = f"{problem}: the step of every candidate that tune considered"
    figure.text(_LEFT / inches[0], 1 - 0.12 / inches[1], heading, va="top", size=10, color=INK)
    most = 1e3 * max(max(row.measured, row.predicted) for row in rows)
    panel = Panel(figure, (_LEFT, _BOTTOM, _WIDTH, _ROW * len(rows)), 1.02 * most, len(rows))
    panel.axes.set(yticks=[], axisbelow=True)
    panel.axes.grid(axis="x", color="#E5E5E5")
    panel.axes.set_xlabel("ms", size=9, color=INK)
    boxes = [(0, 1e3 * row.measured, k + 0.15, k + 0.85) for k, row in enumerate(rows)]
    panel.rectangles([box for box, row in zip(boxes, rows, strict=True) if not row.chosen], _BAR, "measured")
    panel.rectangles([box for box, row in zip(boxes, rows, strict=True) if row.chosen], _CHOICE, "the choice")
    thick = 1.4 / panel.points[0]
    marks = [(1e3 * row.predicted - thick, 1e3 * row.predicted + thick, k + 0.05, k + 0.95) for k, row in enumerate(rows)]
    panel.rectangles(marks, _RULE, "predicted")
    inch = 72 / panel.points[0]
    for k, row in enumerate(rows):
        panel.axes.text(-0.08 * inch, k + 0.5, row.name, size=8, ha="right", va="center", color=INK)
        end = 1e3 * max(row.measured, row.predicted) + 0.1 * inch
        words = f"{1e3 * row.measured:.1f} ms, {row.error:+.0%}"
        panel.axes.text(end, k + 0.5, words, size=7.5, va="center", color=_PALE)
    legend(panel, [("measured", _BAR, 0), ("the choice", _CHOICE, 0), ("predicted", _RULE, 0)], 0.1)
    return figure
