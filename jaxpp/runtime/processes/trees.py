"""Trees whose leaves live in several processes: gathered by all of them, and saved by Orbax as one checkpoint.

JAX shards an axis into equal parts only, so unequal slices of a stacked leaf are no global array: in the user's tree a stand-in, an
array without local shards (``stand_in_for``), has the shape of the whole, and ``slices_of`` the slices. Orbax expects a part of
every array in every process; with ``array_handler`` whoever has an array writes it, into a store of its own; Orbax merges them.
"""

import importlib
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import ArgumentError, StateError, shown
from jaxpp.runtime.edges import HOST_MEMORY, check_alive, put
from jaxpp.runtime.processes.channel import agreement, first_devices, rows_of_all, transfers
from jaxpp.runtime.processes.here import devices_in, elsewhere, is_addressable, is_here
from jaxpp.runtime.send import Send
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import wrong_leaves
from jaxpp.stages.stacked import Slices, check_there, joined, put_together, whole_shape
from jaxpp.targets import refuse_compile_only
from jaxpp.types import Array, Aval, Device, Leaf, Tree

_SLICES: dict[int, tuple[weakref.ref[Array], Slices]] = {}  # the slices of each stand-in that is alive, by its address
_AWAY, _PART, _WHOLE = range(3)  # how much of a leaf a process holds
_OTHERS = "devices of another process"  # the mesh axis that ``_seen_by_all`` adds


def gather(tree: Tree, device: Device | None = None) -> Tree:
    """Bring a tree whose leaves live on several devices to one device, so that eager code can mix them.

    Args:
        tree: any tree of arrays, such as ``state.params``.
        device: where to, by default the first device of the process. Several processes call ``gather`` with the same tree, and each
            gets the whole tree on a device of its own.

    Returns:
        the same tree with every leaf a copy on ``device``; the originals stay.

    Raises:
        ArgumentError: what is no device; or, in several processes, a device of another one.
        ProcessError: they passed different trees, or one of them failed or does not come.

    Example:
        >>> import optax
        >>> float(optax.tree.norm(gather({"w": jax.numpy.ones(4)})))
        2.0
    """
    check_alive("jaxpp.gather", tree=tree)
    if wrong := wrong_leaves("tree", jax.tree_util.tree_leaves_with_path(tree), "leave it out", numbers=True):
        raise ArgumentError("jaxpp.gather(tree)", "every leaf is an array or a number", wrong.lines, wrong.fix)
    if not isinstance(device, (jax.Device, Sharding, NoneType)):
        fix = "pass one of jax.devices(), such as jax.devices()[0], or leave it out"
        raise ArgumentError("jaxpp.gather(tree, device)", "a tree is gathered on one of JAX's devices", shown(device), fix)
    asked = () if device is None else devices_in(device)
    refuse_compile_only("jaxpp.gather(tree, device)", asked, "pass one of jax.devices(), or leave device out")
    targets, me = first_devices(), jax.process_index()
    goal = targets[me] if device is None else device
    if jax.process_count() == 1:
        return jax.tree.map(lambda leaf: put(leaf, goal), tree)
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    with agreement("jaxpp.gather", jax.devices()) as agree:
        if goal.process_index != me:
            got = f"{goal} of process {goal.process_index}, in process {me}"
            rule = "each process gathers to a device of its own"
            raise ArgumentError("jaxpp.gather(tree, device)", rule, got, "leave device out")
        agree(lambda: {"tree": "\n".join(f"{jax.tree_util.keystr(path)} {_described(leaf)}" for path, leaf in paths)})
    nodes = [slices_of(leaf) or leaf for _, leaf in paths]
    leaves = [(path, leaf) for (path, _), node in zip(paths, nodes, strict=True) for leaf in jax.tree.leaves(node)]
    held, copies = _held(leaves), []
    with transfers("jaxpp.gather"):
        for (_, leaf), everywhere in zip(leaves, held, strict=True):
            whole = leaf if everywhere else _brought(leaf, targets.keys())
            copies.append(jax.block_until_ready(put(whole, goal)))
    filled = jax.tree.structure(nodes).unflatten(copies)
    return structure.unflatten(joined(filled, lambda node: jnp.concatenate(node.parts, node.axis)))


