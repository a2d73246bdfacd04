"""Sends: everything that moves values inside a step.

``Send.bind`` chooses, when a plan is made, the quickest function: ``jax.device_put``, or, where it does the same, the runtime's own
copy (``not_public``). ``memory_copies`` moves residuals to host memory and back. Between processes both sides call the send, in the
same order, because JAX numbers transfers as they are called: whoever lacks the value passes a stand-in, and whoever has it drops
what it gets back. Where a place spans processes, each shard goes by itself. Between ranks of unequal width, one device of each
replica sends all that this replica has of the value, which its shards gather first: ``jax.device_put`` would divide it anew on the
host. To another process it sends that to one device, which gives it to the others.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import ArgumentError
from jaxpp.runtime.not_public import copies_memory, direct_copy, memory_copy
from jaxpp.runtime.processes.here import LocalRows, as_sharding, devices_in, elsewhere, is_here, is_whole_here, processes_of, spread
from jaxpp.stages.axes import DATA, MODEL, axis_names
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Array, Aval, Device, Home, Leaf

HOST_MEMORY = "pinned_host"  # devices copy from and to it at full speed, without blocking

Move = Callable[..., Sequence[Array]]  # called with, and returns, the value where it is here, else nothing


@dataclass(frozen=True)
class Send:
    """A value that goes from one home to another, and stays where it is too."""

    target: Home
    source: Home | None = None  # of every value that will be sent, if that is known; values of a caller are looked at one by one
    aval: Aval | None = None  # with all axes; needed between processes, as is the source
    taken: bool = False  # whether a later program may take over the buffer: then a copy is sent, for another process reads it later
    regrouped: bool = False  # whether it goes to a rank of more, or of fewer, devices

    @property
    def num_bytes(self) -> int:
        """Bytes that arrive on each device, where the shape is known."""
        if self.aval is None:
            return 0
        return count_bytes(jax.ShapeDtypeStruct(as_sharding(self.target).shard_shape(self.aval.shape), self.aval.dtype))

    def bind(self) -> Move:
        """The quickest function that makes this send."""
        if self.source is None or self.aval is None:
            return self._within_process()
        if not jnp.issubdtype(self.aval.dtype, jax.dtypes.prng_key):
            return self._across(self.aval, self.source)
        wire = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(self.aval.shape, self.aval.dtype))
        move = replace(self, aval=wire)._across(wire, self.source)
        implementation = str(jax.random.key_impl(jnp.empty((), self.aval.dtype)))

        def send(*value: Array) -> Sequence[Array]:  # keys cross processes as the numbers that they are made of
            return [jax.random.wrap_key_data(data, impl=implementation) for data in move(*map(jax.random.key_data, value))]

        return send

    def bind_for_caller(self) -> Move:
        """The same for a value of the caller, of which each of several processes has what its own stages read."""
        send, home = self._within_process() if is_whole_here(self.target) else None, self.target

        def give(value: Leaf) -> Sequence[Array]:
            return (spread(value, home),) if send is None or isinstance(value, LocalRows) else send(value)

        return give

    def _within_process(self) -> Move:
        if self.regrouped:
            return self._regroup()
        home, source = self.target, self.source
        put, copy, sources, plain = jax.device_put, *direct_copy(home), array_type()
        if source is not None and as_sharding(source) in sources:
            return copy

        def send(value: Array) -> tuple[Array]:
            return (put(value, home),)

        def send_directly(value: Array) -> Sequence[Array]:
            if type(value) is plain and value.committed and value.sharding in sources:
                return copy(value)
            return (put(value, home),)

        return send_directly if sources else send

    def _regroup(self) -> Move:
        """From one device of each replica of the source, which has what its replica needs, to all devices of that in the target."""
        spec, homes = by_replica(self.target)
        moves, target = [Send(home)._within_process() for home in homes], as_sharding(self.target)

        def send(value: Array) -> Sequence[Array]:
            divide = _dividing(value.sharding, spec, value.ndim)
            shards = (value if divide is None else divide(value)).addressable_shards
            width = len(shards) // len(moves)
            parts = [move(shards[number * width].data)[0] for number, move in enumerate(moves)]
            if len(parts) == 1:
                return parts
            arrived = [shard.data for part in parts for shard in part.addressable_shards]
            return (jax.make_array_from_single_device_arrays(value.shape, target, arrived),)

        return send

    def _across(self, aval: Aval, source: Home) -> Move:
        """``jax.device_put`` in all processes, of the value or of what stands for it."""
        here, there, target, taken = is_here(source), is_here(self.target), self.target, self.taken
        if self.regrouped:
            return self._regroup_across(aval, as_sharding(source))
        if max(len(processes_of(devices_in(home))) for home in (source, target)) > 1:
            return self._shard_by_shard(aval, as_sharding(source), as_sharding(target))
        stand_in = None if here else elsewhere(aval, source)

        def send(*value: Array) -> Sequence[Array]:
            (leaving,) = value or (stand_in,)
            arrived = jax.device_put(jnp.array(leaving, copy=True) if taken and here else leaving, target)
            return (arrived,) if there else ()

        return send

    def _regroup_across(self, aval: Aval, source: Sharding) -> Move:
        """As ``_regroup``, where a replica may be in another process of the target than of the source."""
        spec, homes = by_replica(self.target)
        target, there, divide = as_sharding(self.target), is_here(self.target), _dividing(source, spec, len(aval.shape))
        whole = NamedSharding(source.mesh, spec).shard_shape(aval.shape) if isinstance(source, NamedSharding) else aval.shape
        part = jax.ShapeDtypeStruct(whole, aval.dtype)
        leads = _in_order(source)[:: len(source.device_set) // len(homes)]
        firsts = [_in_order(as_sharding(home))[0] for home in homes]
        ends = zip(leads, firsts, homes, strict=True)
        routes = [self._route(lead, first, home, part, kept=divide is None) for lead, first, home in ends]

        def send(*value: Array) -> Sequence[Array]:
            parts = [array if divide is None else divide(array) for array in value]
            shards = {shard.device: shard.data for array in parts for shard in array.addressable_shards}
            arrived = list[Array]()
            for lead, route in zip(leads, routes, strict=True):
                if route is not None:
                    arrived += route(*[shards[lead]] if lead in shards else [])
            if not there or len(homes) == 1:
                return arrived
            pieces = [shard.data for array in arrived for shard in array.addressable_shards]
            return (jax.make_array_from_single_device_arrays(aval.shape, target, pieces),)

        return send

    def _route(self, lead: Device, first: Device, home: Home, part: Aval, *, kept: bool) -> Move | None:
        """From a device of a replica to one of its home, and from there to the others; None where other processes do all that.

        What arrives at a home of one device stays as it is: put there again while it is under way, it fails on CPUs of JAX 0.10.
        """
        across = lead.process_index != first.process_index
        if not across and not is_here(first):
            return None
        move = Send(first, lead, part, self.taken and kept).bind() if across else Send(first)._within_process()
        if not is_here(first) or len(devices_in(home)) == 1:
            return move
        spread_out = Send(home)._within_process()
        return lambda *value: [array for arrived in move(*value) for array in spread_out(arrived)]

    def _shard_by_shard(self, aval: Aval, source: Sharding, target: Sharding) -> Move:
        """Each device of the target gets its shard from one of the source that has the same, of its own process if one has."""
        me, there = jax.process_index(), is_here(target)
        shape = source.shard_shape(aval.shape)
        pairs = [(a, b) for a, b in _pairs(aval, source, target) if a.process_index != b.process_index or a.process_index == me]
        stand_in = {a: elsewhere(jax.ShapeDtypeStruct(shape, aval.dtype), a) for a, _ in pairs if a.process_index != me}
        leaving = {a for a, b in pairs if self.taken and a.process_index == me != b.process_index}

        def send(*value: Array) -> Sequence[Array]:
            shards = {shard.device: shard.data for array in value for shard in array.addressable_shards} | stand_in
            shards |= {device: jnp.array(shards[device], copy=True) for device in leaving}
            moved = [(b, jax.device_put(shards[a], SingleDeviceSharding(b))) for a, b in pairs]
            mine = [array for b, array in moved if b.process_index == me]
            return (jax.make_array_from_single_device_arrays(aval.shape, target, mine),) if there else ()

        return send


@functools.cache
def array_type() -> type:
    """The class of arrays on devices; keys are of another."""
    return type(jnp.zeros(()))


def by_replica(target: Home) -> tuple[PartitionSpec, list[Home]]:
    """How replicas divide a value that leaves for a rank of another width, and where each of their parts goes.

    Without replicas it leaves as a whole; so it does where the target divides one axis over shards and replicas at once, because
    what a replica has there is no part of the value that is next to itself.
    """
    sharding = as_sharding(target)
    entries = [axis_names(entry) for entry in sharding.spec] if isinstance(sharding, NamedSharding) else []
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape[DATA] == 1 or (MODEL, DATA) in entries:
        return PartitionSpec(), [target]
    rows, names = np.asarray(sharding.mesh.devices), sharding.mesh.axis_names
    homes = [NamedSharding(Mesh(row[None], names), sharding.spec) if len(row) > 1 else row[0] for row in rows]
    return PartitionSpec(*(DATA if DATA in entry else None for entry in entries)), homes


def _in_order(sharding: Sharding) -> list[Device]:
    """Devices of a sharding: replica after replica, as in its mesh."""
    return list(np.asarray(sharding.mesh.devices).flat) if isinstance(sharding, NamedSharding) else list(sharding.device_set)


@functools.cache
def _dividing(sharding: Sharding, spec: PartitionSpec, num_axes: int) -> Callable[[Array], Array] | None:
    """What divides a value anew among the devices of its mesh; None if it is divided so, or has no mesh."""
    wanted = NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else sharding
    return None if sharding.is_equivalent_to(wanted, num_axes) else jax.jit(lambda value: value, out_shardings=wanted)


def _pairs(aval: Aval, source: Sharding, target: Sharding) -> list[tuple[Device, Device]]:
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
    indices = sharding.devices_indices_map(shape)
    devices = sorted(indices, key=lambda device: device.id)
    return {one: tuple(part.indices(size) for part, size in zip(indices[one], shape, strict=True)) for one in devices}


def memory_copies(homes: Sequence[Sharding], *, to_host: bool) -> Move:
    """What copies values to the pinned host memory beside their devices, or back; it waits for nothing and shares no buffer.

    It means ``jax.device_put``; on one device the runtime's own copy takes a tenth of the time. Each process copies its shards.
    """
    put = jax.device_put
    goals = [home.with_memory_kind(HOST_MEMORY) for home in homes] if to_host else list(homes)
    if all(isinstance(home, SingleDeviceSharding) and copies_memory(home, home.with_memory_kind(HOST_MEMORY)) for home in homes):
        return memory_copy(goals)

    def copy(*values: Array) -> Sequence[Array]:
        return put(list(values), goals, may_alias=False)

    def copy_shards(*values: Array) -> Sequence[Array]:
        arrays = []
        for value, goal in zip(values, goals, strict=True):
            kind = {} if goal.memory_kind is None else {"memory_kind": goal.memory_kind}
            beside = [SingleDeviceSharding(shard.device, **kind) for shard in value.addressable_shards]
            copies = put([shard.data for shard in value.addressable_shards], beside, may_alias=False)
            arrays.append(jax.make_array_from_single_device_arrays(value.shape, goal, copies))
        return arrays

    return copy if all(map(is_whole_here, homes)) else copy_shards
