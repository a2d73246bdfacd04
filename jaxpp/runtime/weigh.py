"""The weights of the microbatches, where the user says what they are: one program, run once a step."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import LossError
from jaxpp.runtime.placement import Placement
from jaxpp.stages.graph import trace, variables
from jaxpp.stages.loss import describe
from jaxpp.stages.microbatch import Split, scale_dtype, slice_batch
from jaxpp.stages.program import Program, Ref, Role, shapes_of

__all__ = ["weigh"]


def weigh(weight: Callable[[Any], Any], batch: Any, shared: Collection[int], split: Split, placement: Placement) -> Program:
    """The program that computes every microbatch's share of the total weight, from the batch leaves it needs."""
    parts = split.sizes
    leaves, tree = jax.tree.flatten(batch)
    lead = (placement.num_replicas,) if placement.meshed else ()
    leaves = [
        leaf if k in shared else jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, weak_type=leaf.weak_type)
        for k, leaf in enumerate(leaves)
    ]

    def scales(*batch_leaves: Any) -> list[Any]:
        each = [[leaf if k in shared else leaf[r] for k, leaf in enumerate(batch_leaves)] for r in range(*lead)] if lead else []
        pieces = [piece for leaves in each or [batch_leaves] for piece in slice_batch(leaves, parts, shared)]
        found = [jnp.asarray(weight(tree.unflatten(piece))) for piece in pieces]
        if any(value.shape != () for value in found):
            shape = describe(next(value for value in found if value.shape != ()))
            raise LossError("weight", "a weight is one scalar a microbatch", shape, "reduce it, for example with .sum()")
        counts = np.ones((placement.num_replicas, len(parts)))
        counts[placement.num_replicas - split.num_idle :, -1] = 0
        stacked = jnp.where(counts.ravel() > 0, jnp.stack(found).astype(scale_dtype()), 0)
        return [(stacked / stacked.sum()).reshape(*lead, len(parts))]

    graph, _ = trace(scales, *leaves)
    read = set(variables(atom for eqn in graph.eqns for atom in eqn.invars))
    used = [k for k, var in enumerate(graph.inputs) if var in read]
    constants = list(graph.constants)
    run = graph.function(range(len(graph.eqns)), [*(graph.inputs[k] for k in used), *constants], graph.outputs)
    refs = tuple(Ref(Role.BATCH, k, shared=k in shared) for k in used)
    shapes = shapes_of(leaves[k] for k in used)
    return Program(lambda *args: run(*args, *graph.constants.values()), refs, (Ref(Role.SCALE),), shapes, spans=bool(lead))
