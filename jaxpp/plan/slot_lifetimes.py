"""Slots: where each value of a step is kept while the step runs, and when it is freed: after its last reader."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from jaxpp.plan.builder import Line, Name

__all__ = ["SlotNumbers", "last_uses"]


def last_uses(lines: Sequence[Line]) -> Mapping[Name, int]:
    """The number of the last line that reads or writes each name; the value is freed there."""
    return {name: number for number, line in enumerate(lines) for name in (*line.outputs, *line.inputs)}


class SlotNumbers:
    """Numbers for names, those used last first."""

    def __init__(self):
        self._taken: dict[Hashable, int] = {}
        self._free: list[int] = []
        self.size = 0

    def __getitem__(self, name: Hashable) -> int:
        if name not in self._taken:
            if not self._free:
                self._free.append(self.size)
                self.size += 1
            self._taken[name] = self._free.pop()
        return self._taken[name]

    def release(self, names: Iterable[Hashable]) -> list[int]:
        """The slots of values that nobody reads any more; they may be used again."""
        freed = [self._taken.pop(name) for name in names]
        self._free += freed
        return freed
