"""A cache of what was used last: of executables by what they do; of what is traced, cut and lowered, by shapes."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

_T = TypeVar("_T")


class LRU(OrderedDict[Hashable, _T]):
    """Values by name; ``put`` forgets the least recently used one beyond ``most``. Ctrl-C at any moment loses none."""

    def __init__(self, most: int):
        super().__init__()
        self._most = most

    def find(self, name: Hashable) -> _T | None:
        """The value of this name, which is the one used last from now on; None if there is none."""
        if name in self:
            self.move_to_end(name)
        return self.get(name)

    def put(self, name: Hashable, value: _T) -> bool:
        """Keep a value as the one used last; whether another one was forgotten for it."""
        self[name] = value
        self.move_to_end(name)
        full = len(self) > self._most
        if full:
            self.popitem(last=False)
        return full

    def get_or_make(self, name: Hashable, make: Callable[[], _T]) -> _T:
        """The value of this name, made if there is none."""
        value = self.find(name)
        if value is None:
            value = make()
            self.put(name, value)
        return value
