"""The memory of a generation before it runs: what each stage holds while the groups go round.

What stays is counted once: the parameters, what is computed from them alone, the carries of all groups, and the empty carry from
which new ones are copied. On top of that comes one pass at a time, of a chunk of a prompt or of a group: values on their way,
tokens, and the temporaries of the compiled programs. A prompt is prefilled in a carry of its own, beside those of the groups.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpp.engine.engine import Engine
from jaxpp.forward.passes import CompiledPass, Passes
from jaxpp.forward.ring import AHEAD
from jaxpp.observe.memory.forecast import Change, Forecast, forecast_of, optimizer_lives
from jaxpp.observe.memory.liveness import Life, Liveness, line_liveness
from jaxpp.plan.builder import CALLER, Name
from jaxpp.runtime.bind import BoundLine
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Role
from jaxpp.types import Aval, Device, Leaf

__all__ = ["PassKind", "forecast_ring", "group_aval", "prompt_aval", "ring_liveness"]

_TRIED = "fewer groups; smaller groups and shorter carries hold less, too"


class PassKind(NamedTuple):
    """A kind of pass: what it is called, which passes run it, on what, and how many groups' carries wait meanwhile."""

    what: str
    passes: Passes
    batch: Aval
    waiting: int


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
        liveness = ring_liveness(_kinds(alone, together, sizes, count, group_size), alone, together, AHEAD * count)
        more = [] if base.optimizer is None else optimizer_lives(base, len(liveness.lines) + 1)
        return forecast_of(dataclasses.replace(liveness, lives=(*liveness.lives, *more)), base.placement, room)

    found, num_ranks = with_groups(num_groups), base.options.schedule.num_ranks
    changes: list[Change] = []
    for count in () if found.fits else range(num_groups - 1, 0, -1):
        fewer = with_groups(count)
        if fewer.fits:
            slowdown = (max(count, num_ranks) / count) / (max(num_groups, num_ranks) / num_groups)
            changes.append(Change(f"num_groups={count}", max(fewer.peaks.values()), slowdown))
            break
    return dataclasses.replace(found, changes=tuple(changes), tried=_TRIED)


def _kinds(alone: Passes, together: Passes, sizes: Sequence[int], num_groups: int, group_size: int) -> list[PassKind]:
    """Every kind of pass, while all groups have their carries."""
    waiting = num_groups - (group_size == 1)  # the place of one sequence is empty when the next is prefilled
    prompts = [PassKind(f"{size} of a prompt", alone, prompt_aval(size), waiting) for size in sizes]
    return [*prompts, PassKind("a group", together, group_aval(group_size), num_groups - 1)]


def prompt_aval(size: int) -> Aval:
    """What a pass takes of a prompt."""
    return jax.ShapeDtypeStruct((1, size), np.int32)


def group_aval(group_size: int) -> Aval:
    """What the pass of a group takes."""
    return jax.ShapeDtypeStruct((group_size, 1, 1) if group_size > 1 else (1, 1), np.int32)


def ring_liveness(kinds: Sequence[PassKind], alone: Passes, together: Passes, num_reads: int) -> Liveness:
    """What is alive while these passes run one after another.

    Args:
        kinds: the passes in order, the last of them of a group.
        alone: the passes of one sequence.
        together: the passes of a group.
        num_reads: how many passes were begun whose tokens nobody has read yet.
    """
    lines: list[BoundLine] = []
    lives: list[Life] = []
    extra: list[int] = []
    stays: dict[Hashable, Life] = {}
    known: dict[int, Liveness] = {}
    for kind in kinds:
        made, values = kind.passes.prepare(kind.batch)
        if id(made) not in known:
            given, programs = _given(kind.passes, made, values), kind.passes.engine.programs
            known[id(made)] = line_liveness(made.bound, given, made.outputs, None, programs)
        found = known[id(made)]
        first, count = len(lines), len(found.lines)
        shared = {name: id(value) for name, value in zip(made.inputs, values, strict=False)}
        for life in found.lives:
            if life.name in shared:
                stays[shared[life.name]] = life
            elif life.begins == 0 and life.ends > count and life.name.ref.role != Role.STATE:
                stays[id(made), life.name] = life  # a constant of this pass
            else:
                begins, ends = first + max(life.begins, 1), first + min(life.ends, count)
                goes_on = life.donated or (life.ends > count and life.name.ref.role == Role.STATE)
                lives.append(_carried(life)._replace(begins=begins, ends=ends, donated=goes_on))
        lines += [dataclasses.replace(line, label=f"{line.label}, {kind.what}") for line in found.lines]
        extra += found.temporaries
        waiting = _carries(together, kind.waiting)
        lives += [life._replace(begins=first + 1, ends=first + count, donated=True) for life in waiting]
    end, (made, _) = len(lines) + 1, together.prepare(kinds[-1].batch)
    stay = [*stays.values(), *_carries(alone, 1), *_tokens(together, made, num_reads)]
    lives += [life._replace(begins=0, ends=end) for life in stay]
    devices = tuple(dict.fromkeys(alone.engine.placement.ranks_shown))
    return Liveness(devices, tuple(lines), tuple(lives), tuple(extra))


def _given(passes: Passes, made: CompiledPass, values: Sequence[Leaf]) -> dict[Name, int]:
    """Bytes of the arguments of a pass, of which the first are the values that all passes share."""
    placed, placement = passes.engine.placed, passes.engine.placement
    avals = dict(zip(made.inputs, [*values, *placed.shapes.model_state, *made.step.batch], strict=True))
    return {
        name: count_bytes(avals[name])
        if name.stage == CALLER
        else placement[name.stage].num_bytes(name.ref, avals[name], getattr(avals[name], "sharding", None))
        for name in made.inputs
    }


def _carried(life: Life) -> Life:
    return life._replace(kind="carries") if life.name.ref.role == Role.STATE else life


def _carries(passes: Passes, count: int) -> Iterator[Life]:
    """So many carries of these passes."""
    placed, placement = passes.engine.placed, passes.engine.placement
    for name, aval in zip(placed.names.model_state, placed.shapes.model_state, strict=True):
        place = placement[name.stage]
        for _ in range(count):
            yield Life(name, place.shown, place.num_bytes(name.ref, aval), "carries", 0, 0)


def _tokens(passes: Passes, made: CompiledPass, count: int) -> Iterator[Life]:
    """What so many passes have made and nobody has read yet."""
    results: Mapping[Name, tuple[Device, int]] = {
        name: (line.device, passes.engine.placement[name.stage].num_bytes(name.ref, aval))
        for line in made.bound.lines
        if line.program is not None
        for name, aval in zip(line.outputs, line.program.results, strict=True)
    }
    for name in map(made.bound.resolve, made.outputs):
        if name.ref.role != Role.STATE and name in results:
            device, size = results[name]
            for _ in range(count):
                yield Life(name, device, size, "outputs", 0, 0)
