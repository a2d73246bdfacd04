"""What a program adds to a sum over microbatches: whole arrays, and updates that a scatter adds where they belong.

The gradient of a table of which a microbatch reads some rows, such as an embedding, is a scatter of rows onto zeros. Added as an
array, it would cost a table of zeros, and a sum that is read and written as a whole, however few the rows are. ``summands_of``
takes such a gradient apart, and ``Summands.added`` scatters the scaled rows onto the sum itself, whose buffer the program owns::

    gradient = convert(scatter_add(zeros, indices, rows)) + product        as it was traced
    scatter_add(sum + scale * product, indices, scale * rows)              as it runs

The first backward of a step scatters onto zeros of the sum's type, which gives the same bits as sums that begin as zeros.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import Atom, ScatterAdd, aval_of, is_cast, is_sum, is_zeros, scatter_add_of, shapes_of, variables

_BITS = 32
"""Bits of a sum from which on updates are added to it one by one; small ones would be lost on a large sum of fewer digits."""


@dataclass(frozen=True)
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

    def apart(atom: Atom, readers: Sequence[int]) -> list[Atom | ScatterAdd]:
        """The parts of a value that only these equations read; itself, if no part is a scatter."""
        at = producers.get(atom) if isinstance(atom, Var) and users.get(atom, []) == readers else None
        if at is None or at not in eqns or (readers and atom in returned) or not jnp.issubdtype(aval_of(atom).dtype, jnp.floating):
            return [atom]
        eqn, scatter = graph.eqns[at], scatter_add_of(graph.eqns[at])
        if scatter is not None:
            onto = producers.get(scatter.operand) if isinstance(scatter.operand, Var) else None
            return [atom if onto is None or not is_zeros(graph.eqns[onto]) else scatter]
        parts = [part for inner in eqn.invars for part in apart(inner, [at])] if is_cast(eqn) or is_sum(eqn) else []
        return parts if any(isinstance(part, ScatterAdd) for part in parts) else [atom]

    found = []
    for result in results:
        (shape,) = shapes_of([result])
        exact = jnp.issubdtype(shape.dtype, jnp.floating) and jnp.finfo(shape.dtype).bits >= _BITS
        parts = apart(result, []) if exact else [result]
        scatters = tuple(part for part in parts if isinstance(part, ScatterAdd))
        found.append(Summands(shape, tuple(part for part in parts if not isinstance(part, ScatterAdd)), scatters))
    return found
