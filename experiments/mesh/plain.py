"""The oracle: the same training on one device, with nothing of jaxpp in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.mesh.problems import Problem

__all__ = ["Trained", "furthest", "train_plainly"]

FLOOR = 0.01  # of the largest leaf: smaller ones are compared as if they had that size, as pipe.verify does with gradients


class Trained(NamedTuple):
    """What training came to.

    Attributes:
        losses: of each step.
        params: after the last one, on the host.
    """

    losses: tuple[float, ...]
    params: Any


def train_plainly(problem: Problem, step: Callable[..., Any], optimizer: Any, keys: tuple[Any, jax.Array], steps: int) -> Trained:
    """Train on one device.

    Args:
        problem: what.
        step: of ``experiments.plain.plain_step``.
        optimizer: the same as its.
        keys: of the parameters, and of the training: step k gets ``jax.random.fold_in(key, k)``.
        steps: how many.
    """
    params = jax.jit(problem.init)(keys[0])
    state, losses = (params, optimizer.init(params)), []
    for k in range(steps):
        state, (loss, _) = step(state, problem.batch(k), jax.random.fold_in(keys[1], k))
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