def _brought(leaf: Array, readers: Collection[int]) -> Leaf:
    """A leaf of some processes in those that read it, as an array or put together on the host of its parts; all call this."""
    places: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    for device in sorted(indices, key=lambda device: device.id):
        box = tuple(one.indices(size)[:2] for one, size in zip(indices[device], leaf.shape, strict=True))
        places.setdefault(box, []).append(device)
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    aval = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    parts = {box: _brought_part(aval, devices, here, readers) for box, devices in places.items()}
    if jax.process_index() not in readers:
        return None
    if len(parts) == 1:
        return next(iter(parts.values()))
    indices = [tuple(slice(begin, end) for begin, end in box) for box in parts]
    return put_together(leaf.shape, zip(indices, parts.values(), strict=True))


def _brought_part(aval: Aval, devices: Sequence[Device], here: Mapping[Device, Array], readers: Collection[int]) -> Array | None:
    targets, me, first = first_devices(), jax.process_index(), devices[0].process_index
    holders = {device.process_index for device in devices}
    part = None
    if me in holders and (me == first or me in readers):
        part = put(next(here[device] for device in devices if device in here), targets[me])
    for process in sorted(set(readers) - holders):
        came = Send(targets[process], targets[first], aval).bind()(*([part] if me == first else []))
        if me == process:
            (part,) = came
    return part


