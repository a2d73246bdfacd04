"""The figure: for each problem a bar for each schedule, as long as its step is in plain steps, with the quartiles as a whisker."""

from collections.abc import Sequence
from typing import Any

from experiments.speed.steps import StepRow
from jaxpp.schedule.draw.canvas import INK, draw_key, new_figure

__all__ = ["speed_figure"]

_BAR, _PALE, _RULE, _LOOP = "#0072B2", "#666666", "#D55E00", "#E69F00"
_ROW, _WIDTH, _AROUND = 0.34, 9.1, 0.7  # inches: a schedule, the page, above and below the bars of a problem
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
    heights = [len(bars) for bars in panels.values()]
    figure = new_figure((_WIDTH, 0.6 + _ROW * sum(heights) + _AROUND * len(heights)), "constrained")
    words = [("the fastest plain step", _RULE), ("the fastest that splits its batch", _LOOP), ("quartiles", INK)]
    draw_key(figure, words, "a pipelined step, in steps of plain jit on one device")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for part, bars in zip(axes, panels.values(), strict=True):
        _draw(part, bars)
    return figure


def _draw(axes: Any, rows: Sequence[StepRow]) -> None:
    first = rows[0]
    loop = first.loop / first.plain
    most = 1.02 * max(1.2, loop, *(row.quartiles[1] for row in rows))
    axes.set(axisbelow=True, xlim=(0, most), ylim=(len(rows) - 0.5, -0.5), facecolor="none")
    axes.grid(axis="x", color="#E5E5E5")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    axes.set_yticks(range(len(rows)), [row.schedule for row in rows], size=9.5)
    axes.set_title(f"{first.problem}, {first.microbatches} microbatches", loc="left", size=9, weight="bold", color=INK)
    axes.barh(range(len(rows)), [row.ratio for row in rows], height=0.72, color=_BAR)
    for size, colour in ((loop, _LOOP), (1.0, _RULE)):
        axes.axvline(size, color=colour, linewidth=1.6)
    for k, row in enumerate(rows):
        axes.plot(row.quartiles, [k, k], color=INK, linewidth=1.4, solid_capstyle="butt")
        words, end = f"{row.ratio:.2f}  ({_time(row.seconds)})", max(row.ratio, row.quartiles[1], loop)
        axes.annotate(words, (end, k), (7, 0), textcoords="offset points", size=9, va="center", color=_PALE, bbox=_WHITE)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
