"""The beginning of a step: one program for each stage that does what the stage does once, before its first forward.

The program splits the stage's batch leaves, folds its keys, computes what depends on parameters alone and the weights of the
microbatches, and zeroes the sums that no first backward makes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxpp.plan.builder import Builder, Constant, Name
from jaxpp.plan.step import Step, local_name
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.loss.microbatch import fold_keys, scale_dtype, slice_batch
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array, Aval

__all__ = ["add_stage_setup"]


class _Part(NamedTuple):
    """A part of the program: a function, what it reads, the shapes of what it reads, and what it makes."""

    function: Callable[..., Sequence[Array]]
    inputs: Sequence[Name]
    avals: Sequence[Aval]
    outputs: Sequence[Name]


def add_stage_setup(builder: Builder, step: Step, stage: int, totals: dict[Ref, Aval], lasting: Builder | None = None) -> None:
    """One program for all that a stage does once per step before its first forward.

    What depends on parameters alone is a program of its own among the lines of ``lasting``, if these are given.
    """
    for variant, code in enumerate(step.codes(stage)):
        constants = {local_name(stage, Ref(Role.CONSTANT, k), -1, variant): value for k, value in enumerate(code.constants)}
        for each in (builder, lasting or builder):
            each.constants |= {name: Constant(value) for name, value in constants.items()}
    if lasting is not None:
        _add_lasting(lasting, step, stage)
    statics = [] if lasting is not None else _statics(step, stage)
    parts = [*statics, *_batch(builder, step, stage), *_keys(builder, step, stage), *_scales(builder, step, stage)]
    zeros = _Part(
        lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in totals.values()], [], [], [Name(stage, ref) for ref in totals]
    )
    parts = [part for part in (*parts, zeros) if part.outputs]
    if not parts:
        return

    def begin(*args: Array) -> list[Array]:
        supply, results = iter(args), []
        for part in parts:
            results += part.function(*(next(supply) for _ in part.inputs))
        return results

    names_in = [name for part in parts for name in part.inputs]
    names_out = [name for part in parts for name in part.outputs]
    avals = shapes_of(aval for part in parts for aval in part.avals)
    refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
    program = Program(begin, *refs, avals, name=f"begin_stage_{stage}")
    builder.compute(f"begin stage {stage}", program, stage, names_in, names_out, ())


def _statics(step: Step, stage: int) -> list[_Part]:
    """What depends on parameters alone."""
    found = []
    for variant, code in enumerate(step.codes(stage)):
        statics = code.statics
        inputs, outputs = ([local_name(stage, ref, -1, variant) for ref in refs] for refs in (statics.inputs, statics.outputs))
        found.append(_Part(statics.function, inputs, statics.avals, outputs))
    return found


def _add_lasting(lasting: Builder, step: Step, stage: int) -> None:
    """What depends on parameters alone, as a program for each size of a microbatch."""
    for variant, code in enumerate(step.codes(stage)):
        statics = code.statics
        inputs, outputs = ([local_name(stage, ref, -1, variant) for ref in refs] for refs in (statics.inputs, statics.outputs))
        if outputs:
            lasting.compute(f"parameters of stage {stage}", statics, stage, inputs, outputs, ())


def _batch(builder: Builder, step: Step, stage: int) -> list[_Part]:
    """The batch leaves, split into microbatches; one microbatch is the batch."""
    leaves = [k for k in step.read(stage, Role.BATCH) if k not in step.shared]
    if len(step.sizes) == 1:
        for k in leaves:
            whole = Name(stage, Ref(Role.BATCH, k))
            builder.send(f"batch leaf {k} of the only microbatch", whole, whole._replace(microbatch=0))
        return []
    return [
        _Part(
            lambda *batch: [piece for row in slice_batch(batch, step.sizes) for piece in row],
            [Name(stage, Ref(Role.BATCH, k)) for k in leaves],
            [step.batch[k] for k in leaves],
            [Name(stage, Ref(Role.BATCH, k), i) for i in range(len(step.sizes)) for k in leaves],
        )
    ]


def _keys(builder: Builder, step: Step, stage: int) -> list[_Part]:
    """The key of each microbatch; the microbatches of replica r are numbered from r times their number."""
    if step.key is None or not step.read(stage, Role.KEY):
        return []
    names, avals, count = [Name(stage, Ref(Role.KEY))], [step.key], len(step.sizes)
    if step.num_replicas > 1:
        replica = Name(stage, Ref(Role.REPLICA))
        builder.constants[replica] = Constant(np.arange(step.num_replicas), split=True)
        names, avals = [*names, replica], [*avals, builder.constants[replica].aval]
    return [
        _Part(
            lambda key, replica=0: fold_keys(key, step.implementation, replica * count, count),
            names,
            avals,
            [Name(stage, Ref(Role.KEY), i) for i in range(count)],
        )
    ]


def _scales(builder: Builder, step: Step, stage: int) -> list[_Part]:
    """The weight of each microbatch: constants, or shares of what ``Step.weigh`` computes on the loss's stage."""
    names = [Name(stage, Ref(Role.SCALE), i) for i in range(len(step.sizes))]
    if step.weigh is None:
        builder.constants |= dict(zip(names, _shares(step), strict=True))
        return []
    source, here = Name(step.loss_stage, Ref(Role.SCALE)), Name(stage, Ref(Role.SCALE))
    if stage == step.loss_stage:
        builder.compute("weigh", step.weigh, stage, [Name(stage, ref) for ref in step.weigh.inputs], [source], ())
    else:
        builder.send(f"send scales to stage {stage}", source, here)

    def each(scales: Float[Array, " microbatches"]) -> list[Float[Array, ""]]:
        return [scales[i] for i in range(len(names))]

    return [_Part(each, [here], [jax.ShapeDtypeStruct((len(names),), scale_dtype())], names)]


def _shares(step: Step) -> list[Constant]:
    """Each microbatch's share of the examples; the last microbatch of an idle replica has none."""
    total = step.split.num_examples(step.num_replicas)
    known = {size: Constant(np.asarray(size / total, scale_dtype())) for size in step.sizes}
    shares = [known[size] for size in step.sizes]
    if step.split.num_idle:
        last = np.full(step.num_replicas, step.sizes[-1] / total, scale_dtype())
        last[step.num_replicas - step.split.num_idle :] = 0
        shares[-1] = Constant(last, split=True)
    return shares
