"""Lanes: the lines of each rank, which a thread of its own may hand over, and what of other lanes a line must follow.

A send is of the lane of its source, right behind the program that makes the value, so a line waits for another lane only where it
reads what was sent to it. Nothing that takes over the buffer of an argument is handed over before all other lines are that come
before the first such line: what fails until then changes nothing. Whatever changes a value follows all that read it before.
"""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpp.lowering.builder import CALLER, Line, Name


class Turn(NamedTuple):
    """When an instruction is handed over, among those of other lanes."""

    lane: int
    after: tuple[tuple[int, int], ...] = ()  # other lanes, and how many of their instructions must have been handed over before
    is_awaited: bool = False  # whether another lane waits for it
    asks: bool = False  # whether it is its lane's first that may take over the buffer of an argument


@dataclass(frozen=True)
class Lanes:
    """The turns of lines, and who touches values."""

    turns: tuple[Turn, ...]
    local: Mapping[Name, int]  # the lane of each value that a single lane touches
    several: frozenset[Name]  # the values that several lanes read

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return 1 + max((turn.lane for turn in self.turns), default=0)


def in_lanes(lines: Sequence[Line], places: Sequence[Hashable], consumes: int) -> Lanes:
    """The lanes of lines; one, if a line waits for values of several stages.

    Args:
        lines: those of a plan, in the order in which one thread hands them over.
        places: where each stage lives: stages of one place are of one lane.
        consumes: the number of the first line that takes over the buffer of an argument.
    """
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    lanes = [_lane(line, [numbers[place] for place in places]) for line in lines]
    users, touched = defaultdict[Name, set[int]](set), defaultdict[Name, set[int]](set)
    for line, lane in zip(lines, lanes, strict=True):
        again = {name for name in line.outputs if name in touched} | line.taken
        for name in (*line.inputs, *again):
            users[name].add(lane)
        for name in (*line.inputs, *line.outputs):
            touched[name].add(lane)
    several = frozenset(name for name, each in users.items() if len(each) > 1)
    if any(map(_waits, lines)):
        return Lanes((Turn(0),) * len(lines), dict.fromkeys(touched, 0), frozenset())
    local = {name: next(iter(each)) for name, each in touched.items() if len(each) == 1}
    return Lanes(tuple(_turns(lines, lanes, len(numbers), consumes)), local, several)


def _lane(line: Line, of_stage: Sequence[int]) -> int:
    source = line.inputs[0].stage if line.is_send and line.inputs else CALLER
    return of_stage[line.stage if source == CALLER else source]


def _waits(line: Line) -> bool:
    names = (*line.inputs, *line.outputs) if line.program is None and not line.is_send and line.copies is None else ()
    return any(name.stage not in (line.stage, CALLER) for name in names)


def _turns(lines: Sequence[Line], lanes: Sequence[int], num_lanes: int, consumes: int) -> list[Turn]:
    turns, counts = list[Turn](), [0] * num_lanes  # how many lines of each lane have had their turn
    made = dict[Name, tuple[int, int]]()  # the lane of what makes each value, and its place there
    read = defaultdict[Name, dict[int, int]](dict)  # by lane, the place of the last line that reads each value
    known = [[0] * num_lanes for _ in range(num_lanes)]  # for how many lines of each other lane a lane has waited
    before, asked = list[int](), set[int]()  # the lines of each lane before any takes over the buffer of an argument
    for number, (line, lane) in enumerate(zip(lines, lanes, strict=True)):
        before = list(counts) if number == consumes else before
        asks = number >= consumes and lane not in asked
        needs = list(before if asks else [0] * num_lanes)
        asked |= {lane} if asks else set()
        changed = line.taken.union(line.outputs)
        behind = [made[name] for name in (*line.inputs, *line.outputs) if name in made]
        for other, count in itertools.chain(behind, *(read[name].items() for name in changed if name in read)):
            needs[other] = max(count, needs[other])
        after = tuple((k, count) for k, count in enumerate(needs) if k != lane and count > known[lane][k])
        for other, count in after:
            known[lane][other] = count
        counts[lane] += 1
        turns.append(Turn(lane, after, asks=asks))
        made |= dict.fromkeys(line.outputs, (lane, counts[lane]))
        for name in line.inputs:
            read[name][lane] = counts[lane]
    awaited, places = {each for turn in turns for each in turn.after}, [0] * num_lanes
    for number, turn in enumerate(turns):
        places[turn.lane] += 1
        turns[number] = turn._replace(is_awaited=(turn.lane, places[turn.lane]) in awaited)
    return turns
