"""What lives in this process, and what stands for the rest.

Each process knows the whole pipeline, and compiles, holds and dispatches what has a device here. A value of another process is an
array without local shards: it has a shape, a type and a sharding, and nobody here can read it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp.errors import BatchError, StateError
from jaxpp.stages.jaxpr import describe
from jaxpp.targets import compiles_only
from jaxpp.types import Array, Aval, Device, DType, Home, Leaf


def as_sharding(home: Home) -> Sharding:
    """A home as a sharding."""
    return home if isinstance(home, Sharding) else SingleDeviceSharding(home)


def devices_in(home: Home) -> set[Device]:
    """The devices of a home."""
    return home.device_set if isinstance(home, Sharding) else {home}


def processes_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """The processes that have some of these devices, in order; devices that only compile are of this one."""
    return tuple(sorted({jax.process_index() if compiles_only(device) else device.process_index for device in devices}))


def is_here(home: Home) -> bool:
    """Whether some of a home's devices are of this process."""
    return jax.process_index() in processes_of(devices_in(home))


def is_whole_here(home: Home) -> bool:
    """Whether all of a home's devices are of this process."""
    return processes_of(devices_in(home)) == (jax.process_index(),)


def elsewhere(aval: Aval, home: Home) -> Array:
    """What stands for an array that lives in other processes."""
    return jax.make_array_from_single_device_arrays(aval.shape, as_sharding(home), [], dtype=aval.dtype)


def is_addressable(value: Leaf) -> bool:
    """Whether this process can read a value."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def put_across(value: Leaf, home: Home) -> Array:
    """A fresh copy of what is here of a value that every process has, or that lives at this home already; nothing is sent."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        sharding = as_sharding(home)
        if value.sharding == sharding:
            copies = [jnp.array(shard.data, copy=True) for shard in value.addressable_shards]
            return jax.make_array_from_single_device_arrays(value.shape, sharding, copies, dtype=value.dtype)
        if not value.is_fully_replicated or not value.addressable_shards:
            rule = "an array that lives in other processes stays where it is, for nothing is sent that not all processes agree upon"
            fix = "bring the tree to every process first, jaxpp.gather(tree), or save a checkpoint and restore it"
            got = f"{describe(value)} on {value.sharding}, wanted on {sharding}"
            raise StateError("an array of several processes", rule, got, fix)
        value = value.addressable_data(0)
    if is_here(home):
        return spread(value, home)
    aval = value if hasattr(value, "dtype") else jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.result_type(value))
    return elsewhere(jax.eval_shape(lambda x: x, aval) if isinstance(aval, np.ndarray) else aval, home)


def spread(value: Leaf, home: Home, memory_kind: str | None = None) -> Array:
    """The shards here of a value that every process passes, or of which this one has what its shards need; nothing is sent."""
    sharding, shape = as_sharding(home), np.shape(value)
    if memory_kind is not None:
        sharding = sharding.with_memory_kind(memory_kind)
    value = value if hasattr(value, "dtype") else np.asarray(value, jax.dtypes.result_type(value))
    indices = sharding.addressable_devices_indices_map(shape)
    pieces = []
    for device, index in indices.items():
        is_all = index is None or all(one.indices(size) == (0, size, 1) for one, size in zip(index, shape, strict=True))
        at = SingleDeviceSharding(device, memory_kind=memory_kind) if memory_kind else device
        pieces.append(jax.device_put(value if is_all else value[index], at))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def local(leaf: Leaf, where: str) -> Leaf:
    """A leaf of the caller's batch, as far as it is in this process: of a global array the rows, of one elsewhere the shape."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if not leaf.addressable_shards:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf.addressable_data(0) if leaf.is_fully_replicated else LocalRows.of(leaf, where)


@dataclass(frozen=True)
class LocalRows:
    """The rows of a global array that are in this process; ``lacks`` says whether they are those that are read here."""

    rows: Mapping[tuple[int, int], np.ndarray]  # by the first and the one after the last
    shape: tuple[int, ...]  # of the whole array; with ``num_replicas`` the rows are divided among these, the first axis
    dtype: DType
    num_replicas: int = 0  # 0 if the rows are not divided

    @classmethod
    def of(cls, array: Array, where: str = "batch") -> "LocalRows":
        """The rows of an array that is sharded over its first axis."""
        rows = {}
        for shard in array.addressable_shards:
            first, *rest = (one.indices(size)[:2] for one, size in zip(shard.index, array.shape, strict=True))
            if rest != [(0, size) for size in array.shape[1:]]:
                rule = "a leaf of a batch that lives in several processes is divided along its first axis, the examples"
                fix = 'pass jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), rows)'
                raise BatchError(where, rule, f"{describe(array)} with the sharding {array.sharding}", fix)
            rows[first] = np.asarray(shard.data)
        return cls(rows, array.shape, array.dtype)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def split(self, num_replicas: int) -> "LocalRows":
        """The same with the replicas as its first axis."""
        whole, rest = divmod(self.shape[0], num_replicas)
        if rest:
            rule = "examples that live in several processes divide evenly among the replicas"
            got = f"{self.shape[0]} examples for {num_replicas} replicas"
            raise BatchError("batch", rule, got, "pass a batch whose size is a multiple, or the whole batch in every process")
        return replace(self, shape=(num_replicas, whole, *self.shape[1:]), num_replicas=num_replicas)

    def lacks(self, home: Home) -> int | None:
        """The first row that devices of this process read at a home and that is not here; None if all of them are."""
        each = self.shape[1] if self.num_replicas else 1
        for index in as_sharding(home).addressable_devices_indices_map(self.shape).values():
            begin, end, _ = (index or (slice(None),))[0].indices(self.shape[0])
            for row in range(begin * each, end * each):
                if not any(first <= row < last for first, last in self.rows):
                    return row
        return None

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """A part, all of whose rows are here."""
        each = self.shape[1] if self.num_replicas else 1
        begin, end = (each * row for row in index[0].indices(self.shape[0])[:2])
        parts = []
        while begin < end:
            at = next(key for key in self.rows if key[0] <= begin < key[1])
            parts.append(self.rows[at][begin - at[0] : end - at[0]])
            begin = min(end, at[1])
        part = np.concatenate(parts)
        return (part.reshape(-1, *self.shape[1:]) if self.num_replicas else part)[(slice(None), *index[1:])]
