"""Equations as text that is the same in every process, so that several processes can compare what they have traced.

Problem: the text of a jaxpr has addresses of Python functions, and sets in an order that differs from process to process. Idea:
number the variables in their order, write one line for each equation, and take out what is an accident of the process.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import Atom, aval_of, describe, kind_of

__all__ = ["listing", "plain"]

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_SET = re.compile(r"\{([^{}\n]*)\}")
_LARGE = 1 << 20
"""Bytes of a constant above which only its shape is compared."""


def plain(text: str) -> str:
    """A text without addresses, and with its sets in order.

    Example:
        >>> plain("<function f at 0x7f3b5c0d1e50> frozenset({'model', 'data'})")
        "<function f at 0x> frozenset({'data', 'model'})"
    """
    ordered = _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
    return _ADDRESS.sub("0x", ordered)


def listing(graph: Graph) -> str:
    """The equations of a graph, a line each: results, operation, arguments, and the module that it is part of.

    Example:
        >>> from jaxpp.stages.graph import trace
        >>> print(listing(trace(lambda x: 2 * jax.numpy.tanh(x), jax.numpy.ones(3))[0]))
        0 f32[3]
        1 f32[3] = tanh 0
        2 f32[3] = mul 2.0:f32[] 1
        out 2
    """
    return "\n".join(_lines(graph))


def _lines(graph: Graph) -> Iterator[str]:
    numbers: dict[Var, int] = {}

    def define(var: Var) -> str:
        numbers[var] = len(numbers)
        return f"{numbers[var]} {describe(aval_of(var))}"

    def read(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"{plain(str(atom.val))}:{describe(aval_of(atom))}"
        return str(numbers.get(atom, "?"))

    for var in graph.inputs:
        yield define(var)
    for var, value in graph.constants.items():
        yield f"{define(var)} constant {_digest(value)}"
    for eqn, name in zip(graph.eqns, graph.names, strict=True):
        made, module = ", ".join(map(define, eqn.outvars)), [f"({name})"] if name else []
        yield " ".join([made, "=", kind_of(eqn) + _parameters(eqn.params), *map(read, eqn.invars), *module])
    yield " ".join(["out", *map(read, graph.outputs)])


def _parameters(params: Mapping[str, Any]) -> str:
    said = {name: value for name, value in sorted(params.items()) if value is not None and value is not False}
    return "[" + " ".join(f"{name}={_one_line(value)}" for name, value in said.items()) + "]" if said else ""


def _one_line(value: object) -> str:
    """A parameter; of a long one (the body of a loop) the beginning, and a digest of the whole."""
    text = plain(" ".join(str(value).split()))
    return text if len(text) <= 400 else f"{text[:400]}...{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _digest(value: Any) -> str:
    """What a constant holds, as far as this process can read it at little cost."""
    typed = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    if typed or value.nbytes > _LARGE or (isinstance(value, jax.Array) and not value.is_fully_addressable):
        return ""
    return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]
