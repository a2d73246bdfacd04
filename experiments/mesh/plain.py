"""The oracle: the same training on one device, in one ``jax.jit``, with nothing of jaxpp in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.mesh.problems import Problem

__all__ = ["Trained", "furthest", "plain_step", "train_plainly"]

FLOOR = 0.01  # of the largest leaf: smaller ones are compared as if they had that size, as pipe.verify does with gradients


class Trained(NamedTuple):
    """What training came to.

    Attributes:
        losses: of each step.
        params: after the last one, on the host.
    """

    losses: tuple[float, ...]
    params: Any


def plain_step(loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, num_microbatches: int) -> Callable[..., Any]:
    """A step on one device, a scan over the microbatches: ``step((params, opt_state), batch, key) -> state, loss``.

    Args:
        loss_fn: ``loss_fn(params, batch, key)``; microbatch i gets ``jax.random.fold_in(key, i)``.
        optimizer: any.
        num_microbatches: parts of the batch, all of one size.
    """

    def step(state: Any, batch: Any, key: jax.Array) -> Any:
        params, opt_state = state
        pieces = jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)
        loss_like = jax.eval_shape(loss_fn, params, jax.tree.map(lambda leaf: leaf[0], pieces), key)
        zero = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), (loss_like, params))

        def add(total: Any, numbered: Any) -> Any:
            number, piece = numbered
            found = jax.value_and_grad(loss_fn)(params, piece, jax.random.fold_in(key, number))
            return jax.tree.map(lambda a, b: a + b / num_microbatches, total, found), None

        (loss, grads), _ = jax.lax.scan(add, zero, (np.arange(num_microbatches), pieces))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


def train_plainly(problem: Problem, step: Callable[..., Any], optimizer: Any, keys: tuple[Any, jax.Array], steps: int) -> Trained:
    """Train on one device.

    Args:
        problem: what.
        step: of ``plain_step``.
        optimizer: the same as its.
        keys: of the parameters, and of the training: step k gets ``jax.random.fold_in(key, k)``.
        steps: how many.
    """
    params = jax.jit(problem.init)(keys[0])
    state, losses = (params, optimizer.init(params)), []
    for k in range(steps):
        state, loss = step(state, problem.batch(k), jax.random.fold_in(keys[1], k))
        losses.append(float(loss))
    return Trained(tuple(losses), jax.device_get(state[0]))


def furthest(found: Any, wanted: Any) -> float:
    """The largest difference of two trees: of each leaf the largest one, relative to the largest number in the wanted leaf.

    Example:
        >>> furthest({"w": np.array([1.0, 4.0])}, {"w": np.array([1.0, 2.0])})
        1.0
    """
    pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)]
    largest = max(float(np.abs(b).max()) for _, b in pairs)
    return max(float(np.abs(a - b).max()) / max(float(np.abs(b).max()), FLOOR * largest) for a, b in pairs)
