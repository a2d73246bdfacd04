"""How Orbax saves and restores a state that lives in several processes: as one checkpoint, the same that one process writes.

Problem: each leaf of a state lives on devices of one process (or of a few), and the other processes have an array without local
shards. Orbax expects that every process has a part of every array, and refuses both. Idea: whoever has an array writes it. Orbax
lets each process write into a store of its own and merges the stores when all are done. So nothing else changes: the folder gets
its final name after the last process, and any number of processes can restore it.
"""

import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import StateError
from jaxpp.runtime.processes.here import elsewhere, is_here
from jaxpp.runtime.processes.trees.gathered import brought
from jaxpp.runtime.processes.trees.sliced import slices_of
from jaxpp.runtime.transfer import HOST_MEMORY, put
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.stacked import Slices
from jaxpp.types import Array

__all__ = ["array_handler"]

_OTHERS = "devices of another process"
"""The mesh axis that ``_seen_by_all`` adds."""


def array_handler() -> Any:
    """What lets Orbax save and restore a state of several processes; in one process, Orbax's own handler of arrays.

    Register it once, before the first checkpointer or manager is made. All the other lines stay as they are in one process. Every
    process calls them, and names the same folder, which all processes can reach::

        ocp.type_handlers.register_type_handler(jax.Array, jaxpp.array_handler(), override=True)

        with ocp.CheckpointManager(folder) as manager:
            manager.save(state.step, args=ocp.args.StandardSave(state))

    Each process writes the leaves that it holds, into one checkpoint. It is complete when all have written theirs; until then its
    folder has another name. Any number of processes restore it to ``pipe.abstract_state(...)``, and each reads its own leaves only.

    Returns:
        a type handler of Orbax's, for ``ocp.type_handlers.register_type_handler``.

    Raises:
        StateError: Orbax is not installed.

    Example:
        >>> import jax, orbax.checkpoint as ocp
        >>> from jaxpp import array_handler
        >>> ocp.type_handlers.register_type_handler(jax.Array, array_handler(), override=True)
    """
    try:
        ocp = importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        fix = 'pip install "jaxpp[checkpoint]"'
        raise StateError("jaxpp.array_handler()", "states are saved by Orbax, which is not installed", str(error), fix) from error
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    if jax.process_count() == 1 or isinstance(registered, _ByHolders):
        return registered
    ocp.type_handlers.TypeHandler.register(_ByHolders)
    return _ByHolders(ocp.type_handlers, registered)


class _ByHolders:
    """Orbax's ``TypeHandler`` for arrays, each of which is written and read by the processes that hold it.

    Args:
        handlers: the module ``orbax.checkpoint.type_handlers``.
        registered: the handler that is registered for arrays: it reads what is here.
    """

    def __init__(self, handlers: Any, registered: Any):
        self._registered, self._save_args = registered, handlers.SaveArgs
        # Whoever has an array writes its shape too (no primary host), and no other process has anything of what it writes.
        options = {"primary_host": None, "use_replica_parallel": False, "enable_write_sharding_file": False}
        self._writer = handlers.ArrayHandler(**options)
        self._array_metadata_store = None  # Orbax asks: it would hold notes of arrays in which all processes take part

    def typestr(self) -> str:
        """What a checkpoint calls an array."""
        return self._registered.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """Shapes and types of arrays, from their files."""
        return await self._registered.metadata(infos)

    async def serialize(self, values: Sequence[Array], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        """Begin to write what is here."""
        if keys := [f"{info.name}: {describe(value)}" for value, info in zip(values, infos, strict=True) if _is_key(value)]:
            fix = "keep the numbers that a key is made of in the state, jax.random.key_data(key)"
            raise StateError("a checkpoint", "several processes save arrays of numbers", keys, fix)
        args = [self._save_args()] * len(values) if args is None else args
        values = _collected(values)
        mine = [
            (_seen_by_all(value), info, arg)
            for value, info, arg in zip(values, infos, args, strict=True)
            if value.addressable_shards
        ]
        return await self._writer.serialize(*map(list, zip(*mine, strict=True))) if mine else []

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Array]:
        """Read what is to be here, and stand-ins for the rest, whose shapes and types are read."""
        args = [None] * len(infos) if args is None else args
        away = [k for k, arg in enumerate(args) if _is_away(arg)]
        here = [k for k, arg in enumerate(args) if not _is_away(arg)]
        stored = await self._registered.metadata([infos[k] for k in away]) if away else []
        arrays = await self._registered.deserialize([infos[k] for k in here], [args[k] for k in here]) if here else []
        stand_ins = [_stand_in(infos[k], args[k], aval) for k, aval in zip(away, stored, strict=True)]
        found = dict(zip([*away, *here], [*stand_ins, *arrays], strict=True))
        return [found[k] for k in range(len(infos))]

    def finalize(self, directory: Any) -> None:
        """Orbax merges the stores of all processes by itself."""
        self._registered.finalize(directory)


