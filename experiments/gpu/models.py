"""The models that a plan is made of, by name: those of the other parts, the GPT as a loop over its blocks, and two of the zoo."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.gpu.sizes import Sizes
from experiments.problems import Problem, cross_entropy
from experiments.remat.problems import PROBLEMS
from models.gpt import GPT
from models.seq2seq import Seq2Seq
from models.unet import UNet

__all__ = ["MODELS", "count_of"]

_PAD = 0


def _scanned_gpt(sizes: Sizes, compute: str) -> Problem:
    of, length = sizes.models, sizes.models.gpt_length
    shape = of.gpt_vocabulary, length, of.gpt_width, of.gpt_depth, of.gpt_heads
    model = GPT(*shape, dropout=0.0, dtype=compute, scan=True)  # one program for all blocks of a stage

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        return cross_entropy(model.apply({"params": params}, batch[:, :-1]), batch[:, 1:])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, length), int))["params"]

    return Problem(loss_fn, init, np.zeros((of.gpt_batch, length + 1), "int32"))


def _unet(sizes: Sizes, compute: str) -> Problem:
    of = sizes.zoo
    shape = of.unet_batch, of.unet_size, of.unet_size, 1
    model = UNet(width=of.unet_width, levels=of.unet_levels, dtype=compute)

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        found: Any = model.apply({"params": params}, batch["noisy"])
        return jnp.mean((found.astype("float32") - batch["clean"]) ** 2)

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, *shape[1:])))["params"]

    return Problem(loss_fn, init, {"noisy": np.zeros(shape, "float32"), "clean": np.zeros(shape, "float32")})


def _seq2seq(sizes: Sizes, compute: str) -> Problem:
    of = sizes.zoo
    shape = of.seq2seq_width, of.seq2seq_depth, of.seq2seq_heads
    model = Seq2Seq(of.seq2seq_vocabulary, of.seq2seq_length, *shape, dropout=0.0, pad=_PAD, dtype=compute)

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        target = batch["target"]
        logits: Any = model.apply({"params": params}, batch["source"], target[:, :-1], deterministic=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), target[:, 1:])
        return losses.mean(where=target[:, 1:] != _PAD)

    def init(key: jax.Array) -> Any:
        empty = jnp.zeros((1, of.seq2seq_length), int)
        return model.init(key, empty, empty, deterministic=True)["params"]

    rows, length = of.seq2seq_batch, of.seq2seq_length
    return Problem(loss_fn, init, {"source": np.zeros((rows, length), "int32"), "target": np.zeros((rows, length + 1), "int32")})


MODELS: Mapping[str, Callable[[Sizes, str], Problem]] = {
    "gpt": lambda sizes, compute: PROBLEMS["gpt"](sizes.models, compute),
    "scanned_gpt": _scanned_gpt,
    "mlp": lambda sizes, compute: PROBLEMS["mlp"](sizes.models, compute),
    "resnet": lambda sizes, compute: PROBLEMS["resnet"](sizes.models, compute),
    "unet": _unet,
    "seq2seq": _seq2seq,
}
"""How each model is made, from the sizes and the type to compute in."""


def count_of(model: str, batch: Any) -> tuple[int, str]:
    """What a step gets through, and what that is called: the tokens that a language model predicts, or examples."""
    if model in ("gpt", "scanned_gpt"):
        return batch.shape[0] * (batch.shape[1] - 1), "tokens"
    if model == "seq2seq":
        return batch["target"].shape[0] * (batch["target"].shape[1] - 1), "tokens"
    return len(jax.tree.leaves(batch)[0]), "examples"
