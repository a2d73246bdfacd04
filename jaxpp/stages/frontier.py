"""Bytes against work: the choices that are the cheapest at some price, and the one of least work within some bytes.

A choice keeps some bytes and does some work twice. At a price of p bytes for a unit of work, the cheapest choice has the least
``cost + p * work``. Drawn as points (work across, cost up), the choices that are the cheapest at any price are the corners of a
convex line that falls to the right, and no other choice lies below it. ``within`` walks along that line without knowing it: it asks
for the cheapest at the price at which the two corners that it knows cost the same, until no corner lies between them.
"""

from collections.abc import Callable
from typing import NamedTuple

_CLOSE = 1e-6  # a minimum cut counts in parts of its sum: by so much a corner may lie above the line


class Choice(NamedTuple):
    """What is done twice so that less is kept."""

    num_bytes: float  # that are kept
    cost: float  # these, and what counts like bytes
    work: float  # that is done twice, in the unit that a price is for
    again: frozenset[int]  # what is done twice

    def at(self, price: float) -> float:
        """What the choice costs at a price for a unit of work."""
        return self.cost + price * self.work


def within(room: float, most: Choice, fewest: Choice, cheapest: Callable[[float], Choice]) -> Choice:
    """The corner with the least work whose bytes are at most ``room``; that of the fewest bytes if none has so few.

    ``most`` and ``fewest`` are the ends of the line: the least work, and the fewest bytes. ``cheapest`` finds the cheapest choice
    at a price.
    """
    over, under = most, fewest
    if over.num_bytes <= room or under.num_bytes > room:
        return over if over.num_bytes <= room else under
    while under.work > over.work and over.cost > under.cost:
        price = (over.cost - under.cost) / (under.work - over.work)
        found = cheapest(price)
        if found.at(price) >= (1 - _CLOSE) * under.at(price):
            break
        over, under = (over, found) if found.num_bytes <= room else (found, under)
    return under
