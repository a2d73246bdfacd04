"""A tree whose leaves live in several processes, brought to all of them.

Every process takes part: each leaf goes from the process that holds it to the first device of every other one, leaf by leaf, so
that what is on its way is never more than one leaf. Among ``n`` processes, a leaf is sent ``n - 1`` times, and all of them then
hold the whole tree: this is for trees that fit on one device.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import ArgumentError
from jaxpp.runtime.agreement.meeting import agreement, transfers
from jaxpp.runtime.processes.crossing import crosser
from jaxpp.runtime.processes.exchange import first_devices, rows_of_all
from jaxpp.runtime.processes.trees.sliced import slices_of
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.stacked import joined
from jaxpp.types import Array, Aval, Device, Home, Leaf, Tree

__all__ = ["brought", "gather_across"]

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
        ArgumentError: the device is another process's, or a leaf is neither whole in one process or all, nor a global array.
        ProcessError: the processes passed different trees, or one of them failed or does not come.
    """
    targets = first_devices()
    me = jax.process_index()
    goal: Any = targets[me] if device is None else device
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    with agreement("jaxpp.gather", jax.devices()) as agree:
        if goal.process_index != me:
            got = f"{goal} of process {goal.process_index}, in process {me}"
            raise ArgumentError(
                "jaxpp.gather(tree, device)", "each process gathers to a device of its own", got, "leave device out"
            )
        agree(lambda: {"tree": "\n".join(f"{jax.tree_util.keystr(path)} {_described(leaf)}" for path, leaf in paths)})
    nodes = [slices_of(leaf) or leaf for _, leaf in paths]
    leaves = [(path, leaf) for (path, _), node in zip(paths, nodes, strict=True) for leaf in jax.tree.leaves(node)]
    held, found = _held(leaves), []
    with transfers("jaxpp.gather"):
        for (_, leaf), everywhere in zip(leaves, held, strict=True):
            whole = leaf if everywhere else brought(leaf, targets.keys(), put)
            found.append(jax.block_until_ready(put(whole, goal)))
    filled = jax.tree.structure(nodes).unflatten(found)
    return structure.unflatten(joined(filled, lambda node: jnp.concatenate(node.parts)))


def brought(leaf: Array, readers: Collection[int], put: _Put) -> Leaf:
    """A leaf of some processes in those that read it; every process calls this.

    Args:
        leaf: which lives in one process, or is a global array.
        readers: the processes that get it.
        put: makes a fresh copy of a value on a device of this process.

    Returns:
        an array on the first device of this process, or, if the leaf comes in parts, one put together on the host; None if this
        process does not read it.
    """
    places: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    for device in sorted(indices, key=lambda device: device.id):
        box = tuple(one.indices(size)[:2] for one, size in zip(indices[device], leaf.shape, strict=True))
        places.setdefault(box, []).append(device)
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    aval = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
    parts = {box: _brought(aval, devices, here, readers, put) for box, devices in places.items()}
    if jax.process_index() not in readers:
        return None
    if len(parts) == 1:
        return next(iter(parts.values()))
    whole = np.empty(leaf.shape, leaf.dtype)
    for box, part in parts.items():
        whole[tuple(slice(begin, end) for begin, end in box)] = np.asarray(part)
    return whole


def _brought(
    aval: Aval, devices: Sequence[Device], here: Mapping[Device, Array], readers: Collection[int], put: _Put
) -> Array | None:
    """A part that some devices hold: sent by the first of their processes to every reader that has none."""
    targets, me, first = first_devices(), jax.process_index(), devices[0].process_index
    holders = {device.process_index for device in devices}
    part = None
    if me in holders and (me == first or me in readers):
        part = put(next(here[device] for device in devices if device in here), targets[me])
    for process in sorted(set(readers) - holders):
        came = crosser(aval, targets[first], targets[process])(*([part] if me == first else []))
        if me == process:
            (part,) = came
    return part


def _described(leaf: Leaf) -> str:
    return describe(leaf) if hasattr(leaf, "dtype") else type(leaf).__name__


def _held(paths: Sequence[tuple[jax.tree_util.KeyPath, Leaf]]) -> list[bool]:
    """Whether all processes have each leaf already, and need not ask the others."""
    if not paths:
        return []
    amounts = rows_of_all(np.array([_amount(leaf) for _, leaf in paths], np.int8))
    wrong = []
    for (path, leaf), column in zip(paths, amounts.T, strict=True):
        whole = np.flatnonzero(column == _WHOLE)
        if (0 < len(whole) < len(column) and (len(whole) > 1 or (column == _PART).any())) or not column.any():
            where = jax.tree_util.keystr(path) or "the leaf"
            wrong.append(f"{where}, {_described(leaf)}: whole in {len(whole)} of {len(column)} processes")
    if wrong:
        rule, fix = (
            "a leaf is whole in one process, or in all, or one global array",
            "gather it with the leaves of a state, or leave it out",
        )
        raise ArgumentError("jaxpp.gather(tree)", rule, wrong, fix)
    return [bool((column == _WHOLE).all()) for column in amounts.T]


def _amount(leaf: Leaf) -> int:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _WHOLE
    return _PART if leaf.addressable_shards else _AWAY
