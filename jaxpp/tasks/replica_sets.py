"""The sets of a step's replicas as the engine takes them, each leaf one array with the replicas as its first axis; and back.

In several processes each has the leaves of its own stages (``SetHomes``), of the replicas that run on its devices. If replicas of a
stage live in several processes, each of these holds the leaves: what a step has changed in one of them is sent to the others.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpp.engine.engine import Engine
from jaxpp.errors import BankError, CutError
from jaxpp.runtime.place import DATA
from jaxpp.runtime.processes.here import devices_in, elsewhere, is_here, is_whole_here
from jaxpp.runtime.replica_groups import shards_of
from jaxpp.runtime.send import Send
from jaxpp.tasks.set_homes import SetHomes
from jaxpp.tasks.set_layout import SetLayout
from jaxpp.types import Array, Device, Home

__all__ = ["ReplicaSets"]

_Row = Sequence[Array]
"""The leaves of one replica's set that this process holds."""


class ReplicaSets:
    """Brings sets of one layout into the form that the engine for this layout takes, and out of it.

    Attributes:
        engine: as given.
        whole: where the leaves of a set live.
        rows: the replicas that run on devices of this process.
        homes: for each replica the sharding of each leaf of its set that this process holds.

    Raises:
        CutError: a loop over the layers of a set would be cut.
        BankError: the devices of one replica of a stage belong to several processes, or not all stages have the same replicas here.
    """

    def __init__(self, engine: Engine, layout: SetLayout):
        if engine.layout.num_own != layout.params.num_leaves:
            rule, got = "a loop over the layers of a task's own parameters is not cut", "a boundary inside such a loop"
            raise CutError("theta[t]", rule, got, "pass cuts=[...] outside of it, or fewer stages")
        self.engine = engine
        names, placement = engine.placed.names.own, engine.placement
        replicas = range(placement.num_replicas)
        self._all = tuple(tuple(placement[name.stage].replica(r).sharding(name.ref) for name in names) for r in replicas)
        self.whole = SetHomes(tuple(map(_over_replicas, self._all[0], (placement[name.stage].devices for name in names))))
        self.rows = tuple(r for r in replicas if any(map(is_here, self._all[r])))
        self.homes = tuple(tuple(homes[k] for k in self.whole.here) for homes in self._all)
        self._check_rows()
        own = zip(names, engine.placed.shapes.own, strict=True)
        self._avals = [placement[name.stage].aval(name.ref, aval) for name, aval in own]
        self._away = {k: elsewhere(aval, aval.sharding) for k, aval in enumerate(self._avals) if k not in self.whole.here}
        self._spread = [k for k, processes in enumerate(self.whole.processes) if len(processes) > 1]
        self._sharded = cast("tuple[tuple[NamedSharding, ...], ...]", self.homes)  # for several replicas, which have sub-meshes
        self._reshaped: dict[Hashable, jax.stages.Wrapped] = {}
        self._crossers: dict[Hashable, Callable[..., Sequence[Array]]] = {}

    def of_replicas(self, rows: Sequence[_Row]) -> list[Array]:
        """The sets that the replicas here run as arrays with the replicas as their first axis, sharing their buffers.

        For the leaves that live in other processes there are stand-ins.
        """
        if len(self.homes) == 1:
            mine = [array for row in rows for array in row]
        else:
            led, mine = [self._reshape(r, row, lead=True) for r, row in zip(self.rows, rows, strict=True)], []
            for at, k in enumerate(self.whole.here):
                shards = [shard for row in led for shard in _in_order(row[at])]
                mine.append(jax.make_array_from_single_device_arrays(self._avals[k].shape, self._avals[k].sharding, shards))
        found = self._away | dict(zip(self.whole.here, mine, strict=True))
        return [found[k] for k in range(len(self._avals))]

    def of_rows(self, leaves: Sequence[Array]) -> dict[int, _Row]:
        """The leaves of the set of each replica here."""
        mine = [leaves[k] for k in self.whole.here]
        if len(self.homes) == 1:
            return dict.fromkeys(self.rows, mine)
        parts = [shards_of(leaf) for leaf in mine]  # all of them before any is given up
        rows = {}
        for r in self.rows:
            row = []
            for leaf, shards, home in zip(mine, parts, self._sharded[r], strict=True):
                led = NamedSharding(home.mesh, PartitionSpec(DATA, *home.spec))
                own = [shards[device] for device in _mesh(home).devices.flat]
                row.append(jax.make_array_from_single_device_arrays((1, *leaf.shape[1:]), led, own))
            rows[r] = row
        return {r: self._reshape(r, row, lead=False) for r, row in rows.items()}

    def exchanged(self, names: Sequence[Hashable], rows: Mapping[int, _Row]) -> dict[Hashable, _Row]:
        """The set of each task as this process writes it back: of the first replica here that ran the task, or sent by another.

        Args:
            names: of the set that each replica ran.
            rows: of the replicas here, the leaves of their sets.
        """
        found: dict[Hashable, _Row] = {}
        for name in dict.fromkeys(names):
            ran = [r for r, other in enumerate(names) if other == name]
            mine = next((rows[r] for r in ran if r in rows), ())
            came = [array for leaf in self._spread for array in self._sent(leaf, ran, mine)]
            found[name] = mine or came
        return found

    def _sent(self, leaf: int, ran: Sequence[int], row: _Row) -> Sequence[Array]:
        """A leaf, sent to the processes that hold it and did not run its task; it is returned where it comes to."""
        homes, me, came = [home[leaf] for home in self._all], jax.process_index(), ()
        source = homes[ran[0]]
        have, first = {_process(homes[r]) for r in ran}, {_process(home): home for home in reversed(homes)}
        for process in sorted(first.keys() - have):
            key = leaf, source, first[process]
            if key not in self._crossers:
                aval = self.engine.placed.shapes.own[leaf]
                self._crossers[key] = Send(first[process], source, aval, taken=True).bind()
            given = [row[self.whole.here.index(leaf)]] if _process(source) == me else []
            came = self._crossers[key](*given) or came
        return came

    def _check_rows(self) -> None:
        """Refuse a mesh in which a process would hold parts of a replica's stage, or replicas of one stage and not of another."""
        held = [home for r in self.rows for home in self.homes[r]]
        if not all(map(is_whole_here, held)):
            got = f"of process {jax.process_index()}: {len(self.rows)} replicas, and {len(self.whole.here)} leaves of a set"
            rule = "each stage of a replica is in one process, and a process has the same replicas of all its stages"
            raise BankError("Pipeline(bank=...)", rule, got, "put the axis model of the mesh inside the hosts")

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


def _over_replicas(home: Sharding, devices: Sequence[Device]) -> Sharding:
    """The sharding of a leaf that all replicas have, of that of one replica."""
    if not isinstance(home, NamedSharding) or len(home.device_set) == len(devices):
        return home
    return NamedSharding(Mesh(np.array(devices).reshape(-1, len(home.device_set)), home.mesh.axis_names), home.spec)


def _process(home: Home) -> int:
    """The process of a home in one process."""
    return next(iter(devices_in(home))).process_index


def _mesh(home: Home) -> Mesh:
    return cast("NamedSharding", home).mesh  # pyright: ignore[reportReturnType]


def _in_order(array: Array) -> list[Array]:
    shards: dict[Device, Array] = shards_of(array)
    return [shards[device] for device in _mesh(array.sharding).devices.flat]
