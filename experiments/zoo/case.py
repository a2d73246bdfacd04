"""What the experiment asks of a model: a loss over its parameters, where they come from, and batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["Case"]


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
