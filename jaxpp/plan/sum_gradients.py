"""Gradients after the last backward: summed over the stages that share a parameter, and over the replicas.

Small gradients of a stage are summed as one vector. The update reads its part of the vector (``packed_sums``); a vector becomes
leaves only where something else reads them: a sum over stages or replicas, or the caller (``add_gradients``).
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpp.plan.builder import Builder, GroupMean, Name
from jaxpp.plan.step import Step, grad_name, total_name
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.packing import Pack
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array, Aval

__all__ = ["add_gradients", "add_replica_sums", "add_tied_sums", "add_unpacking", "add_zero_gradients", "packed_sums"]


def packed_sums(step: Step) -> dict[int, tuple[Name, Pack]]:
    """The gradients that stay parts of vectors after the last backward: for each leaf, its vector, and what is where in that."""
    found = {}
    for stage in range(step.num_stages):
        if _stays_packed(step, stage):
            found |= {ref.index: (Name(stage, pack.ref), pack) for pack in step.codes(stage)[0].packs for ref in pack.members}
    return found


def _stays_packed(step: Step, stage: int) -> bool:
    """Whether nothing between the last backward and the update reads a packed gradient of the stage."""
    members = {ref for pack in step.codes(stage)[0].packs for ref in pack.members}
    return step.num_replicas == 1 and members.isdisjoint(ref for _, ref in _coming_home(step, stage))


def _coming_home(step: Step, home: int) -> list[tuple[int, Ref]]:
    """The gradients that other stages sum for the parameters of a stage, and these stages."""
    return [(stage, ref) for stage, ref in step.away if step.owner[ref.index] == home]


def add_unpacking(builder: Builder, step: Step) -> None:
    """Gradients that were summed as one vector become leaves, on the stages where they are read before the update."""
    for stage in range(step.num_stages):
        if not _stays_packed(step, stage):
            _unpack(builder, step, stage, grad_name)


def add_gradients(builder: Builder, step: Step) -> None:
    """The gradients of all leaves for the caller: those that stayed parts of vectors as leaves, and zeros of what has none."""
    for stage in range(step.num_stages):
        if _stays_packed(step, stage):
            _unpack(builder, step, stage, lambda stage, leaf: total_name(stage, Role.GRAD, leaf))
    add_zero_gradients(builder, step, range(len(step.owner)))


def _unpack(builder: Builder, step: Step, stage: int, called: Callable[[int, int], Name]) -> None:
    packs = step.codes(stage)[0].packs
    if packs:
        program = step.once(("unpack", stage, packs), functools.partial(_unpacking, stage, packs))
        names_in = [Name(stage, ref) for ref in program.inputs]
        names_out = [called(stage, ref.index) for ref in program.outputs]
        builder.compute(f"unpack stage {stage}", program, stage, names_in, names_out, ())


def _unpacking(stage: int, packs: Sequence[Pack]) -> Program:
    def unpack(*vectors: Array) -> list[Array]:
        return [value for pack, vector in zip(packs, vectors, strict=True) for value in pack.split(vector).values()]

    members = tuple(ref for pack in packs for ref in pack.members)
    refs, avals = zip(*((pack.ref, pack.aval) for pack in packs), strict=True)
    return Program(unpack, refs, members, avals, name=f"stage_{stage}_unpack")


def add_tied_sums(builder: Builder, step: Step) -> None:
    """Gradients of parameters used away from home go back, once, and are summed."""
    for home in range(step.num_stages):
        back: dict[int, list[Name]] = {}
        for stage, ref in _coming_home(step, home):
            target = Name(home, Ref(Role.GRAD, ref.index, stage))
            path = step.cuts[0].loss.param_paths[ref.index]
            builder.send(f"send grad of {path} to stage {home}", Name(stage, ref), target)
            back.setdefault(ref.index, [grad_name(home, ref.index)]).append(target)
        if back:
            _sum(builder, step, home, list(back.values()))


def _sum(builder: Builder, step: Step, stage: int, groups: list[list[Name]]) -> None:
    names = [name for group in groups for name in group]
    avals = [step.params[name.ref.index] for name in names]

    def tie(*args: Array) -> list[Array]:
        supply = iter(args)
        return [functools.reduce(operator.add, [next(supply) for _ in group]) for group in groups]

    totals = [group[0] for group in groups]
    refs = tuple(n.ref for n in names), tuple(n.ref for n in totals)
    program = step.once(("tie", refs), lambda: Program(tie, *refs, shapes_of(avals), name=f"stage_{stage}_tie"))
    donated = tuple(k for k, name in enumerate(names) if name in totals)
    builder.compute(f"tie stage {stage}", program, stage, names, totals, donated)


def add_replica_sums(builder: Builder, step: Step, stage: int) -> None:
    """What the replicas of a stage have summed, each by itself, is summed: the one reduction over ``data`` of a step."""
    leaves = step.trained if step.trains else ()
    grads = [Ref(Role.GRAD, leaf) for leaf in leaves if step.owner[leaf] == stage]
    if _stays_packed(step, stage):
        grads = [ref for ref in grads if ref not in step.packed]
    own = [ref for ref in grads if (Role.GRAD, ref.index) in step.own]
    _mean_of_own(builder, step, stage, own)
    found = [(ref, step.params[ref.index]) for ref in grads if ref not in own]
    if stage == step.loss_stage:
        forward = step.codes(stage)[0].forward
        totals = zip(forward.outputs, forward.results, strict=True)
        found += [(ref, aval) for ref, aval in totals if ref.role in (Role.LOSS, Role.AUX)]
    refs = [ref for ref, _ in found]
    names = [Name(stage, ref) for ref in refs], [total_name(stage, ref.role, ref.index) for ref in refs]
    if step.num_replicas == 1:
        for source, target in zip(*names, strict=True):
            builder.send(f"rename {source.ref.role} {source.ref.index} of stage {stage}", source, target)
    elif found:
        count = step.num_replicas
        avals = tuple(jax.ShapeDtypeStruct((count, *aval.shape), aval.dtype) for _, aval in found)
        outputs = tuple(name.ref for name in names[1])
        make = functools.partial(Program, _sum_replicas, tuple(refs), outputs, avals, spans=True)
        program = step.once(("total", tuple(refs), avals), make)
        builder.compute(f"total stage {stage}", program, stage, *names, ())


def _mean_of_own(builder: Builder, step: Step, stage: int, refs: Sequence[Ref]) -> None:
    """The gradients of parameters of which each replica has its own, each over the replicas with the same."""
    if refs:
        scales = [] if step.weigh is None else [Name(stage, Ref(Role.SCALE), i) for i in range(len(step.sizes))]
        mean = GroupMean(tuple(step.params[ref.index] for ref in refs))
        totals = [total_name(stage, Role.GRAD, ref.index) for ref in refs]
        builder.call(f"total of tasks stage {stage}", mean, stage, [*(Name(stage, ref) for ref in refs), *scales], totals)


def _sum_replicas(*values: Array) -> list[Array]:
    """Sums over the first axis, in the type of the values: an all-reduce where that is sharded."""
    return [jax.lax.reduce(value, jnp.zeros((), value.dtype), jax.lax.add, (0,)) for value in values]


def add_zero_gradients(builder: Builder, step: Step, wanted: Sequence[int]) -> None:
    """The gradients of those of the leaves that have none: zeros, on their owners."""
    missing = [leaf for leaf in wanted if leaf not in step.trained and Ref(Role.GRAD, leaf) not in step.packed]
    for stage in range(step.num_stages):
        names = [total_name(stage, Role.GRAD, leaf) for leaf in missing if step.owner[leaf] == stage]
        avals = [step.params[name.ref.index] for name in names]
        if names:
            zeros, refs = functools.partial(_zeros, avals), tuple(n.ref for n in names)
            program = step.once(("zeros", refs), functools.partial(Program, zeros, (), refs, ()))
            builder.compute(f"zeros stage {stage}", program, stage, [], names, ())


def _zeros(avals: Sequence[Aval]) -> list[Array]:
    return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
