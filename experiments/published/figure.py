"""The figure: each published step at its measured seconds, with its bound and the range of its prediction, on logarithmic axes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.draw.canvas import INK, draw_key, new_figure

__all__ = ["COLOURS", "Point", "measured_figure"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


class Point(NamedTuple):
    """What is drawn of a step, in seconds.

    Attributes:
        card: the name of the GPU, which has a colour.
        measured: what it took.
        predicted: what it likely takes.
        low: the lower end of the range.
        high: the upper end.
        bound: what it takes at least.
    """

    card: str
    measured: float
    predicted: float
    low: float
    high: float
    bound: float


def measured_figure(points: Sequence[Point], heading: str) -> Any:
    """A figure of all steps: predictions as dots with their ranges, bounds as dashes, and the line on which they would be right.

    Args:
        points: the steps.
        heading: the line above.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    figure = new_figure((7.5, 6.5), "constrained")
    cards = sorted({point.card for point in points})
    colours = {card: COLOURS[k % len(COLOURS)] for k, card in enumerate(cards)}
    draw_key(figure, list(colours.items()), heading)
    axes = figure.subplots()
    axes.set(
        xscale="log", yscale="log", xlabel="seconds of a step, measured", ylabel="seconds of a step, planned", facecolor="none"
    )
    axes.grid(color="#E5E5E5")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK)
    ends = [0.7 * min(point.bound for point in points), 1.4 * max(point.high for point in points)]
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for point in points:
        axes.plot([point.measured] * 2, [point.low, point.high], color=colours[point.card], linewidth=2.5, alpha=0.45)
        axes.plot(point.measured, point.predicted, "o", color=colours[point.card], markersize=4.5)
        axes.plot(point.measured, point.bound, "_", color=colours[point.card], markersize=9)
    return figure
