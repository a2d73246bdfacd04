"""What the experiment asks of a model: a loss over its parameters, where they come from, and batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

__all__ = ["Case", "cross_entropy"]


@dataclass(frozen=True)
class Case:
    """A model and what it learns.

    Attributes:
        task: what, in words.
        loss_fn: ``loss_fn(params, batch[, key]) -> loss``; with ``has_state``
            ``loss_fn(params, model_state, batch[, key]) -> (loss, (new_model_state, aux))``.
        eval_loss: the same without dropout, and with running averages, of the same form.
        init: ``init(key) -> params``, or ``(params, model_state)``.
        batch: the batch of a step.
        held_out: batches that are not trained on.
        rate: learning rate.
        takes_key: whether ``loss_fn`` does; ``eval_loss`` never does.
        has_state: whether the model has state that is not trained.
        weight: of a microbatch, from its part of the batch; its size unless given.
    """

    task: str
    loss_fn: Callable[..., Any]
    eval_loss: Callable[..., Any]
    init: Callable[[jax.Array], Any]
    batch: Callable[[int], Any]
    held_out: tuple[Any, ...]
    rate: float
    takes_key: bool = False
    has_state: bool = False
    weight: Callable[[Any], Any] | None = None


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean over all labels, in nats; in float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, "float32"))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
