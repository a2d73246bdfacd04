"""The figure: for each pair two bars, the forecast and below it what was measured, stacked by what the bytes are for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.memory.measure import PARTS
from jaxpp.observe.profile.profile import COLOURS
from jaxpp.schedule.draw.canvas import INK, draw_key, new_figure

__all__ = ["Bars", "bars_figure"]

_TEMPORARIES, _PALE = "#E69F00", "#666666"
_ROW, _WIDTH, _AROUND = 0.46, 9.375, 1.5  # inches: a pair, the page, above and below the bars
_PLACES = (("forecast", -0.21), ("measured", 0.21))  # of the two bars in a row
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
    figure = new_figure((_WIDTH, _AROUND + _ROW * len(pairs)), "constrained")
    most, colours = max(max(sum(bars.forecast), bars.measured) for bars in pairs), (*COLOURS, _TEMPORARIES)
    shown = [k for k in range(len(PARTS)) if any(max(bars.forecast[k], bars.found[k]) > most * _LEAST for bars in pairs)]
    draw_key(figure, [(PARTS[k], colours[k]) for k in shown], heading)
    axes = figure.subplots()
    axes.set(axisbelow=True, ylim=(len(pairs) - 0.5, -0.5), facecolor="none")
    axes.grid(axis="x", color="#E5E5E5")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=7.5, labelcolor=INK)
    axes.set_xlabel("MiB", size=9, color=INK)
    ticks = [f"{bars.name}\n{bars.device}, {bars.microbatches:g} microbatches" for bars in pairs]
    axes.set_yticks(range(len(pairs)), ticks)
    axes.tick_params(axis="y", pad=48)
    for row, bars in enumerate(pairs):
        wholes = sum(bars.forecast), bars.measured
        for (word, place), sizes, whole in zip(_PLACES, (bars.forecast, bars.found), wholes, strict=True):
            left = 0.0
            for size, colour in zip(sizes, colours, strict=True):
                axes.barh(row + place, size / _MIB, left=left, height=0.38, color=colour)
                left += size / _MIB
            beside = {"textcoords": "offset points", "size": 7, "va": "center"}
            axes.annotate(word, (0, row + place), (-6, 0), ha="right", color=_PALE, **beside)
            axes.annotate(f"{whole / _MIB:.2f} MiB", (whole / _MIB, row + place), (6, 0), color=INK, **beside)
    figure.draw_without_rendering()
    return figure
