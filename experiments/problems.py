"""The problem that several experiments share: an MLP that sorts random vectors into classes, as only its shape counts there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpp.types import Batch, Params
from models.mlp import MLP

__all__ = ["Problem", "cross_entropy", "mlp"]


class Problem(NamedTuple):
    """What a pipeline is given.

    Attributes:
        loss_fn: ``loss_fn(params, batch[, key])``.
        init: ``init(key) -> params``.
        batch: numpy arrays, so that no device holds them before they are sent.
    """

    loss_fn: Callable[..., jax.Array]
    init: Callable[[jax.Array], Params]
    batch: Batch


def mlp(width: int, depth: int, batch: int, num_classes: int = 2, compute: str = "float32") -> Problem:
    """A multilayer perceptron, and a loss without a key.

    Args:
        width: features of each hidden layer, and of the input.
        depth: hidden layers.
        batch: examples.
        num_classes: outputs of the head.
        compute: type to compute in; parameters are float32.
    """
    model = MLP(width, depth, num_classes, compute)

    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch["x"]), batch["y"])

    def init(key: jax.Array) -> Params:
        return model.init(key, jnp.zeros((1, width)))["params"]

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch, width)).astype("float32"), rng.integers(0, num_classes, batch, "int32")
    return Problem(loss_fn, init, {"x": x, "y": y})


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in nats; in float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, "float32"))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
