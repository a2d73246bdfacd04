"""Where the leaves of sets live in a run of several processes: each of them holds only what its own stages use."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp.runtime.processes.here import elsewhere, is_here, processes_of
from jaxpp.runtime.transfer import HOST_MEMORY
from jaxpp.types import Array, Aval, Leaf

__all__ = ["SetHomes"]


@dataclass(frozen=True)
class SetHomes:
    """Where sets of one layout live.

    Attributes:
        shardings: of each leaf, over the devices of its stage; a leaf is the same on all replicas.
    """

    shardings: tuple[Sharding, ...]

    @cached_property
    def here(self) -> tuple[int, ...]:
        """The numbers of the leaves that this process holds."""
        return tuple(k for k, sharding in enumerate(self.shardings) if is_here(sharding))

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The processes that hold each leaf."""
        return tuple(processes_of(sharding.device_set) for sharding in self.shardings)

    def of(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves that this process holds, of all."""
        return [leaves[k] for k in self.here]

    def all(self, held: Sequence[Leaf], shapes: Sequence[Aval]) -> list[Array]:
        """All leaves, as arrays beside the devices of their stages: those held here, and stand-ins for the others."""
        found = dict(zip(self.here, held, strict=True))
        return [
            _beside(found[k], sharding) if k in found else elsewhere(aval, sharding.with_memory_kind(HOST_MEMORY))
            for k, (aval, sharding) in enumerate(zip(shapes, self.shardings, strict=True))
        ]


def _beside(leaf: Leaf, sharding: Sharding) -> Array:
    """A leaf in the host memory of this process, as an array of all processes that hold it."""
    value, found = np.asarray(leaf), []
    for device, index in sharding.addressable_devices_indices_map(value.shape).items():
        part = value if index is None else value[index]
        found.append(jax.device_put(part, SingleDeviceSharding(device, memory_kind=HOST_MEMORY)))
    return jax.make_array_from_single_device_arrays(value.shape, sharding.with_memory_kind(HOST_MEMORY), found)
