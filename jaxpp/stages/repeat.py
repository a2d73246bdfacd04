"""Which equations a backward may run again, and at what price.

Never again: matrix products, convolutions, loops, calls, random bits, sorts, gathers, and what has an effect. Nor a *decision* on
rounded numbers: another program fuses multiplications and additions in another way, so that a comparison of values that are nearly
equal may come out otherwise there, and the gradient with it. A decision's result, one byte an element, is kept instead. Where all
operands come out the same in every program (integers, and what is only added, chosen or laid out of values that are kept), a
decision may be made again.

Prices are in bytes: what one would rather keep than compute again. Elementwise arithmetic is done while a value is read, for nearly
nothing. The functions of ``TRANSCENDENTAL`` have a price where they cost more than reading their result from memory.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jaxpp.stages.cost import LAYOUT, count_bytes
from jaxpp.stages.graph import Atom, Graph, aval_of, variables

__all__ = ["TRANSCENDENTAL", "may_repeat", "price_of", "repeatable"]

TRANSCENDENTAL = frozenset(
    "tanh exp exp2 expm1 log log1p logistic erf erfc erf_inv sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh pow "
    "cbrt lgamma digamma".split()
)
"""Functions that take many operations an element."""
_CHOOSING = LAYOUT | frozenset(
    "transpose rev pad concatenate slice dynamic_slice split select_n neg abs max min clamp real imag conj complex "
    "bitcast_convert_type reduce_max reduce_min random_wrap random_unwrap sharding_constraint".split()
)
_ADDING = frozenset("add sub add_any".split())
_ARITHMETIC = frozenset(
    "mul div sqrt rsqrt square integer_pow reduce_precision reduce_sum convert_element_type and or not xor "
    "shift_left shift_right_logical shift_right_arithmetic population_count clz reduce_and reduce_or".split()
)
_DECIDING = frozenset("eq ne lt le gt ge sign floor ceil round is_finite rem nextafter eq_to lt_to le_to".split())
_REPEATABLE = _CHOOSING | _ADDING | _ARITHMETIC | _DECIDING | TRANSCENDENTAL
_ELEMENT, _REDUCED = 1 / 64, 1 / 4


def repeatable(graph: Graph) -> list[bool]:
    """Whether each equation may be run again, whatever is kept."""
    rounded: set[Var] = set()
    found = []
    for eqn in graph.eqns:
        name, loose = eqn.primitive.name, not rounded.isdisjoint(variables(eqn.invars))
        again = name in _REPEATABLE and not eqn.effects and not (loose and _decides(eqn))
        found.append(again)
        if again and any(_rounds(eqn, var, loose) for var in eqn.outvars):
            rounded.update(eqn.outvars)
    return found


def may_repeat(name: str, operands: Sequence[Any], new_dtype: Any = None) -> bool:
    """Whether an operation may be run again where nothing is known of its operands.

    Args:
        name: of its primitive.
        operands: their shapes and dtypes.
        new_dtype: of the result, where the operation is a cast.
    """
    rounded = any(_is_inexact(aval.dtype) for aval in operands)
    decides = name in _DECIDING or (new_dtype is not None and not _is_inexact(new_dtype))
    return name in _REPEATABLE and not (rounded and decides)


def price_of(eqn: JaxprEqn, transcendental: float) -> float:
    """What it costs to run an equation again, in bytes.

    Args:
        eqn: a repeatable equation.
        transcendental: the price of one element of the result of a function of ``TRANSCENDENTAL``.
    """
    name = eqn.primitive.name
    if name.startswith("reduce_") and name != "reduce_precision":
        return _REDUCED * sum(count_bytes(aval_of(var)) for var in variables(eqn.invars))
    size = sum(math.prod(aval_of(var).shape) for var in eqn.outvars)
    return size * (_ELEMENT + transcendental * (name in TRANSCENDENTAL))


def _decides(eqn: JaxprEqn) -> bool:
    """Whether a small difference of its operands can become a large one of its result."""
    if eqn.primitive.name == "convert_element_type":
        return _is_float(eqn.invars) and not _is_float(eqn.outvars)
    return eqn.primitive.name in _DECIDING


def _rounds(eqn: JaxprEqn, result: Var, loose: bool) -> bool:
    """Whether a result may have other last bits in another program."""
    if not _is_float([result]):
        return False
    name = eqn.primitive.name
    if name in _CHOOSING:
        return loose
    if name == "convert_element_type" and not loose:
        return _digits(eqn.outvars[0]) < _digits(eqn.invars[0])
    short = _digits(result) < jnp.finfo(jnp.float32).nmant  # computed with more digits inside a fusion
    return loose or short or name not in _ADDING


def _is_float(atoms: Iterable[Atom]) -> bool:
    return any(_is_inexact(aval_of(atom).dtype) for atom in atoms)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _digits(atom: Atom) -> float:
    dtype = aval_of(atom).dtype
    return jnp.finfo(dtype).nmant if _is_inexact(dtype) else math.inf
