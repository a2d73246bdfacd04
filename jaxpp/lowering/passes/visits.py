"""Visits: what waits in host memory comes to its devices before the lines that read it, and goes back when it has changed.

Lines are written as if everything lived on devices. Here those of a step are given copies of what waits. A *visit* is a run of
lines of one stage at its place, undisturbed by other stages there: within it a value is copied in once and is let go after its last
reader. What a visit begins with is copied in while the visit before it runs, what it reads later (the optimizer's state) once its
forwards are done. What a visit has changed and a later one, or the caller, wants goes out. What a step computes from parameters
alone (a cast) is computed again in each visit, which is cheaper than a copy; and what replicas hold in parts is gathered again.

The update of a stage runs as soon as its gradients are complete (``early``), so that these need not wait in between.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from jaxpp.lowering.builder import CALLER, Builder, Line, LineList, MemoryCopy, Name, waiting
from jaxpp.lowering.passes.donate import replaced
from jaxpp.schedule.action import Kind
from jaxpp.stages.program import Role

_Places = Sequence[Hashable]  # of the stages
_Numbers = Collection[tuple[Role, int]]
WAITING: Mapping[str, frozenset[Role]] = {
    "optimizer": frozenset({Role.OPT}),
    "params": frozenset({Role.PARAM, Role.PREVIOUS, Role.OPT, Role.GRAD, Role.STATIC}),
}
"""By the words of ``host=``: the roles of what is on devices only while it is used."""
_PARAMS = frozenset({Role.PARAM, Role.PREVIOUS})  # one of which the programs of stages read


def early(draft: LineList) -> LineList:
    """The lines with those after the last action as early as what they read is complete; as they are if the host has to wait."""
    lines = draft.lines
    last = max((number for number, line in enumerate(lines) if line.action is not None), default=-1)
    if any(line.call is not None and not line.copies for line in lines[last + 1 :]):
        return draft
    written, read = dict[Name, int](), dict[Name, int]()  # behind which line each name was written, and read, last
    idle = list[Line]()  # what needs nothing of the step: it runs right before what reads its results, or changes what it reads
    behind: defaultdict[int, list[Line]] = defaultdict(list)
    for number, line in enumerate(lines):
        at = number
        if number > last:
            names = (*line.inputs, *line.outputs)
            at = max([*(written.get(name, -1) for name in names), *(read.get(name, -1) for name in (*line.outputs, *line.taken))])
            if at < 0 and not any(_comes_first(other, line) for other in idle):
                idle.append(line)
                continue
            at = number if at < 0 else at
        ready = [other for other in idle if _comes_first(other, line)]
        idle = [other for other in idle if other not in ready]
        for each in (*ready, line):
            behind[at].append(each)
            written |= dict.fromkeys(each.outputs, at)
            read |= {name: max(at, read.get(name, -1)) for name in each.inputs}
    return replace(draft, lines=(*(line for number in range(len(lines)) for line in behind[number]), *idle))


def _comes_first(other: Line, line: Line) -> bool:
    """Whether a line reads what the other one makes, or changes what it reads."""
    return not set(other.outputs).isdisjoint(line.inputs) or not set(other.inputs).isdisjoint((*line.outputs, *replaced(line)))


@dataclass
class _Value:
    """A value that visits: the lines that touch it, and where it is after those that have been written."""

    touches: dict[int, int] = field(default_factory=dict)  # the visit in which each line touches it, by the number of the line
    ends: set[int] = field(default_factory=set)  # the last of the lines that touch it in a visit, but for the last visit
    last: int = -1  # the last line that touches it
    copy: Name | None = None  # what it is called in host memory, if it is there unchanged
    since: int = -1  # the line behind which that copy is made
    visit: int = -1  # the last in which it is on its devices


def visit(lines: LineList, places: _Places, hosts: _Places, roles: Collection[Role], stays: _Numbers) -> LineList:
    """Lines that copy what waits in host memory in and out; arguments and results that wait are called so.

    Args:
        lines: lines in which everything is on devices.
        places: where each stage lives.
        hosts: the processes in whose host memory what it owns waits, for each device; stages with equal ones share what waits.
        roles: what is on devices only while it is used,
        stays: but for these leaves, by role and index.
    """
    return _Visits(lines, places, hosts, roles, stays).run()


class _Visits:
    def __init__(self, draft: LineList, places: _Places, hosts: _Places, roles: Collection[Role], stays: _Numbers):
        self._draft, self._places, self._hosts, self._roles, self._stays = draft, places, hosts, roles, stays
        self._values: defaultdict[Name, _Value] = defaultdict(_Value)
        for name in filter(self._visits, draft.inputs):
            self._values[name].copy = waiting(name)
        self._makers = dict[Name, Line]()  # of what each visit computes again
        self._lines = self._without_needless(draft.lines)
        self._touches = list[tuple[list[Line], list[Name]]]()  # the programs that run again for each line, and what visits for it
        self._begins = dict[int, int]()  # the first line of each visit
        self._returns = dict[int, int]()  # and the one after its last forward
        self._ahead = dict[int, int]()  # the first line of the visit before it at its place, or the last program before it
        self._ins: defaultdict[int, list[tuple[Name, Name]]] = defaultdict(list)  # the copies right before each line
        self._outs: defaultdict[int, list[tuple[Name, Name]]] = defaultdict(list)  # and right behind it
        self._again: defaultdict[int, list[Line]] = defaultdict(list)  # the programs right before it
        self._wanted = frozenset(draft.outputs)
        self._made = set[tuple[Name, int]]()  # what has been computed again, and in which visit

    def run(self) -> LineList:
        self._find_visits()
        lines = [self._visited(number, line) for number, line in enumerate(self._lines)]
        made = Builder()
        for number, line in enumerate(lines):
            _copy(made, MemoryCopy.TO_DEVICE, self._ins[number])
            made.lines += [*self._again[number], line]
            _copy(made, MemoryCopy.TO_HOST, self._outs[number])
        copies = {name: self._values[name].copy for name in self._draft.outputs if name in self._values}
        given = tuple(waiting(name) if self._visits(name) else name for name in self._draft.inputs)
        results = tuple(copies.get(name) or name for name in self._draft.outputs)
        return replace(self._draft, lines=tuple(made.lines), inputs=given, outputs=results)

    def _without_needless(self, lines: Sequence[Line]) -> list[Line]:
        """The lines but for sends of what waits, which each stage reads from there, and for programs that visits run again."""
        kept = []
        for line in lines:
            if line.program is not None and line.outputs and self._is_repeated(line):
                self._makers |= dict.fromkeys(line.outputs, line)
            elif line.is_send and line.inputs[0] in self._values and self._waits_near(line):
                self._values[line.outputs[0]].copy = self._values[line.inputs[0]].copy
            else:
                kept.append(line)
        return kept

    def _waits_near(self, send: Line) -> bool:
        return self._all_are(_PARAMS, send.inputs) and self._hosts[send.inputs[0].stage] == self._hosts[send.stage]

    def _is_repeated(self, line: Line) -> bool:
        """Whether each visit runs a program again: it computes from parameters alone, or gathers them of their parts."""
        parts = self._all_are(_PARAMS, line.inputs) and all(name.ref.shared for name in line.inputs)
        gathers = parts and self._all_are(_PARAMS, line.outputs) and not any(name.ref.shared for name in line.outputs)
        return (gathers and bool(line.inputs)) or self._all_are({Role.STATIC}, line.outputs)

    def _all_are(self, roles: Collection[Role], names: Sequence[Name]) -> bool:
        return all(name.ref.role in roles and name.ref.role in self._roles for name in names)

    def _makers_of(self, line: Line) -> list[Line]:
        """The programs that make what a line reads and each visit computes again, in their order."""
        mine = {id(maker): maker for maker in map(self._makers.get, line.inputs) if maker is not None}
        return [each for maker in mine.values() for each in (*self._makers_of(maker), maker)]

    def _visits(self, name: Name) -> bool:
        ref = name.ref
        return name.stage != CALLER and ref.role in self._roles and (ref.role, ref.index) not in self._stays

    def _find_visits(self) -> None:
        fresh, visits, programs = itertools.count(), dict[Hashable, tuple[int, int]](), dict[Hashable, int]()
        for number, line in enumerate(self._lines):
            place = self._places[line.stage]
            ahead = programs.get(place, number)
            if line.program is not None:
                programs[place] = number
            makers = self._makers_of(line)
            made_of = [name for maker in makers for name in maker.inputs]  # what it reads is computed of these
            touched = list(filter(self._visits, dict.fromkeys([*made_of, *line.inputs, *line.outputs])))
            self._touches.append((makers, touched))
            for name in touched:
                at = self._places[name.stage]
                stage, visit = visits.get(at, (-1, -1))
                if stage != name.stage:
                    self._ahead[following := next(fresh)] = self._begins.get(visit, ahead)
                    self._begins[following] = number
                    visit = following
                    if not line.is_send:  # what passes by ends no visit
                        visits[at] = name.stage, visit
                value = self._values[name]
                if value.last >= 0 and value.touches[value.last] != visit:
                    value.ends.add(value.last)
                value.touches[number], value.last = visit, number
                if line.action is not None and line.action.kind == Kind.F:
                    self._returns[visit] = number + 1

    def _visited(self, number: int, line: Line) -> Line:
        """The line with the names that its values have in their visits; notes what is copied and computed around it."""
        makers, touched = self._touches[number]
        named = {name: name._replace(visit=self._values[name].touches[number]) for name in touched}
        for name in touched:
            if name in line.inputs or name not in line.outputs:
                self._bring_in(number, name, named[name])
        for maker in makers:
            self._compute(number, maker, named)
        for name in touched:
            value = self._values[name]
            value.visit = value.touches[number]
            if name in line.outputs:
                value.copy = None  # it has changed
            if value.copy is None and self._is_wanted(number, name):
                value.copy, value.since = waiting(named[name]), number
                self._outs[number].append((named[name], value.copy))
        inputs, outputs = (tuple(named.get(name, name) for name in names) for names in (line.inputs, line.outputs))
        return replace(line, inputs=inputs, outputs=outputs)

    def _bring_in(self, number: int, name: Name, named: Name) -> None:
        value = self._values[name]
        if value.visit != value.touches[number] and name not in self._makers:
            visit = value.touches[number]
            early = self._begins[visit] if self._begins[visit] < number else self._ahead[visit]
            returns = self._returns.get(visit, 0)
            early = max(early, returns) if returns <= number else early
            self._ins[max(early, value.since + 1)].append((cast("Name", value.copy), named))

    def _is_wanted(self, number: int, name: Name) -> bool:
        """Whether this line is the last in its visit to touch a value that a later visit, or the caller, wants."""
        value = self._values[name]
        return name not in self._makers and (name in self._wanted if number == value.last else number in value.ends)

    def _compute(self, number: int, maker: Line, named: Mapping[Name, Name]) -> None:
        """Run a program that depends on parameters alone, unless this visit has run it."""
        visit = next(self._values[name].touches[number] for name in maker.outputs if number in self._values[name].touches)
        if (maker.outputs[0], visit) not in self._made:
            self._made.add((maker.outputs[0], visit))
            inputs = tuple(named.get(name, name) for name in maker.inputs)
            outputs = tuple(name._replace(visit=visit) for name in maker.outputs)
            self._again[number].append(replace(maker, inputs=inputs, outputs=outputs))


def _copy(builder: Builder, copies: MemoryCopy, pairs: Sequence[tuple[Name, Name]]) -> None:
    """One line for each stage with copies."""
    by_stage: defaultdict[int, list[tuple[Name, Name]]] = defaultdict(list)
    for source, target in pairs:
        by_stage[source.stage if copies == MemoryCopy.TO_HOST else target.stage].append((source, target))
    for stage, mine in by_stage.items():
        what = "take stage" if copies == MemoryCopy.TO_HOST else "bring stage"
        builder.call(f"{what} {stage}", copies, stage, [source for source, _ in mine], [target for _, target in mine])
