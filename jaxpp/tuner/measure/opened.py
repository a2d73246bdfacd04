"""A problem opened on the devices: parameters that are made once, and engines whose steps run on copies of them."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import InitArguments, first_leaves, variables_of
from jaxpp.engine.tracing import Tracing
from jaxpp.observe.profile.merge import Company, Seen, SeenStep
from jaxpp.observe.profile.record import Stamps
from jaxpp.options import Options
from jaxpp.plan.leaves import Leaves
from jaxpp.plan.plan import Plan
from jaxpp.runtime.processes.clocks import align_clocks
from jaxpp.runtime.processes.exchange import rows_of_all, texts_of_all
from jaxpp.schedule.base import Schedule
from jaxpp.stages.remat.offload import Offload
from jaxpp.tuner.candidate import Candidate
from jaxpp.types import Array, Batch, Device, Key, LossFn, Tree

__all__ = ["Opened", "Problem", "lowest"]


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be trained, and on which devices.

    Attributes:
        loss_fn: as ``Pipeline`` takes it.
        optimizer: of all parameters.
        made: a function of a key that makes the parameters, or the parameters; with ``has_state`` the pair.
        batch: of a step.
        key: of the function, and of the loss if that takes one.
        devices: for the ranks, in order.
        options: other arguments of ``Pipeline``.
    """

    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    made: Tree
    batch: Batch
    key: Key | None
    devices: tuple[Device, ...] | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def options_of(self, schedule: Schedule, remat: Any, balance: str) -> Options:
        """The options of a pipeline."""
        counts = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches, "schedule": schedule}
        given = {"devices": self.devices} if "mesh" not in self.options else {}
        return Options.of(self.loss_fn, **counts, **given, remat=remat, balance=balance, **self.options)

    @cached_property
    def makes(self) -> bool:
        """Whether a function makes the parameters."""
        leaves = jax.tree.leaves(self.made)
        return callable(self.made) and len(leaves) == 1 and leaves[0] is self.made

    @cached_property
    def shapes(self) -> Tree:
        """The parameters, or the shapes of what the function makes."""
        return InitArguments(self.made, self.batch, self._init_key if self.makes else None, "jaxpp.tune").shapes

    @property
    def _init_key(self) -> Key:
        return jax.random.key(0) if self.key is None else self.key

    @cached_property
    def variables(self) -> Tree:
        """The parameters in host memory, made once; those that were given stay where they are."""
        if not self.makes:
            return self.made
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # a process without a CPU backend makes them on its first device
            host = jax.local_devices()[0]
        with jax.default_device(host):
            return jax.device_get(jax.jit(self.made)(self._init_key))

    def open(self, schedule: Schedule, remat: Any, balance: str) -> "Opened":
        """Trace, cut and place; nothing is compiled or made yet.

        Raises:
            JaxppError: the loss cannot be cut so, or the batch not be split so.
        """
        options = self.options_of(schedule, remat, balance)
        variables = variables_of(options, self.shapes)
        key = None
        if Tracing(options).takes_key(variables, self.batch):
            key = jax.random.key(0) if self.key is None else self.key
        return Opened(self, open_engine(options, self.optimizer, variables, self.batch, key), key)


@dataclass(eq=False)
class Opened:
    """An engine and, once it runs, a state.

    Attributes:
        problem: what is trained.
        engine: which runs it.
        key: of its steps.
    """

    problem: Problem
    engine: Engine
    key: Key | None
    _leaves: Leaves[Array] | None = None

    def ordered(self, candidate: Candidate) -> "Opened":
        """The same cuts and programs in another order, on other ranks, as a candidate of the same family has them."""
        remat = Offload(candidate.except_last) if candidate.remat == "offload" else candidate.remat
        engine, options = self.engine, self.problem.options_of(candidate.schedule, remat, candidate.balance)
        placed = dataclasses.replace(engine.placed, base=options.placement)
        preparer = engine.preparer.for_schedule(options, placed.placement)
        other = Engine(options, engine.optimizer, placed, preparer, engine.programs, engine.opened_at)
        return Opened(self.problem, other, self.key)

    @cached_property
    def plan(self) -> Plan:
        """A step, compiled, as all processes together run it."""
        return self.engine.plan("update", self.problem.batch, self.key)[0] if self.engine.alone else self._company.plan

    @cached_property
    def _company(self) -> Company:
        self.engine.plan("update", self.problem.batch, self.key)
        return Company(self.engine, self.problem.batch, self.key, align_clocks())

    def first(self) -> Leaves[Array]:
        """A state of its own on the devices."""
        engine, names, homes = self.engine, self.engine.placed.names, self.engine.placed.homes
        found = first_leaves(engine, InitArguments(self.problem.variables, self.problem.batch, None, "jaxpp.tune"), names, homes)
        made, shared = engine.make_opt_state(found.all_params), len(names.opt)
        return found._replace(opt=made[:shared], own_opt=made[shared:], loss_scale=engine.make_loss_scale())

    def release(self) -> None:
        """Let go of the state."""
        self._leaves = None

    def step(self, observer: Stamps | None = None) -> SeenStep:
        """Run a step to its end."""
        leaves = self.first() if self._leaves is None else self._leaves
        self._leaves = None
        begun = time.perf_counter()
        if observer is not None:
            observer.begin()
        outcome = self.engine.run("update", leaves, self.problem.batch, self.key, observer=observer)
        jax.block_until_ready(outcome)
        ended = time.perf_counter()
        self._leaves = outcome.state
        return SeenStep(begun, ended, () if observer is None else tuple(observer.stamps))

    def timed(self) -> float:
        """Seconds of a step; of several processes the longest."""
        seen = self.step()
        if self.engine.alone:
            return seen.ended - seen.begun
        return float(rows_of_all(np.array([seen.ended - seen.begun], np.float32)).max())

    def told(self, steps: Sequence[SeenStep]) -> list[SeenStep]:
        """Steps as all processes saw them: each tells the others, and all return the same."""
        if self.engine.alone or not steps:
            return list(steps)
        return list(self._company.seen(Seen(tuple(steps), "", 0.0)).steps)


def lowest(room: int | None, *, alone: bool) -> int | None:
    """The least room that any process has; of one process its own. None if none says how much it has."""
    told = [room] if alone else [json.loads(text) for text in texts_of_all(json.dumps(room))]
    return min((each for each in told if each is not None), default=None)
