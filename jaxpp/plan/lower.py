"""Lowering: a schedule and a cut loss become the lines of a plan.

A step is written in five passes by one ``Builder``:

1. *feed*: batch leaves, the key, and tied parameters go to the stages that read them;
2. *begin*: one program a stage for what it does once (``plan.stage_setup``);
3. *actions*: each action of the schedule, in the order of the unit clock, right after it the sends that it feeds, and before it
   those of model state that another stage keeps; around them the copies of residuals that wait in host memory (``plan.offload``);
4. *sums* (``plan.sum_gradients``): small gradients become leaves where one is read, tied ones go home and are summed, and
   gradients, loss and aux are summed over the replicas, once;
5. *reduce*: aux values that were held for the end of the step are reduced.

The optimizer's lines follow (``optim.emit``).
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxpp.plan.builder import CALLER, Builder, Name
from jaxpp.plan.model_state import Passing
from jaxpp.plan.offload import Offloading
from jaxpp.plan.stage_setup import add_stage_setup
from jaxpp.plan.step import Step, local_name, param_name, scale_name, total_name
from jaxpp.plan.sum_gradients import add_replica_sums, add_tied_sums, add_unpacking
from jaxpp.schedule.action import Action
from jaxpp.schedule.forward import forward
from jaxpp.schedule.offload import Offloaded
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.loss.aux import REDUCERS, Reducer, join
from jaxpp.stages.loss.microbatch import Split, scale_dtype
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array

__all__ = ["add_wait", "forward_actions", "lower"]


def forward_actions(num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """The order without backwards, each stage as on a rank of its own: microbatch i reaches stage s in slot i + s."""
    return forward(num_stages, num_microbatches).order


def lower(step: Step, actions: Sequence[Action], lasting: Builder | None = None, *, offloaded: Sequence[Offloaded] = ()) -> Builder:
    """Write the lines of one step up to its gradients.

    Args:
        step: what is lowered.
        actions: in the order in which they are dispatched.
        lasting: takes the lines that depend on parameters alone, for steps that run again and again with the same parameters.
        offloaded: the stages and microbatches whose residuals wait in host memory.

    Returns:
        the lines; the model state after the step is on its owners, under the names that a further microbatch would read.
    """
    builder = Builder()
    _feed(builder, lasting or builder, step)
    chosen, zeros = step.choose(actions)
    for stage in sorted(range(step.num_stages), key=lambda s: s != step.loss_stage):
        add_stage_setup(builder, step, stage, zeros[stage], lasting)
    passing, offloading, programs = Passing(builder, step), Offloading(builder, step, offloaded), dict(chosen)
    for action in actions:
        offloading.bring_back(action)
        if (program := programs.get(action)) is not None:
            passing.supply(action, program)
            _act(builder, step, action, program, offloading)
            passing.note(action, program)
        offloading.take_out(action)
    add_unpacking(builder, step)
    add_tied_sums(builder, step)
    for stage in range(step.num_stages):
        add_replica_sums(builder, step, stage)
    _reduce(builder, step)
    passing.go_home()
    return builder


def _feed(builder: Builder, lasting: Builder, step: Step) -> None:
    for stage in range(step.num_stages):
        given = [*map(step.batch_ref, step.read(stage, Role.BATCH)), *(Ref(Role.KEY, k) for k in step.read(stage, Role.KEY))]
        for ref in given:
            builder.send(f"send {ref.role} {ref.index} to stage {stage}", Name(CALLER, ref), Name(stage, ref))
        for k in step.read(stage, Role.LOSS_SCALE):
            builder.send(f"send loss scale to stage {stage}", scale_name(step.loss_stage, k), scale_name(stage, k))
        for leaf in step.read(stage, Role.PARAM):
            if step.owner[leaf] != stage:
                path = step.cuts[0].loss.param_paths[leaf]
                lasting.send(f"send {path} to stage {stage}", param_name(step.owner[leaf], leaf), param_name(stage, leaf))


def _act(builder: Builder, step: Step, action: Action, program: Program, offloading: Offloading) -> None:
    """Write one action and the sends it feeds."""
    stage, _, i = action
    variant = step.variants[i]
    cut = step.cuts[variant]
    label = str(action)
    inputs = offloading.current([local_name(stage, ref, i, variant) for ref in program.inputs])
    outputs = [local_name(stage, ref, i + (ref.role == Role.STATE), variant) for ref in program.outputs]
    builder.compute(label, program, stage, inputs, outputs, action=action)
    for ref in program.outputs:
        if ref.role == Role.ACTIVATION:
            for peer in cut.consumers[ref.index]:
                builder.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), action)
        elif ref.role == Role.COTANGENT:
            peer = cut.producer[ref.index]
            builder.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), action)


def add_wait(builder: Builder, what: str, names: Sequence[Name]) -> None:
    """Wait until these values are there: a host callback that raises does so here, before anything is taken over or returned."""

    def wait(*values: Array) -> Sequence[Array]:
        return jax.block_until_ready(values)[:1]

    builder.call(f"the wait for host callbacks of {what}", wait, names[0].stage, names, names[:1])


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
            if count == 1 and step.num_replicas == 1 and reducer in (join, REDUCERS["last"]):
                builder.send(f"aux {ref.index} of the only microbatch", names[0], output)
                continue
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
