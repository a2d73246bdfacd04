"""Dynamic loss scaling: small gradients of half-precision models are kept from vanishing, and overflows skip the step.

The backward starts from ``scale``, and gradients are divided by it before the update. If any is not finite, nothing is updated and
the scale is lowered; after enough finite steps it is raised. It is the user's: Flax's ``DynamicScale``, or a dataclass like it.

With ``delay`` the backwards of a step begin before it is known whether the step before was skipped. So they start from the scale as
it was before that step, as they read the parameters before it, and gradients are divided by what they were made with. Each step
that is found not finite is skipped and lowers the newest scale once: two in a row, of which the second had begun, lower it twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import ArgumentError
from jaxpp.stages.floating import has_gradient
from jaxpp.types import Array

_FIELDS = ("scale", "fin_steps", "growth_factor", "backoff_factor", "growth_interval", "minimum_scale")


def check_loss_scale(loss_scale: Any, *, late: bool = False) -> "Scaling | None":
    """How to scale, from the object that the user passed, by the scale before the last step if gradients are ``late``; or None."""
    if loss_scale is None:
        return None
    example: Any = loss_scale  # the check below narrows the other name
    known: Any = {name: getattr(loss_scale, name) for name in _FIELDS if hasattr(loss_scale, name)}
    if isinstance(loss_scale, type) or not dataclasses.is_dataclass(loss_scale) or len(known) < len(_FIELDS):
        rule = f"a loss scale is a dataclass with {', '.join(_FIELDS)}"
        raise ArgumentError("loss_scale", rule, repr(loss_scale), "pass flax.training.dynamic_scale.DynamicScale()")
    odd = [f"{name}={value!r}" for name, value in known.items() if name != "minimum_scale" and np.shape(value) != ()]
    odd += [f"{name}=None" for name in ("scale", "fin_steps") if known[name] is None]
    order = jax.tree.leaves(dataclasses.replace(example, scale=0, fin_steps=1))
    if odd or sorted(order, key=str) != [0, 1]:
        rule = "a loss scale is a pytree of two numbers, scale and fin_steps"
        raise ArgumentError("loss_scale", rule, odd or f"leaves {order}", "pass flax.training.dynamic_scale.DynamicScale()")
    wanted = {"scale": known["scale"] > 0, "growth_factor": known["growth_factor"] >= 1}
    wanted |= {"backoff_factor": 0 < known["backoff_factor"] <= 1, "growth_interval": known["growth_interval"] >= 1}
    wrong = [f"{name}={known[name]!r}" for name, fine in wanted.items() if not fine]
    if wrong:
        rule = "a loss scale is positive, grows by a factor of at least 1 and falls by one of at most 1"
        raise ArgumentError("loss_scale", rule, wrong, "pass for example DynamicScale(growth_interval=2000)")
    return Scaling(loss_scale, order.index(0), order.index(1), len(order) if late else order.index(0))


def _all_of(flags: Sequence[Array]) -> Array:
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))


class Scaling(NamedTuple):
    """How a loss is scaled."""

    example: Any  # the user's object, at the beginning
    scale: int  # the number of the scale among its leaves
    fin_steps: int  # the number of the count of finite steps since the last change
    by: int  # the number of the scale of the next gradients: with ``delay`` the one before the last step, behind the others

    @property
    def is_late(self) -> bool:
        """Whether gradients are made with the scale before the last step."""
        return self.by != self.scale

    def init(self) -> list[jax.Array]:
        """The leaves at the beginning."""
        numbers = {self.scale: self.example.scale, self.fin_steps: self.example.fin_steps, self.by: self.example.scale}
        values = {k: jnp.asarray(number, int if k == self.fin_steps else jnp.float32) for k, number in numbers.items()}
        return [values[k] for k in sorted(values)]

    def unscale(
        self, grads: Sequence[Array], leaves: Sequence[Array], all_of: Callable[[Sequence[Array]], Array] = _all_of
    ) -> tuple[list[Array], Array]:
        """The gradients divided by the scale, and whether all are finite: ``all_of`` what is true or false of each of them."""
        scale = leaves[self.by]
        finite = all_of([jnp.isfinite(_divided(grad, scale)).all() if has_gradient(grad) else jnp.asarray(True) for grad in grads])
        late = jnp.where(finite, scale, 1.0)  # so that the update waits for the verdict, and runs as one program a stage
        return [_divided(grad, late).astype(grad.dtype) if has_gradient(grad) else grad for grad in grads], finite

    def adjust(self, leaves: Sequence[Array], finite: Array) -> list[Array]:
        """The leaves after a step, without what was known before it."""
        scale, count, rule = leaves[self.scale], leaves[self.fin_steps], self.example
        grow = count == rule.growth_interval
        raised = jnp.where(grow, jnp.minimum(scale * rule.growth_factor, jnp.finfo(jnp.float32).max), scale)
        lowered = scale * rule.backoff_factor
        lowered = lowered if rule.minimum_scale is None else jnp.maximum(lowered, rule.minimum_scale)
        new = {self.scale: jnp.where(finite, raised, lowered), self.fin_steps: jnp.where(grow | ~finite, 0, count + 1)}
        return [new[k].astype(leaves[k].dtype) for k in sorted(new)]


def _divided(grad: Array, scale: Array) -> Array:
    wide = jnp.float32 if grad.dtype.itemsize == 1 else jnp.promote_types(grad.dtype, jnp.float32)  # JAX promotes no float8
    return grad.astype(wide) / scale.astype(wide)
