"""What is trained: a GPT on the Python standard library's sources, an MLP on handwritten digits; and how they are sharded."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.lm import text
from experiments.problems import cross_entropy
from experiments.zoo.data import digits, sampler
from models.gpt import GPT
from models.mlp import MLP

__all__ = ["Problem", "gpt", "mlp"]

VOCABULARY = 256  # bytes
PIXELS, CLASSES = 64, 10


class Problem(NamedTuple):
    """What a pipeline, and the plain loop beside it, are given.

    Attributes:
        loss_fn: ``loss_fn(params, batch, key)``.
        init: ``init(key) -> params``.
        batch: the batch of each step, a function of the seed and the step alone.
        shardings: which parameters are sharded over ``model``, and by which rule.
    """

    loss_fn: Callable[..., jax.Array]
    init: Callable[[jax.Array], Any]
    batch: Callable[[int], Any]
    shardings: Mapping[str, str]


def gpt(width: int, depth: int, heads: int, length: int, batch: int, dropout: float, seed: int, dtype: str) -> Problem:
    """A GPT that predicts the next byte, its embedding and head tied.

    Args:
        width: features of the residual stream.
        depth: transformer blocks.
        heads: attention heads a block.
        length: bytes of a sequence.
        batch: sequences.
        dropout: rate; drawn with the step's key, so every microbatch needs the same one wherever it runs.
        seed: of the batches.
        dtype: of the parameters, and what is computed in.
    """
    model, data = GPT(VOCABULARY, length, width, depth, heads, dropout, param_dtype=dtype), text.read(None, length).train

    def loss_fn(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}), batch[:, 1:])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, length), int), deterministic=True)["params"]

    shardings = {"*/attn": "heads", "*/fc": "column", "*/proj": "row", "embed": "embedding"}
    return Problem(loss_fn, init, lambda step: text.batch(data, length, batch, seed, step), shardings)


def mlp(width: int, depth: int, batch: int, seed: int, dtype: str) -> Problem:
    """A multilayer perceptron that names the digit; its hidden layers are sharded by column and by row by turns.

    Args:
        width: features of each hidden layer.
        depth: hidden layers.
        batch: images.
        seed: of the batches.
        dtype: of the parameters, and what is computed in.
    """
    model = MLP(width, depth, CLASSES, param_dtype=dtype)

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        return cross_entropy(model.apply({"params": params}, batch["image"].reshape(-1, PIXELS)), batch["label"])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, PIXELS)))["params"]

    shardings = {f"dense_{k}": ("column", "row")[k % 2] for k in range(depth)}
    return Problem(loss_fn, init, sampler(digits().train, batch, seed), shardings)
