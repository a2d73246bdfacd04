"""Theta and theta[t] as one tree: the parameters that all tasks share, and those of the active one.

The loss and the optimizers are joined likewise, so that all that follows sees one loss of one tree. Each part keeps its own
optimizer: a step count of theta[t] is its own, and a clipped norm is that of one part.
"""

import inspect
from typing import Any

import jax
import optax

from jaxpp.types import LossFn

__all__ = ["Joint", "join_losses", "join_optimizers", "without_joint"]

_KEYS = (jax.tree_util.GetAttrKey("shared"), jax.tree_util.GetAttrKey("task"))


@jax.tree_util.register_pytree_with_keys_class
class Joint:
    """Two parameter trees.

    Attributes:
        shared: Theta.
        task: theta[t].
    """

    def __init__(self, shared: Any, task: Any):
        self.shared, self.task = shared, task

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For JAX."""
        return tuple(zip(_KEYS, (self.shared, self.task), strict=True)), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> "Joint":
        """For JAX."""
        return cls(*parts)


def without_joint(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A path in the user's own tree: what is shared has no name of its own."""
    return path[1:] if path[:1] == _KEYS[:1] else path


def join_losses(loss_fn: LossFn) -> LossFn:
    """``loss_fn(params, task_params, ...)`` as a loss of a ``Joint``."""

    def joint(params: Any, *rest: Any, **named: Any) -> Any:
        return loss_fn(params.shared, params.task, *rest, **named)

    joint.__name__ = getattr(loss_fn, "__name__", "loss_fn")
    try:
        signature = inspect.signature(loss_fn)
        parameters = list(signature.parameters.values())
        joint.__signature__ = signature.replace(parameters=parameters[:1] + parameters[2:])  # pyright: ignore[reportFunctionMemberAccess]
    except (TypeError, ValueError):  # a builtin that does not say
        pass
    return joint


def join_optimizers(shared: optax.GradientTransformation, task: optax.GradientTransformation) -> optax.GradientTransformation:
    """Each part of a ``Joint`` updated by its own optimizer; the state is a pair."""
    parts = tuple(map(optax.with_extra_args_support, (shared, task)))

    def init(params: Any) -> Any:
        return parts[0].init(params.shared), parts[1].init(params.task)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        given = (None, None) if params is None else (params.shared, params.task)
        made = [
            part.update(grad, old, own, **extra)
            for part, grad, old, own in zip(parts, (updates.shared, updates.task), state, given, strict=True)
        ]
        return Joint(made[0][0], made[1][0]), (made[0][1], made[1][1])

    return optax.GradientTransformationExtraArgs(init, update)
