"""Residuals that wait in host memory, as lines: out after their forward, back right before the action ahead of their backward.

Which stages and microbatches these are follows from the rows (``schedule.offload``). What moves of them is what the backward reads
and nothing else needs: residuals that the forward has made, and activations that have arrived. The values that come back have names
of their own, because a name that is written twice is one value that changes.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpp.plan.builder import Builder, Line, MemoryCopy, Name, last_uses
from jaxpp.plan.step import Step, local_name
from jaxpp.schedule.action import Action
from jaxpp.schedule.offload import Offloaded
from jaxpp.stages.program import Ref, Role

_Line = TypeVar("_Line", bound=Line)


class Offloading:
    """Writes the copies of a step to host memory and back, while the lines of its actions are written."""

    def __init__(self, builder: Builder, step: Step, offloaded: Sequence[Offloaded]):
        self._builder, self._step = builder, step
        self._leave = {moved.forward for moved in offloaded}
        self._return: defaultdict[Action, list[Action]] = defaultdict(list)
        for moved in offloaded:
            self._return[moved.ahead].append(moved.forward)
        self._names: dict[Action, tuple[list[Name], list[Name], list[Name]]] = {}  # of what moved, what waits, and what is back
        self._back: dict[Name, Name] = {}

    def take_out(self, action: Action) -> None:
        """Write what leaves after an action, if residuals of it do."""
        if action in self._leave and (names := self._moving(action)):
            waiting = [name._replace(ref=Ref(Role.OFFLOADED, k, shared=name.ref.shared)) for k, name in enumerate(names)]
            back = [name._replace(ref=replace(name.ref, role=Role.FETCHED)) for name in waiting]
            self._names[action] = names, waiting, back
            self._builder.call(f"offload {action}", MemoryCopy.TO_HOST, action.stage, names, waiting, action)

    def bring_back(self, ahead: Action) -> None:
        """Write what comes back right before an action, whether it has anything to do or not."""
        for forward in self._return.get(ahead, ()):
            if forward in self._names:
                names, waiting, back = self._names[forward]
                self._builder.call(f"fetch {forward}", MemoryCopy.TO_DEVICE, forward.stage, waiting, back, forward)
                self._back |= zip(names, back, strict=True)

    def current(self, names: Sequence[Name]) -> list[Name]:
        """The names under which values can be read now: others for those that have been away."""
        return [self._back.get(name, name) for name in names]

    def _moving(self, forward: Action) -> list[Name]:
        """What a microbatch's backward reads that its forward has made, or was sent."""
        stage, _, i = forward
        variant = self._step.variants[i]
        code = self._step.cuts[variant].stages[stage]
        made = {ref for ref in code.forward.outputs if ref.role == Role.RESIDUAL}
        refs: dict[Ref, None] = {}
        for backward in code.backward.values():
            for ref, aval in zip(backward.then.inputs, backward.then.avals, strict=True):
                plain = not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
                if plain and (ref in made or ref.role == Role.ACTIVATION):
                    refs[ref] = None
        return [local_name(stage, ref, i, variant) for ref in refs]


def leave_out_needless(lines: Sequence[_Line]) -> tuple[list[_Line], dict[Name, Name]]:
    """Lines without the copies that free nothing, because another stage on the device reads the same value later.

    For the names of the copies left out there is the value itself, which stays where it is.
    """
    last = last_uses(lines)
    leaving = [(number, line) for number, line in enumerate(lines) if line.call == MemoryCopy.TO_HOST]
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
    """A line where some values stay; None if it has nothing left to copy."""
    if not line.copies:
        return replace(line, inputs=tuple(stays.get(name, name) for name in line.inputs))
    pairs = [pair for pair in zip(line.inputs, line.outputs, strict=True) if stays.keys().isdisjoint(pair)]
    inputs, outputs = zip(*pairs, strict=True) if pairs else ((), ())
    return replace(line, inputs=inputs, outputs=outputs) if pairs else None
