"""What a loop over layers makes of its parameters alone, taken out of the loop.

A cast of a layer's weights inside a loop is made anew by every microbatch, and kept for its backward: a copy of the weights. Taken
out, it is done for all layers at once, depends on parameters alone, and so is computed once a step.
"""

from collections.abc import Collection
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpp.stages.cost import CHEAP
from jaxpp.stages.graph import aval_of, variables

__all__ = ["hoist"]

_BLANK: Jaxpr = jax.make_jaxpr(lambda: ())().jaxpr


def hoist(eqn: JaxprEqn, stacked: Collection[Any]) -> tuple[list[JaxprEqn], JaxprEqn]:
    """Take out of a ``scan`` what depends on rows of ``stacked`` alone.

    Args:
        eqn: the loop.
        stacked: parameters stacked over its layers.

    Returns:
        equations that run before the loop, and the loop without them. Only cheap ones: they have the same bits for all layers at
        once.
    """
    first = eqn.params["num_consts"] + eqn.params["num_carry"]
    closed = eqn.params["jaxpr"]
    inner = closed.jaxpr
    pairs = zip(inner.invars[first:], eqn.invars[first:], strict=True)
    outer = {var: atom for var, atom in pairs if not isinstance(atom, Literal) and atom in stacked}
    of_params = set(outer)
    moved = []
    for inside in inner.eqns:
        operands = variables(inside.invars)
        if inside.primitive.name in CHEAP and operands and of_params.issuperset(operands) and not inside.effects:
            moved.append(inside)
            of_params.update(inside.outvars)
    rest = [inside for inside in inner.eqns if inside not in moved]
    made = {var for inside in moved for var in inside.outvars}
    needed = [var for var in variables(atom for inside in rest for atom in inside.invars) if var in made]
    needed += [var for var in variables(inner.outvars) if var in made and var not in needed]
    if closed.consts or not any(inside.primitive.name == "convert_element_type" for inside in moved):
        return [], eqn
    before = jaxpr_as_fun(ClosedJaxpr(_BLANK.replace(invars=list(outer), outvars=needed, eqns=moved), []))
    shapes = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in outer.values()]
    run = jax.make_jaxpr(jax.vmap(before))(*shapes).jaxpr
    names: dict[Any, Any] = dict(zip(run.invars, outer.values(), strict=True))
    names |= {var: Var(var.aval) for flat in run.eqns for var in flat.outvars}
    early = [
        flat.replace(
            invars=[atom if isinstance(atom, Literal) else names[atom] for atom in flat.invars],
            outvars=[names[var] for var in flat.outvars],
        )
        for flat in run.eqns
    ]
    results = [names[atom] for atom in run.outvars]
    body = _BLANK.replace(invars=[*inner.invars, *needed], outvars=inner.outvars, eqns=rest, effects=inner.effects)
    params: dict[str, Any] = eqn.params | {"jaxpr": ClosedJaxpr(body, [])}
    if "linear" in params:  # some versions of JAX note this of each operand
        params["linear"] = (*params["linear"], *(False for _ in needed))
    return early, eqn.replace(invars=[*eqn.invars, *results], params=params)
