"""Offloading (``remat="offload"``): residuals wait in host memory between their forward and their backward.

What the backward reads and nothing else needs goes out after the forward and its sends, and comes back right before the action
ahead of the backward, under another name, because a name that is written twice is one value that changes.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpp.lowering.builder import Line, LineList, LineListT, MemoryCopy, Name, waiting
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.offload import Offloaded
from jaxpp.stages.program import Ref, Role


def offload(draft: LineList, offloaded: Sequence[Offloaded], order: Sequence[Action]) -> LineList:
    """The lines with copies of residuals to host memory and back; ``order`` is that of all actions, be it without lines."""
    lines = draft.lines
    begins, ends = dict[Action, int](), dict[Action, int]()  # the first line of each action, and its last send
    programs = defaultdict[Action, list[Line]](list)  # of a stage and microbatch, by the forward
    for number, line in enumerate(lines):
        if line.program is not None and line.action is not None:
            programs[line.action._replace(kind=Kind.F)].append(line)
        for action in line.actions:
            begins.setdefault(action, number)
            ends[action] = number
    following = len(lines)
    for action in reversed(order):
        following = begins.setdefault(action, following)
    before, behind = (defaultdict[int, list[Line]](list) for _ in range(2))
    back = defaultdict[int, dict[Name, Name]](dict)  # what is known by another name from a line on
    for forward, ahead, _ in offloaded:
        if names := _moving(programs[forward], forward) if forward in ends else []:
            stage = forward.stage
            homes = [name._replace(ref=Ref(Role.FETCHED, k, shared=name.ref.shared)) for k, name in enumerate(names)]
            waits = tuple(map(waiting, homes))
            behind[ends[forward]].append(Line(f"offload {forward}", stage, None, tuple(names), waits, forward, MemoryCopy.TO_HOST))
            before[begins[ahead]].append(Line(f"fetch {forward}", stage, None, waits, tuple(homes), forward, MemoryCopy.TO_DEVICE))
            back[begins[ahead]] |= zip(names, homes, strict=True)
    there, found = dict[Name, Name](), list[Line]()
    for number, line in enumerate(lines):
        there |= back[number]
        reads = tuple(there.get(name, name) for name in line.inputs) if line.program is not None else line.inputs
        found += [*before[number], replace(line, inputs=reads), *behind[number]]
    return replace(draft, lines=tuple(found))


def _moving(programs: Sequence[Line], forward: Action) -> list[Name]:
    """What the backwards of a microbatch read that its forward made, or was sent; keys stay."""
    made, read = set[Name](), dict[Name, None]()
    for line in programs:
        if line.action == forward:
            made |= {name for name in line.outputs if name.ref.role == Role.RESIDUAL}
        elif line.program is not None:
            pairs = zip(line.inputs, line.program.avals, strict=True)
            read |= dict.fromkeys(name for name, aval in pairs if not jnp.issubdtype(aval.dtype, jax.dtypes.extended))
    return [name for name in read if name in made or name.ref.role == Role.ACTIVATION]


def without_needless(draft: LineListT) -> LineListT:
    """The lines without copies that free nothing, as a stage there reads the value later: its readers read the value."""
    lines, last = draft.lines, draft.last_uses
    leaving = [(number, line) for number, line in enumerate(lines) if line.call == MemoryCopy.TO_HOST and line.action]
    readers = Counter(name for _, line in leaving for name in line.inputs)
    stays: dict[Name, Name] = {}
    for number, line in leaving:
        pairs = zip(line.inputs, line.outputs, strict=True)
        stays |= {copy: name for name, copy in pairs if readers[name] > 1 or last[name] > number}
    for line in lines:
        if line.call == MemoryCopy.TO_DEVICE:
            stays |= {back: stays[copy] for copy, back in zip(line.inputs, line.outputs, strict=True) if copy in stays}
    return replace(draft, lines=tuple(filter(None, (_without(line, stays) for line in lines)))) if stays else draft


def _without(line: Line, stays: Mapping[Name, Name]) -> Line | None:
    if not line.copies:
        return replace(line, inputs=tuple(stays.get(name, name) for name in line.inputs))
    pairs = [pair for pair in zip(line.inputs, line.outputs, strict=True) if stays.keys().isdisjoint(pair)]
    inputs, outputs = zip(*pairs, strict=True) if pairs else ((), ())
    return replace(line, inputs=inputs, outputs=outputs) if pairs else None