def _described(leaf: Leaf) -> str:
    return describe(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__


def _held(paths: Sequence[tuple[jax.tree_util.KeyPath, Leaf]]) -> list[bool]:
    if not paths:
        return []
    mine = [_WHOLE if is_addressable(leaf) else _PART if leaf.addressable_shards else _AWAY for _, leaf in paths]
    amounts = rows_of_all(np.array(mine, np.int8))
    wrong = []
    for (path, leaf), column in zip(paths, amounts.T, strict=True):
        whole = np.flatnonzero(column == _WHOLE)
        if (0 < len(whole) < len(column) and (len(whole) > 1 or (column == _PART).any())) or not column.any():
            where = jax.tree_util.keystr(path) or "the leaf"
            wrong.append(f"{where}, {_described(leaf)}: whole in {len(whole)} of {len(column)} processes")
    if wrong:
        rule = "a leaf is whole in one process, or in all, or one global array"
        raise ArgumentError("jaxpp.gather(tree)", rule, wrong, "gather it with the leaves of a state, or leave it out")
    return [bool((column == _WHOLE).all()) for column in amounts.T]


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
    """The slices of a stand-in, which no later step may have consumed; None for any other leaf."""
    entry: Any = _SLICES.get(id(leaf))
    if entry is None or entry[0]() is not leaf:
        return None
    check_there(entry[1])
    return entry[1]


def array_handler() -> Any:
    """What lets Orbax save and restore a state of several processes; in one process, Orbax's own handler of arrays.

    Register it before the first checkpointer or manager. Every process makes the calls, with the same folder, which all can reach::

        ocp.type_handlers.register_type_handler(jax.Array, jaxpp.array_handler(), override=True)
        with ocp.CheckpointManager(folder) as manager:
            manager.save(state.step, args=ocp.args.StandardSave(state))

    Each process writes the leaves that it holds; the checkpoint is complete, and gets its name, when all have. Any number of
    processes restore it to ``pipe.abstract_state(...)``, and each reads its own leaves only.

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
        fix = 'pip install -e ".[checkpoint]" in the checkout of jaxpp'
        raise StateError("jaxpp.array_handler()", "states are saved by Orbax, which is not installed", str(error), fix) from error
    registered = ocp.type_handlers.get_type_handler(jax.Array)
    if jax.process_count() == 1 or isinstance(registered, _ByHolders):
        return registered
    ocp.type_handlers.TypeHandler.register(_ByHolders)
    return _ByHolders(ocp.type_handlers, registered)


class _ByHolders:
    """Orbax's ``TypeHandler`` for arrays, each of which is written and read by the processes that hold it."""

    def __init__(self, handlers: Any, registered: Any):
        self._registered, self._save_args = registered, handlers.SaveArgs
        # Whoever has an array writes its shape too (no primary host), and no other process has anything of what it writes.
        options = {"primary_host": None, "use_replica_parallel": False, "enable_write_sharding_file": False}
        self._writer = handlers.ArrayHandler(**options)
        self._array_metadata_store = None  # Orbax asks: it would hold notes of arrays in which all processes take part

    def typestr(self) -> str:
        return self._registered.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return await self._registered.metadata(infos)

    async def serialize(self, values: Sequence[Array], infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        pairs = zip(values, infos, strict=True)
        if keys := [f"{info.name}: {describe(one)}" for one, info in pairs if jnp.issubdtype(one.dtype, jax.dtypes.extended)]:
            fix = "keep the numbers that a key is made of in the state, jax.random.key_data(key)"
            raise StateError("a checkpoint", "several processes save arrays of numbers", keys, fix)
        args = [self._save_args()] * len(values) if args is None else args
        triples = zip(_collected(values), infos, args, strict=True)
        mine = [(_seen_by_all(value), info, arg) for value, info, arg in triples if value.addressable_shards]
        return await self._writer.serialize(*map(list, zip(*mine, strict=True))) if mine else []

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Array]:
        """Read what is to be here, and stand-ins for the rest, whose shapes and types are read."""
        args = [None] * len(infos) if args is None else args
        shardings = [getattr(arg, "sharding", None) for arg in args]
        away = [k for k, sharding in enumerate(shardings) if isinstance(sharding, Sharding) and not is_here(sharding)]
        here = [k for k in range(len(args)) if k not in away]
        stored = await self._registered.metadata([infos[k] for k in away]) if away else []
        arrays = await self._registered.deserialize([infos[k] for k in here], [args[k] for k in here]) if here else []
        stand_ins = [_stand_in(infos[k], args[k], aval) for k, aval in zip(away, stored, strict=True)]
        by_number = dict(zip([*away, *here], [*stand_ins, *arrays], strict=True))
        return [by_number[k] for k in range(len(infos))]

    def finalize(self, directory: Any) -> None:
        """Orbax merges the stores of all processes by itself."""
        self._registered.finalize(directory)


def _collected(values: Sequence[Array]) -> list[Array]:
    """The values; one held as slices is whole in the host memory of one process, the next for each. All processes call this."""
    collected, keepers = [], itertools.cycle(range(jax.process_count()))
    for value in values:
        collected.append(value)
        if (node := slices_of(value)) is not None:
            keeper = next(keepers)
            parts = [_brought(part, {keeper}) for part in node.parts]
            if jax.process_index() == keeper:
                home = SingleDeviceSharding(jax.local_devices()[0], memory_kind=HOST_MEMORY)
                collected[-1] = put(np.concatenate([np.asarray(part) for part in parts], node.axis), home)
    return collected


def _stand_in(info: Any, arg: Any, stored: Any) -> Array:
    """An array that other processes read; its stored shape is checked here too, so that all of them find the mistake."""
    shape = tuple(arg.global_shape or stored.shape)
    if arg.strict and shape != tuple(stored.shape):
        rule = "a leaf is restored to the shape that was saved"
        got = f"Requested shape: {shape} is not compatible with the stored shape: {tuple(stored.shape)}"
        raise StateError(f"checkpoint[{info.name!r}]", rule, got, "restore with the model that was saved")
    return elsewhere(jax.ShapeDtypeStruct(shape, arg.dtype or stored.dtype), arg.sharding)


def _seen_by_all(value: Array) -> Array:
    """The same array as Orbax takes it: other processes seem to have a copy, which it does not write, so nobody makes it."""
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
