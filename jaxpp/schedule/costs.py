"""``StepCosts``: what a step is made of, the one record in which costs come to a clock.

Whoever simulates a step, predicts or bounds it, or looks for a better order of it, says in this what its actions take.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import Number, Timing, handed_over, queues, turns
from jaxpp.schedule.offload import offloads

_Stages = tuple[Number, ...]


@dataclass(frozen=True)
class StepCosts:
    """What a step takes, in one unit of time; what is left out takes none. Where B is missing, it takes I and W together."""

    actions: Mapping[Kind, _Stages]  # on its device for one microbatch, once it was handed over
    dispatch: Mapping[Kind, _Stages] = field(default_factory=dict)  # to hand over an action with the sends of its results
    transfer: _Stages = ()  # between stages s and s + 1 on different ranks, up to the arrival; of a ring, back to stage 0 too
    offload: _Stages = ()  # of the residuals of one microbatch to host memory, and as long back
    offload_dispatch: _Stages = ()  # to hand over one of these copies
    before: Number = 0  # until the first action is handed over: splitting the batch, what is done once per step
    after: _Stages = ()  # what a stage does after its last action: sums, and the update
    after_dispatch: Number = 0  # to hand over all of it
    visit: _Stages = ()  # of a stage's parameters from host memory, if they wait there: each time that its rank turns to it
    visit_state: _Stages = ()  # and of the optimizer's state, for the last turn
    capacity: Number = math.inf  # how many ranks compute at once at full speed: fewer than all where CPU devices share cores
    residuals: _Stages = ()  # bytes that a stage keeps of a microbatch, for a search in the room of each rank

    def of(self, action: Action) -> Number:
        """What an action takes on its device."""
        stage, kind, _ = action
        if kind in self.actions or kind != Kind.B:
            return self.actions[kind][stage]
        return self.actions[Kind.I][stage] + self.actions[Kind.W][stage]

    @property
    def whole(self) -> _Stages:
        """What each stage computes for a microbatch where backwards are split."""
        return tuple(map(sum, zip(*(self.actions[kind] for kind in (Kind.F, Kind.I, Kind.W)), strict=True)))

    def handing(self, action: Action) -> Number:
        """What it takes to hand over an action; B as I where it was not measured itself."""
        kind = action.kind if action.kind in self.dispatch or action.kind != Kind.B else Kind.I
        return self.dispatch[kind][action.stage] if self.dispatch else 0

    def timing(
        self,
        schedule: Schedule,
        offload: Sequence[int | None] = (),
        processes: Sequence[int] = (),
        *,
        overlap: bool = True,
        queued: bool = False,
    ) -> Timing:
        """What the clock of a schedule is told; ``offload`` is ``except_last`` of each stage, ``processes`` those of the ranks."""
        owner, order = schedule.stage_to_rank, schedule.order
        hops = zip(self.transfer, itertools.pairwise((*owner, owner[0])), strict=False)
        moved, dispatched = offloads(schedule.rows, offload) if offload else (), None
        if self.dispatch or self.before or self.offload_dispatch:
            dispatchers = [processes[rank] if processes else 0 for rank in owner]
            handed = handed_over(
                order, {action: self.handing(action) for action in order}, dispatchers, moved, self.offload_dispatch
            )
            dispatched = {action: self.before + time for action, time in handed.items()}
        none = (0,) * len(owner)
        visited = self.visit or none, self.visit_state or none
        visits = turns(schedule.rows, *visited) if any(itertools.chain(*visited)) else {}
        return Timing(
            {action: self.of(action) for action in order},
            tuple(0 if here == there else hop for hop, (here, there) in hops),
            dispatched,
            overlap,
            moved,
            self.offload,
            self.capacity,
            visits,
            queues(order, schedule.rows, owner, schedule.num_groups) if queued else {},
        )

    def visited(self, brought: tuple[Sequence[int], Sequence[int]], per_byte: Sequence[float]) -> "StepCosts":
        """The same where a turn of each stage brings so many bytes of parameters, and its last so many more, over a link."""
        params, state = (tuple(size * each for size, each in zip(own, per_byte, strict=True)) for own in brought)
        return dataclasses.replace(self, visit=params, visit_state=state)

    def recomputed(self, stages: Sequence[float]) -> "StepCosts":
        """The same where each stage runs so much of its forward once more in each backward: in B, and in I if there is one."""
        actions = dict(self.actions)
        for kind in (Kind.B, Kind.I):
            if kind in actions:
                rows = zip(actions[kind], actions[Kind.F], stages, strict=True)
                actions[kind] = tuple(own + forward * again for own, forward, again in rows)
        return dataclasses.replace(self, actions=actions)

    def stretched(self, factor: float) -> "StepCosts":
        """The same with actions, and what follows them, that take so many times as long."""
        return self.scaled(factor, "actions", "after")

    def slowed(self, factor: float) -> "StepCosts":
        """The same with everything but copies to the host so many times as long."""
        return self.stretched(factor).scaled(factor, "dispatch", "transfer", "before", "after_dispatch")

    def scaled(self, factor: float, *names: str) -> "StepCosts":
        """The same with these fields multiplied."""

        def times(value: Number | _Stages | Mapping[Kind, _Stages]) -> Number | _Stages | dict[Kind, _Stages]:
            if isinstance(value, Mapping):
                return {kind: tuple(factor * each for each in own) for kind, own in value.items()}
            return tuple(factor * each for each in value) if isinstance(value, tuple) else factor * value

        return dataclasses.replace(self, **{name: times(getattr(self, name)) for name in names})
