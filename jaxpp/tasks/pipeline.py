"""theta[t] inside a pipeline: the sets that a step uses are brought to the stages that read them, and written back after it.

A pipeline with a ``Bank`` trains Theta and one theta[t] a replica. Its state holds Theta alone; before a step the leaves of a set
are put among those of the state, each on the device of the stage that uses it, and afterwards they go back to the bank. Sets of
other shapes are cut at the same places and compiled once a shape.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jaxpp.errors import ArgumentError, BankError, CutError
from jaxpp.options import Settings
from jaxpp.plan.builder import Name
from jaxpp.runtime.engine import Engine, Outcome
from jaxpp.runtime.prepare import avals_of
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.joint import Joint, join_losses
from jaxpp.stages.loss.key import positional_key
from jaxpp.stages.loss.microbatch import batch_avals
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.fitted import Fitted
from jaxpp.tasks.set_layout import Layout
from jaxpp.types import LossFn

__all__ = ["Tasks", "check_bank", "check_scaling"]


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


class Tasks:
    """A pipeline's bank.

    Args:
        bank: the sets.
    """

    def __init__(self, bank: Bank):
        check_bank(bank)
        self.bank = bank
        self._first: Fitted | None = None
        self._fitted: dict[Layout, Fitted] = {}
        self._settled: tuple[Any, ...] = ()
        self._losses: dict[LossFn, LossFn] = {}
        self._token, self._forget = object(), weakref.finalize(self, bank.shelf.forget, ())

    def variables(self, shared: tuple[Any, ...], task: Hashable | None = None) -> tuple[Any, ...]:
        """What the joined loss is traced with: the user's parameters (and model state), and the shapes of a set."""
        check_bank(self.bank)
        task = self.bank.tasks[0] if task is None else task
        return (Joint(shared[0], self.bank.shapes(task)[0]), *shared[1:])

    def open(self, engine: Engine, shared: tuple[Any, ...], batch: Any, key: Any) -> Fitted:
        """Take the engine that was settled for the first set; forget those of before."""
        layout = self.bank.layout(self.bank.tasks[0])
        self._forget()
        self._token = token = object()  # copies for other homes are on other rows
        rows = [(token, r) for r in range(engine.placement.num_replicas)]
        self._forget = weakref.finalize(self, self.bank.shelf.forget, rows)
        self._settled = avals_of(shared), batch_avals(batch), None if key is None else avals_of(key)
        self._first = Fitted.of(engine, layout)
        self._fitted = {layout: self._first}
        return self._first

    def opt_birth(self, engine: Engine, params: Sequence[Any]) -> list[Any]:
        """The optimizer leaves of the shared parameters."""
        assert self._first is not None
        names = [self.bank.tasks[0]] * len(self._first.homes)
        with self._lend(names) as own:
            made = engine.opt_birth([*params, *own[: self._first.counts[1]]])
            self.keep(names, own)
        return made[: self._first.counts[2]]

    def engine(self, task: Any) -> Engine:
        """The engine for these tasks, told which replica runs which."""
        return self._told(self.names(task)).engine

    def _told(self, names: Sequence[Hashable]) -> Fitted:
        fit = self.fitted(names[0])
        fit.engine.preparer.groups.set(names)
        return fit

    def other_bytes(self, task: Any) -> int:
        """Bytes of the parameters of all sets but one of these."""
        sizes = [sum(map(count_bytes, jax.tree.leaves(self.bank.shapes(name)[0]))) for name in self.bank.tasks]
        return sum(sizes) - sizes[self.bank.tasks.index(self.names(task)[0])]

    def waiting(self, engine: Engine) -> list[Name]:
        """The leaves of a set, once for each that may wait on the devices beside the one in use."""
        fit = Fitted.of(engine, self.bank.layout(self.bank.tasks[0]))
        return fit.split([*engine.params, *engine.opts])[1] * (self.bank.shelf.slots - 1)

    def joined(self, loss_fn: LossFn | None) -> LossFn | None:
        """Another loss as one of the joined parameters; the same for the same function."""
        if loss_fn is None:
            return None
        assert self._first is not None
        before = 2 + self._first.engine.settings.has_state
        found: LossFn = positional_key(loss_fn, before + 1)
        if found not in self._losses:
            self._losses[found] = positional_key(join_losses(found), before)
        return self._losses[found]

    def names(self, task: Any) -> list[Hashable]:
        """The set of each replica.

        Raises:
            BankError: no task, one that the bank does not have, not one a replica, or of different shapes.
        """
        assert self._first is not None
        count, some = len(self._first.homes), next(iter(self.bank.tasks), "name")
        if task is None:
            fix = f"pass task={some!r}, for example"
            raise BankError("task", "a step of a pipeline with a bank is of one task, or of one a replica", "none", fix)
        names = list(task) if isinstance(task, list) else [task] * count
        if len(names) != count:
            fix = f"pass a name, or a list of {count}"
            raise BankError("task", "a list of tasks has one a replica", f"{len(names)} tasks for {count} replicas", fix)
        for name in names:
            self.bank.check_name(name, f"task={task!r}")
        different = {self.bank.layout(name) for name in names}
        if len(different) > 1:
            params = {name: jax.tree.leaves(self.bank.shapes(name)[0]) for name in names}
            got = [f"{name!r}: {', '.join(map(describe, leaves[:4]))}" for name, leaves in params.items()]
            rule = "replicas run one program, so their tasks' sets have the same shapes"
            raise BankError("task", rule, got, "give the replicas of a step tasks of one shape")
        return names

    def fitted(self, name: Hashable) -> Fitted:
        """The engine for sets of the shape of this one."""
        layout = self.bank.layout(name)
        if layout not in self._fitted:
            assert self._first is not None
            shared, batch, key = self._settled
            engine = self._first.engine.like()
            engine.settle(self.variables(shared, name), batch, key)
            found = Fitted.of(engine, layout)
            moved = self._first.engine.params[: found.counts[0]] != engine.params[: found.counts[0]]
            if moved or self._first.counts[0] != found.counts[0]:
                raise CutError(
                    f"task {name!r}",
                    "the shared parameters stay on their stages whatever the task",
                    "with this set the loss is cut elsewhere",
                    "pass cuts=[...] to the Pipeline, so that it is cut where you say",
                )
            self._fitted[layout] = found
        return self._fitted[layout]

    def _fetch(self, names: Sequence[Hashable]) -> list[Any]:
        """The leaves of the replicas' sets, at their stages, until they are given back."""
        fit = self.fitted(names[0])
        try:
            return fit.of_replicas([self.bank.shelf.fetch(name, fit.homes[r], self._row(r)) for r, name in enumerate(names)])
        except BaseException:
            self._release(names)
            raise

    def _release(self, names: Sequence[Hashable]) -> None:
        """Give sets back as if they had not been fetched, those among them that were not too."""
        for r, name in enumerate(names):
            self.bank.shelf.release(name, (self._row(r),))

    def _row(self, replica: int) -> Hashable:
        return self._token, replica

    def give_back(self, names: Sequence[Hashable], leaves: Sequence[Any]) -> None:
        """Write the sets back that a step has changed: each from the first replica that ran it."""
        rows = self.fitted(names[0]).of_rows(leaves)
        for name in dict.fromkeys(names):
            mine = [r for r, other in enumerate(names) if other == name]
            try:
                self.bank.shelf.store(name, rows[mine[0]], [self._row(r) for r in mine], [rows[r] for r in mine])
            except BankError as error:  # the state that the step has made must not be lost by it
                self.bank.shelf.tell_later(error)

    def keep(self, names: Sequence[Hashable], leaves: Sequence[Any]) -> None:
        """Give sets back that nobody has changed."""
        for r, (name, row) in enumerate(zip(names, self.fitted(names[0]).of_rows(leaves), strict=True)):
            self.bank.shelf.keep(name, row, self._row(r))

    def prefetch(self, task: Any) -> None:
        """Begin to bring the sets of a step to come; waits for nothing.

        Raises:
            BankError: as for a step; or all slots are in use.
        """
        names = self.names(task)
        homes = self.fitted(names[0]).homes
        for r, name in enumerate(names):
            self.bank.shelf.prefetch(name, homes[r], self._row(r))

    @contextmanager
    def whole(self, task: Any, leaves: Sequence[Any]) -> Iterator[tuple[Engine, list[Any]]]:
        """An engine, and the leaves of a whole state; for what leaves it as it is."""
        names = self.names(task)
        fit = self._told(names)
        with self._lend(names) as own:
            yield fit.engine, fit.join(leaves, own)
            self.keep(names, own)

    @contextmanager
    def _lend(self, names: Sequence[Hashable]) -> Iterator[list[Any]]:
        """The replicas' sets, to be given back; released if that does not happen."""
        own = self._fetch(names)
        try:
            yield own
        except BaseException:
            self._release(names)
            raise

    def step(
        self, task: Any, leaves: Sequence[Any], batch: Any, key: Any, *, donate: bool, hold: Callable[[], None] | None = None
    ) -> Outcome:
        """A step on the leaves of Theta, which changes the replicas' sets too; they are written back."""
        names = self.names(task)
        fit = self._told(names)
        fit.engine.plan("update", batch, key, donate=donate)  # what is refused is so before anything moves
        for name in names:
            self.bank.shelf.check_idle(name, "be changed by a step")
        with self._lend(names) as own:
            outcome = fit.engine.run("update", fit.join(leaves, own), batch, key, donate=donate, hold=hold)
            shared, new = fit.split(outcome.leaves)
            self.give_back(names, new)
        return outcome._replace(leaves=shared)
