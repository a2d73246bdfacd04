"""The beginning of a step: one program a stage for all that it does once before its first forward.

It splits its batch leaves, folds its keys, computes its statics and the weights of the microbatches, and zeroes the sums that no
first backward makes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.plan.builder import Builder, Constant, Name
from jaxpp.plan.step import Step, local_name
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.loss.microbatch import fold_keys, scale_dtype, slice_batch
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.stages.stage import StageCode

__all__ = ["add_stage_setup"]


def add_stage_setup(builder: Builder, step: Step, stage: int, totals: dict[Ref, Any]) -> None:
    """One program for all that a stage does once per step before its first forward."""
    names_in: list[Name] = []
    avals: list[Any] = []
    names_out: list[Name] = []
    parts: list[Any] = []

    def part(function: Any, inputs: Sequence[Name], shapes: Sequence[Any], outputs: Sequence[Name]) -> None:
        if outputs:
            parts.append((function, len(inputs)))
            names_in.extend(inputs)
            avals.extend(shapes)
            names_out.extend(outputs)

    for variant, code in enumerate(step.codes(stage)):
        _constants(builder, stage, variant, code)
        statics = code.statics
        outputs = [local_name(stage, ref, -1, variant) for ref in statics.outputs]
        part(statics.function, [local_name(stage, ref, -1, variant) for ref in statics.inputs], statics.avals, outputs)
    leaves = [k for k in step.read(stage, Role.BATCH) if k not in step.shared]
    steps = range(len(step.sizes))
    part(
        lambda *batch: [piece for row in slice_batch(batch, step.sizes) for piece in row],
        [Name(stage, Ref(Role.BATCH, k)) for k in leaves],
        [step.batch[k] for k in leaves],
        [Name(stage, Ref(Role.BATCH, k), i) for i in steps for k in leaves],
    )
    _keys(builder, step, stage, part)
    _scales(builder, step, stage, part)
    part(
        lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in totals.values()],
        [],
        [],
        [Name(stage, ref) for ref in totals],
    )
    if not parts:
        return

    def begin(*args: Any) -> list[Any]:
        results: list[Any] = []
        at = 0
        for function, count in parts:
            results += function(*args[at : at + count])
            at += count
        return results

    refs_in, refs_out = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
    program = Program(begin, refs_in, refs_out, shapes_of(avals), name=f"begin_stage_{stage}")
    builder.compute(f"begin stage {stage}", program, stage, names_in, names_out, ())


def _keys(builder: Builder, step: Step, stage: int, part: Any) -> None:
    """The key of each microbatch; those of replica r are numbered from r times their number."""
    if not step.read(stage, Role.KEY):
        return
    names, shapes = [Name(stage, Ref(Role.KEY))], [step.key]
    if step.num_replicas > 1:
        replica = Name(stage, Ref(Role.REPLICA))
        builder.constants[replica] = Constant(np.arange(step.num_replicas), split=True)
        names, shapes = [*names, replica], [*shapes, builder.constants[replica].aval]
    count = len(step.sizes)
    part(
        lambda key, replica=0: fold_keys(key, step.implementation, replica * count, count),
        names,
        shapes,
        [Name(stage, Ref(Role.KEY), i) for i in range(count)],
    )


def _constants(builder: Builder, stage: int, variant: int, code: StageCode) -> None:
    for k, value in enumerate(code.constants):
        builder.constants[local_name(stage, Ref(Role.CONSTANT, k), -1, variant)] = Constant(value)


def _scales(builder: Builder, step: Step, stage: int, part: Any) -> None:
    """The weight of each microbatch on this stage's device: a constant, or a share of what ``weigh`` found."""
    count, replicas = len(step.sizes), step.num_replicas
    if step.weigh is None:
        total = step.split.num_examples(replicas)
        shares = {size: Constant(np.asarray(size / total, scale_dtype())) for size in step.sizes}
        builder.constants |= {Name(stage, Ref(Role.SCALE), i): shares[size] for i, size in enumerate(step.sizes)}
        if step.split.num_idle:
            last = np.full(replicas, step.sizes[-1] / total, scale_dtype())
            last[replicas - step.split.num_idle :] = 0
            builder.constants[Name(stage, Ref(Role.SCALE), count - 1)] = Constant(last, split=True)
        return
    source = Name(step.loss_stage, Ref(Role.SCALE))
    if stage == step.loss_stage:
        inputs = [Name(stage, ref) for ref in step.weigh.inputs]
        builder.compute("weigh", step.weigh, stage, inputs, [source], ())
    else:
        builder.send(f"send scales to stage {stage}", source, Name(stage, Ref(Role.SCALE)))
    part(
        lambda scales: [scales[i] for i in range(count)],
        [Name(stage, Ref(Role.SCALE))],
        [jax.ShapeDtypeStruct((count,), scale_dtype())],
        [Name(stage, Ref(Role.SCALE), i) for i in range(count)],
    )
