"""The only file that moves an array between devices of this process (between processes: ``runtime.processes.crossing``).

Inside a step, ``sender`` moves what the plan sends. The other functions serve the edges of a step: ``put`` and ``put_at`` copy a
value to a place, ``to_homes`` moves what is not there yet, ``unaliased`` copies a host array that the caller may overwrite,
``split_over_replicas`` divides a batch, ``gather`` collects a distributed tree on one device, and ``to_host`` and ``to_device``
move parameter sets to pinned host memory and back. ``copier`` does so with residuals, inside a step.
"""

import functools
import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import StateError
from jaxpp.runtime.place import Place
from jaxpp.runtime.processes.here import LocalRows, as_sharding, elsewhere, is_addressable, is_whole_here, put_across
from jaxpp.runtime.processes.trees.gathered import gather_across
from jaxpp.stages.program import Ref
from jaxpp.stages.stacked import Slices
from jaxpp.types import Array, Device, Home, Leaf, Tree

try:
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
except ImportError:  # a later jaxlib may have another name for it: see ``_direct_copy``
    xla_client = None

__all__ = [
    "HOST_MEMORY",
    "check_alive",
    "concatenated_at",
    "copier",
    "gather",
    "join_slices",
    "joined_home",
    "put",
    "put_at",
    "sender",
    "split_over_replicas",
    "split_slices",
    "to_device",
    "to_homes",
    "to_host",
    "unaliased",
]

HOST_MEMORY = "pinned_host"
"""The kind of host memory that devices copy from and to at full speed, without blocking."""


def sender(home: Home, source: Home | None = None) -> Callable[[Array], Sequence[Array]]:
    """What a send calls: it copies one value to a device, or to a sharding, and leaves the source as it is.

    A send means ``jax.device_put(value, home)``. Where the runtime's own copy is known to do the same, it is called directly, which
    takes a fifth of the host time; every value that it is not made for takes ``jax.device_put``.

    Args:
        home: where to.
        source: where every value that will be sent lives, if programs of a plan made it there; values that a caller gave are looked
            at one by one.
    """
    put, copy, sources, plain = jax.device_put, *_direct_copy(home), _plain_type()

    def send(value: Array) -> tuple[Array]:
        return (put(value, home),)

    def send_directly(value: Array) -> Sequence[Array]:
        if type(value) is plain and value.committed and value.sharding in sources:
            return copy(value)
        return (put(value, home),)

    if source is not None and (source if isinstance(source, Sharding) else SingleDeviceSharding(source)) in sources:
        return copy
    return send_directly if sources else send


@functools.cache
def _plain_type() -> type:
    """The class of arrays on devices; keys are of another."""
    return type(jnp.zeros(()))


@functools.cache
def _direct_copy(home: Home) -> tuple[Callable[[Array], Sequence[Array]], frozenset[Sharding]]:
    """The copy that ``jax.device_put`` itself makes to one device, and the shardings from which it can be relied upon.

    It is not part of JAX's public interface; of what is not, jaxpp uses this (also in ``_memory_copy``) and the client in
    ``runtime.agreement.store``. It is looked up with care, and tried once from each other device of the same kind: it must give
    what ``jax.device_put`` gives. Where it is missing there are no such shardings.
    """

    def copy(value: Array) -> Sequence[Array]:
        return copy_arrays([value], devices, shardings, semantics)

    if isinstance(home, Sharding) and not isinstance(home, SingleDeviceSharding):
        return copy, frozenset()
    sharding = home if isinstance(home, SingleDeviceSharding) else SingleDeviceSharding(home)
    (device,) = sharding.device_set
    shardings = [sharding]
    try:
        copy_arrays = xla_client.batched_copy_array_to_devices_with_sharding
        devices, semantics = [xla_client.DeviceList((device,))], [xla_client.ArrayCopySemantics.REUSE_INPUT]
        values = [jnp.asarray(value) for value in (np.arange(6, dtype=np.int32).reshape(2, 3), 2.0)]
        others = [other for other in device.client.local_devices() if other != device]
        tried = {other: [jax.device_put(value, other) for value in values] for other in others}
        good = [all(_same(copy(probe), jax.device_put(probe, home), probe) for probe in probes) for probes in tried.values()]
        return copy, frozenset(probes[0].sharding for probes, is_good in zip(tried.values(), good, strict=True) if is_good)
    except Exception:  # noqa: BLE001  (whatever it is that this version of JAX lacks)
        return copy, frozenset()


