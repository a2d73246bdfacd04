"""What a step takes and gives: the state that training changes, and the metrics it reports."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxpp.types import Array

__all__ = ["Metrics", "State"]


class State(NamedTuple):
    """What training changes: two ordinary trees whose leaves live on the stages that own them.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optax state for the whole of it.
    """

    params: Any
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """What a step reports, as device scalars; reading one waits for it. ``metrics.loss`` and ``metrics["loss"]`` are the same.

    Attributes:
        loss: the weighted mean over microbatches.
        aux: the loss's aux: scalars averaged like the loss, arrays with one row an example joined; ``()`` without ``has_aux``.
        grad_norm: the global norm of the gradient before the optimizer; None from ``evaluate``.
    """

    loss: Array
    aux: Any = ()
    grad_norm: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)
