"""The gradient of picking one element of each row, as arithmetic: a scatter would write the rows, and read them again.

Cross entropy picks the logit of each label. JAX differentiates that into a scatter onto zeros of the size of the logits, which XLA
keeps apart: beside the logits there is a second array as large, written by what else adds to their gradient and read and written
again by the scatter. Where each row has one index, ``where(iota == index, update, 0)`` has the same bits and joins a fusion. It
stands in the graph as one equation, so that no mask is taken for a value that a forward could keep.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import aval_of, is_zeros, kind_of, shapes_of


def with_one_hots(graph: Graph) -> Graph:
    """The graph with such arithmetic in place of scatters that add one element to each row of zeros."""
    zeros = {eqn.outvars[0] for eqn in graph.eqns if is_zeros(eqn)}
    eqns = list(graph.eqns)
    for i, eqn in enumerate(eqns):
        axis = _picked_axis(eqn)
        if axis is not None and eqn.invars[0] in zeros:
            eqns[i] = _one_hot(eqn, axis)
    return dataclasses.replace(graph, eqns=tuple(eqns))


def _picked_axis(eqn: JaxprEqn) -> int | None:
    if kind_of(eqn) != "scatter-add":
        return None
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.outvars[0]).shape
    axes = numbers.scatter_dims_to_operand_dims
    if len(axes) != 1 or numbers.update_window_dims or numbers.inserted_window_dims != axes:
        return None
    (axis,) = axes
    rows = tuple(k for k in range(len(shape)) if k != axis)
    single = tuple(1 if k == axis else size for k, size in enumerate(shape))
    one = [aval_of(var).shape for var in eqn.invars[1:]] == [(*single, 1), single]
    return axis if one and numbers.operand_batching_dims == numbers.scatter_indices_batching_dims == rows else None


def _one_hot(eqn: JaxprEqn, axis: int) -> JaxprEqn:
    shape, clips = aval_of(eqn.outvars[0]).shape, eqn.params["mode"] == GatherScatterMode.CLIP

    @jax.jit
    def one_hot(indices: jax.Array, updates: jax.Array) -> jax.Array:
        index = indices[..., 0]
        index = jnp.clip(index, 0, shape[axis] - 1) if clips else index
        places = jax.lax.broadcasted_iota(index.dtype, shape, axis)
        return jnp.where(places == index, updates, jnp.zeros((), updates.dtype))

    (made,) = jax.make_jaxpr(one_hot)(*shapes_of(eqn.invars[1:])).eqns
    return made.replace(invars=list(eqn.invars[1:]), outvars=list(eqn.outvars))
