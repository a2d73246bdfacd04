"""The colours of all figures: Okabe and Ito's. They differ in lightness, for the colour-blind and for grey prints.

The later stages of a rank are paler than its first.
"""

import math

from jaxpp.schedule.action import Kind

__all__ = ["IDLE", "INK", "colour_of", "dark", "group_colour", "group_ink", "ink_of", "shade"]

_COLOURS = {Kind.F: "#0072B2", Kind.B: "#E69F00", Kind.I: "#CC79A7", Kind.W: "#F0E442"}
_GROUPS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
_DARK = 110  # of 255: what is darker has white numbers
IDLE, INK = "#EFEFEF", "#222222"
_WIDE = 4.0  # points: bars that are at least so wide have the colours of the key


def colour_of(kind: Kind, order: int, latest: int, wide: float = math.inf) -> str:
    """The colour of a bar. A bar of few points is stronger than a wide one, as pale colours would not be seen there.

    Args:
        kind: what runs.
        order: which stage of its rank runs it, from 0.
        latest: the last stage that some rank has.
        wide: points from its left to its right.
    """
    thin = min(1.0, max(0.0, (_WIDE - wide) / _WIDE))
    pale = _mix(_COLOURS[kind], "#FFFFFF", (1 - thin) * _paleness(order, latest))
    return _mix(pale, "#000000", 0.25 * thin) if kind == Kind.W else pale


def ink_of(kind: Kind, order: int, latest: int) -> str:
    """The colour of the number in a bar."""
    return "#FFFFFF" if kind == Kind.F and _paleness(order, latest) < 0.25 else "#000000"


def _paleness(order: int, latest: int) -> float:
    return 0.55 * order / max(1, latest)


def group_colour(group: int, *, pale: bool = False) -> str:
    """The colour of a group of a ring; the second six are darker, the third six paler, and then they begin again.

    Some bars of a group may be paler than the others.
    """
    towards, part = (("#FFFFFF", 0.0), ("#000000", 0.4), ("#FFFFFF", 0.5))[group // len(_GROUPS) % 3]
    return _mix(_mix(_GROUPS[group % len(_GROUPS)], towards, part), "#FFFFFF", 0.6 * pale)


def group_ink(group: int, *, pale: bool = False) -> str:
    """The colour of the number in a bar of a group."""
    red, green, blue = (int(group_colour(group, pale=pale)[i : i + 2], 16) for i in (1, 3, 5))
    return "#FFFFFF" if 0.3 * red + 0.59 * green + 0.11 * blue < _DARK else "#000000"


def dark(kind: Kind) -> str:
    """The colour of the lines under the bars of later stages."""
    return _mix(_COLOURS[kind], "#000000", 0.35)


def shade(part: float) -> str:
    """A grey, from light (0) to dark (1)."""
    return _mix("#FFFFFF", INK, 0.08 + 0.35 * part)


def _mix(colour: str, other: str, part: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * part):02X}" for a, b in pairs)
