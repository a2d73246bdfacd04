"""The models that are timed: random data, as only its shape counts here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.memory.pairs import gpt, mlp
from experiments.problems import Problem, cross_entropy
from models.resnet import ResNet

__all__ = ["PROBLEMS", "Sizes"]

Sizes = Any
"""The configuration, of which each problem reads its own sizes."""


def _gpt(sizes: Sizes, compute: str) -> Problem:
    shape = sizes.gpt_width, sizes.gpt_depth, sizes.gpt_heads, sizes.gpt_length, sizes.gpt_batch
    return gpt(*shape, sizes.dropout, compute, sizes.gpt_vocabulary)


def _mlp(sizes: Sizes, compute: str) -> Problem:
    return mlp(sizes.mlp_width, sizes.mlp_depth, sizes.mlp_batch, compute)


def _resnet(sizes: Sizes, compute: str) -> Problem:
    """A ResNet that normalises by the statistics of the microbatch; its running averages are left as they were."""
    model = ResNet(width=sizes.resnet_width, groups=(3, 3, 3), dtype=compute)
    rng = np.random.default_rng(0)
    shape = (sizes.resnet_batch, sizes.resnet_size, sizes.resnet_size, 3)
    batch = {"x": rng.normal(size=shape).astype("float32"), "y": rng.integers(0, 10, sizes.resnet_batch, "int32")}
    averages = jax.eval_shape(model.init, jax.random.key(0), batch["x"][:1])["batch_stats"]
    averages = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), averages)

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        logits, _ = model.apply({"params": params, "batch_stats": averages}, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, *shape[1:])))["params"]

    return Problem(loss_fn, init, batch)


PROBLEMS: dict[str, Callable[[Sizes, str], Problem]] = {"gpt": _gpt, "resnet": _resnet, "mlp": _mlp}
"""How each model is made, from the sizes and the type to compute in."""
