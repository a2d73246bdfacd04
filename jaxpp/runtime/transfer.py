"""The only file that moves an array between devices.

Everything that crosses goes through ``sender`` (inside a step, where the plan says so) or through one of the functions for the
edges: ``put`` and ``put_at`` (a value gets a copy of its own at a place), ``private`` (a host array that the caller may overwrite),
``divided`` (a batch for several replicas), ``gather`` (a spread tree brought together), and ``to_host`` and ``to_device`` (pinned
host memory, for parameter sets that wait for their turn).
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import StateError
from jaxpp.runtime.place import Place
from jaxpp.stages.loops.stacked import Slices
from jaxpp.stages.program import Ref
from jaxpp.types import Array, Device

__all__ = [
    "HOST",
    "apart",
    "bring",
    "check_alive",
    "divided",
    "gather",
    "private",
    "put",
    "put_at",
    "sender",
    "spread",
    "to_device",
    "to_host",
    "together",
]

HOST = "pinned_host"
"""The kind of host memory that a device copies from and to at full speed, and without stopping."""


def sender(device: Device) -> Callable[[Any], tuple[Array]]:
    """The instruction that copies one value to ``device``; the source is left as it is."""
    put = jax.device_put

    def send(value: Any) -> tuple[Array]:
        return (put(value, device),)

    return send


def put(value: Any, device: Any) -> Array:
    """A fresh copy of ``value`` on ``device`` (or with a sharding): it shares no buffer with the original."""
    value = private(value)  # ``may_alias=False`` shares the memory of NumPy arrays that are aligned all the same
    if isinstance(device, NamedSharding):  # there the first shard would be the original
        value = jnp.array(value, copy=True)
    return jax.device_put(value, device, may_alias=False)


def put_at(place: Place, ref: Ref, value: Any) -> Array:
    """A fresh copy of ``value`` at a place; on every replica, where each has its own."""
    leading = place.leading(ref)
    return put(jnp.broadcast_to(value, (*leading, *np.shape(value))) if leading else value, place.home(ref))


def private(value: Any) -> Any:
    """``value``, copied if it is a host array: the caller may overwrite that while it is still read."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def divided(
    batch: Sequence[Any], keys: Sequence[Any], num_replicas: int, shared: Collection[int] = ()
) -> tuple[list[Any], list[Any]]:
    """The leaves of a batch, and a key, with the replicas as their first axis: each gets its part of the one, and the other.

    Leaves numbered ``shared`` are the same for all, and stay as they are. Of examples left over the first replicas get one more
    each, the others a copy of the first replica's.
    """

    def part(leaf: Any) -> Any:
        whole, rest = divmod(leaf.shape[0], num_replicas)
        if not rest:
            return leaf.reshape(num_replicas, whole, *leaf.shape[1:])
        replicas = np.arange(num_replicas)
        begins = whole * replicas + np.minimum(replicas, rest)
        last = np.where(replicas < rest, begins + whole, whole)
        return leaf[np.concatenate([begins[:, None] + np.arange(whole), last[:, None]], axis=1)]

    parts = [leaf if k in shared else part(leaf) for k, leaf in enumerate(map(_array, batch))]
    return parts, [jnp.broadcast_to(key, (num_replicas, *key.shape)) for key in keys]


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf)


def gather(tree: Any, device: Device | None = None) -> Any:
    """Bring a tree whose leaves live on several devices to one device, so that eager code can mix them.

    Args:
        tree: any tree of arrays, such as ``state.params``.
        device: where to; the first device unless said.

    Returns:
        the same tree with every leaf a copy on ``device``; the originals stay.

    Example:
        >>> import optax
        >>> norm = optax.tree.norm(gather({"w": jax.numpy.ones(4)}))
        >>> float(norm)
        2.0
    """
    check_alive("jaxpp.gather", tree)
    device = jax.devices()[0] if device is None else device
    return jax.tree.map(lambda leaf: put(leaf, device), tree)


def check_alive(where: str, tree: Any) -> None:
    """Refuse arrays whose buffers a step has taken over.

    Raises:
        StateError: there are some; JAX would say that an array has been deleted.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    if gone := sum(leaf.is_deleted() for leaf in leaves):
        raise StateError(
            where,
            "step reuses the buffers of the state it is given, so its arrays are gone, under every name they had",
            f"{gone} of {len(leaves)} arrays were consumed by a step, or donated otherwise",
            "copy what you keep before the step, ema = jax.tree.map(jnp.copy, state.params), or call step(..., donate=False)",
        )


def spread(node: Slices) -> Any:
    """Slices of equal size on different devices as one array sharded over these, sharing their buffers; others as they are."""
    devices = [device for part in node.parts for device in part.devices()]
    if len(set(node.sizes)) > 1 or len(set(devices)) < len(devices) or len(devices) > len(node.parts):
        return node
    sharding = NamedSharding(Mesh(np.array(devices), ("stage",)), PartitionSpec("stage"))
    shape = (sum(node.sizes), *node.parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(node.parts))


def together(node: Any, home: Any) -> Any:
    """Slices as one array on a device (or with its sharding), put together there; any other leaf as it is."""
    if not isinstance(node, Slices):
        return node
    if isinstance(home, Sharding) and not isinstance(home, SingleDeviceSharding):
        return np.concatenate([np.asarray(part) for part in jax.device_get(node.parts)])
    return jnp.concatenate(bring(node.parts, [home] * len(node.parts)))


def apart(leaf: Array) -> list[Array]:
    """The slices of an array made by ``spread``, in order, sharing its buffers."""
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0 if shard.index else 0)
    return [shard.data for shard in shards]


def bring(leaves: Sequence[Any], homes: Sequence[Any]) -> list[Array]:
    """The leaves on the devices (or shardings) named, each left where it is if it is there already; host arrays are copied."""
    return jax.device_put(list(map(private, leaves)), list(homes))


def to_host(leaves: Sequence[Any], homes: Sequence[Any] | None = None) -> tuple[Array, ...]:
    """Begin to copy arrays to the pinned host memory beside their devices, and return at once.

    The copies share nothing with the originals. Device arrays may be given up (donated) straight away: the runtime keeps a buffer
    until what was begun before has read it. NumPy arrays must not be written to until the copies are there.

    Args:
        leaves: what to copy.
        homes: the device sharding beside which each goes; its own unless said.
    """
    homes = [leaf.sharding for leaf in leaves] if homes is None else homes
    return tuple(jax.device_put(list(leaves), [home.with_memory_kind(HOST) for home in homes], may_alias=False))


def to_device(leaves: Sequence[Array], homes: Sequence[Any]) -> tuple[Array, ...]:
    """Begin to copy host arrays to the devices (or shardings) named, and return at once; a step may give the copies up."""
    found = [_one(leaf) if isinstance(home, SingleDeviceSharding) else leaf for leaf, home in zip(leaves, homes, strict=True)]
    return tuple(jax.device_put(found, list(homes), may_alias=False))


def _one(leaf: Array) -> Array:
    """Of an array that is whole on several devices, one: JAX does not move those from host memory to a single device."""
    several = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 and leaf.is_fully_replicated
    return leaf.addressable_shards[0].data if several else leaf
