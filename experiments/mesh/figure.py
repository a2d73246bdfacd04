"""The figure: for each mesh a bar of the bytes that its devices communicate in a step, stacked by axis; a panel a model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.draw.canvas import INK, draw_key, new_figure

__all__ = ["COLOURS", "Bar", "axes_figure"]

COLOURS = ("#0072B2", "#E69F00", "#F0E442")
WORDS = ("pipe: sends between stages", "data: gradients", "model: inside the layers")
_PALE = "#666666"
_ROW, _WIDTH, _AROUND = 0.3, 8.5, 0.75  # inches: a mesh, the page, above and below the bars of a model
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
    rows = [len(bars) for _, bars in panels]
    figure = new_figure((_WIDTH, 0.5 + _ROW * sum(rows) + _AROUND * len(rows)), "constrained")
    draw_key(figure, list(zip(WORDS, COLOURS, strict=True)), heading)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for part, (name, bars) in zip(axes, panels, strict=True):
        _draw(part, name, bars)
    figure.draw_without_rendering()
    return figure


def _draw(axes: Any, name: str, bars: Sequence[Bar]) -> None:
    axes.set(axisbelow=True, ylim=(len(bars) - 0.5, -0.5), facecolor="none")
    axes.grid(axis="x", color="#E5E5E5")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], size=8.5)
    axes.set_xlabel("MiB", size=9, color=INK)
    axes.set_title(name, loc="left", size=9, weight="bold", color=INK)
    left = [0.0] * len(bars)
    for part, colour in enumerate(COLOURS):
        sizes = [bar.sizes[part] / _MIB for bar in bars]
        axes.barh(range(len(bars)), sizes, left=left, height=0.76, color=colour, edgecolor="white", linewidth=0.7)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for row, size in enumerate(left):
        words, place = f"{size:.2f} MiB", {"xy": (size, row), "xytext": (6, 0), "textcoords": "offset points"}
        axes.annotate(words, **place, size=7.5, va="center", color=_PALE, bbox=_WHITE)
