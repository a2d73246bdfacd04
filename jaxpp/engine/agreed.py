"""The calls of an engine on which the processes of a run have agreed: they are compared once, and then only counted."""

from collections.abc import Callable, Hashable

__all__ = ["Agreed"]

_What = tuple[Hashable, ...]


class Agreed:
    """What all have agreed on, the last one used last.

    It keeps the shapes of calls that every process makes. The engine's plans are no measure of that: a process may forecast a step
    that the others do not.

    Args:
        max_shapes: for how many losses and batch shapes calls are kept.
    """

    def __init__(self, max_shapes: int):
        self._max_shapes = max_shapes
        self._known: dict[_What, Callable[[], None]] = {}

    def get(self, what: _What) -> Callable[[], None] | None:
        """What counts another call of a kind, whose last two parts are its loss and its shapes; None if it is not agreed."""
        again = self._known.pop(what, None)
        if again is not None:
            self._known[what] = again
        return again

    def add(self, what: _What, again: Callable[[], None]) -> None:
        """Keep what counts a call, and forget the least recently used shapes if they are too many."""
        self._known[what] = again
        shapes = list(dict.fromkeys(known[-2:] for known in reversed(self._known)))[: self._max_shapes]
        self._known = {known: each for known, each in self._known.items() if known[-2:] in shapes}

    def forget(self) -> None:
        """Compare every call anew."""
        self._known.clear()
