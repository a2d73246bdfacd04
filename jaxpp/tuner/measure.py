"""What a family's step is made of: the schedule with which it is measured, and what its costs are, read off the steps that ran.

In some steps the host waited for each instruction before it handed over the next: there each program and each send took what it
takes alone. Other steps ran at full speed: there the host took for each instruction what it takes it to hand one over. A very small
program runs in the thread that hands it over; it counts as what the host takes, and as next to nothing on its device.

Then the costs are made to agree with a whole step (``fitted``), since what ranks that share cores take from one another shows only
when they run together.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from jaxpp.observe.evaluate import StepCosts, step_seconds
from jaxpp.observe.profile.merge import SeenStep
from jaxpp.observe.profile.spans import durations_of
from jaxpp.plan.plan import Instruction, Plan
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.tuner.knobs import Candidate, Family

__all__ = ["fitted", "one_at_a_time", "plain_schedule", "step_costs"]

_HALVINGS = 30
_MOST = 4.0
"""How much longer actions may take in a step than alone, or less long."""


def plain_schedule(family: Family, num_ranks: int) -> Schedule:
    """A schedule that holds few residuals, on as many ranks as the candidates of the family have."""
    stages, microbatches = family.num_stages, family.num_microbatches
    per_rank, rest = divmod(stages, num_ranks)
    if per_rank == 2 and not rest and family.splits:
        return make("zb-v", num_ranks, microbatches)
    if per_rank > 1 and not rest and not family.splits:
        name = "interleaved" if SCHEDULES["interleaved"].allows(num_ranks, microbatches) else "looped-bfs"
        return make(name, num_ranks, microbatches, per_rank)
    return make("zb-h1" if family.splits else "1f1b", stages, microbatches)


def one_at_a_time(family: Family, like: Schedule) -> Schedule:
    """The same actions on the same ranks, one microbatch after the other: it holds the residuals of one.

    Example:
        >>> family = Family(2, 2, "least", "flops", splits=True)
        >>> [" ".join(map(str, row)) for row in one_at_a_time(family, plain_schedule(family, 2)).rows]
        ['0F0 0I0 0W0 0F1 0I1 0W1', '1F0 1I0 1W0 1F1 1I1 1W1']
    """
    backward = (Kind.I, Kind.W) if family.splits else (Kind.B,)

    def row(rank: int) -> ActionRow:
        stages = [stage for stage, owner in enumerate(like.stage_to_rank) if owner == rank]
        actions = list[Action]()
        for i in range(family.num_microbatches):
            actions += [Action(stage, Kind.F, i) for stage in stages]
            actions += [Action(stage, kind, i) for stage in reversed(stages) for kind in backward]
        return tuple(actions)

    return Schedule("one at a time", tuple(map(row, range(like.num_ranks))), like.stage_to_rank)


def step_costs(plan: Plan, num_stages: int, free: Sequence[SeenStep], apart: Sequence[SeenStep]) -> StepCosts:
    """The costs of a family; of copies to host memory nothing is known here, nor of what ranks share.

    Args:
        plan: of the steps.
        num_stages: of the pipeline.
        free: steps at full speed.
        apart: steps in which each instruction ran alone.
    """
    lines = plan.instructions
    alone = durations_of(plan, [step.seconds for step in apart])
    handing = durations_of(plan, [[stamp.handed - stamp.begun for stamp in step.stamps] for step in free])
    acting = [number for number, line in enumerate(lines) if line.about.action is not None]
    first, last = acting[0], acting[-1]
    taken: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    handed: defaultdict[Action, float] = defaultdict(float)
    now = None
    for number in range(first, last + 1):  # lines of no action count to the one before them
        about = lines[number].about
        now = about.action or now
        assert isinstance(now, Action), "the first of these lines is an action"
        handed[now] += handing[number]
        if about.program and about.action is not None:
            taken[now.kind, now.stage].append(alone[number])
    dispatch: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, seconds in handed.items():
        dispatch[action.kind, action.stage].append(seconds)
    kinds = sorted({kind for kind, _ in taken}, key=list(Kind).index)

    def table(pools: Mapping[tuple[Kind, int], Sequence[float]]) -> Mapping[Kind, tuple[float, ...]]:
        return {kind: tuple(statistics.median(pools.get((kind, stage), (0.0,))) for stage in range(num_stages)) for kind in kinds}

    after = [0.0] * num_stages
    for number in range(last + 1, len(lines)):
        after[lines[number].about.stage] += alone[number]
    return StepCosts(
        actions=table(taken),
        dispatch=table(dispatch),
        transfer=_transfers(lines, alone, num_stages),
        offload=(0.0,) * num_stages,
        offload_dispatch=(0.0,) * num_stages,
        before=_before(lines, first, free, alone),
        after=tuple(after),
        after_dispatch=sum(handing[last + 1 :]),
    )


def _transfers(lines: Sequence[Instruction], alone: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """What crosses each boundary for one action; a boundary between stages of one device is like the others."""
    sums: defaultdict[tuple[int, Action], float] = defaultdict(float)
    for number, line in enumerate(lines):
        action, target = line.about.action, line.about.stage
        if line.about.sends and isinstance(action, Action) and target != action.stage:
            sums[target - 1 if target > action.stage else target, action] += alone[number]
    pools: defaultdict[int, list[float]] = defaultdict(list)
    for (boundary, _), seconds in sums.items():
        pools[boundary].append(seconds)
    usual = statistics.median(sums.values()) if sums else 0.0
    return tuple(statistics.median(pools[s]) if pools[s] else usual for s in range(num_stages - 1))


def _before(lines: Sequence[Instruction], first: int, free: Sequence[SeenStep], alone: Sequence[float]) -> float:
    """From the beginning of a step until its first action can begin: it is handed over, and its stage has been set up."""
    times = []
    for step in free:
        ready = step.stamps[first].begun - step.begun
        for number in range(first):
            if lines[number].about.stage == lines[first].about.stage:
                ready = max(ready, step.stamps[number].handed - step.begun + alone[number])
        times.append(ready)
    return statistics.median(times)


def fitted(costs: StepCosts, candidate: Candidate, seconds: float, *, shared: bool, processes: Sequence[int] = ()) -> StepCosts:
    """The costs with which a step of this candidate is predicted as it was measured, if there are any.

    Each program was measured alone, where it has the machine for itself. On forced CPU devices, ranks share the cores, and a
    program that runs on two threads alone has one of them beside another. So the number of ranks that compute at full speed at once
    is the one for which the prediction and the step agree; what is left over is how much longer, or less long, actions take in a
    step.

    Args:
        costs: of its family.
        candidate: the one that was run.
        seconds: that its step took.
        shared: whether its ranks share what they compute with.
        processes: the process of each rank, as ``step_seconds`` takes it.
    """
    schedule, most = candidate.schedule, float(candidate.schedule.num_ranks)

    def predicted(with_these: StepCosts) -> float:
        return step_seconds(schedule, with_these, candidate.offload, processes)

    def with_capacity(inverse: float) -> StepCosts:
        return dataclasses.replace(costs, capacity=1 / inverse)

    def agreeing(changed: Callable[[float], StepCosts], low: float, high: float) -> StepCosts:
        """The costs between two numbers that agree best; the prediction grows with the number."""
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if predicted(changed(middle)) > seconds else (middle, high)
        return changed((low + high) / 2)

    found = agreeing(with_capacity, 1 / most, 1.0) if shared else dataclasses.replace(costs, capacity=most)
    return found if abs(predicted(found) / seconds - 1) < 0.01 else agreeing(found.stretched, 1 / _MOST, _MOST)
