"""The lines of a step, over names and stages: what runs in what order, before any of it has a device.

Looking values up by name, flattening trees and checking shapes costs more than a small stage, so all of it is done once: a
``Builder`` collects lines over *names*; ``runtime.bind`` compiles the programs, numbers the names, and frees values.
"""

import enum
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np

from jaxpp.schedule.action import Action
from jaxpp.schedule.clock import Number
from jaxpp.stages.program import Program, Ref
from jaxpp.types import Aval, Leaf

CALLER = -1  # the stage number of values that come from the caller


class Name(NamedTuple):
    """A value of a step: the stage that holds it, and what it is there."""

    stage: int
    ref: Ref
    microbatch: int = -1  # of which it is; -1: of the whole step
    visit: int = -1  # of what is on devices only while it is used: in which of its visits
    run: int = 0  # where a plan has the lines of a step several times (for each sequence, for steps in flow): in which of them


def waiting(name: Name) -> Name:
    """What a value is called while it is in host memory."""
    return name._replace(ref=name.ref._replace(waits=True))


def here(name: Name) -> Name:
    """What a value is called while it is on its stage's devices."""
    return name._replace(ref=name.ref._replace(waits=False)) if name.ref.waits else name


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that is there before a step begins. It is put on its device when a step is compiled, and stays there."""

    value: Leaf
    split: bool = False  # whether its first axis is the replicas, each of which gets its own part; otherwise each gets the whole

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype, as one replica has it."""
        return jax.ShapeDtypeStruct(np.shape(self.value)[self.split :], jax.dtypes.result_type(self.value))


class GroupMean(NamedTuple):
    """Averages gradients over replicas with the same parameters of their own, by the weights unless all replicas weigh the same."""

    avals: tuple[Aval, ...]  # of the gradients, as one replica has them
    summed: bool = False  # whether they are added up instead, as those of a loss that is a sum


class MemoryCopy(enum.Enum):
    """What a line does that copies values between a device and the host memory beside it: an output for each input."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"


LineCall = GroupMean | MemoryCopy | Callable[..., Sequence[jax.Array]]  # what a line does that is neither a program nor a send


class FusedAction(NamedTuple):
    """The action that a program runs behind another one: the backward behind the forward."""

    action: Action
    share: float  # of the program's work that is the first one's


@dataclass(frozen=True)
class Line:
    """One line: a program that runs, a call, or a send."""

    label: str  # for people
    stage: int  # for which it runs, or to which it sends
    program: Program | None
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    action: Action | None = None  # that it runs, or whose result it sends or copies; None for the rest of a step
    call: LineCall | None = None
    fused: FusedAction | None = None  # what the program runs besides
    donated: tuple[int, ...] = ()  # the arguments whose buffers its results take over, or that it deletes (``passes.donate``)

    @property
    def actions(self) -> tuple[Action, ...]:
        """All actions that it is about."""
        return tuple(action for action in (self.action, self.fused and self.fused.action) if action is not None)

    @property
    def is_send(self) -> bool:
        """Whether it is a send."""
        return self.program is None and self.call is None

    @property
    def copies(self) -> MemoryCopy | None:
        """Where to it copies values, if it copies any to host memory or back."""
        return self.call if isinstance(self.call, MemoryCopy) else None

    @property
    def taken(self) -> set[Name]:
        """The inputs whose buffers its results take over."""
        return {self.inputs[k] for k in self.donated}


@dataclass(frozen=True, eq=False)
class Flow:
    """Where the tail of a step begins, and when its lines are handed over beside those of the steps before and after it."""

    body: int  # how many lines it has
    times: tuple[Number, ...]  # of each line
    late: frozenset[Name]  # what the tail makes
    _known: "WeakKeyDictionary[Flow, tuple[tuple[bool, int], ...]]" = field(default_factory=WeakKeyDictionary, repr=False)

    def then(self, following: "Flow") -> tuple[tuple[bool, int], ...]:
        """The tail with the body of the following step, as runs of lines: whether of the tail, and how many."""
        if following not in self._known:
            tail = ((time, 0, k) for k, time in enumerate(self.times) if k >= self.body)
            body = ((time, 1, k) for k, time in enumerate(following.times[: following.body]))
            runs = itertools.groupby(heapq.merge(tail, body), key=lambda line: line[1])
            self._known[following] = tuple((not of_body, sum(1 for _ in run)) for of_body, run in runs)
        return self._known[following]

    def lines(self, num_steps: int) -> Iterator[tuple[int, int]]:
        """The lines of so many equal steps in the order in which they are handed over: the number of the step, and of the line."""
        left = [iter(range(len(self.times))) for _ in range(num_steps)]
        yield from ((0, line) for line in itertools.islice(left[0], self.body))
        for step in range(1, num_steps):
            for of_tail, count in self.then(self):
                number = step - of_tail
                yield from ((number, line) for line in itertools.islice(left[number], count))
        yield from ((num_steps - 1, line) for line in left[-1])


@dataclass(frozen=True, eq=False)
class LineList:
    """Lines, complete: what a pass takes, and returns."""

    lines: Sequence[Line]
    constants: Mapping[Name, Constant]
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]  # as the results are called in these lines: a pass that renames values renames them here
    flow: Flow | None = None  # where the tail of the lines begins, if those of the next step can begin before it

    @cached_property
    def last_uses(self) -> Mapping[Name, int]:
        """The number of the last line that reads or writes each name; the value is freed there."""
        return {name: number for number, line in enumerate(self.lines) for name in (*line.outputs, *line.inputs)}


LineListT = TypeVar("LineListT", bound=LineList)


@dataclass
class Builder:
    """Writes the lines of a step; a name that is written twice is one value that changes (an accumulator)."""

    lines: list[Line] = field(default_factory=list)
    constants: dict[Name, Constant] = field(default_factory=dict)
    aliases: dict[Name, Name] = field(default_factory=dict)  # for another name of a value, its first

    def compute(
        self,
        label: str,
        program: Program,
        stage: int,
        inputs: Sequence[Name],
        outputs: Sequence[Name],
        action: Action | None = None,
        fused: FusedAction | None = None,
    ) -> None:
        """Run a program where a stage lives."""
        self.lines.append(Line(label, stage, program, self._first(inputs), self._first(outputs), action, fused=fused))

    def call(
        self, label: str, call: LineCall, stage: int, inputs: Sequence[Name], outputs: Sequence[Name], action: Action | None = None
    ) -> None:
        """Run what is not one program."""
        self.lines.append(Line(label, stage, None, self._first(inputs), self._first(outputs), action, call))

    def send(self, label: str, source: Name, target: Name, action: Action | None = None) -> None:
        """Make a value known to the stage of ``target`` by that name; where it is there already, nothing is sent."""
        self.lines.append(Line(label, target.stage, None, self._first([source]), (target,), action))

    def rename(self, source: Name, target: Name) -> None:
        """Give a value another name at its stage: whoever reads that from now on reads the value."""
        self.aliases[target] = self.aliases.get(source, source)

    def finish(self, inputs: Sequence[Name], outputs: Sequence[Name]) -> "LineList":
        """The lines, with what they are given and what they result in."""
        return LineList(tuple(self.lines), dict(self.constants), tuple(inputs), self._first(outputs))

    def _first(self, names: Iterable[Name]) -> tuple[Name, ...]:
        return tuple(self.aliases.get(name, name) for name in names)

    def copy(self) -> "Builder":
        """A builder with the same lines, to which others can be added."""
        return Builder(list(self.lines), dict(self.constants), dict(self.aliases))
