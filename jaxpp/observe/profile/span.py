"""One instruction of a step in time."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxpp.schedule.action import Action

__all__ = ["Span", "covered"]


class Span(NamedTuple):
    """One instruction of a step in time, in seconds from the start of the step.

    Attributes:
        label: ``2F0``, ``send 2F0 to stage 3``, ``update stage 1 level 0``, ...
        action: the action that it runs, or whose result it sends; None for the rest of a step.
        rank: where it ran, or arrived.
        sends: whether it is a transfer.
        start: its beginning.
        end: when its result was there.
        begun: when the host began to hand it over.
        handed: when the host went on.
    """

    label: str
    action: Action | None
    rank: int
    sends: bool
    start: float
    end: float
    begun: float
    handed: float


def covered(spans: Iterable[Span]) -> float:
    """Seconds that at least one of the spans covers."""
    total = until = 0.0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return total
