"""What a step takes and gives: the state that training changes, and the metrics it reports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxpp.errors import StateError
from jaxpp.runtime.prepare import avals_of
from jaxpp.stages.loss import describe
from jaxpp.types import Array

__all__ = ["Metrics", "State", "check_state"]


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
        grad_norm: the global norm of the gradient before the optimizer, without parameters that the optimizer freezes (theirs is
            not computed); None from ``evaluate``.
    """

    loss: Array
    aux: Any = ()
    grad_norm: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def check_state(state: Any, trees: tuple[Any, Any], expected: Sequence[Any]) -> None:
    """Refuse a state that a step cannot start from.

    Args:
        state: what the user passed.
        trees: the structures of its two trees.
        expected: shape and dtype of each leaf.

    Raises:
        StateError: it has other trees or other leaves, or was consumed.
    """
    where = "state"
    if not isinstance(state, State) or tuple(map(jax.tree.structure, state)) != trees:
        raise StateError(
            where,
            "a state has the parameter tree and the optimizer tree this pipeline was initialised with",
            type(state).__name__ if not isinstance(state, State) else "other tree structures",
            "pass the state that init or step returned",
        )
    leaves = jax.tree_util.tree_leaves_with_path(state)
    gone = [path for path, leaf in leaves if getattr(leaf, "is_deleted", bool)()]
    if gone:
        raise StateError(
            where,
            "step reuses the buffers of the state it is given, so that state cannot be used again",
            f"a state consumed by an earlier step ({len(gone)} of {len(leaves)} leaves are gone)",
            "go on with the state that step returned, or call step(..., donate=False) to keep the old one",
        )
    wrong = [
        f"state{jax.tree_util.keystr(path)}: {describe(leaf)} instead of {describe(aval)}"
        for (path, leaf), aval in zip(jax.tree_util.tree_leaves_with_path(avals_of(state)), expected, strict=True)
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype)
    ]
    if wrong:
        raise StateError(where, "a state's leaves keep their shapes and types", wrong, "pass the state that init or step returned")
