"""What an equation costs: floating-point operations and bytes, from shapes alone.

A multiply and an add count as two, as everywhere in the field; an elementwise operation counts one an output element.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

__all__ = ["CHEAP", "LAYOUT", "coarsest_dtype", "count_bytes", "count_flops", "has_inner", "inner_jaxprs", "multiplies"]

LAYOUT = frozenset("broadcast_in_dim reshape squeeze expand_dims iota copy stop_gradient".split())
"""Operations that only say how a value is laid out; the compiler folds them away."""
CHEAP = LAYOUT | frozenset(
    "convert_element_type slice select_n transpose rev pad concatenate eq ne lt le gt ge and or not xor add sub mul div rem neg "
    "max min abs sign exp log sqrt rsqrt pow integer_pow clamp floor ceil round is_finite shift_left shift_right_logical "
    "shift_right_arithmetic bitcast_convert_type random_wrap random_unwrap random_fold_in random_split random_seed "
    "random_clone square".split()
)
"""Operations that cost less to do again than their result costs to send."""

_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})
_FREE = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose slice dynamic_slice concatenate convert_element_type iota copy pad "
    "rev gather stop_gradient random_wrap random_unwrap split bitcast_convert_type".split()
)


def count_bytes(aval: Any) -> int:
    """Bytes of one value; a key counts as its two 32-bit words."""
    size = math.prod(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return size * (8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize)


def count_flops(eqn: JaxprEqn) -> float:
    """Floating-point operations of one equation, looking into loops, branches and calls."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(_shape(eqn.invars[0])[axis] for axis in contracted)
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * depth
    if name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(_shape(eqn.outvars[0])) * math.prod(kernel) / max(out_features, 1)
    inner = [_flops(jaxpr.eqns) for jaxpr in inner_jaxprs(eqn)]
    if inner:
        return max(inner) * (eqn.params["length"] if name == "scan" else 1)
    if name in _FREE:
        return 0.0
    return float(sum(math.prod(_shape(var)) for var in eqn.outvars))


def has_inner(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop, a branch or a call."""
    return bool(inner_jaxprs(eqn))


def multiplies(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution, or has one inside."""
    return eqn.primitive.name in _PRODUCTS or any(multiplies(inner) for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns)


def coarsest_dtype(eqns: Iterable[JaxprEqn]) -> Any:
    """The floating type with the fewest digits that is computed with, looking into loops and calls; None without any."""
    found: list[Any] = []
    for eqn in eqns:
        found += [getattr(var.aval, "dtype", None) for var in eqn.outvars]
        found += [coarsest_dtype(jaxpr.eqns) for jaxpr in inner_jaxprs(eqn)]
    floating = [dtype for dtype in found if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]
    return max(floating, key=lambda dtype: jnp.finfo(dtype).eps, default=None)


def _flops(eqns: Iterable[JaxprEqn]) -> float:
    return sum(count_flops(eqn) for eqn in eqns)


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The bodies of a loop, a branch or a call."""
    found: list[Jaxpr] = []
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())
