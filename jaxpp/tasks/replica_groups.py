"""Replicas that run different tasks: each gradient of theta[t] is the mean over the replicas that used it.

The host knows which replica runs which task before it dispatches anything, so nothing is discovered and nothing is sent that nobody
needs: a group of replicas with one task reduces by itself, on a mesh of its own devices, and a replica alone not at all.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.runtime.place import DATA, MODEL, Submesh
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.types import Device

__all__ = ["Groups", "Mean", "shards_of"]


class Groups:
    """Which replicas run the same task; the means over them.

    Attributes:
        current: the replicas of each task of the step that is about to run; it runs before another is told of.
        compiled: the programs of the groups met so far, for all batch shapes.
    """

    def __init__(self) -> None:
        self.current: tuple[tuple[int, ...], ...] = ()
        self.compiled: dict[Any, Any] = {}

    def set(self, tasks: Sequence[Hashable]) -> None:
        """Say which task each replica runs in the steps to come."""
        found: dict[Hashable, list[int]] = {}
        for replica, task in enumerate(tasks):
            found.setdefault(task, []).append(replica)
        self.current = tuple(map(tuple, found.values()))

    def mean(self, place: Submesh, avals: Sequence[Any], specs: Sequence[PartitionSpec], num_weights: int) -> "Mean":
        """An instruction: sums of weighted gradients, each replica's own, to the means over the replicas of its group.

        Args:
            place: of the stage.
            avals: shape and dtype of each gradient.
            specs: how each is sharded over ``model``.
            num_weights: how many weights of microbatches follow the gradients; 0 where all replicas weigh the same.
        """
        return Mean(self, place, tuple(avals), tuple(specs), num_weights)


@dataclass(frozen=True)
class Mean:
    """Runs one program a group, compiled when it is first needed."""

    groups: Groups
    place: Submesh
    avals: tuple[Any, ...]
    specs: tuple[PartitionSpec, ...]
    num_weights: int
    _known: dict[tuple[int, ...], "_Known"] = field(default_factory=dict)

    def __call__(self, *values: Any) -> list[Any]:
        """The means, each replica with its group's."""
        parts = [shards_of(value) for value in values]
        found: list[dict[Any, Any]] = [{} for _ in self.specs]
        for group in self.groups.current:
            program, homes, devices = self._of(group)
            mine = [
                jax.make_array_from_single_device_arrays((len(group), *value.shape[1:]), home, [part[device] for device in devices])
                for value, home, part in zip(values, homes, parts, strict=True)
            ]
            for shards, result in zip(found, program(*mine), strict=True):
                shards.update(shards_of(result))
        order = tuple(self.place.mesh.devices.flat)
        return [
            jax.make_array_from_single_device_arrays(value.shape, value.sharding, [shards[device] for device in order])
            for shards, value in zip(found, values, strict=False)
        ]

    def program(self, group: tuple[int, ...]) -> Any:
        """The compiled program of a group of replicas; of one alone it communicates nothing."""
        return self._of(group).program

    def _of(self, group: tuple[int, ...]) -> "_Known":
        """What is known of a group, found out when it is first met."""
        if group not in self._known:
            mesh = Mesh(self.place.mesh.devices[list(group)], (DATA, MODEL))
            specs = (*self.specs, *[()] * self.num_weights)
            homes = [NamedSharding(mesh, PartitionSpec(DATA, *spec)) for spec in specs]
            self._known[group] = _Known(self._compiled(group, mesh, homes), homes, tuple(mesh.devices.flat))
        return self._known[group]

    def _compiled(self, group: tuple[int, ...], mesh: Mesh, homes: list[NamedSharding]) -> Any:
        key = mesh, tuple((aval.shape, aval.dtype) for aval in self.avals), self.specs, self.num_weights
        if key not in self.groups.compiled:
            count, share = len(self.specs), len(group) / self.place.num_replicas

            def mean(*args: Any) -> list[Any]:
                whole = sum(_total(weight) for weight in args[count:]) if args[count:] else share
                return [jnp.broadcast_to(_mean(_total(g), jnp.asarray(whole, g.dtype)), g.shape) for g in args[:count]]

            shapes = [*self.avals, *[jax.ShapeDtypeStruct((), scale_dtype())] * self.num_weights]
            avals = [
                jax.ShapeDtypeStruct((len(group), *aval.shape), aval.dtype, sharding=home)
                for aval, home in zip(shapes, homes, strict=True)
            ]
            self.groups.compiled[key] = jax.jit(mean, out_shardings=homes[:count]).lower(*avals).compile()
        return self.groups.compiled[key]


class _Known(NamedTuple):
    """A group's program, how its arguments are sharded, and its devices."""

    program: Any
    homes: list[NamedSharding]
    devices: tuple[Device, ...]


def _mean(total: Any, weight: Any) -> Any:
    """The mean, zero where nothing had any weight."""
    return jnp.where(weight == 0, jnp.zeros_like(total), total / jnp.where(weight == 0, 1, weight))


def _total(value: Any) -> Any:
    return jax.lax.reduce(value, jnp.zeros((), value.dtype), jax.lax.add, (0,))


def shards_of(array: Any) -> dict[Any, Any]:
    """The part of an array on each device, sharing its buffers."""
    return {shard.device: shard.data for shard in array.addressable_shards}
