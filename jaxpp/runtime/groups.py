"""Replicas that run different tasks: each gradient of theta[t] is the mean over the replicas that used it.

The host knows which replica runs which task before it dispatches anything, so nothing is discovered and nothing is sent that nobody
needs: a group of replicas with one task reduces by itself, on a mesh of its own devices, and a replica alone not at all.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.runtime.submesh import DATA, MODEL, Submesh

__all__ = ["Groups", "shards_of"]


class Groups:
    """Which replicas run the same task; the means over them.

    Attributes:
        current: the replicas of each task of this step.
    """

    def __init__(self) -> None:
        self.current: tuple[tuple[int, ...], ...] = ()
        self._compiled: dict[Any, Any] = {}

    def set(self, tasks: Sequence[Hashable]) -> None:
        """Say which task each replica runs in the steps to come."""
        found: dict[Hashable, list[int]] = {}
        for replica, task in enumerate(tasks):
            found.setdefault(task, []).append(replica)
        self.current = tuple(map(tuple, found.values()))

    def mean(self, place: Submesh, specs: Sequence[PartitionSpec], num_weights: int) -> Callable[..., list[Any]]:
        """An instruction: sums of weighted gradients, each replica's own, to the means over the replicas of its group.

        Args:
            place: of the stage.
            specs: how each gradient is sharded over ``model``.
            num_weights: how many weights of microbatches follow the gradients; 0 where all replicas weigh the same.
        """
        count = len(specs)
        all_specs = [*specs, *[PartitionSpec()] * num_weights]

        def reduce(*values: Any) -> list[Any]:
            parts = [shards_of(value) for value in values]
            found: list[dict[Any, Any]] = [{} for _ in specs]
            for group in self.current:
                mesh = Mesh(place.mesh.devices[list(group)], (DATA, MODEL))
                homes = [NamedSharding(mesh, PartitionSpec(DATA, *spec)) for spec in all_specs]
                shapes = [(len(group), *value.shape[1:]) for value in values]
                mine = [
                    jax.make_array_from_single_device_arrays(shape, home, [part[device] for device in mesh.devices.flat])
                    for shape, home, part in zip(shapes, homes, parts, strict=True)
                ]
                run = self._program(mine, homes[:count], place.num_replicas)
                for shards, result in zip(found, run(*mine), strict=True):
                    shards.update(shards_of(result))
            pairs = zip(found, values, strict=False)
            order = tuple(place.mesh.devices.flat)
            return [
                jax.make_array_from_single_device_arrays(value.shape, value.sharding, [shards[device] for device in order])
                for shards, value in pairs
            ]

        return reduce

    def _program(self, values: Sequence[Any], homes: Sequence[NamedSharding], num_replicas: int) -> Any:
        key = tuple((value.shape, value.dtype, value.sharding) for value in values)
        if key not in self._compiled:
            count = len(homes)

            def mean(*args: Any) -> list[Any]:
                share = sum(_total(weight) for weight in args[count:]) if args[count:] else args[0].shape[0] / num_replicas
                return [jnp.broadcast_to(_total(g) / jnp.asarray(share, g.dtype), g.shape) for g in args[:count]]

            avals = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding) for value in values]
            self._compiled[key] = jax.jit(mean, out_shardings=list(homes)).lower(*avals).compile()
        return self._compiled[key]

    def compiled(self) -> list[tuple[str, Any]]:
        """The programs there are, each with a name."""
        return [(f"mean over {key[0][0][0]} replicas", program) for key, program in self._compiled.items()]


def _total(value: Any) -> Any:
    return jax.lax.reduce(value, jnp.zeros((), value.dtype), jax.lax.add, (0,))


def shards_of(array: Any) -> dict[Any, Any]:
    """The part of an array on each device, sharing its buffers."""
    return {shard.device: shard.data for shard in array.addressable_shards}
