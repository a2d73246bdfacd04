"""theta[t] inside a pipeline: the sets that a step uses are brought to the stages that read them, and written back after it.

A pipeline with a ``Bank`` trains Theta and one theta[t] a replica. Its state holds Theta alone; before a step the leaves of a set
are put among those of the state, each on the device of the stage that uses it, and afterwards they go back to the bank. Sets of
other shapes are cut at the same places and compiled once a shape.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.bank import Bank
from jaxpp.errors import ArgumentError, BankError, CutError
from jaxpp.layout import Layout
from jaxpp.runtime.draft import Name
from jaxpp.runtime.engine import Engine, Outcome
from jaxpp.runtime.groups import shards_of
from jaxpp.runtime.settings import Settings
from jaxpp.runtime.submesh import DATA, MODEL, Submesh
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.joint import Joint, join_losses
from jaxpp.stages.loss import describe
from jaxpp.types import LossFn

__all__ = ["Fit", "Tasks", "check_bank", "check_scaling"]


def check_bank(bank: Any) -> None:
    """Refuse what is no bank, or one without sets.

    Raises:
        BankError: as said.
    """
    if not isinstance(bank, Bank) or not len(bank):
        got = "a bank without sets" if isinstance(bank, Bank) else type(bank).__name__
        fix = "pass jaxpp.Bank({name: params, ...}, optimizer)"
        raise BankError("Pipeline(bank=...)", "a pipeline is cut at the shapes of a bank's first set", got, fix)


def check_scaling(options: Settings) -> None:
    """Refuse a scaled loss where replicas have sets of their own.

    Raises:
        ArgumentError: as said.
    """
    if options.scaling is not None and options.placement.num_replicas > 1:
        raise ArgumentError(
            "loss_scale with a bank and data parallelism",
            "a gradient that is not finite skips the step for all, and each task has its own sum of gradients",
            f"{options.placement.num_replicas} replicas",
            "pass one replica, or compute in bfloat16, which needs no scale",
        )


@dataclass
class Fit:
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
        if not self._places:
            return list(rows[0])
        led = [self._reshape(r, row, lead=True) for r, row in enumerate(rows)]
        found = []
        for k, (place, spec) in enumerate(self._places):
            shards = [shard for row in led for shard in _in_order(row[k])]
            shape, home = (len(rows), *rows[0][k].shape), NamedSharding(place.mesh, PartitionSpec(DATA, *spec))
            found.append(jax.make_array_from_single_device_arrays(shape, home, shards))
        return found

    def of_rows(self, leaves: Sequence[Any]) -> list[Sequence[Any]]:
        """For each replica the leaves of its set."""
        if not self._places:
            return [list(leaves)]
        parts = [shards_of(leaf) for leaf in leaves]  # all of them before any is given up
        rows = []
        for homes in self.homes:
            row = []
            for leaf, shards, home, (_, spec) in zip(leaves, parts, homes, self._places, strict=True):
                led = NamedSharding(home.mesh, PartitionSpec(DATA, *spec))
                mine = [shards[device] for device in home.mesh.devices.flat]
                row.append(jax.make_array_from_single_device_arrays((1, *leaf.shape[1:]), led, mine))
            rows.append(row)
        return [self._reshape(r, row, lead=False) for r, row in enumerate(rows)]

    @cached_property
    def _places(self) -> list[tuple[Submesh, PartitionSpec]]:
        """Where each leaf of a set lives, if each replica has its own."""
        names, placement = self.split([*self.engine.params, *self.engine.opts])[1], self.engine.placement
        places = [(placement[name.stage], name.ref) for name in names]
        return [(p, p.spec(ref)) for p, ref in places if isinstance(p, Submesh) and p.num_replicas > 1]

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


class Tasks:
    """A pipeline's bank.

    Args:
        bank: the sets.
    """

    def __init__(self, bank: Bank):
        check_bank(bank)
        self.bank = bank
        self._first: Fit | None = None
        self._fits: dict[Layout, Fit] = {}
        self._settled: tuple[Any, ...] = ()
        self._losses: dict[LossFn, LossFn] = {}

    def variables(self, shared: tuple[Any, ...], task: Hashable | None = None) -> tuple[Any, ...]:
        """What the joined loss is traced with: the user's parameters (and model state), and the shapes of a set."""
        task = self.bank.tasks[0] if task is None else task
        return (Joint(shared[0], self.bank.shapes(task)[0]), *shared[1:])

    def open(self, engine: Engine, shared: tuple[Any, ...], batch: Any, key: Any) -> Fit:
        """Take the engine that was settled for the first set; forget those of before."""
        layout = self.bank.layout(self.bank.tasks[0])
        self._settled = shared, batch, key
        self._first = _fit(engine, layout)
        self._fits = {layout: self._first}
        return self._first

    def opt_birth(self, engine: Engine, params: Sequence[Any]) -> list[Any]:
        """The optimizer leaves of the shared parameters."""
        assert self._first is not None
        names = [self.bank.tasks[0]] * len(self._first.homes)
        own = self.lend(names)
        count = self._first.counts[1]
        made = engine.opt_birth([*params, *own[:count]])
        self.keep(names, own)
        return made[: self._first.counts[2]]

    def engine(self, task: Any) -> Engine:
        """The engine for these tasks, told which replica runs which."""
        return self._fit_of(task).engine

    def _fit_of(self, task: Any) -> Fit:
        names = self.names(task)
        fit = self.fit(names[0])
        fit.engine.preparer.groups.set(names)
        return fit

    def other_bytes(self, task: Any) -> int:
        """Bytes of the parameters of all sets but one of these."""
        sizes = [sum(map(count_bytes, jax.tree.leaves(self.bank.shapes(name)[0]))) for name in self.bank.tasks]
        return sum(sizes) - sizes[self.bank.tasks.index(self.names(task)[0])]

    def waiting(self, engine: Engine) -> list[Name]:
        """The leaves of a set, once for each that may wait on the devices beside the one in use."""
        fit = _fit(engine, self.bank.layout(self.bank.tasks[0]))
        return fit.split([*engine.params, *engine.opts])[1] * (self.bank.shelf.slots - 1)

    def joined(self, loss_fn: LossFn | None) -> LossFn | None:
        """Another loss as one of the joined parameters; the same for the same function."""
        return None if loss_fn is None else self._losses.setdefault(loss_fn, join_losses(loss_fn))

    def names(self, task: Any) -> list[Hashable]:
        """The set of each replica.

        Raises:
            BankError: no task, one that the bank does not have, or not one a replica.
        """
        assert self._first is not None
        count = len(self._first.homes)
        if task is None:
            fix = f"pass task={self.bank.tasks[0]!r}, for example"
            raise BankError("task", "a step of a pipeline with a bank is of one task, or of one a replica", "none", fix)
        names = list(task) if isinstance(task, list) else [task] * count
        if len(names) != count:
            fix = f"pass a name, or a list of {count}"
            raise BankError("task", "a list of tasks has one a replica", f"{len(names)} tasks for {count} replicas", fix)
        different = {self.bank.layout(name) for name in names}
        if len(different) > 1:
            params = {name: jax.tree.leaves(self.bank.shapes(name)[0]) for name in names}
            got = [f"{name!r}: {', '.join(map(describe, leaves[:4]))}" for name, leaves in params.items()]
            rule = "replicas run one program, so their tasks' sets have the same shapes"
            raise BankError("task", rule, got, "give the replicas of a step tasks of one shape")
        return names

    def fit(self, name: Hashable) -> Fit:
        """The engine for sets of the shape of this one."""
        layout = self.bank.layout(name)
        if layout not in self._fits:
            assert self._first is not None
            shared, batch, key = self._settled
            engine = self._first.engine.like()
            engine.settle(self.variables(shared, name), batch, key)
            found = _fit(engine, layout)
            moved = self._first.engine.params[: found.counts[0]] != engine.params[: found.counts[0]]
            if moved or self._first.counts[0] != found.counts[0]:
                raise CutError(
                    f"task {name!r}",
                    "the shared parameters stay on their stages whatever the task",
                    "with this set the loss is cut elsewhere",
                    "pass cuts=[...] to the Pipeline, so that it is cut where you say",
                )
            self._fits[layout] = found
        return self._fits[layout]

    def lend(self, names: Sequence[Hashable]) -> list[Any]:
        """The leaves of the replicas' sets, at their stages, until they are given back."""
        fit = self.fit(names[0])
        lent: list[int] = []
        try:
            rows = []
            for r, name in enumerate(names):
                rows.append(self.bank.shelf.fetch(name, fit.homes[r], self._row(r)))
                lent.append(r)
            return fit.of_replicas(rows)
        except Exception:
            for r in lent:
                self.bank.shelf.release(names[r], (self._row(r),))
            raise

    def _row(self, replica: int) -> Hashable:
        return id(self), replica

    def give_back(self, names: Sequence[Hashable], leaves: Sequence[Any]) -> None:
        """Write the sets back that a step has changed: each from the first replica that ran it."""
        rows = self.fit(names[0]).of_rows(leaves)
        for name in dict.fromkeys(names):
            mine = [r for r, other in enumerate(names) if other == name]
            self.bank.shelf.store(name, rows[mine[0]], [self._row(r) for r in mine], [rows[r] for r in mine])

    def keep(self, names: Sequence[Hashable], leaves: Sequence[Any]) -> None:
        """Give sets back that nobody has changed."""
        for r, (name, row) in enumerate(zip(names, self.fit(names[0]).of_rows(leaves), strict=True)):
            self.bank.shelf.keep(name, row, self._row(r))

    def prefetch(self, task: Any) -> None:
        """Begin to bring the sets of a step to come; waits for nothing.

        Raises:
            BankError: as for a step; or all slots are in use.
        """
        names = self.names(task)
        homes = self.fit(names[0]).homes
        for r, name in enumerate(names):
            self.bank.shelf.prefetch(name, homes[r], self._row(r))

    @contextmanager
    def lent(self, task: Any, leaves: Sequence[Any]) -> Iterator[tuple[Engine, list[Any]]]:
        """An engine, and the leaves of a whole state; for what leaves it as it is."""
        names, fit = self.names(task), self._fit_of(task)
        with self._lend(names) as own:
            yield fit.engine, fit.join(leaves, own)
            self.keep(names, own)

    @contextmanager
    def _lend(self, names: Sequence[Hashable]) -> Iterator[list[Any]]:
        """The replicas' sets, to be given back; released if that does not happen."""
        own = self.lend(names)
        try:
            yield own
        except BaseException:
            for r, name in enumerate(names):
                self.bank.shelf.release(name, (self._row(r),))
            raise

    def step(self, task: Any, leaves: Sequence[Any], batch: Any, key: Any, *, donate: bool) -> Outcome:
        """A step on the leaves of Theta, which changes the replicas' sets too; they are written back."""
        names, fit = self.names(task), self._fit_of(task)
        fit.engine.plan("update", batch, key, donate=donate)  # what is refused is so before anything moves
        with self._lend(names) as own:
            outcome = fit.engine.run("update", fit.join(leaves, own), batch, key, donate=donate)
            shared, new = fit.split(outcome.leaves)
            self.give_back(names, new)
        return outcome._replace(leaves=shared)


