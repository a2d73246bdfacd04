"""What is profiled: a training step, or forwards, which are run again and again and do the same each time."""

from collections.abc import Sequence

import jax

from jaxpp.engine.engine import Engine
from jaxpp.observe.memory.ledger import Ledger, homes_of, sample_step
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.observe.profile.joined import RingPass, join_liveness, join_plans, schedule_of
from jaxpp.plan.plan import Plan
from jaxpp.plan.step import Leaves
from jaxpp.runtime.execute import Observer
from jaxpp.schedule.base import Schedule
from jaxpp.types import Array, Batch, Key, Tree

__all__ = ["Forwards", "Steps", "Work"]


class Work:
    """What is run under the profiler.

    Attributes:
        engine: whose placement and programs it uses.
        plan: what runs at each run, as one plan.
        schedule: the order of its actions.
        passes: of a generation, which passes these are.
    """

    engine: Engine
    plan: Plan
    schedule: Schedule
    passes: Sequence[RingPass] = ()

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand everything over once; returns what to wait for."""
        raise NotImplementedError

    def watched_plan(self) -> Plan | None:
        """The plan that is run if the run is ``watched``; None if it cannot be."""
        raise NotImplementedError

    def ledger(self) -> Ledger:
        """What memory holds meanwhile."""
        raise NotImplementedError


class Steps(Work):
    """One training step after the other, on a state of its own."""

    def __init__(self, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None):
        self.engine, self.batch, self.key = engine, batch, key
        self.leaves, self.schedule = engine.copy(leaves), engine.options.schedule
        self.plan, _ = engine.plan("update", batch, key)

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand a step over; the norm of the gradients is waited for too, or its program would run in the next step."""
        outcome = self.engine.run("update", self.leaves, self.batch, self.key, observer=observer, watched=watched)
        self.leaves = outcome.state
        return outcome

    def watched_plan(self) -> Plan:
        """Of a step of which every instruction can be asked whether it is done."""
        return self.engine.plan("update", self.batch, self.key, watched=True)[0]

    def ledger(self) -> Ledger:
        """Of one more step."""
        return sample_step(self.engine, self.leaves, self.batch, self.key)[0]


class Forwards(Work):
    """The forwards of a batch, or of several like it that follow one another as in a stream.

    Args:
        engine: of the function.
        leaves: the parameters, and the model state if there is one.
        batch: of each.
        key: of the first, from which those of several are folded.
        num_batches: how many follow one another.
    """

    def __init__(self, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, num_batches: int):
        self.engine, self.batch, self.leaves = engine, batch, leaves._replace(opt=(), own_opt=(), loss_scale=())
        self.keys: list[Key | None] = [key] * num_batches
        if num_batches > 1 and key is not None:
            self.keys = [jax.random.fold_in(key, k) for k in range(num_batches)]

        self.plan = self._joined(engine.plan("forward", batch, self.keys[0])[0])
        name = "forward" if num_batches == 1 else f"stream of {num_batches} batches"
        self.schedule = schedule_of(self.plan, engine.options.schedule.stage_to_rank, name)

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand all batches over."""
        options = {"observer": observer, "watched": watched}
        return [self.engine.run("forward", self.leaves, self.batch, key, **options) for key in self.keys]

    def watched_plan(self) -> Plan:
        """Of all batches, if every instruction can be asked whether it is done."""
        return self._joined(self.engine.plan("forward", self.batch, self.keys[0], watched=True)[0])

    def ledger(self) -> Ledger:
        """Of one batch, looked at; of several, from shapes."""
        engine, batch, key = self.engine, self.batch, self.keys[0]
        if len(self.keys) == 1:
            return sample_step(engine, self.leaves, batch, key, "forward")[0]
        _, lowered = engine.plan("forward", batch, key)
        one = step_liveness(engine, lowered, homes_of(lowered, batch, key), compiled=True)
        return Ledger(join_liveness([one] * len(self.keys)), (), {})

    def _joined(self, plan: Plan) -> Plan:
        _, lowered = self.engine.plan("forward", self.batch, self.keys[0])
        count = len(lowered.step.sizes)
        return join_plans([plan] * len(self.keys), [count * k for k in range(len(self.keys))])