def _same(found: Sequence[Array], wanted: Array, source: Array) -> bool:
    """Whether one array came, as the wanted one in all that a program sees of it, and the source is still there."""
    (array,) = found
    kinds = [(each.aval, each.sharding, each.committed, each.devices(), type(each)) for each in (array, wanted)]
    return kinds[0] == kinds[1] and not source.is_deleted() and bool(np.array_equal(array, source))


def put(value: Leaf, home: Home) -> Array:
    """A fresh copy of a value on a device, or with a sharding: it shares no buffer with the original.

    Of several processes, each gets what is here of it (``put_across``).
    """
    if jax.process_count() > 1 and not (is_whole_here(home) and is_addressable(value)):
        return put_across(value, home)
    value = unaliased(value)  # ``may_alias=False`` shares the memory of NumPy arrays that are aligned all the same
    if isinstance(home, NamedSharding):  # there the first shard would be the original
        value = jnp.array(value, copy=True)
    return jax.device_put(value, home, may_alias=False)


def put_at(place: Place, ref: Ref, value: Leaf) -> Array:
    """A fresh copy of a value at a place; on every replica, where each has its own."""
    leading = place.leading(ref)
    return put(jnp.broadcast_to(value, (*leading, *np.shape(value))) if leading else value, place.home(ref))


def unaliased(value: Leaf) -> Leaf:
    """The value, copied if it is a NumPy array: the caller may overwrite a NumPy array while it is still read."""
    return np.array(value) if isinstance(value, np.ndarray) else value


