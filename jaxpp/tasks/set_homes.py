"""Where the leaves of sets live in a run of several processes: each of them holds only what its own stages use."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.sharding import Sharding

from jaxpp.runtime.processes.here import elsewhere, is_here, processes_of, spread
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
            spread(np.asarray(found[k]), sharding, HOST_MEMORY)
            if k in found
            else elsewhere(aval, sharding.with_memory_kind(HOST_MEMORY))
            for k, (aval, sharding) in enumerate(zip(shapes, self.shardings, strict=True))
        ]
