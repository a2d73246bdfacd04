"""The figure: for each candidate a bar as long as its step took, the prediction as a mark, and the choice named in ink."""

from collections.abc import Sequence
from typing import Any

from experiments.tune.measure import Row
from jaxpp.schedule.draw.canvas import INK, draw_key, new_figure

__all__ = ["tune_figure"]

_BAR, _CHOICE, _RULE, _PALE = "#56B4E9", "#0072B2", "#D55E00", "#666666"
_ROW, _WIDTH, _AROUND = 0.24, 9.375, 1.2  # inches: a candidate, the page, above and below the bars


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
    figure = new_figure((_WIDTH, _AROUND + _ROW * len(rows)), "constrained")
    heading = f"{problem}: the step of every candidate that tune considered"
    draw_key(figure, [("measured", _BAR), ("the choice", _CHOICE), ("predicted", _RULE)], heading)
    axes = figure.subplots()
    axes.set(axisbelow=True, ylim=(len(rows) - 0.5, -0.5), facecolor="none")
    axes.grid(axis="x", color="#E5E5E5")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel("ms", size=9, color=INK)
    colours = [_CHOICE if row.chosen else _BAR for row in rows]
    axes.barh(range(len(rows)), [1e3 * row.measured for row in rows], height=0.7, color=colours)
    for k, row in enumerate(rows):
        axes.plot([1e3 * row.predicted] * 2, [k - 0.45, k + 0.45], color=_RULE, linewidth=2.4, solid_capstyle="butt")
        end, words = 1e3 * max(row.measured, row.predicted), f"{1e3 * row.measured:.1f} ms, {row.error:+.0%}"
        axes.annotate(words, (end, k), (7, 0), textcoords="offset points", size=7.5, va="center", color=_PALE)
    return figure
