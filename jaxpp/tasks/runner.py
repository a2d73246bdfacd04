"""theta[t] inside a pipeline: a step's sets are brought to the stages that read them, and are written back after the step.

The state of a pipeline with a ``Bank`` holds Theta alone. For a step the leaves of one set for each replica join it, each on the
device of the stage that uses it. Sets of other shapes are cut at the same places and compiled once for each shape. Each of several
processes has the leaves of its own stages (``SetHomes``); processes that share a stage send one another what a step has changed.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.outcome import Outcome
from jaxpp.engine.tail import Tail
from jaxpp.engine.tracing import avals_of
from jaxpp.errors import ArgumentError, BankError, CutError
from jaxpp.lowering.builder import Name
from jaxpp.lowering.step import Leaves
from jaxpp.runtime.processes.here import devices_in, elsewhere, is_here, is_whole_here
from jaxpp.runtime.replica_groups import shards_of
from jaxpp.runtime.send import Send
from jaxpp.stages.axes import DATA
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.microbatch import batch_avals
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.own_params import Joint, join_losses
from jaxpp.stages.stacked import Slices, is_slices, joined
from jaxpp.tasks.bank import Bank, sets_of
from jaxpp.tasks.sets import BankSets, SetHomes, SetLayout
from jaxpp.types import Array, Batch, Device, Home, Key, Leaf, LossFn, TaskNames, Tree

_T = TypeVar("_T")
_Row = Sequence[Array]  # the leaves of one replica's set that this process holds


def check_bank(bank: object, where: str = "Pipeline(bank=...)") -> None:
    """Refuse what is no bank, or has no sets; ``where`` it was passed, for the message."""
    if not isinstance(bank, Bank) or not len(bank):
        got = "a bank without sets" if isinstance(bank, Bank) else type(bank).__name__
        fix = "pass jaxpp.Bank({name: params, ...}, optimizer)"
        raise BankError(where, "a pipeline is cut at the shapes of a bank's first set", got, fix)


def with_set(bank: Bank | None, variables: tuple[Tree, ...], task: Hashable | None = None) -> tuple[Tree, ...]:
    """What the loss is traced with: the user's variables, with a bank joined by the shapes of a set (by default its first)."""
    if bank is None:
        return variables
    check_bank(bank)
    return Joint(variables[0], bank.shapes(bank.tasks[0] if task is None else task)[0]), *variables[1:]


def waiting_names(bank: Bank | None, engine: Engine) -> list[Name]:
    """The leaves of a set, once for each set that may wait on the devices beside the set in use."""
    return [] if bank is None else engine.placed.names.own * (bank.host_store.slots - 1)


class Runner:
    """Runs steps whose parameters are all in the state; ``BankRunner`` runs steps that use sets of a bank."""

    def __init__(self, engine: Engine):
        self._engine = engine

    @property
    def first_engine(self) -> Engine:
        """The engine of the shapes with which a pipeline is opened."""
        return self._engine

    def engine(self, task: TaskNames) -> Engine:
        """The engine for these tasks; without a bank there are none."""
        if task is not None:
            raise ArgumentError(f"task={task!r}", "a task is a set of the pipeline's bank", "no bank", "pass Pipeline(bank=...)")
        return self._engine

    def loss(self, loss_fn: LossFn | None, called: str = "loss_fn") -> LossFn | None:
        """Another loss over the user's parameters, as the engine takes it; ``called`` is its name in messages."""
        return positional_key(loss_fn, 2 + self._engine.options.has_state, called)

    def joined(self, fn: Any) -> Any:
        """A function of the user's parameters, and of other things, as the engine calls it."""
        return fn

    def held(self, leaves: Leaves[_T]) -> Leaves[_T]:
        """The leaves of a step that the state holds."""
        return leaves

    def with_opt_state(self, leaves: Leaves[Array]) -> Leaves[Array]:
        """With the optimizer state of the parameters that the state holds."""
        with self.whole(self._any_task(), leaves) as (engine, whole):
            moments, shared = engine.make_opt_state(whole.all_params), len(engine.placed.names.opt)
        return self.held(leaves._replace(opt=moments[:shared], own_opt=moments[shared:]))

    def _any_task(self) -> TaskNames:
        return None

    @contextmanager
    def whole(self, task: TaskNames, leaves: Leaves[Array]) -> Iterator[tuple[Engine, Leaves[Array]]]:
        """An engine, and all leaves that its steps read; for what leaves everything as it is."""
        yield self.engine(task), leaves

    def step(
        self, task: TaskNames, given: Leaves[Array] | Tail, batch: Batch, key: Key | None, **options: Any
    ) -> Outcome[Array] | Tail:
        """A step on the leaves of a state, or beside what is left of the one before; ``options`` are those of ``Engine.step``."""
        return self.engine(task).step(given, batch, key, **options)

    def prefetch(self, task: TaskNames) -> None:
        """Begin to bring what a later step will use; waits for nothing."""
        self.engine(task)

    def other_bytes(self, task: TaskNames) -> int:
        """Bytes of the parameters of all sets but that of the step."""
        self.engine(task)
        return 0


