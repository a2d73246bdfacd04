"""The models that are timed, and models that are one thread wide. The data are random, as only their shapes count here."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import problems
from experiments.memory.pairs import gpt
from experiments.problems import Problem
from experiments.remat.problems import PROBLEMS as KEYED

__all__ = ["PROBLEMS", "Sizes", "looped", "one_thread", "sizes_of"]


class Sizes(NamedTuple):
    """The sizes of a model.

    Attributes:
        width: features of a layer, or channels of the ResNet's first group.
        depth: hidden layers or blocks; the ResNet always has three groups of three blocks.
        batch: examples of a step.
        length: tokens of a sequence, or pixels of an image's side.
        ranks: devices; schedules with two stages on a rank get twice as many stages.
    """

    width: int
    depth: int
    batch: int
    length: int
    ranks: int


def _mlp(sizes: Sizes) -> Problem:
    return problems.mlp(sizes.width, sizes.depth, sizes.batch)


def _gpt(sizes: Sizes) -> Problem:
    return _keyless(gpt(sizes.width, sizes.depth, max(1, sizes.width // 64), sizes.length, sizes.batch, 0.0, "float32"))


def _resnet(sizes: Sizes) -> Problem:
    given = SimpleNamespace(resnet_width=sizes.width, resnet_size=sizes.length, resnet_batch=sizes.batch)
    return _keyless(KEYED["resnet"](given, "float32"))


def _keyless(problem: Problem) -> Problem:
    """The same loss without its key, which it does not use."""
    return problem._replace(loss_fn=lambda params, batch: problem.loss_fn(params, batch, jax.random.key(0)))


PROBLEMS: dict[str, tuple[Callable[[Sizes], Problem], Sizes]] = {
    "tiny": (_mlp, Sizes(width=128, depth=16, batch=32, length=1, ranks=4)),
    "mlp2k": (_mlp, Sizes(width=2048, depth=8, batch=1024, length=1, ranks=2)),
    "gpt-small": (_gpt, Sizes(width=512, depth=8, batch=8, length=256, ranks=4)),
    "resnet": (_resnet, Sizes(width=16, depth=3, batch=64, length=32, ranks=4)),
}
"""How each model is made, and its usual sizes."""


def sizes_of(name: str, num_microbatches: int, given: dict[str, int]) -> Sizes:
    """The sizes of a model: the usual ones, unless others are given; the batch divides into equal microbatches.

    Args:
        name: of the model.
        num_microbatches: parts of the batch.
        given: sizes other than the usual ones; 0 stands for the usual one.
    """
    sizes = PROBLEMS[name][1]._replace(**{key: value for key, value in given.items() if value})
    return sizes._replace(batch=num_microbatches * math.ceil(sizes.batch / num_microbatches))


def one_thread(num_stages: int, num_steps: int, width: int, batch: int) -> Problem:
    """Stages that use one thread each: a loop of matrix products that are too small to be divided.

    A stage is a trained matrix followed by ``x = tanh(x @ w)``, many times in a ``lax.scan`` with a fixed matrix ``w``. Nothing in
    the loop is independent of what comes before it, so XLA has nothing to give to a second thread.

    Args:
        num_stages: such stages in a row.
        num_steps: products of a stage.
        width: features.
        batch: examples.
    """
    rng = np.random.default_rng(0)
    fixed = [np.linalg.qr(rng.normal(size=(width, width)))[0].astype("float32") for _ in range(num_stages)]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for stage, w in enumerate(fixed):
            first = x @ params[f"stage_{stage}"]
            x, _ = jax.lax.scan(lambda x, _, w=w: (jnp.tanh(x @ w), None), first, None, length=num_steps)
        return ((x - batch["y"]) ** 2).mean()

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, num_stages)
        return {f"stage_{stage}": jnp.linalg.qr(jax.random.normal(keys[stage], (width, width)))[0] for stage in range(num_stages)}

    return Problem(loss_fn, init, {name: rng.normal(size=(batch, width)).astype("float32") for name in ("x", "y")})


def looped(num_layers: int, num_loops: int, width: int, batch: int) -> Problem:
    """Layers that are loops of products by a trained matrix of their own, computed again for the backward.

    A layer is ``jax.checkpoint`` of a ``lax.scan`` of ``x = tanh(x @ w)``, so a stage keeps little and computes much, in one
    thread if XLA divides no product.

    Args:
        num_layers: layers in a row.
        num_loops: products of a layer.
        width: features.
        batch: examples.
    """
    rng = np.random.default_rng(0)

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=num_loops)[0]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for number in range(num_layers):
            x = layer(x, params[f"layer_{number}"])
        return ((x - batch["y"]) ** 2).mean()

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, num_layers)
        return {
            f"layer_{number}": jnp.linalg.qr(jax.random.normal(keys[number], (width, width)))[0] for number in range(num_layers)
        }

    return Problem(loss_fn, init, {name: rng.normal(size=(batch, width)).astype("float32") for name in ("x", "y")})
