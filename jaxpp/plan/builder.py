"""The lines of a step, over names and stages: what runs in what order, before any of it has a device.

Looking values up by name, flattening trees and checking shapes costs more than a small stage, so all of it is done once: a
``Builder`` collects lines over *names*; ``runtime.bind`` compiles the programs, numbers the names, and frees values.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from jaxpp.schedule.action import Action
from jaxpp.stages.program import Program, Ref
from jaxpp.types import Aval, Leaf

_Line = TypeVar("_Line", bound="Line")

CALLER = -1  # the stage number of values that come from the caller


class Name(NamedTuple):
    """A value of a step: the stage that holds it, and what it is there."""

    stage: int
    ref: Ref
    microbatch: int = -1  # of which it is; -1: of the whole step
    visit: int = -1  # of what is on devices only while it is used: in which of its visits
    run: int = 0  # where a plan has the lines of a step several times (for each sequence, for steps in flow): in which of them


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
    donated: tuple[int, ...]  # the arguments of the program whose buffers its results take over
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    action: Action | None = None  # that it runs, or whose result it sends or copies; None for the rest of a step
    call: LineCall | None = None
    fused: FusedAction | None = None  # what the program runs besides

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
        donated: tuple[int, ...] | None = None,
        action: Action | None = None,
        fused: FusedAction | None = None,
    ) -> None:
        """Run a program where a stage lives; its accumulators are donated unless ``donated`` says otherwise."""
        donated = program.donated if donated is None else donated
        self.lines.append(Line(label, stage, program, donated, self._first(inputs), self._first(outputs), action, fused=fused))

    def call(
        self, label: str, call: LineCall, stage: int, inputs: Sequence[Name], outputs: Sequence[Name], action: Action | None = None
    ) -> None:
        """Run what is not one program."""
        self.lines.append(Line(label, stage, None, (), self._first(inputs), self._first(outputs), action, call))

    def send(self, label: str, source: Name, target: Name, action: Action | None = None) -> None:
        """Make a value known to the stage of ``target`` by that name; where it is there already, nothing is sent."""
        self.lines.append(Line(label, target.stage, None, (), self._first([source]), (target,), action))

    def rename(self, source: Name, target: Name) -> None:
        """Give a value another name at its stage: whoever reads that from now on reads the value."""
        self.aliases[target] = self.first(source)

    def first(self, name: Name) -> Name:
        """The first name of a value."""
        return self.aliases.get(name, name)

    def _first(self, names: Iterable[Name]) -> tuple[Name, ...]:
        return tuple(map(self.first, names))

    def copy(self) -> "Builder":
        """A builder with the same lines, to which others can be added."""
        return Builder(list(self.lines), dict(self.constants), dict(self.aliases))


def last_uses(lines: Sequence[Line]) -> Mapping[Name, int]:
    """The number of the last line that reads or writes each name; the value is freed there."""
    return {name: number for number, line in enumerate(lines) for name in (*line.outputs, *line.inputs)}


def leave_out_needless(lines: Sequence[_Line]) -> tuple[list[_Line], dict[Name, Name]]:
    """Lines without copies of residuals that free nothing, as a stage there reads them later; and the values for their names."""
    last = last_uses(lines)
    leaving = [(number, line) for number, line in enumerate(lines) if line.call == MemoryCopy.TO_HOST and line.action]
    readers = Counter(name for _, line in leaving for name in line.inputs)
    stays: dict[Name, Name] = {}
    for number, line in leaving:
        pairs = zip(line.inputs, line.outputs, strict=True)
        stays |= {copy: name for name, copy in pairs if readers[name] > 1 or last[name] > number}
    for line in lines:
        if line.call == MemoryCopy.TO_DEVICE:
            stays |= {back: stays[copy] for copy, back in zip(line.inputs, line.outputs, strict=True) if copy in stays}
    return ([*filter(None, (_without(line, stays) for line in lines))] if stays else list(lines)), stays


def _without(line: _Line, stays: dict[Name, Name]) -> _Line | None:
    if not line.copies:
        return replace(line, inputs=tuple(stays.get(name, name) for name in line.inputs))
    pairs = [pair for pair in zip(line.inputs, line.outputs, strict=True) if stays.keys().isdisjoint(pair)]
    inputs, outputs = zip(*pairs, strict=True) if pairs else ((), ())
    return replace(line, inputs=inputs, outputs=outputs) if pairs else None
