"""A generation looked at: the memory that it will take, and how its passes ran.

What stays is counted once: the parameters, what is computed from them alone, the carries of all groups, and the empty carry from
which new ones are copied. On top of that comes one pass at a time, of a chunk of a prompt or of a group: values on their way,
tokens, and the temporaries of the compiled programs. A prompt is prefilled in a carry of its own, beside those of the groups.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpp.engine.engine import Engine
from jaxpp.forward.ring import AHEAD, CompiledPass, Passes, Ring
from jaxpp.observe.memory.forecast import Change, Forecast, forecast_of, optimizer_lives
from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.memory.liveness import Life, Liveness, line_liveness
from jaxpp.observe.profile.record import RingPass, Work, join_liveness, join_plans, schedule_of
from jaxpp.plan.builder import CALLER, Name
from jaxpp.runtime.execute import Observer
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Role
from jaxpp.types import Aval, Device, Tree

__all__ = ["RingRuns", "forecast_ring"]

_TRIED = "fewer groups; smaller groups and shorter carries hold less, too"


def forecast_ring(
    base: Engine,
    alone: Passes,
    together: Passes,
    sizes: Sequence[int],
    *,
    num_groups: int,
    group_size: int,
    room: int | None,
) -> Forecast:
    """The memory of a generation: what each stage holds when its device holds most.

    Args:
        base: whose parameters are used; its optimizer's state, if it has one, stays where it is.
        alone: the passes of one sequence, compiled for shapes.
        together: those of a group.
        sizes: how many tokens a pass of a prompt may take.
        num_groups: groups in flight.
        group_size: sequences in a group.
        room: bytes that each device has, if that is known.
    """

    def with_groups(count: int) -> Forecast:
        waiting = count - (group_size == 1)  # the place of one sequence is empty when the next is prefilled
        kinds = [_PassKind(f"{size} of a prompt", alone, _prompt_aval(size), waiting) for size in sizes]
        kinds.append(_PassKind("a group", together, _group_aval(group_size), count - 1))
        liveness = _ring_liveness(kinds, alone, together, AHEAD * count)
        more = [] if base.optimizer is None else optimizer_lives(base, len(liveness.lines) + 1)
        return forecast_of(dataclasses.replace(liveness, lives=(*liveness.lives, *more)), base.placement, room)

    forecast, num_ranks = with_groups(num_groups), base.options.schedule.num_ranks
    changes: list[Change] = []
    for count in () if forecast.fits else range(num_groups - 1, 0, -1):
        fewer = with_groups(count)
        if fewer.fits:
            slowdown = (max(count, num_ranks) / count) / (max(num_groups, num_ranks) / num_groups)
            changes.append(Change(f"num_groups={count}", max(fewer.peaks.values()), slowdown))
            break
    return dataclasses.replace(forecast, changes=tuple(changes), tried=_TRIED)


class RingRuns(Work):
    """Generations of the same prompts, run again and again up to a number of passes, as what is profiled.

    Args:
        ring: what they run.
        generate: begins a generation whose passes the observer sees, goes to its end, and returns the passes that were begun.
    """

    def __init__(self, ring: Ring, generate: Callable[[Observer | None], Sequence[RingPass]]):
        self.engine, self._ring, self._generate = ring.alone.engine, ring, generate
        self.passes = generate(None)
        awaits = {number: begun.awaits for number, begun in enumerate(self.passes) if begun.awaits >= 0}
        plans = [kind.passes.prepare(kind.batch).plan for kind in self._kinds()]
        self.plan = join_plans(plans, range(len(plans)), awaits)
        self.schedule = schedule_of(self.plan, self.engine.options.schedule.stage_to_rank, "ring")

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Generate once; all tokens are read, so there is nothing left to wait for."""
        del watched
        self._generate(observer)
        return ()

    def watched_plan(self) -> None:
        """The passes are compiled for a generation, which asks none of them whether it is done."""

    def ledger(self) -> Ledger:
        """What memory holds, from shapes."""
        ring = self._ring
        return Ledger(_ring_liveness(self._kinds(), ring.alone, ring.together, AHEAD * ring.num_groups), (), {})

    def _kinds(self) -> list["_PassKind"]:
        """Each pass, and how many carries wait meanwhile."""
        ring, kinds, holding = self._ring, list[_PassKind](), set[int]()
        for begun in self.passes:
            beside = begun.is_prompt and ring.group_size > 1  # it runs on a carry beside that of its group
            waiting = len(holding if beside else holding - {begun.group})
            passes, batch = ring.together, _group_aval(ring.group_size)
            if begun.is_prompt:
                passes, batch = ring.alone, _prompt_aval(begun.num_tokens)
            kinds.append(_PassKind(f"group {begun.group}", passes, batch, waiting))
            holding.add(begun.group)
        return kinds