def split_over_replicas(
    batch: Sequence[Leaf], keys: Sequence[Array], num_replicas: int, shared: Collection[int] = ()
) -> tuple[list[Leaf], list[Array]]:
    """The leaves of a batch, and a key, with the replicas as their first axis: each gets its part of the batch, and the key.

    Leaves numbered ``shared`` are the same for all replicas, and stay as they are. If the examples do not divide evenly, the first
    replicas get one more each, and the others a copy of the first replica's.
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


def gather(tree: Tree, device: Device | None = None) -> Tree:
    """Bring a tree whose leaves live on several devices to one device, so that eager code can mix them.

    Args:
        tree: any tree of arrays, such as ``state.params``.
        device: where to; the first device by default. In several processes it is a device of the process that asks, and by default
            its first: every process calls ``gather`` with the same tree, and all of them get the whole tree, leaf by leaf.

    Returns:
        the same tree with every leaf a copy on ``device``; the originals stay.

    Raises:
        ArgumentError: in several processes, the device belongs to another one.
        ProcessError: they passed different trees, or one of them failed or does not come.

    Example:
        >>> import optax
        >>> norm = optax.tree.norm(gather({"w": jax.numpy.ones(4)}))
        >>> float(norm)
        2.0
    """
    check_alive("jaxpp.gather", tree)
    if jax.process_count() > 1:
        return gather_across(tree, device, put)
    device = jax.devices()[0] if device is None else device
    return jax.tree.map(lambda leaf: put(leaf, device), tree)


def check_alive(where: str, tree: Tree) -> None:
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


def join_slices(node: Slices) -> Array | Slices:
    """Slices of equal size on different devices as one array sharded over these, sharing their buffers; others as they are."""
    devices = [part.sharding.device_set for part in node.parts]
    sharding = _over_stages(node.sizes, [next(iter(each)) if len(each) == 1 else None for each in devices])
    if sharding is None:
        return node
    shape, dtype = (sum(node.sizes), *node.parts[0].shape[1:]), node.parts[0].dtype
    here = [part for part in node.parts if part.is_fully_addressable]
    return jax.make_array_from_single_device_arrays(shape, sharding, here, dtype=dtype)


def joined_home(home: Home | Slices) -> Sharding:
    """Where a whole leaf is restored to: the sharding of its owner.

    For slices (of homes) it is the sharding that ``join_slices`` gives, and where that gives none pinned host memory, from which a
    step brings each slice to its owner: a whole leaf may be larger than a device. If the slices are in several processes, each of
    these has the whole leaf there.
    """
    if not isinstance(home, Slices):
        return as_sharding(home)
    sharding = _over_stages(home.sizes, [None if isinstance(part, NamedSharding) else _device_of(part) for part in home.parts])
    if sharding is not None:
        return sharding
    devices = sorted({device for part in home.parts for device in as_sharding(part).device_set}, key=lambda device: device.id)
    firsts = list({device.process_index: device for device in reversed(devices)}.values())
    if len(firsts) > 1:
        return NamedSharding(Mesh(np.array(firsts[::-1]), ("process",)), PartitionSpec(), memory_kind=HOST_MEMORY)
    first = sorted(as_sharding(home.parts[0]).device_set, key=lambda device: device.id)[0]
    return SingleDeviceSharding(first, memory_kind=HOST_MEMORY)


def _over_stages(sizes: Sequence[int], devices: Sequence[Device | None]) -> NamedSharding | None:
    """The sharding of slices of equal size on different devices; None for other slices."""
    if None in devices or len(set(sizes)) > 1 or len(set(devices)) < len(devices):
        return None
    return NamedSharding(Mesh(np.array(devices), ("stage",)), PartitionSpec("stage"))


def _device_of(home: Home) -> Device | None:
    """The device of a home that is one device."""
    return next(iter(home.device_set)) if isinstance(home, SingleDeviceSharding) else home


def split_slices(leaf: Array) -> list[Array]:
    """The slices of an array made by ``join_slices``, in order, sharing its buffers."""
    if leaf.is_fully_addressable:
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0 if shard.index else 0)
        return [shard.data for shard in shards]
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    part = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    devices = sorted(indices, key=lambda device: indices[device][0].start or 0 if indices[device] else 0)
    return [here[device] if device in here else elsewhere(part, device) for device in devices]


def concatenated_at(node: Leaf | Slices, home: Home) -> Leaf:
    """Slices as one array, concatenated on a device or with a sharding; any other leaf as it is."""
    if not isinstance(node, Slices):
        return node
    if isinstance(home, Sharding) and not isinstance(home, SingleDeviceSharding):
        return np.concatenate([np.asarray(part) for part in jax.device_get(node.parts)])
    return jnp.concatenate(to_homes(node.parts, [home] * len(node.parts)))


def to_homes(leaves: Sequence[Leaf], homes: Sequence[Home]) -> list[Array]:
    """The leaves, each on its device or with its sharding: as they are if they are there already.

    NumPy arrays are copied, one after the other, so that the host never has a second copy of all of them. Of several processes,
    each gets what is here of them (``put_across``).
    """
    if jax.process_count() > 1:
        return [_to_home(leaf, home) for leaf, home in zip(leaves, homes, strict=True)]
    ours = [_copied(leaf, home) if isinstance(leaf, np.ndarray) else leaf for leaf, home in zip(leaves, homes, strict=True)]
    return jax.device_put(ours, list(homes))


def _to_home(leaf: Leaf, home: Home) -> Array:
    if isinstance(leaf, jax.Array) and leaf.sharding == as_sharding(home):
        return leaf
    if not is_whole_here(home) or not is_addressable(leaf):
        return put_across(leaf, home)
    return _copied(leaf, home) if isinstance(leaf, np.ndarray) else jax.device_put(leaf, home)


def _copied(leaf: np.ndarray, home: Home) -> Array:
    """A NumPy array on a device or with a sharding, sharing no memory with it, once it is there."""
    return jax.block_until_ready(jax.device_put(np.array(leaf), home))


def to_host(leaves: Sequence[Leaf], homes: Sequence[Sharding] | None = None) -> tuple[Array, ...]:
    """Begin to copy arrays to the pinned host memory beside their devices, and return at once.

    The copies share nothing with the originals. Device arrays may be given up (donated) straight away: the runtime keeps a buffer
    until what was begun before has read it. NumPy arrays must not be written to until the copies are there.

    Args:
        leaves: what to copy.
        homes: the device sharding beside which each copy goes; its own by default.
    """
    homes = [leaf.sharding for leaf in leaves] if homes is None else homes
    return tuple(jax.device_put(list(leaves), [home.with_memory_kind(HOST_MEMORY) for home in homes], may_alias=False))


def to_device(leaves: Sequence[Leaf], homes: Sequence[Home]) -> tuple[Array, ...]:
    """Begin to copy host arrays to devices or shardings, and return at once; a step may take over the copies."""
    found = [_one(leaf) if isinstance(home, SingleDeviceSharding) else leaf for leaf, home in zip(leaves, homes, strict=True)]
    return tuple(jax.device_put(found, list(homes), may_alias=False))


def _one(leaf: Leaf) -> Leaf:
    """One copy of an array that is whole on several devices: JAX does not move such an array from host memory to one device."""
    several = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 and leaf.is_fully_replicated
    return leaf.addressable_shards[0].data if several else leaf


def copier(homes: Sequence[Sharding], *, to_host: bool) -> Callable[..., Sequence[Array]]:
    """What a line calls that copies values to the pinned host memory beside their devices, or back.

    It waits for nothing, and the copies share nothing with the originals. It means ``jax.device_put``; on one device the runtime's
    own copy is called directly where it is known to do the same, which takes a tenth of the host time. Where a value spans
    processes, each copies its own shards.

    Args:
        homes: the sharding of each value on the devices, where programs of a plan, or sends, made it.
        to_host: whether the values are on the devices and go to host memory; else they come back.
    """
    put = jax.device_put
    goals = [home.with_memory_kind(HOST_MEMORY) for home in homes] if to_host else list(homes)
    if all(isinstance(home, SingleDeviceSharding) and _copies_directly(home) for home in homes):
        return _memory_copy(goals)

    def copy(*values: Array) -> Sequence[Array]:
        return put(list(values), goals, may_alias=False)

    def copy_shards(*values: Array) -> Sequence[Array]:
        return [_copied_shards(value, goal) for value, goal in zip(values, goals, strict=True)]

    return copy if all(map(is_whole_here, homes)) else copy_shards


def _memory_copy(goals: Sequence[Sharding]) -> Callable[..., Sequence[Array]]:
    """The copy that ``jax.device_put`` itself makes of arrays on one device, to other memory beside it."""
    copy_arrays, always = xla_client.batched_copy_array_to_devices_with_sharding, xla_client.ArrayCopySemantics.ALWAYS_COPY
    devices, semantics = [xla_client.DeviceList(tuple(goal.device_set)) for goal in goals], [always] * len(goals)
    shardings = list(goals)

    def copy(*values: Array) -> Sequence[Array]:
        return copy_arrays(list(values), devices, shardings, semantics)

    return copy


@functools.cache
def _copies_directly(home: SingleDeviceSharding) -> bool:
    """Whether the runtime's own copy brings arrays of a device to its host memory and back: tried once, as in ``_direct_copy``."""
    try:
        there = home.with_memory_kind(HOST_MEMORY)
        values = jax.device_put([np.arange(6, dtype=np.int32).reshape(2, 3), np.float32(2)], [home] * 2)
        copies = _memory_copy([there] * 2)(*values)
        back = _memory_copy([home] * 2)(*copies)
        found = {array.unsafe_buffer_pointer() for array in (*values, *copies, *back)}
        placed = all(copy.sharding == there and not value.is_deleted() for copy, value in zip(copies, values, strict=True))
        same = all(_same([array], value, copy) for array, value, copy in zip(back, values, copies, strict=True))
        return placed and same and len(found) == 3 * len(values)
    except Exception:  # noqa: BLE001  (whatever it is that this version of JAX lacks)
        return False


def _copied_shards(value: Array, goal: Sharding) -> Array:
    """The shards here of a value in other memory of the same devices."""
    kind = {} if goal.memory_kind is None else {"memory_kind": goal.memory_kind}
    shards = [(shard.data, SingleDeviceSharding(shard.device, **kind)) for shard in value.addressable_shards]
    copies = jax.device_put([data for data, _ in shards], [home for _, home in shards], may_alias=False)
    return jax.make_array_from_single_device_arrays(value.shape, goal, copies)
