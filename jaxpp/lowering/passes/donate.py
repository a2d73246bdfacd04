"""Donation: which buffers the results of a line take over, in the lines of any plan; and what of a state in host memory is deleted.

A program takes over the buffer of a value that it changes (a sum). The next version of a value (a parameter after the update, a
carry after a pass, the sum of what replicas have summed) takes over the buffer of the one before, if nobody reads that afterwards
and it is given up, or a copy that came for one visit. What waits in host memory cannot be taken over: it is deleted once its next
version is there.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from jaxpp.lowering.builder import GroupMean, Line, LineCall, LineList, LineListT, Name, here
from jaxpp.stages.program import Role

__all__ = ["donate", "let_go", "replaced"]


def donate(lines: LineListT, gives: Collection[Name]) -> LineListT:
    """The lines with the buffers that each takes over; ``gives`` are the values that are given up."""
    kept, last, gives = set(lines.outputs), lines.last_uses, set(gives)

    def given_up(name: Name) -> bool:
        comes = name.visit >= 0 and name.ref.role != Role.GRAD  # the total of a gradient may be smaller than what is summed
        return comes or name._replace(visit=-1) in gives

    def taken(number: int, line: Line) -> tuple[int, ...]:
        if line.program is None and not isinstance(line.call, GroupMean):
            return line.donated
        free = {name for name in replaced(line) if last[name] == number and name not in kept and given_up(name)}
        free.update(line.outputs)
        return tuple(k for k, name in enumerate(line.inputs) if name in free)

    return replace(lines, lines=tuple(replace(line, donated=taken(number, line)) for number, line in enumerate(lines.lines)))


def replaced(line: Line) -> set[Name]:
    """The values that a line reads and makes the next versions of."""
    makes = line.program or isinstance(line.call, GroupMean)
    before = {name for made in line.outputs for name in _before(made)} if makes else set()
    return before and before.intersection(line.inputs)


def _before(name: Name) -> Iterator[Name]:
    """What a value may be the next version of: with ``delay``, a new parameter is that of the one before the last step."""
    ref = name.ref
    if ref.new:
        yield name._replace(ref=ref._replace(new=False))
        yield name._replace(ref=ref._replace(new=False, role=Role.PREVIOUS))
    elif ref.role == Role.GRAD and ref.shared:
        yield name._replace(ref=ref._replace(shared=False))
    elif ref.role == Role.STATE:
        yield name._replace(microbatch=name.microbatch - 1)


def let_go(lines: LineList, gives: Collection[Name], delete: LineCall) -> LineList:
    """The lines, with one behind the new values of a stage that deletes the old ones in host memory, which the caller gives up."""
    given, results, given_up = set(lines.inputs), set(lines.outputs), set(gives)
    news = {_leaf(name): name for name in lines.outputs if name.ref.waits and name not in given}
    gone: defaultdict[int, defaultdict[int, list[Name]]] = defaultdict(lambda: defaultdict(list))
    for old in lines.inputs:
        new = news.get(_leaf(old))
        if old.ref.waits and here(old) in given_up and new is not None and old not in results:
            gone[max(lines.last_uses[new], lines.last_uses.get(old, -1))][old.stage].append(old)
    found = list[Line]()
    for number, line in enumerate(lines.lines):
        found.append(line)
        for stage, old in gone[number].items():
            everything = tuple(range(len(old)))
            found.append(Line(f"let go of stage {stage}", stage, None, tuple(old), (), call=delete, donated=everything))
    return replace(lines, lines=tuple(found))


def _leaf(name: Name) -> tuple[int, Role, int]:
    """Which leaf of a state a value is, before or after a step; the newest parameter follows the one before the last step."""
    return name.stage, Role.PARAM if name.ref.role == Role.PREVIOUS else name.ref.role, name.ref.index
