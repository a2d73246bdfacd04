"""The lines of a step that this process runs, of the lines of all.

Every process writes the lines of the whole step, in one order, and keeps those that concern its devices: the programs that run
here, and the sends that begin or end here. What crosses to another process is one line on each side.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from jaxpp.plan.builder import CALLER, GroupMean, Line, Name
from jaxpp.runtime.place import Place
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.processes.crossing import crosser
from jaxpp.runtime.processes.here import LocalRows, devices_in, elsewhere, is_here, is_whole_here, processes_of, spread
from jaxpp.runtime.transfer import sender
from jaxpp.stages.program import Role
from jaxpp.types import Array, Aval, Home, Leaf

__all__ = ["Crossing", "Shapes", "giver", "local_line"]

_Line = TypeVar("_Line", bound=Line)
_LEAVES = frozenset({Role.PARAM, Role.OPT, Role.STATE, Role.LOSS_SCALE})


@dataclass(frozen=True)
class Crossing:
    """What a send moves between processes.

    Attributes:
        aval: shape and dtype, with all axes.
        source: where the value is.
        target: where it goes.
        taken: whether a later program may take over the value's buffer.
    """

    aval: Aval
    source: Home
    target: Home
    taken: bool

    def sender(self) -> Callable[..., Sequence[Array]]:
        """What the line calls."""
        return crosser(self.aval, self.source, self.target, taken=self.taken)


class Shapes:
    """Shape and dtype of what other processes have, found when somebody asks.

    Args:
        lines: of all processes.
        placement: the place of each stage.
        leaves: those of the leaves of a state, by what a leaf is and its number, as one replica has it.
    """

    def __init__(self, lines: Sequence[Line], placement: Placement, leaves: Mapping[tuple[Role, int], Aval]):
        self._placement, self._leaves = placement, leaves
        self._taken = {name for line in lines for name in line.taken}
        self._makers = {name: line for line in reversed(lines) for name in line.outputs}

    def __getitem__(self, name: Name) -> jax.ShapeDtypeStruct:
        role, index = name.ref.role, name.ref.index
        place = self._placement[name.stage]
        if role in _LEAVES and (role, index) in self._leaves:
            return place.aval(name.ref, self._leaves[role, index])
        line = self._makers[name]
        at = line.outputs.index(name)
        if line.program is not None:
            return place.aval(name.ref, line.program.results[at], lead=not line.program.spans)
        if isinstance(line.call, GroupMean):
            return place.aval(name.ref, line.call.avals[at])
        return self[line.inputs[at]]

    def may_be_taken(self, name: Name) -> bool:
        """Whether a program may take over a value's buffer: in these lines, or, of a leaf of a state, in those of another step."""
        return name in self._taken or name.ref.role in _LEAVES

    def stand_in(self, name: Name) -> Array:
        """What stands here for a value that lives elsewhere."""
        return elsewhere(self[name], self._placement[name.stage].home(name.ref))


def local_line(line: _Line, place: Place, placement: Placement, shapes: Shapes) -> tuple[_Line, Crossing | None] | None:
    """A line as this process runs it, and what it moves between processes if it does; None if it is of no concern here."""
    there = place.is_here
    if not line.is_send:
        if line.program is None and not line.copies and not isinstance(line.call, GroupMean):  # a wait, for values of any stage
            mine = tuple(name for name in line.inputs if name.stage == CALLER or placement[name.stage].is_here)
            return (dataclasses.replace(line, inputs=mine, outputs=mine[:1]), None) if mine else None
        return (line, None) if there else None
    (source,), (target,) = line.inputs, line.outputs
    if source.stage == CALLER:
        return (line, None) if there else None
    home, goal = placement[source.stage].home(source.ref), place.home(target.ref)
    here = is_here(home)
    if len(processes_of((*devices_in(home), *devices_in(goal)))) == 1:
        return (line, None) if here else None
    inputs, outputs = ((name,) if present else () for name, present in ((source, here), (target, there)))
    crossing = Crossing(shapes[source], home, goal, shapes.may_be_taken(source))
    return dataclasses.replace(line, inputs=inputs, outputs=outputs), crossing


def giver(home: Home) -> Callable[[Leaf], Sequence[Array]]:
    """What a send from the caller calls, in one of several processes."""
    send = sender(home) if is_whole_here(home) else None

    def give(value: Leaf) -> Sequence[Array]:
        return (spread(value, home),) if send is None or isinstance(value, LocalRows) else send(value)

    return give
