"""What a step takes and gives: the state that training changes, and the metrics it reports."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxpp.errors import StateError
from jaxpp.runtime.prepare import avals_of
from jaxpp.runtime.transfer import bring, put
from jaxpp.stages.loss import describe
from jaxpp.types import Array, Device

__all__ = ["Metrics", "State", "States"]


class State(NamedTuple):
    """What training changes: ordinary trees whose leaves live on the stages that own them.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optax state for the whole of it.
        model_state: what the loss hands on from microbatch to microbatch (running statistics); ``()`` without ``has_state``.
        loss_scale: the object passed as ``loss_scale``, as the steps have changed it; ``()`` without one.
    """

    params: Any
    opt_state: Any
    model_state: Any = ()
    loss_scale: Any = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """What a step reports, as device scalars; reading one waits for it. ``metrics.loss`` and ``metrics["loss"]`` are the same.

    Attributes:
        loss: the weighted mean over microbatches.
        aux: the loss's aux: scalars averaged like the loss, arrays with one row an example joined; ``()`` without ``has_aux``.
        grad_norm: the global norm of the gradient before the optimizer, without parameters that the optimizer freezes (theirs is
            not computed); None from ``evaluate``.
        finite: with ``loss_scale``, whether all gradients were finite; if not, the step changed nothing but the scale. Else None.
    """

    loss: Array
    aux: Any = ()
    grad_norm: Any = None
    finite: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class States:
    """Makes states of a pipeline's flat leaves, and takes them apart again.

    Args:
        trees: the structure of each part of a state.
        shapes: shape and dtype of each leaf.
        devices: where each leaf lives.
    """

    def __init__(self, trees: State, shapes: Sequence[Any], devices: Sequence[Device]):
        self._trees, self._shapes, self._devices = trees, tuple(shapes), tuple(devices)
        self._last: list[Any] = []

    def wrap(self, leaves: Sequence[Any]) -> State:
        """The state that has these leaves, each on its owner."""
        self._last = [weakref.ref(leaf) for leaf in leaves]
        supply = iter(leaves)
        return State(*(tree.unflatten([next(supply) for _ in range(tree.num_leaves)]) for tree in self._trees))

    def unwrap(self, state: Any) -> list[Any]:
        """The leaves of a state, each on its owner.

        Raises:
            StateError: it is consumed, or has other leaves than this pipeline's.
        """
        leaves = jax.tree.leaves(state)
        mine = len(leaves) == len(self._last) and all(ref() is leaf for ref, leaf in zip(self._last, leaves, strict=True))
        if mine and isinstance(state, State) and not any(leaf.is_deleted() for leaf in leaves):
            return leaves
        _check_state(state, self._trees, self._shapes)
        placed, seen = bring(leaves, self._devices), set()
        for k, leaf in enumerate(leaves):
            if id(leaf) in seen:  # one array in two places: each needs a buffer of its own to give up
                placed[k] = put(leaf, self._devices[k])
            seen.add(id(leaf))
        return placed


def _check_state(state: Any, trees: State, expected: Sequence[Any]) -> None:
    """Refuse a state that a step cannot start from.

    Args:
        state: what the user passed.
        trees: the structures of its trees.
        expected: shape and dtype of each leaf.

    Raises:
        StateError: it has other trees or other leaves, or was consumed.
    """
    where = "state"
    if not isinstance(state, State) or tuple(map(jax.tree.structure, state)) != tuple(trees):
        raise StateError(
            where,
            "a state has the trees of parameters, optimizer and model state that this pipeline was initialised with",
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
