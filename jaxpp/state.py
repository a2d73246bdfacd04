"""What a step takes and gives: the state that training changes, and the metrics it reports."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxpp.engine.engine import Engine
from jaxpp.engine.tracing import avals_of
from jaxpp.errors import StateError
from jaxpp.errors.checks import refuse_tracers
from jaxpp.plan.leaves import Leaves
from jaxpp.runtime.transfer import join_slices, put, split_slices, to_homes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loops.stacked import Slices, assembled, is_slices, joined, rows, whole_shape
from jaxpp.types import Array, Aval, Device, Home, Leaf, Params, Tree

__all__ = ["Metrics", "State", "States", "check_kept", "states_of"]


class _Parts(NamedTuple):
    params: Params
    opt_state: Tree
    model_state: Tree = ()
    loss_scale: Tree = ()


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
    def params(self) -> Params:
        """The user's parameter tree."""
        return self[0]

    @property
    def opt_state(self) -> Tree:
        """The optax state for the whole of it."""
        return self[1]

    def __getitem__(self, index: SupportsIndex | slice) -> Tree:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super().__getitem__(index)
        return tuple(map(assembled, found)) if isinstance(index, slice) else assembled(found)

    def __iter__(self) -> Iterator[Tree]:
        return map(assembled, super().__iter__())

    def _asdict(self) -> dict[str, Tree]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parts by name."""
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **parts: Tree) -> "State":  # pyright: ignore[reportIncompatibleMethodOverride]
        """The state with other parts; those that are not named stay as they are held."""
        if unknown := [name for name in parts if name not in self._fields]:
            raise TypeError(f"a State has the parts {', '.join(self._fields)}, not {', '.join(unknown)}")
        return State(**{**dict(zip(self._fields, super().__iter__(), strict=True)), **parts})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics(Mapping[str, Tree]):
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
    aux: Tree = ()
    grad_norm: Float[Array, ""] | None = None
    finite: Bool[Array, ""] | None = None

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self) if self._has(field.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tree:
        if not self._has(name):
            raise KeyError(f"{name!r}; these metrics are {', '.join(self)}")
        return getattr(self, name)

    def _has(self, name: str) -> bool:
        """Whether it is a metric that the step reports."""
        value = vars(self).get(name)  # a field, or None
        return value is not None and not (name == "aux" and isinstance(value, tuple) and not value)


class States:
    """Makes states of a pipeline's flat leaves, and takes them apart again; ``trees`` has the structure of each part as held."""

    def __init__(self, trees: State, shapes: Leaves[Aval], homes: Leaves[Home]):
        self._trees, self._groups, self._homes = trees, shapes, homes.flat()
        self._shapes = shapes.flat()
        self._sliced = any(isinstance(node, Slices) for node in self._nodes(self._shapes))
        self._whole = list(map(whole_shape, self._nodes(self._shapes)))
        self._last: list[weakref.ref[Array]] = []

    def _fill(self, leaves: Sequence[Leaf]) -> State:
        supply = iter(leaves)
        return State(*(tree.unflatten([next(supply) for _ in range(tree.num_leaves)]) for tree in self._trees))

    def _nodes(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves, those that are slices of one together."""
        return jax.tree.leaves(joined(self._fill(leaves), lambda node: node), is_leaf=is_slices)

    def wrap(self, groups: Leaves[Array]) -> State:
        """The state that has these leaves, each on its owner."""
        leaves = groups.flat()
        state = self._fill(leaves)
        if self._sliced:
            state = joined(state, join_slices)
            leaves = jax.tree.leaves(state)
        self._last = list(map(weakref.ref, leaves))
        return state

    def unwrap(self, state: State, where: str = "step", *, consumed: bool = False) -> Leaves[Array]:
        """The leaves of what the user passed to the method ``where`` as a state, each on its owner.

        With ``consumed`` their buffers will be taken over. If some arrays of the state live elsewhere, all leaves are then copies:
        a step consumes all of a state, or nothing.

        Raises:
            ArgumentError: it is traced.
            StateError: it is consumed, or its leaves are not those of this pipeline.
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
        copy = consumed and any(isinstance(leaf, jax.Array) and not here for leaf, here in zip(leaves, stays, strict=True))
        for k, leaf in enumerate(placed):
            buffers = _buffers(leaf)
            if (copy and stays[k]) or not seen.isdisjoint(buffers):  # one array in two places has a buffer for each to give up
                placed[k] = put(leaf, self._homes[k])
            seen.update(buffers)
        return self._groups.fill(placed)

    def _held(self, state: State) -> list[Leaf]:
        """The leaves of a state, stacked ones as slices."""
        pairs = zip(jax.tree.leaves(state, is_leaf=is_slices), self._nodes(self._shapes), strict=True)
        return [part for leaf, node in pairs for part in (_parts(leaf, node) if isinstance(node, Slices) else [leaf])]


def states_of(engine: Engine, *, own: bool = True) -> States:
    """What makes the states of an engine's steps; unless the states hold what each replica has of its ``own``, a bank holds it."""
    placed, scaling = engine.placed, engine.options.loss_scale
    params, model_state = map(jax.tree.structure, (*placed.layout.variables, ())[:2])
    opt_state = jax.tree.structure(()) if placed.update is None else placed.update.tree
    scale = jax.tree.structure(() if scaling is None else scaling.example)
    if own:
        return States(State(params, opt_state, model_state, scale), placed.shapes, placed.homes)
    trees = State(params.children()[0], opt_state.children()[0], model_state, scale)
    return States(trees, placed.shapes.shared, placed.homes.shared)


def check_kept(state: State | None) -> State:
    """The state that a pipeline keeps; a StateError if there is none, or if it was consumed."""
    if state is None:
        rule = "a pipeline keeps the newest state that init or step made"
        got = "none: init did not finish, or the state was deleted"
        raise StateError("pipe.state", rule, got, "call state = pipe.init(...) again")
    leaves = jax.tree.leaves(state)
    if gone := sum(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
        got = f"{gone} of {len(leaves)} leaves are gone: by an update that failed in part, or by the step of another pipeline"
        fix = "go on from a checkpoint, pipe.step(restored, ...), or with the state that the other pipeline returned"
        raise StateError("pipe.state", "a state that was consumed cannot be used again", got, fix)
    return state


def _buffers(leaf: Leaf) -> list[tuple[Device, int]]:
    """What tells whether two arrays share memory: the addresses of an array's shards; nothing for what is no device array."""
    if not isinstance(leaf, jax.Array):
        return []
    data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    data = jax.block_until_ready(data)  # to ask for an address waits with Python's lock held, which a host callback may want
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in data.addressable_shards if shard.data.size]


def _parts(leaf: Leaf, node: Slices) -> Sequence[Leaf]:
    """The slices of a leaf that was made by ``join_slices``, or is whole."""
    if isinstance(leaf, Slices):
        if leaf.sizes == node.sizes:
            return leaf.parts
        leaf = assembled(leaf)
    found = split_slices(leaf) if isinstance(leaf, jax.Array) else ()
    if tuple(part.shape[0] for part in found) == node.sizes:
        return found
    return [leaf[a:b] for a, b in rows(node.sizes)]


def _check_state(state: object, tree: Tree, expected: Sequence[Aval]) -> None:
    """Refuse a state that a step cannot start from; ``tree`` and ``expected`` are of a state whose stacked leaves are whole."""
    where, again = "state", "pass the state that init or step returned"
    leaves = jax.tree_util.tree_leaves_with_path(state)
    odd = [f"state{jax.tree_util.keystr(path)} is none" for path, leaf in leaves if not hasattr(leaf, "dtype")]
    if isinstance(state, State) and odd:
        raise StateError(where, "the leaves of a state are arrays", odd, "restore it with its arrays, or convert with jnp.asarray")
    shapes = joined(state, whole_shape) if isinstance(state, State) else None
    if jax.tree.structure(shapes) != tree:
        rule = "a state has the trees of parameters, optimizer and model state that this pipeline was initialised with"
        raise StateError(where, rule, "other tree structures" if isinstance(state, State) else type(state).__name__, again)
    if gone := sum(getattr(leaf, "is_deleted", bool)() for _, leaf in leaves):
        rule = "step reuses the buffers of the state it is given, so that state cannot be used again"
        got = f"a state consumed by an earlier step ({gone} of {len(leaves)} leaves are gone)"
        copy = "to keep part of a state, copy it before the step, ema = jax.tree.map(jnp.copy, state.params)"
        fix = f"go on with pipe.state, the newest; {copy}, or call step(..., donate=False) to keep all"
        raise StateError(where, rule, got, fix)
    wrong = [
        f"state{jax.tree_util.keystr(path)}: {describe(leaf)} instead of {describe(aval)}"
        for (path, leaf), aval in zip(jax.tree_util.tree_leaves_with_path(avals_of(shapes)), expected, strict=True)
        if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype)
    ]
    if wrong:
        raise StateError(where, "a state's leaves keep their shapes and types", wrong, again)
