"""Flow: the next step begins while a step ends, where its forwards do not wait for the update (``delay``).

The lines of a step are divided into the *body*, all up to each rank's last forward, with what the caller is told at once (the loss,
aux, the model state), and the *tail*: the last backwards and the update, which are handed over between the lines of the next
step's body. The order of both is that of the schedule in flow (``schedule.flow``).
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

from jaxpp.plan.builder import Line, Name
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import UNIT, Number
from jaxpp.schedule.flow import flow

_Line = TypeVar("_Line", bound=Line)


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


def in_flow(
    lines: Sequence[_Line], places: Sequence[Hashable], schedule: Schedule, state: Mapping[Name, Name], results: Sequence[Name]
) -> tuple[list[_Line], Flow | None]:
    """The lines of a step as body and tail; None if a next body would read what the tail makes, and as they were.

    Args:
        lines: those of a step.
        places: where each stage lives.
        schedule: the order of their actions.
        state: for what the step is given of a state, what the same is called after it.
        results: what the caller is told at once.
    """
    order = _Order(lines, places)
    body = order.closure(order.last_forwards, in_order=True)
    body |= order.closure([order.writer[name] for name in results if name in order.writer])
    late = frozenset(name for number, line in enumerate(lines) if number not in body for name in line.outputs)
    if any(state.get(name) in late for number in body for name in lines[number].inputs):
        return list(lines), None
    starts, times, ends = _starts(schedule), list[Number](), list[Number]()
    for number, line in enumerate(lines):
        inside = number in body
        needs = [need for need in order.needs[number] if (need in body) == inside]
        if line.actions:
            times.append(max([starts[line.actions[0], inside], *(times[need] for need in needs)]))
            ends.append(times[number] + sum(UNIT[action.kind] for action in line.actions))
        else:
            times.append(max((ends[need] for need in needs), default=-math.inf))
            ends.append(times[number])
    sorted_lines = sorted(range(len(lines)), key=lambda number: (number not in body, times[number]))
    return [lines[k] for k in sorted_lines], Flow(len(body), tuple(times[k] for k in sorted_lines), late)


def _starts(schedule: Schedule) -> dict[tuple[Action, bool], Number]:
    """When actions start: those of a step, which are its tail, and those of the next step, its body (True)."""
    starts, count = flow(schedule, 3).starts, schedule.num_microbatches

    def of_step(action: Action, number: int) -> Action:
        return action._replace(microbatch=action.microbatch + number * count)

    return {(action, inside): starts[of_step(action, 1 + inside)] for action in schedule.starts for inside in (False, True)}


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
