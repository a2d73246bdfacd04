"""The figure: for each pair two bars, the forecast and below it what was measured, stacked by what the bytes are for."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.draw.canvas import INK, Panel, legend, new_figure

from experiments.memory.measure import PARTS
from jaxpp.observe.profile.figure import COLOURS

__all__ = ["Bars", "bars_figure"]

_TEMPORARIES, _PALE = "#E69F00", "#666666"
_ROW, _WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 0.46, 8.0, 2.5, 0.95, 0.75, 0.5  # inches: a pair, its bars, and around them
_SPANS = ((0.1, 0.48), (0.52, 0.9))  # of the two bars, in parts of a row
_LEAST = 1 / 1000  # of the longest bar: what is less is not seen, and not in the key
_MIB = 2**20


class Bars(NamedTuple):
    """What is drawn of a pair.

    Attributes:
        name: of the pair.
        device: the one that holds most.
        forecast: bytes, one for each of ``PARTS``.
        found: the same as measured.
        measured: all bytes as measured.
        microbatches: how many have residuals there.
    """

    name: str
    device: str
    forecast: tuple[int, ...]
    found: tuple[int, ...]
    measured: int
    microbatches: float


def bars_figure(pairs: Sequence[Bars], heading: str) -> Any:
    """A figure of all pairs, on one scale of MiB.

    Args:
        pairs: from the top.
        heading: the line above.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    inches = _LEFT + _WIDTH + _RIGHT, _TOP + _ROW * len(pairs) + _BOTTOM
    figure = new_figure(inches)
    figure.text(_LEFT / inches[0], 1 - 0.12 / inches[1], heading, va="top", size=10, color=INK)
    most = max(max(sum(bars.forecast), bars.measured) for bars in pairs) / _MIB
    panel = Panel(figure, (_LEFT, _BOTTOM, _WIDTH, _ROW * len(pairs)), most, len(pairs))
    panel.axes.set(yticks=[], axisbelow=True)
    panel.axes.grid(axis="x", color="#E5E5E5")
    panel.axes.set_xlabel("MiB", size=9, color=INK)
    colours = (*COLOURS, _TEMPORARIES)
    for part, colour in enumerate(colours):
        panel.rectangles(_boxes(pairs, part), colour, PARTS[part])
    for row, bars in enumerate(pairs):
        _label(panel, bars, row)
    least = most * _MIB * _LEAST
    present = [part for part in range(len(PARTS)) if any(max(bars.forecast[part], bars.found[part]) > least for bars in pairs)]
    legend(panel, [(PARTS[part], colours[part], 0) for part in present], 0.1)
    return figure


def _boxes(pairs: Sequence[Bars], part: int) -> Iterator[tuple[float, float, float, float]]:
    """Left, right, top and bottom of a part in every bar."""
    for row, bars in enumerate(pairs):
        for (top, bottom), sizes in zip(_SPANS, (bars.forecast, bars.found), strict=True):
            before = sum(sizes[:part])
            yield before / _MIB, (before + sizes[part]) / _MIB, row + top, row + bottom


def _label(panel: Panel, bars: Bars, row: int) -> None:
    """Write what a pair is to the left of its bars, and its peaks to the right of them."""
    write, inch = panel.axes.text, 72 / panel.points[0]
    left = {"x": -0.72 * inch, "ha": "right", "va": "center"}
    write(y=row + 0.31, s=bars.name, size=8.5, color=INK, **left)
    write(y=row + 0.71, s=f"{bars.device}, {bars.microbatches:g} microbatches", size=7, color=_PALE, **left)
    for (top, bottom), word, size in zip(_SPANS, ("forecast", "measured"), (sum(bars.forecast), bars.measured), strict=True):
        middle = row + (top + bottom) / 2
        write(-0.08 * inch, middle, word, size=7, ha="right", va="center", color=_PALE)
        write(size / _MIB + 0.08 * inch, middle, f"{size / _MIB:.2f} MiB", size=7.5, va="center", color=INK)