class ReplicaSets:
    """Brings sets of one layout into the form that their engine takes, and out of it.

    ``rows`` are the replicas on devices of this process; ``homes`` has for each the shardings of the leaves that are held here.
    """

    def __init__(self, engine: Engine, sets: BankSets, layout: SetLayout):
        nodes = _nodes_of_set(engine)
        self._sliced = jax.tree.structure(nodes) if any(map(is_slices, nodes)) else None
        if jax.process_count() > 1 and self._sliced is not None:
            rule = "in several processes, each leaf of a set is whole in one of them"
            got = "a boundary inside a loop over its layers"
            raise CutError("theta[t]", rule, got, "pass cuts=[...] outside of it, or fewer stages")
        self.engine = engine
        names, placement = engine.placed.names.own, engine.placement
        replicas = range(placement.num_replicas)
        self._all = tuple(tuple(placement[name.stage].replica(r).sharding(name.ref) for name in names) for r in replicas)
        self.whole = SetHomes(tuple(map(_over_replicas, self._all[0], (placement[name.stage].devices for name in names))))
        self.rows = tuple(r for r in replicas if any(map(is_here, self._all[r])))
        self.homes = tuple(tuple(homes[k] for k in self.whole.here) for homes in self._all)
        if not all(is_whole_here(home) for r in self.rows for home in self.homes[r]):
            got = f"of process {jax.process_index()}: {len(self.rows)} replicas, and {len(self.whole.here)} leaves of a set"
            rule = "each stage of a replica is in one process, and a process has the same replicas of all its stages"
            raise BankError("Pipeline(bank=...)", rule, got, "put the axis model of the mesh inside the hosts")
        own = zip(names, engine.placed.shapes.own, strict=True)
        self._avals = [placement[name.stage].aval(name.ref, aval) for name, aval in own]
        self._away = {k: elsewhere(aval, aval.sharding) for k, aval in enumerate(self._avals) if k not in self.whole.here}
        self._spread = [k for k, processes in enumerate(self.whole.processes) if len(processes) > 1]
        self._sharded = cast("tuple[tuple[NamedSharding, ...], ...]", self.homes)  # for several replicas, which have sub-meshes
        self._reshaped: dict[Hashable, jax.stages.Wrapped] = {}
        self._crossers: dict[Hashable, Callable[..., Sequence[Array]]] = {}
        if jax.process_count() > 1:
            sets.divide(layout, self.whole)

    def as_held(self, leaves: Sequence[_T]) -> Sequence[_T | Slices]:
        """Something for each leaf of a set here, as the bank's store has it: the slices of a leaf under ``Slices``."""
        return leaves if self._sliced is None else self._sliced.unflatten(leaves)

    def of_replicas(self, rows: Sequence[_Row]) -> list[Array]:
        """The sets of the replicas here as arrays with the replicas as their first axis, and stand-ins for leaves elsewhere."""
        if len(self.homes) == 1:
            mine = [array for row in rows for array in row]
        else:
            led, mine = [self._reshape(r, row, lead=True) for r, row in zip(self.rows, rows, strict=True)], []
            for at, k in enumerate(self.whole.here):
                shards = [shard for row in led for shard in _in_order(row[at])]
                mine.append(jax.make_array_from_single_device_arrays(self._avals[k].shape, self._avals[k].sharding, shards))
        whole = self._away | dict(zip(self.whole.here, mine, strict=True))
        return [whole[k] for k in range(len(self._avals))]

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
        """The set of each task as this process writes it back: of the first replica here that ran the task, or sent by another."""
        changed: dict[Hashable, _Row] = {}
        for name in dict.fromkeys(names):
            ran = [r for r, other in enumerate(names) if other == name]
            mine = next((rows[r] for r in ran if r in rows), ())
            received = [array for leaf in self._spread for array in self._sent(leaf, ran, mine)]
            changed[name] = mine or received
        return changed

    def _sent(self, leaf: int, ran: Sequence[int], row: _Row) -> Sequence[Array]:
        """A leaf, sent to the processes that hold it and did not run its task; it is returned where it comes to."""
        homes, received = [home[leaf] for home in self._all], ()
        source = homes[ran[0]]
        have, first = {_process(homes[r]) for r in ran}, {_process(home): home for home in reversed(homes)}
        for process in sorted(first.keys() - have):
            key = leaf, source, first[process]
            if key not in self._crossers:
                aval = self.engine.placed.shapes.own[leaf]
                self._crossers[key] = Send(first[process], source, aval, taken=True).bind()
            values = [row[self.whole.here.index(leaf)]] if _process(source) == jax.process_index() else []
            received = self._crossers[key](*values) or received
        return received

    def _reshape(self, replica: int, row: _Row, *, lead: bool) -> _Row:
        """A set with an axis of one replica before the others, or without; donated to one program for each stage of its leaves."""
        by_mesh: dict[Mesh, list[int]] = {}
        for k, home in enumerate(self._sharded[replica]):
            by_mesh.setdefault(_mesh(home), []).append(k)
        leaves: dict[int, Array] = {}
        for mesh, mine in by_mesh.items():
            key = mesh, lead
            if key not in self._reshaped:
                specs = [self._sharded[replica][k].spec for k in mine]
                outs = [NamedSharding(mesh, PartitionSpec(DATA, *spec) if lead else spec) for spec in specs]
                run = (lambda *xs: [x[None] for x in xs]) if lead else (lambda *xs: [x[0] for x in xs])
                self._reshaped[key] = jax.jit(run, out_shardings=outs, donate_argnums=tuple(range(len(mine))))
            leaves.update(zip(mine, self._reshaped[key](*(row[k] for k in mine)), strict=True))
        return [leaves[k] for k in range(len(row))]


