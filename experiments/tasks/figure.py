"""The figure: bytes on the devices against the number of tasks, and the accuracy of every task."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.tasks.compare import BANKS, PIPELINE, RESIDENT, Group, Row
from jaxpp.schedule.draw.canvas import INK, new_figure

__all__ = ["tasks_figure"]

_LOOKS = {  # colour, marker, its points, and line of each way drawn: Okabe and Ito's, and apart in grey too
    RESIDENT: ("#E69F00", "o", 6, "-"),
    BANKS[1]: ("#0072B2", "s", 9, "-"),
    PIPELINE: ("#009E73", "^", 5, "--"),
}
_CHANCE, _PALE = 10, "#666666"  # percent
_INCHES = (10.4, 4.0)
_SPREAD = 0.26  # of a column, that the dots of a way are scattered over


def tasks_figure(groups: Sequence[Group]) -> Any:
    """Two panels.

    Args:
        groups: by number of tasks.

    Returns:
        a matplotlib ``Figure``, for ``savefig`` and for notebooks.

    Raises:
        ImportError: without matplotlib, saying how to install it.
    """
    figure = new_figure(_INCHES)
    left, right = figure.add_axes((0.04, 0.13, 0.4, 0.76)), figure.add_axes((0.51, 0.13, 0.48, 0.76))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, labelcolor=INK, length=0)
    _draw_bytes(left, groups)
    _draw_accuracies(right, groups)
    return figure


def _draw_bytes(axes: Any, groups: Sequence[Group]) -> None:
    counts = [group.num_tasks for group in groups]
    top = 0.0
    names = {BANKS[1]: "bank", PIPELINE: "bank, pipeline over several devices"}
    for way, (colour, marker, points, line) in _LOOKS.items():
        sizes = [sum(_row(group, way).device_bytes) / 2**20 for group in groups]
        axes.plot(counts, sizes, line, marker=marker, color=colour, markersize=points, label=names.get(way, way))
        top = max(top, *sizes)
    axes.set(ylim=(0, 1.1 * top), xscale="log")
    axes.set_xticks(counts, map(str, counts))
    axes.minorticks_off()
    axes.set_xlabel("tasks", size=9, color=INK)
    axes.set_title("MiB alive on the devices, all together", loc="left", size=10, color=INK)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_accuracies(axes: Any, groups: Sequence[Group]) -> None:
    shown = [RESIDENT, PIPELINE]  # the banks' are those of the first, to the bit
    for k, group in enumerate(groups):
        for place, way in zip((-0.2, 0.2), shown, strict=True):
            colour, marker, *_ = _LOOKS[way]
            found = 100 * np.asarray(_row(group, way).accuracies)
            across = np.linspace(-_SPREAD / 2, _SPREAD / 2, len(found)) if len(found) > 1 else np.zeros(1)
            axes.plot(k + place + across, found, marker, color=colour, markersize=3.5, alpha=0.8, linestyle="none")
            axes.plot(k + place + np.array([-0.16, 0.16]), [found.mean()] * 2, color=INK, linewidth=1.2)
    axes.axhline(_CHANCE, color=_PALE, linewidth=1, linestyle=":")
    axes.text(len(groups) - 0.5, _CHANCE + 1.5, "chance", size=8, ha="right", color=_PALE)
    axes.set(xlim=(-0.5, len(groups) - 0.5), ylim=(0, 100))
    axes.set_xticks(range(len(groups)), [f"{group.num_tasks} tasks" for group in groups])
    axes.set_title("accuracy of each task on digits by other people, %", loc="left", size=10, color=INK)
    names = [f"{RESIDENT} = bank, to the bit", PIPELINE]
    handles = [
        axes.plot([], [], _LOOKS[way][1], color=_LOOKS[way][0], label=name)[0] for way, name in zip(shown, names, strict=True)
    ]
    axes.legend(handles=handles, frameon=False, fontsize=8, loc="center left")


def _row(group: Group, way: str) -> Row:
    return next(row for row in group.rows if row.way == way)
