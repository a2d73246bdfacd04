"""The model that generates: a GPT trained for a few steps through the pipeline, or one that ``experiments.lm`` has saved."""

from contextlib import closing
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

import jaxpp
from experiments.generate.plain import DecodeFn
from experiments.lm import text
from experiments.lm.checkpoints import Checkpoints
from experiments.lm.main import Config as Training
from experiments.lm.main import make_trainer, open_checkpoints
from experiments.options import ConfigError
from jaxpp.runtime.progress import progress
from models.gpt import GPT

__all__ = ["Trained", "train"]


class Trained(NamedTuple):
    """A trained model on the stages of a pipeline.

    Attributes:
        pipe: the pipeline.
        state: its newest state.
        model: the GPT.
        decode: ``decode(params, cache, tokens) -> cache, logits``; one function, as every other would be compiled anew.
        corpus: the text that it was trained on, and the text held out.
        loss: of the last step; None if the model was read from a checkpoint.
    """

    pipe: jaxpp.Pipeline
    state: jaxpp.State
    model: GPT
    decode: DecodeFn
    corpus: text.Corpus
    loss: float | None

    def empty(self, length: int) -> Any:
        """The empty cache of one sequence.

        Args:
            length: tokens that it has room for.
        """
        shapes = jax.eval_shape(self.model.clone(decode=True).init, jax.random.key(0), jnp.ones((1, length), int))["cache"]
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def decoding(model: GPT) -> DecodeFn:
    """What both the pipeline and one device run: the cache after ``tokens``, and the logits of what follows each of them."""
    decoder = model.clone(decode=True)

    def decode(params: Any, cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        logits, updated = decoder.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return updated["cache"], logits

    return decode


def train(config: Training) -> Trained:
    """Train the model, or read it where ``config.checkpoint`` names a folder.

    Args:
        config: of ``experiments.lm``.

    Raises:
        TextError: the text cannot be read or is too short.
        ConfigError: nothing is saved in the folder, or another run.
    """
    corpus = text.read(config.text, config.length)
    checkpoints = _saved(config, corpus)
    sizes: dict[str, Any] = {"width": config.width, "depth": config.depth, "num_heads": config.heads}
    model = GPT(max_length=config.length, dropout=config.dropout, dtype=config.dtype, **sizes)

    def loss_fn(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key})
        logprobs = jax.nn.log_softmax(logits.astype("float32"))
        return -jnp.take_along_axis(logprobs, batch[:, 1:, None], axis=-1).mean()

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, config.length), int), deterministic=True)["params"]

    pipe = cast("jaxpp.Pipeline", make_trainer(config, loss_fn))  # as config.plain is off
    init_key, train_key = jax.random.split(jax.random.key(config.seed))
    batch = text.batch(corpus.train, config.length, config.batch, config.seed, 0)
    if checkpoints is not None:
        with closing(checkpoints):
            state = checkpoints.restore(pipe.abstract_state(init, init_key, batch))
        return Trained(pipe, state, model, decoding(model), corpus, None)
    state, loss = pipe.init(init, init_key, batch), cast("Any", jnp.nan)
    with progress(range(config.steps), unit="step", desc="train") as steps:
        for step in steps:
            batch = text.batch(corpus.train, config.length, config.batch, config.seed, step)
            state, metrics = pipe.step(state, batch, jax.random.fold_in(train_key, step))
            loss = metrics.loss
    return Trained(pipe, state, model, decoding(model), corpus, float(loss))


def _saved(config: Training, corpus: text.Corpus) -> Checkpoints | None:
    """The checkpoints of the folder, if a folder was named."""
    found = open_checkpoints(config, corpus)
    if found is not None and found.safe_step is None:
        found.close()
        option = f"--checkpoint {config.checkpoint}"
        fix = f"run python -m experiments.lm {option} before, or leave it out to train here"
        raise ConfigError(f"{option}: nothing is saved there. Fix: {fix}.")
    return found
