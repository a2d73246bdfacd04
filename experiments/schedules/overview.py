"""The overview: each schedule a point, its memory to the right and its bubble upwards, with labels that do not overlap."""

import itertools
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jaxpp.schedule.draw.canvas import Figure, new_figure

__all__ = ["Box", "overlap", "overview", "place_labels"]

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in points."""

_INCHES = (7.5, 4.5)
_SIZE = 9  # points of a label
_GAP = 6  # points from a dot to its label
_LEAST = 1e-3  # the bubble drawn for none, as the axis is logarithmic
_TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]


def overview(points: Mapping[str, tuple[float, float]], heading: str) -> Figure:
    """A figure of bubble against memory, both axes logarithmic. Lower and more to the left is better.

    Args:
        points: of each schedule, its peak of residuals and its bubble fraction.
        heading: the line above.
    """
    names = defaultdict(list)
    for name, (peak, bubble) in points.items():
        names[peak, max(bubble, _LEAST)].append(name)
    labels = [textwrap.fill(", ".join(same), 36) for same in names.values()]
    figure = new_figure(_INCHES)
    axes = figure.add_axes((0.1, 0.12, 0.86, 0.78))
    axes.set(xscale="log", yscale="log", xlabel="peak: most microbatches in flight on a rank", ylabel="bubble")
    axes.set_title(heading, loc="left", size=11)
    axes.scatter([x for x, _ in names], [y for _, y in names], s=36, color="#0072B2", zorder=3)
    axes.set_xlim(min(x for x, _ in names) / 1.4, max(x for x, _ in names) * 1.8)
    axes.set_ylim(min(y for _, y in names) / 1.4, max(y for _, y in names) * 1.4)
    low, high = axes.get_ylim()
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{'≤ ' * (tick == _LEAST)}{100 * tick:g}%" for tick in ticks])
    low, high = axes.get_xlim()
    axes.set_xticks(ticks := [2**k for k in range(12) if low <= 2**k <= high], map(str, ticks))
    axes.minorticks_off()
    axes.grid(color="#E5E5E5", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    scale = 72 / figure.dpi
    dots = [tuple(axes.transData.transform(point) * scale) for point in names]
    frame = axes.get_window_extent()
    inside = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    for (x, _), label, (left, bottom, right, top) in zip(dots, labels, place_labels(dots, labels, inside), strict=True):
        side, at = ("left", left) if left > x else ("right", right) if right < x else ("center", (left + right) / 2)
        height = (bottom + top) / 2
        figure.text(at / 72 / _INCHES[0], height / 72 / _INCHES[1], label, size=_SIZE, ha=side, va="center")
    return figure


def place_labels(dots: Sequence[tuple[float, float]], labels: Sequence[str], inside: Box) -> list[Box]:
    """Where to write each label: the nearest place to its dot where it meets no dot, no other label and no edge.

    Args:
        dots: their centres.
        labels: one a dot.
        inside: what labels stay within.

    Returns:
        a box a label; where there is no such place, the one to the right of its dot.
    """
    taken: list[Box] = [(x - _GAP / 2, y - _GAP / 2, x + _GAP / 2, y + _GAP / 2) for x, y in dots]
    found: list[Box] = []
    for dot, label in zip(dots, labels, strict=True):
        lines = label.splitlines()
        boxes = list(_around(dot, 0.62 * _SIZE * max(map(len, lines)), 1.3 * _SIZE * len(lines)))
        free = (box for box in boxes if _within(box, inside) and not any(overlap(box, other) for other in taken))
        box = next(free, boxes[0])
        taken.append(box)
        found.append(box)
    return found


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes share more than an edge."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _around(dot: tuple[float, float], width: float, height: float) -> Iterator[Box]:
    """Boxes around a dot, the nearest first: to the right, to the left, above, below, and between those."""
    (x, y), middle = dot, -width / 2
    for reach in itertools.count(_GAP, _GAP / 2):
        if reach > math.hypot(*_INCHES) * 10:
            return
        beside, apart = (reach, -width - reach), (reach - _GAP / 2, -height - reach + _GAP / 2)
        for left, bottom in [
            *((left, -height / 2) for left in beside),
            *((middle, bottom) for bottom in apart),
            *itertools.product(beside, apart),
        ]:
            yield (x + left, y + bottom, x + left + width, y + bottom + height)


def _within(box: Box, frame: Box) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
