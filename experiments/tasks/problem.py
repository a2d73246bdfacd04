"""The tasks: handwritten digits with their pixels shuffled and their classes renamed, in another way for each task."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from experiments.zoo.data import digits
from models.adapters import AdaptedMLP

__all__ = ["CLASSES", "PATH", "PIXELS", "Problem", "make_problem", "shuffled"]

PIXELS, CLASSES = 64, 10
PATH = "task"
"""Where a task's own parameters are in those of the module."""
_TASK, _ORDER, _BATCH = range(3)  # what a seed draws


class Problem(NamedTuple):
    """What is trained, by whatever way.

    Attributes:
        loss_fn: ``loss_fn(params, task_params, batch)``: of one module, its parameters in two parts.
        predict: ``predict(params, task_params, images)``: the classes.
        shared: ``shared(key)`` makes the parameters of the trunk.
        own: ``own(key)`` makes those of a task.
        key: of the trunk.
        keys: of each task.
        task: ``task(step)``: which task a step is of.
        batch: ``batch(step)``: its examples.
        held_out: ``held_out(task)``: digits of other people.
    """

    loss_fn: Callable[..., Any]
    predict: Callable[..., Any]
    shared: Callable[[Any], Any]
    own: Callable[[Any], Any]
    key: Any
    keys: dict[int, Any]
    task: Callable[[int], int]
    batch: Callable[[int], Any]
    held_out: Callable[[int], Any]


def make_problem(model: AdaptedMLP, num_tasks: int, size: int, order: str, seed: int) -> Problem:
    """So many tasks for one model.

    Args:
        model: of all of them.
        num_tasks: T.
        size: examples of a batch.
        order: ``round-robin``, or ``random``: each step draws its task.
        seed: of parameters, permutations, order and batches. Task t is the same whatever T.
    """
    key, data = jax.random.key(seed), digits()
    rows = len(data.train["label"])

    def init(key: Any) -> tuple[Any, Any]:
        return jaxpp.Bank.take(model.init(key, jnp.zeros((1, PIXELS)))["params"], PATH)

    def logits(params: Any, images: Any) -> Any:
        return model.apply({"params": params}, images)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["image"]), batch["label"])
        return losses.mean()

    def task(step: int) -> int:
        random = np.random.default_rng((seed, _ORDER, step))
        return step % num_tasks if order == "round-robin" else int(random.integers(num_tasks))

    def batch(step: int) -> Any:
        chosen = np.random.default_rng((seed, _BATCH, step)).integers(0, rows, size)
        return shuffled(jax.tree.map(lambda leaf: leaf[chosen], data.train), seed, task(step))

    return Problem(
        loss_fn=jaxpp.Bank.bind(loss_fn, PATH),
        predict=jaxpp.Bank.bind(lambda params, images: logits(params, images).argmax(-1), PATH),
        shared=lambda key: init(key)[0],
        own=lambda key: init(key)[1],
        key=key,
        keys={t: jax.random.fold_in(key, t) for t in range(num_tasks)},
        task=task,
        batch=batch,
        held_out=partial(shuffled, data.held_out, seed),
    )


def shuffled(data: Any, seed: int, task: int) -> dict[str, np.ndarray]:
    """Digits as a task has them: ``image`` of ``[rows, 64]``, and ``label``.

    Args:
        data: some of ``digits()``.
        seed: of all tasks.
        task: which; its two permutations are drawn from both numbers.
    """
    random = np.random.default_rng((seed, _TASK, task))
    pixels, classes = random.permutation(PIXELS), random.permutation(CLASSES).astype("int32")
    return {"image": data["image"].reshape(-1, PIXELS)[:, pixels], "label": classes[data["label"]]}
