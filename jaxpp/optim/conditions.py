"""A condition over all leaves as one choice a leaf, so that each stage chooses for its own.

``optax.MultiSteps`` and ``optax.apply_if_finite`` are one ``lax.cond`` over every gradient and every leaf of the optimizer state.
As one equation it would run on one stage, and all of these would have to move there. So both branches are computed where their
operands live, and ``select_n`` takes for each result the branch that the predicate, a scalar, says: the same bits, at the price of
the branch not taken.
"""

from collections.abc import Callable

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.stages.graph import Graph, trace
from jaxpp.stages.jaxpr import Atom, aval_of, branches_of, variables
from jaxpp.types import Array

__all__ = ["open_conditions"]


def open_conditions(graph: Graph) -> Graph:
    """The graph with every condition, and those inside it, opened; the graph itself if it has none."""
    if all(_branches(eqn) is None for eqn in graph.eqns):
        return graph

    def run(*args: Array) -> list[Array]:
        values: dict[Var, Array] = {**graph.constants, **dict(zip(graph.inputs, args, strict=True))}

        def read(atom: Atom) -> Array:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for i, eqn in enumerate(graph.eqns):
            branches = _branches(eqn)
            if branches is not None:
                which, *operands = map(read, eqn.invars)
                cases = [branch(*operands) for branch in branches]
                results = [jax.lax.select_n(which, *each) for each in zip(*cases, strict=True)]
            else:
                needs = variables(eqn.invars)
                results = graph.function([i], needs, eqn.outvars)(*map(read, needs))
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in graph.outputs]

    avals = [aval_of(var) for var in graph.inputs]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals]
    return open_conditions(trace(run, *shapes)[0])


def _branches(eqn: JaxprEqn) -> list[Callable[..., list[Array]]] | None:
    return None if eqn.effects else branches_of(eqn)
