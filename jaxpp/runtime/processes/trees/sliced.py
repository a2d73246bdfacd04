"""A stacked leaf whose slices live in several processes, as one array of the user's tree.

Problem: JAX shards an axis into equal parts only, so the slices of a leaf that is cut unequally are no global array; in one process
they are put together on the host when somebody looks, but here nobody has all of them. Idea: the user's tree has a stand-in, an
array with the shape and the type of the whole leaf and without local shards, as for any leaf that lives elsewhere. What saves and
gathers states asks ``slices_of`` for the slices.
"""

import weakref
from typing import Any

import jax
from jax.core import Tracer

from jaxpp.errors import StateError
from jaxpp.runtime.processes.here import elsewhere
from jaxpp.stages.stacked import Slices, whole_shape
from jaxpp.types import Array, Leaf, Tree

__all__ = ["are_across", "slices_of", "stand_in_for"]

_SLICES: dict[int, tuple[weakref.ref[Array], Slices]] = {}
"""The slices of each stand-in that is alive, by its address."""


def are_across(tree: Tree) -> bool:
    """Whether the arrays of a tree live in more than one process."""
    if jax.process_count() == 1:
        return False
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    return len({device.process_index for leaf in arrays for device in leaf.sharding.device_set}) > 1


def stand_in_for(node: Slices) -> Array:
    """An array without local shards that stands for a leaf held as slices, in whichever processes these are."""
    away = next(device for device in jax.devices() if device.process_index != jax.process_index())
    array = elsewhere(whole_shape(node), away)
    key = id(array)
    _SLICES[key] = weakref.ref(array, lambda _: _SLICES.pop(key, None)), node
    return array


def slices_of(leaf: Leaf) -> Slices | None:
    """The slices of a stand-in; None for any other leaf.

    Raises:
        StateError: a later step has consumed them.
    """
    found: Any = _SLICES.get(id(leaf))
    if found is None or found[0]() is not leaf:
        return None
    node = found[1]
    if gone := sum(part.is_deleted() for part in node.parts if isinstance(part, jax.Array)):
        rule = "step reuses the buffers of the state it is given, so that state cannot be used again"
        got = f"a leaf held as slices, {gone} of {len(node.parts)} of which a later step has consumed"
        fix = "go on with pipe.state, the newest, and save that; or call step(..., donate=False) to keep the old state"
        raise StateError("state", rule, got, fix)
    return node
