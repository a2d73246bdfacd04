"""Parameters in two parts: those that all replicas share, and those of which each replica has its own (a task's).

Losses and optimizers of both parts are made into one of a single tree; each optimizer keeps its step count and clipped norm.
"""

import inspect
from collections.abc import Hashable
from dataclasses import dataclass

import jax
import optax

from jaxpp.types import LossFn, Params, Tree

OWN_NAME = "task"  # What paths of the second part begin with: the name of its field
_SHARED = (jax.tree_util.GetAttrKey("shared"),)


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class Joint:
    """Two parameter trees: what all replicas share (Theta), and what each has of its own (theta[t])."""

    shared: Params
    task: Params


def num_own(params: Params) -> int:
    """How many leaves of a parameter tree belong to the part of which each replica has its own; they are the last."""
    return len(jax.tree.leaves(params.task)) if isinstance(params, Joint) else 0


def num_shared(params: Params) -> int:
    """How many leaves of a parameter tree all replicas share; they are the first."""
    return len(jax.tree.leaves(params)) - num_own(params)


def without_joint(path: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """A path in the user's own tree: the shared part has no name of its own there."""
    return path[1:] if path[:1] == _SHARED else path


def join_losses(loss_fn: LossFn) -> LossFn:
    """``loss_fn(params, task_params, ...)`` as a loss of a ``Joint``; equal to the joint loss of an equal ``loss_fn``."""
    return _JointLoss(loss_fn)


@dataclass(frozen=True)
class _JointLoss:
    """A loss of a ``Joint``: without these words Python 3.11.2 would look for the signature of the class, and fail."""

    function: LossFn

    def __call__(self, params: Joint, *rest: Tree, **named: Tree) -> Tree:
        return self.function(params.shared, params.task, *rest, **named)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "loss_fn")

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.function)
        parameters = list(signature.parameters.values())
        return signature.replace(parameters=parameters[:1] + parameters[2:])


def join_optimizers(shared: optax.GradientTransformation, own: optax.GradientTransformation) -> optax.GradientTransformation:
    """Each part of a ``Joint`` updated by its own optimizer; the state is a pair."""
    parts = tuple(map(optax.with_extra_args_support, (shared, own)))

    def init(params: Params) -> Tree:
        return parts[0].init(params.shared), parts[1].init(params.task)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Tree) -> tuple[Tree, Tree]:
        both = (None, None) if params is None else (params.shared, params.task)
        shared, shared_state = parts[0].update(updates.shared, state[0], both[0], **extra)
        own, own_state = parts[1].update(updates.task, state[1], both[1], **extra)
        return Joint(shared, own), (shared_state, own_state)

    return optax.GradientTransformationExtraArgs(init, update)
