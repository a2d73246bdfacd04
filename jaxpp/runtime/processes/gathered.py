"""A tree whose leaves live in several processes, brought to all of them.

Every process takes part: each leaf goes from the process that holds it to the first device of every other one, leaf by leaf, so
that what is on its way is never more than one leaf. Among ``n`` processes, a leaf is sent ``n - 1`` times, and all of them then
hold the whole tree: this is for trees that fit on one device.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp.errors import ArgumentError
from jaxpp.runtime.processes.crossing import crosser
from jaxpp.runtime.processes.told import first_devices, from_all
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Array, Device, Home, Leaf, Tree

__all__ = ["gather_across"]

_Put = Callable[[Leaf, Home], Array]

_AWAY, _PART, _WHOLE = range(3)
"""How much of a leaf a process holds."""


def gather_across(tree: Tree, device: Device | None, put: _Put) -> Tree:
    """The tree with every leaf a copy on a device of this process; every process calls it, with the same tree.

    Args:
        tree: arrays that live in one process or several, and values that every process has.
        device: where to; None for the first of this process.
        put: makes a fresh copy of a value on a device of this process.

    Raises:
        ArgumentError: the device is another process's, or the processes passed different trees.
    """
    targets = first_devices()
    mine = targets[jax.process_index()]
    goal: Any = mine if device is None else device
    if goal.process_index != jax.process_index():
        got = f"{goal} of process {goal.process_index}, in process {jax.process_index()}"
        raise ArgumentError("jaxpp.gather(tree, device)", "each process gathers to a device of its own", got, "leave device out")
    leaves, structure = jax.tree.flatten(tree)
    held = _held(leaves, jax.tree_util.tree_leaves_with_path(tree), targets, put)
    found = []
    for leaf, everywhere in zip(leaves, held, strict=True):
        whole = leaf if everywhere else _whole(leaf, targets, put)
        found.append(jax.block_until_ready(put(whole, goal)))
    return structure.unflatten(found)


def _held(
    leaves: Sequence[Leaf], paths: Sequence[tuple[jax.tree_util.KeyPath, Leaf]], targets: Mapping[int, Device], put: _Put
) -> list[bool]:
    """Whether all processes have each leaf already, and need not ask the others."""
    text = "\n".join(f"{jax.tree_util.keystr(path)} {np.shape(leaf)} {jax.dtypes.result_type(leaf)}" for path, leaf in paths)
    digests = from_all(np.array([zlib.crc32(text.encode())], np.uint32))[:, 0]
    rule, fix = (
        "every process passes the same tree",
        "call it with the same tree, at the same place of the script, in all",
    )
    if len(set(digests.tolist())) > 1:
        odd = [str(k) for k, digest in enumerate(digests) if digest != digests[jax.process_index()]]
        got = f"another structure, or other shapes and types, in process {', '.join(odd)} than in process {jax.process_index()}"
        raise ArgumentError("jaxpp.gather(tree)", rule, got, fix)
    if not leaves:
        return []
    amounts = from_all(np.array([_amount(leaf) for leaf in leaves], np.int8))
    wrong = []
    for (path, leaf), column in zip(paths, amounts.T, strict=True):
        whole = np.flatnonzero(column == _WHOLE)
        if (0 < len(whole) < len(column) and (len(whole) > 1 or (column == _PART).any())) or not column.any():
            where = jax.tree_util.keystr(path) or "the leaf"
            wrong.append(f"{where}, {describe(leaf)}: whole in {len(whole)} of {len(column)} processes")
    if wrong:
        raise ArgumentError("jaxpp.gather(tree)", "a leaf is whole in one process, or in all, or one global array", wrong, fix)
    return [bool((column == _WHOLE).all()) for column in amounts.T]


def _amount(leaf: Leaf) -> int:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _WHOLE
    return _PART if leaf.addressable_shards else _AWAY


def _whole(leaf: Array, targets: Mapping[int, Device], put: _Put) -> Leaf:
    """A leaf of some processes on the first device of this one, or, if it comes in parts, put together on the host."""
    places: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    for device in sorted(indices, key=lambda device: device.id):
        box = tuple(one.indices(size)[:2] for one, size in zip(indices[device], leaf.shape, strict=True))
        places.setdefault(box, []).append(device)
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    parts = {box: _everywhere(leaf, devices, here, targets, put) for box, devices in places.items()}
    if len(parts) == 1:
        return next(iter(parts.values()))
    whole = np.empty(leaf.shape, leaf.dtype)
    for box, part in parts.items():
        whole[tuple(slice(begin, end) for begin, end in box)] = np.asarray(part)
    return whole


def _everywhere(
    leaf: Array, devices: Sequence[Device], here: Mapping[Device, Array], targets: Mapping[int, Device], put: _Put
) -> Array:
    """A part that some devices hold, on the first device of this process: from the first holder to every process without one."""
    me, first = jax.process_index(), devices[0].process_index
    mine = next((here[device] for device in devices if device in here), None)
    part = None if mine is None else put(mine, targets[me])
    aval = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    holders = {device.process_index for device in devices}
    for process in sorted(targets.keys() - holders):
        if me in (first, process):
            cross = crosser(aval, targets[first], targets[process])
            found = cross(part) if me == first else cross()
            part = part if me == first else found[0]
    assert part is not None
    return part
