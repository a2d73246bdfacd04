"""What a step takes and gives: the state that training changes, and the metrics it reports."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpp.engine.engine import Engine
from jaxpp.engine.tracing import avals_of
from jaxpp.errors import StateError
from jaxpp.errors.checks import refuse_tracers
from jaxpp.plan.leaves import Leaves
from jaxpp.runtime.transfer import join_slices, put, split_slices, to_homes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loops.stacked import Slices, assembled, is_slices, joined, rows, whole_shape
from jaxpp.types import Array, Aval, Home

__all__ = ["Metrics", "State", "States", "check_kept", "states_of"]


class _Parts(NamedTuple):
    params: Any
    opt_state: Any
    model_state: Any = ()
    loss_scale: Any = ()


class State(_Parts):
    """What training changes: ordinary trees whose leaves live on the stages that own them.

    Where a loop over layers is cut, or stages read rows of one leaf, such leaves are arrays sharded over the stages' devices. If
    that cannot be (the slices differ in size, or share a device), the state holds the slices, and reading ``params`` or
    ``opt_state``, by name, index or unpacking, puts them together on the host. As a pytree the state has the slices as leaves:
    ``jax.tree.map`` and Orbax see each on its device.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optax state for the whole of it.
        model_state: what the loss hands on from microbatch to microbatch (running statistics); ``()`` without ``has_state``.
        loss_scale: the object passed as ``loss_scale``, as the steps have changed it; ``()`` without one.
    """

    __slots__ = ()

    @property
    def params(self) -> Any:
        """The user's parameter tree."""
        return self[0]

    @property
    def opt_state(self) -> Any:
        """The optax state for the whole of it."""
        return self[1]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return tuple(map(assembled, found)) if isinstance(index, slice) else assembled(found)

    def __iter__(self) -> Iterator[Any]:
        return map(assembled, super().__iter__())

    def _asdict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parts by name."""
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **parts: Any) -> "State":  # pyright: ignore[reportIncompatibleMethodOverride]
        """The state with other parts; those that are not named stay as they are held."""
        if unknown := [name for name in parts if name not in self._fields]:
            raise TypeError(f"a State has the parts {', '.join(self._fields)}, not {', '.join(unknown)}")
        return State(**{**dict(zip(self._fields, super().__iter__(), strict=True)), **parts})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics(Mapping[str, Any]):
    """What a step reports, as device scalars; reading one waits for it.

    It is a mapping too: ``metrics.loss`` and ``metrics["loss"]`` are the same, and ``dict(metrics)`` has what there is: no ``aux``
    without ``has_aux``, no ``grad_norm`` from ``evaluate``, no ``finite`` without ``loss_scale``.

    Attributes:
        loss: the weighted mean over microbatches.
        aux: the loss's aux: scalars averaged like the loss, arrays with one row an example joined; ``()`` without ``has_aux``.
        grad_norm: the global norm of the gradient before the optimizer, without parameters that the optimizer freezes (theirs is
            not computed), and with a bank of Theta alone; None from ``evaluate``.
        finite: with ``loss_scale``, whether all gradients were finite; if not, the step changed nothing but the scale. Else None.
    """

    loss: Array
    aux: Any = ()
    grad_norm: Any = None
    finite: Any = None

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self) if self._has(field.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        if not self._has(name):
            raise KeyError(f"{name!r}; these metrics are {', '.join(self)}")
        return getattr(self, name)

    def _has(self, name: object) -> bool:
        """Whether it is a metric that the step reports."""
        if name not in ("loss", "aux", "grad_norm", "finite"):
            return False
        value = getattr(self, name)
        return value is not None and not (name == "aux" and isinstance(value, tuple) and not value)


class States:
    """Makes states of a pipeline's flat leaves, and takes them apart again.

    Args:
        trees: the structure of each part of a state, as it is held.
        shapes: shape and dtype of each leaf.
        homes: where each leaf lives.
    """

    def __init__(self, trees: State, shapes: Leaves[Aval], homes: Leaves[Home]):
        self._trees, self._groups, self._homes = trees, shapes, homes.flat()
        self._shapes = shapes.flat()
        self._sliced = any(isinstance(node, Slices) for node in self._nodes(self._shapes))
        self._whole = list(map(whole_shape, self._nodes(self._shapes)))
        self._last: list[Any] = []

    def _fill(self, leaves: Sequence[Any]) -> State:
        supply = iter(leaves)
        return State(*(tree.unflatten([next(supply) for _ in range(tree.num_leaves)]) for tree in self._trees))

    def _nodes(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, those that are slices of one together."""
        return jax.tree.leaves(joined(self._fill(leaves), lambda node: node), is_leaf=is_slices)

    def wrap(self, groups: Leaves[Array]) -> State:
        """The state that has these leaves, each on its owner."""
        leaves = groups.flat()
        state = self._fill(leaves)
        if self._sliced:
            state = joined(state, join_slices)
        self._last = list(map(weakref.ref, jax.tree.leaves(state) if self._sliced else leaves))
        return state

    def unwrap(self, state: Any, where: str = "step", *, consumed: bool = False) -> Leaves[Array]:
        """The leaves of a state, each on its owner.

        Args:
            state: what the user passed.
            where: to which method.
            consumed: whether their buffers will be taken over. If some of its arrays live elsewhere, all leaves are copies then:
                all of a state is consumed, or nothing.

        Raises:
            ArgumentError: it is traced.
            StateError: it is consumed, or has other leaves than this pipeline's.
        """
        leaves = jax.tree.leaves(state)
        mine = len(leaves) == len(self._last) and all(ref() is leaf for ref, leaf in zip(self._last, leaves, strict=True))
        if mine and isinstance(state, State) and not any(leaf.is_deleted() for leaf in leaves):
            return self._groups.fill(self._held(state) if self._sliced else leaves)
        refuse_tracers(f"pipe.{where}(state, batch, key)", state)
        whole = jax.tree.structure(joined(self._fill(self._shapes), whole_shape))
        _check_state(state, whole, self._whole)
        leaves = self._held(state)
        placed, seen = to_homes(leaves, self._homes), set()
        own = {buffer for leaf in jax.tree.leaves(state) for buffer in _buffers(leaf)}
        stays = [not own.isdisjoint(_buffers(leaf)) for leaf in placed]
        arrays = [isinstance(leaf, jax.Array) for leaf in leaves]
        copy = consumed and not all(here for here, array in zip(stays, arrays, strict=True) if array)
        for k, leaf in enumerate(placed):
            buffers = _buffers(leaf)
            if (copy and stays[k]) or not seen.isdisjoint(buffers):  # one array in two places has a buffer for each to give up
                placed[k] = put(leaf, self._homes[k])
            seen.update(buffers)
        return self._groups.fill(placed)

    def _held(self, state: State) -> list[Any]:
        """The leaves of a state, stacked ones as slices."""
        pairs = zip(jax.tree.leaves(state, is_leaf=is_slices), self._nodes(self._shapes), strict=True)
        return [part for leaf, node in pairs for part in (_parts(leaf, node) if isinstance(node, Slices) else [leaf])]