class BankRunner(Runner):
    """Runs steps of Theta and of sets of a bank; the engine was opened for the first set, with these variables, batch and key.

    One of another loss ``follows`` that of the first: the leaves of its sets live where they do there, and so do copies of them.
    """

    def __init__(
        self,
        bank: Bank,
        engine: Engine,
        variables: tuple[Tree, ...],
        batch: Batch,
        key: Key | None,
        follows: Runner | None = None,
    ):
        super().__init__(engine)
        self.bank, self._follows = bank, cast("BankRunner | None", follows)
        layout = sets_of(bank).layout(bank.tasks[0], "bank")
        self._first = ReplicaSets(engine, sets_of(bank), layout)
        self._replica_sets = {layout: self._first}
        self._opened = avals_of(variables), batch_avals(batch), None if key is None else avals_of(key)
        self._num_replicas = len(self._first.homes)
        if self._follows is not None:
            self._token = self._follows._token
            return
        self._token = token = object()  # copies of sets for other homes are in other rows of the bank's cache
        weakref.finalize(self, bank.host_store.forget, [(token, r) for r in range(self._num_replicas)])

    @property
    def first_engine(self) -> Engine:
        """That of the set which is the bank's first now."""
        return self._sets(self.bank.tasks[0]).engine

    def engine(self, task: TaskNames) -> Engine:
        """The engine for these tasks, told which replica runs which of them."""
        return self._engine_of(self.names(task))

    def _engine_of(self, names: list[Hashable]) -> Engine:
        engine = self._sets(names[0]).engine
        engine.preparer.groups.set(names)
        return engine

    def loss(self, loss_fn: LossFn | None, called: str = "loss_fn") -> LossFn | None:
        """Another loss over (params, task_params, ...) as a loss over the joined parameters; the same for the same function."""
        before = 2 + self._first.engine.options.has_state
        return None if loss_fn is None else positional_key(join_losses(positional_key(loss_fn, before + 1, called)), before)

    def joined(self, fn: Any) -> Any:
        """A function of (params, task_params, ...) as one of the joined parameters."""
        return join_losses(fn)

    def held(self, leaves: Leaves[_T]) -> Leaves[_T]:
        """The leaves of Theta."""
        return leaves.shared

    def _any_task(self) -> TaskNames:
        return [self.bank.tasks[0]] * self._num_replicas

    def other_bytes(self, task: TaskNames) -> int:
        """Bytes of the parameters of all sets but the first of these."""
        sizes = [sum(map(count_bytes, jax.tree.leaves(self.bank.shapes(name)[0]))) for name in self.bank.tasks]
        return sum(sizes) - sizes[self.bank.tasks.index(self.names(task)[0])]

    def names(self, task: TaskNames) -> list[Hashable]:
        """The set of each replica; all of them are in the bank, and of equal shapes."""
        count, some = self._num_replicas, next(iter(self.bank.tasks), "name")
        if task is None:
            fix = f"pass task={some!r}, for example"
            raise BankError("task", "a step of a pipeline with a bank runs one task, or one for each replica", "none", fix)
        names = list(task) if isinstance(task, list) else [task] * count
        if len(names) != count:
            fix = f"pass a name, or a list of {count}"
            got = f"{len(names)} tasks for {count} replica{'s' * (count != 1)}"
            raise BankError("task", "a list of tasks has one for each replica", got, fix)
        if len({sets_of(self.bank).layout(name, f"task={task!r}") for name in names}) > 1:
            params = {name: jax.tree.leaves(self.bank.shapes(name)[0]) for name in names}
            got = [f"{name!r}: {', '.join(map(describe, leaves[:4]))}" for name, leaves in params.items()]
            rule = "replicas run one program, so their tasks' sets have the same shapes"
            raise BankError("task", rule, got, "give the replicas of a step tasks of one shape")
        return names

    def _sets(self, name: Hashable) -> ReplicaSets:
        layout = sets_of(self.bank).layout(name, f"task={name!r}")
        if layout not in self._replica_sets:
            variables, batch, key = self._opened
            first, variables = self._first.engine, with_set(self.bank, variables, name)
            like = first.layout if self._follows is None else self._follows._sets(name).engine.layout
            engine = open_engine(first.options, first.optimizer, variables, batch, key, like=like)
            sets = ReplicaSets(engine, sets_of(self.bank), layout)
            if engine.placed.names.params != first.placed.names.params:
                rule = "the shared parameters stay on their stages whatever the task"
                fix = "pass cuts=[...] to the Pipeline, so that it is cut where you say"
                raise CutError(f"task {name!r}", rule, "with this set the loss is cut elsewhere", fix)
            self._replica_sets[layout] = sets
        return self._replica_sets[layout]

    def _row(self, replica: int) -> Hashable:
        return self._token, replica

    def _give_back(self, names: Sequence[Hashable], leaves: Sequence[Array]) -> None:
        sets, store = self._sets(names[0]), self.bank.host_store
        with self._lent(names):
            rows = sets.of_rows(leaves)
            for name, changed in sets.exchanged(names, rows).items():
                mine = [r for r in sets.rows if names[r] == name]
                try:
                    store.write_back(name, sets.as_held(changed), [self._row(r) for r in mine], [rows[r] for r in mine])
                except BankError as error:  # the state that the step has made must not be lost by it
                    store.tell_later(error)

    def prefetch(self, task: TaskNames) -> None:
        """Begin to bring the sets of a later step; waits for nothing."""
        names = self.names(task)
        sets = self._sets(names[0])
        for r in sets.rows:
            self.bank.host_store.prefetch(names[r], sets.as_held(sets.homes[r]), self._row(r))

    @contextmanager
    def _lend(self, names: Sequence[Hashable]) -> Iterator[list[Array]]:
        """The leaves of the replicas' sets, at their stages. The caller gives them back; after an exception, they are released."""
        sets, store = self._sets(names[0]), self.bank.host_store
        with self._lent(names):
            yield sets.of_replicas([store.fetch(names[r], sets.as_held(sets.homes[r]), self._row(r)) for r in sets.rows])

    @contextmanager
    def _lent(self, names: Sequence[Hashable]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._release(names)
            raise

    def _release(self, names: Sequence[Hashable]) -> None:
        for r, name in enumerate(names):  # some may not have been fetched
            self.bank.host_store.release(name, (self._row(r),))

    @contextmanager
    def whole(self, task: TaskNames, leaves: Leaves[Array]) -> Iterator[tuple[Engine, Leaves[Array]]]:
        """An engine, and the leaves of a state joined by those of the sets."""
        names = self.names(task)
        engine = self._engine_of(names)
        with self._lend(names) as own:
            yield engine, leaves.with_own(own, engine.placed.names)
            for r, row in self._sets(names[0]).of_rows(own).items():
                self.bank.host_store.keep(names[r], row, self._row(r))

    def step(
        self, task: TaskNames, given: Leaves[Array] | Tail, batch: Batch, key: Key | None, **options: Any
    ) -> Outcome[Array] | Tail:
        """A step on the leaves of Theta, which changes the replicas' sets too; the sets are written back.

        Where a step before is in flow, one of the same task ends first, as its parameters are the newest of that task.
        """
        names = self.names(task)
        engine = self._engine_of(names)
        if isinstance(given, Tail) and given.engine is not engine:
            given = given.outcome().state.shared  # of sets of other shapes
        engine.plan("update", batch, key, donate=options["donate"])  # what is refused is so before anything moves
        for name in names:
            self.bank.host_store.check_idle(name, "be changed by a step")
        with self._lend(names) as own:
            outcome = engine.step(given, batch, key, own=own, **options)
            if isinstance(outcome, Tail):
                outcome.then.append(lambda outcome: self._give_back(names, outcome.state.own))
                outcome.otherwise.append(lambda: self._release(names))
                self.bank.host_store.flows(names, outcome.outcome)
                return outcome
            self._give_back(names, outcome.state.own)
        return outcome._replace(state=outcome.state.shared)


def _nodes_of_set(engine: Engine) -> list[Leaf]:
    """The leaves of a set, parameters and optimizer state, as an engine holds them: whole, or ``Slices``."""
    own = engine.layout.params.task, engine.update.tree.unflatten([atom.aval for atom in engine.update.init_graph.outputs])[1]
    return [node for tree in own for node in jax.tree.leaves(joined(tree, lambda node: node), is_leaf=is_slices)]


def _over_replicas(home: Sharding, devices: Sequence[Device]) -> Sharding:
    """The sharding of a leaf that all replicas have, of that of one replica."""
    if not isinstance(home, NamedSharding) or len(home.device_set) == len(devices):
        return home
    return NamedSharding(Mesh(np.array(devices).reshape(-1, len(home.device_set)), home.mesh.axis_names), home.spec)


def _process(home: Home) -> int:
    return next(iter(devices_in(home))).process_index


def _mesh(home: Home) -> Mesh:
    return cast("NamedSharding", home).mesh  # pyright: ignore[reportReturnType]


def _in_order(array: Array) -> list[Array]:
    shards: dict[Device, Array] = shards_of(array)
    return [shards[device] for device in _mesh(array.sharding).devices.flat]
