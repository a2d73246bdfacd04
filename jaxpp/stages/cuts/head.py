"""The head of a language model in a traced loss: a product with a parameter, of which the cross entropy of integer labels is taken.

The product is one equation, which no cut divides, and with a vocabulary of 50,257 it is half of the work of a small model. The same
loss as ``jaxpp.linear_cross_entropy`` is a loop over slices of the vocabulary, which is cut between two slices. ``head_of`` finds
such a head, so that a warning of uneven stages can say so, and what would be gained.
"""

import math
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.stages.graph import descendants
from jaxpp.stages.jaxpr import Atom, aval_of, kind_of, picks_one, reduces_last, variables
from jaxpp.stages.loss.traced_loss import TracedLoss

SCOPE = "linear_cross_entropy"  # the name of a divided head in tables of stages
ROWS = 768  # of a slice of the vocabulary, unless the user says how many slices there are
_FEWEST = 4  # slices that are worth the change
_KEPT = frozenset(
    "convert_element_type copy stop_gradient reshape slice exp".split()
)  # logits, or their exponentials, stay what they are


@dataclass(frozen=True)
class Head:
    """A head that could be divided."""

    table: str  # the path of the parameter that it multiplies by
    has_bias: bool  # whether a parameter is added to the product
    costs: tuple[float, ...]  # of the positions on the spine, if the head were divided into slices


def head_of(loss: TracedLoss, position: int) -> Head | None:
    """The head whose product stands at a position of the spine; None if that is anything else, or too small to be divided."""
    product, leaves = loss.graph.eqns[loss.spine[position]], loss.param_uses[position]
    inside = _cross_entropy(loss, product.outvars[0]) if len(leaves) == 1 and _is_projection(loss, product) else None
    if inside is None:
        return None
    numbers = {k for k, i in enumerate(loss.spine) if i in inside} | {position}
    slices = -(-aval_of(product.outvars[0]).shape[-1] // ROWS)
    of_slice = sum(loss.costs[k] for k in numbers) / slices
    rest = [(k, cost) for k, cost in enumerate(loss.costs) if k not in numbers]
    before, after = (tuple(cost for k, cost in rest if (k < position) is early) for early in (True, False))
    has_bias = any(kind_of(loss.graph.eqns[i]) == "add" for i in inside)
    return Head(loss.param_paths[min(leaves)], has_bias, (*before, *[of_slice] * slices, *after))


def _is_projection(loss: TracedLoss, eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies each row of data by a matrix that depends on parameters alone."""
    if kind_of(eqn) != "dot_general":
        return False
    rows, matrix = eqn.invars
    last = aval_of(eqn.outvars[0]).shape[-1:]
    shape = aval_of(matrix).shape
    return (
        rows in loss.of_data
        and matrix not in loss.of_data
        and len(shape) == 2
        and last
        and last[0] in shape
        and last[0] >= _FEWEST * ROWS
    )


def _cross_entropy(loss: TracedLoss, logits: Var) -> set[int] | None:
    """The equations that read logits, if these make the cross entropy of integer labels and nothing else; else None."""
    users, last = loss.graph.users(), aval_of(logits).shape[-1]
    wide, sums, inside, done = {logits}, set[Var](), set[int](), set[str]()
    pending: list[Var] = [logits]
    while pending:
        var = pending.pop()
        for i in users.get(var, ()):
            eqn = loss.graph.eqns[i]
            inside.add(i)
            result = eqn.outvars[0]
            if picks_one(eqn) or reduces_last(eqn):
                done.add(kind_of(eqn))
                sums.update(eqn.outvars if kind_of(eqn) == "reduce_sum" else ())
            elif aval_of(result).shape[-1:] == (last,) and _keeps_logits(loss, eqn, wide):
                pending += [result] if result not in wide else []
                wide.add(result)
            else:
                return None
    logs = {var for eqn in loss.graph.eqns if kind_of(eqn) == "log" for var in variables(eqn.invars)}
    whole = done >= {"reduce_max", "reduce_sum", "gather"} and not logs.isdisjoint(descendants(loss.graph, sums))
    return inside if whole and wide.isdisjoint(variables(loss.graph.outputs)) else None


def _keeps_logits(loss: TracedLoss, eqn: JaxprEqn, wide: set[Var]) -> bool:
    """Whether an equation's result is its operand, an exponential, less one number a row, times a number, or with a bias added."""
    kind = kind_of(eqn)
    others: list[Atom] = [atom for atom in eqn.invars if isinstance(atom, Literal) or atom not in wide]
    if kind in _KEPT:
        return not others
    if kind in ("mul", "div"):
        return all(math.prod(aval_of(atom).shape) == 1 for atom in others)
    of_data = [isinstance(atom, Var) and atom in loss.of_data for atom in others]
    return of_data == [kind == "sub"] and kind in ("sub", "add")
