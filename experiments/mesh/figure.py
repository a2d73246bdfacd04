"""The figure: for each mesh a bar of the bytes that its devices communicate in a step, stacked by axis; a panel a model."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.draw.canvas import INK, Panel, legend, new_figure

__all__ = ["COLOURS", "Bar", "axes_figure"]

COLOURS = ("#0072B2", "#E69F00", "#F0E442")
WORDS = ("pipe: sends between stages", "data: gradients", "model: inside the layers")
_PALE = "#666666"
_ROW, _WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _TITLE = 0.3, 6.6, 0.95, 0.95, 0.62, 0.5, 0.3  # inches: a mesh, its bar, around them
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the grid
_MIB = 2**20


class Bar(NamedTuple):
    """What is drawn of a model on a mesh.

    Attributes:
        name: of the mesh.
        sizes: bytes along pipe, data and model.
    """

    name: str
    sizes: tuple[int, int, int]


def axes_figure(panels: Sequence[tuple[str, Sequence[Bar]]], heading: str) -> Any:
    """A figure of all models, each on its own scale of MiB.

    Args:
        panels: name and bars of each model, from the top.
        heading: the line above.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    tall = [_TITLE + _ROW * len(bars) + _BOTTOM for _, bars in panels]
    inches = _LEFT + _WIDTH + _RIGHT, _TOP + sum(tall)
    figure = new_figure(inches)
    figure.text(_LEFT / inches[0], 1 - 0.1 / inches[1], heading, va="top", size=10, color=INK)
    top = inches[1] - _TOP
    for number, ((name, bars), height) in enumerate(zip(panels, tall, strict=True)):
        panel = _panel(figure, name, bars, top - height + _BOTTOM)
        if not number:
            legend(panel, [(WORDS[part], COLOURS[part], 0) for part in range(len(WORDS))], _TITLE + 0.06)
        top -= height
    return figure


def _panel(figure: Any, name: str, bars: Sequence[Bar], bottom: float) -> Panel:
    most = max(sum(bar.sizes) for bar in bars) / _MIB
    panel = Panel(figure, (_LEFT, bottom, _WIDTH, _ROW * len(bars)), most, len(bars))
    panel.axes.set(yticks=[], axisbelow=True)
    panel.axes.grid(axis="x", color="#E5E5E5")
    panel.axes.set_xlabel("MiB", size=9, color=INK)
    for part, colour in enumerate(COLOURS):
        panel.rectangles(_boxes(bars, part), colour, WORDS[part], 0.7)
    inch = 72 / panel.points[0]
    panel.axes.text(0, -0.1 / _ROW, name, size=9, weight="bold", color=INK)
    for row, bar in enumerate(bars):
        size = sum(bar.sizes) / _MIB
        panel.axes.text(-0.08 * inch, row + 0.5, bar.name, size=8.5, ha="right", va="center", color=INK)
        panel.axes.text(size + 0.08 * inch, row + 0.5, f"{size:.2f} MiB", size=7.5, va="center", color=_PALE, bbox=_WHITE)
    return panel


def _boxes(bars: Sequence[Bar], part: int) -> Iterator[tuple[float, float, float, float]]:
    """Left, right, top and bottom of a part in every bar."""
    for row, bar in enumerate(bars):
        before = sum(bar.sizes[:part])
        if bar.sizes[part]:
            yield before / _MIB, (before + bar.sizes[part]) / _MIB, row + 0.12, row + 0.88
