"""The pairs of model and schedule, and the problems that the models learn: random data, as only its shape counts here."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import problems
from experiments.problems import Problem, cross_entropy
from models.gpt import GPT

__all__ = ["PAIRS", "Pair", "gpt", "mlp"]

VOCABULARY, CLASSES = 256, 10


@dataclass(frozen=True)
class Pair:
    """A model and how its step runs.

    Attributes:
        model: ``mlp`` or ``gpt``.
        schedule: a name of ``jaxpp.schedule.SCHEDULES``.
        compute: type to compute in; parameters are float32.
        remat: ``keep``, ``least``, ``recompute``, or the name of a policy of ``jax.checkpoint_policies``.
        suffix: of the name, for what is unusual.
    """

    model: str
    schedule: str
    compute: str = "float32"
    remat: str = "keep"
    suffix: str = ""

    @property
    def name(self) -> str:
        """What it is called: ``gpt-1f1b-bf16``."""
        return "-".join(filter(None, (self.model, self.schedule, self.suffix)))

    @property
    def policy(self) -> Any:
        """Its ``remat`` as ``jaxpp.Pipeline`` takes it."""
        return self.remat if self.remat in ("keep", "least", "recompute") else getattr(jax.checkpoint_policies, self.remat)


_PAIRS = (
    *(Pair("mlp", schedule) for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-min")),
    Pair("mlp", "zb-v", remat="recompute", suffix="recompute"),
    Pair("gpt", "1f1b"),
    Pair("gpt", "1f1b", compute="bfloat16", suffix="bf16"),
    Pair("gpt", "1f1b", remat="least", suffix="least"),
    Pair("gpt", "1f1b", compute="bfloat16", remat="least", suffix="bf16-least"),
    Pair("gpt", "zb-h1", suffix="keep"),
    Pair("gpt", "zb-h1", remat="least", suffix="least"),
    Pair("gpt", "1f1b", remat="dots_with_no_batch_dims_saveable", suffix="dots"),
    Pair("gpt", "1f1b", remat="recompute", suffix="recompute"),
)
PAIRS = {pair.name: pair for pair in _PAIRS}
"""Each pair by its name, in the order of the table: a model under six schedules, then another under two of them in several ways."""


def mlp(width: int, depth: int, batch: int, compute: str) -> Problem:
    """A multilayer perceptron that sorts vectors into classes.

    Args:
        width: features of each hidden layer, and of the input.
        depth: hidden layers.
        batch: examples.
        compute: type to compute in.
    """
    plain = problems.mlp(width, depth, batch, CLASSES, compute)
    return plain._replace(loss_fn=lambda params, batch, key: plain.loss_fn(params, batch))  # noqa: ARG005


def gpt(
    width: int, depth: int, heads: int, length: int, batch: int, dropout: float, compute: str, vocabulary: int = VOCABULARY
) -> Problem:
    """A GPT that predicts the next token, its embedding and head tied.

    Args:
        width: features of the residual stream.
        depth: transformer blocks.
        heads: attention heads a block.
        length: tokens of a sequence.
        batch: sequences.
        dropout: rate.
        compute: type to compute in.
        vocabulary: tokens there are.
    """
    model = GPT(vocabulary, max_length=length, width=width, depth=depth, num_heads=heads, dropout=dropout, dtype=compute)

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return cross_entropy(model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}), batch[:, 1:])

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, length), int), deterministic=True)["params"]

    return Problem(loss_fn, init, np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1), "int32"))
