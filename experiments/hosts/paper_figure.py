"""The figure: the time of a step and its bubble against the number of hosts, a column for each layout."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpp.schedule.draw.canvas import INK, new_figure

__all__ = ["Line", "paper_figure"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (4, 1, 1, 1)))
"""For the most microbatches, the next fewer, and so on."""
_INCHES = (9.0, 6.2)
_PALE = "#8A8A8A"


class Line(NamedTuple):
    """What is drawn of a schedule.

    Attributes:
        layout: whose column it is in.
        schedule: its name.
        microbatches: of a step.
        ideal: seconds of a step in which no GPU ever waits.
        points: for each number of hosts, the seconds of a step and its bubble.
    """

    layout: str
    schedule: str
    microbatches: int
    ideal: float
    points: tuple[tuple[int, float, float], ...]


def paper_figure(lines: Sequence[Line], heading: str) -> Any:
    """A figure of all lines: seconds above, bubbles below.

    Args:
        lines: in the order of the key, and of the columns.
        heading: the line above, which says what is assumed.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    figure = new_figure(_INCHES)
    figure.text(0.08, 0.985, heading, size=10, va="top", color=INK)
    layouts = list(dict.fromkeys(line.layout for line in lines))
    names = list(dict.fromkeys(line.schedule for line in lines))
    counts = sorted({line.microbatches for line in lines}, reverse=True)
    seconds = [point[1] for line in lines for point in line.points] + [line.ideal for line in lines]
    hosts = sorted({point[0] for line in lines for point in line.points})
    for column, layout in enumerate(layouts):
        mine = [line for line in lines if line.layout == layout]
        above, below = (_axes(figure, column, len(layouts), row, hosts) for row in (0, 1))
        above.set(yscale="log", ylim=(0.85 * min(seconds), 1.15 * max(seconds)))
        above.set_title(layout, size=9, weight="bold", color=INK, loc="left")
        below.set_ylim(0, 1)
        below.set_xlabel("hosts", size=9, color=INK)
        _label_seconds(above)
        below.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0", "20%", "40%", "60%", "80%", "100%"])
        if not column:
            above.set_ylabel("seconds of a step", size=9, color=INK)
            below.set_ylabel("bubble", size=9, color=INK)
        for count in counts:
            ideal = max((line.ideal for line in mine if line.microbatches == count), default=0)
            if ideal:
                above.axhline(ideal, color=_PALE, linewidth=0.8, linestyle=DASHES[counts.index(count) % len(DASHES)], zorder=1)
        for line in mine:
            style = {
                "color": COLOURS[names.index(line.schedule) % len(COLOURS)],
                "linestyle": DASHES[counts.index(line.microbatches) % len(DASHES)],
            }
            across = [point[0] for point in line.points]
            for axes, part in ((above, 1), (below, 2)):
                axes.plot(across, [point[part] for point in line.points], **style, marker="o", markersize=3, linewidth=1.5)
    _key(figure, names, counts)
    return figure


def _axes(figure: Any, column: int, num_columns: int, row: int, hosts: Sequence[int]) -> Any:
    """Axes in a column and row, with the numbers of hosts below."""
    width = 0.91 / num_columns
    axes = figure.add_axes((0.08 + column * width, 0.08 if row else 0.51, width - 0.045, 0.36))
    axes.set_xscale("log", base=2)
    axes.set_xticks(hosts, map(str, hosts))
    axes.minorticks_off()
    axes.grid(color="#E5E5E5", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelcolor=INK)
    return axes


def _label_seconds(axes: Any) -> None:
    """Numbers of seconds instead of powers of ten."""
    low, high = axes.get_ylim()
    ticks = [base * 10**power for power in range(-6, 6) for base in (1, 2, 5) if low <= base * 10.0**power <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _key(figure: Any, names: Sequence[str], counts: Sequence[int]) -> None:
    """The colours of the schedules, then the dashes of the microbatches, in one line above the axes."""
    plot = figure.axes[0].plot
    shown = [plot([], [], color=COLOURS[k % len(COLOURS)], linewidth=2)[0] for k in range(len(names))]
    shown += [plot([], [], color=INK, linewidth=1.2, linestyle=DASHES[k % len(DASHES)])[0] for k in range(len(counts))]
    shown += plot([], [], color=_PALE, linewidth=0.8)
    words = [*names, *(f"{count} microbatches" for count in counts), "no GPU ever waits"]
    figure.legend(shown, words, loc="upper left", bbox_to_anchor=(0.07, 0.965), ncols=len(words), frameon=False, fontsize=8)
