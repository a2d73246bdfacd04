"""Flow: the next step begins while a step ends, where its forwards do not wait for the update (``delay``).

The lines of a step are divided into the *body*, all up to each rank's last forward, with what the caller is told at once (the loss,
aux, the model state), and the *tail*: the last backwards and the update, which are handed over between the lines of the next
step's body. The order of both is that of the schedule in flow (``schedule.flow``).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from jaxpp.lowering.builder import Flow, Line, LineListT, Name
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Number
from jaxpp.schedule.flow import flow
from jaxpp.stages.program import Role


def in_flow(
    draft: LineListT, places: Sequence[Hashable], schedule: Schedule, state: Mapping[Name, Name], told: Sequence[Name]
) -> LineListT:
    """The lines of a step as body and tail; as they were if a next body would read what the tail makes.

    Args:
        draft: those of a step.
        places: where each stage lives.
        schedule: the order of their actions.
        state: for what the step is given of a state, what the same is called after it.
        told: the results that the caller gets at once.
    """
    lines = draft.lines
    order = _Order(lines, places)
    body = order.closure(order.last_forwards, in_order=True)
    body |= order.closure([order.writer[name] for name in told if name in order.writer])
    late = frozenset(name for number, line in enumerate(lines) if number not in body for name in line.outputs)
    if any(state.get(name) in late for number in body for name in lines[number].inputs):
        return draft
    places_in_flow, times = _places_in_flow(schedule), list[Number]()
    for number, line in enumerate(lines):
        inside = number in body
        place = places_in_flow[line.actions[0], inside] if line.actions else -math.inf
        times.append(max([place, *(times[need] for need in order.needs[number] if (need in body) == inside)]))
    sorted_lines = sorted(range(len(lines)), key=lambda number: (number not in body, times[number]))
    parted = Flow(len(body), tuple(times[k] for k in sorted_lines), late)
    return replace(draft, lines=tuple(lines[k] for k in sorted_lines), flow=parted)


def with_previous(lines: Sequence[Line], stale: Collection[int]) -> list[Line]:
    """Lines that read these parameters as they were before the last step."""

    def of(names: Sequence[Name]) -> tuple[Name, ...]:
        pairs = ((name, name.ref.role == Role.PARAM and name.ref.index in stale) for name in names)
        return tuple(name._replace(ref=name.ref._replace(role=Role.PREVIOUS)) if late else name for name, late in pairs)

    return [replace(line, inputs=of(line.inputs), outputs=of(line.outputs)) for line in lines]


def _places_in_flow(schedule: Schedule) -> dict[tuple[Action, bool], int]:
    """The place of actions in the order of steps in flow: those of a step, which are its tail, and of the next, its body (True)."""
    places, count = {action: place for place, action in enumerate(flow(schedule, 3).order)}, schedule.num_microbatches

    def of_step(action: Action, number: int) -> Action:
        return action._replace(microbatch=action.microbatch + number * count)

    return {(action, inside): places[of_step(action, 1 + inside)] for action in schedule.starts for inside in (False, True)}


class _Order:
    """What must be handed over before each line: what makes or changes what it reads, and what reads what it changes."""

    def __init__(self, lines: Sequence[Line], places: Sequence[Hashable]):
        self.needs: list[set[int]] = []
        self.writer = dict[Name, int]()  # the last line that makes or changes each value
        self._before = dict[int, int]()  # for an action, the one before it at its place
        latest, forwards, readers = dict[Hashable, int](), dict[Hashable, int](), defaultdict[Name, list[int]](list)
        for number, line in enumerate(lines):
            changed = {*line.outputs, *line.taken}
            needs = {self.writer[name] for name in (*line.inputs, *line.outputs) if name in self.writer}
            self.needs.append(needs.union(*(readers[name] for name in changed)))
            for name in line.inputs:
                readers[name].append(number)
            for name in line.outputs:
                self.writer[name] = number
                readers[name] = []
            if line.program is not None and line.actions:
                place = places[line.stage]
                if place in latest:
                    self._before[number] = latest[place]
                latest[place] = number
                if any(action.kind == Kind.F for action in line.actions):
                    forwards[place] = number
        self.last_forwards = list(forwards.values())

    def closure(self, wanted: Sequence[int], *, in_order: bool = False) -> set[int]:
        """These lines and all that must be handed over before; with ``in_order``, each place's actions in their order."""
        found, left = set[int](), list(wanted)
        while left:
            number = left.pop()
            if number not in found:
                found.add(number)
                left += self.needs[number]
                if in_order and number in self._before:
                    left.append(self._before[number])
        return found
