"""A cache of what was used last: of what is traced, cut, lowered and compiled, by shapes."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LRU"]

_T = TypeVar("_T")


class LRU(Generic[_T]):
    """Values by name; the least recently used one beyond ``most`` is forgotten."""

    def __init__(self, most: int):
        self._most = most
        self._values: dict[Hashable, _T] = {}

    def get(self, name: Hashable) -> _T | None:
        """The value of this name, which is the one used last from now on; None if there is none."""
        if name not in self._values:
            return None
        self._values[name] = self._values.pop(name)
        return self._values[name]

    def put(self, name: Hashable, value: _T) -> bool:
        """Keep a value as the one used last; whether another one was forgotten for it."""
        self._values.pop(name, None)
        self._values[name] = value
        full = len(self._values) > self._most
        if full:
            del self._values[next(iter(self._values))]
        return full

    def get_or_make(self, name: Hashable, make: Callable[[], _T]) -> _T:
        """The value of this name, made if there is none."""
        value = self.get(name)
        if value is None:
            value = make()
            self.put(name, value)
        return value

    def values(self) -> tuple[_T, ...]:
        """All values, the one used last at the end."""
        return tuple(self._values.values())

    def keep(self, wanted: Callable[[_T], bool]) -> None:
        """Forget the values that are not wanted."""
        self._values = {name: value for name, value in self._values.items() if wanted(value)}

    def clear(self) -> None:
        """Forget all."""
        self._values = {}