def _is_key(value: Array) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _collected(values: Sequence[Array]) -> list[Array]:
    """The values; those held as slices in several processes are whole in the host memory of one process, each in the next one's."""
    found, keepers = [], itertools.cycle(range(jax.process_count()))
    for value in values:
        node = slices_of(value)
        found.append(value if node is None else _collected_at(next(keepers), value, node))
    return found


def _collected_at(keeper: int, stand_in: Array, node: Slices) -> Array:
    """The whole leaf in the host memory of one process; in the others the stand-in. Every process calls this."""
    parts = [brought(part, {keeper}, put) for part in node.parts]
    if jax.process_index() != keeper:
        return stand_in
    home = SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST_MEMORY)
    return put(np.concatenate([np.asarray(part) for part in parts]), home)


def _is_away(arg: Any) -> bool:
    """Whether what is to be restored has no place here."""
    sharding = getattr(arg, "sharding", None)
    return isinstance(sharding, Sharding) and not is_here(sharding)


def _stand_in(info: Any, arg: Any, stored: Any) -> Array:
    """An array that other processes read; its stored shape is checked here too, so that all of them find the mistake."""
    shape = tuple(arg.global_shape or stored.shape)
    if arg.strict and shape != tuple(stored.shape):
        rule = "a leaf is restored to the shape that was saved"
        got = f"Requested shape: {shape} is not compatible with the stored shape: {tuple(stored.shape)}"
        raise StateError(f"checkpoint[{info.name!r}]", rule, got, "restore with the model that was saved")
    return elsewhere(jax.ShapeDtypeStruct(shape, arg.dtype or stored.dtype), arg.sharding)


def _seen_by_all(value: Array) -> Array:
    """The same array, sharing its buffers, as Orbax takes it: one of which other processes seem to have a copy.

    Orbax writes the first copy only, and that is the one here, so nobody needs to make the other.
    """
    if not value.is_fully_addressable:
        return value
    sharding = value.sharding
    if isinstance(sharding, NamedSharding) and not value.is_fully_replicated:
        used = {name for entry in sharding.spec for name in (entry if isinstance(entry, tuple) else (entry,))}
        names = sharding.mesh.axis_names
        devices = np.asarray(sharding.mesh.devices)[tuple(slice(None) if name in used else 0 for name in names)]
        names, spec = tuple(name for name in names if name in used), sharding.spec
    else:
        devices, names, spec = np.array(next(iter(sharding.device_set))), (), PartitionSpec()
    me = jax.process_index()
    others = np.array([device for device in jax.devices() if device.process_index != me][: devices.size])
    if others.size < devices.size:
        rule = "Orbax takes an array on several devices if the other processes have as many"
        got = f"{describe(value)} on {devices.size} devices of process {me}; all others have {others.size}"
        raise StateError("a checkpoint", rule, got, "give every process the same number of devices")
    mesh = Mesh(np.stack([devices, others.reshape(devices.shape)]), (_OTHERS, *names))
    shards = {shard.device: shard.data for shard in value.addressable_shards}
    whole = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(value.shape, whole, [shards[device] for device in devices.flat])
