"""Gradients that JAX makes by a scatter: what a program adds to a sum over microbatches, and picks of one element of each row.

The gradient of a table of which a microbatch reads some rows, such as an embedding, is a scatter of rows onto zeros. Added as an
array, it would cost a table of zeros, and a sum that is read and written as a whole, however few the rows are. ``summands_of``
divides such a gradient into its terms, and ``Summands.added`` scatters the scaled rows onto the sum itself::

    gradient = convert(scatter_add(zeros, indices, rows)) + product        as it was traced
    scatter_add(sum + scale * product, indices, scale * rows)              as it runs

The first backward of a step scatters onto zeros of the sum's type, which gives the same bits as sums that begin as zeros.

Cross entropy picks the logit of each label, and JAX differentiates that into a scatter onto zeros of the size of the logits, which
XLA does not fuse: beside the logits there is a second array as large, written by what else adds to their gradient and read and
written again by the scatter. Where each row has one index, ``where(iota == index, update, 0)`` has the same bits and joins a fusion
(``with_one_hots``). It is one equation of the graph, so that no mask is taken for a value that a forward could keep.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jax.lax import GatherScatterMode

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import Atom, ScatterAdd, aval_of, is_cast, is_zeros, kind_of, scatter_add_of, shapes_of, variables

_BITS = 32
"""Bits of a sum from which on updates are added to it one by one; small ones would be lost on a large sum of fewer digits."""


@dataclasses.dataclass(frozen=True)
class Summands:
    """What adds up to a result that is added to a sum."""

    sum: jax.ShapeDtypeStruct
    arrays: tuple[Atom, ...]
    scatters: tuple[ScatterAdd, ...] = ()

    @property
    def reads(self) -> tuple[Atom, ...]:
        """What must be computed for it, in the order in which ``added`` takes it."""
        return *self.arrays, *(atom for scatter in self.scatters for atom in (scatter.indices, scatter.updates))

    def added(self, total: jax.Array | None, scale: jax.Array, values: Iterator[jax.Array]) -> jax.Array:
        """``scale`` times the result, added to ``total`` if there is one; ``values`` are those of ``reads``."""
        dtype = self.sum.dtype
        scale = scale.astype(dtype)
        for _ in self.arrays:
            share = scale * jnp.asarray(next(values), dtype)
            total = share if total is None else total + share
        total = jnp.zeros(self.sum.shape, dtype) if total is None else total
        for scatter in self.scatters:
            indices, updates = next(values), next(values)
            total = scatter.add(total, indices, scale * updates.astype(dtype))
        return total


def summands_of(graph: Graph, results: Sequence[Atom], eqns: Collection[int]) -> list[Summands]:
    """What adds up to each of these results of a graph, which ``eqns`` compute; scatters onto zeros that nothing else reads."""
    producers, users, returned = graph.producers(), graph.users(), set(variables(graph.outputs))

    def terms_of(atom: Atom, readers: Sequence[int]) -> list[Atom | ScatterAdd]:
        """The parts of a value that only these equations read; itself, if no part is a scatter."""
        at = producers.get(atom) if isinstance(atom, Var) and users.get(atom, []) == readers else None
        if at is None or at not in eqns or (readers and atom in returned) or not jnp.issubdtype(aval_of(atom).dtype, jnp.floating):
            return [atom]
        eqn, scatter = graph.eqns[at], scatter_add_of(graph.eqns[at])
        if scatter is not None:
            onto = producers.get(scatter.operand) if isinstance(scatter.operand, Var) else None
            return [atom if onto is None or not is_zeros(graph.eqns[onto]) else scatter]
        passes = is_cast(eqn) or kind_of(eqn) == "add_any"
        parts = [part for inner in eqn.invars for part in terms_of(inner, [at])] if passes else []
        return parts if any(isinstance(part, ScatterAdd) for part in parts) else [atom]

    found = []
    for result in results:
        (shape,) = shapes_of([result])
        exact = jnp.issubdtype(shape.dtype, jnp.floating) and jnp.finfo(shape.dtype).bits >= _BITS
        parts = terms_of(result, []) if exact else [result]
        scatters = tuple(part for part in parts if isinstance(part, ScatterAdd))
        found.append(Summands(shape, tuple(part for part in parts if not isinstance(part, ScatterAdd)), scatters))
    return found


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