def _in_order(array: Any) -> list[Any]:
    shards = shards_of(array)
    return [shards[device] for device in array.sharding.mesh.devices.flat]


def _fit(engine: Engine, layout: Layout) -> Fit:
    """What is to be known of an engine settled for a set."""
    assert engine.update is not None and engine.preparer.layout is not None
    params = engine.preparer.layout.params
    if any(jax.tree.leaves(params.task)) and len(jax.tree.leaves(params.task)) != layout.params.num_leaves:
        raise CutError(
            "theta[t]",
            "a loop over the layers of a task's own parameters is not cut",
            "a boundary inside such a loop",
            "pass cuts=[...] outside of it, or fewer stages",
        )
    shared = len(jax.tree.leaves(params.shared))
    own_opts = layout.opt_state.num_leaves
    counts = shared, layout.params.num_leaves, len(engine.opts) - own_opts, own_opts
    names = Fit(engine, counts, ()).split([*engine.params, *engine.opts])[1]
    rows = []
    for r in range(engine.placement.num_replicas):
        homes = []
        for name in names:
            place = engine.placement[name.stage]
            if isinstance(place, Submesh):
                mesh = Mesh(np.asarray(place.mesh.devices[r : r + 1]), (DATA, MODEL))
                homes.append(NamedSharding(mesh, place.spec(name.ref)))
            else:
                homes.append(SingleDeviceSharding(place))
        rows.append(tuple(homes))
    return Fit(engine, counts, tuple(rows))
