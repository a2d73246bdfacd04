"""The beginning of a step: one program a stage for all that it does once before its first forward.

It splits its batch leaves, folds its keys, computes its statics and the weights of the microbatches, and zeroes the sums that no
first backward makes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.plan.builder import Draft, Name
from jaxpp.plan.step import Job, local_name
from jaxpp.runtime.transfer import put, put_at
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.loss.microbatch import fold_keys, scale_dtype, slice_batch
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.stages.stage import StageCode

__all__ = ["draft_begin"]


def draft_begin(draft: Draft, job: Job, stage: int, totals: dict[Ref, Any]) -> None:
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

    for variant, code in enumerate(job.codes(stage)):
        _place_constants(draft, job, stage, variant, code)
        statics = code.statics
        outputs = [local_name(stage, ref, -1, variant) for ref in statics.outputs]
        part(statics.function, [local_name(stage, ref, -1, variant) for ref in statics.inputs], statics.avals, outputs)
    leaves = [k for k in job.read(stage, Role.BATCH) if k not in job.shared]
    steps = range(len(job.sizes))
    part(
        lambda *batch: [piece for row in slice_batch(batch, job.sizes) for piece in row],
        [Name(stage, Ref(Role.BATCH, k)) for k in leaves],
        [job.batch[k] for k in leaves],
        [Name(stage, Ref(Role.BATCH, k), i) for i in steps for k in leaves],
    )
    _keys(draft, job, stage, part)
    _scales(draft, job, stage, part)
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
    draft.compute(f"begin stage {stage}", program, job.placement[stage], names_in, names_out, ())


def _keys(draft: Draft, job: Job, stage: int, part: Any) -> None:
    """The key of each microbatch; those of replica r are numbered from r times their number."""
    if not job.read(stage, Role.KEY):
        return
    names, shapes = [Name(stage, Ref(Role.KEY))], [job.key]
    if job.placement.num_replicas > 1:
        replica = Name(stage, Ref(Role.REPLICA))
        draft.constants[replica] = put(np.arange(job.placement.num_replicas), job.placement[stage].home(replica.ref))
        names, shapes = [*names, replica], [*shapes, jax.ShapeDtypeStruct((), draft.constants[replica].dtype)]
    count = len(job.sizes)
    part(
        lambda key, replica=0: fold_keys(key, job.implementation, replica * count, count),
        names,
        shapes,
        [Name(stage, Ref(Role.KEY), i) for i in range(count)],
    )


def _place_constants(draft: Draft, job: Job, stage: int, variant: int, code: StageCode) -> None:
    for k, value in enumerate(code.constants):
        ref = Ref(Role.CONSTANT, k)
        draft.constants[local_name(stage, ref, -1, variant)] = put_at(job.placement[stage], ref, value)


def _scales(draft: Draft, job: Job, stage: int, part: Any) -> None:
    """The weight of each microbatch on this stage's device: a constant, or a share of what ``weigh`` found."""
    place, count, replicas = job.placement[stage], len(job.sizes), job.placement.num_replicas
    if job.weigh is None:
        known: dict[int, Any] = {}
        total = job.split.num_examples(replicas)
        for i, size in enumerate(job.sizes):
            if size not in known:
                known[size] = put_at(place, Ref(Role.SCALE), np.asarray(size / total, scale_dtype()))
            draft.constants[Name(stage, Ref(Role.SCALE), i)] = known[size]
        if job.split.num_idle:
            shares = np.full(replicas, job.sizes[-1] / total, scale_dtype())
            shares[replicas - job.split.num_idle :] = 0
            draft.constants[Name(stage, Ref(Role.SCALE), count - 1)] = put(shares, place.home(Ref(Role.SCALE)))
        return
    source = Name(job.loss_stage, Ref(Role.SCALE))
    if stage == job.loss_stage:
        inputs = [Name(stage, ref) for ref in job.weigh.inputs]
        draft.compute("weigh", job.weigh, place, inputs, [source], ())
    else:
        draft.send(f"send scales to stage {stage}", source, Name(stage, Ref(Role.SCALE)), place)
    part(
        lambda scales: [scales[i] for i in range(count)],
        [Name(stage, Ref(Role.SCALE))],
        [jax.ShapeDtypeStruct((count,), scale_dtype())],
        [Name(stage, Ref(Role.SCALE), i) for i in range(count)],
    )
