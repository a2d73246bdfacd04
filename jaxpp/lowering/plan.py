"""A plan: a step as a flat list of instructions over slots; a slot is used again after the last reader of its value."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpp.lowering.builder import FusedAction, MemoryCopy, Name
from jaxpp.lowering.lanes import Lanes, Turn
from jaxpp.types import Array, Device, Leaf


class Instruction(NamedTuple):
    """One line of a plan."""

    label: str  # for people: ``2F0``, ``send ...``
    call: Callable[..., Sequence[Array]]  # a compiled program, or a send; takes one array an input and returns one an output
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...]  # the slots whose value nobody reads after it
    about: "About"


class About(NamedTuple):
    """What an instruction is about, for those who watch."""

    device: Device  # where it runs, or where it sends to
    stage: int
    action: Hashable | None  # that it runs, or whose result it sends or copies; None for the rest of a step
    sends: bool
    program: str  # what the program that runs is called in a trace; empty for sends
    watch: int  # in a watched plan, a slot that it writes and whose value nobody donates, so that it can be asked for; else -1
    copies: MemoryCopy | None = None  # where to it copies values, if it copies any
    fused: FusedAction | None = None  # what it runs besides its action


@dataclass(frozen=True)
class Plan:
    """A step, lowered."""

    instructions: tuple[Instruction, ...]  # in the order the host dispatches them
    num_slots: int  # how many values are alive at once, at most
    constants: tuple[tuple[int, Leaf], ...]  # values that are there before the step starts, by slot
    inputs: tuple[int, ...]  # the slot of each argument of the step
    outputs: tuple[int, ...]  # the slot of each result
    consumes: int  # the number of the first instruction that takes over the buffer of an argument
    turns: tuple[Turn, ...] = ()  # of each instruction, where a thread for each rank hands them over; none if there is one lane
    of_body: tuple[int, ...] = ()  # the slots of arguments that several lanes read, none of them in the tail

    def __str__(self) -> str:
        width = max((len(line.label) for line in self.instructions), default=0)
        rows = [f"plan: {len(self.instructions)} instructions, {self.num_slots} slots"]
        for line in self.instructions:
            free = f"  free {' '.join(map(str, line.free))}" if line.free else ""
            rows.append(f"{line.label.ljust(width)}  {_numbers(line.inputs)} -> {_numbers(line.outputs)}{free}")
        return "\n".join(rows)


Slots = list[Any]
"""The values of a step by slot."""


class Execution:
    """A plan on arguments, as far as it was handed over.

    Attributes:
        left: the numbers of the instructions that were not handed over yet.
        failed: whether one of its instructions has raised an error.
        done: how many instructions of each lane were handed over, if threads do so.
    """

    def __init__(self, plan: Plan, arguments: Sequence[Leaf]):
        self.plan, self.slots, self.failed = plan, Slots([None]) * plan.num_slots, False
        self.left, self.done = iter(range(len(plan.instructions))), list[int]()
        for slot, value in plan.constants:
            self.slots[slot] = value
        for slot, value in zip(plan.inputs, arguments, strict=True):
            self.slots[slot] = value

    def next(self, count: int) -> Iterator[int]:
        """The numbers of the next instructions, so many of those that are left."""
        return itertools.islice(self.left, count)

    def results(self) -> list[Array]:
        """What the plan returns."""
        return [self.slots[slot] for slot in self.plan.outputs]


def _numbers(slots: Sequence[int]) -> str:
    return " ".join(map(str, slots)) or "-"


class SlotNumbers:
    """Numbers for names; a number is used again, those used last first, for a name of the same lane.

    A name that several lanes touch has a number for itself: its lane would have to wait for the other one to be done with it.
    """

    def __init__(self, lanes: Lanes):
        self._lanes = lanes
        self._taken: dict[Name, int] = {}
        self._free = defaultdict[int | None, list[int]](list)
        self.size = 0

    def __getitem__(self, name: Name) -> int:
        if name not in self._taken:
            lane = self._lanes.local.get(name)
            free = [] if lane is None else self._free[lane]
            if not free:
                free.append(self.size)
                self.size += 1
            self._taken[name] = free.pop()
        return self._taken[name]

    def release(self, names: Iterable[Name]) -> list[int]:
        """The slots that are empty once nobody reads these values any more; what several lanes read stays to the end."""
        freed = []
        for name in names:
            if name not in self._lanes.several:
                freed.append(self._taken.pop(name))
                self._free[self._lanes.local.get(name)].append(freed[-1])
        return freed
