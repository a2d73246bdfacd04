"""Sends between processes: ``jax.device_put``, called on both sides in the same order.

All processes have the same lines in the same order, so a value that goes from one to another is handed over by both: the one that
has it sends it, and drops what it gets back, an array without local shards; the other passes a stand-in for it, and gets the value.
The others pass a stand-in too and drop what they get: JAX numbers the transfers of each process as they are called, and sender and
receiver find each other by this number. Where a place spans processes, each shard goes by itself, from the devices that have it to
those that want it; most stay inside a process.

A program that takes over a buffer marks the buffer as gone when the program is handed over. A buffer that is on its way to another
process is read later, when that process asks for it. So what a program may take over is copied first, and the copy is sent.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp.errors import ArgumentError
from jaxpp.runtime.processes.here import as_sharding, elsewhere, is_here
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Array, Aval, Device, Home

__all__ = ["crosser"]

_Call = Callable[..., Sequence[Array]]
"""Called with the value where it is here, and with nothing where it is not; returns it where it is to be, and else nothing."""


def crosser(aval: Aval, source: Home, target: Home, *, taken: bool = False) -> _Call:
    """What a send calls whose value or target is not whole in this process.

    Args:
        aval: shape and dtype of the value, with all its axes.
        source: where it is.
        target: where it goes.
        taken: whether a later program may take over the value's buffer.

    Raises:
        ArgumentError: the value would have to be divided in another way, across processes.
    """
    here, there = is_here(source), is_here(target)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return _of_keys(aval, source, target)
    if _in_one_process(source) and _in_one_process(target):
        stand_in = None if here else elsewhere(aval, source)

        def send(*value: Array) -> Sequence[Array]:
            (given,) = value or (stand_in,)
            found = jax.device_put(jnp.array(given, copy=True) if taken and here else given, target)
            return (found,) if there else ()

        return send
    return _shard_by_shard(aval, as_sharding(source), as_sharding(target), taken=taken)


def _in_one_process(home: Home) -> bool:
    """Whether all devices are of one process, this or another."""
    devices = as_sharding(home).device_set
    return len({device.process_index for device in devices}) == 1


def _shard_by_shard(aval: Aval, source: Sharding, target: Sharding, *, taken: bool) -> _Call:
    """Each device of the target gets its shard from one of the source that has the same, of its own process if one has."""
    me = jax.process_index()
    shape = source.shard_shape(aval.shape)
    pairs = [(a, b) for a, b in _pairs(aval, source, target) if a.process_index != b.process_index or a.process_index == me]
    stand_in = {a: elsewhere(jax.ShapeDtypeStruct(shape, aval.dtype), a) for a, _ in pairs if a.process_index != me}
    leaving = {a for a, b in pairs if taken and a.process_index == me != b.process_index}
    there = is_here(target)

    def send(*value: Array) -> Sequence[Array]:
        shards = {shard.device: shard.data for array in value for shard in array.addressable_shards} | stand_in
        shards |= {device: jnp.array(shards[device], copy=True) for device in leaving}
        moved = [(b, jax.device_put(shards[a], SingleDeviceSharding(b))) for a, b in pairs]
        mine = [array for b, array in moved if b.process_index == me]
        return (jax.make_array_from_single_device_arrays(aval.shape, target, mine),) if there else ()

    return send


def _pairs(aval: Aval, source: Sharding, target: Sharding) -> list[tuple[Device, Device]]:
    """From which device to which each shard goes."""
    has, wants = (_indices(sharding, aval.shape) for sharding in (source, target))
    pairs = []
    for device, index in wants.items():
        sources = [other for other, its in has.items() if its == index]
        if not sources:
            rule = "a value that goes to another process arrives divided as it was"
            got = f"{describe(aval)} on {source}, to go to {target}"
            fix = "make a mesh in which every rank is in one process, or pass shardings= that divide it alike on all ranks"
            raise ArgumentError("Pipeline(mesh=...)", rule, got, fix)
        near = [other for other in sources if other.process_index == device.process_index]
        pairs.append(((near or sources)[0], device))
    return pairs


def _indices(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, tuple[tuple[int, ...], ...]]:
    """What each device has, in the order of the devices."""
    found = sharding.devices_indices_map(shape)
    return {
        device: tuple(one.indices(size) for one, size in zip(found[device], shape, strict=True))
        for device in sorted(found, key=lambda device: device.id)
    }


def _of_keys(aval: Aval, source: Home, target: Home) -> _Call:
    """Typed keys cross as the numbers that they are made of."""
    implementation = str(jax.random.key_impl(jnp.empty((), aval.dtype)))
    raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    cross = crosser(raw, source, target)

    def send(*value: Array) -> Sequence[Array]:
        found = cross(*(jax.random.key_data(key) for key in value))
        return [jax.random.wrap_key_data(data, impl=implementation) for data in found]

    return send
