"""Arrays at the edges of a step (what moves inside it is a ``Send``): put, moved home, split, joined, and kept in host memory."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import StateError
from jaxpp.runtime.place import Place
from jaxpp.runtime.processes.here import LocalRows, as_sharding, devices_in, elsewhere, is_addressable, is_whole_here, put_across
from jaxpp.runtime.send import HOST_MEMORY, Move, array_type, memory_copies
from jaxpp.stages.loss.traced_loss import wrong_leaves
from jaxpp.stages.program import Ref
from jaxpp.stages.stacked import Slices, assembled, on_host
from jaxpp.types import Array, Home, Leaf, Tree


def put(value: Leaf, home: Home) -> Array:
    """A fresh copy of a value at a home, sharing no buffer with it; in several processes each gets what is here of it."""
    if jax.process_count() > 1 and not (is_whole_here(home) and is_addressable(value)):
        return put_across(value, home)
    value = unaliased(value)  # ``may_alias=False`` shares the memory of NumPy arrays that are aligned all the same
    if isinstance(home, NamedSharding):  # there the first shard would be the original
        value = jnp.array(value, copy=True)
    return jax.device_put(_movable(value, home), as_sharding(home), may_alias=False)


def put_at(place: Place, ref: Ref, value: Leaf) -> Array:
    """A fresh copy of a value at a place; on every replica, where each has its own."""
    leading = place.leading(ref)
    return put(jnp.broadcast_to(value, (*leading, *np.shape(value))) if leading else value, place.home(ref))


def unaliased(value: Leaf) -> Leaf:
    """The value, copied if it is a NumPy array: the caller may overwrite a NumPy array while it is still read.

    A mask stays, so that JAX refuses it.
    """
    return np.array(value, subok=isinstance(value, np.ma.MaskedArray)) if isinstance(value, np.ndarray) else value


def split_over_replicas(
    batch: Sequence[Leaf], keys: Sequence[Array], num_replicas: int, shared: Collection[int] = ()
) -> tuple[list[Leaf], list[Array]]:
    """The leaves of a batch, and the keys, with the replicas as their first axis; leaves numbered ``shared`` stay as they are.

    If the examples do not divide evenly, the first replicas get one more each, and the others a copy of the first replica's.
    """

    def part(leaf: Any) -> Any:
        if isinstance(leaf, LocalRows):
            return leaf.split(num_replicas)
        whole, rest = divmod(leaf.shape[0], num_replicas)
        if not rest:
            return leaf.reshape(num_replicas, whole, *leaf.shape[1:])
        replicas = np.arange(num_replicas)
        begins = whole * replicas + np.minimum(replicas, rest)
        last = np.where(replicas < rest, begins + whole, whole)
        return leaf[np.concatenate([begins[:, None] + np.arange(whole), last[:, None]], axis=1)]

    given = (jax.Array, np.ndarray, LocalRows, jax.ShapeDtypeStruct)
    arrays = [leaf if isinstance(leaf, given) else np.asarray(leaf) for leaf in batch]
    parts = [leaf if k in shared or isinstance(leaf, jax.ShapeDtypeStruct) else part(leaf) for k, leaf in enumerate(arrays)]
    return parts, [jnp.broadcast_to(key, (num_replicas, *key.shape)) for key in keys]


def check_alive(where: str, **trees: Tree) -> None:
    """Refuse arrays whose buffers a step has taken over, in trees by name; JAX would say that an array has been deleted."""
    named = [(name, jax.tree_util.tree_leaves_with_path(tree)) for name, tree in trees.items()]
    arrays = [(name, [(path, leaf) for path, leaf in leaves if isinstance(leaf, jax.Array)]) for name, leaves in named]
    wrong = [line for name, leaves in arrays if (gone := wrong_leaves(name, leaves, "")) for line in gone.lines]
    if wrong:
        rule = "step reuses the buffers of the state it is given, so its arrays are gone, under every name they had"
        got = [f"{len(wrong)} of {sum(len(leaves) for _, leaves in arrays)} arrays were consumed by a step, or donated otherwise"]
        fix = "copy what you keep before the step, ema = jax.tree.map(jnp.copy, state.params), or call step(..., donate=False)"
        raise StateError(where, rule, [*got, *wrong[:8]], fix)


def join_slices(node: Slices) -> Array | Slices:
    """Slices of equal size on different devices as one array sharded over these, sharing their buffers; others as they are."""
    sharding = _over_stages(node, [part.sharding for part in node.parts])
    if sharding is None:
        return node
    here = [part for part in node.parts if part.is_fully_addressable]
    return jax.make_array_from_single_device_arrays(node.shape, sharding, here, dtype=node.parts[0].dtype)


def joined_home(home: Home | Slices) -> Sharding:
    """Where a whole leaf is restored to: as its owner or ``join_slices`` has it, else host memory: it may exceed a device."""
    if not isinstance(home, Slices):
        return as_sharding(home)
    sharding = _over_stages(home, home.parts)
    if sharding is not None:
        return sharding
    devices = sorted({device for part in home.parts for device in as_sharding(part).device_set}, key=lambda device: device.id)
    firsts = list({device.process_index: device for device in reversed(devices)}.values())
    if len(firsts) > 1:
        return NamedSharding(Mesh(np.array(firsts[::-1]), ("process",)), PartitionSpec(), memory_kind=HOST_MEMORY)
    first = min(as_sharding(home.parts[0]).device_set, key=lambda device: device.id)
    return SingleDeviceSharding(first, memory_kind=HOST_MEMORY)


def _over_stages(node: Slices, homes: Sequence[Home]) -> NamedSharding | None:
    devices = [device for home in homes for device in devices_in(home)]
    waits = {as_sharding(home).memory_kind == HOST_MEMORY for home in homes}
    if len(set(node.sizes)) > 1 or not len(set(devices)) == len(devices) == len(homes) or len(waits) > 1:
        return None
    sharding = NamedSharding(Mesh(np.array(devices), ("stage",)), PartitionSpec(*[None] * node.axis, "stage"))
    return sharding.with_memory_kind(HOST_MEMORY) if waits == {True} else sharding


def split_slices(leaf: Array, axis: int) -> list[Array]:
    """The slices along an axis of an array made by ``join_slices``, in order, sharing its buffers."""
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    part = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    devices = sorted(indices, key=lambda device: indices[device][axis].start or 0 if indices[device] else 0)
    return [here[device] if device in here else elsewhere(part, device) for device in devices]


def concatenated_at(node: Leaf | Slices, home: Home) -> Leaf:
    """Slices as one array, concatenated on a device or with a sharding; any other leaf as it is."""
    if not isinstance(node, Slices):
        return node
    if isinstance(home, Sharding) and not isinstance(home, SingleDeviceSharding):
        return assembled(node)
    return jnp.concatenate(to_homes(node.parts, [home] * len(node.parts)), node.axis)


def to_homes(leaves: Sequence[Leaf], homes: Sequence[Home]) -> list[Array]:
    """The leaves at their homes, as they are if they are there; NumPy arrays one by one, for the host has no room for all twice."""
    if jax.process_count() > 1:
        return [_to_home(leaf, home) for leaf, home in zip(leaves, homes, strict=True)]
    ours = [_to_home(leaf, home) if isinstance(leaf, np.ndarray) else leaf for leaf, home in zip(leaves, homes, strict=True)]
    ours = list(map(_movable, ours, homes))
    return jax.device_put(ours, list(map(as_sharding, homes)))  # a device alone would leave what is in host memory there


def _to_home(leaf: Leaf, home: Home) -> Array:
    if isinstance(leaf, jax.Array) and leaf.sharding == as_sharding(home):
        return leaf
    if not is_whole_here(home) or not is_addressable(leaf):
        return put_across(leaf, home)
    if isinstance(leaf, np.ndarray):
        return jax.block_until_ready(jax.device_put(np.array(leaf), home))
    return jax.device_put(_movable(leaf, home), as_sharding(home))


def _movable(leaf: Leaf, home: Home) -> Leaf:
    """A value that JAX can move to a home: what is in the host memory of several devices does not go to others by itself."""
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind != HOST_MEMORY or len(leaf.sharding.device_set) == 1:
        return leaf
    if leaf.sharding.device_set == devices_in(home):
        return leaf
    return leaf.addressable_shards[0].data if leaf.is_fully_replicated else on_host(leaf)


def at_replica(leaf: Array, home: Home, *, led: bool) -> Array:
    """A leaf of all replicas at the home that it has on one of them, sharing its buffers where that device has what it needs.

    ``led``: each replica has its own, and the leaf has the replicas as its first axis.
    """
    sharding = as_sharding(home)
    shards = {shard.device: shard for shard in leaf.addressable_shards}
    wanted = sharding.devices_indices_map(leaf.shape[led:])
    own = {device: shards[device].data for device in wanted}
    if led:
        own = {device: data[0] for device, data in own.items()}
    elif any(shards[device].index != index for device, index in wanted.items()):
        return to_homes([leaf], [home])[0]
    return jax.make_array_from_single_device_arrays(leaf.shape[led:], sharding, list(own.values()))


def to_host(leaves: Sequence[Leaf], homes: Sequence[Sharding] | None = None) -> tuple[Array, ...]:
    """Begin to copy arrays to pinned host memory; device arrays may be donated at once, NumPy arrays must not change until then."""
    homes = [leaf.sharding for leaf in leaves] if homes is None else homes
    if all(_is_at(leaf, home) for leaf, home in zip(leaves, homes, strict=True)):
        return tuple(_copies_to_host(tuple(homes))(*leaves))
    return tuple(jax.device_put(list(leaves), [home.with_memory_kind(HOST_MEMORY) for home in homes], may_alias=False))


def to_device(leaves: Sequence[Leaf], homes: Sequence[Home]) -> tuple[Array, ...]:
    """Begin to copy host arrays to devices or shardings, and return at once; a step may take over the copies."""
    return tuple(jax.device_put(list(map(_movable, leaves, homes)), list(homes), may_alias=False))


@functools.lru_cache(maxsize=256)
def _copies_to_host(homes: tuple[Sharding, ...]) -> Move:
    """The way back is ``jax.device_put``: of that copy JAX's own operations would still think that it is in host memory."""
    return memory_copies(homes, to_host=True)


def _is_at(leaf: Leaf, home: Sharding) -> bool:
    """Whether a leaf is an array at this home, on one device."""
    return type(leaf) is array_type() and isinstance(home, SingleDeviceSharding) and leaf.committed and leaf.sharding == home
