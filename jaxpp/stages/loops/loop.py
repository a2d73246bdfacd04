"""A loop over layers rebuilt: over some of its layers, and without what it makes of its parameters alone.

A cast of a layer's weights inside a loop is made anew by every microbatch, and kept for its backward: a copy of the weights. Taken
out, it is done for all layers at once, depends on parameters alone, and so is computed once a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpp.stages.cost import CHEAP
from jaxpp.stages.graph import Atom, aval_of, variables

__all__ = ["Loop", "loop_of"]

_BLANK: Jaxpr = jax.make_jaxpr(lambda: ())().jaxpr


@dataclass(frozen=True)
class Loop:
    """A ``scan``, its operands told apart by their shapes (how its parameters do that differs between versions of JAX).

    Attributes:
        body: what runs at each layer.
        num_before: operands that are no rows: constants, then what is carried.
        num_carry: how many are carried.
        length: layers.
        reverse: whether the last layer runs first.
        unroll: as ``lax.scan`` takes it.
    """

    body: ClosedJaxpr
    num_before: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any

    def over(self, atoms: Sequence[Atom], stacked: Sequence[bool], length: int) -> tuple[list[JaxprEqn], list[Atom]]:
        """Equations that run the loop over other rows.

        Args:
            atoms: the operands.
            stacked: for each operand that has rows, whether it is a parameter.
            length: how many rows.

        Returns:
            the equations, casts of parameters before the loop; and what they return: what is carried, then the outputs.
        """
        moved, rest = _divide(self.body, self.num_before, stacked)
        fixed = self.num_before - self.num_carry

        def run(*args: Any) -> list[Any]:
            consts, carry, rows = args[:fixed], list(args[fixed : self.num_before]), args[self.num_before :]
            early = jax.vmap(moved)(*(row for row, is_param in zip(rows, stacked, strict=True) if is_param)) if moved else []

            def step(carry: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
                results = rest(*consts, *carry, *row[0], *row[1])
                return results[: self.num_carry], results[self.num_carry :]

            options = {"length": length, "reverse": self.reverse, "unroll": self.unroll}
            carry, outputs = jax.lax.scan(step, carry, (list(rows), list(early)), **options)
            return [*carry, *outputs]

        shapes = [jax.ShapeDtypeStruct(aval_of(atom).shape, aval_of(atom).dtype) for atom in atoms]
        return _renamed(jax.make_jaxpr(run)(*shapes).jaxpr, atoms)


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """The loop that a ``scan`` is; None if it closes over arrays."""
    body = eqn.params["jaxpr"]
    body = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, list(getattr(body, "consts", ())))
    if body.consts:
        return None
    pairs = [(aval_of(a).shape, aval_of(b).shape) for a, b in zip(eqn.invars, body.jaxpr.invars, strict=True)]
    results = [(aval_of(a).shape, aval_of(b).shape) for a, b in zip(eqn.outvars, body.jaxpr.outvars, strict=True)]
    before, carry = (sum(whole == inside for whole, inside in shapes) for shapes in (pairs, results))
    return Loop(body, before, carry, eqn.params["length"], eqn.params["reverse"], eqn.params["unroll"])


def _divide(body: ClosedJaxpr, num_before: int, stacked: Sequence[bool]) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """What the body makes of rows of parameters by cheap operations, if there are casts among them; and the rest of the body.

    Cheap operations have the same bits for all layers at once.
    """
    inner = body.jaxpr
    rows = [var for var, is_param in zip(inner.invars[num_before:], stacked, strict=True) if is_param]
    of_params, moved = set(rows), []
    for eqn in inner.eqns:
        operands = variables(eqn.invars)
        if eqn.primitive.name in CHEAP and operands and of_params.issuperset(operands) and not eqn.effects:
            moved.append(eqn)
            of_params.update(eqn.outvars)
    if not any(eqn.primitive.name == "convert_element_type" for eqn in moved):
        return None, jaxpr_as_fun(body)
    rest = [eqn for eqn in inner.eqns if not any(eqn is other for other in moved)]
    made = {var for eqn in moved for var in eqn.outvars}
    read = variables([*(atom for eqn in rest for atom in eqn.invars), *inner.outvars])
    needed = [var for var in read if var in made]
    before = _BLANK.replace(invars=rows, outvars=needed, eqns=moved)
    after = _BLANK.replace(invars=[*inner.invars, *needed], outvars=inner.outvars, eqns=rest, effects=inner.effects)
    return jaxpr_as_fun(ClosedJaxpr(before, [])), jaxpr_as_fun(ClosedJaxpr(after, []))


def _renamed(jaxpr: Jaxpr, atoms: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of a traced function, over these operands and fresh variables; and its results."""
    names: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    names |= {var: Var(var.aval) for eqn in jaxpr.eqns for var in eqn.outvars}

    def name(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else names[atom]

    eqns = [eqn.replace(invars=list(map(name, eqn.invars)), outvars=list(map(name, eqn.outvars))) for eqn in jaxpr.eqns]
    return eqns, list(map(name, jaxpr.outvars))
