"""The backward split into I and W, without doing anything twice.

Asking XLA for the gradients and dropping what is not used makes W repeat the chain of cotangents: a third more work. So the
equations are divided: I takes those that the input's cotangent needs, W the rest, and the values that cross from I to W are kept as
I's residuals. I and W together are exactly B.

A gradient that falls out of an equation of I (a ``scan`` over layers or a ``jax.checkpoint``, whose backward is one equation) is
summed in I. A stage whose input wants no cotangent, as the first, has nothing in I.
"""

from collections.abc import Collection, Iterable

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import Atom, variables

__all__ = ["split_backward"]


def split_backward(graph: Graph, backward: Collection[int], cotangents: Iterable[Atom]) -> set[int]:
    """The equations of I.

    Args:
        graph: a stage's forward and pullback.
        backward: the equations of B.
        cotangents: what I must return.
    """
    producers = graph.producers()
    found: set[int] = set()
    pending = variables(cotangents)
    while pending:
        i = producers.get(pending.pop())
        if i is not None and i in backward and i not in found:
            found.add(i)
            pending += variables(graph.eqns[i].invars)
    return found
