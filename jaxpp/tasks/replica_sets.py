"""The sets of a step's replicas as the engine takes them, each leaf one array with the replicas as its first axis; and back."""

from collections.abc import Hashable, Sequence
from typing import cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.engine.engine import Engine
from jaxpp.errors import CutError
from jaxpp.runtime.place import DATA
from jaxpp.runtime.replica_groups import shards_of
from jaxpp.tasks.set_layout import SetLayout
from jaxpp.types import Array, Device, Home

__all__ = ["ReplicaSets"]

_Row = Sequence[Array]
"""The leaves of one replica's set."""


class ReplicaSets:
    """Brings sets of one layout into the form that the engine for this layout takes, and out of it.

    Attributes:
        engine: as given.
        homes: for each replica the sharding of each leaf of its set.
    """

    def __init__(self, engine: Engine, layout: SetLayout):
        if engine.layout.num_own != layout.params.num_leaves:
            rule, got = "a loop over the layers of a task's own parameters is not cut", "a boundary inside such a loop"
            raise CutError("theta[t]", rule, got, "pass cuts=[...] outside of it, or fewer stages")
        self.engine = engine
        names, placement = engine.placed.names.own, engine.placement
        replicas = range(placement.num_replicas)
        self.homes = tuple(tuple(placement[name.stage].replica(r).sharding(name.ref) for name in names) for r in replicas)
        self._sharded = cast("tuple[tuple[NamedSharding, ...], ...]", self.homes)  # for several replicas, which have sub-meshes
        self._reshaped: dict[Hashable, jax.stages.Wrapped] = {}

    def of_replicas(self, rows: Sequence[_Row]) -> list[Array]:
        """The sets that the replicas run as arrays with the replicas as their first axis, sharing their buffers."""
        if len(rows) == 1:
            return list(rows[0])
        led = [self._reshape(r, row, lead=True) for r, row in enumerate(rows)]
        found = []
        for k, name in enumerate(self.engine.placed.names.own):
            shards = [shard for row in led for shard in _in_order(row[k])]
            shape, home = (len(rows), *rows[0][k].shape), self.engine.placement[name.stage].sharding(name.ref)
            found.append(jax.make_array_from_single_device_arrays(shape, home, shards))
        return found

    def of_rows(self, leaves: Sequence[Array]) -> list[_Row]:
        """For each replica the leaves of its set."""
        if len(self.homes) == 1:
            return [list(leaves)]
        parts = [shards_of(leaf) for leaf in leaves]  # all of them before any is given up
        rows = []
        for homes in self._sharded:
            row = []
            for leaf, shards, home in zip(leaves, parts, homes, strict=True):
                led = NamedSharding(home.mesh, PartitionSpec(DATA, *home.spec))
                mine = [shards[device] for device in _mesh(home).devices.flat]
                row.append(jax.make_array_from_single_device_arrays((1, *leaf.shape[1:]), led, mine))
            rows.append(row)
        return [self._reshape(r, row, lead=False) for r, row in enumerate(rows)]

    def _reshape(self, replica: int, row: _Row, *, lead: bool) -> _Row:
        """A set with an axis of one replica before the others, or without; donated to one program for each stage of its leaves."""
        by_mesh: dict[Mesh, list[int]] = {}
        for k, home in enumerate(self._sharded[replica]):
            by_mesh.setdefault(_mesh(home), []).append(k)
        made: dict[int, Array] = {}
        for mesh, mine in by_mesh.items():
            key = mesh, lead
            if key not in self._reshaped:
                specs = [self._sharded[replica][k].spec for k in mine]
                outs = [NamedSharding(mesh, PartitionSpec(DATA, *spec) if lead else spec) for spec in specs]
                run = (lambda *xs: [x[None] for x in xs]) if lead else (lambda *xs: [x[0] for x in xs])
                self._reshaped[key] = jax.jit(run, out_shardings=outs, donate_argnums=tuple(range(len(mine))))
            made.update(zip(mine, self._reshaped[key](*(row[k] for k in mine)), strict=True))
        return [made[k] for k in range(len(row))]


def _mesh(home: Home) -> Mesh:
    return cast("NamedSharding", home).mesh  # pyright: ignore[reportReturnType]


def _in_order(array: Array) -> list[Array]:
    shards: dict[Device, Array] = shards_of(array)
    return [shards[device] for device in _mesh(array.sharding).devices.flat]
