"""Lowering: a schedule and a cut loss become the lines of a plan.

A step is written in six passes over one ``Draft``:

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
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.plan.builder import HOST, Draft, Name
from jaxpp.plan.model_state import Passing
from jaxpp.plan.stage_setup import draft_begin
from jaxpp.plan.step import Job, grad_name, local_name, param_name, scale_name, state_name, total_name
from jaxpp.schedule.action import Action, Kind
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.loss.microbatch import Split, scale_dtype
from jaxpp.stages.packing import Pack
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["draft_wait", "draft_zeros", "forward_actions", "lower"]


def forward_actions(num_stages: int, num_microbatches: int) -> list[Action]:
    """Forwards only, as a pipeline: microbatch i reaches stage s in slot i + s."""
    pairs = [(s, i) for s in range(num_stages) for i in range(num_microbatches)]
    return [Action(s, Kind.F, i) for s, i in sorted(pairs, key=lambda pair: (sum(pair), -pair[0]))]


def lower(job: Job, actions: Sequence[Action]) -> Draft:
    """Write the lines of one step up to its gradients.

    Args:
        job: what to run.
        actions: in dispatch order.

    Returns:
        the draft; the model state after the step is on its owners, under the names that a further microbatch would read.
    """
    draft = Draft()
    draft.homes.update({param_name(stage, leaf): job.placement[stage] for leaf, stage in enumerate(job.owner)})
    draft.homes.update({state_name(stage, leaf): job.placement[stage] for leaf, stage in enumerate(job.state_owner)})
    draft.homes.update({scale_name(job.loss_stage, k): job.placement[job.loss_stage] for k in range(2)})
    _feed(draft, job)
    chosen, zeros = job.choose(actions)
    for stage in sorted(range(job.num_stages), key=lambda s: s != job.loss_stage):
        draft_begin(draft, job, stage, zeros[stage])
    passing = Passing(draft, job)
    for action, program in chosen:
        passing.supply(action, program)
        _act(draft, job, action, program)
        passing.note(action, program)
    _unpack(draft, job)
    _tie(draft, job)
    for stage in range(job.num_stages):
        _total(draft, job, stage)
    _reduce(draft, job)
    passing.go_home()
    return draft


def _feed(draft: Draft, job: Job) -> None:
    sent: dict[Any, Name] = {}

    def feed(label: str, source: Name, target: Name) -> None:
        device = job.placement[target.stage]
        draft.send(label, sent.get((source, device), source), target, device)
        sent.setdefault((source, device), target)

    for stage in range(job.num_stages):
        given = [*map(job.batch_ref, job.read(stage, Role.BATCH)), *(Ref(Role.KEY, k) for k in job.read(stage, Role.KEY))]
        for ref in given:
            feed(f"send {ref.role} {ref.index} to stage {stage}", Name(HOST, ref), Name(stage, ref))
        for k in job.read(stage, Role.LOSS_SCALE):
            feed(f"send loss scale to stage {stage}", scale_name(job.loss_stage, k), scale_name(stage, k))
        for leaf in job.read(stage, Role.PARAM):
            if job.owner[leaf] != stage:
                path = job.cuts[0].loss.param_paths[leaf]
                feed(f"send {path} to stage {stage}", param_name(job.owner[leaf], leaf), param_name(stage, leaf))


def _act(draft: Draft, job: Job, action: Action, program: Program) -> None:
    """Write one action and the sends it feeds."""
    stage, _, i = action
    variant = job.variants[i]
    cut = job.cuts[variant]
    label = str(action)
    inputs = [local_name(stage, ref, i, variant) for ref in program.inputs]
    outputs = [local_name(stage, ref, i + (ref.role == Role.STATE), variant) for ref in program.outputs]
    draft.compute(label, program, job.placement[stage], inputs, outputs, action=action)
    for ref in program.outputs:
        if ref.role == Role.ACTIVATION:
            for peer in cut.consumers[ref.index]:
                draft.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), job.placement[peer], action)
        elif ref.role == Role.COTANGENT:
            peer = cut.producer[ref.index]
            draft.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), job.placement[peer], action)


def _unpack(draft: Draft, job: Job) -> None:
    """Gradients that were summed as one vector become leaves."""
    for stage in range(job.num_stages):
        packs = job.codes(stage)[0].packs
        if packs:
            program = job.once(("unpack", stage, packs), functools.partial(_unpacking, stage, packs))
            names_in = [Name(stage, ref) for ref in program.inputs]
            names_out = [Name(stage, ref) for ref in program.outputs]
            draft.compute(f"unpack stage {stage}", program, job.placement[stage], names_in, names_out, ())


def _unpacking(stage: int, packs: Sequence[Pack]) -> Program:
    def unpack(*vectors: Any) -> list[Any]:
        return [value for pack, vector in zip(packs, vectors, strict=True) for value in pack.split(vector).values()]

    members = tuple(ref for pack in packs for ref in pack.members)
    refs, avals = zip(*((pack.ref, pack.aval) for pack in packs), strict=True)
    return Program(unpack, refs, members, avals, name=f"stage_{stage}_unpack")


def _tie(draft: Draft, job: Job) -> None:
    """Gradients of parameters used away from home go back, once, and are summed."""
    for home in range(job.num_stages):
        back: dict[int, list[Name]] = {}
        for stage in range(job.num_stages):
            for ref in job.accumulators(stage):
                if ref.role == Role.GRAD and ref.index >= 0 and stage != home and job.owner[ref.index] == home:
                    target = Name(home, Ref(Role.GRAD, ref.index, stage))
                    path = job.cuts[0].loss.param_paths[ref.index]
                    draft.send(f"send grad of {path} to stage {home}", Name(stage, ref), target, job.placement[home])
                    back.setdefault(ref.index, [grad_name(home, ref.index)]).append(target)
        if back:
            _sum(draft, job, home, list(back.values()))


def _sum(draft: Draft, job: Job, stage: int, groups: list[list[Name]]) -> None:
    names = [name for group in groups for name in group]
    avals = [job.params[name.ref.index] for name in names]

    def tie(*args: Any) -> list[Any]:
        supply = iter(args)
        return [functools.reduce(operator.add, [next(supply) for _ in group]) for group in groups]

    totals = [group[0] for group in groups]
    refs = tuple(n.ref for n in names), tuple(n.ref for n in totals)
    program = job.once(("tie", refs), lambda: Program(tie, *refs, shapes_of(avals), name=f"stage_{stage}_tie"))
    donated = tuple(k for k, name in enumerate(names) if name in totals)
    draft.compute(f"tie stage {stage}", program, job.placement[stage], names, totals, donated)


def _total(draft: Draft, job: Job, stage: int) -> None:
    """What the replicas of a stage have summed, each by itself, is summed: the one reduction over ``data`` of a step."""
    leaves = job.trained if job.trains else ()
    grads = [Ref(Role.GRAD, leaf) for leaf in leaves if job.owner[leaf] == stage]
    place = job.placement[stage]
    own = [ref for ref in grads if place.per_replica(total_name(stage, Role.GRAD, ref.index).ref)]
    _total_of_tasks(draft, job, stage, own)
    found = [(ref, job.params[ref.index]) for ref in grads if ref not in own]
    if stage == job.loss_stage:
        forward = job.codes(stage)[0].forward
        totals = zip(forward.outputs, forward.results, strict=True)
        found += [(ref, aval) for ref, aval in totals if ref.role in (Role.LOSS, Role.AUX)]
    refs = [ref for ref, _ in found]
    names = [Name(stage, ref) for ref in refs], [total_name(stage, ref.role, ref.index) for ref in refs]
    if job.placement.num_replicas == 1:
        for source, target in zip(*names, strict=True):
            draft.send("", source, target, place)  # another name for it
    elif found:
        count = job.placement.num_replicas
        avals = tuple(jax.ShapeDtypeStruct((count, *aval.shape), aval.dtype) for _, aval in found)
        outputs = tuple(name.ref for name in names[1])
        make = functools.partial(Program, _sum_replicas, tuple(refs), outputs, avals, spans=True)
        program = job.once(("total", tuple(refs), avals), make)
        draft.compute(f"total stage {stage}", program, place, *names, ())


def _total_of_tasks(draft: Draft, job: Job, stage: int, refs: Sequence[Ref]) -> None:
    """The gradients of tasks, each over the replicas that ran it."""
    place = job.placement[stage]
    if not refs:
        return
    scales = [] if job.weigh is None else [Name(stage, Ref(Role.SCALE), i) for i in range(len(job.sizes))]
    avals = [job.params[ref.index] for ref in refs]
    mean = job.groups.mean([place.sharding(ref) for ref in (*refs, *(name.ref for name in scales))], avals)
    totals = [total_name(stage, Role.GRAD, ref.index) for ref in refs]
    draft.call(f"total of tasks stage {stage}", mean, place, [*(Name(stage, ref) for ref in refs), *scales], totals)


def _sum_replicas(*values: Any) -> list[Any]:
    """Sums over the first axis, in the type of the values: an all-reduce where that is sharded."""
    return [jax.lax.reduce(value, jnp.zeros((), value.dtype), jax.lax.add, (0,)) for value in values]


def draft_zeros(draft: Draft, job: Job, wanted: Sequence[int]) -> None:
    """The gradients of those of the leaves that have none: zeros, on their owners."""
    missing = [leaf for leaf in wanted if leaf not in job.trained and Ref(Role.GRAD, leaf) not in job.packed]
    for stage in range(job.num_stages):
        names = [total_name(stage, Role.GRAD, leaf) for leaf in missing if job.owner[leaf] == stage]
        avals = [job.params[name.ref.index] for name in names]
        if names:
            zeros, refs = functools.partial(_zeros, avals), tuple(n.ref for n in names)
            program = job.once(("zeros", refs), functools.partial(Program, zeros, (), refs, ()))
            draft.compute(f"zeros stage {stage}", program, job.placement[stage], [], names, ())


def draft_wait(draft: Draft, what: str, names: Sequence[Name]) -> None:
    """Wait until these values are there: a host callback that raises does so here, before anything is taken over or returned."""

    def wait(*values: Any) -> list[Any]:
        return jax.block_until_ready(values)[:1]

    draft.call(f"the wait for host callbacks of {what}", wait, draft.homes[draft.resolve(names[0])], names, names[:1])


def _zeros(avals: Sequence[Any]) -> list[Any]:
    return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]


def _reduce(draft: Draft, job: Job) -> None:
    for stage in range(job.num_stages):
        forwards = [job.cuts[variant].stages[stage].forward for variant in job.variants]
        for ref in forwards[0].outputs:
            if ref.role != Role.ROWS:
                continue
            reducer, count = job.cuts[0].reducers[ref.index], len(job.sizes)
            names = [*(Name(stage, ref, i) for i in range(count)), *(Name(stage, Ref(Role.SCALE), i) for i in range(count))]
            avals = [forward.results[forward.outputs.index(ref)] for forward in forwards]
            avals += [jax.ShapeDtypeStruct((), scale_dtype())] * count

            def reduced(*args: Any, reducer: Any = reducer, count: int = count) -> list[Any]:
                return [reducer(args[:count], jnp.stack(args[count:]))]

            refs = tuple(Ref(role, ref.index, i) for role in (Role.ROWS, Role.SCALE) for i in range(count))
            output = total_name(stage, Role.AUX, ref.index)
            program = Program(reduced, refs, (output.ref,), shapes_of(avals), name=f"stage_{stage}_reduce_aux_{ref.index}")
            if job.placement.num_replicas > 1:
                program = _across(program, job.placement.num_replicas, job.split)
            draft.compute(f"reduce aux {ref.index}", program, job.placement[stage], names, [output], ())


def _across(program: Program, num_replicas: int, split: Split) -> Program:
    """A reduction of the values and weights of a replica's microbatches as one of those of all replicas, in the batch's order."""
    count = len(split.sizes)
    pairs = [(r, i) for r in range(num_replicas) for i in range(count - (r >= num_replicas - split.num_idle))]

    def function(*args: Any) -> list[Any]:
        values, weights = ([parts[i][r] for r, i in pairs] for parts in (args[:count], args[count:]))
        return program.function(*values, *weights, count=len(values))

    avals = tuple(jax.ShapeDtypeStruct((num_replicas, *aval.shape), aval.dtype) for aval in program.avals)
    return replace(program, function=function, avals=avals, spans=True)
