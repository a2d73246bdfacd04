"""An engine settled for sets of one shape: which leaves of a state are theta[t]'s, and how each replica's get to their stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp.errors import CutError
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.place import DATA
from jaxpp.tasks.replica_groups import shards_of
from jaxpp.tasks.set_layout import Layout

__all__ = ["Fitted"]


@dataclass
class Fitted:
    """An engine settled for sets of one shape.

    Attributes:
        engine: settled.
        counts: of the leaves of a state: shared parameters, the set's, shared optimizer leaves, the set's.
        homes: for each replica the sharding of each leaf of a set.
    """

    engine: Engine
    counts: tuple[int, int, int, int]
    homes: tuple[tuple[Any, ...], ...]
    _reshaped: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine, layout: Layout) -> "Fitted":
        """What is to be known of an engine settled for a set.

        Raises:
            CutError: it cuts a loop over stacked parameters of theta[t].
        """
        assert engine.update is not None and engine.preparer.layout is not None
        params = engine.preparer.layout.params
        if len(jax.tree.leaves(params.task)) != layout.params.num_leaves:
            raise CutError(
                "theta[t]",
                "a loop over the layers of a task's own parameters is not cut",
                "a boundary inside such a loop",
                "pass cuts=[...] outside of it, or fewer stages",
            )
        shared = len(jax.tree.leaves(params.shared))
        own_opts = layout.opt_state.num_leaves
        counts = shared, layout.params.num_leaves, len(engine.opts) - own_opts, own_opts
        names = cls(engine, counts, ()).split([*engine.params, *engine.opts])[1]
        replicas = range(engine.placement.num_replicas)
        rows = (tuple(engine.placement[name.stage].replica(r).sharding(name.ref) for name in names) for r in replicas)
        return cls(engine, counts, tuple(rows))

    def join(self, leaves: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The leaves of a state, those of a set among them."""
        a, b, c, _ = self.counts
        return [*leaves[:a], *own[:b], *leaves[a : a + c], *own[b:], *leaves[a + c :]]

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves of a state, and apart from them those of a set."""
        a, b, c, d = self.counts
        own = [*leaves[a : a + b], *leaves[a + b + c : a + b + c + d]]
        return [*leaves[:a], *leaves[a + b : a + b + c], *leaves[a + b + c + d :]], own

    def of_replicas(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """The sets that the replicas run as arrays with the replicas as their first axis, sharing their buffers."""
        if len(rows) == 1:
            return list(rows[0])
        led = [self._reshape(r, row, lead=True) for r, row in enumerate(rows)]
        found = []
        names = self.split([*self.engine.params, *self.engine.opts])[1]
        for k, name in enumerate(names):
            shards = [shard for row in led for shard in _in_order(row[k])]
            shape, home = (len(rows), *rows[0][k].shape), self.engine.placement[name.stage].sharding(name.ref)
            found.append(jax.make_array_from_single_device_arrays(shape, home, shards))
        return found

    def of_rows(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """For each replica the leaves of its set."""
        if len(self.homes) == 1:
            return [list(leaves)]
        parts = [shards_of(leaf) for leaf in leaves]  # all of them before any is given up
        rows = []
        for homes in self.homes:
            row = []
            for leaf, shards, home in zip(leaves, parts, homes, strict=True):
                led = NamedSharding(home.mesh, PartitionSpec(DATA, *home.spec))
                mine = [shards[device] for device in home.mesh.devices.flat]
                row.append(jax.make_array_from_single_device_arrays((1, *leaf.shape[1:]), led, mine))
            rows.append(row)
        return [self._reshape(r, row, lead=False) for r, row in enumerate(rows)]

    def _reshape(self, replica: int, row: Sequence[Any], *, lead: bool) -> Sequence[Any]:
        """A set with an axis of one replica before the others, or without; it gives up its buffers to the result.

        One program a device, as leaves of a set may live on several stages.
        """
        by_mesh: dict[Any, list[int]] = {}
        for k, home in enumerate(self.homes[replica]):
            by_mesh.setdefault(home.mesh, []).append(k)
        made: list[Any] = [None] * len(row)
        for mesh, mine in by_mesh.items():
            key = mesh, lead
            if key not in self._reshaped:
                specs = [self.homes[replica][k].spec for k in mine]
                outs = [NamedSharding(mesh, PartitionSpec(DATA, *spec) if lead else spec) for spec in specs]
                run = (lambda *xs: [x[None] for x in xs]) if lead else (lambda *xs: [x[0] for x in xs])
                self._reshaped[key] = jax.jit(run, out_shardings=outs, donate_argnums=tuple(range(len(mine))))
            for k, value in zip(mine, self._reshaped[key](*(row[k] for k in mine)), strict=True):
                made[k] = value
        return made


def _in_order(array: Any) -> list[Any]:
    shards = shards_of(array)
    return [shards[device] for device in array.sharding.mesh.devices.flat]
