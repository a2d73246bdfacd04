"""What an equation costs in FLOPs and bytes, from shapes alone; a multiply and an add count two, an elementwise result one."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxpp.stages.jaxpr import FREE, all_equations, attended, kind_of, terms, work_of
from jaxpp.types import DType


def count_bytes(aval: object) -> int:
    """Bytes of one value; a key counts as its two 32-bit words."""
    size = math.prod(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return size * (8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize)


def count_flops(eqn: JaxprEqn, *, elementwise: bool = True) -> float:
    """Floating-point operations of one equation, looking into loops, branches and calls."""
    results, summed = sum(math.prod(getattr(var.aval, "shape", ())) for var in eqn.outvars), terms(eqn)
    if summed is not None:
        return 2.0 * results * summed
    if (flops := attended(eqn)) is not None:
        return flops
    inside = work_of(eqn, lambda body: sum(count_flops(each, elementwise=elementwise) for each in body.eqns))
    if inside is not None:
        return inside
    return float(results) if elementwise and kind_of(eqn) not in FREE else 0.0


def product_flops(eqn: JaxprEqn) -> float:
    """Those of its matrix products and convolutions alone."""
    return count_flops(eqn, elementwise=False)


def coarsest_dtype(eqns: Iterable[JaxprEqn]) -> DType | None:
    """The floating type with the fewest digits that is computed with, looking into loops and calls; None without any."""
    dtypes = (getattr(var.aval, "dtype", None) for eqn in all_equations(eqns) for var in eqn.outvars)
    floating = [dtype for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]
    return max(floating, key=lambda dtype: jnp.finfo(dtype).eps, default=None)