class _PassKind(NamedTuple):
    """A kind of pass: what it is called, which passes run it, on what, and how many groups' carries wait meanwhile."""

    what: str
    passes: Passes
    batch: Aval
    waiting: int


def _prompt_aval(size: int) -> Aval:
    return jax.ShapeDtypeStruct((1, size), np.int32)


def _group_aval(group_size: int) -> Aval:
    return jax.ShapeDtypeStruct((group_size, 1, 1) if group_size > 1 else (1, 1), np.int32)


def _ring_liveness(kinds: Sequence[_PassKind], alone: Passes, together: Passes, num_unread: int) -> Liveness:
    """What is alive while passes run one after another, the last of them of a group, and so many have tokens still to be read."""
    parts: list[Liveness] = []
    stay: dict[Hashable, Life] = {}
    by_pass: dict[int, Liveness] = {}
    for kind in kinds:
        compiled = kind.passes.prepare(kind.batch)
        if id(compiled) not in by_pass:
            sizes, programs = _argument_bytes(kind.passes, compiled), kind.passes.engine.programs
            by_pass[id(compiled)] = line_liveness(compiled.bound, sizes, compiled.outputs, None, programs)
        part = by_pass[id(compiled)]
        count = len(part.lines)
        shared = {name: id(value) for name, value in zip(compiled.inputs, compiled.lasting, strict=False)}
        lives = [life._replace(begins=1, ends=count, donated=True) for life in _carries(together, kind.waiting)]
        for life in part.lives:
            is_carry = life.name.ref.role == Role.STATE
            if life.name in shared:
                stay[shared[life.name]] = life
            elif life.begins == 0 and life.ends > count and not is_carry:
                stay[id(compiled), life.name] = life  # a constant of this pass
            else:
                begins, ends = max(life.begins, 1), min(life.ends, count)
                donated = life.donated or (life.ends > count and is_carry)
                lives.append(life._replace(kind="carries" if is_carry else life.kind, begins=begins, ends=ends, donated=donated))
        lines = tuple(dataclasses.replace(line, label=f"{line.label}, {kind.what}") for line in part.lines)
        parts.append(dataclasses.replace(part, lines=lines, lives=tuple(lives)))
    whole = join_liveness(parts)
    tokens = _tokens(together, together.prepare(kinds[-1].batch), num_unread)
    lasting = (life._replace(begins=0, ends=len(whole.lines) + 1) for life in (*stay.values(), *_carries(alone, 1), *tokens))
    return dataclasses.replace(whole, lives=(*whole.lives, *lasting))


def _argument_bytes(passes: Passes, compiled: CompiledPass) -> dict[Name, int]:
    placed, placement = passes.engine.placed, passes.engine.placement
    avals = [*compiled.lasting, *placed.shapes.model_state, *compiled.step.batch]
    return {
        name: count_bytes(aval)
        if name.stage == CALLER
        else placement[name.stage].num_bytes(name.ref, aval, getattr(aval, "sharding", None))
        for name, aval in zip(compiled.inputs, avals, strict=True)
    }


def _carries(passes: Passes, count: int) -> Iterator[Life]:
    """So many carries of these passes."""
    placed, placement = passes.engine.placed, passes.engine.placement
    for name, aval in zip(placed.names.model_state, placed.shapes.model_state, strict=True):
        place = placement[name.stage]
        yield from [Life(name, place.shown, place.num_bytes(name.ref, aval), "carries", 0, 0)] * count


def _tokens(passes: Passes, compiled: CompiledPass, count: int) -> Iterator[Life]:
    """What so many passes have made and nobody has read yet."""
    results: Mapping[Name, tuple[Device, int]] = {
        name: (line.device, passes.engine.placement[name.stage].num_bytes(name.ref, aval))
        for line in compiled.bound.lines
        if line.program is not None
        for name, aval in zip(line.outputs, line.program.results, strict=True)
    }
    for name in map(compiled.bound.resolve, compiled.outputs):
        if name.ref.role != Role.STATE and name in results:
            yield from [Life(name, *results[name], "outputs", 0, 0)] * count
