"""Lowering: a schedule and a cut loss become the lines of a plan.

A step is written in six passes by one ``Builder``:

1. *feed*: batch leaves, the key, and tied parameters go to the stages that read them;
2. *begin*: one program a stage for what it does once (``plan.stage_setup``);
3. *actions*: each action of the schedule, in the order of the unit clock, right after it the sends that it feeds, and before it
   those of model state that another stage keeps;
4. *unpack* and *tie*: small gradients become leaves again, those of tied parameters go home and are summed;
5. *total*: gradients, loss and aux are summed over the replicas, once;
6. *reduce*: aux values that were held for the end of the step are.

The optimizer's lines follow (``optim.place``).
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpp.plan.builder import CALLER, Builder, GroupMean, Name
from jaxpp.plan.model_state import Passing
from jaxpp.plan.stage_setup import add_stage_setup
from jaxpp.plan.step import Step, grad_name, local_name, param_name, scale_name, total_name
from jaxpp.schedule.action import Action, Kind
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.loss.aux import Reducer
from jaxpp.stages.loss.microbatch import Split, scale_dtype
from jaxpp.stages.packing import Pack
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array, Aval

__all__ = ["add_wait", "add_zero_gradients", "forward_actions", "lower"]


def forward_actions(num_stages: int, num_microbatches: int) -> list[Action]:
    """Forwards only, as a pipeline: microbatch i reaches stage s in slot i + s."""
    pairs = [(s, i) for s in range(num_stages) for i in range(num_microbatches)]
    return [Action(s, Kind.F, i) for s, i in sorted(pairs, key=lambda pair: (sum(pair), -pair[0]))]


def lower(step: Step, actions: Sequence[Action]) -> Builder:
    """Write the lines of one step up to its gradients.

    Returns:
        the lines; the model state after the step is on its owners, under the names that a further microbatch would read.
    """
    builder = Builder()
    _feed(builder, step)
    chosen, zeros = step.choose(actions)
    for stage in sorted(range(step.num_stages), key=lambda s: s != step.loss_stage):
        add_stage_setup(builder, step, stage, zeros[stage])
    passing = Passing(builder, step)
    for action, program in chosen:
        passing.supply(action, program)
        _act(builder, step, action, program)
        passing.note(action, program)
    _unpack(builder, step)
    _tie(builder, step)
    for stage in range(step.num_stages):
        _total(builder, step, stage)
    _reduce(builder, step)
    passing.go_home()
    return builder


def _feed(builder: Builder, step: Step) -> None:
    for stage in range(step.num_stages):
        given = [*map(step.batch_ref, step.read(stage, Role.BATCH)), *(Ref(Role.KEY, k) for k in step.read(stage, Role.KEY))]
        for ref in given:
            builder.send(f"send {ref.role} {ref.index} to stage {stage}", Name(CALLER, ref), Name(stage, ref))
        for k in step.read(stage, Role.LOSS_SCALE):
            builder.send(f"send loss scale to stage {stage}", scale_name(step.loss_stage, k), scale_name(stage, k))
        for leaf in step.read(stage, Role.PARAM):
            if step.owner[leaf] != stage:
                path = step.cuts[0].loss.param_paths[leaf]
                builder.send(f"send {path} to stage {stage}", param_name(step.owner[leaf], leaf), param_name(stage, leaf))


def _act(builder: Builder, step: Step, action: Action, program: Program) -> None:
    """Write one action and the sends it feeds."""
    stage, _, i = action
    variant = step.variants[i]
    cut = step.cuts[variant]
    label = str(action)
    inputs = [local_name(stage, ref, i, variant) for ref in program.inputs]
    outputs = [local_name(stage, ref, i + (ref.role == Role.STATE), variant) for ref in program.outputs]
    builder.compute(label, program, stage, inputs, outputs, action=action)
    for ref in program.outputs:
        if ref.role == Role.ACTIVATION:
            for peer in cut.consumers[ref.index]:
                builder.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), action)
        elif ref.role == Role.COTANGENT:
            peer = cut.producer[ref.index]
            builder.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), action)


def _unpack(builder: Builder, step: Step) -> None:
    """Gradients that were summed as one vector become leaves."""
    for stage in range(step.num_stages):
        packs = step.codes(stage)[0].packs
        if packs:
            program = step.once(("unpack", stage, packs), functools.partial(_unpacking, stage, packs))
            names_in = [Name(stage, ref) for ref in program.inputs]
            names_out = [Name(stage, ref) for ref in program.outputs]
            builder.compute(f"unpack stage {stage}", program, stage, names_in, names_out, ())


def _unpacking(stage: int, packs: Sequence[Pack]) -> Program:
    def unpack(*vectors: Array) -> list[Array]:
        return [value for pack, vector in zip(packs, vectors, strict=True) for value in pack.split(vector).values()]

    members = tuple(ref for pack in packs for ref in pack.members)
    refs, avals = zip(*((pack.ref, pack.aval) for pack in packs), strict=True)
    return Program(unpack, refs, members, avals, name=f"stage_{stage}_unpack")


def _tie(builder: Builder, step: Step) -> None:
    """Gradients of parameters used away from home go back, once, and are summed."""
    for home in range(step.num_stages):
        back: dict[int, list[Name]] = {}
        for stage in range(step.num_stages):
            for ref in step.accumulators(stage):
                if ref.role == Role.GRAD and ref.index >= 0 and stage != home and step.owner[ref.index] == home:
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


def _total(builder: Builder, step: Step, stage: int) -> None:
    """What the replicas of a stage have summed, each by itself, is summed: the one reduction over ``data`` of a step."""
    leaves = step.trained if step.trains else ()
    grads = [Ref(Role.GRAD, leaf) for leaf in leaves if step.owner[leaf] == stage]
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


def add_wait(builder: Builder, what: str, names: Sequence[Name]) -> None:
    """Wait until these values are there: a host callback that raises does so here, before anything is taken over or returned."""

    def wait(*values: Array) -> Sequence[Array]:
        return jax.block_until_ready(values)[:1]

    builder.call(f"the wait for host callbacks of {what}", wait, names[0].stage, names, names[:1])


def _zeros(avals: Sequence[Aval]) -> list[Array]:
    return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]


def _reduce(builder: Builder, step: Step) -> None:
    for stage in range(step.num_stages):
        forwards = [step.cuts[variant].stages[stage].forward for variant in step.variants]
        for ref in forwards[0].outputs:
            if ref.role != Role.ROWS:
                continue
            reducer, count = step.cuts[0].reducers[ref.index], len(step.sizes)
            names = [*(Name(stage, ref, i) for i in range(count)), *(Name(stage, Ref(Role.SCALE), i) for i in range(count))]
            avals = [forward.results[forward.outputs.index(ref)] for forward in forwards]
            avals += [jax.ShapeDtypeStruct((), scale_dtype())] * count

            def reduced(*args: Array, reducer: Reducer = reducer, count: int = count) -> list[Array]:
                return [reducer(args[:count], jnp.stack(args[count:]))]

            refs = tuple(Ref(role, ref.index, i) for role in (Role.ROWS, Role.SCALE) for i in range(count))
            output = total_name(stage, Role.AUX, ref.index)
            program = Program(reduced, refs, (output.ref,), shapes_of(avals), name=f"stage_{stage}_reduce_aux_{ref.index}")
            if step.num_replicas > 1:
                program = _across(program, step.num_replicas, step.split)
            builder.compute(f"reduce aux {ref.index}", program, stage, names, [output], ())


def _across(program: Program, num_replicas: int, split: Split) -> Program:
    """A reduction of the values and weights of a replica's microbatches as one of those of all replicas, in the batch's order."""
    count = len(split.sizes)
    pairs = [(r, i) for r in range(num_replicas) for i in range(count - (r >= num_replicas - split.num_idle))]

    def function(*args: Array) -> list[Array]:
        values, weights = ([parts[i][r] for r, i in pairs] for parts in (args[:count], args[count:]))
        return program.function(*values, *weights, count=len(values))

    avals = tuple(jax.ShapeDtypeStruct((num_replicas, *aval.shape), aval.dtype) for aval in program.avals)
    return replace(program, function=function, avals=avals, spans=True)
