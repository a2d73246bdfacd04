"""Parameters of which each replica has its own: their gradient is the mean, or sum, over the replicas that have the same.

The host knows beforehand which these are: a group reduces on a mesh of its own devices, and a replica alone not at all.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled

from jaxpp.runtime.interrupts import held
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.types import Array, Aval, Device


class ReplicaGroups:
    """Which replicas have the same parameters of their own, in the step that is about to run; the means over them."""

    def __init__(self) -> None:
        self.names: tuple[Hashable, ...] = ()
        self.current: tuple[tuple[int, ...], ...] = ()
        self.compiled: dict[Hashable, Compiled] = {}  # the programs of the groups met so far, for all batch shapes

    def set(self, names: Sequence[Hashable]) -> None:
        """Say what the parameters of each replica are called in the steps to come; equal names mean equal parameters."""
        groups: dict[Hashable, list[int]] = {}
        for replica, name in enumerate(names):
            groups.setdefault(name, []).append(replica)
        self.names, self.current = tuple(names), tuple(map(tuple, groups.values()))

    @contextmanager
    def of(self, names: Sequence[Hashable]) -> Iterator[None]:
        """A block that runs a part of a step in which they were called so."""
        now = self.names
        self.set(names)
        try:
            yield
        finally:
            self.set(now)


@dataclass(frozen=True)
class Mean:
    """An instruction: sums of weighted gradients, each replica's own, to the means over the replicas of its group."""

    groups: ReplicaGroups
    homes: tuple[NamedSharding, ...]  # of the gradients, and of the microbatches' weights, if replicas weigh differently
    avals: tuple[Aval, ...]  # of the gradients, as one replica has them
    summed: bool = False  # whether they are added up instead
    donated: tuple[int, ...] = ()  # the sums whose buffers the means take over
    _groups: dict[tuple[int, ...], tuple[Compiled, list[NamedSharding], tuple[Device, ...]]] = field(default_factory=dict)

    def __call__(self, *values: Array) -> list[Array]:
        """The means, each replica with its group's."""
        parts = [shards_of(value) for value in values]
        means: list[dict[Device, Array]] = [{} for _ in self.avals]
        for group in self.groups.current:
            if not any(device in parts[0] for device in self._devices[list(group)].flat):
                continue  # all its devices are of other processes
            program, homes, devices = self._of(group)
            mine = []
            for value, home, part in zip(values, homes, parts, strict=True):
                own, shape = [part[device] for device in devices if device in part], (len(group), *value.shape[1:])
                mine.append(jax.make_array_from_single_device_arrays(shape, home, own))
            for shards, result in zip(means, program(*mine), strict=True):
                shards.update(shards_of(result))
        order = tuple(self._devices.flat)
        results = []
        for shards, value in zip(means, values, strict=False):
            own = [shards[device] for device in order if device in shards]
            results.append(jax.make_array_from_single_device_arrays(value.shape, value.sharding, own))
        return results

    @property
    def _devices(self) -> np.ndarray:
        return np.asarray(self.homes[0].mesh.devices)

    @property
    def programs(self) -> list[tuple[str, int, Compiled]]:
        """What each group of replicas is called, how many they are, and their program; that of one alone communicates nothing."""
        return [(f"replicas {' '.join(map(str, group))}", len(group), self._of(group)[0]) for group in self.groups.current]

    def _of(self, group: tuple[int, ...]) -> tuple[Compiled, list[NamedSharding], tuple[Device, ...]]:
        if group not in self._groups:
            mesh = Mesh(self._devices[list(group)], self.homes[0].mesh.axis_names)
            homes = [NamedSharding(mesh, home.spec) for home in self.homes]
            self._groups[group] = self._compiled(group, homes), homes, tuple(mesh.devices.flat)
        return self._groups[group]

    def _compiled(self, group: tuple[int, ...], homes: list[NamedSharding]) -> Compiled:
        key = self.summed, self.donated, tuple((aval.shape, aval.dtype) for aval in self.avals), *homes
        if key not in self.groups.compiled:
            count, share = len(self.avals), 1.0 if self.summed else len(group) / len(self._devices)

            def mean(*args: Array) -> list[Array]:
                whole = sum(_total(weight) for weight in args[count:]) if args[count:] else share
                return [jnp.broadcast_to(_mean(_total(g), jnp.asarray(whole, g.dtype)), g.shape) for g in args[:count]]

            shapes = [*self.avals, *[jax.ShapeDtypeStruct((), scale_dtype())] * (len(homes) - count)]
            pairs = zip(shapes, homes, strict=True)
            avals = [jax.ShapeDtypeStruct((len(group), *aval.shape), aval.dtype, sharding=home) for aval, home in pairs]
            run = jax.jit(mean, out_shardings=homes[:count], donate_argnums=self.donated)
            with held():  # a small program, and a step after Ctrl-C finds it compiled
                self.groups.compiled[key] = run.lower(*avals).compile()
        return self.groups.compiled[key]


def _mean(total: Array, weight: Array) -> Array:
    """The mean, zero where nothing had any weight."""
    return jnp.where(weight == 0, jnp.zeros_like(total), total / jnp.where(weight == 0, 1, weight))


def _total(value: Array) -> Array:
    return jax.lax.reduce(value, jnp.zeros((), value.dtype), jax.lax.add, (0,))


def shards_of(array: Array) -> dict[Device, Array]:
    """The part of an array on each device, sharing its buffers."""
    return {shard.device: shard.data for shard in array.addressable_shards}
