"""The models of language, on the Python standard library's sources: the next byte, and the capital letters of a line."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.lm import text
from experiments.problems import cross_entropy
from experiments.zoo.case import Case
from experiments.zoo.data import HELD_OUT_BATCHES, LENGTH, PAD, VOCABULARY, corpus, held_out_batches, lines, sampler
from models.gpt import GPT
from models.nnx_gpt import NNXGPT
from models.seq2seq import Seq2Seq

__all__ = ["gpt", "nnx_gpt", "seq2seq"]

WIDTH, HEADS, DROPOUT = 32, 2, 0.1


def gpt(size: int, seed: int) -> Case:
    """A GPT in Linen; its dropout is drawn with the step's key.

    Args:
        size: sequences of a batch.
        seed: of the batches.
    """
    model = GPT(VOCABULARY, LENGTH, WIDTH, depth=4, num_heads=HEADS, dropout=DROPOUT)

    def loss_fn(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}), batch[:, 1:])

    def eval_loss(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[:, :-1], deterministic=True), batch[:, 1:])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, LENGTH), int), deterministic=True)["params"]

    return _next_byte(size, seed, loss_fn, eval_loss, init, takes_key=True)


def nnx_gpt(size: int, seed: int) -> Case:
    """The same in NNX, split the way its users do: the keys and counts of its dropout are model state.

    Args:
        size: sequences of a batch.
        seed: of the batches.
    """

    def make(key: jax.Array) -> NNXGPT:
        return NNXGPT(VOCABULARY, LENGTH, WIDTH, depth=4, num_heads=HEADS, dropout=DROPOUT, rngs=nnx.Rngs(key))

    graphdef = nnx.graphdef(nnx.eval_shape(make, jax.random.key(0)))

    def loss_fn(params: Any, rest: Any, batch: jax.Array) -> tuple[jax.Array, tuple[Any, dict]]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        return loss, (nnx.state(model, nnx.Not(nnx.Param)), {})

    def eval_loss(params: Any, rest: Any, batch: jax.Array) -> tuple[jax.Array, tuple[Any, dict]]:
        model = nnx.merge(graphdef, params, rest, copy=True)
        return cross_entropy(model(batch[:, :-1], deterministic=True), batch[:, 1:]), (rest, {})

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, rest = nnx.split(make(key), nnx.Param, ...)
        return params, rest

    return _next_byte(size, seed, loss_fn, eval_loss, init, has_state=True)


def seq2seq(size: int, seed: int) -> Case:
    """An encoder-decoder that reads a line in small letters and writes it as it was; the loss is a mean over real bytes.

    Args:
        size: lines of a batch.
        seed: of the batches.
    """
    model = Seq2Seq(VOCABULARY, LENGTH, WIDTH, depth=2, num_heads=HEADS, dropout=0.0, pad=PAD)
    data = lines()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        target = batch["target"]
        logits: Any = model.apply({"params": params}, batch["source"], target[:, :-1], deterministic=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), target[:, 1:])
        return losses.mean(where=target[:, 1:] != PAD)

    def init(key: jax.Array) -> Any:
        empty = jnp.zeros((1, LENGTH), int)
        return model.init(key, empty, empty, deterministic=True)["params"]

    def num_real(batch: Any) -> jax.Array:
        return (batch["target"][:, 1:] != PAD).sum()

    batches = sampler(data.train, size, seed), held_out_batches(data.held_out, size)
    return Case("a line's capital letters", loss_fn, loss_fn, init, *batches, rate=3e-3, weight=num_real)


def _next_byte(
    size: int, seed: int, loss_fn: Any, eval_loss: Any, init: Any, *, takes_key: bool = False, has_state: bool = False
) -> Case:
    data = corpus()
    return Case(
        "the next byte",
        loss_fn,
        eval_loss,
        init,
        lambda step: text.batch(data.train, LENGTH, size, seed, step),
        text.held_out_batches(data.held_out, LENGTH, size, HELD_OUT_BATCHES),
        rate=3e-3,
        takes_key=takes_key,
        has_state=has_state,
    )