def states_of(engine: Engine, *, own: bool = True) -> States:
    """What makes the states that an engine's steps take and give.

    Args:
        engine: of the pipeline.
        own: whether the states hold what each replica has of its own; a bank holds it otherwise.
    """
    placed, scaling = engine.placed, engine.options.loss_scale
    params, model_state = map(jax.tree.structure, (*placed.layout.variables, ())[:2])
    opt_state = jax.tree.structure(()) if placed.update is None else placed.update.tree
    scale = jax.tree.structure(() if scaling is None else scaling.example)
    if own:
        return States(State(params, opt_state, model_state, scale), placed.shapes, placed.homes)
    trees = State(params.children()[0], opt_state.children()[0], model_state, scale)
    return States(trees, placed.shapes.shared, placed.homes.shared)


def check_kept(state: State | None) -> State:
    """The state that a pipeline keeps.

    Raises:
        StateError: there is none, or it was consumed.
    """
    if state is None:
        raise StateError(
            "pipe.state",
            "a pipeline keeps the newest state that init or step made",
            "none: init did not finish, or the state was deleted",
            "call state = pipe.init(...) again",
        )
    leaves = jax.tree.leaves(state)
    if gone := sum(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
        raise StateError(
            "pipe.state",
            "a state that was consumed cannot be used again",
            f"{gone} of {len(leaves)} leaves are gone: by an update that failed in part, or by the step of another pipeline",
            "go on from a checkpoint, pipe.step(restored, ...), or with the state that the other pipeline returned",
        )
    return state


def _buffers(leaf: Any) -> list[Any]:
    """What tells whether two arrays share memory: the addresses of an array's shards; nothing for what is no device array."""
    if not isinstance(leaf, jax.Array):
        return []
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    data = jax.block_until_ready(data)  # to ask for an address waits with Python's lock held, which a host callback may want
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in data.addressable_shards if shard.data.size]


def _parts(leaf: Any, node: Slices) -> Sequence[Any]:
    """The slices of a leaf that was made by ``join_slices``, or is whole."""
    if isinstance(leaf, Slices) and leaf.sizes == node.sizes:
        return leaf.parts
    if isinstance(leaf, Slices):
        leaf = assembled(leaf)
    found = split_slices(leaf) if isinstance(leaf, jax.Array) else ()
    if tuple(part.shape[0] for part in found) == node.sizes:
        return found
    return [leaf[a:b] for a, b in rows(node.sizes)]


def _check_state(state: Any, tree: Any, expected: Sequence[Any]) -> None:
    """Refuse a state that a step cannot start from.

    Args:
        state: what the user passed.
        tree: the structure of a state, its leaves whole.
        expected: shape and dtype of each leaf.

    Raises:
        StateError: it has other trees or other leaves, or was consumed.
    """
    where = "state"
    odd = [path for path, leaf in jax.tree_util.tree_leaves_with_path(state) if not hasattr(leaf, "dtype")]
    if isinstance(state, State) and odd:
        got = [f"state{jax.tree_util.keystr(path)} is none" for path in odd]
        raise StateError(where, "the leaves of a state are arrays", got, "restore it with its arrays, or convert with jnp.asarray")
    shapes = joined(state, whole_shape) if isinstance(state, State) else None
    if jax.tree.structure(shapes) != tree:
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
            "go on with pipe.state, the newest; to keep part of a state, copy it before the step, ema = jax.tree.map(jnp.copy, "
            "state.params), or call step(..., donate=False) to keep all",
        )
    wrong = [
        f"state{jax.tree_util.keystr(path)}: {describe(leaf)} instead of {describe(aval)}"
        for (path, leaf), aval in zip(jax.tree_util.tree_leaves_with_path(avals_of(shapes)), expected, strict=True)
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype)
    ]
    if wrong:
        raise StateError(where, "a state's leaves keep their shapes and types", wrong, "pass the state that init or step returned")
