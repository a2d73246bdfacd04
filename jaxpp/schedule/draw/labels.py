"""The numbers of the microbatches: one size of digits in a figure, and whether the bars of a kind have numbers at all.

A number that does not fit is worse than none, and a row in which some bars of a kind have a number and others do not is hard to
read. So a kind whose bars are too narrow for the largest number has no numbers in a panel. Measured bars differ in length; there, a
kind has numbers if four in five of its bars have room, and the rest of its bars stay empty.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Bar

__all__ = ["LARGEST", "SMALLEST", "Labels", "choose_labels"]

SMALLEST, LARGEST = 6.0, 8.0
"""Points of the digits: 8 and 11 pixels of a page."""
_DIGIT, _TALL, _AROUND = 0.64, 0.75, 1.5  # of the size: the width and the height of a digit; points that stay free around a number


class Labels(NamedTuple):
    """How a panel writes numbers.

    Attributes:
        size: points of the digits, the same in all panels of a figure.
        kinds: the kinds of action whose bars have numbers.
    """

    size: float = LARGEST
    kinds: frozenset[Kind] = frozenset()

    def fits(self, text: str, wide: float, high: float) -> bool:
        """Whether a number has room in a box of so many points."""
        return bool(text) and self.size <= _largest(len(text), wide, high)


def choose_labels(panels: Iterable[tuple[Sequence[Bar], float]], high: float) -> tuple[Labels, ...]:
    """How the numbers of each panel are written, all in the largest size at which every kind that can have numbers has room.

    Args:
        panels: the bars of each panel of the figure, and the points of a unit of time there.
        high: points that a bar is high.
    """
    panels = tuple(panels)
    letters = max(len(str(bar.action.microbatch)) for bars, _ in panels for bar in bars)
    sizes = []
    for bars, points in panels:
        wide = defaultdict[Kind, list[float]](list)
        for _, action, start, end in bars:
            if end > start:
                wide[action.kind].append(points * float(end - start))
        fits = {kind: _largest(letters, sorted(found)[len(found) // 5], high) for kind, found in wide.items()}
        sizes.append({kind: math.floor(2 * size) / 2 for kind, size in fits.items() if size >= SMALLEST})
    size = min([LARGEST, *(size for found in sizes for size in found.values())])
    return tuple(Labels(size, frozenset(found)) for found in sizes)


def _largest(letters: int, wide: float, high: float) -> float:
    """Points of the largest number of so many digits that has room in a box of so many points."""
    return min((wide - _AROUND) / (_DIGIT * letters), (high - _AROUND) / _TALL)
